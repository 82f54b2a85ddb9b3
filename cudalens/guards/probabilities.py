"""Guards of binary cross entropy: the input and the target are probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cudalens.core.device_asserts import assert_text
from cudalens.core.report_types import Bounds, Violation
from cudalens.guards._base import guard
from cudalens.guards._ranges import FLOATS, bad_numbers, lies_between, outside_mask

_UNIT = Bounds(min=0.0, max=1.0, text="0 … 1")
_LOGARITHMS = "The loss takes the logarithms of the input and of one minus it."
_SHARES = "The target says which share of the loss each of the two classes has."


@guard("aten::binary_cross_entropy", records=("bce_input",), frequency="very common")
def binary_cross_entropy_input_in_unit_interval(self: Tensor, target: Tensor) -> Violation | None:
    """Every element of the input lies in [0, 1]; NaN does not.

    Source:   Loss.cu:89, torch 2.13.0
    Cost:     one reduction over the input, one copy of two numbers
    Passes:   aten.binary_cross_entropy(tensor([0.0, 1.0]), tensor([0.0, 1.0]))
    Violates: aten.binary_cross_entropy(tensor([0.0, 1.5]), tensor([0.0, 1.0]))
    """
    if not _is_binary_cross_entropy(self, target) or lies_between(self, 0, 1):
        return None
    return bad_numbers(
        self,
        outside_mask(self, 0, 1),
        argument="self",
        bounds=_UNIT,
        why=_LOGARITHMS,
        device_text=assert_text("bce_input"),
    )


@guard("aten::binary_cross_entropy", records=("bce_target",), frequency="common")
def binary_cross_entropy_target_in_unit_interval(self: Tensor, target: Tensor) -> Violation | None:
    """Every element of the target lies in [0, 1]; NaN does not.

    Source:   Loss.cu:90, torch 2.13.0
    Cost:     one reduction over the target, one copy of two numbers
    Passes:   aten.binary_cross_entropy(tensor([0.5, 0.5]), tensor([0.0, 1.0]))
    Violates: aten.binary_cross_entropy(tensor([0.5, 0.5]), tensor([-0.5, 1.0]))
    """
    if not _is_binary_cross_entropy(self, target) or lies_between(target, 0, 1):
        return None
    return bad_numbers(
        target,
        outside_mask(target, 0, 1),
        argument="target",
        bounds=_UNIT,
        why=_SHARES,
        device_text=assert_text("bce_target"),
    )


def _is_binary_cross_entropy(values: Tensor, target: Tensor) -> bool:
    """Return whether torch takes this call: equal dtypes, shapes that fit once squeezed."""
    if values.dtype != target.dtype or values.dtype not in FLOATS:
        return False
    if values.device != target.device or 0 in (values.numel(), target.numel()):
        return False
    pairs = zip(_squeezed(values.shape), _squeezed(target.shape), strict=False)
    return all(left == right for left, right in pairs)


def _squeezed(shape: Sequence[int]) -> list[int]:
    return [size for size in reversed(shape) if size != 1]
