"""Which recorded call made which tensor, which wrote to it, and what it took its values from.

A tensor is known by its weak reference, which tells it apart from every other tensor even when
both are dead.  What cannot be proven from references, shapes and the values of living tensors is
left out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from cudalens.core.report_types import ProvenanceStep
from cudalens.recorder.dataloader import Batches
from cudalens.recorder.history import known_metas
from cudalens.recorder.ops import Call, aten, version_and_base
from cudalens.recorder.sites import SiteReader
from cudalens.recorder.tensor_refs import Ref

_TWINS = aten("detach alias")
"""Views of all elements, such as ``t.data``: a write to one is a write to both."""
_SELECTORS = frozenset({"index", "indices", "mask", "condition", "repeats", "offsets", "lengths"})
"""Arguments that choose among values and pass none on."""
FROM_PYTHON = aten("lift_fresh lift_fresh_copy")


class Lineage:
    """The recorded calls, asked after a failure."""

    def __init__(self, calls: Sequence[Call], batches: Batches, reader: SiteReader) -> None:
        self.calls = calls
        self.batches = batches
        self.reader = reader

    # --- who made it -----------------------------------------------------------------------------

    def newest(self, tensor: Ref, before: int | None = None) -> Call | None:
        """Return the last call that made a tensor or may have written to it, or to its base."""
        calls = self._touching(tensor)
        found = [call for call in calls if before is None or call.seq < before]
        return max(found, key=lambda call: call.seq, default=None)

    # --- what became of it -----------------------------------------------------------------------

    def is_untouched(self, tensor: Ref, since: int) -> bool:
        """Return whether no recorded call has written to a tensor since call number ``since``."""
        return not any(call.facts.writes and call.seq >= since for call in self._touching(tensor))

    def base_of(self, tensor: Ref) -> Ref | None:
        """Return what a tensor is a view of, as autograd or the recorded calls tell it."""
        living = tensor()
        base = None if living is None else version_and_base(living)[1]
        return self._bases.get(id(tensor)) if base is None else base

    def same(self, left: Ref, right: Ref) -> bool:
        """Return whether two tensors are one, or show exactly the same elements."""
        return self._twin(left) == self._twin(right)

    def meta_of(self, tensor: Ref) -> tuple[Any, Any]:
        """Return shape and dtype of a tensor, also of a dead one that a recorded call has made."""
        living = tensor()
        if living is not None:
            return living.shape, living.dtype
        return self._metas.get(id(tensor), (None, None))

    @functools.cached_property
    def _metas(self) -> dict[int, tuple[Any, Any]]:
        return known_metas(self.calls)

    def _twin(self, tensor: Ref) -> int:
        """Return one key for a tensor and everything that shows exactly its elements."""
        return self._twins.get(id(tensor), id(tensor))

    @functools.cached_property
    def _twins(self) -> dict[int, int]:
        twins: dict[int, int] = {}
        for call in self.calls:
            if call.facts.name in _TWINS and call.inputs:
                original = id(call.inputs[0])
                for item in call.outputs:
                    twins[id(item)] = twins.get(original, original)
        return twins

    def _touching(self, tensor: Ref) -> Iterator[Call]:
        """Yield the calls that made a tensor or may have written to it, or to its base."""
        base = self.base_of(tensor)
        for item in (tensor,) if base is None else (tensor, base):
            yield from self._touched.get(self._twin(item), ())

    # The calls hold the references, so an id belongs to one of them only.

    @functools.cached_property
    def _touched(self) -> dict[int, list[Call]]:
        """The calls that made each tensor or may have written to it, oldest first."""
        touched: dict[int, list[Call]] = {}
        for call in self.calls:
            if call.facts.name in _TWINS and call.inputs:
                continue  # it shows what was made elsewhere
            for item in self._touched_by(call):
                touched.setdefault(self._twin(item), []).append(call)
        return touched

    def _touched_by(self, call: Call) -> list[Ref]:
        """Return what a call gave back, and what it wrote to or may have, views by their bases."""
        if not call.facts.writes:
            return list(call.outputs)
        several = call.inputs if writes_among(call) else ()
        bases = [call.base, *(self._bases.get(id(item)) for item in call.outputs)]
        # By id: the hash of a weak reference goes with its tensor.
        found = {id(item): item for item in (*call.outputs, *bases, *several) if item is not None}
        return list(found.values())

    @functools.cached_property
    def _bases(self) -> dict[int, Ref]:
        """What each recorded view shows: in inference mode autograd does not tell."""
        bases: dict[int, Ref] = {}
        for call in self.calls:
            if is_alias(call):
                for item in call.outputs:
                    if item is not call.inputs[0]:
                        bases[id(item)] = bases.get(id(call.inputs[0]), call.inputs[0])
        return bases


def is_alias(call: Call) -> bool:
    """Return whether a call only looks at a tensor in another way: a step of its own it is not."""
    return call.facts.is_view and call.facts.name not in FROM_PYTHON and bool(call.inputs)


def writes_among(call: Call) -> bool:
    """Return whether a call wrote to some of the tensors that it was given: fused ops,
    libraries'.
    """
    return bool(call.facts.writes) and isinstance(call.output, tuple)


def describe_step(call: Call, reader: SiteReader, note: str | None = None) -> ProvenanceStep:
    """Describe a call as one step of the way of a tensor."""
    return ProvenanceStep(op=call.facts.full_name, source=reader.line(call.site), note=note)


def value_inputs(call: Call) -> list[Ref] | None:
    """Return the inputs whose values can be values of the result.

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
