"""What a rule of the assert table is, and the range checks that the rules share.

A rule gets the arguments of one call by schema name and answers what the CUDA kernel would have
done with their values. It never raises: a call that torch refuses on the host (shapes, dtypes,
dimensions) is left to the CPU kernel, whose error is the host error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cudalens.core.device_asserts import AssertSite, as_printed_by, assert_site

Arguments = Mapping[str, Any]
INDEX_DTYPES = (torch.int64, torch.int32)


@dataclass(frozen=True, kw_only=True)
class Repair:
    """Arguments to replace: CUDA takes them in silence, the CPU kernel refuses or misreads them."""

    repaired: dict[str, object]


@dataclass(frozen=True, kw_only=True)
class AssertHit(Repair):
    """One device assert: the line CUDA prints, and arguments the CPU kernel can run with.

    text: as the installed release of torch prints it.
    record: id of the assertion in the inventory of torch 2.13.0, empty for a rule of the user's.
    """

    text: str
    record: str = ""


Outcome = Repair | None
Rule = Callable[[Arguments], Outcome]


@dataclass(frozen=True, kw_only=True)
class Assertion:
    """One assertion that a rule can hit, and its record in the inventory."""

    record: str
    site: AssertSite

    def hit(self, /, **repaired: object) -> Repair:
        """Return the hit for this site, the repaired arguments by schema name.

        A release whose kernel has no such assertion goes on in silence.
        """
        line = self.site.text("block: [0,0,0], thread: [0,0,0] ")
        text = as_printed_by(torch.__version__, line)
        if text is None:
            return Repair(repaired=repaired)
        return AssertHit(text=text, record=self.record, repaired=repaired)


def assertion(record: str, key: str | None = None) -> Assertion:
    """Return an assertion of the table of texts.

    Args:
        key: in the table, where that is not the record's id.
    """
    return Assertion(record=record, site=assert_site(key or record))


def table(rule: Rule, *names: str) -> dict[str, Rule]:
    """Return the table entries of one rule, names without the `aten::` prefix."""
    return {f"aten::{name}": rule for name in names}


def dim_size(tensor: Tensor, dim: int) -> int | None:
    """Return the size of a dimension, 1 for a 0-dim tensor, None if there is no such dimension."""
    rank = max(tensor.dim(), 1)
    if not -rank <= dim < rank:
        return None
    return tensor.size(dim) if tensor.dim() else 1


def broadcast(shapes: Sequence[Sequence[int]]) -> torch.Size | None:
    """Return the common shape, None where the shapes do not fit; no tensor is made for it."""
    common = [1] * max(map(len, shapes), default=0)
    for shape in shapes:
        for position, size in enumerate(shape, start=len(common) - len(shape)):
            if size != 1 and common[position] not in (1, size):
                return None
            if size != 1:
                common[position] = size
    return torch.Size(common)


def outside(index: Tensor, low: int, high: int) -> bool:
    """Return whether any index lies outside low <= value < high; False for a dtype of no index."""
    if index.numel() == 0 or index.dtype not in INDEX_DTYPES:
        return False
    smallest, largest = torch.aminmax(index)
    return int(smallest) < low or int(largest) >= high


def clamped(index: Tensor, low: int, high: int) -> Tensor:
    """Return the indices moved into low <= value < high."""
    return index.clamp(low, high - 1)


def truncated(index: Tensor, *, is_signed: bool = False) -> Tensor:
    """Return the values a kernel compares that reads its indices into a 32-bit integer."""
    if is_signed:
        return index.to(torch.int32)
    return index.to(torch.int64) & 0xFFFFFFFF


def all_between(values: Tensor, low: float, high: float) -> bool:
    """Return whether every value lies in low ... high, both included; NaN does not."""
    return bool(((values >= low) & (values <= high)).all())


def rows_are_copied_whole(source: Tensor, dim: int) -> bool:
    """Return whether the row copy kernels apply: whole contiguous rows in multiples of 16 bytes."""
    if source.dim() < 2 or dim % source.dim() != 0 or not source.is_contiguous():
        return False
    row_bytes = source.stride(0) * source.element_size()
    return row_bytes > 0 and row_bytes % 16 == 0 and source.data_ptr() % 16 == 0
