"""Read the column of a dataset that bad values came from, without running code of the user's.

It is the column with the tensor's key in the batch.  If the dataset has other keys, it is the only
column with the bad values in their rows.  The batch and the rows come from
``recorder/dataloader.py``.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from cudalens.core.evidence_types import DatasetColumn
from cudalens.core.report_types import Violation
from cudalens.core.tensor_values import MAX_UNIQUE
from cudalens.recorder.dataloader import Batch, dataset_of
from cudalens.source.running_node import function_of
from cudalens.source.safe_eval import instance_dict
from cudalens.source.scopes import bindings_of, item_of, value_bound

_MAX_VALUES = 1 << 22
_MAX_ROWS = 4
_ATTRIBUTES = ("targets", "labels", "y", "ids", "input_ids", "tokens")
_NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def column_of(batch: Batch, violation: Violation) -> DatasetColumn | None:
    """Return the facts about the dataset column that the bad values of a batch came from."""
    dataset, name = dataset_of(batch)
    first, bounds = violation.offenders.first, violation.bounds
    seen = [(item.sample, item.value) for item in first if item.sample is not None]
    if dataset is None or not seen or bounds.min is None or bounds.max is None:
        return None
    subset: Sequence[int] | None = None
    path = ""
    if type(dataset) is Subset:
        subset, dataset, path = dataset.indices, dataset.dataset, "dataset."
        seen = [(subset[at], value) for at, value in seen]
    label, classes = name or "the dataset", _classes(dataset)
    columns = _columns(dataset)
    own_key = batch.keys[batch.at]
    if own_key in columns:
        columns = {own_key: columns[own_key]}
    known = {key: column for key, column in columns.items() if column is not None}
    indices = batch.indices or ()
    rows = torch.tensor([subset[at] if subset else at for at in indices], dtype=torch.long)
    fitting = [
        (key, places, column)
        for key, (places, column) in known.items()
        if all(value in column[places == at].tolist() for at, value in seen)
        # One number for each item becomes a 1-d tensor in the batch.
        and (len(places) == len(places.unique())) == (batch.ranks[batch.at] == 1)
        # A slice of the batch has fewer values than the column in these rows.
        and int(torch.isin(places, rows).sum()) <= violation.offenders.total
    ]
    if len(fitting) == 1:
        ((key, places, column),) = fitting
        marks = torch.tensor(bounds.also_allowed, dtype=torch.long)
        is_used = ~torch.isin(column, marks)
        numbers = torch.arange(int(places.max()) + 1)
        if subset is not None:
            numbers.fill_(-1)[list(subset)] = torch.arange(len(subset))
            is_used &= numbers[places] >= 0
        of_values, values = numbers[places][is_used], column[is_used]
        distinct = values.unique()
        bad = (values < float(bounds.min)) | (values > float(bounds.max))
        good = distinct[(distinct >= float(bounds.min)) & (distinct <= float(bounds.max))]
        # A dataset with code of its own has attributes, the others have columns.
        kind = type(dataset)
        is_stored = kind not in (TensorDataset, list) and not kind.__module__.startswith(
            "datasets."
        )
        return DatasetColumn(
            name=label,
            attribute=f"{path}{key}" if is_stored else "",
            may_be_changed=is_stored and not _hands_on(dataset, key, own_key),
            count=len(values),
            low=int(distinct[0]),
            high=int(distinct[-1]),
            kinds=len(distinct),
            distinct=tuple(distinct.tolist()) if len(distinct) <= MAX_UNIQUE else None,
            bad_count=int(bad.sum()),
            rows=tuple(of_values[bad].unique()[:_MAX_ROWS].tolist()),
            others=f"{int(good[0])} … {int(good[-1])}" if len(good) else None,
            classes=classes,
        )
    return None if classes is None else DatasetColumn(name=label, classes=classes)


def _hands_on(dataset: object, attribute: str, key: int | str | None) -> bool:
    """Return whether ``__getitem__`` returns an attribute's item unchanged as its item ``key``.

    In each of its ``return`` statements, as in ``return self.x[at], int(self.y[at])``.
    """
    code = getattr(inspect.getattr_static(type(dataset), "__getitem__", None), "__code__", None)
    function = None if code is None or code.co_name != "__getitem__" else function_of(code)
    if function is None or hasattr(type(dataset), "__getitems__"):
        return False
    return len(function.args.args) == 2 and _returns_item_of(function, attribute, key)


def _returns_item_of(function: ast.FunctionDef, attribute: str, key: int | str | None) -> bool:
    own, at = (argument.arg for argument in function.args.args)
    returned = [it.value for it in ast.walk(function) if isinstance(it, ast.Return)]
    # `self` or the index may be reassigned: then the expression means something else.
    if any(bindings_of(function, it) for it in (own, at)) or not returned:
        return False
    wanted = f"{own}.{attribute}[{at}]"
    # Every return must pass the attribute's item through, directly or by one local name.
    for value in returned:
        item = _unwrapped(None if value is None else item_of(value, key))
        if isinstance(item, ast.Name):
            made = bindings_of(function, item.id)
            is_only = len(made) == 1 and isinstance(made[0], ast.Assign)
            item = _unwrapped(value_bound(made[0], item.id) if is_only else None)
        if item is None or ast.unparse(item) != wanted:
            return False
    return True


def _unwrapped(node: ast.expr | None) -> ast.expr | None:
    """Return the argument of ``int(…)`` or ``torch.tensor(…)``, which keep an integer's value."""
    kept = ("int", "torch.tensor", "torch.as_tensor")
    if isinstance(node, ast.Call) and ast.unparse(node.func) in kept and len(node.args) == 1:
        return node.args[0]
    return node


def _columns(dataset: object) -> dict[Any, tuple[Tensor, Tensor] | None]:
    """Return the stored columns by key or index, ``None`` for one with other values than integers.

    A column is a pair: the row of each value, and the values.
    """
    own = instance_dict(dataset)
    columns: dict[Any, Any] = {name: own[name] for name in _ATTRIBUTES if name in own}
    if type(dataset) is TensorDataset:
        columns = dict(enumerate(dataset.tensors))
    if type(dataset) is list and dataset:
        columns = dict(_of_samples(dataset))
    if type(dataset).__module__.startswith("datasets."):
        columns = dict(_of_arrow(own))
    return {key: _whole_numbers(column) for key, column in columns.items()}


def _whole_numbers(column: Any) -> tuple[Tensor, Tensor] | None:
    if type(column) is list and len(column) <= _MAX_VALUES:
        rows = [list(_integers(item)) for item in column]
        counts = torch.tensor([len(item) for item in rows])
        numbers = list(chain.from_iterable(rows))
        if numbers and None not in numbers and len(numbers) <= _MAX_VALUES:
            return torch.arange(len(rows)).repeat_interleave(counts), torch.tensor(numbers)
        return None
    tensor = column
    if f"{type(column).__module__}.{type(column).__name__}" == "numpy.ndarray":
        is_whole = column.dtype.kind in "iu" and column.dtype.name != "uint64"
        tensor = torch.from_numpy(column.astype("int64")) if is_whole else None
    is_read = isinstance(tensor, Tensor) and tensor.dtype in _NUMBERS and tensor.ndim
    if is_read and 0 < tensor.numel() <= _MAX_VALUES:
        places = torch.arange(len(tensor)).repeat_interleave(tensor[0].numel())
        return places, tensor.detach().cpu().long().flatten()
    return None


def _integers(item: Any) -> Iterator[int | None]:
    """Yield the integers of one row, ``None`` for anything else."""
    if type(item) is int:
        yield item
    elif type(item) is list:
        yield from (part if type(part) is int else None for part in item)
    elif type(item) is Tensor and item.dtype in _NUMBERS:
        yield from item.detach().flatten().tolist()
    else:
        yield None


def _of_samples(samples: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the columns of a list of tuples or dicts, with their keys."""
    first = samples[0]
    kind = type(first)
    keys = range(len(first)) if kind in (tuple, list) else first if kind is dict else ()
    for key in keys:
        try:
            yield key, [item[key] for item in samples if type(item) is kind]
        except (IndexError, KeyError):
            continue


def _of_arrow(own: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the columns of a Hugging Face dataset, in row order."""
    table, order = own.get("_data"), own.get("_indices")
    if table is None:
        return
    rows = None if order is None else order.column(0).to_pylist()
    for name in table.column_names:
        column = table.column(name)
        kind = str(column.type)
        if "int" in kind and "struct" not in kind and len(column) <= _MAX_VALUES:
            values = column.to_pylist()
            yield name, values if rows is None else [values[at] for at in rows]


def _classes(dataset: object) -> int | None:
    """Return the number of class names of a torchvision or Hugging Face dataset."""
    own = instance_dict(dataset)
    if type(own.get("classes")) in (list, tuple):
        return len(own["classes"])  # type: ignore[arg-type]
    features = instance_dict(own.get("_info")).get("features")
    if not isinstance(features, dict):
        return None
    kinds = [item for item in dict.values(features) if type(item).__name__ == "ClassLabel"]
    names = instance_dict(kinds[0]).get("names") if len(kinds) == 1 else None
    return len(names) if type(names) is list else None
