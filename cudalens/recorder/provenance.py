"""Provenance of bad values: from the tensor at fault back along the calls that it came through.

The unit is the tensor: a call is the origin when its result is bad and its inputs, which must be
alive and unchanged, are good.  Of the bad elements their values are known, and their places while
every call takes each element from the same place.  That is enough for the row of a batch, and to
pass over a write of other values.  The walk ends before a call that cannot be judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

from cudalens.core._torch import is_accelerator
from cudalens.core.report_types import FIRST_BAD, WRITES, ProvenanceStep
from cudalens.core.tensor_values import ravel, unravel
from cudalens.recorder.calls import CONVERSIONS, FROM_PYTHON, Recorded, names
from cudalens.recorder.dataloader import Batch, describe
from cudalens.recorder.history import Snapshot
from cudalens.recorder.tensor_refs import Ref, is_ref

ENTERED = "the data came from the CPU here"
_MAX_STEPS = 24
_MAX_CALLS = 1000
IsBad = Callable[[Tensor], bool]
Position = tuple[int, ...]

_CHOOSING = names(
    "__getitem__ index_select gather take take_along_dim masked_select repeat_interleave"
)
"""Functions whose other tensors choose among the values of the first."""
_SAME_PLACE = (*CONVERSIONS, "clone", "reshape", "flatten")
"""Functions, besides torch's pointwise ones, that take each element from the same place."""
_MOVES = _CHOOSING | names("cat concat stack flip roll repeat sort embedding hstack vstack")
"""Functions whose result has elements of their inputs, unchanged, at other places."""
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


@dataclass(frozen=True)
class _Elements:
    """Bad elements that a report lists, in the tensor that the walk has come to."""

    origins: tuple[Position, ...] = ()
    """Their positions in the tensor that the walk began with."""
    values: Tensor | None = None
    """Their values on the host; ``None`` where a call has computed others of them."""
    places: tuple[int, ...] | None = None
    """Their places in row-major order; ``None`` where a call has moved elements."""
    rows: tuple[int, ...] | None = None
    """Their rows where there are no places, as long as no call has moved rows."""

    def in_rows(self, shape: Sequence[int] | None) -> tuple[int, ...] | None:
        """Return the row of each in a tensor of some shape."""
        if self.places is None:
            return self.rows
        if not shape or 0 in shape:
            return None
        return tuple(place // math.prod(shape[1:]) for place in self.places)


@dataclass(frozen=True)
class _Source:
    """Input of a call, and how far it is to blame."""

    tensor: Ref
    state: str
    """``bad``: it had the bad elements; ``good``: none of them; ``other``: it has bad values,
    perhaps others; ``unknown``: it is dead, or was written to since."""
    elements: _Elements = _Elements()


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
        self._elements = _Elements(tuple(positions))
        if positions and all(len(item) == tensor.dim() for item in positions):
            places = tuple(ravel(item, tensor.shape) for item in positions)
            values = _values_at(tensor, places)
            self._elements = replace(self._elements, values=values, places=places)

    def run(self) -> Provenance:
        """Return the steps and what else was learned on the way."""
        self.provenance.steps += self._steps()
        return self.provenance

    def _steps(self) -> Iterator[ProvenanceStep]:
        count, snapshot = 0, self._snapshot
        for _ in range(_MAX_CALLS):
            call = snapshot.newest(self._current, self._before)
            batch = snapshot.batches.find(self._current)
            if batch is not None and (call is None or call.seq <= batch.seq):
                yield self._from_loader(batch)
                return
            self.provenance.is_open = call is None
            if call is None or count == _MAX_STEPS or self._ends_at(call):
                return
            if call.is_alias and call.inputs:
                self._look_through(call)
                continue
            source, is_first, note = None, False, None
            if call.written and call.api.value_at:
                is_theirs, note = self._wrote_them(call)
                if not is_theirs:
                    if not self._is_certain and self._elements.values is None:
                        return  # good values, where it is not known which were bad
                    self._before = call.seq
                    continue
            else:
                source, is_first = self._decide(call)
            if is_first and self._is_certain:
                note = FIRST_BAD
            yield describe_step(call, snapshot, note or self._entry_note(call, source))
            if source is None:
                return
            count += 1
            self._follow(call, source)

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
        return bool(is_view) and not self._snapshot.same(target.tensor, self._current)

    # --- from one tensor to the next -------------------------------------------------------------

    def _look_through(self, call: Recorded) -> None:
        """Go on with what a view shows, at the same time."""
        base, snapshot, elements = call.inputs[0], self._snapshot, self._elements
        if base is self._current:
            self._before = call.seq
            return
        (shape, dtype), (old, old_dtype) = map(snapshot.meta_of, (base, call.outputs[0]))
        if dtype != old_dtype:  # it reads the memory in another way
            elements = _Elements(elements.origins)
        elif call.api.stem in _IN_ORDER:
            elements = _reshaped(elements, old, shape)
        else:
            # A size that no other dimension has is still that of the rows.
            has_rows = shape and old and shape[0] == old[0] and shape[0] not in shape[1:]
            rows = elements.in_rows(old) if has_rows and call.api.stem != "as_strided" else None
            elements = replace(elements, places=None, rows=rows)
        self._current, self._elements = base, elements

    def _follow(self, call: Recorded, source: _Source) -> None:
        """Go on with a tensor that a call read, as it was before the call."""
        is_copy = call.api.stem == "clone" and self._is_certain  # it had the same values
        self._is_certain = source.state == "bad" or (source.state == "unknown" and is_copy)
        self._elements = source.elements
        self._current, self._before = source.tensor, call.seq

    def _decide(self, call: Recorded) -> tuple[_Source | None, bool]:
        """Return the input to follow, if any, and whether this call is where values went bad."""
        if call.reads is None and not call.written:
            return None, False
        if self._is_shifted(call) or call.api.stem in FROM_PYTHON:
            return None, True
        target = call.written[0].tensor if call.written else None
        others = {id(item): item for item in _value_inputs(call) if item is not target}
        sources = [self._judge(call, item) for item in others.values()]
        suspects = [item for item in sources if item.state != "good"]
        if not any(item.state == "other" for item in suspects):
            suspects = [item for item in suspects if item.state == "bad"] or suspects
        source = suspects[0] if len(suspects) == 1 else None
        if target is None:
            return source, not suspects
        # What a tensor was before a call in place is gone.
        if sources:
            is_over = source is not None and source.state == "unknown" and len(sources) == 1
            return (None if is_over else source), False
        if call.api.stem in _FILLS:
            # The numbers that a layer begins with are bad by the bound of another tensor only.
            return None, not (call.reads is None or isinstance(target(), Parameter))
        return _Source(self._current, "unknown", replace(self._elements, values=None)), False

    def _wrote_them(self, call: Recorded) -> tuple[bool, str | None]:
        """Return whether a call wrote the bad values to some elements, and the note of its step."""
        wanted, written = self._elements.values, call.operand
        source = written() if is_ref(written) else None
        number = source.item() if source is not None and source.dim() == 0 else written
        if source is not None and is_ref(number):
            if wanted is None or wanted.dtype != source.dtype:
                return self._is_bad(source), None
            return bool(_among(wanted, source).any()), None
        if wanted is not None:
            is_theirs = bool(_among(wanted, torch.tensor([number], dtype=wanted.dtype)).any())
        else:
            dtype = self._snapshot.meta_of(call.written[0].tensor)[1]
            is_theirs = self._is_bad(torch.tensor([number], dtype=dtype))
        return is_theirs, f"{WRITES} {number}"

    # --- inputs ----------------------------------------------------------------------------------

    def _judge(self, call: Recorded, tensor: Ref) -> _Source:
        """Return what is known of the bad elements in an input of a call."""
        living, stem, snapshot = tensor(), call.api.stem, self._snapshot
        shape, dtype = snapshot.meta_of(tensor)
        is_own = not call.written or snapshot.same(call.written[0].tensor, self._current)
        result_shape, result_dtype = snapshot.meta_of(self._current) if is_own else (None, None)
        elements = replace(self._elements, places=None, rows=None)
        is_same_place = stem in _SAME_PLACE or call.api.is_positional
        if is_same_place and shape is not None and result_shape is not None:
            elements = _reshaped(self._elements, result_shape, shape)
            if math.prod(shape) == 1:  # one number for all
                elements = replace(elements, places=(0,) * len(elements.origins))
        has_values = stem in _SAME_PLACE or stem in _MOVES or stem == "where"
        if not has_values or dtype != result_dtype:
            elements = replace(elements, values=None)
        unknown, good = _Source(tensor, "unknown", elements), _Source(tensor, "good")
        has_no_bound = self._is_of_integers and dtype is not None and dtype.is_floating_point
        if has_no_bound and self._is_certain and stem not in CONVERSIONS:
            return good  # the call made integers of it: positions, or a count
        if living is None or has_no_bound or not snapshot.is_untouched(tensor, call.seq):
            return unknown
        if not self._is_bad(living):
            return good
        if elements.places and living.device.type != "meta":
            return self._judge_places(stem, tensor, living, elements)
        if elements.values is None or stem not in _MOVES:
            return _Source(tensor, "other", elements)
        among = _among(elements.values, living)
        state = "bad" if among.all() else "other" if among.any() else "good"
        return _Source(tensor, state, elements)

    def _judge_places(self, stem: str, tensor: Ref, living: Tensor, elements: _Elements) -> _Source:
        """Return which of the bad elements an input has at the places that they came from."""
        places = elements.places or ()
        values = _values_at(living, places)
        chosen = [self._is_bad(item) for item in values.split(1)]
        if stem == "where" and elements.values is not None:  # only one was chosen
            same = _equal(values, elements.values).tolist()
            chosen = [bad and is_same for bad, is_same in zip(chosen, same, strict=True)]
        bad = [at for at, is_bad in enumerate(chosen) if is_bad]
        if not bad:
            return _Source(tensor, "good")
        origins = tuple(elements.origins[at] for at in bad)
        return _Source(
            tensor, "bad", _Elements(origins, values[bad], tuple(places[at] for at in bad))
        )

    def _is_shifted(self, call: Recorded) -> bool:
        """Return whether a call moved good values by a whole number: they are computed back."""
        values = self._elements.values
        if not call.api.shift or call.operand is None or values is None:
            return False
        if values.dtype.is_floating_point or values.dtype.is_complex:
            return False
        return not any(map(self._is_bad, (values - call.operand).split(1)))

    # --- what is said ----------------------------------------------------------------------------

    def _entry_note(self, call: Recorded, following: _Source | None) -> str | None:
        if call.api.stem not in CONVERSIONS or following is None or isinstance(call.output, tuple):
            return None
        source, result = following.tensor(), call.output()
        if source is None or result is None:
            return None
        crosses = source.device.type == "cpu" and is_accelerator(result.device)
        return ENTERED if crosses else None

    def _from_loader(self, batch: Batch) -> ProvenanceStep:
        """Name the batch, and the dataset's row of each element whose row is known."""
        self.provenance.batch = batch
        rows = self._elements.in_rows(self._snapshot.meta_of(self._current)[0])
        if not rows:
            return ProvenanceStep(note=describe(batch, None))
        indices = batch.indices or ()
        self.provenance.samples = {
            origin: indices[row]
            for origin, row in zip(self._elements.origins, rows, strict=True)
            if row < len(indices)
        }
        return ProvenanceStep(note=describe(batch, rows[0]))


def describe_step(call: Recorded, snapshot: Snapshot, note: str | None = None) -> ProvenanceStep:
    """Describe a call as one step of a tensor's provenance."""
    return ProvenanceStep(op=call.name, source=snapshot.reader.line(call.site), note=note)


def _value_inputs(call: Recorded) -> list[Ref]:
    """Return the inputs whose values can be values of the result.

    Indices and masks only choose, and scores are no labels: an input of floats is left out where
    the result has integers.
    """
    inputs, stem = list(call.inputs), call.api.stem
    if stem in _CHOOSING:
        inputs = inputs[:1]
    elif stem in ("where", "embedding"):  # all but the condition, the indices
        del inputs[1 if call.name == "torch.Tensor.where" else 0]
    if stem in CONVERSIONS or isinstance(call.output, tuple):
        return inputs
    result = call.output()
    return [
        item
        for item in inputs
        if result is None
        or (source := item()) is None
        or source.dtype.is_floating_point == result.dtype.is_floating_point
    ]


def _reshaped(elements: _Elements, old: Any, new: Any) -> _Elements:
    """Return elements in a tensor of another shape that has all of them in the same order."""
    if old is None or new is None or math.prod(old) != math.prod(new):
        return replace(elements, places=None, rows=None)
    if elements.places is not None or tuple(old[:1]) == tuple(new[:1]):
        return elements
    return replace(elements, rows=None)


def _values_at(tensor: Tensor, places: Sequence[int]) -> Tensor:
    """Return some elements, by their places in row-major order, as one row on the host."""
    shape = tuple(tensor.shape)
    return torch.stack([tensor.detach()[unravel(place, shape)] for place in places]).cpu()


def _among(values: Tensor, tensor: Tensor) -> Tensor:
    """Return which values a tensor has among its elements."""
    return torch.stack([_equal(tensor.detach(), value.to(tensor.device)).any() for value in values])


def _equal(left: Tensor, right: Tensor) -> Tensor:
    """Return where two tensors are equal; NaN is equal to NaN."""
    same = left == right
    return same | (left.isnan() & right.isnan()) if left.is_floating_point() else same
