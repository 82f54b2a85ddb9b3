"""Guards that look later find what they find at once, and leave a good call as it was."""

from __future__ import annotations

import gc
import re
import signal
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, tensor

from cudalens.core import _torch
from cudalens.guards import Guard, pending
from cudalens.guards.deferred import (
    CheckedTensors,
    DeferredOp,
    PastCalls,
    _violation_of,
    remembering_draws,
)
from cudalens.guards.engine import UNIT_INTERVAL, Between, Within
from cudalens.guards.pending import PENDING
from cudalens.guards.plans import is_deferred
from cudalens.source.stack import line_of
from tests.cpu_guards import Collector, Stopped, deterministic
from tests.guards.test_catalogue import CATALOGUE, every_guard, passing_arguments
from tests.guards.test_contexts import GOOD, TABLE
from tests.releases import has_grouped_mm

IS_DEFERRED = True
"""For the fixture ``guards``."""


class Plain(Tensor):
    """A subclass of the user's that changes nothing."""


def looks(run: Callable[[], object]) -> int:
    """Count the tensors that guards have looked at."""
    with mock.patch.object(torch, "aminmax", wraps=torch.aminmax) as seen:
        run()
    return seen.call_count


EDGES = torch.arange(6).reshape(2, 3) % 3


@pytest.mark.parametrize(
    ("run", "count"),
    [
        pytest.param(lambda ids: TABLE[ids], 0, id="the tensor"),
        pytest.param(lambda ids: TABLE.take(ids), 0, id="in another op"),
        pytest.param(lambda ids: torch.zeros(9)[ids], 0, id="in wider bounds"),
        pytest.param(lambda ids: TABLE[EDGES[1]], 0, id="a view made anew"),
        pytest.param(lambda ids: TABLE[EDGES[:, 0]], 1, id="another view"),
        pytest.param(lambda ids: TABLE[ids.clone()], 1, id="a copy"),
        pytest.param(lambda ids: TABLE[ids.add_(0)], 1, id="written to"),
        pytest.param(lambda ids: TABLE[EDGES[1].add_(0)], 1, id="written to by a view"),
        pytest.param(lambda ids: setattr(ids, "data", ids + 0) or TABLE[ids], 1, id="other data"),
    ],
)
@pytest.mark.parametrize("is_settled", [True, False], ids=["known", "pending"])
def test_good_values_are_looked_at_once(
    guards: Collector, run: Callable[[Tensor], object], count: int, is_settled: bool
) -> None:
    """Until somebody may have written to the tensor; also while the first look is pending."""
    ids = torch.arange(3)
    guards.look(lambda: (TABLE[ids], TABLE[EDGES[1]]))
    EDGES.add_(0)
    assert looks(lambda: (TABLE[ids], TABLE[EDGES[1]])) == 1
    if is_settled:
        assert guards.settle() is None
    assert looks(lambda: run(ids)) == count
    assert guards.settle() is None


def test_few_views_of_one_tensor_are_remembered(guards: Collector) -> None:
    """A dataset that is cut into batches takes no more memory from step to step."""
    known = CheckedTensors()
    data = torch.zeros(3000, dtype=torch.int64)
    for at in range(2000):
        assert known.of(data[at : at + 8]) == {}
    assert len(known._owners[id(data)][2]) <= 256
    del data
    assert known._owners == {}


@pytest.mark.parametrize("in_backward", [True, False])
@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize(
    ("op", "is_written"), [("index_put_.default", "self"), ("gather.default", "")]
)
def test_what_is_said_of_a_call_that_is_over(
    in_backward: bool, captures: bool, op: str, is_written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines that it was compiled from are those of its forward call."""
    monkeypatch.setattr(_torch, "is_capturing", lambda: captures)
    counts, told = iter((3, 8)), list[Any]()
    waits: Any = SimpleNamespace(count=lambda: next(counts), written_since=lambda count: (count,))
    past = PastCalls(lambda *all: told.append(all), waits, lambda file: False, told.append)  # type: ignore[func-returns-value]
    packet, _, overload = op.partition(".")
    which = getattr(getattr(torch.ops.aten, packet), overload)
    guard: Any = SimpleNamespace(is_silent=False)
    traced = [("a.py", 3, "forward")]
    check = past.check(which, guard, required(), in_backward=in_backward, traced=traced)
    assert (check.low, check.high, check.report(0, 5)) == (0, 4, None)
    ((_, found_by, found, call),) = told
    forward = [code.co_name for code, _ in call.forward]
    lines = [code.co_name for code, _ in call.lines]
    assert (forward, "forward" in lines) == (["forward"] * in_backward, not in_backward)
    assert (found_by, call.in_backward, call.buffers) == (guard, in_backward, (3,))
    assert call.calls_ago == (None if captures else 5)
    assert (f"{is_written} was written to" in found.explanation) is bool(is_written)


@pytest.mark.parametrize(("ends", "is_first"), [((0, 5), False), ((0, 6), True), ((-7, 5), True)])
def test_of_a_lookup_that_cuts_norms_the_assertion_that_comes_first_is_told(
    ends: tuple[int, int], is_first: bool
) -> None:
    """That of the op which cuts them takes more, and its table is the first argument."""
    told = list[Any]()
    waits: Any = SimpleNamespace(count=lambda: 0, written_since=lambda count: ())
    past = PastCalls(lambda *all: told.append(all), waits, lambda file: False, told.append)  # type: ignore[func-returns-value]
    own: Any = SimpleNamespace(is_silent=False)
    cuts: Any = SimpleNamespace(is_silent=False)
    need = required(asserts="bce_input")
    first: Any = SimpleNamespace(low=-6, high=5, need=need, guard=cuts)
    op = torch.ops.aten.embedding.default
    past.check(op, own, required(), in_backward=False, first=first).report(*ends)
    ((_, found_by, found, _),) = told
    assert found_by is (cuts if is_first else own)
    texts = [_violation_of(it, *ends, False).device_text for it in (required(), need)]
    assert found.device_text == texts[is_first]
    assert "weight was written to" in found.explanation


def test_values_that_are_known_are_bad_in_narrower_bounds(guards: Collector) -> None:
    for is_known in (True, False):
        ids = tensor([0, 4])
        torch.zeros(5)[ids]
        if is_known:
            assert guards.settle() is None
        found = guards.look(lambda: TABLE[ids])  # noqa: B023
        assert found is not None and found.offenders.max == 4
        assert looks(lambda: torch.zeros(5)[ids]) == 0  # noqa: B023


def test_a_view_of_good_values_is_good(guards: Collector) -> None:
    """Also of one that is known to have bad ones elsewhere, which is looked at."""
    ids = tensor([[0, 2], [1, 4]])
    guards.look(lambda: torch.zeros(5)[ids])
    assert looks(lambda: torch.zeros(5)[ids[1]]) == 0
    assert looks(lambda: guards.look(lambda: TABLE[ids[0]])) == 1
    found = guards.look(lambda: TABLE[ids[:, 1]])
    assert found is not None and found.offenders.max == 4
    assert looks(lambda: torch.zeros(9, dtype=torch.int64)[ids.view(torch.int32)]) == 1
    ids.data = torch.full((2, 2), 9)
    assert guards.look(lambda: torch.zeros(5)[ids[1]]) is not None


def test_what_was_drawn_is_in_bounds(guards: Collector) -> None:
    """Of the categories that there were, and until somebody writes to it."""
    weights = torch.ones(2, 3)
    rows = torch.rand(2, 3)
    drawn = torch.multinomial(weights, 1)
    assert looks(lambda: (rows.gather(1, drawn), F.embedding(drawn[0], TABLE), TABLE[drawn])) == 0
    assert looks(lambda: guards.look(lambda: TABLE[:2][drawn * 0])) == 1
    drawn.fill_(2)
    found = guards.look(lambda: TABLE[:2][drawn])
    assert found is not None and found.offenders.max == 2
    drawn = torch.multinomial(tensor([0.0, 0.0, 1.0]), 1)
    found = guards.look(lambda: TABLE[:2][drawn])
    assert found is not None and found.offenders.max == 2


@pytest.mark.parametrize(
    ("result", "later", "captures", "is_kept"),
    [
        (tensor([0, 2]), True, False, True),
        (tensor([0, 2]), False, False, False),
        (tensor([0, 2]), True, True, False),
        (tensor([0, 2]).as_subclass(Plain), True, False, False),
        (None, True, False, False),
    ],
)
def test_which_draws_are_remembered(
    result: Any, later: bool, captures: bool, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay of a captured graph draws anew, and a subclass may give something else."""
    monkeypatch.setattr(_torch, "is_capturing", lambda: captures)
    known = CheckedTensors()
    draw = remembering_draws(lambda *call: result, known, lambda: later)
    assert draw(None, torch.ones(2, 3), 1) is result
    check = (known.of(result) or {}).get(None) if isinstance(result, Tensor) else None
    assert (check is not None) is is_kept
    if check is not None:
        assert (check.low, check.high, check.is_pending) == (0, 2, False)
        assert (check.smallest, check.largest, check.report(0, 2)) == (0, 2, None)


WIDE = torch.zeros(3, 5)


def test_an_exception_is_no_value_of_a_tensor(guards: Collector) -> None:
    """So a call with narrower bounds needs no look."""
    ids = tensor([-100, 2])
    assert guards.look(lambda: F.nll_loss(WIDE[:2], ids)) is None
    assert looks(lambda: F.nll_loss(WIDE[:2, :3], ids)) == 0
    assert looks(lambda: F.nll_loss(WIDE[:2, :2], ids)) == 1
    assert guards.settle() is not None


def test_an_empty_index_is_not_looked_at(guards: Collector) -> None:
    empty = tensor([], dtype=torch.int64)
    assert looks(lambda: (F.embedding(empty, TABLE), TABLE[empty])) == 0
    assert PENDING.count == 0


def test_where_a_deferred_look_fails_the_guard_looks_at_once(
    guards: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise LookupError("no such thing")

    monkeypatch.setattr(CheckedTensors, "of", broken)
    found = guards.look(lambda: F.embedding(tensor([0, 3]), TABLE))
    assert found is not None and found.offenders.first[0].position == (1,)
    assert guards.trouble == [
        "deferred embedding_indices_in_range unavailable: LookupError: no such thing"
    ]
    guards.trouble.clear()
    assert guards.look(lambda: F.embedding(tensor([0, 2]), TABLE)) is None
    guards.trouble.clear()


def test_each_guard_whose_deferred_look_fails_looks_at_once() -> None:
    """Beside those that always do."""
    told = list[str]()
    look = DeferredOp(GATHER, CheckedTensors(), SimpleNamespace(complain=told.append)).look  # type: ignore[arg-type]
    failing = [SimpleNamespace(guard=SimpleNamespace(name=name)) for name in ("b", "c")]
    needs: Any = SimpleNamespace(at_once=["a"], deferred=failing)
    noted = look(needs, (1,), {"k": 2}, is_captured=False)
    assert noted is not None
    assert noted.at_once == ["a", *(item.guard for item in failing)]
    assert (noted.args, noted.kwargs, noted.checks, noted.error) == ((1,), {"k": 2}, [], None)
    assert [line.partition(" unavailable")[0] for line in told] == ["deferred b", "deferred c"]
    assert needs.at_once == ["a"]  # those of the form are shared


GATHER = torch.ops.aten.gather.default


def required(**more: Any) -> Within:
    given = {"of": "self", "dim": 0, "why": "Why.", "asserts": "gather_scatter", **more}
    return Within("index", 0, 4, **given)


@pytest.mark.parametrize(
    ("need", "ends", "says"),
    [
        (required(), (-1, 4), " contained -1, which is outside dimension 0 (size 5) of {related}"),
        (required(), (0, 5), " contained 5, which is outside dimension 0 (size 5) of {related}"),
        (required(), (-1, 5), " contained 5, which is outside dimension 0 (size 5) of {related}"),
        (required(item=1), (0, 5), "[1] contained 5, which is outside dimension 0 (size 5)"),
        (required(item=0), (0, 5), "[0] contained 5, which is outside dimension 0 (size 5)"),
        (
            Between("p", 0, 1, bounds=UNIT_INTERVAL, why="Why.", asserts="bce_input"),
            (-0.5, 1.0),
            " contained -0.5, which is outside the interval 0 … 1",
        ),
        (
            Between("p", 0, 1, bounds=UNIT_INTERVAL, why="Why.", asserts="bce_input"),
            (0.5, float("inf")),
            " contained inf, which is outside the interval 0 … 1",
        ),
        (
            Between("p", 0, 1, bounds=UNIT_INTERVAL, why="Why.", asserts="bce_input"),
            (float("nan"), float("nan")),
            " contained nan, which is outside the interval 0 … 1",
        ),
    ],
)
@pytest.mark.parametrize("is_silent", [False, True])
def test_a_past_finding_tells_the_value_beyond_the_bound(
    need: Any, ends: tuple[Any, Any], says: str, is_silent: bool
) -> None:
    found = _violation_of(need, *ends, is_silent)
    assert found.headline.startswith(f"{{argument}}{says}")
    assert str(found.element) == "{argument}" + says.partition(",")[0]
    told = [value if abs(value) < 99 else str(value) for value in ends]
    assert [str(it) for it in (found.offenders.min, found.offenders.max)] == [*map(str, told)]
    assert (found.explanation, found.is_replay_safe) == ("Why.", False)
    assert found.device_text is not None
    assert found.is_silent is (is_silent and isinstance(need, Within))


@pytest.mark.parametrize(
    ("narrows", "ends", "asserts"),
    [
        (True, (0, 5), True),
        (True, (0, 1 << 31), False),
        (True, (-(1 << 31) - 1, 0), False),
        (True, (-(1 << 31), (1 << 31) - 1), True),
        (False, (0, 1 << 31), True),
    ],
)
def test_beyond_32_bits_it_is_not_known_what_a_narrow_kernel_compares(
    narrows: bool, ends: tuple[int, int], asserts: bool
) -> None:
    found = _violation_of(required(narrows=narrows), *ends, False)
    assert (found.device_text is not None) is asserts


def _scattered(ids: Tensor, *, mode: bool) -> None:
    # Negative values count from the end there; the CPU's kernel takes none.
    with suppress(RuntimeError), deterministic() if mode else nullcontext():
        torch.zeros(3).scatter(0, ids, torch.ones(2))


@pytest.mark.parametrize(
    ("values", "good", "bad"),
    [
        pytest.param([0, 4], lambda ids: WIDE[:, ids], lambda ids: WIDE[ids], id="another place"),
        pytest.param(
            [[0, 4]],
            lambda ids: WIDE.gather(1, ids),
            lambda ids: WIDE.gather(0, ids),
            id="another dim",
        ),
        pytest.param(
            [-100, 4],
            lambda ids: F.nll_loss(WIDE[:2], ids),
            lambda ids: F.nll_loss(WIDE[:2], ids, ignore_index=-1),
            id="another exception",
        ),
        pytest.param(
            [0, -1],
            lambda ids: WIDE.to_sparse().index_select(0, ids),
            lambda ids: WIDE.index_select(0, ids),
            id="another layout",
        ),
        pytest.param(
            [0, -1],
            lambda ids: _scattered(ids, mode=True),
            lambda ids: _scattered(ids, mode=False),
            id="another setting",
        ),
    ],
)
def test_a_call_is_known_by_all_that_its_bounds_follow_from(
    guards: Collector, values: Any, good: Callable[[Tensor], Any], bad: Callable[[Tensor], Any]
) -> None:
    ids = tensor(values)
    for _ in range(3):
        assert guards.look(lambda: good(ids)) is None
    assert looks(lambda: good(ids)) == 0
    assert guards.look(lambda: bad(ids)) is not None
    assert looks(lambda: good(ids)) == 0


class Unhashable(Tensor):
    def __hash__(self) -> int:
        raise ValueError

    def __eq__(self, other: object) -> Any:
        raise ValueError


def test_nothing_is_asked_of_a_subclass(guards: Collector) -> None:
    ids = torch.arange(3)
    for _ in range(3):
        assert guards.look(lambda: TABLE[ids]) is None
    assert guards.look(lambda: TABLE.as_subclass(Unhashable)[ids]) is None
    found = guards.look(lambda: TABLE[:2].as_subclass(Unhashable)[ids])
    assert found is not None and found.offenders.max == 2


def test_a_timeout_is_not_swallowed(guards: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler's exception may come out of any step of ours, and may be of any kind."""

    of = CheckedTensors.of

    def interrupted(known: CheckedTensors, tensor: Tensor) -> Any:
        monkeypatch.setattr(CheckedTensors, "of", of)
        signal.raise_signal(signal.SIGALRM)
        return of(known, tensor)

    def handle(number: int, frame: object) -> None:
        raise RuntimeError("timeout")

    ids = torch.arange(3)
    for _ in range(3):
        assert guards.look(lambda: TABLE[ids]) is None
    before = signal.signal(signal.SIGALRM, handle)
    try:
        monkeypatch.setattr(CheckedTensors, "of", interrupted)
        with pytest.raises(RuntimeError, match="timeout"):
            TABLE[ids]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_call_that_torch_refuses_is_not_remembered(guards: Collector) -> None:
    scores, ids = torch.zeros(2, 5), tensor([0, 7])
    for _ in range(3):
        with pytest.raises((RuntimeError, IndexError, NotImplementedError)):
            F.nll_loss(scores.to("meta"), ids)
    assert guards.look(lambda: F.nll_loss(scores, ids)) is not None


def test_nothing_is_remembered_where_no_version_is_counted(guards: Collector) -> None:
    with torch.inference_mode():
        ids = torch.arange(3)
        for _ in range(2):
            assert looks(lambda: TABLE[ids]) == 1
            assert guards.settle() is None


@every_guard
def test_the_catalogue_says_who_waits(entry: Guard) -> None:
    """What needs no wait notes its check without reading a value; the others read."""
    need = entry.requires(*passing_arguments(entry))
    needs = need if isinstance(need, list) else [need]
    assert entry.waits != all(map(is_deferred, needs))


@has_grouped_mm
def test_the_page_says_who_waits_and_how_much_is_pending() -> None:
    page = (Path(__file__).parents[2] / "docs" / "always_on.md").read_text("utf-8")
    listed = re.findall(r"^- `(\w+)` \(", page, flags=re.MULTILINE)
    assert listed == sorted(entry.name for entry in CATALOGUE if entry.waits)
    assert f"At most {pending.MAX_PENDING:,} tensors".replace(",", " ") in page


# --- what is known of a call that is over ---------------------------------------------------------


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda ids: ids.fill_(0),
    "without a version": lambda ids: ids.data.fill_(5),
    "no storage": lambda ids: ids.untyped_storage().resize_(0),
    "nothing": lambda ids: None,
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_a_finding_gives_the_extremes_of_its_own_call(
    guards: Collector, write: str, mode: Callable[[], AbstractContextManager[object]]
) -> None:
    """Whatever became of the index behind it; no position is given."""

    def run() -> None:
        with mode():
            ids = tensor([0, 7, 1, -9])
            F.embedding(ids, TABLE)
            WRITES[write](ids)

    found = guards.look(run)
    assert found is not None
    assert found.sentence() == "indices contained 7, which is outside the 3 rows of weight"
    assert (found.offenders.min, found.offenders.max) == (-9, 7)
    assert (found.offenders.first, found.offenders.total) == ((), 0)


def test_no_tensor_of_a_call_is_kept(guards: Collector) -> None:
    ids, rows = torch.full((100,), 3), torch.zeros(3, 2)
    refs = [weakref.ref(ids), weakref.ref(rows)]
    for at in (ids, ids[1:]):
        F.embedding(at, rows)
        rows.index_put((at,), tensor(1.0))
    del ids, rows, at
    gc.collect()
    assert [item() for item in refs] == [None, None]
    assert guards.settle() is not None


def test_a_finding_says_how_long_ago_its_call_was(guards: Collector) -> None:
    F.embedding(tensor([3]), TABLE)
    line = sys._getframe().f_lineno - 1
    for _ in range(5):
        F.embedding(GOOD, TABLE)
    assert guards.settle() is not None and guards.past is not None
    assert guards.past.calls_ago == 5
    users = [item for item in guards.past.lines if item[0].co_filename == __file__]
    code, lasti = users[-1]
    assert (code.co_name, line_of(code, lasti)) == (sys._getframe().f_code.co_name, line)


def test_what_is_written_with_replaced_values_is_named(guards: Collector) -> None:
    cache, note = torch.zeros(3), "self was written to"
    found = guards.look(lambda: cache.index_put_((tensor([0, 5]),), tensor(1.0)))
    assert found is not None and note in found.explanation
    found = guards.look(lambda: cache[tensor([5])])
    assert found is not None and note not in found.explanation


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "index_fill_": lambda i: i.index_fill_(0, i, 0),
    "index_add_": lambda i: i.index_add_(0, i, i.clone()),
    "index_copy_": lambda i: i.index_copy_(0, i, i.clone()),
    "scatter_": lambda i: i.scatter_(0, i, 0),
    "scatter_, a view": lambda i: i.scatter_(0, i[:2], i.clone()),
    "scatter_add_": lambda i: i.scatter_add_(0, i, i.clone()),
    "put_": lambda i: i.put_(i, i.clone()),
    "index_put_": lambda i: i.index_put_((i,), i.clone()),
    "gather, out": lambda i: torch.gather(i.clone(), 0, i, out=i),
    "take, out": lambda i: torch.take(i.clone(), i, out=i),
    "index_select, out": lambda i: torch.index_select(i.clone(), 0, i, out=i),
}


@pytest.mark.parametrize("name", REFUSED)
def test_torch_refuses_what_it_refuses_without_guards(guards: Collector, name: str) -> None:
    """Memory that overlaps: an op is given its very index where it writes there."""

    def outcome(later: bool) -> tuple[str, list[int]]:
        guards.set_deferred(later)
        i = tensor([2, 0, 1])
        try:
            REFUSED[name](i)
        except RuntimeError as error:
            return str(error), i.tolist()
        finally:
            guards.set_deferred(True)
        return "", i.tolist()

    assert outcome(True) == outcome(False)
    assert guards.settle() is None


def test_marked_values_reach_the_kernel(guards: Collector) -> None:
    """ignore_index and padding_idx keep their meaning beside a value that is replaced."""
    scores = torch.rand(4, 3)
    late = F.cross_entropy(scores, tensor([0, -100, 9, 2]), reduction="none")
    with pytest.raises(Stopped):
        raise guards.settle() or AssertionError
    assert late[1] == 0
    good = F.cross_entropy(scores[[0, 3]], tensor([0, 2]), reduction="none")
    assert torch.equal(late[[0, 3]], good)


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
    assert str(error) == "{argument} contained 3, which is outside the 3 rows of {related}"
    assert error is not None and ["contained 6" in note for note in error.__notes__] == [True]
    assert guards.settle() is None


def test_a_finding_at_once_comes_after_those_before_it(guards: Collector) -> None:
    """Guards that wait do not overtake what is pending."""
    F.embedding(tensor([3]), TABLE)
    with pytest.raises(Stopped, match="contained 3") as caught:
        torch.multinomial(tensor([0.0, 0.0]), 1)
    assert len(caught.value.__notes__) == 1


def test_a_full_queue_waits_for_the_oldest(guards: Collector) -> None:
    """Nothing is lost beyond MAX_PENDING."""
    F.embedding(tensor([3]), TABLE)
    with pytest.raises(Stopped, match="contained 3"):
        for _ in range(2 * pending.MAX_PENDING):
            F.embedding(GOOD.clone(), TABLE)
    for _ in range(2 * pending.MAX_PENDING):
        F.embedding(GOOD.clone(), TABLE)
        assert PENDING.count <= pending.MAX_PENDING
    assert guards.settle() is None


def test_the_queue_begins_anew_in_a_child() -> None:
    """What was pending is its parent's, and the child knows how much that is."""
    queue = pending.Pending()
    queue.note(GOOD, pending.Check(0, 1, lambda low, high: None))
    queue.forked()
    assert (queue.inherited, queue.count, queue.settle()) == (1, 0, [])
