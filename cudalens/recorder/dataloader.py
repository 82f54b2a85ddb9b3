"""Which batch, row and dataset item a tensor came from.

Every ``next()`` of a ``DataLoader`` iterator is a range of torch's profiler, which the recorder
sees like an op.  When it ends, the batch is noted by weak references.  Everything else is worked
out after a failure, and without moving a sampler or reading the dataset.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, GeneratorType
from typing import Any
from weakref import ref

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from cudalens.files import is_user_file, torch_path

LOADER_RANGE = "enumerate(DataLoader)#"
"""How the name of the profiler range around a loader's ``next()`` begins."""
_MAX_BATCHES = 64
_MAX_DEPTH = 4
_MAX_TENSORS = 64
_RANGE_FILES = frozenset({"_ops.py", "autograd/profiler.py"})


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch that a loader gave out."""

    number: int
    """Counted from 1 within the epoch."""
    iterator: ref[Any]
    tensors: tuple[ref[Tensor], ...]
    sampler: ref[Any] | None


class Batches:
    """The last batches that loaders gave out."""

    def __init__(self) -> None:
        self._batches: deque[Batch] = deque(maxlen=_MAX_BATCHES)

    def note(self, frame: FrameType | None) -> None:
        """Look whether the range that ends in ``frame`` was a loader's ``next()``."""
        while frame is not None and torch_path(frame.f_code.co_filename) in _RANGE_FILES:
            frame = frame.f_back
        if frame is None or frame.f_code.co_name != "__next__":
            return
        if torch_path(frame.f_code.co_filename) != "utils/data/dataloader.py":
            return
        # This frame returns at once, so reading its variables prolongs no life.
        iterator, data = frame.f_locals.get("self"), frame.f_locals.get("data")
        number = getattr(iterator, "_num_yielded", None)
        if data is None or not isinstance(number, int):
            return
        sampler = getattr(iterator, "_sampler_iter", None)
        self._batches.append(
            Batch(
                number=number,
                iterator=ref(iterator),
                tensors=tuple(map(ref, _tensors(data))),
                sampler=ref(sampler) if isinstance(sampler, GeneratorType) else None,
            )
        )

    def find(self, tensor: ref[Tensor]) -> Batch | None:
        """Give the batch that held the tensor."""
        for batch in reversed(self._batches):
            if any(item is tensor for item in batch.tensors):
                return batch
        return None

    def is_newest(self, batch: Batch) -> bool:
        """Tell whether the iterator of a batch has given out nothing since."""
        return not any(
            item.iterator is batch.iterator and item.number > batch.number for item in self._batches
        )


def _tensors(data: Any) -> list[Tensor]:
    found: list[Tensor] = []
    waiting = [(data, 0)]
    while waiting and len(found) < _MAX_TENSORS:
        item, depth = waiting.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif depth < _MAX_DEPTH:
            if isinstance(item, dict):
                waiting += [(value, depth + 1) for value in item.values()]
            elif isinstance(item, (list, tuple)):
                waiting += [(value, depth + 1) for value in item[:_MAX_TENSORS]]
            elif type(getattr(item, "data", None)) is dict:  # transformers' BatchEncoding
                waiting.append((item.data, depth + 1))
    return found


# --- reading, after a failure --------------------------------------------------------------------


def describe(batch: Batch, row: int | None, *, is_newest: bool, stacks: Any = None) -> str:
    """Say where a batch came from: ``batch 4 of loader, row 17 = dataset[145]``.

    Args:
        row: the row at fault within the batch, when it is known.
        is_newest: whether the loader has given out nothing since.
        stacks: frames whose variables name the loader; those of all running threads by default.
    """
    iterator = batch.iterator()
    frames = list(_user_frames() if stacks is None else stacks)
    loader = None if iterator is None else _loader_of(iterator, frames)
    name = "a DataLoader" if loader is None else (_name_of(loader, frames) or "a DataLoader")
    text = f"batch {batch.number} of {name}"
    if row is None:
        return text
    text += f", row {row}"
    index = None if iterator is None else dataset_index(iterator, batch, row, is_newest=is_newest)
    if index is None:
        return text
    dataset = getattr(iterator, "_dataset", None)
    named = _name_of(dataset, frames) if dataset is not None else None
    return f"{text} = {named}[{index}]" if named else f"{text} = item {index} of its dataset"


def dataset_index(iterator: Any, batch: Batch, row: int, *, is_newest: bool) -> int | None:
    """Tell which item of the dataset a row is, ``None`` where the sampler does not let it be known.

    No sampler is advanced: positions are computed, or read from where the sampler stands.
    """
    batches = getattr(iterator, "_index_sampler", None)
    if type(batches) is not BatchSampler or getattr(iterator, "_dataset_kind", 0) != 0:
        return None
    if not getattr(iterator, "_in_order", True):
        return None
    position = (batch.number - 1) * batches.batch_size + row
    if type(batches.sampler) is SequentialSampler:
        return position if position < len(batches.sampler) else None
    generator = batch.sampler() if batch.sampler is not None else None
    if not isinstance(generator, GeneratorType) or generator.gi_frame is None:
        return None
    variables = generator.gi_frame.f_locals
    if type(batches.sampler) is RandomSampler and not batches.sampler.replacement:
        order = _order_of(variables.get("sampler_iter"))
        if order is not None and len(order) == len(batches.sampler):
            return order[position] if position < len(order) else None
    held = variables.get("batch")
    is_ahead = getattr(iterator, "_num_workers", 0) > 0
    if is_newest and not is_ahead and isinstance(held, list) and row < len(held):
        return held[row] if isinstance(held[row], int) else None
    return None


def _order_of(sampler: Any) -> Sequence[int] | None:
    """Read the permutation that a running random sampler works through."""
    rest = sampler.gi_yieldfrom if isinstance(sampler, GeneratorType) else None
    if type(rest) is not type(iter([])):
        return None
    # An unfinished list iterator says (iter, (the whole list,), position).
    reduced: Any = rest.__reduce__()
    order = reduced[1][0]
    return order if isinstance(order, list) and order else None


def _loader_of(iterator: Any, frames: Sequence[FrameType]) -> Any:
    """Find the loader of an iterator among the variables of the user's frames."""
    for frame in frames:
        for variables in (frame.f_locals, frame.f_globals):
            for value in list(variables.values()):
                if (
                    isinstance(value, DataLoader)
                    and value.dataset is iterator._dataset
                    and value._index_sampler is iterator._index_sampler
                ):
                    return value
    return None


def _name_of(value: Any, frames: Sequence[FrameType]) -> str | None:
    for frame in frames:
        for variables in (frame.f_locals, frame.f_globals):
            for name, item in list(variables.items()):
                if item is value and not name.startswith("_"):
                    return name
    return None


def _user_frames() -> Iterator[FrameType]:
    """Give the user's frames of all threads, innermost first, this thread's before others."""
    here = sys._getframe(1)
    others = [frame for frame in sys._current_frames().values() if frame is not here]
    seen: set[int] = set()
    for start in (here, *others):
        frame: FrameType | None = start
        while frame is not None:
            if id(frame) not in seen and is_user_file(frame.f_code.co_filename):
                seen.add(id(frame))
                yield frame
            frame = frame.f_back
