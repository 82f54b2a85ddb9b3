"""Steps of training under the watch: parameters, their moments, and scalers of gradients."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from cudalens.recorder.nonfinite_marks import Arrival, Maker, NonFiniteTensors, Step
from cudalens.recorder.nonfinite_steps import StepWatch

MADE = Maker("made", Step("torch.log", None), has_nan=True)


class Arrivals:
    """Reports that only keep what has arrived."""

    def __init__(self) -> None:
        self.seen: list[Arrival] = []

    def arrived(self, arrival: Arrival) -> BaseException:
        self.seen.append(arrival)
        return ValueError(arrival.sink)


def watch() -> tuple[StepWatch, NonFiniteTensors, Arrivals]:
    snapshot = SimpleNamespace(whole=lambda tensor: tensor)
    marks = NonFiniteTensors(lambda: SimpleNamespace(snapshot=lambda: snapshot))
    reports: Any = Arrivals()
    return StepWatch(marks, reports), marks, reports


def parameter(value: float = 1.0, grad: float = 1.0) -> nn.Parameter:
    made = nn.Parameter(torch.full((2,), value))
    made.grad = torch.full((2,), grad)
    return made


def test_a_step_of_finite_values_is_silent_and_known() -> None:
    steps, marks, reports = watch()
    p = parameter()
    optimizer = torch.optim.Adam([p])
    optimizer.step()
    assert not steps.is_inside
    assert steps.before(optimizer, None) is None
    assert steps.is_inside
    assert steps.after(optimizer, None) is None
    assert not steps.is_inside
    assert reports.seen == []
    assert {id(ref(item)) for item in (p, *_moments(optimizer, p))} <= marks._finite.keys()


def _moments(optimizer: Any, p: Tensor) -> list[Tensor]:
    return [it for it in optimizer.state[p].values() if it.shape == p.shape]


def test_a_marked_gradient_is_not_stepped_with() -> None:
    steps, marks, reports = watch()
    p, fine, without = parameter(), parameter(), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([without, fine, p], lr=0.1)
    assert p.grad is not None
    mark = marks.mark(p.grad, MADE, has_nan=True)
    found = steps.before(optimizer, None)
    assert isinstance(found, ValueError)
    ((sink, maker, _, step, _, tensor, *_),) = reports.seen
    assert (sink, maker, step.name) == ("gradient", mark.maker, "torch.optim.SGD.step")
    assert tensor is p
    assert not steps.is_inside
    optimizer.found_inf = torch.ones(1)  # type: ignore[attr-defined]
    assert steps.before(optimizer, None) is None  # it asks its scaler itself


@pytest.mark.parametrize("moment", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_makes_a_value_nonfinite_is_stopped(moment: bool, bad: float) -> None:
    steps, marks, reports = watch()
    p = parameter()
    optimizer = torch.optim.Adam([p])
    optimizer.step()
    target = optimizer.state[p]["exp_avg"] if moment else p
    assert steps.before(optimizer, None) is None
    with torch.no_grad():
        target[1] = bad
    assert isinstance(steps.after(optimizer, None), ValueError)
    (arrival,) = reports.seen
    assert (arrival.sink, arrival.step.name) == ("parameter", "torch.optim.Adam.step")
    assert arrival.tensor is p
    assert arrival.has_nan is arrival.maker.has_nan is (bad != bad)  # noqa: PLR0124
    assert arrival.arguments == {"param": p, "grad": p.grad}
    of = "exp_avg of " if moment else ""
    assert f"made {of}{{input:param}}[1] = {bad}" in arrival.maker.violation.headline
    assert marks.of(target) is not None
    assert (marks.of(p) is not None) is not moment


def test_what_was_bad_before_is_no_fault_of_the_step() -> None:
    steps, _, reports = watch()
    p = parameter(math.nan)
    optimizer = torch.optim.SGD([p], lr=0.1)
    assert steps.before(optimizer, None) is None
    assert steps.after(optimizer, None) is None
    assert reports.seen == []


def test_beside_a_moment_that_was_bad_before_a_parameter_is_no_fault_of_the_step() -> None:
    steps, _, reports = watch()
    p = parameter()
    optimizer = torch.optim.Adam([p])
    optimizer.step()
    optimizer.state[p]["exp_avg"][0] = math.inf
    assert steps.before(optimizer, None) is None
    optimizer.step()
    assert not p.isfinite().all()
    assert steps.after(optimizer, None) is None
    assert reports.seen == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_nobody_has_seen_made_is_told_of_by_its_own_values(bad: float) -> None:
    steps, _, reports = watch()
    p = parameter()
    optimizer = torch.optim.SGD([p])
    assert steps.before(optimizer, None) is None
    assert p.grad is not None
    p.grad[1] = bad
    with torch.no_grad():
        p[1] = math.nan
    assert isinstance(steps.after(optimizer, None), ValueError)
    (arrival,) = reports.seen
    assert (arrival.maker.kind, arrival.has_nan) == ("entered", True)
    assert arrival.maker.has_nan is math.isnan(bad)


def test_without_a_beginning_a_step_has_no_end() -> None:
    steps, _, reports = watch()
    optimizer = torch.optim.SGD([parameter(math.nan)], lr=0.1)
    assert steps.after(optimizer, None) is None
    steps.before(optimizer, None)
    steps.reset()
    assert not steps.is_inside
    assert reports.seen == []


def test_after_tensors_were_let_go_a_step_goes_on_and_knows_none() -> None:
    steps, _, reports = watch()
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=0.1)
    steps.let_go()
    assert not steps.is_inside
    steps.before(optimizer, None)
    steps.let_go()
    assert steps.is_inside
    with torch.no_grad():
        p.fill_(math.nan)
    assert steps.after(optimizer, None) is None
    assert reports.seen == []


def test_an_optimizer_of_the_users_own_has_its_own_name() -> None:
    class Mine(torch.optim.SGD):
        pass

    steps, marks, reports = watch()
    p = parameter()
    assert p.grad is not None
    marks.mark(p.grad, MADE, has_nan=True)
    steps.before(Mine([p], lr=0.1), None)
    assert reports.seen[0].step.name.endswith("<locals>.Mine.step")
    assert not reports.seen[0].step.name.startswith("torch.")


# --- scalers -------------------------------------------------------------------------------------


class Scaler:
    """A scaler of gradients: torch's own one is off without a GPU."""

    def __init__(self, scale: float = 2.0, *, enabled: bool = True) -> None:
        self.scale, self.enabled = scale, enabled

    def is_enabled(self) -> bool:
        return self.enabled

    def get_scale(self) -> float:
        return self.scale


def test_a_gradient_is_left_to_the_scaler_at_work() -> None:
    steps, marks, _ = watch()
    mark = marks.mark(torch.ones(1), MADE, has_nan=True)
    scaler, other = Scaler(), Scaler()
    assert not steps.leaves_to_scaler(mark)
    steps.scaled(Scaler(enabled=False), torch.ones(1), torch.ones(1))
    assert not steps.leaves_to_scaler(mark)
    for item in (scaler, other):
        steps.scaled(item, torch.ones(1), torch.ones(1))
    steps.updated(other, None, is_lower=False)
    assert steps.leaves_to_scaler(mark)
    assert (steps._scalers[scaler].mark, steps._scalers[other].mark) == (mark, None)
    steps.updated(scaler, None, is_lower=False)
    assert not steps.leaves_to_scaler(mark)


@pytest.mark.parametrize(("is_bad", "enabled"), [(True, True), (False, True), (False, False)])
def test_a_loss_that_only_the_scale_made_infinite(is_bad: bool, enabled: bool) -> None:
    steps, marks, _ = watch()
    loss, scaled = torch.ones(1), torch.ones(1)
    if is_bad:
        marks.mark(loss, MADE, has_nan=True)
    steps.scaled(Scaler(enabled=enabled), [torch.ones(1), loss], [scaled])
    assert steps.is_overscaled(scaled) is (enabled and not is_bad)
    assert not steps.is_overscaled(loss)
    steps.let_go()
    assert not steps.is_overscaled(scaled)


@pytest.mark.parametrize(
    ("lowered", "scale", "text"),
    [
        ([True, True], 0.5, "2 steps in a row were skipped, down to a scale of 0.5"),
        ([True, True], 1.0, None),
        ([True, False], 0.5, None),
        ([True, False, True], 0.25, "1 steps in a row were skipped, down to a scale of 0.25"),
    ],
)
def test_a_scaler_stops_where_no_scale_is_small_enough(
    lowered: list[bool], scale: float, text: str | None
) -> None:
    steps, marks, reports = watch()
    scaler, mark = Scaler(8.0), marks.mark(torch.ones(1), MADE, has_nan=True)
    steps.scaled(scaler, torch.ones(1), torch.ones(1))
    steps.leaves_to_scaler(mark)
    for is_lower in lowered[:-1]:
        assert steps.updated(scaler, None, is_lower=is_lower) is None
    scaler.scale = scale
    found = steps.updated(scaler, None, is_lower=lowered[-1])
    assert (found is None) is (text is None)
    if text is not None:
        (arrival,) = reports.seen
        assert (arrival.sink, arrival.text, arrival.maker) == ("scaler", text, MADE)
        assert arrival.step.name == "torch.amp.GradScaler.update"
