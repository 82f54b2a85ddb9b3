"""Which batch, row and dataset item a tensor came from.

Two methods of a ``DataLoader``'s iterator are replaced while a recorder is open: that which asks
the sampler for the indices of a batch, and that which gives the batch out.  Tensors are noted by
weak references; nothing is asked of a sampler or a dataset.
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
    """One batch that a loader gave out."""

    number: int
    """Counted from 1 within the epoch."""
    seq: int
    """The number of the last recorded call when it was given out."""
    tensors: tuple[ref[Tensor], ...]
    keys: tuple[int | str | None, ...]
    """The key or index in the batch that each tensor is under, ``None`` for a batch of its own."""
    ranks: tuple[int, ...]
    """The number of dimensions of each tensor."""
    indices: Sequence[int] | None
    """Which items of the dataset its rows are; ``None`` where the sampler does not say."""
    dataset: ref[Any] | None
    sampler: ref[Any] | None
    iterator: ref[Any]
    is_stacked: bool = False
    """True if row 3 is the fourth item: torch or transformers made the batch of its items."""
    is_collated_here: bool = False
    """True if it was made in this process: the calls that made it are recorded."""
    at: int = 0
    """Which of the tensors was asked about."""


class Batches:
    """The last batches that loaders gave out."""

    def __init__(self) -> None:
        self._batches: deque[Batch] = deque(maxlen=_MAX_BATCHES)
        # Workers are sent the indices long before their batch arrives.
        self._waiting: WeakKeyDictionary[Any, dict[int, list[int]]] = WeakKeyDictionary()

    def note_indices(self, iterator: Any, indices: Any) -> None:
        """Note which items the next batch of a loader's iterator is made of."""
        is_map, in_order = iterator._dataset_kind == 0, getattr(iterator, "_in_order", True)
        if is_map and in_order and isinstance(indices, list):
            number = getattr(iterator, "_send_idx", iterator._num_yielded) + 1
            self._waiting.setdefault(iterator, {})[number] = indices

    def note(self, iterator: Any, data: Any, seq: int) -> None:
        """Note a batch that a loader's iterator is about to give out.

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
        """Return the batches of which a tensor is alive, the oldest first."""
        return [it for it in self._batches if any(item() is not None for item in it.tensors)]

    def follow(self, batches: Iterable[Batch]) -> None:
        """Know the batches of earlier blocks, the oldest first."""
        self._batches.extend(batches)

    def clear(self) -> None:
        """Forget them."""
        self._batches.clear()


_OF_TORCH = (default_collate, default_convert)


def _keeps_rows(collate: Any) -> bool:
    """Return whether a function is known to make one row of each item, in their order.

    One of the user's may sort, drop, transpose or concatenate them.
    """
    if collate in _OF_TORCH:
        return True
    kind = collate if hasattr(collate, "__code__") else type(collate)
    name = getattr(kind, "__name__", "")
    module = getattr(kind, "__module__", "")
    return module == "transformers.data.data_collator" and "Flattening" not in name


def _reference(value: Any) -> ref[Any] | None:
    try:
        return ref(value)
    except TypeError as trouble:  # a list may be a dataset
        raise_if_outside(trouble)
        return None


def _tensors(data: Any) -> list[tuple[int | str | None, Tensor]]:
    """Return the tensors of a batch, each with the key or index that it is under."""
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
    """Say where a batch came from: ``batch 4 of loader, row 17 = dataset[145]``.

    Args:
        row: the row at fault within the batch, where the rows are items.
        item: the item of the dataset, where that is proven.
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
    """Return the dataset of a batch, ``None`` where it is not known, and the user's name of it."""
    # A list has no weak reference; the loop's iterator has a reference.
    dataset = None if batch.dataset is None else batch.dataset()
    if dataset is None:
        dataset = getattr(batch.iterator(), "_dataset", None)
    if dataset is None:
        return None, None
    return dataset, _name_of(lambda value: value is dataset)


def _name_of(is_it: Callable[[Any], bool]) -> str | None:
    """Find a variable of the user's, in the frames of this thread before those of others."""
    stacks = map(stack_of, (*sys._current_frames().values(), sys._getframe(1)))
    for variables in namespaces(list(chain.from_iterable(stacks))):
        for name, value in list(variables.items()):
            if not name.startswith("_") and is_it(value):
                return name
    return None
