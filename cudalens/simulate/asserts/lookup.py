"""Device asserts of gather, scatter, index_select, embedding and embedding_bag: nothing wraps here.

`embedding_renorm` is the exception: it lets negative indices wrap.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from cudalens.simulate.asserts.indexing import (
    GATHER_ROWS,
    INDEX_PUT,
    INDEX_PUT_SORT,
    SMALL_INDEX_COUNT,
)
from cudalens.simulate.asserts.rule import (
    INDEX_DTYPES,
    Arguments,
    Assertion,
    Outcome,
    Repair,
    Rule,
    assertion,
    clamped,
    dim_size,
    outside,
    rows_are_copied_whole,
    table,
    truncated,
)

_GATHER_SCATTER = assertion("gather_scatter")
_SCATTER_VALUE = assertion("scatter_value")
_SCATTER_ADD_ROWS = assertion("scatter_add_rows_fast")
_INDEX_SELECT_SMALL = assertion("index_select_small")
_EMBEDDING_RENORM = assertion("embedding_renorm")
_BAG_MODE_MAX = 2


def _bag_assertions(record: str) -> dict[bool, Assertion]:
    """Return the assertions of one check in the two kernels, by whether the mode is max."""
    return {
        True: assertion(record, f"{record}_max"),
        False: assertion(record, f"{record}_sum_mean"),
    }


_BAG_INDEX = _bag_assertions("embedding_bag_index")
_BAG_OFFSETS = _bag_assertions("embedding_bag_offsets")


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


def _gather(args: Arguments) -> Outcome:
    source, dim, index = args["self"], args["dim"], args["index"]
    size = dim_size(source, dim)
    if size is None or not _fits(index, source, dim) or not outside(index, 0, size):
        return None
    if size == 0:
        stand_in = _with_one_row(source, dim)
        return _GATHER_SCATTER.hit(self=stand_in, index=torch.zeros_like(index))
    site = GATHER_ROWS if _selects_whole_rows(source, dim, index) else _GATHER_SCATTER
    return site.hit(index=clamped(index, 0, size))


def _scatter(site: Assertion, args: Arguments) -> Outcome:
    target, dim, index = args["self"], args["dim"], args["index"]
    size = dim_size(target, dim)
    if size is None or not _fits(index, target, dim) or not _fits(index, args.get("src", index)):
        return None
    if not outside(index, 0, size):
        return None
    if not args.get("include_self", True):
        site = _SCATTER_VALUE  # the places are filled before anything is reduced into them
    elif _is_put(args):
        return _scatter_by_put(args, size, adds=site is _SCATTER_ADD_ROWS or "reduce" in args)
    adds_rows = site is _SCATTER_ADD_ROWS and _selects_whole_rows(target, dim, index)
    if site is _SCATTER_ADD_ROWS and not adds_rows:
        site = _GATHER_SCATTER
    return site.hit(index=clamped(index, 0, size) if size else index.new_empty(0))


def _is_put(args: Arguments) -> bool:
    """Return whether deterministic algorithms write this source by `index_put_`."""
    adds = args.get("reduce") in (None, "add", "sum", "mean")
    return "src" in args and adds and torch.are_deterministic_algorithms_enabled()


def _scatter_by_put(args: Arguments, size: int, *, adds: bool) -> Outcome:
    """Answer for a scatter that `index_put_` writes: negatives wrap."""
    index = args["index"]
    wrapped = torch.where(index < 0, index + size, index)
    repaired: dict[str, object] = {
        "index": clamped(wrapped, 0, size) if size else index.new_empty(0)
    }
    if not outside(index, -size, size):
        return Repair(repaired=repaired)
    is_sorted = adds or index.numel() > 1
    return (INDEX_PUT_SORT if is_sorted else INDEX_PUT).hit(**repaired)


def _index_select(args: Arguments) -> Outcome:
    if args["index"].dim() > 1:
        return None
    return _lookup(args, "self", "index", args["dim"])


def _embedding(args: Arguments) -> Outcome:
    if args["weight"].dim() != 2:
        return None
    return _lookup(args, "weight", "indices", 0)


def _lookup(args: Arguments, source_name: str, index_name: str, dim: int) -> Outcome:
    source, index = args[source_name], args[index_name]
    size = dim_size(source, dim)
    if size is None or not outside(index, 0, size):
        return None
    repaired: dict[str, object] = {index_name: clamped(index, 0, max(size, 1))}
    if size == 0:
        source = repaired[source_name] = _with_one_row(source, dim)
    if source.numel() == 0:
        return Repair(repaired=repaired)
    if index.numel() > SMALL_INDEX_COUNT:
        site = GATHER_ROWS if rows_are_copied_whole(source, dim) else _GATHER_SCATTER
        return site.hit(**repaired)
    compared = truncated(index)
    if not outside(compared, 0, size):
        return Repair(repaired={index_name: compared.to(index.dtype)})
    return _INDEX_SELECT_SMALL.hit(**repaired)


def _embedding_renorm(args: Arguments) -> Outcome:
    indices = args["indices"]
    rows = dim_size(args["self"], 0) or 0
    if not outside(indices, -rows, rows):
        return None
    in_range = clamped(indices, -rows, rows) if rows else indices.new_empty(0)
    return _EMBEDDING_RENORM.hit(indices=in_range)


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
    if rows == 0 and is_index_bad:
        repaired["weight"] = _with_one_row(weight, 0)
    starts, are_starts_bad = _bag_starts(offsets[:bags], indices.numel())
    ordered = _with_last_offset(starts, offsets, indices.numel())
    if not torch.equal(ordered, offsets):
        repaired["offsets"] = ordered
    is_max = args["mode"] == _BAG_MODE_MAX
    is_launched = weight.size(1) > 0
    if is_launched and are_starts_bad:
        return _BAG_OFFSETS[is_max].hit(**repaired)
    if is_launched and is_index_bad:
        return _BAG_INDEX[is_max].hit(**repaired)
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


_scatter_elements: Rule = partial(_scatter, _GATHER_SCATTER)
_scatter_value: Rule = partial(_scatter, _SCATTER_VALUE)
_scatter_rows: Rule = partial(_scatter, _SCATTER_ADD_ROWS)

RULES: dict[str, Rule] = {
    **table(_gather, "gather", "gather.out"),
    **table(_scatter_elements, "scatter.src", "scatter.src_out", "scatter_.src"),
    **table(_scatter_elements, "scatter.reduce", "scatter.reduce_out", "scatter_.reduce"),
    **table(_scatter_value, "scatter.value", "scatter.value_out", "scatter_.value"),
    **table(_scatter_value, "scatter.value_reduce", "scatter.value_reduce_out"),
    **table(_scatter_value, "scatter_.value_reduce"),
    **table(_scatter_rows, "scatter_add", "scatter_add.out", "scatter_add_"),
    **table(_scatter_rows, "scatter_reduce.two", "scatter_reduce.two_out", "scatter_reduce_.two"),
    **table(_index_select, "index_select", "index_select.out"),
    **table(_embedding, "embedding", "embedding.out"),
    **table(_embedding_renorm, "embedding_renorm", "embedding_renorm.out", "embedding_renorm_"),
    **table(_embedding_bag, "_embedding_bag", "_embedding_bag.out"),
    **table(_embedding_bag, "_embedding_bag_forward_only", "_embedding_bag_forward_only.out"),
}
