"""The parameter that an optimizer's step made huge, behind the inputs of an op."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cudalens.evidence import grown_parameter as module
from cudalens.evidence.grown_parameter import grown_parameter


def found(value: float, phase: str | None = "optimizer", *, is_recorded: bool = True) -> Any:
    weight = nn.Parameter(torch.tensor([0.0, value]))
    call = SimpleNamespace(site="line 7") if is_recorded else None
    snapshot = SimpleNamespace(
        newest=lambda item: call if item() is weight else None,
        reader=SimpleNamespace(line=lambda site: site),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "phase_of", lambda site: phase)
        recorder = SimpleNamespace(snapshot=lambda: snapshot)
        return grown_parameter([(weight * 2).sum()], recorder, {id(weight): "net.weight"})


def test_a_huge_parameter_with_the_step_that_made_it() -> None:
    grown = found(-2e6)
    assert (grown.name, grown.largest, grown.step) == ("net.weight", 2e6, "line 7")


def test_from_beyond_the_bound_on_and_finite() -> None:
    assert found(1e6) is None
    assert found(1.0625e6).largest == 1.0625e6
    assert found(float("inf")) is None
    assert found(float("nan")) is None


def test_only_a_recorded_step_of_an_optimizer() -> None:
    assert found(2e6, "forward") is None
    assert found(2e6, None) is None
    assert found(2e6, is_recorded=False) is None
