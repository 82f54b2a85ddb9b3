"""Where guards stand aside: calls that torch refuses, and graphs that are being captured.

While a CUDA graph is captured nothing may be read or waited for.  The capture itself is pretended:
its flag is all that the code asks for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from traceback import walk_tb
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cudalens
from cudalens import guards, simulate
from cudalens.core import _torch
from cudalens.evidence import lost_context
from cudalens.guards import interceptor, pending
from cudalens.guards.deferred import NO_ROOM
from cudalens.guards.interceptor import Interceptor
from cudalens.guards.pending import PENDING
from cudalens.guards.plans import guarded_ops
from cudalens.recorder import Recorder
from tests.probes import SeenFunctions, SeenOps


@pytest.mark.parametrize("capturing", [False, True])
def test_nothing_is_read_or_waited_for(
    capturing: bool, sim: simulate.Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy to the host, a wait or the probe for a lost context would break the capture.

    Ops are recorded all the same, and a bad one goes to the device unread.
    """
    table, ids = torch.zeros(3, 2, device="cuda"), torch.tensor([7], device="cuda")
    wait = Mock(wraps=sim._runtime.state.sync)
    monkeypatch.setattr(sim._runtime.state, "sync", wait)
    with cudalens.guard(), monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        with Recorder() as recorder:
            torch.ones(2, device="cuda").add_(1)
        assert recorder.recorded_ops >= 2
        assert not capturing or lost_context.probe(wait=True) is None
        assert wait.called is not capturing
        with nullcontext() if capturing else pytest.raises(cudalens.DeviceIndexError):
            F.embedding(ids, table)
    assert (sim.pending is not None) is capturing


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("has_room", [False, True])
def test_a_capture_without_room_for_checks_is_one_line(
    has_room: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table, ids = torch.zeros(3, 2, device="cuda"), torch.tensor([1], device="cuda")
    monkeypatch.setattr(PENDING, "_replays", {})
    monkeypatch.setattr(PENDING, "_has_captured", False)
    with cudalens.guard(deferred=True):
        if has_room:
            F.embedding(ids, table)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            F.embedding(ids, table)
            F.embedding(ids, table)
    assert capsys.readouterr().err == ("" if has_room else f"cudalens: {NO_ROOM}\n")


def test_a_lost_context_that_cannot_say_counts_as_a_capture(
    sim: simulate.Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a dead context even the question fails: guards then read nothing."""

    def refuse() -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", refuse)
    assert _torch.is_capturing() is True
    probed = lost_context.probe()
    assert probed is not None and lost_context.is_lost(probed)


# --- devices --------------------------------------------------------------------------------------


HERE, THERE = torch.zeros(3, 3), torch.tensor([0, 7])


def scattered(table: Tensor, index: Tensor) -> Tensor:
    return table.clone().scatter_(0, index[:, None], 1.0)


TOGETHER: list[Callable[[Tensor, Tensor], object]] = [
    lambda table, index: F.embedding(index, table),
    lambda table, index: table.index_select(0, index),
    lambda table, index: table.gather(0, index[:, None]),
    lambda table, index: nn.Embedding.from_pretrained(table)(index),
    scattered,
]


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("call", TOGETHER)
@pytest.mark.parametrize(("table", "index"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_tensors_on_two_devices_are_torch_s_own_error(
    call: Callable[[Tensor, Tensor], object], table: str, index: str
) -> None:
    """The label out of range does not matter: nothing would have been launched; on one it does."""
    is_torch_s = table != index
    error = (RuntimeError, "same device") if is_torch_s else (cudalens.DeviceIndexError, "= 7 is")
    with pytest.raises(error[0], match=error[1]) as caught, cudalens.check() as session:
        call(HERE.to(table), THERE.to(index))
    assert isinstance(caught.value, cudalens.DeviceAssertError) is not is_torch_s
    kind = "host_error" if is_torch_s else "device_assert"
    assert session.report is not None and session.report.kind == kind


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("index", ["cpu", "cuda"])
def test_an_index_may_stay_on_the_cpu(index: str) -> None:
    """``x[index]`` copies its index to the device: there it asserts."""
    table, rows, one = HERE.to("cuda"), THERE.to(index), torch.tensor(1.0)
    with cudalens.check(), pytest.raises(cudalens.DeviceIndexError):
        table[rows]
    with cudalens.check(), pytest.raises(cudalens.DeviceIndexError):
        table[rows] = one


@pytest.mark.usefixtures("sim")
def test_a_table_on_the_cpu_takes_no_index_of_the_device() -> None:
    with cudalens.check(), pytest.raises(RuntimeError, match="either on cpu or on the same") as e:
        HERE[THERE.to("cuda")]
    assert not isinstance(e.value, cudalens.DeviceAssertError)


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize(("place", "waits"), [("cpu", True), ("cuda", False)])
def test_a_number_that_is_written_to_the_host_waits_for_what_is_pending(
    place: str, waits: bool
) -> None:
    target, number = torch.zeros(3, device=place), torch.tensor(5.0, device="cuda")
    with pytest.raises(cudalens.DeviceIndexError), cudalens.guard(deferred=True):
        HERE.to("cuda")[THERE.to("cuda")]
        target[torch.tensor([1])] = number
        waits = not waits  # the program went on
    assert waits
    assert target.tolist() == [0, 0 if place == "cpu" else 5, 0]


# --- which calls are looked at --------------------------------------------------------------------

HOST, META = torch.ones(2), torch.ones(2, device="meta")


class Own(Tensor):
    """A subclass that adds nothing."""


class Sends(Tensor):
    """A subclass that decides by itself what an op does."""

    @classmethod
    def __torch_dispatch__(cls, *args: object, **kwargs: object) -> object:
        raise AssertionError("it was asked")


@pytest.mark.parametrize(
    ("args", "kwargs", "acts"),
    [
        ((HOST, 1), {}, True),
        ((META, 1), {}, False),
        ((META, HOST), {}, True),
        ((HOST, META), {}, True),
        ((nn.Parameter(HOST),), {}, True),
        ((META, [None, HOST]), {}, True),
        ((META, (HOST,)), {}, True),
        ((META, [HOST, META]), {}, True),
        ((HOST, [META]), {}, True),
        ((META, [META]), {}, False),
        ((META,), {"indices": [HOST]}, True),
        ((HOST.as_subclass(Own),), {}, True),
        ((META.as_subclass(Own),), {}, False),
        ((1, None, [1]), {}, False),
        ((), {}, False),
    ],
)
def test_a_call_is_looked_at_by_where_its_tensors_are(
    args: tuple[object, ...], kwargs: dict[str, object], acts: bool
) -> None:
    on_host = interceptor._acting(Mock(_devices=frozenset({"cpu"}), is_deferred=False))
    assert on_host(args, kwargs) is acts
    nowhere = interceptor._acting(Mock(_devices=frozenset({"cuda"}), is_deferred=False))
    assert nowhere(args, kwargs) is False


def test_no_call_is_looked_at_that_a_subclass_decides() -> None:
    own = Tensor._make_subclass(Sends, HOST)
    on_host = interceptor._acting(Mock(_devices=frozenset({"cpu"}), is_deferred=False))
    assert not on_host((HOST, own), {})
    assert not on_host((HOST, [own]), {})


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("has_past", [True, False])
@pytest.mark.parametrize("has_now", [True, False])
def test_a_finding_at_once_is_noted_at_those_before_it(has_past: bool, has_now: bool) -> None:
    """In a call whose guard waits, those of earlier calls come to light."""
    table, ids = torch.zeros(3, 2, device="cuda"), torch.tensor([2 + has_past], device="cuda")
    weights = torch.tensor([1.0, 0.0], device="cuda") * (not has_now)
    is_bad = has_past or has_now
    with pytest.raises(cudalens.DeviceAssertError) if is_bad else nullcontext() as caught:
        with cudalens.guard(deferred=True):
            F.embedding(ids, table)
            torch.multinomial(weights, 1)
    if caught is None:
        return
    assert ("contained 3" in str(caught.value)) is has_past
    notes = getattr(caught.value, "__notes__", [])
    assert ["weights" in note for note in notes] == [True] * (has_past and has_now)


# --- what the kernel of a guarded op does ---------------------------------------------------------


class OnHost:
    """Guards that act on the CPU, and kernels of them above functions of the test."""

    def __init__(
        self,
        report: Callable[..., Any] = lambda call, found: ArithmeticError("found"),
        complain: Callable[[str], object] | None = None,
        check: Callable[..., object] | None = None,
        *,
        is_deferred: bool = False,
        **options: Any,
    ) -> None:
        self.check = check
        """In place of those of the guards, which are asked where a value is bad."""
        self.guards = Interceptor(
            report,
            complain or Mock(side_effect=AssertionError),
            devices=["cpu"],
            on_past_violation=lambda found, past: ArithmeticError("found"),
            **options,
        )
        self.guards.is_deferred = is_deferred

    def call(
        self, name: str, go_on: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
        """Call an op whose dispatch keys are those of the CPU."""
        one = next(item for item in guarded_ops() if item.name == name)
        routes: Any = {_torch.BACKEND_SELECT: (go_on, _torch.redispatcher(one.op)[1])}
        if self.check is not None:
            plans = (replace(plan, check=self.check) for plan in one.plans)
            one = replace(one, plans=tuple(plans))
        kernel = self.guards._kernel(replace(one, routes=routes), _torch.BACKEND_SELECT)
        return kernel(torch._C._dispatch_keys(HERE), *args, **kwargs)


GOOD = torch.tensor([1])


@pytest.mark.parametrize(
    ("name", "args", "is_looked_at", "checked"),
    [
        ("aten::embedding", (HERE, GOOD), False, 1),
        # Neighbours: one that covers nothing, and one that the guards do not look at.
        ("aten::gather", (HERE, 0, GOOD[:, None]), True, 2),
        ("aten::embedding", (META, GOOD.to("meta")), True, 1),
    ],
)
def test_a_call_that_covers_its_parts_is_looked_at_alone(
    name: str, args: tuple[object, ...], is_looked_at: bool, checked: int
) -> None:
    host = OnHost()

    def part(*_: object) -> object:
        return host.call("aten::index_select", lambda *_: "done", HERE, 0, THERE)

    with pytest.raises(ArithmeticError) if is_looked_at else nullcontext():
        assert host.call(name, part, *args) == "done"
    assert host.guards.checked_ops == checked
    with pytest.raises(ArithmeticError):
        part()


def refuse(*_: object) -> object:
    raise ValueError("of torch")


def test_what_a_call_raised_is_told_once_and_a_finding_is_not() -> None:
    told: list[Any] = []
    host = OnHost(on_failed_call=lambda error, arguments: told.append((str(error), arguments)))

    def part(*_: object) -> object:
        return host.call("aten::index_select", refuse, HERE, 0, GOOD)

    with pytest.raises(ValueError, match="of torch"):
        host.call("aten::embedding", part, HERE, GOOD)
    assert [(text, len(args), kwargs) for text, (args, kwargs) in told] == [("of torch", 2, {})]
    with pytest.raises(ArithmeticError):
        host.call("aten::embedding", refuse, HERE, THERE)
    assert len(told) == 1
    assert not host.guards._inside.busy


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_noted_of_a_call_that_torch_refused_is_not_found(fails: bool) -> None:
    host = OnHost(is_deferred=True)
    try:
        with pytest.raises(ValueError, match="of torch") if fails else nullcontext():
            host.call("aten::index_select", refuse if fails else lambda *_: None, HERE, 0, THERE)
        assert isinstance(host.guards.settle(), ArithmeticError) is not fails
    finally:
        PENDING.clear()


def test_an_error_of_torchs_own_shows_no_frame_of_the_guards() -> None:
    """TorchScript would name it in its message."""
    with pytest.raises(TypeError, match="exactly one argument") as caught:
        OnHost().call("aten::index_select", len, HERE, 0, GOOD)
    assert "guarded" not in [frame.f_code.co_name for frame, _ in walk_tb(caught.tb)]


@pytest.mark.parametrize(("is_drawn", "count"), [(True, 0), (False, 1)])
def test_what_was_drawn_needs_no_look_as_an_index(is_drawn: bool, count: int) -> None:
    host, weights = OnHost(is_deferred=True), torch.ones(4, 3)
    drawn = host.call("aten::multinomial", lambda *_: GOOD.clone(), weights, 1, False)
    try:
        host.call("aten::embedding", lambda *_: None, HERE, drawn if is_drawn else GOOD)
        assert PENDING.count == count
    finally:
        PENDING.clear()


def test_an_error_keeps_no_argument_of_the_call() -> None:
    with pytest.raises(ValueError, match="of torch") as caught:
        OnHost().call("aten::index_select", refuse, HERE, 0, GOOD)
    kernels = [frame for frame, _ in walk_tb(caught.tb) if frame.f_code.co_name == "guarded"]
    assert [(it.f_locals["args"], it.f_locals["kwargs"]) for it in kernels] == [((), {})]


SILENT = "aten::embedding_dense_backward", (HERE[:2], THERE, 3, -1, False)


def fail(*_: object) -> None:
    raise LookupError("no such thing")


@pytest.mark.parametrize(
    ("name", "args", "error"),
    [
        ("aten::embedding", (HERE, THERE), cudalens.DeviceIndexError),
        ("aten::multinomial", (HERE[0], 1, False), cudalens.DeviceValueError),
        (*SILENT, None),
    ],
    ids=["index", "value", "silent"],
)
@pytest.mark.parametrize(
    ("report", "line"),
    [
        (fail, "report unavailable: LookupError: no such thing"),
        (lambda *_: "a text", "report unavailable: TypeError: it gave str"),
        (lambda *_: None, "report unavailable: TypeError: it gave NoneType"),
    ],
)
def test_a_bad_call_is_not_made_though_no_report_can_be(
    name: str, args: tuple[object, ...], error: Any, report: Callable[..., object], line: str
) -> None:
    """One that asserts nothing goes on, and needs none."""
    told: list[str] = []
    host = OnHost(report, told.append)
    with nullcontext() if error is None else pytest.raises(error, match=r"is outside|sums to 0"):
        assert host.call(name, lambda *_: "done", *args) == "done"
    assert told == ([line] if error is not None or "None" not in line else [])


def test_a_finding_has_the_names_of_its_guard_and_its_op() -> None:
    seen: list[Any] = []
    host = OnHost(lambda call, found: seen.extend((call, found)) or ArithmeticError())
    with pytest.raises(ArithmeticError):
        host.call("aten::index.Tensor", refuse, HERE, [THERE])
    call, found = seen
    assert (found.guard, found.op, found.overload) == ("index_in_range", "aten::index", "Tensor")
    assert call.arguments["self"] is HERE and call.arguments["indices"][0] is THERE
    assert (call.op, len(call.args), call.kwargs) == (torch.ops.aten.index.Tensor, 2, {})
    with pytest.raises(ArithmeticError):
        host.call("aten::index_select.out", refuse, HERE, 0, THERE, out=HERE)
    assert seen[2].kwargs == {"out": HERE} and seen[2].arguments["out"] is HERE


@pytest.mark.parametrize("can_report", [True, False])
def test_a_finding_in_a_past_call_has_them_too(can_report: bool) -> None:
    seen: list[Any] = []
    host = OnHost(complain=seen.append, is_deferred=True)
    report = lambda *told: seen.extend((*told, torch.is_grad_enabled())) or ArithmeticError()
    host.guards._on_past_violation = report if can_report else fail
    host.call("aten::embedding", lambda *_: None, HERE, THERE)
    error = host.guards.settle()
    if not can_report:
        assert isinstance(error, cudalens.DeviceIndexError)
        assert seen == ["report unavailable: LookupError: no such thing"]
        return
    found, _, has_grad = seen
    assert not has_grad
    names = ("embedding_indices_in_range", "aten::embedding", "default")
    assert (found.guard, found.op, found.overload) == names


def test_a_call_may_leave_out_what_has_a_default() -> None:
    with pytest.raises(ArithmeticError):
        OnHost().call("aten::index_put", refuse, HERE, [THERE], torch.ones(2, 3))


def test_a_silent_finding_leaves_the_other_guards_their_look() -> None:
    host = OnHost(lambda call, found: None if found.is_silent else ArithmeticError())
    call = HERE, [THERE], torch.ones(2, 3), True, True
    with of_the_users(torch.ops.aten._index_put_impl_.default, "b"):
        with pytest.raises(ArithmeticError):
            host.call("aten::_index_put_impl_", refuse, *call)


@pytest.mark.parametrize(
    ("answers", "error", "line"),
    [
        (["text"], None, "guard embedding_indices_in_range failed: TypeError: it gave str"),
        # One that fails is asked again, with more room: what it says then counts.
        ([LookupError("once"), None], None, None),
        ([LookupError(), "text"], None, "guard embedding_indices_in_range failed: TypeError: it"),
        (
            [LookupError("a"), LookupError("b")],
            None,
            "guard embedding_indices_in_range failed: LookupError: b",
        ),
        ([RecursionError("a"), RecursionError("b")], RecursionError, None),
    ],
)
def test_a_guard_that_fails_stops_no_call(answers: list[Any], error: Any, line: str | None) -> None:
    """But where there is no room to look at all."""
    told: list[str] = []
    check = Mock(side_effect=list(answers))
    host = OnHost(complain=told.append, check=check)
    with nullcontext() if error is None else pytest.raises(error):
        assert host.call("aten::embedding", lambda *_: "done", HERE, THERE) == "done"
    assert [it[: len(line or "")] for it in told] == ([] if line is None else [line])
    assert check.call_count == len(answers)


def test_what_is_asked_again_gets_tensors_of_torchs_own_class() -> None:
    """A property of a user's subclass may have raised."""
    kinds: list[Any] = []

    def check(table: Any, indices: Any) -> None:
        kinds.append((type(table), [type(item) for item in indices]))
        if type(table) is Own:
            raise LookupError

    host = OnHost(check=check)
    index = THERE.as_subclass(Own)
    host.call("aten::index.Tensor", lambda *_: None, HERE.as_subclass(Own), [index, index])
    assert kinds[-1] == (Tensor, [Tensor, Tensor])


def test_guards_are_put_in_once_and_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, and what the compiler was told."""
    host, made, gone, told = OnHost(), [], [], Mock()
    register, destroy = _torch.register_kernels, _torch.destroy
    keep = lambda *call: made.extend(found := register(*call)) or found
    monkeypatch.setattr(_torch, "register_kernels", keep)
    monkeypatch.setattr(_torch, "destroy", lambda them: (gone.extend(them), destroy(them)))
    monkeypatch.setattr(interceptor._compiler, "leave_out_own_frames", lambda: told)
    try:
        host.guards.install()
        count = len(made)
        host.guards.install()
        assert len(made) == count > 1
        assert not told.called
        with pytest.raises(ArithmeticError):
            F.embedding(THERE, HERE)
    finally:
        host.guards.uninstall()
    assert set(map(id, gone)) == set(map(id, made))
    assert told.call_count == 1
    with pytest.raises(IndexError):
        F.embedding(THERE, HERE)


def test_guards_that_were_taken_out_are_put_in_again() -> None:
    guards = OnHost().guards
    for _ in range(2):
        guards.install()
        try:
            with pytest.raises(ArithmeticError):
                F.embedding(THERE, HERE)
        finally:
            guards.uninstall()
        with pytest.raises(IndexError):
            F.embedding(THERE, HERE)


def test_findings_wait_where_a_mode_of_the_users_is_open() -> None:
    """The mode sees nothing of the look, nor of a look at gradients that may come of it."""
    host, p = OnHost(is_deferred=True), nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = torch.optim.SGD([p])
    try:
        host.call("aten::index_select", lambda *_: None, HERE, 0, THERE)
        with SeenOps() as seen, SeenFunctions() as functions:
            assert isinstance(host.guards.settle(), ArithmeticError)
            assert host.guards.settle() is None
            assert host.guards._waits._left[optimizer].is_there()
        assert (seen.ops, functions.names) == ([], [])
    finally:
        PENDING.clear()


@pytest.mark.parametrize(
    ("past", "now", "raised", "notes"),
    [
        ([], None, None, []),
        ([], "now", "now", []),
        (["a", "b"], None, "a", ["Also found: b"]),
        (["a"], "now", "a", ["Also found: now"]),
        (["a", "b"], "now", "a", ["Also found: b", "Also found: now"]),
    ],
)
def test_the_first_finding_is_raised_with_the_others_as_notes(
    past: list[str], now: str | None, raised: str | None, notes: list[str]
) -> None:
    guards = OnHost().guards
    errors = [ValueError(f"{text}\nmore") for text in past]
    error = guards._raised(errors, now and ValueError(f"{now}\nmore"))  # type: ignore[arg-type]
    assert (error and str(error).splitlines()[0]) == raised
    assert getattr(error, "__notes__", []) == notes


@contextmanager
def of_the_users(op: Any, *says: str | Exception | None) -> Iterator[list[int]]:
    """Add guards that wait, and say something, nothing or fail; give those that were asked."""
    asked: list[int] = []

    def look(at: int) -> str | None:
        asked.append(at)
        said = says[at]
        if isinstance(said, Exception):
            raise said
        return said

    def guard(at: int) -> Callable[[Tensor], str | None]:
        return lambda self: look(at)

    added = [guards.add(op, guard(at), f"guard_{at}") for at in range(len(says))]
    try:
        yield asked
    finally:
        for guard in added:
            guards.remove(guard)


SELECT = torch.ops.aten.index_select.default


@pytest.mark.parametrize("is_deferred", [True, False])
@pytest.mark.parametrize(
    ("says", "found"),
    [
        (("a", None), "a"),
        ((None, "b"), "b"),
        (("a", "b"), "a"),
        ((None, None), None),
    ],
)
def test_of_several_guards_that_wait_the_first_finding_is_raised(
    is_deferred: bool, says: tuple[str | None, ...], found: str | None
) -> None:
    host = OnHost(lambda call, found: ArithmeticError(found.headline), is_deferred=is_deferred)
    with of_the_users(SELECT, *says):
        with nullcontext() if found is None else pytest.raises(ArithmeticError, match=found):
            assert host.call("aten::index_select", lambda *_: "done", HERE, 0, GOOD) == "done"
    PENDING.clear()


@pytest.mark.parametrize(("error", "count"), [(LookupError(), 1), (RecursionError(), 2)])
def test_a_guard_of_the_users_that_fails_stops_no_call(error: Exception, count: int) -> None:
    """It is asked again only where there was no room for it; the guards behind it have a look."""
    told: list[str] = []
    host = OnHost(lambda call, found: ArithmeticError(found.headline), told.append)
    with of_the_users(SELECT, error, "b") as asked, pytest.raises(ArithmeticError, match="b"):
        host.call("aten::index_select", refuse, HERE, 0, GOOD)
    assert asked == [0] * count + [1]
    assert told == [f"guard guard_0 failed: {type(error).__name__}: "]


def test_a_guard_of_the_users_gets_tensors_as_they_are() -> None:
    kinds: list[Any] = []
    mine = guards.add(SELECT, lambda self: kinds.append(type(self)), "mine")
    try:
        OnHost().call("aten::index_select", lambda *_: None, HERE.as_subclass(Own), 0, GOOD)
    finally:
        guards.remove(mine)
    assert kinds == [Own]


def test_what_only_deferred_guards_need_is_put_in_once_and_taken_out() -> None:
    made, log = OnHost().guards, []
    part = Mock(install=lambda: log.append("in") or (lambda: log.append("out")))
    made._waits = made._compiled = part
    for is_deferred, in_compiled, count in (
        (True, False, 2), (True, True, 2), (False, True, 2), (False, False, 4),
        (False, True, 6), (False, False, 8),
    ):  # fmt: skip
        made.set_deferred(is_deferred, in_compiled)
        assert len(log) == count
    assert log == ["in", "in", "out", "out"] * 2


@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize("is_inside", [True, False])
def test_a_wait_of_the_host_settles_for_its_thread(
    captures: bool, is_inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for threads that it is given; not within a guard or a capture."""
    made = OnHost(is_deferred=True).guards
    monkeypatch.setattr(_torch, "is_capturing", lambda: captures)
    monkeypatch.setattr(made, "settle", settle := Mock(return_value=None))
    made._inside.busy = is_inside
    assert made._settle_here([5]) is None
    here = [((threading.get_ident(), [5]),)]
    assert settle.call_args_list == ([] if captures or is_inside else here)


@pytest.mark.parametrize("captures", [True, False])
def test_guards_that_wait_are_not_asked_in_a_capture(
    captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch, "is_capturing", lambda: captures)
    monkeypatch.setattr(_torch, "current_device", lambda: HERE.device)
    monkeypatch.setattr(PENDING, "can_note", lambda device: True)
    monkeypatch.setattr(PENDING, "note", lambda *noted: None)
    host = OnHost(is_deferred=True)
    with of_the_users(SELECT, None) as asked:
        host.call("aten::index_select", lambda *_: "done", HERE, 0, GOOD)
    assert asked == ([] if captures else [0])


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_wait_within_a_guard_leaves_the_thread_inside(is_inside: bool) -> None:
    guarding = OnHost(is_deferred=True).guards
    guarding._inside.busy = is_inside
    try:
        PENDING.note(GOOD, pending.Check(0, 9, lambda *ends: None))
        assert guarding.settle() is None
        assert guarding._inside.busy is is_inside
        assert PENDING.count == 0
    finally:
        PENDING.clear()


@pytest.mark.parametrize(
    ("labels", "rest", "options"),
    [([1], (), {}), ([1], (2, 0), {}), ([1, 1], (0, 0, True), {}), ([1], (), {"blank": 2})],
)
def test_lengths_that_are_tensors_are_read_for_ctc_loss(
    labels: list[int], rest: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """With all that is given besides; two equal labels need a third step."""
    scores, targets = torch.arange(6.0).reshape(2, 1, 3).log_softmax(2), torch.tensor([labels])
    lengths = torch.tensor([2]), torch.tensor([len(labels)])
    made = interceptor._ctc_loss(None, scores, targets, *lengths, *rest, **options)
    lists = [item.tolist() for item in lengths]
    wanted = torch.ops.aten.ctc_loss.IntList(scores, targets, *lists, *rest, **options)
    assert torch.equal(made, wanted)
