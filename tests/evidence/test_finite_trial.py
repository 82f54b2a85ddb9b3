"""Edits that keep values finite: tried on copies, in forward and in backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cudalens.core.call import ApiCall, Call
from cudalens.diagnosis.user_code import Change, Fix
from cudalens.evidence import finite_trial
from cudalens.evidence.failing_call import call_of
from cudalens.evidence.finite_trial import FiniteTrial, RunningNode
from cudalens.evidence.variables import line_of
from tests.probes import asked


def makes_finite(func: Any, template: str, x: torch.Tensor, node: RunningNode | None = None) -> Any:
    fix = Fix("…", [Change("x", template)])

    def ask(frames: Any) -> bool:
        line = line_of(frames)
        assert line is not None
        operands = call_of(frames, line).operands
        call = Call(api=ApiCall(func=func, args=(x,)), operands=operands)
        return FiniteTrial(call, line, node).makes_finite(fix)

    return asked("here(x)", ask, x=x)[-1]


ZERO, LEAF = torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0], requires_grad=True)


@pytest.mark.parametrize(
    ("func", "template", "x", "is_finite"),
    [
        (torch.log, "{x} + 1", ZERO, True),
        (torch.log, "{x} - 1", ZERO, False),
        (torch.log, "{x} * 1", ZERO, False),
        # Finite without the edit: it says nothing.
        (torch.exp, "{x} + 1", ZERO, False),
        # The value is finite, the gradient is not.
        (torch.log, "({x} * {x} + 1).sqrt()", LEAF, True),
        (torch.log, "{x}.sqrt() + 1", LEAF, False),
        # Of two results one is not finite, and what cannot be tried as it is says nothing.
        (torch.aminmax, "{x}.clamp(max=2)", torch.tensor([1.0, torch.inf]), True),
        (torch.linalg.inv, "{x} + torch.eye(2)", torch.zeros(2, 2), False),
    ],
)
def test_values_and_gradients_have_to_be_finite(
    func: Any, template: str, x: torch.Tensor, is_finite: bool
) -> None:
    assert makes_finite(func, template, x) is is_finite


def test_what_is_not_torchs_is_not_run() -> None:
    run = []

    def mine(x: torch.Tensor) -> torch.Tensor:
        run.append(x)
        return torch.log(x)

    assert makes_finite(mine, "{x} + 1", ZERO) is False
    assert run == []


def test_no_edit_is_tried_after_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite_trial, "MAX_SECONDS", -1.0)
    assert makes_finite(torch.log, "{x} + 1", ZERO) is False


@pytest.mark.parametrize(
    ("make", "template", "is_finite"),
    [
        (torch.sqrt, "{x}.clamp(min=1e-3)", True),
        (torch.sqrt, "{x} * 1", False),
        (torch.log, "{x}.clamp(min=1e-3)", True),
        (torch.reciprocal, "{x}.clamp(min=1e-3)", True),
        (lambda x: torch.ones(2) / x, "{x}.clamp(min=1e-3)", True),
        (lambda x: x**0.5, "{x}.clamp(min=1e-3)", True),
        (torch.sin, "{x}.clamp(min=1e-3)", False),
    ],
)
def test_a_node_of_backward_is_made_again_of_what_it_saved(
    make: Any, template: str, is_finite: bool
) -> None:
    leaf = torch.tensor([0.0, 1.0], requires_grad=True)
    node = make(leaf).grad_fn
    running = RunningNode(node, torch.ones(2), None)
    assert makes_finite(torch.sin, template, leaf, running) is is_finite


def test_the_condition_of_where_is_at_hand() -> None:
    leaf = torch.tensor([0.0, 1.0], requires_grad=True)
    node, condition = torch.sqrt(leaf).grad_fn, torch.tensor([False, True])
    running = RunningNode(node, torch.ones(2), condition)
    template = "torch.where(condition, {x}, 1.0)"
    assert makes_finite(torch.sin, template, leaf, running) is True


def test_large_tensors_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite_trial, "MAX_VALUES", 2)
    assert finite_trial._copy(ZERO).data_ptr() != ZERO.data_ptr()
    monkeypatch.setattr(finite_trial, "MAX_VALUES", 1)
    with pytest.raises(MemoryError):
        finite_trial._copy(ZERO)


@pytest.mark.parametrize(
    ("make", "template", "is_finite"),
    [
        # 0 / 0 is nan, 1 / 0 is an infinity: what is above counts.
        (lambda x: (torch.zeros(2, requires_grad=True)) / x, "{x}.clamp(min=1e-3)", True),
        (lambda x: torch.full((2,), 3e38, requires_grad=True) / x, "{x}.clamp(min=1e-3)", False),
        (lambda x: torch.full((2,), 3e38) / x, "{x}.clamp(min=1.0)", True),
        (lambda x: x ** torch.tensor([0.5, 2.0]), "{x}.clamp(min=1e-3)", True),
        (lambda x: x ** torch.tensor([0.5, 2.0]), "{x} * 1", False),
        (torch.rsqrt, "{x}.clamp(min=1e-3)", True),
        (torch.log1p, "{x}.clamp(min=1e-3)", False),  # finite as it is
        (lambda x: torch.log1p(x - 1), "{x}.clamp(min=-0.9)", True),
        (lambda x: torch.exp(x * 1e3), "{x}.clamp(max=8.0)", True),
        (lambda x: torch.acos(x * 1.5), "{x}.clamp(-0.9, 0.9)", True),
    ],
)
def test_the_node_has_what_else_its_function_was_given(
    make: Any, template: str, is_finite: bool
) -> None:
    leaf = torch.tensor([0.0, 1.0], requires_grad=True)
    running = RunningNode(make(leaf).grad_fn, torch.ones(2), None)
    assert makes_finite(torch.sin, template, leaf, running) is is_finite


def test_a_gradient_of_one_number_is_that_of_all() -> None:
    leaf = torch.tensor([0.0, 1.0], requires_grad=True)
    for gradient, is_finite in ((torch.ones(()), True), (torch.full((2,), 3e38), False)):
        running = RunningNode(torch.sqrt(leaf).grad_fn, gradient, None)
        assert makes_finite(torch.sin, "{x} + 1e-3", leaf, running) is is_finite


def test_an_input_without_a_gradient_is_not_bad() -> None:
    used, other = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    assert finite_trial._are_finite([used * 2], [used, other])
    assert not finite_trial._are_finite([used * 2, other.sqrt()], [used, other])


def test_values_that_were_bad_before_are_mended_by_no_edit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is another edit tried after the time for all of them."""
    now = [1.0]
    monkeypatch.setattr(finite_trial.time, "thread_time", lambda: now[0])
    fix = Fix("…", [Change("x", "{x} + 1")])

    def ask(frames: Any) -> list[bool]:
        line = line_of(frames)
        assert line is not None
        operands = call_of(frames, line).operands
        call = Call(api=ApiCall(func=torch.log, args=(ZERO,)), operands=operands)
        answers = []
        for is_bad_before in (False, True):
            trial = FiniteTrial(call, line)
            trial.is_bad_before = is_bad_before
            answers.append(trial.makes_finite(fix))
        late = FiniteTrial(call, line)
        for _ in range(2):
            answers.append(late.makes_finite(fix))
            now[0] += 60
        unknown = FiniteTrial(Call(api=None, operands=operands), line)
        return [*answers, unknown.makes_finite(fix)]

    assert asked("here(x)", ask, x=ZERO) == [[True, False, True, False, False]]
