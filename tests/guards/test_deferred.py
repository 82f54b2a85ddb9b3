"""Guards that look later find what they find at once, and leave a good call as it was."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from cudalens.core.report_types import Violation
from cudalens.guards import Guard, pending
from cudalens.guards.deferred import is_deferred
from cudalens.guards.pending import PENDING
from tests.calls import CASES, Case
from tests.cpu_guards import Collector, Stopped, bits, deterministic, guarded, positions
from tests.guards.test_catalogue import CATALOGUE, evaluate, every_guard, passing_arguments
from tests.guards.test_contexts import BAD, GOOD, TABLE, lookup
from tests.verdicts import call


@pytest.fixture(scope="module")
def guards() -> Iterator[Collector]:
    """Every guard, acting on CPU tensors, and looking later."""
    with guarded(is_deferred=True) as collector:
        yield collector


class Found:
    """What guards say of a call, and what the call gave."""

    def __init__(self, guards: Collector, run: Callable[[], Any], *, later: bool) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        guards.look_later(later)
        try:
            self.violation: Violation | None = guards.look(lambda: self._keep(run))
        finally:
            guards.look_later(True)
        self.op = guards.found[0][0] if guards.found else None

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
    assert (late.op, late.violation) == (soon.op, soon.violation)
    if soon.violation is None:
        assert repr(late.error) == repr(soon.error)
        assert same(late.result, soon.result)
    return late


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


class Plain(Tensor):
    """A subclass of the user's that changes nothing."""


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


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*quantize")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_an_op(guards: Collector, way: str) -> None:
    """The same lookup is silent at the bound and found one beyond it, however it is run."""
    good, bad = (agree(guards, lambda: WAYS[way](ids)) for ids in (GOOD, BAD))  # noqa: B023
    assert good.violation is good.error is None
    assert bad.violation is not None and bad.violation.offenders.first[0].value == 3


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


@pytest.mark.parametrize("name", BACKWARD)
def test_an_index_changed_before_backward(guards: Collector, name: str) -> None:
    """The gradient's op reads the index again: what .data wrote meanwhile is found there.

    Later, it is given one that is in bounds.
    """

    def run(value: int) -> None:
        x, rows = torch.rand(4, 3, requires_grad=True), torch.rand(2, 3, requires_grad=True)
        ids = tensor([0, 1])
        result = BACKWARD[name](x, ids, rows)
        assert guards.settle() is None
        ids.data[1] = value
        result.sum().backward()

    assert agree(guards, lambda: run(2)).violation is None
    found = agree(guards, lambda: run(99)).violation
    assert found is not None and {place[0] for place in positions(found)} == {1}


@every_guard
def test_the_catalogue_says_who_waits(entry: Guard) -> None:
    """What needs no wait notes its check without reading a value; the others read."""
    need = entry.requires(*passing_arguments(entry))
    needs = need if isinstance(need, list) else [need]
    assert entry.waits != all(map(is_deferred, needs))


def test_the_page_says_who_waits_and_what_is_kept() -> None:
    page = (Path(__file__).parents[2] / "docs" / "always_on.md").read_text("utf-8")
    listed = re.findall(r"^- `(\w+)` \(", page, flags=re.MULTILINE)
    assert listed == sorted(entry.name for entry in CATALOGUE if entry.waits)
    assert f"At most {pending.MAX_PENDING:,} calls".replace(",", " ") in page
    assert f"up to {pending.KEPT_BYTES >> 20} MiB" in page


# --- what is known of a call that is over ---------------------------------------------------------


def test_a_tensor_that_was_written_to_is_known_by_its_extremes(guards: Collector) -> None:
    """No position is told of values that are gone."""

    def run() -> None:
        ids = tensor([0, 7, 1, -9])
        F.embedding(ids, TABLE)
        ids.fill_(0)

    found = guards.look(run)
    assert found is not None
    assert found.sentence() == "indices held -9, which is outside the 3 rows of weight"
    assert (found.offenders.first, found.offenders.total) == ((), 4)
    assert guards.past is not None and "written to" in guards.past.limits[0]


def test_a_write_that_no_version_counts_is_noticed(guards: Collector) -> None:
    """Values other than those of the slot are not told as those of the call."""

    def run() -> None:
        ids = tensor([0, 7, 1])
        F.embedding(ids, TABLE)
        ids.data[1] = 5

    found = guards.look(run)
    assert found is not None and "held 7" in found.headline


def test_exceptions_that_extremes_cannot_tell_are_left_alone(guards: Collector) -> None:
    """A target behind the end of its row is not read: without the values nobody knows."""

    def run() -> None:
        target = tensor([[1, -1, 9]])
        F.multilabel_margin_loss(torch.zeros(1, 3), target)
        target.fill_(0)

    assert guards.look(run) is None


def test_what_is_written_with_replaced_values_is_named(guards: Collector) -> None:
    cache = torch.zeros(3)
    assert guards.look(lambda: cache.index_put_((tensor([0, 5]),), tensor(1.0))) is not None
    assert guards.past is not None and guards.past.written == ("self",)
    assert guards.look(lambda: cache[tensor([5])]) is not None
    assert guards.past.written == ()


def test_marked_values_reach_the_kernel(guards: Collector) -> None:
    """ignore_index and padding_idx keep their meaning beside a value that is replaced."""
    scores = torch.rand(4, 3)
    late = F.cross_entropy(scores, tensor([0, -100, 9, 2]), reduction="none")
    with pytest.raises(Stopped):
        raise guards.settle() or AssertionError
    assert late[1] == 0
    assert same(late[[0, 3]], F.cross_entropy(scores[[0, 3]], tensor([0, 2]), reduction="none"))


def test_a_call_that_torch_refuses_leaves_no_check(guards: Collector) -> None:
    with pytest.raises(RuntimeError):
        torch.zeros(3).index_put_((tensor([5, 6]),), torch.ones(3))
    assert guards.settle() is None


# --- the queue ------------------------------------------------------------------------------------


def test_two_findings_in_one_window(guards: Collector) -> None:
    """The first is raised, and tells of the other."""
    F.embedding(tensor([3]), TABLE)
    TABLE.take(tensor([6]))
    error = guards.settle()
    assert str(error) == "{argument}[0] = 3 is outside the 3 rows of {related}"
    assert error is not None and ["= 6" in note for note in error.__notes__] == [True]
    assert guards.settle() is None


def test_a_finding_at_once_comes_after_those_before_it(guards: Collector) -> None:
    """Guards that wait do not overtake what is pending."""
    F.embedding(tensor([3]), TABLE)
    with pytest.raises(Stopped, match="= 3") as caught:
        torch.multinomial(tensor([0.0, 0.0]), 1)
    assert len(caught.value.__notes__) == 1


def test_a_full_queue_waits_for_the_oldest(guards: Collector) -> None:
    """Nothing is lost beyond MAX_PENDING, and what is kept alive stays bounded."""
    F.embedding(tensor([3]), TABLE)
    with pytest.raises(Stopped, match="= 3"):
        for _ in range(2 * pending.MAX_PENDING):
            F.embedding(GOOD, TABLE)
    for _ in range(2 * pending.MAX_PENDING):
        F.embedding(GOOD, TABLE)
        assert PENDING.count <= pending.MAX_PENDING
    assert guards.settle() is None


def test_memory_kept_alive_is_bounded(guards: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond KEPT_BYTES a check keeps nothing; what it finds then is known by the extremes."""
    assert guards.settle() is None  # what is pending from before has room of its own
    monkeypatch.setattr(pending, "KEPT_BYTES", 3 * 8 * 100)
    refs = []
    for number in range(5):
        ids = torch.full((100,), 2)
        ids[50] = 3 if number == 4 else 0
        refs.append(weakref.ref(ids))
        F.embedding(ids, TABLE)
    del ids
    gc.collect()
    assert [item() is not None for item in refs] == [True, True, True, False, False]
    assert PENDING.kept_bytes == 3 * 8 * 100
    error = guards.settle()
    assert "{argument} held 3" in str(error)
    gc.collect()
    assert PENDING.kept_bytes == 0
    guards.found.clear()
    assert not any(item() is not None for item in refs)


def test_the_queue_begins_anew_in_a_child() -> None:
    """What was pending is its parent's, and the child knows how much that is."""
    queue = pending.Pending()
    check = pending.Check(0, 1, lambda low, high: None)
    queue.note(torch.device("cpu"), torch.int64, lambda low, high: None, check)
    queue.forked()
    assert (queue.inherited, queue.count, queue.settle()) == (1, 0, [])
