"""The way of bad values: from the tensor at fault back along the calls that it came through.

The bad elements themselves are followed, as far as it is known where each of them came from.  A
call is a step only where it is proven to lie on that way.  A write in place that brought only
good values is passed over; where it cannot be told what a write brought, the way ends before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from weakref import ref

from torch import Tensor
from torch.nn import Parameter

from cudalens.core._torch import is_accelerator
from cudalens.core.report_types import FIRST_BAD, WRITES, ProvenanceStep
from cudalens.recorder.calls import Recorded, names
from cudalens.recorder.dataloader import Batch, describe
from cudalens.recorder.elements import LIMIT, Elements, Position, first_bad, places_of, values_at
from cudalens.recorder.inplace_writes import InplaceWrites, IsBad, adds
from cudalens.recorder.lineage import (
    CONVERSIONS,
    FROM_PYTHON,
    Lineage,
    describe_step,
    value_inputs,
    writes_among,
)
from cudalens.recorder.tensor_refs import Ref

ENTERED = "the data came from the CPU here"
_MAX_STEPS = 24
_MAX_CALLS = 1000
_IN_PLACE_OF = (*CONVERSIONS, "clone", "reshape", "flatten")
"""Functions, besides torch's pointwise ones, that take each element from the same position."""
_MOVES = names(
    "__getitem__ index_select gather take masked_select cat concat stack flip roll repeat sort "
    "__setitem__ index_put_ scatter_ index_copy_ masked_scatter_ embedding hstack vstack"
)
"""Functions whose result has elements of their inputs, unchanged, at other positions."""
_IN_ORDER = names(
    "view view_as reshape reshape_as flatten ravel unsqueeze squeeze detach data alias contiguous"
)
"""Views of all elements in the order that they had."""
_OTHER_ELEMENTS = ("view_as_real", "view_as_complex")
"""Views that read the memory in another way."""


@dataclass
class Provenance:
    """What is known of the way of a tensor's bad values."""

    steps: list[ProvenanceStep] = field(default_factory=list)
    samples: dict[Position, int] = field(default_factory=dict)
    """The rows of the data set that bad elements came from."""
    batch: Batch | None = None
    """The batch of a loader that the values came in."""
    is_open: bool = False
    """Whether it ended only because no older call is known."""


def provenance_of(tensor: Tensor, lineage: Lineage, is_bad: IsBad) -> Provenance:
    """Follow a bad tensor back to the op that made it bad, or to where the data entered."""
    walk = _ProvenanceWalk(tensor, lineage, is_bad)
    walk.found.steps += walk.steps()
    return walk.found


@dataclass(frozen=True)
class _Source:
    """What is known of the followed elements in one input of a call."""

    tensor: Ref
    state: str
    """``bad``: some of them were bad there; ``good``: none; ``other``: it holds bad values, perhaps
    others; ``unknown``: it is dead, or was written to since."""
    elements: Elements | None = None


class _ProvenanceWalk:
    """One walk from a bad tensor back along the calls."""

    def __init__(self, tensor: Tensor, lineage: Lineage, is_bad: IsBad) -> None:
        self.found = Provenance()
        self._lineage = lineage
        self._writes = InplaceWrites(lineage, is_bad)
        self._current: Ref = ref(tensor)
        self._before: int | None = None
        """The current tensor is bad right before this call; ``None`` for now."""
        found = first_bad(tensor, self._writes.test)
        self._is_certain = bool(found.places) or self._writes.test(tensor)
        """Whether the current tensor is proven to have been bad then."""
        self._elements = found if self._is_certain else None
        """Those that are followed; ``None`` where it is not known which they are."""

    def steps(self) -> Iterator[ProvenanceStep]:
        count = 0
        for _ in range(_MAX_CALLS):
            call = self._lineage.newest(self._current, self._before)
            batch = self._lineage.batches.find(self._current)
            if batch is not None and (call is None or call.seq <= batch.seq):
                yield self._from_loader(batch)
                return
            self.found.is_open = call is None
            if call is None or count == _MAX_STEPS or writes_among(call):
                return
            if call.is_alias and call.inputs:
                self._look_through(call)
                continue
            if call.written:
                brought = self._writes.brought(call, self._current, self._elements)
                if brought is None:
                    yield from self._number_written(call)
                    return
                if not brought:
                    self._before = call.seq
                    continue
                self._keep_reached(call)
            source, is_first = self._decide(call)
            note = FIRST_BAD if is_first else self._entry_note(call, source)
            yield describe_step(call, self._lineage.reader, note)
            if source is None:
                return
            count += 1
            self._follow(call, source)

    # --- from one tensor to the next -------------------------------------------------------------

    def _look_through(self, call: Recorded) -> None:
        """Go on with what a view shows: the same elements, at the same time."""
        base, elements = call.inputs[0], self._elements
        if base is self._current:
            self._before = call.seq
            is_known = elements is not None and elements.living is not None
            self._elements = elements if is_known else None
            return
        living = base()
        is_other = self._lineage.meta_of(base)[1] != self._lineage.meta_of(call.outputs[0])[1]
        if call.api.stem in _OTHER_ELEMENTS or is_other:
            self._elements = elements = None
        if elements is not None and elements.living is None:
            shape = self._lineage.meta_of(base)[0]
            is_in_order = call.api.stem in _IN_ORDER and shape is not None
            self._elements = elements.reshaped(shape) if is_in_order else None
            if living is not None and self._before is not None:
                self._see_again(living, is_kept=self._lineage.is_untouched(base, self._before))
        elif elements is not None and living is not None:
            self._elements = elements.seen_in(living) or elements
        self._current = base

    def _see_again(self, living: Tensor, *, is_kept: bool) -> None:
        """Look at elements that a dead view has shown in the living tensor that it was one of."""
        if self._elements is None or not is_kept:
            return
        values = values_at(living, self._elements.places)
        found = self._elements.among([self._writes.test(item) for item in values.split(1)])
        if found.places and self._elements.is_exact:
            self._is_certain, self._elements = True, found.at(found.places, living=living)

    def _keep_reached(self, call: Recorded) -> None:
        """Go on with those elements only that a call in place has written."""
        if self._elements is not None:
            reached = self._writes.reached(call, self._current, self._elements)
            self._elements = reached if reached is not None and reached.places else self._elements

    def _follow(self, call: Recorded, source: _Source) -> None:
        """Go on with a tensor that a call read, as it was before the call."""
        self._is_certain = source.state == "bad" or (
            # Dead, but a copy had the same values.
            source.state == "unknown" and self._is_certain and call.api.stem == "clone"
        )
        if source.state != "unknown":
            self._writes.unknown = 0
        self._elements = source.elements
        self._current, self._before = source.tensor, call.seq

    def _decide(self, call: Recorded) -> tuple[_Source | None, bool]:
        """Return the input to follow, if any, and whether this call is where values went bad."""
        if call.reads is None and not call.written:
            return None, False
        values, here = value_inputs(call), self._in_result(call)
        if call.written:
            return self._decide_in_place(call, values, here)
        if not values or call.api.stem in FROM_PYTHON:
            return None, self._is_certain
        sources = self._sources(call, values, here)
        if all(item.state == "good" for item in sources) or self._is_shifted(call, here):
            return None, self._is_certain
        return _only(sources), False

    def _decide_in_place(
        self, call: Recorded, values: list[Ref], here: Elements | None
    ) -> tuple[_Source | None, bool]:
        # The tensor as it was before is gone, so nothing can be said of it.
        if self._is_shifted(call, here):
            return None, self._is_certain
        others = [item for item in values if item is not call.written[0].tensor]
        if others:
            return _only(self._sources(call, others, here), others_end=True), False
        if self._writes.is_filling(call):
            # The numbers that a layer begins with are bad by the bound of another tensor only.
            is_weight = isinstance(call.written[0].tensor(), Parameter)
            return None, not (call.reads is None or is_weight) and self._is_certain
        unseen = None if self._elements is None else self._unseen(self._elements)
        return _Source(self._current, "unknown", unseen), False

    # --- the followed elements in other tensors --------------------------------------------------

    def _unseen(self, elements: Elements) -> Elements | None:
        """Return the elements as those of the current tensor at a time when it was another."""
        living = self._current()
        if elements.living is None or living is None:
            return elements if elements.living is None else None
        found = elements.seen_in(living)
        return None if found is None else found.at(found.places, living=None)

    def _in_result(self, call: Recorded) -> Elements | None:
        """Return the followed elements as positions of a call's result."""
        elements = self._elements
        output = call.written[0].tensor if call.written else call.output
        if elements is None or isinstance(output, tuple):
            return None
        if elements.living is not None and (living := output()) is not None:
            return elements.seen_in(living)
        return elements if self._lineage.same(output, self._current) else None

    def _sources(self, call: Recorded, values: list[Ref], here: Elements | None) -> list[_Source]:
        distinct = {id(item): item for item in values}
        return [self._source(call, item, here) for item in distinct.values()]

    def _source(self, call: Recorded, tensor: Ref, here: Elements | None) -> _Source:
        """Find out what the followed elements were in an input of a call."""
        living = tensor()
        is_known = living is not None and self._lineage.is_untouched(tensor, call.seq)
        if living is None or not is_known or living.device.type == "meta":
            return _Source(tensor, "unknown", self._mapped(call, tensor, here))
        if not self._writes.test(living):
            return _Source(tensor, "good")
        mapped = self._mapped(call, tensor, here)
        if mapped is not None:
            return self._judged(call, tensor, living, here, mapped)
        values = here.values() if here is not None and _is_move(call) else None
        if here is None or values is None or values.dtype != living.dtype:
            return _Source(tensor, "other")
        return self._found(tensor, living, here, values)

    def _mapped(self, call: Recorded, tensor: Ref, here: Elements | None) -> Elements | None:
        """Return the positions that elements had in an input of a pointwise call."""
        shape = self._lineage.meta_of(tensor)[0]
        if here is None or shape is None or not _is_positional(call):
            return None
        return here.spread_from(shape)

    def _judged(
        self,
        call: Recorded,
        tensor: Ref,
        living: Tensor,
        here: Elements | None,
        mapped: Elements,
    ) -> _Source:
        """Tell which of the elements were bad at their positions in a living input."""
        values = values_at(living, mapped.places)
        bad = [self._writes.test(item) for item in values.split(1)]
        result = None if here is None else here.values()
        if call.api.stem == "where" and result is not None:
            # Only one of its inputs was chosen.
            bad = [
                is_bad and bool(same) for is_bad, same in zip(bad, result == values, strict=True)
            ]
        if not any(bad):
            return _Source(tensor, "good")
        if not mapped.is_exact and not all(bad):
            return _Source(tensor, "other")
        kept = mapped.among(bad)
        return _Source(tensor, "bad", kept.at(kept.places, living=living))

    def _found(self, tensor: Ref, living: Tensor, here: Elements, values: Tensor) -> _Source:
        """Find elements by their values in an input that a call took them from unchanged."""
        known: dict[float, list[Position] | None] = {}
        for value in values:
            if float(value) not in known:
                known[float(value)] = places_of(living, value)
        places = [known[float(value)] for value in values]
        if all(item == [] for item in places):
            return _Source(tensor, "good")
        if not all(places) or not here.is_exact:
            # Some came from here, some not, or from more places than can be followed.
            return _Source(tensor, "other" if [] in places or not here.is_exact else "bad")
        shape = tuple(living.shape)
        if all(item is not None and len(item) == 1 for item in places):
            exact = here.at([item[0] for item in places if item], living=living, shape=shape)
            return _Source(tensor, "bad", exact)
        candidates = {place for item in known.values() for place in item or ()}
        if len(candidates) > LIMIT:
            return _Source(tensor, "bad")
        found = tuple(sorted(candidates))
        return _Source(tensor, "bad", Elements(found, (), living, shape, is_exact=False))

    def _is_shifted(self, call: Recorded, here: Elements | None) -> bool:
        """Return whether a call moved good values by a whole number: they are computed back."""
        if not call.api.shift or call.given is None or here is None:
            return False
        values = here.values()
        if values is None or values.dtype.is_floating_point or values.dtype.is_complex:
            return False
        return not any(map(self._writes.test, (values - call.given[0]).split(1)))

    # --- what is said ----------------------------------------------------------------------------

    def _number_written(self, call: Recorded) -> Iterator[ProvenanceStep]:
        """Name a call that wrote a bad number, though not whether to any element."""
        number = self._writes.bad_number(call, self._elements)
        if number is not None:
            yield describe_step(call, self._lineage.reader, f"{WRITES} {number}")

    def _entry_note(self, call: Recorded, following: _Source | None) -> str | None:
        if call.api.stem not in CONVERSIONS or following is None or isinstance(call.output, tuple):
            return None
        source, result = following.tensor(), call.output()
        if source is None or result is None:
            return None
        crosses = source.device.type == "cpu" and is_accelerator(result.device)
        return ENTERED if crosses else None

    def _from_loader(self, batch: Batch) -> ProvenanceStep:
        """Name the batch, and the data set's row of each element whose row is known."""
        self.found.batch = batch
        living, elements = self._current(), self._elements
        if elements is not None and elements.living is not None:
            elements = None if living is None else elements.seen_in(living)
        if elements is None or not elements.is_exact or not all(elements.places):
            return ProvenanceStep(note=describe(batch, None))
        indices = batch.indices or ()
        self.found.samples = {
            origin: indices[place[0]]
            for origin, place in zip(elements.origins, elements.places, strict=True)
            if place[0] < len(indices)
        }
        return ProvenanceStep(note=describe(batch, elements.places[0][0]))


def _is_positional(call: Recorded) -> bool:
    """Return whether each element of the result comes from its own position in the inputs."""
    return call.api.stem in _IN_PLACE_OF or call.api.is_positional


def _is_move(call: Recorded) -> bool:
    return call.api.stem in _MOVES and not adds(call)


def _only(sources: list[_Source], *, others_end: bool = False) -> _Source | None:
    """Return the one input that the elements came from, where that is certain."""
    if len(sources) == 1:
        is_over = others_end and sources[0].state in ("good", "unknown")
        return None if is_over or sources[0].state == "good" else sources[0]
    bad = [item for item in sources if item.state == "bad"]
    rest = [item for item in sources if item.state == "other"]
    if len(bad) == 1 and not rest:
        return bad[0]
    is_settled = not bad and all(item.state in ("good", "other") for item in sources)
    return rest[0] if is_settled and len(rest) == 1 else None
