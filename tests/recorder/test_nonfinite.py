"""The first NaN or infinity: which op made it, of what, and what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import cudalens
from cudalens.core.report import Report
from cudalens.core.report_types import FIRST_BAD
from cudalens.simulate import Simulation

INF, NAN = float("inf"), float("nan")


def found(code: object, **options: bool) -> Report | None:
    """Run a function under ``nan=True`` and give the report, with its exception checked."""
    session = cudalens.check(nan=True, **options)
    try:
        with session:
            code()  # type: ignore[operator]
    except cudalens.NonFiniteError as error:
        assert error.report is session.report
        assert isinstance(error, RuntimeError)
    return session.report


def masked_scores(places: int) -> torch.Tensor:
    """Return two rows of three scores, with so many places of the second one masked."""
    scores = torch.zeros(2, 3, device="cuda")
    mask = torch.arange(3, device="cuda") < places
    return scores.masked_fill(torch.stack([torch.zeros_like(mask), mask]), -INF)


def hints(report: Report | None) -> list[str]:
    assert report is not None
    return [item.rule for item in report.hints]


def test_a_division_by_zero_is_named_with_its_inputs(sim: Simulation) -> None:
    """The op, the position, the operands there and the line are in the report."""
    x = torch.tensor([1.0, -2.0, 3.0], device="cuda")
    y = torch.tensor([1.0, 0.0, 2.0], device="cuda")
    report = found(lambda: x / y)
    assert report is not None
    assert report.kind == "nonfinite"
    assert report.certainty == "proven"
    assert report.headline == "aten::div made -inf at [1] from self = -2.0, other = 0.0"
    assert report.offenders is not None
    assert (report.offenders.count, report.offenders.total) == (1, 3)
    assert hints(report) == ["division_by_zero"]
    assert report.context_usable


def test_a_division_without_zero_is_silent(sim: Simulation) -> None:
    """The neighbour: the smallest divisor is not zero."""
    x = torch.tensor([1.0, -2.0], device="cuda")
    assert found(lambda: x / torch.tensor([1.0, 1e-3], device="cuda")) is None


def test_infinities_that_the_caller_asked_for_are_his(sim: Simulation) -> None:
    """Attention masks hold -inf on purpose, and reserved memory holds anything."""

    def masked() -> None:
        scores = torch.zeros(4, 4, device="cuda")
        keep = torch.ones(4, 4, device="cuda").tril().bool()
        scores.masked_fill(~keep, -INF).softmax(-1).sum()
        torch.full((3,), INF, device="cuda") + 1
        torch.empty(1000, device="cuda")

    assert found(masked) is None


def test_nan_out_of_infinities_is_new(sim: Simulation) -> None:
    """A row that is masked everywhere turns into NaN in the softmax."""
    scores = torch.full((2, 3), -INF, device="cuda")
    report = found(lambda: scores.softmax(-1))
    assert report is not None
    assert report.op.name == "aten::_softmax"


def test_what_was_not_finite_before_is_not_blamed_on_the_op(sim: Simulation) -> None:
    """Data that holds NaN already passes through without a finding."""
    data = torch.tensor([1.0, NAN], device="cuda")
    assert found(lambda: (data + 1).sum()) is None


def test_backward_names_the_forward_line(sim: Simulation) -> None:
    """where() does not stop the gradient of the branch not taken."""

    def train() -> None:
        x = torch.zeros(3, device="cuda", requires_grad=True)
        torch.where(x > 0, x.sqrt(), x).sum().backward()

    report = found(train)
    assert report is not None
    assert report.phase == "backward"
    assert report.forward_source is not None
    assert "x.sqrt()" in (report.forward_source.text or "")
    assert hints(report) == ["slope_at_zero"]


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        (lambda: torch.zeros(3, device="cuda").log(), "logarithm_of_zero"),
        (lambda: (-torch.ones(3, device="cuda")).sqrt(), "root_of_negative"),
        (lambda: torch.zeros(2, device="cuda").rsqrt(), "root_of_negative"),
        (lambda: torch.ones(1, 3, device="cuda").std(0), "spread_of_one_sample"),
        (lambda: torch.full((2,), 89.0, device="cuda").exp(), "exponent_too_large"),
        (lambda: masked_scores(3).softmax(-1), "all_masked"),
        (lambda: masked_scores(3).t().log_softmax(0), "all_masked"),
        (
            lambda: torch.full((2,), 6e4, device="cuda").half() * 2,
            "half_precision_overflow",
        ),
        (
            lambda: F.cross_entropy(
                torch.zeros(4, 3, device="cuda"), torch.full((4,), -100, device="cuda")
            ),
            "all_labels_ignored",
        ),
    ],
)
def test_each_cause_has_its_hint(sim: Simulation, code: object, rule: str) -> None:
    """The rule of the cause fires, and no other."""
    assert hints(found(code)) == [rule]


def test_a_nan_out_of_infinities_is_new(sim: Simulation) -> None:
    """The words do not deny the infinities that came in, and are the plain ones without them."""
    masked = found(lambda: masked_scores(3).softmax(-1))
    assert masked is not None
    assert masked.explanation.startswith(
        "3 of 6 values of the result are not finite; the inputs held infinities, but no NaN."
    )
    plain = found(lambda: torch.zeros(2, device="cuda").log())
    assert plain is not None
    assert "; all values of the inputs were finite." in plain.explanation


@pytest.mark.parametrize(
    "code",
    [
        lambda: torch.full((3,), 1e-6, device="cuda").log(),
        lambda: torch.zeros(3, device="cuda").sqrt(),
        lambda: torch.full((2,), 1e-6, device="cuda").rsqrt(),
        lambda: torch.ones(2, 3, device="cuda").std(0),
        lambda: torch.full((2,), 88.0, device="cuda").exp(),
        lambda: masked_scores(2).softmax(-1),
        lambda: torch.full((2,), 3e4, device="cuda").half() * 2,
        lambda: F.cross_entropy(
            torch.zeros(4, 3, device="cuda"), torch.tensor([-100, -100, -100, 0], device="cuda")
        ),
    ],
)
def test_the_neighbour_of_each_cause_is_silent(sim: Simulation, code: object) -> None:
    """One step away from the cause everything is finite."""
    assert found(code) is None


def test_the_fast_check_looks_too(sim: Simulation) -> None:
    """``fast`` leaves the synchronisation out, and does not silence ``nan``."""
    report = found(lambda: torch.zeros(3, device="cuda").log(), fast=True)
    assert report is not None
    assert report.kind == "nonfinite"


def test_a_guard_that_meets_nan_finds_its_first_op(sim: Simulation) -> None:
    """Without the option too: the line that made the NaN, not one that was merely beyond [0, 1]."""
    raw = torch.tensor([-1.0, 2.0], device="cuda")
    session = cudalens.check()
    with pytest.raises(cudalens.DeviceValueError), session:
        logs = raw.log()
        chances = torch.sigmoid(logs)
        F.binary_cross_entropy(chances, torch.ones(2, device="cuda"))
    assert session.report is not None
    notes = {step.op: step.note for step in session.report.provenance}
    assert notes == {"aten::sigmoid": None, "aten::log": FIRST_BAD}


def told(code: Callable[[], object], **options: bool) -> list[tuple[str, str, str | None]]:
    """Rule, text and fix of each hint about NaN that a guard met."""
    session = cudalens.check(**{"nan": True, **options})
    with pytest.raises(cudalens.DeviceAssertError), session:
        code()
    assert session.report is not None
    rules = ("nan_came_in", "nan_before", "nan_cast_to_integer")
    return [(item.rule, item.text, item.fix) for item in session.report.hints if item.rule in rules]


def draw(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(torch.softmax(layer(x), -1), 1)


@pytest.mark.parametrize("inside", ["a layer", "a model"])
def test_the_weight_that_held_nan_before_is_named(sim: Simulation, inside: str) -> None:
    """With the path below the user's own variable, and never with the option that is on already."""
    layer = torch.nn.Linear(8, 3).to("cuda")
    with torch.no_grad():
        layer.weight[1, 2] = NAN
    model = torch.nn.Sequential(torch.nn.Identity(), layer) if inside == "a model" else layer
    ((rule, text, fix),) = told(lambda: draw(model, torch.randn(4, 8, device="cuda")))
    path = "layer.1.weight" if inside == "a model" else "layer.weight"
    assert rule == "nan_came_in"
    assert f"aten::addmm in line {draw.__code__.co_firstlineno + 1} read it from {path} " in text
    assert "(1 of 24 values, the first at [1, 2])" in text
    assert fix == f"assert {path}.isfinite().all()  # where it was changed last"


def test_a_variable_that_held_nan_before_is_named(sim: Simulation) -> None:
    """The tensor of the user's own, whatever op read it first."""
    data = torch.tensor([0.5, NAN], device="cuda")
    ((_, text, _),) = told(lambda: torch.bernoulli(data * 1))
    assert "aten::mul in line" in text
    assert "read it from data (1 of 2 values, the first at [1])" in text


@pytest.mark.parametrize("way", ["typed", "cast"])
def test_a_literal_nan_is_found_at_its_line(sim: Simulation, way: str) -> None:
    """The tensor that was made of it, also where a cast to integers met it next."""

    def code() -> None:
        chances = torch.tensor([0.5, NAN], device="cuda")
        if way == "typed":
            torch.bernoulli(chances)
        else:
            torch.ones(3, device="cuda")[chances.long()]

    found = {rule: (text, fix) for rule, text, fix in told(code)}
    assert set(found) == {"nan_came_in"} | ({"nan_cast_to_integer"} if way == "cast" else set())
    line = code.__code__.co_firstlineno + 1
    assert f"a tensor was made in line {line} of numbers that held it" in found["nan_came_in"][0]
    assert "%%cudacheck --nan" not in [fix for _, fix in found.values()]


def test_nan_of_unknown_origin_does_not_send_the_user_in_a_circle(sim: Simulation) -> None:
    """A write in place hides what was there: no tensor is named, and no option that is on."""
    chances = torch.tensor([0.5, -INF], device="cuda")
    ((rule, _, fix),) = told(lambda: torch.bernoulli(chances.mul_(0)))
    assert (rule, fix) == ("nan_before", None)


def test_without_the_option_it_is_advised(sim: Simulation) -> None:
    """The neighbour: nobody has looked at the results yet."""
    data = torch.tensor([0.5, NAN], device="cuda")
    ((rule, _, fix),) = told(lambda: torch.bernoulli(data * 1), nan=False)
    assert (rule, fix) == ("nan_before", "%%cudacheck --nan")


def test_nan_that_came_in_explains_no_other_finding(sim: Simulation) -> None:
    """Some tensor held NaN; what the guard met is an ordinary number."""
    data = torch.tensor([0.5, NAN], device="cuda")

    def code() -> None:
        _ = data * 1
        torch.bernoulli(torch.tensor([1.5], device="cuda"))

    assert told(code) == []


def test_without_the_option_nothing_is_looked_at(sim: Simulation) -> None:
    """NaN and infinities are ordinary numbers to a plain check."""
    with cudalens.check() as session:
        torch.zeros(3, device="cuda").log()
    assert session.report is None


def test_the_watch_is_not_seen_by_the_users_modes() -> None:
    """A mode below the check sees the user's ops alone, as many as without the option."""
    seen: list[list[str]] = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen[-1].append(str(func))
            return func(*args, **(kwargs or {}))

    for nan in (False, True):
        seen.append([])
        with Sees(), cudalens.check(nan=nan):
            (torch.ones(3) * 2).log()
    assert seen[0] == seen[1]
    assert "aten.log.default" in seen[0]
