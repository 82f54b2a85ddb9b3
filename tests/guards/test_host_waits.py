"""Calls that wait for deferred guards: what is raised before them, and what is left alone."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from cudalens.core import _torch
from cudalens.guards import host_waits
from cudalens.guards.host_waits import HostWaits, _LeftGradients


class Mine(Exception):  # noqa: N818
    """A finding."""

    def __init__(self, text: str = "found\nmore", report: Any = None) -> None:
        super().__init__(text)
        self.report = report


class Pending:
    """Says whether something is pending, and which findings there are."""

    def __init__(self) -> None:
        self.findings: list[Any] = []
        self.is_pending = True

    def __bool__(self) -> bool:
        return self.is_pending


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Pending:
    """What is pending."""
    made = Pending()
    monkeypatch.setattr(host_waits, "PENDING", made)
    return made


class Settled:
    """Gives the errors in turn, and keeps whom it was asked for."""

    def __init__(self, *errors: BaseException | None) -> None:
        self.errors, self.asked = list(errors), []  # type: list[Any], list[Any]

    def __call__(self, others: Any) -> BaseException | None:
        self.asked.append(list(others))
        return self.errors.pop(0) if self.errors else None


def waits(settle: Any = None, devices: frozenset[str] = frozenset({"cpu"})) -> Any:
    failed: list[Any] = []
    made: Any = HostWaits(
        settle or Settled(), devices, lambda: 7, lambda *args: failed.append(args)
    )
    made.failed = failed
    return made


@pytest.fixture
def installed(queue: Pending) -> Iterator[Any]:
    """Kernels that wait, on tensors of the host."""
    made = waits()
    remove = made.install()
    yield made
    remove()


def test_values_that_reach_the_host_wait_for_what_is_pending(
    installed: Any, queue: Pending
) -> None:
    x, settle = torch.tensor([1.0, 2.0]), installed._settle
    places = torch.empty(0, dtype=torch.int64)
    into = lambda: torch.nonzero(x, out=places)
    for read in (x[0].item, x.nonzero, into, lambda: bool(x[0]), lambda: torch.equal(x, x)):
        before = len(settle.asked)
        read()
        assert len(settle.asked) > before
    before = len(settle.asked)
    x + 1, x.clone()
    assert len(settle.asked) == before
    queue.is_pending = False
    x[0].item()
    assert len(settle.asked) == before


@pytest.mark.parametrize(("device", "asked"), [("cpu", [[]]), ("cuda", [])])
def test_values_of_another_device_wait_for_nothing(
    queue: Pending, device: str, asked: list[Any]
) -> None:
    made, x = waits(devices=frozenset({device})), torch.ones(1)
    made._kernel("aten::equal", made._wait)(torch._C._dispatch_keys(x), x, x)
    assert made._settle.asked == asked


def test_a_finding_is_raised_in_place_of_the_value(installed: Any) -> None:
    installed._settle.errors = [Mine()]
    x = torch.tensor([1.0])
    with pytest.raises(Mine):
        x.item()
    ((error, ((given, *_), _)),) = installed.failed
    assert isinstance(error, Mine)
    assert given.data_ptr() == x.data_ptr()
    assert x.item() == 1.0


def test_everything_is_taken_out(queue: Pending) -> None:
    made = waits()
    made.install()()
    torch.ones(1).item()
    p = nn.Parameter(torch.ones(1))
    p.grad = torch.ones(1)
    torch.optim.SGD([p], lr=0.1).step()
    assert made._settle.asked == []


@pytest.mark.parametrize(
    ("target", "source", "non_blocking", "is_waited"),
    [
        ("cpu", "meta", False, True), ("cpu", "meta", True, False), ("cpu", "cpu", False, False),
        ("meta", "meta", False, False), ("meta", "cpu", False, False),
    ],
)  # fmt: skip
def test_only_a_copy_to_the_host_that_waits_anyway_waits(
    target: str, source: str, non_blocking: bool, is_waited: bool
) -> None:
    made = waits()
    made._before_copy(torch.ones(1, device=target), torch.ones(1, device=source), non_blocking)
    assert made._settle.asked == ([[]] if is_waited else [])


@pytest.mark.parametrize(("device", "is_watched"), [("cpu", False), ("cuda", True)])
def test_copies_are_watched_where_they_may_come_from_a_device(
    device: str, is_watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels: dict[str, Any] = {}
    monkeypatch.setattr(_torch, "register_kernels", lambda them: kernels.update(them) or [])
    waits(devices=frozenset({device})).install()()
    assert ("aten::copy_" in kernels) is is_watched
    assert "aten::item" not in kernels and "aten::_local_scalar_dense" in kernels
    sends = {name for name in kernels if name.startswith("c10d::")}
    assert {"c10d::send", "c10d::allreduce_"} <= sends and "c10d::barrier" not in sends


@pytest.mark.parametrize("at", [0, 1])
def test_a_number_in_place_of_a_tensor_is_handed_on_as_one(queue: Pending, at: int) -> None:
    """The dispatcher gives a kernel of Python's the number, and those below take tensors alone."""
    made, x = waits(), torch.tensor(2.0)
    args: list[Any] = [x, x]
    args[at] = 2.0
    kernel = made._kernel("aten::equal", made._wait)
    assert kernel(torch._C._dispatch_keys(x), *args)


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_that_were_written_are_known(installed: Any, training: bool) -> None:
    norm = nn.BatchNorm1d(2)
    norm.train(training)
    norm(torch.ones(3, 2))
    found = installed.written_since(7)
    wanted = [norm.running_mean, norm.running_var] if training else []
    assert {id(item) for item in found} == {id(item) for item in wanted}
    assert installed.written_since(8) == ()
    gone = [ref(item) for item in (norm.running_mean, norm.running_var) if item is not None]
    del norm, found, wanted
    assert [item() for item in gone] == [None, None]
    assert installed.written_since(7) == ()


def test_a_norm_that_always_trains_writes_its_statistics(installed: Any) -> None:
    """It is not told whether it trains: its sixth argument is a momentum."""
    mean, var = torch.zeros(2), torch.ones(2)
    installed._before_norm(torch.ones(3, 2), None, None, mean, var, 0.1, 1e-5)
    assert {id(item) for item in installed.written_since(7)} == {id(mean), id(var)}


def parameter(grad: float | None = 1.0) -> nn.Parameter:
    made = nn.Parameter(torch.ones(2))
    made.grad = None if grad is None else torch.full((2,), grad)
    return made


@pytest.mark.parametrize("way", ["plain", "positional", "keyword"])
def test_a_step_waits_behind_its_closure(installed: Any, way: str) -> None:
    p, order = parameter(), []
    optimizer = torch.optim.SGD([p], lr=0.1)
    installed._settle = lambda others: order.append("settled")

    def closure() -> Tensor:
        order.append("closure")
        return torch.ones(1)

    given: Any = {
        "plain": ((), {}),
        "positional": ((closure,), {}),
        "keyword": ((), {"closure": closure}),
    }
    args, kwargs = given[way]
    loss = optimizer.step(*args, **kwargs)
    assert order[-1] == "settled"
    assert order == (["settled"] if way == "plain" else ["closure", "settled"])
    assert (loss is None) is (way == "plain")
    assert installed._steppers[optimizer] == {threading.get_ident()}


def test_a_step_keeps_its_other_arguments(installed: Any) -> None:
    optimizer, closure = torch.optim.SGD([parameter()], lr=0.1), lambda: torch.ones(1)
    args, kwargs = installed._before_step(optimizer, (optimizer, closure, 3), {"more": 4})
    assert (args[0], args[2:], kwargs) == (optimizer, (3,), {"more": 4})
    assert args[1] is not closure
    args, kwargs = installed._before_step(optimizer, (optimizer,), {"closure": closure, "more": 4})
    assert (args, kwargs["more"]) == ((optimizer,), 4)
    assert kwargs["closure"] is not closure
    assert installed._before_step(optimizer, (optimizer, None, 3), {}) is None


def test_a_finding_keeps_a_step_from_being_made(installed: Any) -> None:
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=0.1)
    installed._settle = Settled(Mine())
    with pytest.raises(Mine):
        optimizer.step()
    assert p.tolist() == [1.0, 1.0]


def test_a_step_raises_what_threads_without_an_optimizer_have_found(
    installed: Any, queue: Pending
) -> None:
    one, other = (torch.optim.SGD([parameter()], lr=0.1) for _ in range(2))
    queue.findings = [SimpleNamespace(thread=41), SimpleNamespace(thread=42)]
    installed._steppers.clear()
    found = lambda: installed._forward_threads(one)
    assert found() == []  # nobody has stepped the other one: it may be theirs
    installed._steppers[other] = {42}
    others = [it for it in host_waits.live_instances(torch.optim.Optimizer) if it is not one]
    for item in others:
        installed._steppers.setdefault(item, {42})
    assert found() == [41]
    installed._settle = Settled(None, Mine())
    with pytest.raises(Mine):
        one.step()
    assert installed._settle.asked == [[], [41]]


# --- gradients that are left ----------------------------------------------------------------------


def test_gradients_of_a_finding_are_not_stepped_with(installed: Any, queue: Pending) -> None:
    p, frozen, fresh = parameter(), parameter(), parameter(None)
    frozen.requires_grad_(False)
    optimizer = torch.optim.SGD([frozen, fresh, p], lr=0.1)
    empty = torch.optim.SGD([fresh], lr=0.1)
    installed.note_finding(Mine("y[0] = 9 is outside\nmore", "report"))
    with pytest.raises(Mine) as caught:
        optimizer.step()
    assert str(caught.value) == (
        "y[0] = 9 is outside: the gradients of that step are still there. "
        "Call zero_grad() where the error is caught."
    )
    assert caught.value.report == "report"
    assert p.tolist() == [1.0, 1.0]
    empty.step()
    optimizer.zero_grad()
    p.grad = torch.ones(2)
    optimizer.step()
    assert p.tolist() == pytest.approx([0.9, 0.9])


def test_gradients_are_gone_where_they_were_cleared_or_replaced() -> None:
    def left() -> tuple[nn.Parameter, _LeftGradients]:
        p = parameter()
        return p, _LeftGradients(p, Mine())

    p, gradients = left()
    assert gradients.is_there()
    assert gradients.is_there()
    p.grad.zero_()  # type: ignore[union-attr]
    assert not gradients.is_there()
    assert not p._backward_hooks
    p, gradients = left()
    _old, p.grad = p.grad, torch.ones(2)
    assert not gradients.is_there()
    p, gradients = left()
    p.sum().backward()  # adds to them
    assert gradients.is_there()
    p, gradients = left()
    p.grad.zero_()  # type: ignore[union-attr]
    p.sum().backward()
    assert not gradients.is_there()
    p, gradients = left()
    del p
    assert not gradients.is_there()


def test_a_finding_that_was_caught_keeps_no_frame_alive(queue: Pending) -> None:
    """What a frame holds may be memory of the device."""
    made, seen = waits(Settled(Mine())), []

    def step() -> None:
        held = Mine()
        seen.append(ref(held))
        made._wait()

    gc.disable()
    try:
        with suppress(Mine):
            step()
        assert seen[0]() is None
    finally:
        gc.enable()
