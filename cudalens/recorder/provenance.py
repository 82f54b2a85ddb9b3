"""Provenance of bad values: a walk from the bad tensor back along the calls that led to it.

A call is the origin if its result is bad and its inputs are good, alive and unchanged.  The listed
bad elements are followed by position while each call keeps the positions, and by value while no
call computes new values.  The walk ends before a call that it cannot judge.
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
from cudalens.core.graph_types import DIVIDES, FIRST_BAD, WRITES, ProvenanceStep
from cudalens.core.report_types import ravel, unravel
from cudalens.core.torch_functions import CONVERSIONS, Trait, functions
from cudalens.recorder.calls import FROM_PYTHON, Recorded
from cudalens.recorder.dataloader import Batch, describe
from cudalens.recorder.history import Snapshot
from cudalens.recorder.marked import MAX_PLACES, Marked, parts_of, places_shown, places_written
from cudalens.recorder.places import Position, contains, in_memory, is_among, reshaped, values_at
from cudalens.recorder.sites import RawSite
from cudalens.recorder.tensor_refs import Ref, is_ref

_MAX_STEPS = 24
_MAX_CALLS = 1000
IsBad = Callable[[Tensor], bool]

_CHOOSES = functions(Trait.CHOOSES)
_CONVERTS = CONVERSIONS | {"copy_"}
_IN_ORDER = functions(Trait.IN_ORDER)
_OF_INFINITIES = (_IN_ORDER - {"nan_to_num"}) | {"softmax", "log_softmax"}
"""Functions that turn the infinities of a division by 0 into NaN, or pass them on."""
_KEEPS = functions(Trait.KEEPS) | functions(Trait.SORTS)
_RENEWS = functions(Trait.RENEWS)
_FILLS = functions(Trait.FILLS)


@dataclass
class Provenance:
    """Provenance of a tensor's bad values."""

    steps: list[ProvenanceStep] = field(default_factory=list)
    samples: dict[Position, int] = field(default_factory=dict)
    """The dataset index of each bad element, by position."""
    batch: Batch | None = None
    """The data loader's batch that contained the values."""
    is_open: bool = False
    """True if the walk ended only because no older call is recorded."""
    origin: Tensor | None = None
    """The bad tensor that the walk ended at, which no recorded call has made or written to."""
    given: Tensor | None = None
    """The only tensor input of the proven origin, if it is alive."""
    entry: RawSite | None = None
    """The place of the call that made the first tensor from Python numbers, or that first read it.

    No recorder sees ``torch.from_numpy``: the oldest recorded call is the first to read its result.
    """


class ProvenanceWalk:
    """One walk from a bad tensor back to the call that made it bad, or to where the data entered.

    Args:
        is_bad: returns whether a tensor has a bad value; called with living tensors only.
        positions: the positions of its bad elements, as far as they are listed.
        mask: bool[shape of the tensor], true at all its bad elements, if known.
    """

    def __init__(
        self,
        tensor: Tensor,
        snapshot: Snapshot,
        is_bad: IsBad,
        positions: Sequence[Position],
        mask: Tensor | None = None,
    ) -> None:
        self.provenance = Provenance()
        self._snapshot = snapshot
        self._is_bad: IsBad = lambda item: (
            item.device.type != "meta" and item.numel() > 0 and is_bad(item)
        )
        self._is_of_integers = not (tensor.is_floating_point() or tensor.is_complex())
        """The bound is one for integers: the floats that they were converted from have none."""
        self._at = Marked(ref(tensor), tuple(positions))
        self._pending: list[tuple[Marked, int]] = []
        """Other tensors that bad elements were copied from, each with the call that copied."""
        self._passed: list[tuple[Any, int]] = []
        """The batches that are steps already."""
        self._hands_infinities_on = True
        """True while every call passed could have spread the infinities of a division by 0."""
        self._is_counted = True
        """False behind a write at unknown positions, which may have overwritten bad elements."""
        self._is_over = False
        self._before: int | None = None
        """The current tensor is looked at as it was before this call; ``None`` for now."""
        if positions and all(len(item) == tensor.dim() for item in positions):
            values = values_at(tensor, positions)
            bad = None
            if mask is not None and mask.shape == tensor.shape:
                places = mask.reshape(-1).nonzero().squeeze(1)[:MAX_PLACES]
                bad = places.cpu(), tensor.detach().reshape(-1)[places].cpu()
            self._at = self._at._replace(positions=positions, values=values, bad=bad)
        if self._is_bad(tensor):
            self._at = self._at._replace(state="bad")

    def run(self) -> Provenance:
        """Walk; return the steps and everything else that was learned."""
        if self._is_known():
            self.provenance.steps += islice(self._steps(), _MAX_STEPS)
        return self.provenance

    def _is_known(self) -> bool:
        """Return whether all writes to the tensor were recorded: those of other threads are not."""
        snapshot, at = self._snapshot, self._at.tensor
        living, writes = at(), snapshot.writes_to(at)
        made = snapshot.newest(at)
        if living is None or living.is_inference() or made is None:
            return True
        # `<=`, because a write through `.data` bumps another counter, which may be ahead.
        return living._version <= max((write.after for _, write in writes), default=0)

    def _steps(self) -> Iterator[ProvenanceStep]:
        yield from self._way()
        while self._pending:
            self._at, self._before = self._pending.pop(0)
            yield from self._way()

    def _way(self) -> Iterator[ProvenanceStep]:
        """Yield the steps from one tensor back; queue other tensors that are to be followed."""
        self._is_over = False
        reader: Recorded | None = None
        for _ in range(_MAX_CALLS):
            call = self._snapshot.newest(self._at.tensor, self._before)
            if (batch := self._batch_before(call)) is not None:
                yield self._from_loader(batch)
                self._before, self._is_over = batch.seq + 1, not batch.is_collated_here
            elif call is None:
                self._is_over = not self._go_to_base(reader)
            elif (numbers := places_written(call, self._at, self._snapshot)) is not None:
                yield from self._keyed_write(call, numbers)
            elif self._ends_at(call):
                return
            elif _returned(call, self._at.tensor) or (call.is_alias and call.inputs):
                self._look_through(call)
            elif (passed := self._passed_on(call)) is not None:
                self._at, self._before = passed, call.seq
            elif call.written and call.api.value_at:
                yield from self._write(call)
            else:
                yield from self._making(call)
            if self._is_over:
                return
            reader = call or reader

    def _making(self, call: Recorded) -> Iterator[ProvenanceStep]:
        """Yield the step of a call that computed the whole tensor."""
        source, is_first = self._source_of(call)
        is_proven = is_first and self._at.state == "bad"
        bad = self._at.bad if is_proven and self._is_counted else None
        count = None if bad is None else len(bad[0])
        divides = call.divisor == 0 and self._hands_infinities_on
        note = FIRST_BAD if is_proven else DIVIDES if divides else None
        self._hands_infinities_on &= call.api.stem in _OF_INFINITIES
        if is_proven and len(call.inputs) == 1:
            self.provenance.given = call.inputs[0]()
        yield describe_step(call, self._snapshot, note, count)
        if is_proven and len(call.inputs) == 1:  # softmax turns infinities into NaN
            before = self._snapshot.newest(call.inputs[0], call.seq)
            if before is not None and before.divisor == 0:
                yield describe_step(before, self._snapshot, DIVIDES)
        self._is_over = source is None
        if source is None and not is_first:
            parts = parts_of(call, self._at, self._snapshot, self._dim_of_items())
            if parts:
                self._at, self._before, self._is_over = parts[0], call.seq, False
                self._pending += [(part, call.seq) for part in parts[1:]]
        if source is not None:
            has_same = call.api.stem in _IN_ORDER and source.values is not None
            if has_same and source.state == "unknown":
                source = source._replace(state=self._at.state)
            self._at, self._before = source, call.seq

    def _batch_before(self, call: Recorded | None) -> Batch | None:
        """Return the loader's batch that returned the tensor after the call that made it."""
        batch = self._snapshot.batches.find(self._at.tensor)
        if batch is None or (call is not None and call.seq > batch.seq):
            return None
        if self._snapshot.is_hidden(self._at.tensor, batch.seq, self._before):
            return None
        key = batch.iterator, batch.number
        if key in self._passed:
            return None
        self._passed.append(key)
        return batch

    # --- writes to some elements -----------------------------------------------------------------

    def _keyed_write(self, call: Recorded, numbers: Tensor) -> Iterator[ProvenanceStep]:
        """Yield the step of a write at known positions, if it wrote bad elements."""
        if count := self._leave_to(call, numbers):
            known = count if self._is_counted else None
            yield describe_step(call, self._snapshot, _what_it_writes(call.operand), known)
        self._before = call.seq
        self._is_over = self._at.bad is not None and not len(self._at.bad[0])

    def _write(self, call: Recorded) -> Iterator[ProvenanceStep]:
        """Yield the step of a write at unknown positions, if it wrote bad values."""
        operand = call.operand
        written: Any = operand() if is_ref(operand) else torch.tensor(operand)
        self._before = call.seq
        is_unknown = self._at.values is None and self._at.positions is None
        if is_unknown and self._is_of_integers and self._at.state != "bad":
            self._is_over = True  # it may have written a bad value that is not followed
            return
        shown = places_shown(call, self._at, self._snapshot)
        if not self._is_reached(shown, written):
            return
        if self._contains_some(written):
            note = f"{WRITES} {written.item()}" if written.dim() == 0 else None
            yield describe_step(call, self._snapshot, note)
            self._is_over = not self._leave_out(shown, written)
        elif self._at.state != "bad" and self._at.values is None:
            self._is_over = True  # it wrote good values, maybe over the bad ones

    def _leave_to(self, call: Recorded, numbers: Tensor) -> int:
        """Keep the bad elements that a write did not write; return how many it wrote.

        Those copied from another tensor are queued, to be followed there.
        """
        assert self._at.bad is not None
        places, values = self._at.bad
        of_source = numbers[places]
        is_hit = of_source >= 0
        operand, shape = call.operand, self._snapshot.meta_of(self._at.tensor)[0]
        if not is_hit.any():
            return 0
        listed = self._at.positions or ()
        hits = [int(numbers[ravel(item, shape)]) for item in listed]
        if is_ref(operand):
            source_shape, dtype = self._snapshot.meta_of(operand)
            if dtype == values.dtype:
                chosen = [at for at, number in enumerate(hits) if number >= 0]
                copied = of_source[is_hit], values[is_hit]
                marked = Marked(
                    operand,
                    tuple(self._at.origins[at] for at in chosen),
                    [unravel(hits[at], tuple(source_shape)) for at in chosen],
                    self._at.values[chosen] if self._at.values is not None else None,
                    copied,
                    self._at.state,
                )
                self._pending.append((marked.relisted(tuple(source_shape)), call.seq))
        rest = [at for at, number in enumerate(hits) if number < 0]
        self._at = self._at._replace(
            origins=tuple(self._at.origins[at] for at in rest),
            positions=[listed[at] for at in rest],
            values=self._at.values[rest] if self._at.values is not None else None,
            bad=(places[~is_hit], values[~is_hit]),
        ).relisted(tuple(shape))
        return int(is_hit.count_nonzero())

    def _is_reached(self, shown: Tensor | None, written: Tensor) -> bool:
        """Return whether a bad element of a written value lies where the write could reach."""
        if shown is None or self._at.bad is None:
            return True
        flat, values = self._at.bad
        return bool((shown[flat] & is_among(values, written)).any())

    def _leave_out(self, shown: Tensor | None, written: Tensor) -> bool:
        """Keep the bad elements that a write did not write; return whether any are left.

        Args:
            shown: where the view lies that it wrote to.  Elements outside are older, whatever
                their values.
        """
        values, places = self._at.values, self._at.positions
        if values is None:
            return False
        shape = self._snapshot.meta_of(self._at.tensor)[0]
        is_hit = [contains(written, value) for value in values]
        bad, self._is_counted = None, False
        if shown is not None and self._at.bad is not None and places is not None:
            flat, its = self._at.bad
            is_left = ~(shown[flat] & is_among(its, written))
            bad = flat[is_left], its[is_left]
            is_hit = [
                is_hit[at] and bool(shown[ravel(place, shape)]) for at, place in enumerate(places)
            ]
        rest = [at for at, hit in enumerate(is_hit) if not hit]
        self._at = self._at._replace(
            origins=tuple(self._at.origins[at] for at in rest),
            positions=None if places is None else [places[at] for at in rest],
            values=values[rest],
            bad=bad,
        )
        if bad is not None:
            self._at = self._at.relisted(tuple(shape))
        return bool(self._at.origins)

    def _passed_on(self, call: Recorded) -> Marked | None:
        """Return the one tensor that a function like ``where`` took the bad values from."""
        numbers, values = call.numbers, self._at.values
        if numbers is None or values is None or call.written:
            return None
        inputs = {id(item): item for item in self._value_inputs(call)}
        if len(inputs) != 1 or set(numbers) & set(values.tolist()):
            return None
        (marked,) = (self._marked_in(call, item) for item in inputs.values())
        if marked.values is None or marked.state not in ("bad", "unknown"):
            return None
        return marked._replace(state=self._at.state)

    def _ends_at(self, call: Recorded) -> bool:
        """Return whether the walk ends, because what a call wrote, or where, is unknown."""
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
        if not is_view or target.tensor is self._at.tensor:
            return False
        # ``x.data`` is all of x, so a write to it is one to x.
        shown = self._snapshot.maker(target.tensor, call.seq)
        is_data = shown is not None and shown.api.stem == "data" and bool(shown.inputs)
        return not (is_data and shown is not None and shown.inputs[0] is self._at.tensor)

    def _contains_some(self, written: Any) -> bool:
        """Return whether the value that a call wrote to some elements contains a followed value."""
        if self._at.values is None or (written.dim() and written.dtype != self._at.values.dtype):
            return self._is_bad(written)
        return any(contains(written, value) for value in self._at.values)

    # --- from one tensor to the next -------------------------------------------------------------

    def _look_through(self, call: Recorded) -> None:
        """Move from a view to its base, at the same point in time."""
        if _returned(call, self._at.tensor):
            self._before = call.seq
            return
        base, meta_of = call.inputs[0], self._snapshot.meta_of
        (shape, dtype), (old, old_dtype) = meta_of(base), meta_of(self._at.tensor)
        positions, values, bad = self._at.positions, self._at.values, self._at.bad
        is_in_order = call.api.stem in _IN_ORDER and dtype == old_dtype
        if not is_in_order or shape is None or old is None or math.prod(shape) != math.prod(old):
            bad = None
        if dtype != old_dtype:  # `view(dtype)` reinterprets the memory
            positions = values = None
        elif is_in_order:
            positions = reshaped(positions, old, shape)
        elif (found := in_memory(positions, self._at.tensor(), base())) is not None:
            positions = found
        elif positions is not None:
            # Rows stay rows if the first size is the same, and no other dimension has that size.
            has_rows = shape and old and shape[0] == old[0] and shape[0] not in shape[1:]
            is_known = has_rows and call.api.stem != "as_strided"
            positions = [item[:1] for item in positions] if is_known else None
        self._at = self._at._replace(tensor=base, positions=positions, values=values, bad=bad)
        is_lost = positions is None and values is not None
        # The search by value may hit equal values in other rows, so only behind a batch, whose row
        # is named already.
        is_behind = self.provenance.batch is not None
        if is_lost and is_behind and self._snapshot.is_untouched(base, call.seq):
            self._at = self._at.found_again()

    def _go_to_base(self, reader: Recorded | None) -> bool:
        """Move to the base of a view that no recorded call has made, such as labels in ``one_hot``.

        Without a base, the values are older than the recording.

        Args:
            reader: the oldest recorded call that read the tensor.
        """
        living = self._at.tensor()
        base = None if living is None else base_of(living)
        if living is not None and base is not None and base.numel() == living.numel():
            positions = in_memory(self._at.positions, living, base)
            self._at = self._at._replace(tensor=ref(base), positions=positions, bad=None)
            return True
        self.provenance.is_open = True
        if living is None and reader is not None and len(reader.inputs) == 1:
            self.provenance.entry = self.provenance.entry or reader.site
        # What an earlier block left is what this one began with.
        since = 1 if self._before is None or self._before > 0 else -math.inf
        if living is not None and self._snapshot.is_untouched(self._at.tensor, since):
            self.provenance.origin = living if self._is_bad(living) else None
        return False

    def _source_of(self, call: Recorded) -> tuple[Marked | None, bool]:
        """Return the input to follow, if it is unique, and whether no input had bad elements."""
        if call.reads is None:
            return None, False
        if call.api.stem in FROM_PYTHON:
            self.provenance.entry = self.provenance.entry or call.site
            return None, True
        target = call.written[0].tensor if call.written else None
        refs = {id(item): item for item in self._value_inputs(call) if item is not target}
        inputs = [self._marked_in(call, item) for item in refs.values()]
        suspects = [item for item in inputs if item.state != "good"]
        if all(item.state != "other" for item in suspects):
            suspects = [item for item in suspects if item.state == "bad"] or suspects
        if target is not None:
            # The old values of a tensor are gone after an in-place call.
            if not inputs and call.api.stem not in _FILLS:
                return self._marked_in(call, self._at.tensor), False
            is_whole = call.api.stem == "copy_"  # all elements are those of the other tensor
            is_unknown = bool(suspects) and suspects[0].state == "unknown" and not is_whole
            if inputs and (len(suspects) != 1 or is_unknown):
                return None, False
        if len(suspects) > 1 and self._are_of_one_line(suspects, call):
            return suspects[0]._replace(positions=None, bad=None), False
        return suspects[0] if len(suspects) == 1 else None, not suspects

    def _dim_of_items(self) -> int | None:
        """Return 0, the dimension of the items, if the tensor is a batch that torch has stacked."""
        batch = self.provenance.batch
        is_batch = batch is not None and any(it is self._at.tensor for it in batch.tensors)
        return 0 if is_batch and batch is not None and batch.is_stacked else None

    def _are_of_one_line(self, inputs: Sequence[Marked], call: Recorded) -> bool:
        """Return whether one line made all inputs, freed by now, from Python numbers."""
        if any(item.state != "unknown" for item in inputs):
            return False
        makers = [self._snapshot.maker(item.tensor, call.seq) for item in inputs]
        if any(it is None or it.api.stem not in FROM_PYTHON for it in makers):
            return False
        return len({self._snapshot.reader.line(it.site) for it in makers if it is not None}) == 1

    # --- inputs ----------------------------------------------------------------------------------

    def _value_inputs(self, call: Recorded) -> list[Ref]:
        """Return the inputs whose values can appear in the result.

        Not indices and masks, which only select; not inputs of another kind of dtype, such as
        scores where the result has integer labels.
        """
        inputs, stem, meta_of = list(call.inputs), call.api.stem, self._snapshot.meta_of
        if stem in _CHOOSES:
            inputs = inputs[:1]
        elif stem in ("where", "embedding"):  # all but the condition, the indices
            del inputs[1 if call.name == "torch.Tensor.where" else 0]
        dtype = meta_of(self._at.tensor)[1]
        if stem in _CONVERTS or dtype is None:
            return inputs
        dtypes = [(item, meta_of(item)[1]) for item in inputs]
        return [item for item, its in dtypes if its is None or _kind(its) == _kind(dtype)]

    def _positions_in(self, call: Recorded, tensor: Ref) -> Sequence[Position] | None:
        """Return the positions in an input of a call that the elements came from, if known."""
        if call.api.stem not in _IN_ORDER and not call.api.is_positional:
            return None
        shape, own = self._snapshot.meta_of(tensor)[0], self._snapshot.meta_of(self._at.tensor)[0]
        if self._at.positions and shape is not None and math.prod(shape) == 1:  # one number for all
            return [(0,) * len(shape)] * len(self._at.positions)
        return reshaped(self._at.positions, own, shape)

    def _marked_in(self, call: Recorded, tensor: Ref) -> Marked:
        """Return the bad elements in an input, as it was before a call, and its state."""
        snapshot, origins = self._snapshot, self._at.origins
        living, dtype = tensor(), snapshot.meta_of(tensor)[1]
        (own_shape, own_dtype), shape = (
            snapshot.meta_of(self._at.tensor),
            snapshot.meta_of(tensor)[0],
        )
        is_same = call.api.stem in _KEEPS and dtype == own_dtype
        positions, values = self._positions_in(call, tensor), self._at.values if is_same else None
        is_in_place = call.api.stem in _IN_ORDER or call.numbers is not None
        is_whole = is_same and is_in_place and shape is not None and own_shape is not None
        bad = self._at.bad if is_whole and math.prod(shape) == math.prod(own_shape) else None
        marked = Marked(tensor, origins, positions, values, bad)
        has_no_bound = self._is_of_integers and dtype is not None and dtype.is_floating_point
        if living is None or has_no_bound or not snapshot.is_untouched(tensor, call.seq):
            return marked
        if not self._is_bad(living):
            return marked._replace(state="good")
        if positions and len(positions[0]) == living.dim():
            own: Any = values_at(living, positions)
            matches = map(self._is_bad, own) if values is None else map(contains, own, values)
            listed = [at for at, is_match in enumerate(matches) if is_match]
            places, state = [positions[at] for at in listed], "bad" if listed else "good"
            kept = tuple(origins[at] for at in listed)
            return Marked(tensor, kept, places, own[listed], marked.bad, state)
        if values is None:
            return marked._replace(state="other")
        held = [contains(living, value) for value in values]
        state = "bad" if all(held) else "other" if any(held) else "good"
        return marked._replace(state=state)

    # --- what is said ----------------------------------------------------------------------------

    def _from_loader(self, batch: Batch) -> ProvenanceStep:
        """Return the step for a batch; note the dataset indices of elements in known rows."""
        self.provenance.batch = batch
        if not batch.is_stacked:
            return ProvenanceStep(note=describe(batch, None, None))
        rows = [item[0] for item in self._at.positions or () if item]
        indices = batch.indices or ()
        self.provenance.samples = {
            origin: indices[row]
            for origin, row in zip(self._at.origins, rows, strict=False)
            if row < len(indices)
        }
        item = indices[rows[0]] if rows and rows[0] < len(indices) else None
        return ProvenanceStep(note=describe(batch, rows[0] if rows else None, item))


def describe_step(
    call: Recorded, snapshot: Snapshot, note: str | None = None, count: int | None = None
) -> ProvenanceStep:
    """Describe a call as one step of a tensor's provenance.

    Args:
        count: how many bad values it made.
    """
    line = snapshot.reader.line(call.site)
    return ProvenanceStep(op=call.name, source=line, note=note, count=count)


def _what_it_writes(operand: Any) -> str | None:
    """Return the note for a write of a single number."""
    if not is_ref(operand):
        return f"{WRITES} {operand}"
    living = operand()
    return f"{WRITES} {living.item()}" if living is not None and living.dim() == 0 else None


def _returned(call: Recorded, tensor: Ref) -> bool:
    """Return whether a call returned one of its inputs unchanged."""
    return not call.written and any(item is tensor for item in call.inputs)


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point or dtype.is_complex, dtype == torch.bool
