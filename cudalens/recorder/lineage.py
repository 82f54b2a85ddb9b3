"""Which recorded call made which tensor, which wrote to it, and what it took its values from.

A tensor is known by its weak reference, which tells it apart from every other tensor even when
both are dead.  What cannot be proven from references, shapes and the values of living tensors is
left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from cudalens.core.report_types import ProvenanceStep
from cudalens.recorder.calls import Known, Recorded, names
from cudalens.recorder.dataloader import Batches
from cudalens.recorder.sites import SiteReader
from cudalens.recorder.tensor_refs import Ref, is_ref

_TWINS = ("data", "detach", "alias")
"""Views of all elements: a write to one is a write to both."""
_FIRST = names(
    "__getitem__ index_select gather take take_along_dim masked_select repeat_interleave"
)
"""Functions whose other tensors choose among the values of the first."""
FROM_PYTHON = ("tensor", "as_tensor", "asarray", "from_numpy", "scalar_tensor")
CONVERSIONS: tuple[str, ...] = (
    "to",
    "cuda",
    "cpu",
    "float",
    "double",
    "half",
    "bfloat16",
    "long",
    "int",
    "type",
)
CONVERSIONS += ("bool", "short", "char", "byte", "type_as", "contiguous", "copy_")


class Lineage:
    """The recorded calls, asked after a failure."""

    def __init__(
        self, calls: Sequence[Recorded], batches: Batches, reader: SiteReader, known: Known
    ) -> None:
        self.calls = calls
        self.batches = batches
        self.reader = reader
        self.meta_of = known.meta_of

    # --- who made it -----------------------------------------------------------------------------

    def maker(self, tensor: Ref) -> Recorded | None:
        """Return the call that made a tensor."""
        made = (call for call in self.calls if not call.written and not call.is_alias)
        return next((call for call in made if any(it is tensor for it in call.outputs)), None)

    def newest(self, tensor: Ref, before: int | None = None) -> Recorded | None:
        """Return the last call that made a tensor or may have written to it, or to its base."""
        calls = self._touching(tensor)
        found = [call for call in calls if before is None or call.seq < before]
        return max(found, key=lambda call: call.seq, default=None)

    # --- what became of it -----------------------------------------------------------------------

    def is_untouched(self, tensor: Ref, since: int) -> bool:
        """Return whether no recorded call has written to a tensor since call number ``since``."""
        return not any(call.written and call.seq >= since for call in self._touching(tensor))

    def base_of(self, tensor: Ref) -> Ref | None:
        """Return what a tensor is a view of, by the recorded calls."""
        return self._bases.get(id(tensor))

    def whole(self, tensor: Ref) -> Ref:
        """Return what a tensor shows, or itself."""
        return self._bases.get(id(tensor), tensor)

    def views_of(self, tensor: Ref) -> list[Ref]:
        """Return the recorded views of a tensor."""
        aliases = (item for call in self.calls if call.is_alias for item in call.outputs)
        return [item for item in aliases if self.whole(item) is tensor]

    def same(self, left: Ref, right: Ref) -> bool:
        """Return whether two tensors are one, or show exactly the same elements."""
        return self._twin(left) == self._twin(right)

    def _twin(self, tensor: Ref) -> int:
        """Return one key for a tensor and everything that shows exactly its elements."""
        return self._twins.get(id(tensor), id(tensor))

    @cached_property
    def _twins(self) -> dict[int, int]:
        twins: dict[int, int] = {}
        for call in self.calls:
            if call.api.stem in _TWINS and call.inputs:
                original = id(call.inputs[0])
                for item in call.outputs:
                    twins[id(item)] = twins.get(original, original)
        return twins

    def _touching(self, tensor: Ref) -> Iterator[Recorded]:
        """Yield the calls that made a tensor or may have written to it, or to its base."""
        base = self.base_of(tensor)
        for item in (tensor,) if base is None else (tensor, base):
            yield from self._touched.get(self._twin(item), ())

    # The calls hold the references, so an id belongs to one of them only.

    @cached_property
    def _touched(self) -> dict[int, list[Recorded]]:
        """The calls that made each tensor or may have written to it, oldest first."""
        touched: dict[int, list[Recorded]] = {}
        for call in self.calls:
            if call.api.stem in _TWINS and call.inputs:
                continue  # it shows what was made elsewhere
            found = {id(item): item for item in self._touched_by(call)}
            for item in found.values():
                touched.setdefault(self._twin(item), []).append(call)
        return touched

    def _touched_by(self, call: Recorded) -> Iterator[Ref]:
        """Yield what a call gave back, and what it wrote to, views by their bases."""
        yield from call.outputs
        for item in call.written:
            yield from (item.tensor, item.target, self.whole(item.tensor))

    @cached_property
    def _bases(self) -> dict[int, Ref]:
        """What each recorded view shows: in inference mode autograd does not tell."""
        bases: dict[int, Ref] = {}
        for call in self.calls:
            if call.is_alias and call.inputs:
                for item in call.outputs:
                    if item is not call.inputs[0]:
                        bases[id(item)] = bases.get(id(call.inputs[0]), call.inputs[0])
        return bases


def writes_among(call: Recorded) -> bool:
    """Return whether a call wrote to several tensors, or to one of which it is not known how."""
    first = call.inputs[0] if call.inputs else None
    return bool(call.written) and not (
        call.api.is_in_place and len(call.written) == 1 and call.written[0].tensor is first
    )


def describe_step(call: Recorded, reader: SiteReader, note: str | None = None) -> ProvenanceStep:
    """Describe a call as one step of the way of a tensor."""
    return ProvenanceStep(op=call.name, source=reader.line(call.site), note=note)


def value_inputs(call: Recorded) -> list[Ref]:
    """Return the inputs whose values can be values of the result.

    Indices and masks only choose, and scores are no labels: an input of floats is left out where
    the result has integers.
    """
    inputs, stem = list(call.inputs), call.api.stem
    if call.api.keeps:
        inputs = inputs[:1] + [item for item in written_values(call) if is_ref(item)]
    elif stem in _FIRST:
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


def written_values(call: Recorded) -> tuple[Any, ...]:
    """Return what a call wrote to some elements: a reference or a number, none if not known."""
    place = call.api.value_at
    return call.given[place : place + 1] if call.given is not None else ()
