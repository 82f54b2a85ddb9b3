"""Ask the dataset of a batch for all its labels, without running code of the user's.

Its column of labels is the one that holds the bad values at the rows that they came from.  Not
here: which batch and rows those are (``recorder/dataloader.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from cudalens.core.evidence_types import DatasetLabels
from cudalens.core.report_types import Violation
from cudalens.recorder.dataloader import Batch, dataset_of
from cudalens.source.safe_eval import instance_dict

_MAX_ITEMS = 1 << 20
_MAX_ROWS = 4
_COLUMNS = ("targets", "labels", "y")
_NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def labels_of(batch: Batch, violation: Violation | None) -> DatasetLabels | None:
    """Return what the dataset of a batch holds, where its column of labels is proven."""
    dataset, name = dataset_of(batch)
    first = violation.offenders.first if violation is not None else ()
    seen = {item.sample: item.value for item in first if item.sample is not None}
    if dataset is None or not seen:
        return None
    rows: Sequence[int] | None = None
    if type(dataset) is Subset:
        rows, dataset = dataset.indices, dataset.dataset
        seen = {rows[at]: value for at, value in seen.items()}
    said, classes = name or "the dataset", _classes(dataset)
    for column in _columns(dataset):
        is_it = all(at < len(column) and column[at] == value for at, value in seen.items())
        if not is_it or not len(column):
            continue
        used = column if rows is None else column[torch.tensor(list(rows))]
        high = int(used.max())
        return DatasetLabels(
            name=said,
            count=len(used),
            high=high,
            rows_of_highest=tuple((used == high).nonzero()[:_MAX_ROWS, 0].tolist()),
            classes=classes,
        )
    return None if classes is None else DatasetLabels(name=said, classes=classes)


def _columns(dataset: object) -> Iterator[Tensor]:
    """Yield the columns of whole numbers that can be read as they are stored."""
    own = instance_dict(dataset)
    found: list[Any] = [own.get(name) for name in _COLUMNS]
    if type(dataset) is TensorDataset:
        found = list(dataset.tensors)
    if type(dataset) is list and dataset and len(dataset) <= _MAX_ITEMS:
        found = list(_of_samples(dataset))
    for column in map(_as_tensor, found):
        if isinstance(column, Tensor) and column.ndim == 1 and column.dtype in _NUMBERS:
            yield column.detach().cpu()


def _as_tensor(column: Any) -> Any:
    if type(column) is list and all(type(item) is int for item in column[:_MAX_ITEMS]):
        return torch.tensor(column)
    if f"{type(column).__module__}.{type(column).__name__}" == "numpy.ndarray":
        is_whole = column.dtype.kind in "iu" and column.dtype.name != "uint64"
        return torch.from_numpy(column.astype("int64")) if is_whole else None
    return column


def _of_samples(samples: list[Any]) -> Iterator[list[Any]]:
    """Yield the columns of a list of tuples or dicts."""
    first = samples[0]
    kind = type(first)
    keys = range(len(first)) if kind in (tuple, list) else first if kind is dict else ()
    for key in keys:
        try:
            column = [item[key] for item in samples if type(item) is kind]
        except (IndexError, KeyError):
            continue
        is_plain = all(type(item) is Tensor and not item.ndim for item in column)
        yield [int(item) for item in column] if is_plain else column


def _classes(dataset: object) -> int | None:
    """Return how many classes a dataset of torchvision or Hugging Face names."""
    own = instance_dict(dataset)
    if type(own.get("classes")) in (list, tuple):
        return len(own["classes"])  # type: ignore[arg-type]
    features = instance_dict(own.get("_info")).get("features")
    if not isinstance(features, dict):
        return None
    kinds = [item for item in dict.values(features) if type(item).__name__ == "ClassLabel"]
    names = instance_dict(kinds[0]).get("names") if len(kinds) == 1 else None
    return len(names) if type(names) is list else None
