"""A backward pass as a recorder sees it: which node runs, what is looked at, what stays."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from cudalens.core.call import ApiCall
from cudalens.recorder import Recorder, backward
from cudalens.recorder.backward import BackwardPass
from tests.probes import Watch


class Twice(torch.autograd.Function):
    """A custom function, whose node could have any name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class AddBackward(Twice):
    """A custom function with a name of torch's."""


def x() -> Tensor:
    return torch.ones(2, requires_grad=True)


def looked_at(run: Callable[[], Any]) -> list[str]:
    watch = Watch()
    with Recorder(watch=watch):
        run()
    return watch.seen_backward


def test_gradients_are_looked_at_where_a_node_can_make_a_nan() -> None:
    leaf = x()
    seen = looked_at(lambda: (leaf.exp().t() + 1).view(2).log().sum().backward())
    assert seen == ["loss of 1", "LogBackward0", "ExpBackward0", "pass"]


@pytest.mark.parametrize("function", [Twice, AddBackward])
def test_a_custom_function_is_looked_at_whatever_its_name(function: Any) -> None:
    leaf = x()
    seen = looked_at(lambda: function.apply(leaf).sum().backward())
    assert seen == ["loss of 1", f"{function.__name__}Backward", "pass"]


def test_each_node_is_looked_at_once_though_two_lead_to_it() -> None:
    def run() -> None:
        y = x().exp()
        torch.autograd.backward([(y * y).sum(), y.sum()])

    assert looked_at(run).count("ExpBackward0") == 1
    assert looked_at(run)[0] == "loss of 2"


def test_a_finding_is_raised_when_the_engine_has_come_back() -> None:
    watch, leaf = Watch(), x()
    watch.finds["LogBackward0"] = ArithmeticError("here")
    loss = leaf.exp().log().sum()
    with Recorder(watch=watch) as recorder:
        with pytest.raises(ArithmeticError, match="here"):
            loss.backward()
        assert recorder.passes == []
    # The engine went on, and nothing more was looked at.
    assert leaf.grad is not None
    assert watch.seen_backward == ["loss of 1", "LogBackward0"]


def test_a_finding_of_the_loss_keeps_the_engine_from_running() -> None:
    watch, leaf = Watch(), x()
    watch.finds["loss of 1"] = ArithmeticError()
    with Recorder(watch=watch) as recorder:
        with pytest.raises(ArithmeticError):
            leaf.exp().sum().backward()
        assert recorder.passes == []
    assert leaf.grad is None


@pytest.mark.parametrize("look", ["loss of 1", "ExpBackward0", "pass"])
def test_a_watch_that_fails_is_a_limit(look: str) -> None:
    watch, leaf = Watch(), x()
    watch.fails.add(look)
    with Recorder(watch=watch) as recorder:
        leaf.exp().sum().backward()
    assert recorder.limits == [f"a gradient was not looked at: KeyError: '{look}'"]
    assert leaf.grad is not None


def test_a_kept_graph_has_no_hook_of_ours_afterwards() -> None:
    watch, leaf = Watch(), x()
    loss = leaf.exp().sum()
    with Recorder(watch=watch) as recorder:
        loss.backward(retain_graph=True)
        inside = recorder.recorded_ops
        seen = [*watch.seen_backward]
        assert seen == ["loss of 1", "ExpBackward0", "pass"]
    loss.backward(retain_graph=True)
    assert (watch.seen_backward, recorder.recorded_ops) == (seen, inside)
    with Recorder(watch=watch):
        loss.backward()
    assert watch.seen_backward == seen * 2


@pytest.mark.parametrize("is_kept", [False, True])
def test_what_stays_on_a_node_is_put_on_a_graph_that_runs_once(
    is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hooks of a kept graph can be removed one by one."""
    staying: list[str] = []

    def before_nodes(mark: Any) -> Any:
        return lambda node: staying.append(node.name()), lambda: staying.append("removed")

    monkeypatch.setattr(backward._torch, "before_nodes", before_nodes)
    with Recorder():
        x().exp().sum().backward(retain_graph=is_kept)
    assert ("ExpBackward0" in staying) is not is_kept
    assert staying[-1] == "removed"


@pytest.mark.parametrize(
    ("options", "is_kept"), [((), True), ((None, True), True), ((None, False), False)]
)
def test_a_graph_may_run_again_unless_the_engine_is_told_otherwise(
    options: tuple[Any, ...], is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    staying: list[str] = []
    monkeypatch.setattr(
        backward._torch,
        "before_nodes",
        lambda mark: (lambda node: staying.append(node.name()), lambda: None),
    )
    watch = Watch()
    with Recorder(watch=watch) as recorder:
        run = BackwardPass(recorder)
        result = run.run_backward(lambda outputs, *_: "made", [x().exp(), x().exp()], *options)
    assert result == "made"
    assert staying == ([] if is_kept else ["ExpBackward0"] * 2)
    assert watch.seen_backward == ["loss of 2", "pass"]


def test_a_call_of_the_engine_by_itself_is_waited_for_and_leaves_the_recorder_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    with Recorder() as recorder:
        monkeypatch.setattr(recorder, "wait_for_all", lambda: order.append("wait"))
        BackwardPass(recorder).run_backward(lambda *_: order.append("run"), x().exp())
        assert order == ["run", "wait"]
        assert recorder.is_on()
        assert recorder.last_call()[0] == "torch.autograd.backward"


@pytest.mark.parametrize("fails", [False, True])
def test_the_condition_of_a_where_is_kept_for_the_nodes_behind_it(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, leaf, kept = Watch(), x(), list[tuple[str, bool]]()
    monkeypatch.setattr(
        watch, "of_node", lambda node, *_: kept.append((node.name(), bool(_[-1].conditions)))
    )
    if fails:
        monkeypatch.setattr(backward, "keep_condition", Mock(side_effect=KeyError("where")))
    with Recorder(watch=watch) as recorder:
        torch.where(leaf > 0, leaf.exp(), 1.0).sum().backward()
    assert kept == [("WhereBackward0", not fails), ("ExpBackward0", not fails)]
    assert recorder.limits == ["a condition was not kept: KeyError: 'where'"] * fails


def test_a_pass_inside_a_pass_begins_with_no_loss_of_the_user_s() -> None:
    class Inner(Twice):
        """Runs a pass of its own, as a checkpoint does."""

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            with torch.enable_grad():
                leaf = x()
                torch.autograd.backward(leaf.exp(), grad)
            return grad * 2

    seen = looked_at(lambda: Inner.apply(x()).sum().backward())
    assert (seen[0], seen.count("loss of 1")) == ("loss of 1", 1)
    assert "ExpBackward0" in seen


def test_nothing_of_a_pass_stays_when_it_has_failed() -> None:
    watch = Watch()
    watch.finds["loss of 1"] = ArithmeticError()
    with Recorder(watch=watch) as recorder:
        run = BackwardPass(recorder)
        run.marks[get_ident()] = x().exp().grad_fn
        with pytest.raises(ArithmeticError):
            run.run_backward(lambda *_: None, x().exp())
        assert (run.marks, run.finding, recorder.passes) == ({}, None, [])


def test_a_pass_from_an_edge_of_the_graph_is_looked_at() -> None:
    y = x().exp()
    edge: Any = torch.autograd.graph.get_gradient_edge(y)
    seen = looked_at(lambda: torch.autograd.backward([edge], [torch.ones(2)]))
    assert "ExpBackward0" in seen


@pytest.mark.parametrize("is_synchronous", [True, False])
@pytest.mark.parametrize("devices", [[], ["cuda"]])
def test_the_device_is_waited_for_before_each_node_where_that_is_asked_for(
    devices: list[str], is_synchronous: bool
) -> None:
    recorder = Mock(devices=devices, is_synchronous=is_synchronous, watch=None)
    undo: list[Callable[[], object]] = []
    run, y = BackwardPass(recorder), x().exp()
    run._register(y, False, undo)
    y.sum().backward()
    assert recorder.wait_for_all.called is (bool(devices) and is_synchronous)
    assert run.running is not None and run.running.name == "ExpBackward0"
    undo[0]()


# --- failures ------------------------------------------------------------------------------------


class Failing(torch.autograd.Function):
    """Fails in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise KeyError("own")


def failure(run: Callable[[], Any]) -> ApiCall:
    """Return what the recorder knows of the failing call, as far as it is no tensor."""
    with Recorder() as recorder:
        with pytest.raises((RuntimeError, KeyError)) as caught:
            run()
        call = recorder.call_of(caught.value)
        assert recorder.passes == []
        assert recorder.limits == []
    assert call is not None
    return call


def test_the_node_that_raised_is_told() -> None:
    def changed() -> None:
        y = x().exp()
        z = (y * 1).sum()
        with torch.no_grad():
            y.add_(1)
        z.backward()

    call = failure(changed)
    assert call.node is not None and call.node.name == "ExpBackward0"
    assert call.name == "torch.Tensor.backward"
    call = failure(lambda: Failing.apply(x()).sum().backward())
    assert call.node is not None and call.node.name == "FailingBackward"


def test_a_second_backward_ends_at_the_node_without_its_values() -> None:
    loss = x().exp().sum()
    loss.backward()
    call = failure(loss.backward)
    assert call.node is not None and call.node.name == "ExpBackward0"


def test_a_pass_that_runs_by_itself_is_backward_s() -> None:
    """A call in a library that no mode sees."""
    loss = x().exp().sum()
    with Recorder() as recorder:
        before = recorder.recorded_ops
        torch.autograd.backward(loss)
        (call,) = [it for it in recorder.snapshot().calls if it.api.stem == "backward"]
        assert call.seq > before
        assert recorder.is_on()


def test_the_node_of_this_thread_or_the_only_one() -> None:
    run = BackwardPass(Recorder())
    assert run.running is None
    left, right = x().exp().grad_fn, x().log().grad_fn
    run.marks[-1] = left
    assert run.running is not None and run.running.name == "ExpBackward0"
    run.marks[-2] = right
    assert run.running is None
    run.marks[get_ident()] = right
    assert run.running is not None and run.running.name == "LogBackward0"


def test_a_fault_is_noted_once_with_the_node_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first wait that raises: the node before it has launched what failed."""
    ended: list[BaseException] = []
    recorder = Recorder(is_fatal=lambda error: True, on_device_end=ended.append)
    run = BackwardPass(recorder)
    left, right = x().exp().grad_fn, x().log().grad_fn

    def fail() -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(recorder, "wait_for_all", fail)
    run.marks[get_ident()] = left
    monkeypatch.setattr("cudalens.recorder.backward.current_node", lambda: right)
    run._wait_and_mark(None)
    assert run.fault is not None and run.fault.name == "ExpBackward0"
    assert run.marks[get_ident()] is right
    assert recorder.fatal is not None and recorder.fatal.node == run.fault
    run._wait_and_mark(None)
    assert len(ended) == 1 and run.running is run.fault


def test_no_tensor_of_a_failed_pass_is_kept() -> None:
    def run() -> weakref.ref[Tensor]:
        leaf = x()
        with pytest.raises(KeyError):
            Failing.apply(leaf).sum().backward()
        return weakref.ref(leaf)

    with Recorder():
        reference = run()
        gc.collect()
        assert reference() is None
