"""The way of bad values: from the tensor at fault back along the calls that it came through.

A call is a step only where it is proven to lie on that way.  A write in place that brought only
good values is passed over; where it cannot be told what a write brought, the way ends before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import ref

from torch import Tensor
from torch.nn import Parameter

from cudalens.core._torch import is_accelerator
from cudalens.core.report_types import FIRST_BAD, ProvenanceStep
from cudalens.recorder.dataloader import Batch, describe
from cudalens.recorder.lineage import FROM_PYTHON, Lineage, value_inputs, writes_among
from cudalens.recorder.ops import Call
from cudalens.recorder.overwrites import IsBad, Overwrites
from cudalens.recorder.reads import Ref, Shifted

ENTERED = "the data came from the CPU here"
_MAX_STEPS = 24
_MAX_CALLS = 1000
_COPIES = frozenset(
    {"aten::_to_copy", "aten::clone", "aten::lift_fresh", "aten::detach", "aten::contiguous"}
)
_OTHER_ELEMENTS = frozenset({"aten::view.dtype", "aten::view_as_real", "aten::view_as_complex"})
"""Views that read the memory in another way."""


def way_of(tensor: Tensor, lineage: Lineage, is_bad: IsBad) -> Iterator[ProvenanceStep]:
    """Follow a bad tensor back to the op that made it bad, or to where the data entered."""
    return _ProvenanceWalk(tensor, lineage, is_bad).steps()


class _ProvenanceWalk:
    """One walk from a bad tensor back along the calls."""

    def __init__(self, tensor: Tensor, lineage: Lineage, is_bad: IsBad) -> None:
        self._lineage = lineage
        self._writes = Overwrites(lineage, is_bad)
        self._current: Ref = ref(tensor)
        self._before: int | None = None
        """The current tensor is bad right before this call; ``None`` for now."""
        self._shown: Tensor | None = tensor
        """What lives on of the current tensor, with the values that it had then."""
        self._rows: Tensor | None = tensor
        """The last living tensor whose rows are the current tensor's rows."""
        self._is_judged = self._writes.test(tensor)
        """Whether its values alone are bad: of too many of them no single one is."""
        self._is_certain = self._is_judged
        """Whether the current tensor is proven to have been bad then."""

    def steps(self) -> Iterator[ProvenanceStep]:
        count = 0
        for _ in range(_MAX_CALLS):
            call = self._lineage.newest(self._current, self._before)
            batch = self._lineage.batches.find(self._current)
            if batch is not None and (call is None or call.seq <= batch.seq):
                yield self._from_loader(batch)
                return
            if call is None or count == _MAX_STEPS or writes_among(call):
                return
            if call.facts.is_view and call.facts.name not in FROM_PYTHON:
                if not call.inputs:
                    return
                self._look_through(call)
                continue
            if call.facts.is_in_place:
                brought = None
                if self._is_judged:
                    brought = self._writes.brought(call, self._current, self._shown)
                if brought is None:
                    yield from self._number_written(call)
                    return
                if not brought:
                    self._before = call.seq
                    continue
            following, is_first = self._decide(call)
            note = FIRST_BAD if is_first else self._entry_note(call, following)
            yield self._lineage.step(call, note)
            if following is None:
                return
            count += 1
            self._follow(call, following)

    # --- from one tensor to the next -------------------------------------------------------------

    def _look_through(self, call: Call) -> None:
        """Go on with what a view shows: the same elements, at the same time."""
        base = call.inputs[0]
        if base is self._current:
            self._before = call.seq
            return
        living = base()
        if call.facts.full_name in _OTHER_ELEMENTS:
            self._shown = None
        if living is not None and self._before is not None:
            is_kept = self._lineage.is_untouched(base, self._before)
            self._is_certain |= is_kept and self._writes.test(living)
        self._rows = living if living is not None and self._writes.test(living) else None
        self._current = base

    def _follow(self, call: Call, following: Ref) -> None:
        """Go on with a tensor that a call read, as it was before the call."""
        living = following()
        if following is self._current or living is None:
            # Written over, or dead: a copy at least had the same values.
            self._is_certain = self._is_certain and call.facts.name == "aten::clone"
            self._shown = None
        else:
            is_kept = self._lineage.is_untouched(following, call.seq)
            self._shown = living if is_kept else None
            self._is_certain = is_kept and self._writes.test(living)
            self._writes.unknown = 0
        if living is not None:
            self._rows = living if self._writes.test(living) else None
        elif call.facts.name not in _COPIES:
            self._rows = None
        self._current, self._before = following, call.seq

    def _decide(self, call: Call) -> tuple[Ref | None, bool]:
        """Return the input to follow, if any, and whether this call is where values went bad."""
        values = value_inputs(call)
        if values is None or (call.is_brief and not call.facts.is_in_place):
            return None, False
        if call.facts.is_in_place:
            return self._decide_in_place(call, values)
        if not values or call.facts.name in FROM_PYTHON:
            return None, self._is_certain
        for item in values:
            if self._writes.carries(item, call.seq):
                return item, False
        if all(
            item() is not None and self._lineage.is_untouched(item, call.seq) for item in values
        ):
            return None, self._is_certain
        before = self._before_shift(call)
        if before is not None and not self._writes.test(before):
            return None, self._is_certain
        return (values[0] if len(values) == 1 else None), False

    def _decide_in_place(self, call: Call, values: list[Ref]) -> tuple[Ref | None, bool]:
        # The tensor as it was before is gone, so nothing can be said of it.
        others = [item for item in values if item is not call.output]
        before = self._before_shift(call)
        if before is not None and not self._writes.test(before):
            return None, self._is_certain
        bad = next((item for item in others if self._writes.carries(item, call.seq)), None)
        if bad is not None or others:
            return bad, False
        if self._writes.is_filling(call):
            # The numbers that a layer begins with are bad by the bound of another tensor only.
            is_weight = isinstance(call.output(), Parameter)
            return None, not (call.is_brief or is_weight) and self._is_certain
        return self._current, False

    def _before_shift(self, call: Call) -> Tensor | None:
        """Return what a call moved by a whole number, computed back from its living result."""
        result, reads = call.output, call.reads
        if not isinstance(reads, Shifted) or isinstance(result, tuple):
            return None
        living = result()
        if living is None or living.dtype.is_floating_point or living.dtype.is_complex:
            return None
        return living - reads.by if self._lineage.is_untouched(result, call.seq + 1) else None

    # --- what is said ----------------------------------------------------------------------------

    def _number_written(self, call: Call) -> Iterator[ProvenanceStep]:
        """Name a call that wrote a bad number, though not whether to any element."""
        number = self._writes.bad_number(call)
        if number is not None:
            yield self._lineage.step(call, f"it writes {number}")

    def _entry_note(self, call: Call, following: Ref | None) -> str | None:
        if call.facts.name != "aten::_to_copy" or following is None:
            return None
        source, result = following(), call.output()
        if source is None or result is None:
            return None
        crosses = source.device.type == "cpu" and is_accelerator(result.device)
        return ENTERED if crosses else None

    def _from_loader(self, batch: Batch) -> ProvenanceStep:
        living = self._current()
        rows = self._rows if living is None else living
        row = None if rows is None or rows.dim() == 0 else self._first_bad_row(rows)
        return ProvenanceStep(note=describe(batch, row))

    def _first_bad_row(self, tensor: Tensor) -> int | None:
        """Find the first bad row by halving: the number of tests grows with the logarithm."""
        if not self._writes.test(tensor):
            return None
        low, high = 0, tensor.shape[0] - 1
        while low < high:
            middle = (low + high) // 2
            if self._writes.test(tensor[low : middle + 1]):
                high = middle
            else:
                low = middle + 1
        return low
