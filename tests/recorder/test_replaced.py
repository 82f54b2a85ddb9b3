"""Functions of torch that no function mode sees, while a recorder is open and afterwards."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from cudalens.recorder import Recorder, replaced
from cudalens.recorder.replaced import REPLACED, forget, here
from cudalens.recorder.sites import SiteTracker


class Noting:
    """An open recorder that keeps what it is told."""

    def __init__(self, watch: Any = None) -> None:
        self.told: list[Any] = []
        self.watch, self.sites = watch, SimpleNamespace(of=lambda frame: frame.f_code.co_name)

    def note_batch(self, iterator: Any, **parts: Any) -> None:
        self.told.append((iterator, parts))

    def note_call(self, func: Any, frame: Any, nodes: int = 0) -> None:
        self.told.append((func, frame.f_code.co_name, nodes))

    def ask_watch(self, look: Any, *args: Any, **options: Any) -> None:
        look(*args, **options)

    def let_go(self) -> None:
        self.told.append("let go")

    def wait_for_current_device(self) -> None:
        self.told.append("waited")

    def note_end(self, error: BaseException, call: Any) -> None:
        self.told.append((type(error), call))

    def failed(self, func: Any, args: Any, kwargs: Any, error: Any, caller: Any, own: Any) -> None:
        self.told.append((args, type(error), caller.f_code.co_name))


@pytest.fixture
def two() -> Iterator[list[Any]]:
    """Two open recorders of this thread."""
    opened = [Noting(), Noting()]
    here().extend(opened)
    yield opened
    for item in opened:
        forget(item)


def test_each_thread_has_recorders_of_its_own(two: list[Any]) -> None:
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(list(here())))
    thread.start()
    thread.join()
    assert seen == [[]]
    assert here()[-2:] == two
    forget(two[0])
    assert two[0] not in here()
    assert two[1] in here()


def test_everything_is_put_back_when_the_recorder_closes() -> None:
    before = {key: getattr(*key) for key in REPLACED._functions}
    with Recorder():
        during = [getattr(*key) is not value for key, value in before.items()]
    assert {key: getattr(*key) for key in before} == before
    assert sum(during) >= 10


def test_a_fast_path_is_not_left_because_of_a_recorder() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    def asked() -> bool:
        return bool(torch.overrides.has_torch_function((torch.ones(1),)))

    with Recorder():
        assert not asked()
        with Mode():
            assert asked()
        assert not asked()


def test_a_mode_that_is_left_below_a_recorder_is_the_one_that_goes() -> None:
    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    mode, recorder = Mode(), Recorder()
    with mode:
        recorder.__enter__()
    torch.ones(1).exp()
    assert seen == []
    assert recorder.recorded_ops == 2
    assert torch.overrides._pop_mode() is recorder  # who pops one himself gets the top
    torch.overrides._push_mode(recorder)
    recorder.__exit__(None, None, None)


def hooked(hooks: Any, others: Any, ask: bool = True) -> Any:
    """Return what a compiled module learns of hooks of all modules."""
    module = nn.modules.module
    saved = dict(module._global_forward_pre_hooks)
    added = {900 + at: hook for at, hook in enumerate(hooks)}
    module._global_forward_pre_hooks.update(added)
    module._global_forward_hooks.update({900 + at: it for at, it in enumerate(others)})
    try:

        def asked() -> Any:
            return (
                "torch" if ask else module._global_forward_hooks or module._global_forward_pre_hooks
            )

        return replaced._hooked(asked)()
    finally:
        module._global_forward_pre_hooks.clear()
        module._global_forward_pre_hooks.update(saved)
        for at in range(len(others)):
            del module._global_forward_hooks[900 + at]


def test_hooks_of_ours_are_none_for_a_compiled_module() -> None:
    own, other = SiteTracker().enter_module, print
    assert hooked([own], [], ask=False) is False
    assert hooked([own], [print], ask=False) is True
    assert hooked([own, other], []) == "torch"
    assert hooked([other], []) == "torch"
    assert hooked([], [], ask=False) is False


@pytest.mark.parametrize("which", [0, 1, None])
def test_before_a_swap_of_tensors_references_are_let_go(two: list[Any], which: int | None) -> None:
    pair = [torch.ones(1), torch.ones(1)]
    held = None if which is None else ref(pair[which])
    swapped: list[Any] = []
    assert replaced._swapping(lambda *both: swapped.append(both) or "done")(*pair) == "done"
    assert (held is None) is (two[0].told == [])
    assert [item.told for item in two] == [[] if which is None else ["let go"]] * 2
    assert len(swapped) == 1
    assert swapped[0][0] is pair[0]
    assert swapped[0][1] is pair[1]


@pytest.mark.parametrize("part", ["indices", "data"])
def test_what_a_loader_gives_is_noted_by_every_recorder(two: list[Any], part: str) -> None:
    iterator = iter([3, 4])
    noted = replaced._noting(part)(next)
    assert [noted(iterator), noted(iterator)] == [3, 4]
    assert two[0].told == two[1].told == [(iterator, {part: 3}), (iterator, {part: 4})]


def watching(is_strict: bool) -> tuple[Any, list[Any]]:
    told: list[Any] = []
    steps = SimpleNamespace(
        scaled=lambda *args: told.append(args),
        updated=lambda *args, **options: told.append((*args, options)),
    )
    return Noting(SimpleNamespace(is_strict=is_strict, steps=steps)), told


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_scaler_is_told_of_to_what_follows_a_nan(two: list[Any], is_strict: bool) -> None:
    recorder, told = watching(is_strict)
    here().append(recorder)
    try:
        scale = replaced._scaling(lambda scaler, outputs: outputs * scaler)
        assert scale(2, 3) == 6
        assert told == ([] if is_strict else [(2, 3, 6)])
    finally:
        forget(recorder)


@pytest.mark.parametrize(
    ("after", "new", "is_strict", "is_lower"),
    [
        (1.0, None, False, True), (2.0, None, False, False), (4.0, None, False, False),
        (1.0, 1.0, False, False), (1.0, None, True, None),
    ],
)  # fmt: skip
def test_a_step_that_was_skipped_lowers_the_scale(
    after: float, new: float | None, is_strict: bool, is_lower: bool | None
) -> None:
    recorder, told = watching(is_strict)
    scales = [2.0]
    scaler = SimpleNamespace(get_scale=lambda: scales[-1])
    given: list[Any] = []

    def update(scaler: Any, new_scale: Any) -> None:
        given.append(new_scale)
        scales.append(after)

    here().append(recorder)
    try:
        replaced._updating(update)(scaler, new)
    finally:
        forget(recorder)
    assert given == [new]
    name = sys._getframe().f_code.co_name
    assert told == ([] if is_lower is None else [(scaler, name, {"is_lower": is_lower})])


@pytest.mark.parametrize("fails", ["nothing", "before", "replay", "after"])
def test_a_graph_is_waited_for_before_and_after_its_replay(fails: str) -> None:
    recorder, other, graph, log = Noting(), Noting(), object(), []

    def wait() -> None:
        log.append("wait")
        if (fails, len(log)) in {("before", 1), ("after", 3)}:
            raise ValueError

    def replay(graph: Any) -> None:
        log.append("replay")
        if fails == "replay":
            raise ValueError

    recorder.wait_for_current_device = wait  # type: ignore[method-assign]
    here().extend([other, recorder])
    name = sys._getframe().f_code.co_name
    try:
        waited = replaced._replaying(replay)
        if fails == "nothing":
            waited(graph)
        else:
            with pytest.raises(ValueError):
                waited(graph)
    finally:
        forget(recorder)
        forget(other)
    told, steps = {
        "nothing": ([(replay, name, 0)], ["wait", "replay", "wait"]),
        "before": ([(ValueError, None)], ["wait"]),
        "replay": ([((graph,), ValueError, name)], ["wait", "replay"]),
        "after": ([((graph,), ValueError, name)], ["wait", "replay", "wait"]),
    }[fails]
    assert (recorder.told, log) == (told, steps)
    assert ((replay, name, 0) in other.told) is (fails == "nothing")


def test_an_apply_that_is_no_class_method_is_noted_with_one_node() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

    same = classmethod(lambda cls, x: x)
    assert replaced._applied(same) is same
    calls: list[Any] = []

    class Native:
        def __get__(self, instance: Any, owner: Any) -> Any:
            return lambda *args, **kwargs: calls.append((owner, args, kwargs)) or "node"

    apply = replaced._applied(Native()).__func__
    with Recorder() as recorder:
        assert apply(Twice, 1, a=2) == "node"
        torch.func.vmap(lambda x: apply(Twice, 1, a=2) and x)(torch.ones(1))  # torch calls it again
        (call,) = [it for it in recorder.snapshot().calls if it.api.func is Twice]
    assert calls == [(Twice, (1,), {"a": 2})] * 2
    assert call.last_nr - call.first_nr == 1


def test_a_custom_function_is_recorded_as_one_call_with_its_node() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.mul(2)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0]

    with Recorder() as recorder:
        y = Twice.apply(torch.ones(1, requires_grad=True))
        assert torch._functorch.utils.unwrap_dead_wrappers((y,)) == (y,)
        snapshot = recorder.snapshot()
        call = snapshot.forward_call(y.grad_fn._sequence_nr())
    assert call is not None
    assert "Twice" in call.name


def test_a_trace_has_nothing_of_the_recorder() -> None:
    def run(x: Any) -> Any:
        return x.exp() + 1

    x = torch.ones(2)
    plain = str(torch.jit.trace(run, x).graph)
    with Recorder() as recorder:
        assert str(torch.jit.trace(run, x).graph) == plain
        before = recorder.recorded_ops
        torch.ones(1)
        assert recorder.recorded_ops == before + 1


def test_backward_runs_inside_each_open_recorder() -> None:
    x = torch.ones(2, requires_grad=True)
    with Recorder() as outer, Recorder() as inner:
        x.sum().backward()
    stems = [[call.api.stem for call in it.snapshot().calls] for it in (outer, inner)]
    assert stems == [["sum", "backward"]] * 2


def test_a_thread_of_autograds_is_seen_by_the_recorders_among_its_modes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    noted = SimpleNamespace(run_backward=lambda run, outputs: run(outputs))
    monkeypatch.setattr(replaced, "BackwardPass", lambda it: seen.append(it) or noted)
    with Recorder() as recorder:
        monkeypatch.setattr(replaced, "here", list)  # that thread has opened none
        assert replaced._engine(str)(1) == "1"
    assert seen == [recorder]


def test_a_worker_leaves_the_recorders_that_it_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Any] = []
    opened = [SimpleNamespace(__exit__=lambda *args, at=at: left.append(at)) for at in (0, 1)]
    here().extend(opened)
    try:
        replaced._leave_worker()
        assert left == []
        code = compile("leave()", f"{torch.__path__[0]}/utils/data/dataloader.py", "exec")
        exec(code, {"leave": replaced._leave_worker})
        assert left == [1, 0]
    finally:
        for item in opened:
            forget(item)


@pytest.mark.parametrize(("is_strict", "watches"), [(False, True), (True, False), (None, False)])
def test_who_follows_a_nan_to_where_it_matters(is_strict: bool | None, watches: bool) -> None:
    recorder = Noting(None if is_strict is None else SimpleNamespace(is_strict=is_strict))
    here().append(recorder)
    try:
        assert replaced._watching() == ([recorder] if watches else [])
    finally:
        forget(recorder)
