"""The recording mode by itself: life, waits, watches, what it says of a failure."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import _global_optimizer_post_hooks as AFTER_STEPS
from torch.optim.optimizer import _global_optimizer_pre_hooks as BEFORE_STEPS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from cudalens.core.call import THREAD, ApiCall, NodeMark
from cudalens.core.errors import DeviceAssertError
from cudalens.recorder import _torch
from cudalens.recorder.calls import Recorded
from cudalens.recorder.mode import RecordingMode
from cudalens.recorder.sites import entries_of
from tests.probes import Watch


class Net(nn.Module):
    """Two inputs, one output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, torch.ones(1, 2))


def noted(mode: RecordingMode) -> list[str]:
    return [item[1].stem for item in mode._ring]


X = torch.ones(2, 3)


# --- life ----------------------------------------------------------------------------------------


def test_nothing_stays_when_it_ends() -> None:
    before = THREAD.running.extremes
    kept = len(BEFORE_STEPS), len(AFTER_STEPS)
    with RecordingMode(watch=Watch()) as mode:
        assert mode.is_on()
        assert THREAD.running.extremes == (*before, mode._read)
        assert len(BEFORE_STEPS) == kept[0] + 2
        X.exp()
    assert not mode.is_on()
    assert THREAD.running.extremes == before
    assert (len(BEFORE_STEPS), len(AFTER_STEPS)) == kept
    X.exp()
    assert noted(mode) == ["exp"]


def test_an_inner_recorder_leaves_the_outer_one() -> None:
    with RecordingMode() as outer:
        with RecordingMode() as inner:
            X.exp()
        assert [item is outer._read for item in THREAD.running.extremes][-1:] == [True]
        X.log()
    assert noted(inner) == ["exp"]
    assert noted(outer) == ["exp", "log"]


def test_a_beginning_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mode, before = RecordingMode(), THREAD.running.extremes
    monkeypatch.setattr(mode, "install", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mode.__enter__()
    assert THREAD.running.extremes == before
    assert not nn.modules.module._global_forward_pre_hooks
    X.exp()
    assert noted(mode) == []


def test_an_end_that_is_interrupted_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    mode, closed = RecordingMode(), list[str]()
    close = mode._close

    def interrupted() -> None:
        closed.append("")
        if len(closed) == 1:
            raise KeyboardInterrupt
        close()

    mode.__enter__()
    monkeypatch.setattr(mode, "_close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mode.__exit__()
    assert len(closed) == 2
    assert not mode.is_on()


def test_another_thread_s_end_stops_the_recording() -> None:
    with RecordingMode() as mode:
        X.exp()
        thread = threading.Thread(target=mode.__exit__)
        thread.start()
        thread.join()
        X.log()
        assert not mode.is_on()
        X.sin()
    assert noted(mode) == ["exp"]


def test_the_last_call_is_told_with_its_place() -> None:
    with RecordingMode() as mode:
        X.exp()
        X.log()
    name, site = mode.last_call()
    assert name == "torch.Tensor.log"
    assert entries_of(site)[-1].code.co_filename == __file__


def test_to_let_go_is_to_forget_the_calls_and_to_tell_the_watch() -> None:
    watch = Watch()
    with RecordingMode(watch=watch) as mode:
        X.exp()
        mode.let_go()
        assert noted(mode) == []
        X.log()
    assert watch.seen == ["exp", "let go", "log"]
    assert (noted(mode), mode.recorded_ops) == (["log"], 2)


# --- what a watch is shown -----------------------------------------------------------------------


def test_what_a_watch_finds_is_raised_after_the_call_is_noted() -> None:
    watch = Watch()
    watch.finds["log"] = ArithmeticError("here")
    with RecordingMode(watch=watch) as mode:
        X.exp()
        with pytest.raises(ArithmeticError, match="here"):
            X.log()
        X.sin()
    assert noted(mode) == ["exp", "log", "sin"]
    assert mode.limits == []


def test_a_watch_that_fails_is_a_limit() -> None:
    watch = Watch()
    watch.fails = {"exp", "before add_", "read item"}
    with RecordingMode(watch=watch) as mode:
        assert X.exp().shape == (2, 3)
        assert torch.zeros(1).add_(1).item() == 1
    assert set(mode.limits) == {
        "a result was not looked at: KeyError: 'exp'",
        "a result was not looked at: KeyError: 'before add_'",
    }


@pytest.mark.parametrize(
    ("look", "run"),
    [
        ("read __format__", lambda x: f"{x[0]:.1f}"),
        ("step begins", lambda x: torch.optim.SGD([x]).step()),
        ("step ends", lambda x: torch.optim.SGD([x]).step()),
    ],
)
def test_what_a_watch_finds_beside_results_is_raised(look: str, run: Callable[[Any], Any]) -> None:
    watch = Watch()
    watch.finds[look] = ArithmeticError("here")
    with RecordingMode(watch=watch), pytest.raises(ArithmeticError, match="here"):
        run(torch.zeros(2))


def test_what_a_write_goes_over_is_shown_before_it() -> None:
    watch, x = Watch(), torch.zeros(2)
    watch.on_show["before add_"] = lambda: values.append(x.tolist())
    watch.on_show["add_"] = lambda: values.append(x.tolist())
    values: list[Any] = []
    with RecordingMode(watch=watch):
        x.add_(1)
    assert watch.seen == ["before add_", "add_"]
    assert values == [[0, 0], [1, 1]]


def test_a_step_is_shown_from_its_beginning_to_its_end() -> None:
    weight, watch = nn.Parameter(torch.ones(2)), Watch()
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight])
    with RecordingMode(watch=watch):
        optimizer.step()
    # What is computed inside is its own.
    assert [item for item in watch.seen if "before" not in item] == ["step begins", "step ends"]


def test_what_an_optimizer_reads_is_not_noted() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], foreach=False)
    with RecordingMode() as mode:
        weight.exp()
        optimizer.step()
    calls = [Recorded._make(item) for item in mode._ring]
    outside, inside = calls[0], [call for call in calls[1:] if call.written]
    assert outside.reads is not None and outside.reads[0]() is weight
    assert inside and all(call.reads is None for call in inside)


def test_a_strict_watch_is_shown_each_call_of_a_step_instead() -> None:
    weight, watch = nn.Parameter(torch.ones(2)), Watch()
    watch.is_strict = True
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight])
    with RecordingMode(watch=watch):
        optimizer.step()
    assert not {"step begins", "step ends"} & {*watch.seen}
    assert "add_" in watch.seen


def test_what_is_put_into_a_text_is_shown_as_read() -> None:
    watch = Watch()
    with RecordingMode(watch=watch):
        X.requires_grad_(False)
        assert watch.seen == []
        f"{X[0, 0]:.3f}"
    assert watch.seen[-1:] == ["read __format__"]


def test_only_what_a_call_in_place_goes_over_is_shown_before_it() -> None:
    watch, x = Watch(), torch.zeros(2)
    with RecordingMode(watch=watch):
        torch.exp(X[0, :2], out=x)
        x.exp_()
    assert watch.seen == ["exp", "before exp_", "exp_"]


def test_a_view_is_shown_only_while_something_is_marked() -> None:
    watch = Watch()
    with RecordingMode(watch=watch):
        X.view(3, 2)
        watch.marked = True
        X.view(6)
    assert watch.seen == ["view"]


# --- frozen tensors, batches, calls that no mode sees --------------------------------------------


def test_where_tensors_were_frozen_is_told_of_all_or_of_none() -> None:
    left, right, other = (torch.ones(2, requires_grad=True) for _ in range(3))
    with RecordingMode() as mode:
        left.requires_grad_(False)
        right.requires_grad_(requires_grad=False)
        other.requires_grad_(True)
        f"{X} {left}"
        sites = mode.frozen_at([left, right])
        lines = [entries_of(site)[-1].lineno for site in sites]
        assert lines[1] == lines[0] + 1
        assert mode.frozen_at([left, other]) == []
        assert mode.frozen_at([X]) == []
        left.requires_grad_(False)
        (last,) = mode.frozen_at([left])
        assert (entries_of(last)[-1].lineno) > lines[1]
    assert mode.frozen_at([]) == []


def test_a_frozen_tensor_that_cannot_be_noted_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(frame: Any) -> Any:
        raise KeyError("site")

    left = nn.Parameter(torch.ones(2))
    with RecordingMode() as mode:
        monkeypatch.setattr(mode.sites, "of", of)
        assert left.requires_grad_(True) is left
        assert mode.limits == []
        assert left.requires_grad_(False) is left
    assert mode.limits == ["a frozen tensor was not noted: KeyError: 'site'"]


@pytest.mark.parametrize(
    ("site", "passes", "expected"),
    [
        (None, [("outer", True), ("inner", True)], "inner"),
        (None, [("outer", True), ("inner", False)], "outer"),
        (None, [("outer", False)], None),
        (None, [(None, True)], None),
        (("code", 3, None), [("outer", True)], ("code", 3, "outer")),
        (("code", 3, None), [(None, True)], ("code", 3, None)),
        (("code", 3, "own"), [("outer", True)], ("code", 3, "own")),
    ],
)
def test_a_call_on_a_thread_of_autograd_s_is_of_the_line_of_its_innermost_pass(
    site: Any, passes: list[tuple[Any, bool]], expected: Any
) -> None:
    """That thread counts for itself: no number of its own says which node a call has made."""
    mode: Any = RecordingMode()
    here = threading.get_ident()
    mode.passes = [
        SimpleNamespace(site=its, marks={here if is_run_here else 0: None})
        for its, is_run_here in passes
    ]
    assert mode._of_worker(site, 5, 6) == (site, 5, 6)
    mode._thread = 0
    assert mode._of_worker(site, 5, 6) == (expected, 0, 0)


def test_batches_are_forgotten_when_tensors_are_let_go() -> None:
    with RecordingMode() as mode:
        (batch,) = DataLoader(TensorDataset(X), batch_size=2)
        assert [it.number for it in mode._batches.living()] == [1]
        mode.let_go()
        assert mode._batches.living() == []
    assert batch[0].shape == X.shape


def test_a_batch_that_cannot_be_noted_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = RecordingMode()
    noted: list[tuple[str, Any]] = []

    def note(iterator: Any, data: Any, number: int) -> None:
        noted.append((data, number))
        if data == "broken":
            raise KeyError(data)

    monkeypatch.setattr(mode._batches, "note", note)
    monkeypatch.setattr(mode._batches, "note_indices", lambda it, items: noted.append(items))
    mode.recorded_ops = 7
    mode.note_batch(None, data="rows")
    mode.note_batch(None)  # a batch may be None
    mode.note_batch(None, indices=[1, 2])
    mode.note_batch(None, indices=[])
    assert noted == [("rows", 7), (None, 7), [1, 2], []]
    assert mode.limits == []
    mode.note_batch(None, data="broken")
    assert mode.limits == ["a batch was not noted: KeyError: 'broken'"]


def test_a_call_that_no_mode_sees_counts_with_its_nodes() -> None:
    mode = RecordingMode()
    mode.note_call(torch.autograd.backward, None, nodes=3)
    ((seq, api, _, first, last, *_),) = mode._ring
    assert (seq, api.stem, last - first, mode.recorded_ops) == (1, "backward", 3, 1)
    mode.note_call(torch.exp, sys._getframe())
    (_, (seq, _, site, first, last, *_)) = mode._ring
    assert (seq, first, mode.last_call()) == (2, last, ("torch.exp", site))
    assert entries_of(site)[-1].code.co_name == sys._getframe().f_code.co_name
    mode._apis = None  # type: ignore[assignment]
    mode.note_call(torch.exp, None)
    assert [text.partition(":")[0] for text in mode.limits] == ["a call was not recorded"]
    assert mode.recorded_ops == 2


# --- waits ---------------------------------------------------------------------------------------


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Devices that were waited for."""
    seen: list[torch.device] = []
    monkeypatch.setattr(_torch, "wait_if_busy", seen.append)
    return seen


CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize("is_synchronous", [True, False])
def test_only_devices_are_waited_for_and_only_where_asked(
    waits: list[torch.device], is_synchronous: bool
) -> None:
    mode = RecordingMode(sync=is_synchronous)
    mode._wait(CPU)
    assert mode.devices == set()
    mode.wait_for_all()
    assert waits == []
    mode._wait(CUDA)
    assert mode.devices == {CUDA}
    mode.wait_for_all()
    assert waits == [CUDA] * (2 if is_synchronous else 0)


def test_a_call_on_the_device_is_waited_for(sim: object, waits: list[torch.device]) -> None:
    x = torch.ones(2, device="cuda")
    with RecordingMode() as mode:
        waits.clear()
        torch.exp(x)
        assert waits == [CUDA] * 2  # what came before, and itself
        waits.clear()
        torch.mul(x, torch.tensor(2.0))
        assert waits == [CUDA] * 2
        waits.clear()
        torch.exp(X)
        assert waits == []
        x[0].item()
        assert len(waits) == 3  # of the row, before and after; before a number, which has waited
        waits.clear()
        torch.ones(2, device="cuda")
        assert waits == [CUDA]
    assert mode.devices == {CUDA}


@pytest.mark.parametrize(
    ("given", "result", "is_waited_for"),
    [
        ("cpu", "cuda", True),
        ("cuda", "cpu", True),
        ("cuda", None, True),
        ("cpu", ["cpu", "cuda"], True),
        ("cpu", "cpu", False),
        ("cpu", None, False),
        ("cuda", 3.0, False),  # the host has waited for a number
        ("cuda", True, False),
    ],
)
def test_what_a_call_was_given_or_gave_says_what_to_wait_for(
    given: str, result: Any, is_waited_for: bool, sim: object, waits: list[torch.device]
) -> None:
    made = {name: torch.ones(2, device=name) for name in ("cpu", "cuda")}
    results = [made[it] for it in result] if isinstance(result, list) else made.get(result, result)
    waits.clear()
    mode = RecordingMode()
    mode._wait_after([made[given]], results)
    assert waits == ([CUDA] if is_waited_for else [])
    assert mode.limits == []


def test_a_tensor_without_values_is_not_waited_for(waits: list[torch.device]) -> None:
    fake = FakeTensor(FakeTensorMode(), torch.ones(2, device="meta"), CUDA)
    RecordingMode()._wait_after([fake], fake)
    assert waits == []


def test_a_call_that_cannot_be_waited_for_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cudalens.recorder.mode.tensors_in", lambda items: {}["result"])
    mode = RecordingMode()
    mode._wait_after([X], X)
    assert mode.limits == ["a call was not waited for: KeyError: 'result'"]


def test_the_current_device_is_waited_for_once_it_is_used(
    monkeypatch: pytest.MonkeyPatch, waits: list[torch.device]
) -> None:
    mode = RecordingMode()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    mode.wait_for_current_device()
    assert waits == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    mode.wait_for_current_device()
    assert waits == [torch.device("cuda", 1)]


# --- failures ------------------------------------------------------------------------------------


def raised(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        call()
    return caught.value


def test_the_call_that_raised_is_found_by_its_exception() -> None:
    left = torch.ones(2, 3)
    with RecordingMode() as mode:
        error = raised(lambda: torch.mm(left, left))
        call = mode.call_of(error)
        assert call is not None and call.func is torch.mm
        assert call.args == (left, left) and call.kwargs == {}
        assert call.code is not None and call.code.co_filename == __file__
        assert entries_of(call.site)[-1].code.co_filename == __file__
        assert mode.call_of(raised(lambda: int("x"))) is None
        assert mode.call_of(None) is None
        assert mode.recorded_ops == 1
    assert call.args == ()


def test_a_call_that_raised_inside_a_module_is_found() -> None:
    with RecordingMode() as mode:
        inner = torch.ones(5)
        error = raised(lambda: Net()(inner))
        call = mode.call_of(error)
        assert call is not None and call.func is nn.functional.linear


@pytest.mark.parametrize(
    ("kind", "has_call"), [(KeyboardInterrupt, False), (SystemExit, False), (ValueError, True)]
)
def test_an_interrupt_has_no_call(kind: type[BaseException], has_call: bool) -> None:
    def stop(*_: Any) -> Any:
        raise kind

    with RecordingMode() as mode:
        error = raised(lambda: X.apply_(stop))
        assert isinstance(error, kind)
        assert (mode.call_of(error) is not None) is has_call


def test_of_calls_that_raised_one_inside_the_other_the_innermost_is_found() -> None:
    mode, calls = RecordingMode(), [ApiCall(func=torch.exp), ApiCall(func=torch.log)]

    def fail(depth: int) -> None:
        mode.attach(calls[depth], sys._getframe())
        fail(depth + 1)

    assert isinstance(error := raised(lambda: fail(0)), IndexError)
    assert mode.call_of(error) is calls[1]


def test_the_first_end_of_the_device_stays_and_each_is_told() -> None:
    told: list[BaseException] = []
    mode = RecordingMode(
        is_fatal=lambda error: isinstance(error, RuntimeError), on_device_end=told.append
    )
    first, second = ApiCall(func=torch.exp), ApiCall(func=torch.log)
    mode.note_end(ValueError(), first)
    assert (mode.is_over, mode.fatal, told) == (False, None, [])
    lost, later = RuntimeError("lost"), RuntimeError("later")
    mode.note_end(lost, first)
    assert mode.is_over and mode.fatal is first
    mode.note_end(later, second)
    assert mode.fatal is first
    assert told == [lost, later]


def test_the_call_that_ended_the_device_is_released_with_the_recorder() -> None:
    call = ApiCall(func=torch.exp, args=(X,))
    with RecordingMode(is_fatal=lambda error: True) as mode:
        mode.note_end(RuntimeError(), call)
        assert len(call.args) == 1
    assert mode.fatal is call
    assert call.args == ()


def test_a_finding_of_ours_does_not_end_the_device() -> None:
    mode = RecordingMode(is_fatal=lambda error: True)
    mode.note_end(DeviceAssertError.__new__(DeviceAssertError), None)
    assert not mode.is_over


def test_what_is_told_of_the_end_may_fail() -> None:
    def fail(error: BaseException) -> None:
        raise KeyError("told")

    mode = RecordingMode(is_fatal=lambda error: True, on_device_end=fail)
    mode.note_end(RuntimeError(), None)
    assert mode.is_over
    assert mode.limits == ["a lost device was not noted: KeyError: 'told'"]


def test_what_guards_read_of_a_call_that_failed_is_not_of_the_next() -> None:
    with RecordingMode() as mode:

        def fail() -> None:
            mode._read.append(("index", 0, 9))
            torch.mm(X, X)

        raised(fail)
        assert mode._read == []


def test_values_of_earlier_calls_of_a_line() -> None:
    seen: list[Any] = []
    with RecordingMode() as mode:
        assert mode.seen_before("index") is None  # no call is being made

        class Read(TorchDispatchMode):
            """Read as guards do, while the call is being made."""

            def __init__(self, low: float, high: float) -> None:
                super().__init__()
                self.read = ("index", low, high)

            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                seen.append(mode.seen_before("index"))
                mode._read.append(self.read)
                return func(*args, **(kwargs or {}))

        for extremes in ((1.0, 5.0), (0.0, 3.0), (2.0, 9.0)):
            with Read(*extremes):
                torch.neg(X)
        assert mode.seen_before("index") is None
    assert [item and (item["calls"], item["min"], item["max"]) for item in seen] == [
        None,
        (1, 1.0, 5.0),
        (2, 0.0, 5.0),
    ]


def test_what_guards_read_in_a_backward_pass_is_of_many_calls() -> None:
    x = torch.ones(2, requires_grad=True)
    with RecordingMode() as mode:
        loss = x.exp().sum()
        mode._read.append(("index", 0, 9))
        loss.backward()
        assert mode._read == []
    assert mode._seen._extremes == {}


def test_a_failed_tensor_lives_no_longer_than_its_exception() -> None:
    def fail() -> weakref.ref[torch.Tensor]:
        left = torch.ones(2, 3)
        with pytest.raises(RuntimeError):
            left @ left
        return weakref.ref(left)

    with RecordingMode() as mode:
        reference = fail()
        gc.collect()
        assert reference() is None
    assert mode.limits == []


# --- beside another mode, another recorder, on another thread -------------------------------------


def test_a_mode_below_sees_the_calls_of_the_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Below(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            below.append(func)
            return func(*args, **(kwargs or {}))

    below, watch, shown = list[Any](), Watch(), list[Any]()
    monkeypatch.setattr(watch, "before", lambda api, args: shown.append(args))
    x = torch.zeros(2)
    with Below(), RecordingMode(watch=watch) as mode:
        torch.exp(x)
        torch.add(x, 1, out=x)
        x.mul_(3)
        torch.stack([x, x])
    assert below == [torch.exp, torch.add, torch.Tensor.mul_, torch.stack]
    assert noted(mode) == ["exp", "add", "mul_", "stack"]
    assert [args[0] is x and args[1:] for args in shown] == [(3,)]
    assert mode.limits == []


def test_two_recorders_know_the_line_of_a_call_that_failed() -> None:
    with RecordingMode() as outer, RecordingMode() as inner:
        error = raised(lambda: torch.mm(X, X))
        for mode in (outer, inner):
            call = mode.call_of(error)
            assert call is not None and call.code is not None
            assert call.code.co_filename == __file__


def test_after_an_inner_call_the_outer_one_is_still_being_made() -> None:
    watch, running = Watch(), list[Any]()
    watch.on_show["exp"] = lambda: running.append(THREAD.running.call)
    with RecordingMode(), RecordingMode(watch=watch):
        X.exp()
        assert THREAD.running.call is None
    assert [call and call[0] for call in running] == [torch.Tensor.exp]


def test_after_an_inner_call_has_failed_the_outer_one_is_still_being_made() -> None:
    running = list[Any]()

    class Between(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            try:
                return func(*args, **(kwargs or {}))
            finally:
                running.append(THREAD.running.call)

    with RecordingMode(), Between(), RecordingMode():
        raised(lambda: torch.mm(X, X))
        assert THREAD.running.call is None
    assert [call and call[0] for call in running] == [torch.mm]


@pytest.mark.parametrize("has_pass", [True, False])
def test_a_call_of_a_pass_is_made_on_the_thread_that_runs_it(has_pass: bool) -> None:
    """Where no pass runs, no other thread makes calls: the recorder need not ask which it is."""
    watch, running, sites = Watch(), list[Any](), list[Any]()
    mode: Any = RecordingMode(watch=watch)
    its = mode._opened_on
    watch.on_show["exp"] = lambda: running.append((THREAD.running.call, its.call))

    def run() -> None:
        mode.passes = [SimpleNamespace(site="line", marks={threading.get_ident(): None})]
        mode.passes *= has_pass
        mode.__torch_function__(torch.exp, (), (X,))
        error = raised(lambda: mode.__torch_function__(torch.mm, (), (X, X)))
        sites.append(mode.call_of(error).site)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    ((made, of_opener),) = running
    assert (made is not None, of_opener is not None) == (has_pass, not has_pass)
    # Its stack ends before the line that waits for it.
    assert [site[2] for site in sites] == ["line" if has_pass else None]


def test_what_was_noted_of_a_failing_call_before_it_came_back_stays() -> None:
    node = NodeMark("ExpBackward0", 3)

    def inner() -> None:
        call = ApiCall(func=None, node=node)
        mode.attach(call, sys._getframe())
        raise RuntimeError

    mode = RecordingMode()
    error = raised(inner)
    call = mode.failed(torch.exp, (X,), None, error, sys._getframe())
    assert call is not None and call is mode.call_of(error)
    assert (call.func, call.kwargs, call.node) == (torch.exp, {}, node)


def test_what_was_launched_before_is_no_call_s_failure(
    sim: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, told = torch.ones(2, device="cuda"), list[BaseException]()
    with RecordingMode(is_fatal=lambda error: True, on_device_end=told.append) as mode:
        lost = RuntimeError("lost")
        monkeypatch.setattr(_torch, "wait_if_busy", Mock(side_effect=lost))
        assert raised(x.exp) is lost
        assert mode.call_of(lost) is None and noted(mode) == []
    assert (mode.is_over, mode.fatal, told) == (True, None, [lost])


def test_of_frozen_tensors_as_many_are_known_as_of_calls() -> None:
    tensors = [torch.ones(2) for _ in range(20)]
    for kept in (20, 19):
        with RecordingMode(max_ops=kept) as mode:
            for item in tensors:
                item.requires_grad_(False)
            assert len(mode.frozen_at(tensors)) == (20 if kept == 20 else 0)
            assert len(mode.frozen_at(tensors[-kept:])) == kept
