"""Which batch, row and dataset item a tensor came from.

Two methods of a ``DataLoader``'s iterator are replaced while a recorder is open: the one that takes
the indices of a batch from the sampler, and the one that returns the batch.  Tensors are held by
weak reference.  The sampler and the dataset are never called: that could change what they return.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor
from torch.utils.data import DataLoader, default_collate, default_convert

from cudalens.core._python import raise_if_outside
from cudalens.source.stack import namespaces, stack_of

_MAX_BATCHES = 64
_MAX_DEPTH = 4
_MAX_TENSORS = 64


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch that a loader returned."""

    number: int
    """Counted from 1 within the epoch."""
    seq: int
    """The number of the last call recorded before it was returned."""
    tensors: tuple[ref[Tensor], ...]
    keys: tuple[int | str | None, ...]
    """The key or index of each tensor in the batch, ``None`` where the tensor is the batch."""
    ranks: tuple[int, ...]
    """The number of dimensions of each tensor."""
    indices: Sequence[int] | None
    """The dataset indices of its rows, ``None`` if the sampler returned none."""
    dataset: ref[Any] | None
    sampler: ref[Any] | None
    iterator: ref[Any]
    is_stacked: bool = False
    """True if row 3 is the fourth item: torch or transformers collated the items in order."""
    is_collated_here: bool = False
    """True if it was collated in this process, so that the calls are recorded."""
    at: int = 0
    """The position in ``tensors`` of the one that was looked up."""


class Batches:
    """The last batches that loaders returned."""

    def __init__(self) -> None:
        self._batches: deque[Batch] = deque(maxlen=_MAX_BATCHES)
        # Workers prefetch: indices are sent long before their batch arrives.
        self._waiting: WeakKeyDictionary[Any, dict[int, list[int]]] = WeakKeyDictionary()

    def note_indices(self, iterator: Any, indices: Any) -> None:
        """Record the dataset indices of the next batch of a loader's iterator."""
        # 0 is a map-style dataset: an iterable one has no indices. Out of order, a batch arrives
        # under another number than it was sent under.
        is_map, in_order = iterator._dataset_kind == 0, getattr(iterator, "_in_order", True)
        if is_map and in_order and isinstance(indices, list):
            # A loader with workers counts the batches that it sends, one without the batches that
            # it returned. Both count this one later.
            number = getattr(iterator, "_send_idx", iterator._num_yielded) + 1
            self._waiting.setdefault(iterator, {})[number] = indices

    def note(self, iterator: Any, data: Any, seq: int) -> None:
        """Record a batch that a loader's iterator is about to return.

        Args:
            seq: the number of the last recorded call.
        """
        tensors, number = _tensors(data), iterator._num_yielded
        self._batches.append(
            Batch(
                number=number,
                seq=seq,
                tensors=tuple(ref(tensor) for _, tensor in tensors),
                keys=tuple(key for key, _ in tensors),
                ranks=tuple(tensor.dim() for _, tensor in tensors),
                indices=self._waiting.get(iterator, {}).pop(number, None),
                dataset=_reference(iterator._dataset),
                sampler=_reference(iterator._index_sampler),
                iterator=ref(iterator),
                is_stacked=_keeps_rows(iterator._collate_fn),
                is_collated_here=getattr(iterator, "_num_workers", 0) == 0,
            )
        )

    def find(self, tensor: ref[Tensor]) -> Batch | None:
        """Return the batch that contained the tensor."""
        for batch in reversed(self._batches):
            for at, item in enumerate(batch.tensors):
                if item is tensor:
                    return replace(batch, at=at)
        return None

    def living(self) -> list[Batch]:
        """Return the batches with a living tensor, oldest first."""
        return [it for it in self._batches if any(item() is not None for item in it.tensors)]

    def follow(self, batches: Iterable[Batch]) -> None:
        """Take over the batches of earlier blocks, oldest first."""
        self._batches.extend(batches)

    def clear(self) -> None:
        """Drop all batches."""
        self._batches.clear()


_OF_TORCH = (default_collate, default_convert)


def _keeps_rows(collate: Any) -> bool:
    """Return whether a collate function is known to stack one row for each item, in order.

    A function of the user's may sort, drop, transpose or concatenate the items.
    """
    if collate in _OF_TORCH:
        return True
    # A function has a name and a module of its own, an object has those of its class.
    kind = collate if hasattr(collate, "__code__") else type(collate)
    name = getattr(kind, "__name__", "")
    module = getattr(kind, "__module__", "")
    return module == "transformers.data.data_collator" and "Flattening" not in name


def _reference(value: Any) -> ref[Any] | None:
    try:
        return ref(value)
    except TypeError as trouble:  # a dataset may be a list, which has no weak references
        raise_if_outside(trouble)
        return None


def _tensors(data: Any) -> list[tuple[int | str | None, Tensor]]:
    """Return the tensors of a batch, each with its top-level key or index."""
    tensors: list[tuple[int | str | None, Tensor]] = []
    waiting: list[tuple[Any, Any, int]] = [(None, data, 0)]
    while waiting and len(tensors) < _MAX_TENSORS:
        key, item, depth = waiting.pop()
        if isinstance(item, Tensor):
            tensors.append((key, item))
        elif depth < _MAX_DEPTH:
            if type(getattr(item, "data", None)) is dict:  # transformers' BatchEncoding
                item = item.data
            items: Iterable[tuple[Any, Any]] = ()
            if isinstance(item, dict):
                items = item.items()
            elif isinstance(item, (list, tuple)):
                items = enumerate(item[:_MAX_TENSORS])
            waiting += [(name if depth == 0 else key, value, depth + 1) for name, value in items]
    return tensors


# --- reading, after a failure --------------------------------------------------------------------


def describe(batch: Batch, row: int | None, item: int | None) -> str:
    """Return the origin of a batch in words: ``batch 4 of loader, row 17 = dataset[145]``.

    Args:
        row: the row at fault in the batch, if the rows are items.
        item: the index of the dataset item, if proven.
    """

    def is_loader(value: Any) -> bool:
        return (
            isinstance(value, DataLoader)
            and batch.sampler is not None
            and value._index_sampler is batch.sampler()
            and (batch.dataset is None or value.dataset is batch.dataset())
        )

    text = f"batch {batch.number} of {_name_of(is_loader) or 'a DataLoader'}"
    if row is not None:
        text += f", row {row}"
    if item is None:
        return text
    _, named = dataset_of(batch)
    if not named:
        return f"{text} (dataset item {item})"
    return f"{text} = {named}[{item}]" if row is not None else f"{text}, {named}[{item}]"


def dataset_of(batch: Batch) -> tuple[object, str | None]:
    """Return the dataset of a batch and the user's name for it, ``None`` for what is unknown."""
    # A dataset without weak references is still held by the iterator, while its loop runs.
    dataset = None if batch.dataset is None else batch.dataset()
    if dataset is None:
        dataset = getattr(batch.iterator(), "_dataset", None)
    if dataset is None:
        return None, None
    return dataset, _name_of(lambda value: value is dataset)


def _name_of(is_it: Callable[[Any], bool]) -> str | None:
    """Return the name of a matching variable, from this thread's frames before other threads'."""
    stacks = map(stack_of, (*sys._current_frames().values(), sys._getframe(1)))
    for variables in namespaces(list(chain.from_iterable(stacks))):
        # A copy, because the owner of the frame may be running on another thread.
        for name, value in list(variables.items()):
            if not name.startswith("_") and is_it(value):
                return name
    return None
