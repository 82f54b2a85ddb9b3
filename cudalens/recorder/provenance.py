"""Provenance of bad values: from the tensor at fault back along the calls that it came through.

A call is the origin when its result is bad and its inputs, which must be alive and unchanged, are
good.  The listed bad elements are followed by their positions while each call takes an element from
the same place, and by their values while none computes others.  The walk ends before a call that
cannot be judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from cudalens.core._torch import base_of
from cudalens.core.report_types import FIRST_BAD, WRITES, ProvenanceStep, ravel, unravel
from cudalens.recorder.calls import CONVERSIONS, FROM_PYTHON, Recorded, names
from cudalens.recorder.dataloader import Batch, describe
from cudalens.recorder.history import Snapshot
from cudalens.recorder.tensor_refs import Ref, is_ref

_MAX_STEPS = 24
_MAX_CALLS = 1000
IsBad = Callable[[Tensor], bool]
Position = tuple[int, ...]

_CHOOSING = names(
    "__getitem__ index_select gather take take_along_dim masked_select repeat_interleave"
)
"""Functions whose other tensors choose among the values of the first."""
_SAME_PLACE = CONVERSIONS | names("clone reshape flatten")
"""Functions, besides torch's pointwise ones, that take each element from the same place."""
_SAME_VALUE = _SAME_PLACE | _CHOOSING
_SAME_VALUE |= names("cat concat stack flip roll repeat sort embedding hstack vstack where")
"""Functions whose result has elements of their inputs, unchanged unless their dtype is."""
_IN_ORDER = names(
    "view view_as reshape reshape_as flatten ravel unsqueeze squeeze detach data alias contiguous"
)
"""Views of all elements in the order that they had."""
_RENEWS = ("resize_", "resize_as_", "set_", "data")
"""Functions after which the tensor has other memory."""
_FILLS = names(
    "bernoulli_ cauchy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ uniform_ zero_"
)
"""Functions that write to all elements, whatever was there."""


@dataclass
class Provenance:
    """Provenance of a tensor's bad values."""

    steps: list[ProvenanceStep] = field(default_factory=list)
    samples: dict[Position, int] = field(default_factory=dict)
    """Dataset items of the bad elements, by their positions."""
    batch: Batch | None = None
    """The batch of a loader that the values came in."""
    is_open: bool = False
    """True if it ended only because no older call is known."""
    origin: Tensor | None = None
    """The tensor with bad values that no recorded call has made or written to."""


class ProvenanceWalk:
    """One walk from a bad tensor back to the call that made it bad, or to where the data entered.

    Args:
        is_bad: returns whether a tensor has a bad value; called with living tensors only.
        positions: of its bad elements, as far as they are listed.
    """

    def __init__(
        self, tensor: Tensor, snapshot: Snapshot, is_bad: IsBad, positions: Sequence[Position]
    ) -> None:
        self.provenance = Provenance()
        self._snapshot = snapshot
        self._is_bad: IsBad = lambda item: (
            item.device.type != "meta" and item.numel() > 0 and is_bad(item)
        )
        self._is_of_integers = not (tensor.is_floating_point() or tensor.is_complex())
        """Floats that integers were made of have no bound."""
        self._current: Ref = ref(tensor)
        self._before: int | None = None
        """The current tensor is bad right before this call; ``None`` for now."""
        self._is_certain = self._is_bad(tensor)
        """True if the current tensor is proven to have been bad then."""
        self._origins = tuple(positions)
        self._positions: Sequence[Position] | None = None
        """Places of the listed elements in the current tensor, or of the rows that hold them."""
        self._values: Tensor | None = None
        """Their values on the host; ``None`` where a call has computed others of them."""
        if positions and all(len(item) == tensor.dim() for item in positions):
            self._positions = positions
            self._values = _values_at(tensor, positions)

    def run(self) -> Provenance:
        """Return the steps and what else was learned on the way."""
        self.provenance.steps += islice(self._steps(), _MAX_STEPS)
        return self.provenance

    def _steps(self) -> Iterator[ProvenanceStep]:
        snapshot = self._snapshot
        for _ in range(_MAX_CALLS):
            call = snapshot.newest(self._current, self._before)
            batch = snapshot.batches.find(self._current)
            if batch is not None and (call is None or call.seq <= batch.seq):
                yield self._from_loader(batch)
                return
            if call is None and self._go_to_base():
                continue
            if call is None or self._ends_at(call):
                return
            if call.is_alias and call.inputs:
                self._look_through(call)
                continue
            written: Any
            source, state, note = None, "", None
            if call.written and call.api.value_at:
                written = call.operand() if is_ref(call.operand) else torch.tensor(call.operand)
                if not self._contains_some(written):
                    if not self._is_certain and self._values is None:
                        return  # good values, where it is not known which were bad
                    self._before = call.seq
                    continue
                note = f"{WRITES} {written.item()}" if written.dim() == 0 else None
            else:
                source, state = self._source_of(call)
            if state == "good" and self._is_certain:
                note = FIRST_BAD
            yield describe_step(call, snapshot, note)
            if source is None:
                return
            self._follow(call, source, state)

    def _ends_at(self, call: Recorded) -> bool:
        """Return whether it is not known what a call wrote, or that to which elements."""
        if not call.written:
            return False
        first, target = (call.inputs or (None,))[0], call.written[0]
        if call.api.stem in _RENEWS or call.api.is_foreign or not call.api.is_in_place:
            return True
        if len(call.written) > 1 or target.tensor is not first:
            return True
        if call.api.value_at:
            source = call.operand() if is_ref(call.operand) else None
            is_kept = source is not None and self._snapshot.is_untouched(call.operand, call.seq)
            return not is_kept and type(call.operand) not in (int, float, bool)
        is_view = target.base or self._snapshot.whole(target.tensor) is not target.tensor
        return bool(is_view) and target.tensor is not self._current

    def _contains_some(self, written: Any) -> bool:
        """Return whether what a call wrote to some elements has one of the bad values."""
        if self._values is None or (written.dim() and written.dtype != self._values.dtype):
            return self._is_bad(written)
        return any(_contains(written, value) for value in self._values)

    # --- from one tensor to the next -------------------------------------------------------------

    def _look_through(self, call: Recorded) -> None:
        """Go on with what a view shows, at the same time."""
        base, meta_of = call.inputs[0], self._snapshot.meta_of
        if base is self._current:
            self._before = call.seq
            return
        (shape, dtype), (old, old_dtype) = meta_of(base), meta_of(call.outputs[0])
        if dtype != old_dtype:  # it reads the memory in another way
            self._positions = self._values = None
        elif call.api.stem in _IN_ORDER:
            self._positions = _reshaped(self._positions, old, shape)
        elif self._positions is not None:
            # A size that no other dimension has is still that of the rows.
            has_rows = shape and old and shape[0] == old[0] and shape[0] not in shape[1:]
            is_known = has_rows and call.api.stem != "as_strided"
            self._positions = [item[:1] for item in self._positions] if is_known else None
        self._current = base

    def _go_to_base(self) -> bool:
        """Go on with the base of a view that only torch knows, as that of labels in ``one_hot``.

        Without one, the values are older than what was recorded.
        """
        living = self._current()
        base = None if living is None else base_of(living)
        if living is not None and base is not None and base.numel() == living.numel():
            self._positions = _reshaped(self._positions, living.shape, base.shape)
            self._current = ref(base)
            return True
        self.provenance.is_open = True
        if living is not None and self._snapshot.is_untouched(self._current, 0):
            self.provenance.origin = living if self._is_bad(living) else None
        return False

    def _follow(self, call: Recorded, source: Ref, state: str) -> None:
        """Go on with a tensor that a call read, as it was before the call."""
        is_copy = call.api.stem == "clone" and state == "unknown"  # it had the same values
        self._is_certain = state == "bad" or (is_copy and self._is_certain)
        positions, living = self._positions_in(call, source), source()
        if not self._has_values(call, source):
            self._values = None
        if (
            state == "bad"
            and positions
            and living is not None
            and len(positions[0]) == living.dim()
        ):
            values = _values_at(living, positions)
            bad = [at for at, value in enumerate(values) if self._is_bad(value)]
            self._origins = tuple(self._origins[at] for at in bad)
            positions, self._values = [positions[at] for at in bad], values[bad]
        self._positions, self._current, self._before = positions, source, call.seq

    def _source_of(self, call: Recorded) -> tuple[Ref | None, str]:
        """Return the input to follow, if any, and its state.

        The state is ``bad`` for an input that had the bad elements, ``good`` where the inputs had
        none of them, ``other`` for one with bad values, perhaps others, and ``unknown`` for one
        that is dead or was written to since.
        """
        if call.reads is None:
            return None, "unknown"
        if call.api.stem in FROM_PYTHON:
            return None, "good"
        target = call.written[0].tensor if call.written else None
        inputs = {id(item): item for item in self._value_inputs(call) if item is not target}
        states = [(item, self._state(call, item)) for item in inputs.values()]
        suspects = [item for item in states if item[1] != "good"]
        if all(state != "other" for _, state in suspects):
            suspects = [item for item in suspects if item[1] == "bad"] or suspects
        if target is not None:
            # What a tensor was before a call in place is gone.
            if not states and call.api.stem not in _FILLS:
                return self._current, "unknown"
            if states and (len(suspects) != 1 or suspects[0][1] == "unknown"):
                return None, "unknown"
        if not suspects:
            return None, "good"
        return suspects[0] if len(suspects) == 1 else (None, "unknown")

    # --- inputs ----------------------------------------------------------------------------------

    def _value_inputs(self, call: Recorded) -> list[Ref]:
        """Return the inputs whose values can be values of the result.

        Indices and masks only choose, and scores are no labels: an input of floats is left out
        where the result has integers.
        """
        inputs, stem, meta_of = list(call.inputs), call.api.stem, self._snapshot.meta_of
        if stem in _CHOOSING:
            inputs = inputs[:1]
        elif stem in ("where", "embedding"):  # all but the condition, the indices
            del inputs[1 if call.name == "torch.Tensor.where" else 0]
        dtype = meta_of(self._current)[1]
        if stem in CONVERSIONS or dtype is None:
            return inputs
        dtypes = [(item, meta_of(item)[1]) for item in inputs]
        return [
            item
            for item, its in dtypes
            if its is None or its.is_floating_point == dtype.is_floating_point
        ]

    def _has_values(self, call: Recorded, tensor: Ref) -> bool:
        """Return whether the values that are followed are values of an input."""
        dtypes = [self._snapshot.meta_of(item)[1] for item in (tensor, self._current)]
        return call.api.stem in _SAME_VALUE and dtypes[0] == dtypes[1]

    def _positions_in(self, call: Recorded, tensor: Ref) -> Sequence[Position] | None:
        """Return where the elements came from in an input of a call."""
        if call.api.stem not in _SAME_PLACE and not call.api.is_positional:
            return None
        shape, own = self._snapshot.meta_of(tensor)[0], self._snapshot.meta_of(self._current)[0]
        if self._positions and shape is not None and math.prod(shape) == 1:  # one number for all
            return [(0,) * len(shape)] * len(self._positions)
        return _reshaped(self._positions, own, shape)

    def _state(self, call: Recorded, tensor: Ref) -> str:
        """Return what is known of the bad elements in an input; see :meth:`_source_of`."""
        living, dtype = tensor(), self._snapshot.meta_of(tensor)[1]
        has_no_bound = self._is_of_integers and dtype is not None and dtype.is_floating_point
        if living is None or has_no_bound or not self._snapshot.is_untouched(tensor, call.seq):
            return "unknown"
        if not self._is_bad(living):
            return "good"
        positions, has_values = self._positions_in(call, tensor), self._has_values(call, tensor)
        if positions and len(positions[0]) == living.dim():
            values: Any = _values_at(living, positions)
            if has_values and self._values is not None:
                bad = map(_contains, values, self._values)
            else:
                bad = map(self._is_bad, values)
            return "bad" if any(bad) else "good"
        if has_values and self._values is not None:
            matches = [_contains(living, value) for value in self._values]
            return "bad" if all(matches) else "other" if any(matches) else "good"
        return "other"

    # --- what is said ----------------------------------------------------------------------------

    def _from_loader(self, batch: Batch) -> ProvenanceStep:
        """Name the batch, and the dataset's row of each element whose row is known."""
        self.provenance.batch = batch
        rows = [item[0] for item in self._positions or () if item]
        indices = batch.indices or ()
        self.provenance.samples = {
            origin: indices[row]
            for origin, row in zip(self._origins, rows, strict=False)
            if row < len(indices)
        }
        return ProvenanceStep(note=describe(batch, rows[0] if rows else None))


def describe_step(call: Recorded, snapshot: Snapshot, note: str | None = None) -> ProvenanceStep:
    """Describe a call as one step of a tensor's provenance."""
    return ProvenanceStep(op=call.name, source=snapshot.reader.line(call.site), note=note)


def _reshaped(
    positions: Sequence[Position] | None, old: Any, new: Any
) -> Sequence[Position] | None:
    """Return positions in a tensor of another shape that has all elements in the same order."""
    if not positions or old is None or new is None or math.prod(old) != math.prod(new):
        return None
    if len(positions[0]) == len(old):
        return [unravel(ravel(item, old), tuple(new)) for item in positions]
    return positions if tuple(old[:1]) == tuple(new[:1]) else None  # rows


def _values_at(tensor: Any, positions: Any) -> Tensor:
    """Return some elements as one row on the host."""
    return torch.stack([tensor.detach()[position] for position in positions]).cpu()


def _contains(tensor: Tensor, value: Tensor) -> bool:
    """Return whether a tensor has an element of a value; NaN is equal to NaN."""
    value = value.to(tensor.device)
    return bool(((tensor == value) | ((tensor != tensor) & (value != value))).any())  # noqa: PLR0124
