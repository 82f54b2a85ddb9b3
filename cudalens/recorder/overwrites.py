"""Did a write in place bring the bad values?  Proven from what lives on, or not said.

The elements that a call wrote to are known where it wrote to all of them, to a view, or where its
mask or indices live on.  What the living tensor holds there now is what the call left there, since
later writes are judged first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cudalens.recorder.lineage import Lineage, value_inputs
from cudalens.recorder.ops import Call
from cudalens.recorder.reads import Placed, Ref

IsBad = Callable[[Tensor], bool]
_MAX_MEMORY = 1 << 27
"""Elements of a tensor's memory that are marked one by one."""
_MAX_COUNTED = 64
"""So many bad elements are counted."""

_RESHAPES = frozenset(
    f"aten::{name}_"
    for name in ("as_strided", "detach", "squeeze", "swapaxes", "swapdims", "t", "transpose")
) | {"aten::unsqueeze_"}
"""Calls that write no element."""
_RENEWS = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_"})
"""Calls after which the tensor has other memory."""
_PLACES = frozenset(
    f"aten::{name}_"
    for name in (
        *("index_put", "_index_put_impl", "index_fill", "index_copy", "put", "scatter"),
        *("masked_fill", "masked_scatter"),
    )
)
"""Calls that write their values as they are to some of the elements."""
_CHANGES = frozenset(
    f"aten::{name}_"
    for name in ("index_add", "index_reduce", "scatter_add", "scatter_reduce", "fill_diagonal")
)
"""Calls that change some of the elements."""
_FILLS = frozenset(
    f"aten::{name}_"
    for name in (
        *("bernoulli", "cauchy", "copy", "exponential", "fill", "geometric", "log_normal"),
        *("normal", "random", "uniform", "zero"),
    )
)
"""Calls that write to all elements, whatever was there."""


class Overwrites:
    """Judges the writes to one tensor, newest first."""

    def __init__(self, lineage: Lineage, is_bad: IsBad) -> None:
        self._lineage = lineage
        self._is_bad = is_bad
        self.unknown = 0
        """To so many elements, at most, later calls have written nobody knows what."""

    def brought(self, call: Call, current: Ref, shown: Tensor | None) -> bool | None:
        """Return whether a call brought bad values; ``None`` when neither can be proven.

        Args:
            current: the bad tensor as it was right after the call.
            shown: what lives on of it, whose elements still have the values of then, except where
                later calls wrote to.
        """
        name = call.facts.name
        if name in _RESHAPES:
            return False
        if name in _RENEWS or call.facts.is_foreign:
            return None
        is_whole = name not in _PLACES and name not in _CHANGES
        is_view = self._lineage.base_of(call.output) is not None or call.base is not None
        if is_whole and (self._lineage.same(call.output, current) or not is_view):
            return True
        region = None if shown is None else self._region(call, shown)
        if shown is not None and region is not None:
            return self._is_bad_beyond(shown.masked_select(region.to(shown.device)))
        return None if is_whole else self._by_values(call, current, shown)

    def bad_number(self, call: Call) -> float | None:
        """Return the one number that a call wrote to some elements, where it is a bad one."""
        number = call.reads.number if isinstance(call.reads, Placed) else None
        return None if number is None or not self._is_bad_number(call, number) else number

    def is_filling(self, call: Call) -> bool:
        """Return whether what a call wrote does not depend on what was there."""
        if call.facts.name in _PLACES:
            return not self._adds(call)
        return call.facts.name in _FILLS

    # --- by the elements -------------------------------------------------------------------------

    def _region(self, call: Call, shown: Tensor) -> Tensor | None:
        """Mark the elements of the living tensor that a call wrote to."""
        living = call.output()
        if call.view is not None:
            _, dtype, shape, stride, offset = call.view
        elif living is not None:
            dtype, shape, stride = living.dtype, living.shape, living.stride()
            offset = int(living.storage_offset())
        else:
            return None
        here = (tuple(shown.shape), shown.stride(), int(shown.storage_offset()))
        needed = max(_extent(*here), _extent(shape, stride, offset))
        selection = self._selection(call, len(shape))
        if dtype != shown.dtype or needed > _MAX_MEMORY or selection is None:
            return None
        memory = torch.zeros(needed, dtype=torch.bool)
        try:
            memory.as_strided(shape, stride, offset)[selection] = True
        except (IndexError, RuntimeError):  # its mask or indices are not what they were
            return None
        return memory.as_strided(*here)

    def _selection(self, call: Call, dimensions: int) -> tuple[Any, ...] | None:
        """Return the mask or the indices with which a call chose, where all of them live on."""
        name = call.facts.name
        if name not in _PLACES and name not in _CHANGES:
            return (...,)
        if name in ("aten::masked_fill_", "aten::masked_scatter_"):
            chosen = call.inputs[1:2]
        elif name == "aten::index_put_":
            chosen = call.inputs[1:-1]
        else:
            return None
        living = [item() for item in chosen if self._lineage.is_untouched(item, call.seq)]
        found = tuple(item.cpu() for item in living if item is not None)
        is_mask = [item.dtype in (torch.bool, torch.uint8) for item in found]
        used = sum(item.dim() if m else 1 for item, m in zip(found, is_mask, strict=True))
        # Of a None among the indices, which stands for a whole dimension, no trace is left.
        return found if len(found) == len(chosen) and used == dimensions else None

    # --- by the values ---------------------------------------------------------------------------

    def _by_values(self, call: Call, current: Ref, shown: Tensor | None) -> bool | None:
        """Judge a write to elements that nobody knows."""
        values = [item for item in value_inputs(call) or () if item is not call.output]
        if any(self.carries(item, call.seq) for item in values):
            return True if self._lineage.same(call.output, current) else None
        if self._is_good(call, values):
            return False
        count = self._most_elements(call)
        if shown is None or count is None or not self._has_more(shown, count + self.unknown):
            return None
        self.unknown += count
        return False

    def carries(self, tensor: Ref, since: int) -> bool:
        """Return whether a tensor, read by call number ``since``, lives on with a bad value."""
        living = tensor()
        return (
            living is not None and self._lineage.is_untouched(tensor, since) and self.test(living)
        )

    def test(self, tensor: Tensor) -> bool:
        """Return whether a living tensor holds a bad value."""
        return tensor.device.type != "meta" and tensor.numel() > 0 and self._is_bad(tensor)

    def _is_good(self, call: Call, values: Sequence[Ref]) -> bool:
        """Return whether all values that a call wrote are proven to be good."""
        if call.facts.name not in _PLACES or self._adds(call):
            return False
        if isinstance(call.reads, Placed) and call.reads.number is not None:
            return not self._is_bad_number(call, call.reads.number)
        dtype = self._lineage.meta_of(call.output)[1]
        return bool(values) and all(
            (living := item()) is not None
            and living.dtype == dtype
            and self._lineage.is_untouched(item, call.seq)
            and not self.test(living)
            for item in values
        )

    def _is_bad_number(self, call: Call, number: float) -> bool:
        dtype = self._lineage.meta_of(call.output)[1]
        return self.test(torch.tensor([number], dtype=dtype))

    def _adds(self, call: Call) -> bool:
        is_added = isinstance(call.reads, Placed) and call.reads.adds
        return is_added or "reduce" in (call.facts.overload or "")

    # --- by their count --------------------------------------------------------------------------

    def _most_elements(self, call: Call) -> int | None:
        """Return an upper bound of the number of elements that a call wrote to."""
        name, shape = call.facts.name, self._lineage.meta_of(call.output)[0]
        if call.view is not None:
            shape = call.view.shape
        chosen = call.inputs[1:-1] if name == "aten::index_put_" else call.inputs[1:2]
        metas = [self._lineage.meta_of(item) for item in chosen]
        masks = (None, torch.bool, torch.uint8)
        if not metas or shape is None or any(dtype in masks for _, dtype in metas):
            return None
        if name.startswith("aten::scatter_"):
            return int(math.prod(metas[0][0]))
        if not name.startswith("aten::index_"):
            return None
        # Which dimensions the indices stand for is not known: at most it is the short ones.
        rest = sorted(shape)[len(metas) :]
        chosen_at = torch.broadcast_shapes(*(size for size, _ in metas))
        return int(math.prod(chosen_at) * math.prod(rest))

    def _is_bad_beyond(self, elements: Tensor) -> bool | None:
        """Return whether elements are bad, more of them than unknown calls may have written."""
        if not self.test(elements):
            return False
        return True if self._has_more(elements, self.unknown) else None

    def _has_more(self, tensor: Tensor, count: int) -> bool:
        """Return whether more than ``count`` elements are bad, by halving."""
        waiting, left = [tensor.reshape(-1)], count
        while waiting and left <= _MAX_COUNTED:
            piece = waiting.pop()
            if not self.test(piece):
                continue
            if piece.numel() > 1:
                waiting += piece.tensor_split(2)
                continue
            left -= 1
            if left < 0:
                return True
        return False


def _extent(shape: Sequence[int], stride: Sequence[int], offset: int) -> int:
    """Return how much of the memory a view reaches."""
    if 0 in shape:
        return offset
    return offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
