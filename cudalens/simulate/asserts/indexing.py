"""Device asserts of advanced indexing and of the ops that write rows by index.

Negative values wrap in advanced indexing, `index_fill`, `take` and `put`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cudalens.simulate.asserts.rule import (
    INDEX_DTYPES,
    Arguments,
    Assertion,
    Outcome,
    Repair,
    Rule,
    assertion,
    broadcast,
    clamped,
    dim_size,
    outside,
    rows_are_copied_whole,
    table,
    truncated,
)

_INDEX_GET = assertion("index_get")
INDEX_PUT = assertion("index_put", "index_get")
INDEX_PUT_SORT = assertion("index_put_sort", "assert_async")
_INDEX_FILL = assertion("index_fill")
_INDEX_COPY = assertion("index_copy")
_TAKE = assertion("take")
_PUT = assertion("put", "take")
_MASKED_SCATTER = assertion("masked_scatter")
_INDEX_ADD_SMALL = assertion("index_add_small")
_INDEX_ADD_LARGE = assertion("index_add_large")
GATHER_ROWS = assertion("gather_rows_fast")
SMALL_INDEX_COUNT = 16


@dataclass(frozen=True, kw_only=True)
class _IndexList:
    """What was found in the index list of one call."""

    repaired: list[Tensor | None]
    is_bad: bool
    is_empty: bool


def _check_indices(source: Tensor, indices: Sequence[Tensor | None]) -> _IndexList | None:
    """Check every integer index against the dimension it selects from; None for a host error."""
    repaired: list[Tensor | None] = []
    shapes: list[tuple[int, ...]] = []
    sliced = 1
    dim = 0
    is_bad = False
    for index in indices:
        fixed = index
        width = 1
        if index is None:
            sliced *= source.size(dim) if dim < source.dim() else 1
        elif index.dtype in (torch.bool, torch.uint8):
            width = index.dim()
            if source.shape[dim : dim + width] != index.shape:
                return None
            shapes.append((int(index.count_nonzero()),))
        else:
            size = source.size(dim) if dim < source.dim() else 0
            if size == 0 or index.dtype not in INDEX_DTYPES:
                return None
            shapes.append(tuple(index.shape))
            if outside(index, -size, size):
                is_bad = True
                fixed = clamped(index, -size, size)
        repaired.append(fixed)
        dim += width
    selected = broadcast(shapes)
    if selected is None:
        return None
    elements = sliced * selected.numel() * source.shape[dim:].numel()
    return _IndexList(repaired=repaired, is_bad=is_bad, is_empty=elements == 0)


def _index_get(args: Arguments) -> Outcome:
    checked = _check_indices(args["self"], args["indices"])
    if checked is None or not checked.is_bad:
        return None
    if checked.is_empty:
        return Repair(repaired={"indices": checked.repaired})
    used = [dim for dim, index in enumerate(args["indices"]) if index is not None]
    copies_rows = used == [0] and rows_are_copied_whole(args["self"], 0)
    site = GATHER_ROWS if copies_rows else _INDEX_GET
    return site.hit(indices=checked.repaired)


def _writes_by_sorting(values: Tensor) -> bool:
    return torch.are_deterministic_algorithms_enabled() and values.numel() > 1


def _index_put(args: Arguments) -> Outcome:
    checked = _check_indices(args["self"], args["indices"])
    if checked is None or not checked.is_bad:
        return None
    is_sorted = args["accumulate"] or _writes_by_sorting(args["values"])
    if checked.is_empty or (is_sorted and args.get("unsafe", False)):
        return Repair(repaired={"indices": checked.repaired})
    site = INDEX_PUT_SORT if is_sorted else INDEX_PUT
    return site.hit(indices=checked.repaired)


def _index_fill(args: Arguments) -> Outcome:
    target, index = args["self"], args["index"]
    size = dim_size(target, args["dim"])
    if size is None or index.dtype != torch.int64 or not outside(index, -size, size):
        return None
    if target.numel() == 0:
        return Repair(repaired={"index": index.new_empty(0)})
    return _INDEX_FILL.hit(index=clamped(index, -size, size))


def _written_rows(args: Arguments, size: int, *, wraps: bool = False) -> dict[str, object]:
    """Return index and source with every index in range; none is left where there is no row."""
    index, source = args["index"], args["source"]
    if size:
        wrapped = torch.where(index < 0, index + size, index) if wraps else index
        return {"index": clamped(wrapped, 0, size)}
    shape = list(source.shape) or [0]
    shape[args["dim"]] = 0
    return {"index": index.new_empty(0), "source": source.new_empty(shape)}


def _rows_match(args: Arguments) -> bool:
    """Return whether there are as many rows to write as indices; else the host refuses."""
    return bool(dim_size(args["source"], args["dim"]) == args["index"].numel())


def _write_as_index_put(args: Arguments, size: int, *, accumulate: bool) -> Outcome:
    """Answer for deterministic mode, where rows are written by `index_put_`: negatives wrap."""
    repaired = _written_rows(args, size, wraps=True)
    if not outside(args["index"], -size, size):
        return Repair(repaired=repaired)
    is_sorted = accumulate or _writes_by_sorting(args["source"])
    return (INDEX_PUT_SORT if is_sorted else INDEX_PUT).hit(**repaired)


def _index_copy(args: Arguments) -> Outcome:
    size = dim_size(args["self"], args["dim"])
    if size is None or args["index"].dtype != torch.int64:
        return None
    # A target without elements has no memory for the view of it that the host makes first.
    if not outside(args["index"], 0, size) or args["self"].numel() == 0 != args["source"].numel():
        return None
    if args["source"].numel() == 0:
        return Repair(repaired=_written_rows(args, size))
    if torch.are_deterministic_algorithms_enabled():
        return _write_as_index_put(args, size, accumulate=False)
    return _INDEX_COPY.hit(**_written_rows(args, size))


def _index_add(args: Arguments) -> Outcome:
    size = dim_size(args["self"], args["dim"])
    if size is None or not outside(args["index"], 0, size) or not _rows_match(args):
        return None
    if args["source"].numel() == 0:
        return Repair(repaired=_written_rows(args, size))
    if torch.are_deterministic_algorithms_enabled():
        return _write_as_index_put(args, size, accumulate=True)
    return _add_rows(args, size)


def _index_reduce(args: Arguments) -> Outcome:
    size = dim_size(args["self"], args["dim"])
    if size is None or not outside(args["index"], 0, size) or not _rows_match(args):
        return None
    repaired = _written_rows(args, size)
    if args["source"].numel() == 0:
        return Repair(repaired=repaired)
    # Without include_self the rows are first filled by index_fill_, which asserts on its own.
    if not args["include_self"] and outside(args["index"], -size, size):
        return _INDEX_FILL.hit(**repaired)
    return _add_rows(args, size)


def _add_rows(args: Arguments, size: int) -> Outcome:
    index = args["index"]
    compared = truncated(index)
    if not outside(compared, 0, size):
        return Repair(repaired={"index": compared.to(index.dtype)})
    is_small = index.numel() <= SMALL_INDEX_COUNT
    site = _INDEX_ADD_SMALL if is_small else _INDEX_ADD_LARGE
    return site.hit(**_written_rows(args, size))


def _take(args: Arguments) -> Outcome:
    return _flat(args, _TAKE)


def _put(args: Arguments) -> Outcome:
    return _flat(args, _PUT)


def _flat(args: Arguments, site: Assertion) -> Outcome:
    index, count = args["index"], args["self"].numel()
    if count == 0 or index.dtype != torch.int64 or not outside(index, -count, count):
        return None
    return site.hit(index=clamped(index, -count, count))


def _masked_scatter(args: Arguments) -> Outcome:
    mask, source = args["mask"], args["source"]
    shape = broadcast([args["self"].shape, mask.shape])
    if shape is None:
        return None
    missing = int(mask.expand(shape).count_nonzero()) - source.numel()
    if missing <= 0 or mask.dtype != torch.bool:
        return None
    filled = torch.cat([source.reshape(-1), source.new_zeros(missing)])
    return _MASKED_SCATTER.hit(source=filled)


RULES: dict[str, Rule] = {
    **table(_index_get, "index.Tensor", "index.Tensor_out", "_unsafe_index.Tensor"),
    **table(_index_put, "index_put", "index_put.out", "index_put_", "_unsafe_index_put"),
    **table(_index_put, "_index_put_impl", "_index_put_impl.out", "_index_put_impl_"),
    **table(_index_fill, "index_fill.int_Scalar", "index_fill.int_Scalar_out"),
    **table(_index_fill, "index_fill.int_Tensor", "index_fill.int_Tensor_out"),
    **table(_index_fill, "index_fill_.int_Scalar", "index_fill_.int_Tensor"),
    **table(_index_copy, "index_copy", "index_copy.out", "index_copy_"),
    **table(_index_add, "index_add", "index_add.out", "index_add_"),
    **table(_index_reduce, "index_reduce", "index_reduce.out", "index_reduce_"),
    **table(_take, "take", "take.out"),
    **table(_put, "put", "put.out", "put_"),
    **table(_masked_scatter, "masked_scatter", "masked_scatter.out", "masked_scatter_"),
}
