"""Guards of the assertions that a program, or torch for it, states about a tensor."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cudalens.core.device_asserts import assert_site
from cudalens.core.report_types import Bounds, Violation
from cudalens.core.tensor_values import find_offenders
from cudalens.guards._base import guard
from cudalens.guards._ranges import format_offender
from cudalens.guards.engine import Condition, Need

_MESSAGE_LIMIT = 255
"""Longer messages are refused on the host."""
_SITES = {torch.complex64: "assert_async_complex64", torch.complex128: "assert_async_complex128"}


@guard("aten::_assert_async", records=("assert_async", "nested_index_put"), waits=True)
def assert_async_holds(self: Tensor, assert_msg: str = "") -> Need:
    """The single element is not zero; NaN is not zero.

    Source:   TensorCompare.cu:109 (:113 and :116 for complex), torch 2.13.0
    Cost:     one copy of one element
    Passes:   aten._assert_async(tensor(1), "lengths must match")
    Violates: aten._assert_async(tensor(0), "lengths must match")
    """
    if self.numel() != 1 or len(assert_msg.encode()) >= _MESSAGE_LIMIT:
        return None
    return Condition(lambda: _broken(self, assert_msg))


def _broken(condition: Tensor, message: str) -> Violation | None:
    if condition.item() != 0:
        return None
    real = condition.real if condition.is_complex() else condition
    offenders = find_offenders(real, torch.ones_like(real, dtype=torch.bool))
    site = assert_site(_SITES.get(condition.dtype, "assert_async"))
    return Violation(
        argument="self",
        headline=f"{format_offender(offenders)}, where the program states that it is not zero",
        explanation=f"The statement reads: {message}." if message else "It comes with no message.",
        offenders=offenders,
        bounds=Bounds(text="anything but 0"),
        is_index=False,
        device_text=replace(site, expression=message).text(),
    )
