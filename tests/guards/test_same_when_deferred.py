"""Guards that look later say what guards say at once, of every op and however it is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from cudalens.core.report_types import Violation
from cudalens.guards import Guard
from tests.calls import CASES, Case
from tests.cpu_guards import Collector, Stopped, bits, deterministic
from tests.guards.test_catalogue import evaluate, every_guard
from tests.guards.test_contexts import BAD, GOOD, TABLE, lookup
from tests.guards.test_deferred import Plain
from tests.releases import release
from tests.verdicts import call

IS_DEFERRED = True
"""For the fixture ``guards``."""


class Found:
    """What guards say of a call, and what the call gave."""

    def __init__(self, guards: Collector, run: Callable[[], Any], *, later: bool) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        guards.set_deferred(later)
        try:
            self.violation: Violation | None = guards.look(lambda: self._keep(run))
        finally:
            guards.set_deferred(True)
        self.op = guards.found[0][0] if guards.found else None
        self.is_past = guards.past is not None

    def _keep(self, run: Callable[[], Any]) -> None:
        torch.manual_seed(0)
        try:
            self.result = run()
        except Stopped:
            raise
        except Exception as error:
            if "Stopped" in str(error):  # in the words of torch's interpreter of scripts
                raise Stopped from error
            self.error = error


def same(left: Any, right: Any) -> bool:
    """Whether two results are the same bit by bit, NaN included."""

    def told(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return getattr(item, "code", type(item))
        values = item.values() if item.is_nested else item
        is_plain = values.layout is torch.strided and not values.is_quantized
        return bits(values) if is_plain else str(values)

    return [*map(told, tree_leaves(left))] == [*map(told, tree_leaves(right))]


def agree(guards: Collector, run: Callable[[], Any]) -> Found:
    """Assert that both kinds of guards say the same of a call, and a good one gives the same."""
    soon, late = (Found(guards, run, later=later) for later in (False, True))
    if soon.violation is not None and late.error is not None:
        # What torch refuses on the host has launched nothing: here, ops without a CPU kernel.
        assert isinstance(late.error, NotImplementedError)
        assert late.violation is None
        return late
    assert late.op == soon.op
    if soon.violation is None:
        assert repr(late.error) == repr(soon.error)
        assert same(late.result, soon.result)
    elif not late.is_past:
        assert late.violation == soon.violation
    else:
        assert alike(late.violation) == alike(soon.violation)
        assert late.violation is not None
        values, now = late.violation.offenders, soon.violation.offenders
        assert (values.first, values.count, values.total) == ((), 0, 0)
        if not (soon.violation.is_silent or soon.violation.bounds.also_allowed):
            assert (float(values.min), float(values.max)) == pytest.approx(
                (float(now.min), float(now.max)), nan_ok=True
            )
    return late


ALIKE = ("guard", "argument", "bounds", "is_index", "related", "size", "dim", "list_position")
ALIKE += ("device_text", "is_silent")


def alike(violation: Violation | None) -> dict[str, Any]:
    """What guards that look later say as those that look at once."""
    return {name: getattr(violation, name) for name in ALIKE}


@every_guard
def test_each_guard_of_the_catalogue(guards: Collector, entry: Guard) -> None:
    """Its own two examples: the bad one is found with every detail, the good one is the same."""
    agree(guards, lambda: evaluate(entry.violates))
    agree(guards, lambda: evaluate(entry.passes))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.record)
def test_each_assertion_of_the_inventory(guards: Collector, case: Case) -> None:
    """In all its forms, at the bound and one step beyond it."""
    for name in case.ops:
        for values in ({}, *case.beyond):
            agree(guards, lambda: call(name, {**case.at_bound, **values}))  # noqa: B023


class Functional(Tensor):
    """A subclass of the user's that sees every function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


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
if release() < (2, 11):  # torch itself calls item() there
    del WAYS["vmap over indexing"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*quantize")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_an_op(guards: Collector, way: str) -> None:
    """The same lookup is silent at the bound and found one beyond it, however it is run."""
    good, bad = (agree(guards, lambda: WAYS[way](ids)) for ids in (GOOD, BAD))  # noqa: B023
    assert good.violation is good.error is None
    assert bad.violation is not None and bad.violation.offenders.max == 3


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
    "embedding_bag": lambda x, ids, rows: F.embedding_bag(ids, x, tensor([0]), mode="mean"),
    "weighted embedding_bag": lambda x, ids, rows: F.embedding_bag(
        ids, x, tensor([0]), mode="sum", per_sample_weights=torch.ones(2)
    ),
    "cross_entropy": lambda x, ids, rows: F.cross_entropy(rows, ids),
    "cross_entropy none": lambda x, ids, rows: F.cross_entropy(rows, ids, reduction="none"),
    "multi_margin": lambda x, ids, rows: F.multi_margin_loss(rows, ids),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", BACKWARD)
def test_backward_of_a_bad_call(guards: Collector, name: str) -> None:
    """It is given values in bounds as well, and the bad ones are told once, at the forward call."""

    def run(value: int) -> None:
        x, rows = torch.rand(4, 3, requires_grad=True), torch.rand(2, 3, requires_grad=True)
        BACKWARD[name](x, tensor([0, value]), rows).sum().backward()

    assert guards.look(lambda: run(2)) is None
    found = guards.look(lambda: run(99))
    assert found is not None and found.offenders.max == 99
    assert guards.past is None or not guards.past.in_backward
    assert len(guards.found) == 1
