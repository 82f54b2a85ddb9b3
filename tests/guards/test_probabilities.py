"""Guards of binary cross entropy: the interval, its ends, and the digits that are shown."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nan, tensor

from tests.cpu_guards import Collector, guarded, positions

aten = torch.ops.aten


@pytest.fixture
def guards() -> Iterator[Collector]:
    with guarded() as collector:
        yield collector


@pytest.mark.parametrize(
    ("value", "headline"),
    [
        (1.7, "{argument}[3, 1] = 1.7 is outside the interval 0 … 1"),
        (-0.25, "{argument}[3, 1] = -0.25 is outside the interval 0 … 1"),
        (nan, "{argument}[3, 1] = nan is not a number"),
        (torch.inf, "{argument}[3, 1] = inf is outside the interval 0 … 1"),
        (1.0, None),
        (0.0, None),
        (-0.0, None),
    ],
)
@pytest.mark.parametrize("argument", ["self", "target"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_binary_cross_entropy_interval(
    guards: Collector, dtype: torch.dtype, argument: str, value: float, headline: str | None
) -> None:
    """Input and target must lie in the unit interval, its ends and -0.0 included."""
    values = {name: torch.full((4, 2), 0.5, dtype=dtype) for name in ("self", "target")}
    values[argument][3, 1] = value
    found = guards.look(lambda: F.binary_cross_entropy(values["self"], values["target"]))
    if headline is None:
        assert found is None
        return
    assert found is not None
    shown = float(tensor(value, dtype=dtype))
    if dtype != torch.bfloat16 or value != 1.7:
        assert found.headline == headline
    assert found.argument == argument and not found.is_index
    assert (found.bounds.min, found.bounds.max) == (0.0, 1.0)
    assert positions(found) == [(3, 1)]
    assert tensor(float(found.offenders.first[0].value or 0), dtype=dtype).isclose(
        tensor(shown, dtype=dtype), rtol=0, atol=0, equal_nan=True
    )


def test_value_just_above_one_is_not_called_one(guards: Collector) -> None:
    """A value that rounding would hide is shown with the digits that tell it apart."""
    values = tensor([0.5, 1.0]).nextafter(tensor(2.0))
    found = guards.look(lambda: F.binary_cross_entropy(values, torch.ones(2)))
    assert found is not None
    assert found.headline == "{argument}[1] = 1.0000001 is outside the interval 0 … 1"


def test_input_is_reported_before_target(guards: Collector) -> None:
    """Where both are bad, the one that the kernel meets first is named."""
    found = guards.look(lambda: F.binary_cross_entropy(tensor([2.0]), tensor([2.0])))
    assert found is not None and found.argument == "self"


def test_shapes_that_agree_once_squeezed(guards: Collector) -> None:
    """The op itself takes (3, 1) with (3,), so that bad values there are found too."""
    values = tensor([[0.5], [2.0], [0.5]])
    found = guards.look(lambda: aten.binary_cross_entropy(values, torch.ones(3)))
    assert found is not None and positions(found) == [(1, 0)]


def test_logits_and_backward_have_no_bounds(guards: Collector) -> None:
    """Logits may be any number, and the backward kernel checks nothing."""
    wild = tensor([9.0, -9.0])
    assert guards.look(lambda: F.binary_cross_entropy_with_logits(wild, wild)) is None
    call = lambda: aten.binary_cross_entropy_backward(torch.ones(()), wild, wild)
    assert guards.look(call) is None


def test_binary_cross_entropy_out_overload(guards: Collector) -> None:
    """The overload that writes into a given tensor is guarded."""
    call = lambda: aten.binary_cross_entropy.out(tensor([2.0]), tensor([1.0]), out=torch.zeros(()))
    found = guards.look(call)
    assert found is not None and guards.found[0][0] == "aten::binary_cross_entropy.out"
