"""Which recorded call made which tensor: the way of bad values, and who wrote over a tensor.

A tensor is known by its weak reference, which tells it apart from every other tensor even when
both are dead.  What cannot be proven from references, shapes and the values of living tensors is
left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from weakref import ref

from torch import Tensor

from cudalens._torch import is_accelerator
from cudalens.facts import FIRST_BAD, ProvenanceStep
from cudalens.recorder.dataloader import Batch, Batches, describe
from cudalens.recorder.ops import Call, Ref, Shifted, version_and_base
from cudalens.recorder.sites import SiteReader

IsBad = Callable[[Tensor], bool]
ENTERED = "the data came from the CPU here"
_MAX_STEPS = 24
_COPIES = frozenset(
    {"aten::_to_copy", "aten::clone", "aten::lift_fresh", "aten::detach", "aten::contiguous"}
)
_TWINS = frozenset({"aten::detach", "aten::alias"})
"""Views of all elements, such as ``t.data``: a write to one is a write to both."""
_SELECTORS = frozenset({"index", "indices", "mask", "condition", "repeats", "offsets", "lengths"})
"""Arguments that choose among values and pass none on."""
FROM_PYTHON = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy"})


class Lineage:
    """The recorded calls, asked after a failure."""

    def __init__(self, calls: Sequence[Call], batches: Batches, reader: SiteReader) -> None:
        self._calls = calls
        self._batches = batches
        self.reader = reader

    # --- who made it -----------------------------------------------------------------------------

    def producer(self, tensor: Ref, before: int | None = None) -> Call | None:
        """Give the last call, before number ``before``, that made or overwrote a tensor."""
        made = self._made.get(self._twin(tensor), ())
        return next((call for call in reversed(made) if before is None or call.seq < before), None)

    def source_of(self, tensor: Tensor) -> Call | None:
        """Give the last call that made a tensor, or what it is a view of."""
        call = self.producer(ref(tensor))
        if call is None:
            _, base = version_and_base(tensor)
            call = None if base is None else self.producer(base)
        return call

    # --- the way of bad values -------------------------------------------------------------------

    def provenance(self, tensor: Tensor, is_bad: IsBad) -> tuple[ProvenanceStep, ...]:
        """Follow a bad tensor back to the op that made it bad, or to where the data entered."""
        return tuple(_Walk(self, self._batches, is_bad).steps(tensor))

    def is_untouched(self, tensor: Ref, since: int) -> bool:
        """Tell whether no recorded call has written to a tensor since call number ``since``."""
        return self._written.get(self._twin(tensor), -1) < since

    def _twin(self, tensor: Ref) -> int:
        """Give one key for a tensor and everything that shows exactly its elements."""
        return self._twins.get(id(tensor), id(tensor))

    @functools.cached_property
    def _twins(self) -> dict[int, int]:
        twins: dict[int, int] = {}
        for call in self._calls:
            if call.facts.name in _TWINS and call.inputs:
                original = id(call.inputs[0])
                for item in call.outputs:
                    twins[id(item)] = twins.get(original, original)
        return twins

    # The calls hold the references, so an id belongs to one of them only.

    @functools.cached_property
    def _made(self) -> dict[int, list[Call]]:
        """The calls that made or overwrote each tensor, oldest first."""
        made: dict[int, list[Call]] = {}
        for call in self._calls:
            if call.facts.name in _TWINS and call.inputs:
                continue  # it shows what was made elsewhere
            for item in call.outputs if call.base is None else (*call.outputs, call.base):
                made.setdefault(self._twin(item), []).append(call)
        return made

    @functools.cached_property
    def _written(self) -> dict[int, int]:
        """The number of the last call that wrote to each tensor, or may have."""
        written: dict[int, int] = {}
        for call in self._calls:
            if call.facts.writes:
                # Fused ops write to some of the many tensors that they are given.
                several = call.inputs if isinstance(call.output, tuple) else ()
                base = () if call.base is None else (call.base,)
                for item in (*call.outputs, *base, *several):
                    written[self._twin(item)] = call.seq
        return written

    def step(self, call: Call, note: str | None = None) -> ProvenanceStep:
        """Describe a call as one step."""
        return describe_step(call, self.reader, note)


def describe_step(call: Call, reader: SiteReader, note: str | None = None) -> ProvenanceStep:
    """Describe a call as one step of the way of a tensor."""
    return ProvenanceStep(op=call.facts.full_name, source=reader.line(call.site), note=note)


class _Walk:
    """One walk from a bad tensor back along the calls."""

    def __init__(self, lineage: Lineage, batches: Batches, is_bad: IsBad) -> None:
        self._lineage = lineage
        self._batches = batches
        self._is_bad = is_bad

    def steps(self, tensor: Tensor) -> Iterator[ProvenanceStep]:
        current: Ref = ref(tensor)
        rows: Tensor | None = tensor
        """The last living tensor whose rows are the current tensor's rows."""
        is_certain, before = True, None
        for _ in range(_MAX_STEPS):
            batch = self._batches.find(current)
            if batch is not None:
                yield self._from_loader(batch, current() if current() is not None else rows)
                return
            call = self._producer(current, before)
            if call is None:
                return
            following, claim = self._decide(call, is_certain)
            if not _is_silent(call):
                note = FIRST_BAD if claim else self._entry_note(call, following)
                yield self._lineage.step(call, note)
            if following is None:
                return
            living = following()
            is_certain = self._is_still_certain(call, living, is_certain)
            if living is not None:
                rows = living if self._test(living) else None
            elif not _keeps_rows(call):
                rows = None
            current, before = following, call.seq

    def _producer(self, current: Ref, before: int | None) -> Call | None:
        call = self._lineage.producer(current, before)
        living = current()
        if call is None and living is not None:
            _, base = version_and_base(living)
            call = None if base is None else self._lineage.producer(base, before)
        return call

    def _decide(self, call: Call, is_certain: bool) -> tuple[Ref | None, bool]:
        """Give the input to follow, if any, and whether this call is where values went bad."""
        values = value_inputs(call)
        if values is None or (call.is_brief and not call.facts.is_in_place):
            return None, False
        if call.facts.is_in_place:
            # The tensor as it was before is gone, so nothing can be said of it.
            others = [item for item in values if item is not call.output]
            before = self._before_shift(call)
            if before is not None and not self._test(before):
                return None, is_certain
            bad = next((item for item in others if self._carries(item, call.seq)), None)
            return (bad if bad is not None or others else call.output), False
        if not values or call.facts.name in FROM_PYTHON:
            return None, is_certain
        for item in values:
            if self._carries(item, call.seq):
                return item, False
        if all(
            item() is not None and self._lineage.is_untouched(item, call.seq) for item in values
        ):
            return None, is_certain
        before = self._before_shift(call)
        if before is not None and not self._test(before):
            return None, is_certain
        return (values[0] if len(values) == 1 else None), False

    def _before_shift(self, call: Call) -> Tensor | None:
        """Give what a call moved by a whole number, computed back from its living result."""
        result, reads = call.output, call.reads
        if not isinstance(reads, Shifted) or isinstance(result, tuple):
            return None
        living = result()
        if living is None or living.dtype.is_floating_point or living.dtype.is_complex:
            return None
        return living - reads.by if self._lineage.is_untouched(result, call.seq + 1) else None

    def _carries(self, tensor: Ref, since: int) -> bool:
        living = tensor()
        return (
            living is not None and self._lineage.is_untouched(tensor, since) and self._test(living)
        )

    def _test(self, tensor: Tensor) -> bool:
        return tensor.device.type != "meta" and tensor.numel() > 0 and self._is_bad(tensor)

    def _is_still_certain(self, call: Call, living: Tensor | None, is_certain: bool) -> bool:
        if living is not None:
            return self._test(living)
        # A view shows some of its base's values; a copy has the same ones.
        return is_certain and (call.facts.is_view or call.facts.name == "aten::clone")

    def _entry_note(self, call: Call, following: Ref | None) -> str | None:
        if call.facts.name != "aten::_to_copy" or following is None:
            return None
        source, result = following(), call.output()
        if source is None or result is None:
            return None
        crosses = source.device.type == "cpu" and is_accelerator(result.device)
        return ENTERED if crosses else None

    def _from_loader(self, batch: Batch, rows: Tensor | None) -> ProvenanceStep:
        row = None if rows is None or rows.dim() == 0 else self._first_bad_row(rows)
        return ProvenanceStep(note=describe(batch, row))

    def _first_bad_row(self, tensor: Tensor) -> int | None:
        """Find the first bad row by halving: the number of tests grows with the logarithm."""
        if not self._test(tensor):
            return None
        low, high = 0, tensor.shape[0] - 1
        while low < high:
            middle = (low + high) // 2
            if self._test(tensor[low : middle + 1]):
                high = middle
            else:
                low = middle + 1
        return low


def value_inputs(call: Call) -> list[Ref] | None:
    """Give the inputs whose values can be values of the result.

    Indices and masks only choose, and scores are no labels: an input of floats is left out where
    the result has integers.  ``None`` when it is unknown which input is which argument.
    """
    inputs = _without_selectors(call)
    if inputs is None or call.facts.name == "aten::_to_copy" or isinstance(call.output, tuple):
        return inputs
    result = call.output()
    return [
        item
        for item in inputs
        if result is None
        or (source := item()) is None
        or source.dtype.is_floating_point == result.dtype.is_floating_point
    ]


def _without_selectors(call: Call) -> list[Ref] | None:
    arguments = call.facts.tensor_arguments
    inputs = list(call.inputs)
    if not any(name in _SELECTORS for name, _ in arguments):
        return inputs
    spare = len(inputs) - sum(kind == "Tensor" for _, kind in arguments)
    flexible = [kind for _, kind in arguments if kind != "Tensor"]
    if spare < 0 or (spare > 0 and len(flexible) != 1):
        return None
    names: list[str] = []
    for name, kind in arguments:
        names += [name] * (1 if kind == "Tensor" else spare)
    return [item for name, item in zip(names, inputs, strict=True) if name not in _SELECTORS]


def _is_silent(call: Call) -> bool:
    """Whether a call only looks at a tensor in another way and is no step of its own."""
    return call.facts.is_view and call.facts.name not in FROM_PYTHON


def _keeps_rows(call: Call) -> bool:
    return call.facts.name in _COPIES
