"""Device asserts of indexing: elements, rows and look-ups that are picked or written by index.

Negative values wrap in advanced indexing, `index_fill`, `take`, `put` and `embedding_renorm`, and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cudalens.simulate.asserts.rule import (
    INDEX_DTYPES,
    Arguments,
    Outcome,
    Repair,
    broadcast,
    clamped,
    dim_size,
    hit,
    narrowed,
    outside,
    rows_are_copied_whole,
    rule,
)

_SMALL_INDEX_COUNT = 16
_BAG_MODE_MAX = 2


# --- advanced indexing ----------------------------------------------------------------------------


def _bad_indices(
    source: Tensor, indices: Sequence[Tensor | None]
) -> tuple[list[Tensor | None], bool] | None:
    """Check every integer index against the dimension it selects from.

    Returns:
        The indices in range, and whether they select nothing; None where all were, or torch
        refuses the call.
    """
    repaired: list[Tensor | None] = []
    shapes: list[torch.Size] = []
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
            shapes.append(torch.Size([int(index.count_nonzero())]))
        else:
            size = source.size(dim) if dim < source.dim() else 0
            if size == 0 or index.dtype not in INDEX_DTYPES:
                return None
            shapes.append(index.shape)
            if outside(index, -size, size):
                is_bad = True
                fixed = clamped(index, -size, size)
        repaired.append(fixed)
        dim += width
    if (selected := broadcast(*shapes)) is None:
        return None
    is_empty = 0 in (sliced, *selected, *source.shape[dim:])
    return (repaired, is_empty) if is_bad else None


@rule("index.Tensor _unsafe_index.Tensor")
def _index_get(args: Arguments) -> Outcome:
    if (checked := _bad_indices(args["self"], args["indices"])) is None:
        return None
    repaired, is_empty = checked
    if is_empty:
        return Repair(repaired={"indices": repaired})
    used = [dim for dim, index in enumerate(args["indices"]) if index is not None]
    copies_rows = used == [0] and rows_are_copied_whole(args["self"], 0)
    return hit("gather_rows_fast" if copies_rows else "index_get", indices=repaired)


def _writes_by_sorting(values: Tensor) -> bool:
    return torch.are_deterministic_algorithms_enabled() and values.numel() > 1


def _put_hit(is_sorted: bool, **repaired: object) -> Repair:
    if is_sorted:
        return hit("index_put_sort", "assert_async", **repaired)
    return hit("index_put", "index_get", **repaired)


def _written_by_put(args: Arguments, size: int, is_sorted: bool, **repaired: object) -> Repair:
    """Answer for deterministic mode, where `index_put_` writes instead: negatives wrap."""
    if not outside(args["index"], -size, size):
        return Repair(repaired=repaired)
    return _put_hit(is_sorted, **repaired)


def _wrapped(index: Tensor, size: int) -> Tensor:
    return torch.where(index < 0, index + size, index)


@rule("index_put _unsafe_index_put _index_put_impl")
def _index_put(args: Arguments) -> Outcome:
    if (checked := _bad_indices(args["self"], args["indices"])) is None:
        return None
    repaired, is_empty = checked
    is_sorted = args["accumulate"] or _writes_by_sorting(args["values"])
    if is_empty or (is_sorted and args.get("unsafe", False)):
        return Repair(repaired={"indices": repaired})
    return _put_hit(is_sorted, indices=repaired)


@rule("take", record="take")
@rule("put", record="put")
def _flat_index(args: Arguments, record: str) -> Outcome:
    index, count = args["index"], args["self"].numel()
    if count == 0 or index.dtype != torch.int64 or not outside(index, -count, count):
        return None
    return hit(record, "take", index=clamped(index, -count, count))


@rule("masked_scatter")
def _masked_scatter(args: Arguments) -> Outcome:
    mask, source = args["mask"], args["source"]
    if (shape := broadcast(args["self"].shape, mask.shape)) is None:
        return None
    missing = int(mask.expand(shape).count_nonzero()) - source.numel()
    if missing <= 0 or mask.dtype != torch.bool:
        return None
    filled = torch.cat([source.reshape(-1), source.new_zeros(missing)])
    return hit("masked_scatter", source=filled)


# --- rows written by index ------------------------------------------------------------------------


@rule("index_fill.int_Scalar index_fill.int_Tensor")
def _index_fill(args: Arguments) -> Outcome:
    target, index = args["self"], args["index"]
    size = dim_size(target, args["dim"])
    if size is None or index.dtype != torch.int64 or not outside(index, -size, size):
        return None
    if target.numel() == 0:
        return Repair(repaired={"index": index.new_empty(0)})
    return hit("index_fill", index=clamped(index, -size, size))


def _written_rows(args: Arguments, size: int, *, wraps: bool = False) -> dict[str, Tensor]:
    """Return index and source with every index in range; none is left where there is no row."""
    index, source = args["index"], args["source"]
    if size:
        return {"index": clamped(_wrapped(index, size) if wraps else index, 0, size)}
    shape = list(source.shape) or [0]
    shape[args["dim"]] = 0
    return {"index": index.new_empty(0), "source": source.new_empty(shape)}


@rule("index_copy")
def _index_copy(args: Arguments) -> Outcome:
    size = dim_size(args["self"], args["dim"])
    if size is None or args["index"].dtype != torch.int64:
        return None
    # A target without elements has no memory for the view of it that the host makes first.
    if not outside(args["index"], 0, size) or args["self"].numel() == 0 != args["source"].numel():
        return None
    repaired = _written_rows(args, size)
    if args["source"].numel() == 0:
        return Repair(repaired=repaired)
    if torch.are_deterministic_algorithms_enabled():
        is_sorted = _writes_by_sorting(args["source"])
        return _written_by_put(args, size, is_sorted, **_written_rows(args, size, wraps=True))
    return hit("index_copy", **repaired)


@rule("index_add index_reduce")
def _add_rows(args: Arguments) -> Outcome:
    index, size = args["index"], dim_size(args["self"], args["dim"])
    if size is None or not outside(index, 0, size):
        return None
    if dim_size(args["source"], args["dim"]) != index.numel():
        return None  # as many rows as indices, else the host refuses
    repaired = _written_rows(args, size)
    if args["source"].numel() == 0:
        return Repair(repaired=repaired)
    if "reduce" not in args:
        if torch.are_deterministic_algorithms_enabled():
            return _written_by_put(args, size, True, **_written_rows(args, size, wraps=True))
    elif not args["include_self"] and outside(index, -size, size):
        # The rows are first filled by index_fill_, which asserts on its own.
        return hit("index_fill", **repaired)
    record = "index_add_small" if index.numel() <= _SMALL_INDEX_COUNT else "index_add_large"
    return narrowed("index", index, size) or hit(record, **repaired)


# --- gather and scatter ---------------------------------------------------------------------------


def _selects_whole_rows(source: Tensor, dim: int, index: Tensor) -> bool:
    """Return whether an index of gather or scatter is a column expanded over whole rows."""
    return (
        rows_are_copied_whole(source, dim)
        and index.dim() == source.dim()
        and index.shape[1:] == source.shape[1:]
        and all(stride == 0 for stride in index.stride()[1:])
    )


def _fits(index: Tensor, other: Tensor, dim: int | None = None) -> bool:
    """Return whether an index is nowhere larger than a tensor, the given dimension left out."""
    if max(index.dim(), 1) != max(other.dim(), 1):
        return False
    skipped = None if dim is None else dim % max(other.dim(), 1)
    sizes = zip(index.shape or (1,), other.shape or (1,), strict=True)
    return all(small <= large for d, (small, large) in enumerate(sizes) if d != skipped)


def _with_one_row(source: Tensor, dim: int) -> Tensor:
    """Return a stand-in for a tensor without rows, so that a look-up has something to copy."""
    shape = list(source.shape)
    shape[dim] = 1
    return source.new_zeros(shape)


@rule("gather")
def _gather(args: Arguments) -> Outcome:
    source, dim, index = args["self"], args["dim"], args["index"]
    size = dim_size(source, dim)
    if size is None or not _fits(index, source, dim) or not outside(index, 0, size):
        return None
    if size == 0:
        stand_in = _with_one_row(source, dim)
        return hit("gather_scatter", self=stand_in, index=torch.zeros_like(index))
    copies_rows = _selects_whole_rows(source, dim, index)
    record = "gather_rows_fast" if copies_rows else "gather_scatter"
    return hit(record, index=clamped(index, 0, size))


@rule("scatter.src scatter.reduce", record="gather_scatter")
@rule("scatter.value scatter.value_reduce", record="scatter_value")
@rule("scatter_add scatter_reduce.two", record="scatter_add_rows_fast")
def _scatter(args: Arguments, record: str) -> Outcome:
    target, dim, index = args["self"], args["dim"], args["index"]
    size = dim_size(target, dim)
    if size is None or not _fits(index, target, dim) or not _fits(index, args.get("src", index)):
        return None
    if not outside(index, 0, size):
        return None
    may_add_rows = record == "scatter_add_rows_fast"
    if not args.get("include_self", True):
        record = "scatter_value"  # the places are filled before anything is reduced into them
    elif _is_put(args):
        put = clamped(_wrapped(index, size), 0, size) if size else index.new_empty(0)
        is_sorted = may_add_rows or "reduce" in args or index.numel() > 1
        return _written_by_put(args, size, is_sorted, index=put)
    elif may_add_rows and not _selects_whole_rows(target, dim, index):
        record = "gather_scatter"
    return hit(record, index=clamped(index, 0, size) if size else index.new_empty(0))


def _is_put(args: Arguments) -> bool:
    """Return whether deterministic algorithms write this source by `index_put_`."""
    adds = args.get("reduce") in (None, "add", "sum", "mean")
    return "src" in args and adds and torch.are_deterministic_algorithms_enabled()


# --- look-ups -------------------------------------------------------------------------------------


@rule("index_select")
def _index_select(args: Arguments) -> Outcome:
    source, index = args["self"], args["index"]
    if index.dim() > 1:
        return None
    if source.layout is torch.sparse_coo:
        size = dim_size(source, args["dim"])
        if not size or not outside(index, -size, size):
            return None
        return hit("index_select_sparse", index=clamped(index, -size, size))
    return _lookup(args, "self", "index", args["dim"])


@rule("embedding")
def _embedding(args: Arguments) -> Outcome:
    return _lookup(args, "weight", "indices", 0) if args["weight"].dim() == 2 else None


def _lookup(args: Arguments, source_name: str, index_name: str, dim: int) -> Outcome:
    source, index = args[source_name], args[index_name]
    size = dim_size(source, dim)
    if size is None or not outside(index, 0, size):
        return None
    repaired = {index_name: clamped(index, 0, max(size, 1))}
    if size == 0:
        source = repaired[source_name] = _with_one_row(source, dim)
    if source.numel() == 0:
        return Repair(repaired=repaired)
    if index.numel() > _SMALL_INDEX_COUNT:
        copies_rows = rows_are_copied_whole(source, dim)
        return hit("gather_rows_fast" if copies_rows else "gather_scatter", **repaired)
    return narrowed(index_name, index, size) or hit("index_select_small", **repaired)


@rule("embedding_renorm")
def _embedding_renorm(args: Arguments) -> Outcome:
    indices, rows = args["indices"], dim_size(args["self"], 0) or 0
    if not outside(indices, -rows, rows):
        return None
    in_range = clamped(indices, -rows, rows) if rows else indices.new_empty(0)
    return hit("embedding_renorm", indices=in_range)


@rule("_embedding_bag _embedding_bag_forward_only")
def _embedding_bag(args: Arguments) -> Outcome:
    weight, indices, offsets = args["weight"], args["indices"], args["offsets"]
    bags = offsets.numel() - int(args["include_last_offset"])
    if weight.dim() != 2 or indices.dim() != 1 or offsets.dim() != 1 or bags < 0:
        return None
    if indices.dtype not in INDEX_DTYPES or offsets.dtype not in INDEX_DTYPES:
        return None
    if bags == 0:
        return _no_bag(args) if indices.numel() or bool(offsets.any()) else None
    repaired: dict[str, object] = {}
    rows = weight.size(0)
    is_index_bad = outside(indices, 0, rows)
    if is_index_bad:
        repaired["indices"] = clamped(indices, 0, max(rows, 1))
        if rows == 0:
            repaired["weight"] = _with_one_row(weight, 0)
    starts, are_starts_bad = _bag_starts(offsets[:bags], indices.numel())
    ordered = _with_last_offset(starts, offsets, indices.numel())
    if not torch.equal(ordered, offsets):
        repaired["offsets"] = ordered
    if weight.size(1) and (are_starts_bad or is_index_bad):
        record = "embedding_bag_offsets" if are_starts_bad else "embedding_bag_index"
        kernel = "max" if args["mode"] == _BAG_MODE_MAX else "sum_mean"
        return hit(record, f"{record}_{kernel}", **repaired)
    return Repair(repaired=repaired) if repaired else None


def _no_bag(args: Arguments) -> Repair:
    """Drop indices that belong to no bag: no CUDA kernel runs, the CPU one may crash."""
    weights = args["per_sample_weights"]
    return Repair(
        repaired={
            "indices": args["indices"].new_empty(0),
            "offsets": torch.zeros_like(args["offsets"]),
            "per_sample_weights": None if weights is None else weights.new_empty(0),
        }
    )


def _bag_starts(starts: Tensor, count: int) -> tuple[Tensor, bool]:
    """Return where the bags begin, put in order, and whether the kernel would have asserted.

    The kernel takes the first offset as 0 whatever it says; the last bag ends with the indices.
    """
    starts = starts.clone()
    starts[0] = 0
    ordered = starts.clamp(0, count).cummax(0).values
    return ordered, not torch.equal(starts, ordered)


def _with_last_offset(starts: Tensor, offsets: Tensor, count: int) -> Tensor:
    """Return the ordered offsets with the closing entry, which only the CPU kernel looks at."""
    if starts.numel() == offsets.numel():
        return starts
    last = int(offsets[-1])
    closing = last if int(starts[-1]) <= last <= count else count
    return torch.cat([starts, offsets.new_tensor([closing])])
