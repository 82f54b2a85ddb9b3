"""Guards wherever torch runs an op: transforms, tracing, odd tensors, an index that was changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from tests.cpu_guards import Collector, deterministic, positions

TABLE = torch.zeros(3, 2)
GOOD, BAD = tensor([0, 2]), tensor([0, 3])


class Plain(Tensor):
    """A subclass of the user's that changes nothing."""


class Functional(Tensor):
    """A subclass of the user's that sees every function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def lookup(indices: Tensor) -> Tensor:
    return F.embedding(indices, TABLE)


def jagged(*rows: list[int]) -> Tensor:
    return torch.nested.nested_tensor([tensor(row) for row in rows], layout=torch.jagged)


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "vmap": lambda ids: torch.vmap(lookup)(ids.unsqueeze(1)),
    "vmap over indexing": lambda ids: torch.vmap(lambda at: TABLE[at])(ids),
    "jvp": lambda ids: torch.func.jvp(lambda x: x[ids], (TABLE,), (TABLE,)),
    "vmap of grad": lambda ids: torch.vmap(
        torch.func.grad(lambda x, at: F.cross_entropy(x[None], at[None]))
    )(torch.zeros(2, 3), ids),
    "functionalize": lambda ids: torch.func.functionalize(
        lambda x: x.clone().index_put_((ids,), tensor(1.0))
    )(TABLE),
    "checkpoint": lambda ids: checkpoint(lookup, ids, use_reentrant=False),
    "make_fx": lambda ids: make_fx(lookup)(ids),
    "jit": lambda ids: torch.jit.script(nn.Embedding(3, 2))(ids),
    "inference": torch.inference_mode()(lookup),
    "jagged": lambda ids: lookup(jagged([0, 1], ids.tolist())),
    "subclass": lambda ids: lookup(ids.as_subclass(Plain)),
    "function subclass": lambda ids: lookup(ids.as_subclass(Functional)),
    "parameter": lambda ids: F.embedding(ids, nn.Parameter(TABLE)),
    "quantised": lambda ids: torch.quantize_per_tensor(TABLE, 0.1, 0, torch.quint8)[ids],
    "complex": lambda ids: torch.zeros(3, dtype=torch.complex64)[ids],
    "conjugate": lambda ids: torch.zeros(3, dtype=torch.complex64).conj()[ids],
    "negative bit": lambda ids: torch.zeros(3, dtype=torch.complex64).conj().imag[ids],
    "sparse": lambda ids: torch.eye(3).to_sparse().index_select(0, ids),
    "deterministic": lambda ids: deterministic()(TABLE.clone().index_add_)(0, ids, TABLE[:2]),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_an_op_is_guarded(guards: Collector, way: str) -> None:
    """The same lookup is silent at the bound and found one beyond it, however it is run."""
    assert guards.unguarded(lambda: WAYS[way](GOOD)) is None and guards.found == []
    assert guards.unguarded(lambda: WAYS[way](BAD)) is not None
    values = [item.value for _, found in guards.found for item in found.offenders.first]
    assert values[0] == 3


def test_tensors_without_values_are_left_alone(guards: Collector) -> None:
    """Fake and meta tensors have nothing to read."""
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(BAD), mode.from_tensor(TABLE)
        assert guards.look(lambda: F.embedding(*fake)) is None
    assert guards.look(lambda: F.embedding(BAD.to("meta"), TABLE.to("meta"))) is None


INDEX_TYPES = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", [*INDEX_TYPES, torch.bool, torch.float32], ids=str)
def test_what_is_no_index_is_torch_s_matter(guards: Collector, dtype: torch.dtype) -> None:
    """Dtypes that torch refuses as an index get torch's own error."""
    for call in (
        lambda: lookup(BAD.to(dtype)),
        lambda: TABLE.gather(0, BAD.to(dtype).unsqueeze(1)),
        lambda: TABLE.take(BAD.to(dtype)),
    ):
        assert guards.unguarded(call) is not None
        assert guards.found == []


def ctc(steps: int, lengths: int) -> Tensor:
    scores = torch.zeros(5, 2, 4).log_softmax(2)
    return F.ctc_loss(scores, tensor([[9, 9]] * 2), tensor([5] * steps), tensor([2] * lengths))


def grouped(offsets: Tensor) -> Tensor:
    left, right = torch.zeros(32, 16).bfloat16(), torch.zeros(3, 16, 8).bfloat16()
    return torch._grouped_mm(left, right, offs=offsets)


def segments(*lengths: int) -> Tensor:
    return torch.segment_reduce(torch.rand(4), "sum", lengths=tensor(lengths))


bce, margin = F.binary_cross_entropy, F.multi_margin_loss
REFUSED: list[Callable[[], Any]] = [
    lambda: F.nll_loss(torch.zeros(2, 3), tensor([0, 9]).int()),
    lambda: F.nll_loss(torch.zeros(2, 3), tensor([0, 9, 9])),
    lambda: F.nll_loss(torch.zeros(2, 3), tensor([0, 9]), torch.ones(2)),
    lambda: F.nll_loss(torch.zeros(2, 3, 1, 1), tensor([[[9]]])),
    lambda: bce(torch.full((3,), 7.0), torch.ones(2)),
    lambda: bce(torch.full((2,), 7.0), torch.ones(2).double()),
    lambda: margin(torch.zeros(2, 3), tensor([9, 9]).int()),
    lambda: margin(torch.zeros(3), tensor([0, 3])),
    *(lambda steps=a, lengths=b: ctc(steps, lengths) for a, b in ((3, 2), (2, 3), (1, 2), (2, 1))),
    lambda: torch.multinomial(tensor([-1.0, 1.0]), 3),
    lambda: torch.multinomial(tensor([-1.0, 1.0]), 0),
    lambda: torch.multinomial(tensor([-1, 1]), 1),
    lambda: torch.poisson(tensor([-1])),
    lambda: torch.zeros(2).bernoulli_(tensor([2.0, 2.0, 2.0])),
    lambda: torch.zeros(2).bernoulli_(1.5),
    lambda: torch.zeros(2).bernoulli_(tensor([2, 2])),
    lambda: torch.zeros(2).bernoulli_(tensor([True, True])),
    lambda: torch.normal(torch.zeros(2), tensor([1.0, -1.0])),
    lambda: torch.repeat_interleave(tensor([1, -1])),
    lambda: torch.repeat_interleave(tensor([1, -1]), output_size=-1),
    lambda: segments(3, 2),
    lambda: segments(5, -1),
    lambda: torch._assert_async(tensor([0, 1]), "x"),
    lambda: torch._assert_async(tensor([]), "x"),
    lambda: torch._assert_async(tensor(0), "x" * 255),
    lambda: grouped(tensor([1, 5, 99])),
    lambda: grouped(tensor([1, 99], dtype=torch.int32)),
]


@pytest.mark.parametrize("call", REFUSED)
def test_what_torch_refuses_is_torch_s_own(guards: Collector, call: Callable[[], Any]) -> None:
    """By shape, dtype or number, before any kernel: no value is blamed."""
    assert isinstance(guards.unguarded(call), RuntimeError | ValueError)
    assert guards.found == guards.trouble == []


BACKWARD: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_select": lambda x, ids, rows: x.index_select(0, ids),
    "indexing": lambda x, ids, rows: x[ids],
    "take": lambda x, ids, rows: x.take(ids),
    "gather": lambda x, ids, rows: x.gather(0, ids.unsqueeze(1).expand(2, 3)),
    "index_fill": lambda x, ids, rows: x.index_fill(0, ids, 1.0),
    "index_add": lambda x, ids, rows: x.index_add(0, ids, rows),
    "index_copy": lambda x, ids, rows: x.index_copy(0, ids, rows),
    "index_reduce": lambda x, ids, rows: x.index_reduce(0, ids, rows, "mean"),
    "scatter_add": lambda x, ids, rows: x.scatter_add(0, ids.unsqueeze(1).expand(2, 3), rows),
    "put": lambda x, ids, rows: x.put(ids, rows[:, 0]),
    "embedding": lambda x, ids, rows: F.embedding(ids, x),
    "cross_entropy": lambda x, ids, rows: F.cross_entropy(rows, ids),
    "cross_entropy none": lambda x, ids, rows: F.cross_entropy(rows, ids, reduction="none"),
    "multi_margin": lambda x, ids, rows: F.multi_margin_loss(rows, ids),
    "segments": lambda x, ids, rows: torch.segment_reduce(x, "sum", lengths=ids, unsafe=True),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_an_index_changed_before_backward(guards: Collector, name: str) -> None:
    """The gradient's op reads the index again: what .data wrote meanwhile is found there."""
    for value, is_bad in ((2, False), (99, True)):
        x, rows = torch.rand(4, 3, requires_grad=True), torch.rand(2, 3, requires_grad=True)
        ids = tensor([0, 1])
        result = BACKWARD[name](x, ids, rows)
        ids.data[1] = value
        found = guards.look(lambda: result.sum().backward())  # noqa: B023
        assert (found is not None) == is_bad
        if found:
            assert {place[0] for place in positions(found)} == {1}


CHOICES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "max": lambda x: x.max(1),
    "sort": lambda x: x.sort(1),
    "topk": lambda x: x.topk(2),
    "cummax": lambda x: x.cummax(1),
    "kthvalue": lambda x: x.kthvalue(1),
    "adaptive pooling": lambda x: F.adaptive_max_pool2d(x[None, None], 2, return_indices=True),
}


@pytest.mark.parametrize("name", CHOICES)
def test_positions_changed_before_backward(guards: Collector, name: str) -> None:
    """Positions that an op gave are trusted by its gradient, unless somebody wrote to them."""
    for value in (0, 99):
        values, places = CHOICES[name](torch.rand(4, 4, requires_grad=True))
        places.data.reshape(-1)[0] = value
        found = guards.look(lambda: values.sum().backward())  # noqa: B023
        assert (found is not None) == (value == 99)
