"""Indexing guards against loops over single elements, and against the CPU kernels that raise.

The loops know nothing of the guards: they walk elements in row-major order as the kernels do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cudalens.core.report_types import Violation
from tests.loop_oracle import ask, compared, parity

aten = torch.ops.aten
Offender = tuple[tuple[int, ...], int]
LAYOUTS = ("plain", "transposed", "strided", "offset")
HUGE = (2**31 - 1, 2**31, 2**32, 2**40, -(2**31), -(2**31) - 1, -(2**40))


def raises(op: Any, *args: Any, **kwargs: Any) -> bool:
    """Return whether the CPU kernel refuses the call; copies are given to ops that write."""

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.clone()
        return [copied(item) for item in value] if isinstance(value, list) else value

    try:
        op(*map(copied, args), **kwargs)
    except (IndexError, RuntimeError):
        return True
    return False


def places(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, shape))


def outside(index: torch.Tensor, low: int, high: int) -> list[Offender]:
    """List the elements that are not low <= value < high, by a loop."""
    found = []
    for position in places(tuple(index.shape)):
        value = int(index[position])
        if not low <= value < high:
            found.append((position, value))
    return found


def agrees(found: Violation | None, expected: list[Offender]) -> None:
    """Assert that a finding lists exactly the offenders of the loop."""
    if not expected:
        assert found is None
        return
    assert found is not None
    assert found.offenders.count == len(expected)
    listed = [(item.position, item.value) for item in found.offenders.first]
    assert listed == expected[:20]


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same values in another memory layout."""
    if layout == "transposed" and values.dim() > 1:
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and values.dim():
        wide = values.new_full((*values.shape[:-1], 2 * values.shape[-1]), 99)
        wide[..., ::2] = values
        return wide[..., ::2]
    if layout == "offset":
        return torch.cat([values.new_full((3,), 99), values.reshape(-1)])[3:].view(values.shape)
    return values


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...], size: int) -> torch.Tensor:
    """Draw an index: good, at the lower bound, or with some beyond; of any layout."""
    dtype = draw(st.sampled_from([*[torch.int64] * 3, torch.int32]))
    count = math.prod(shape)
    values = draw(st.lists(st.integers(0, max(size - 1, 0)), min_size=count, max_size=count))
    outside = [-size - 1, size, size + 1, *HUGE]
    odd = draw(st.sampled_from([[], [-size, -1], *[outside] * 6]))
    if odd and count:
        for at in draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=4)):
            values[at] = draw(st.sampled_from(odd))
    limits = torch.iinfo(dtype)
    kept = [min(max(value, limits.min), limits.max) for value in values]
    return laid_out(torch.tensor(kept, dtype=dtype).reshape(shape), draw(st.sampled_from(LAYOUTS)))


least = st.sampled_from([*[1] * 7, 0])
"""The smallest size of a dimension: a tensor without elements is drawn now and then."""
shapes = least.flatmap(lambda size: st.lists(st.integers(size, 4), max_size=3)).map(tuple)
full_shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)


@st.composite
def along_a_dim(draw: st.DrawFn) -> tuple[torch.Tensor, int, int, torch.Tensor]:
    """Draw data, a dimension, its size, and an index of the rank of the data."""
    shape = draw(shapes)
    rank = max(len(shape), 1)
    dim = draw(st.integers(-rank, rank - 1))
    size = shape[dim] if shape else 1
    if not shape:
        index_shape = draw(st.sampled_from([(), (1,), (3,)]))
    else:
        index_shape = tuple(
            draw(st.integers(min(limit, 1), 4 if at == dim % rank else limit))
            for at, limit in enumerate(shape)
        )
    return torch.ones(shape), dim, size, draw(indices(index_shape, size))


@compared("gather_index_in_range")
@parity
@given(along_a_dim())
def test_gather(call: tuple[torch.Tensor, int, int, torch.Tensor]) -> None:
    """gather: 0 <= index < size, and the CPU kernel refuses exactly the same calls."""
    data, dim, size, index = call
    expected = outside(index, 0, size)
    agrees(ask(aten.gather.default, data, dim, index), expected)
    assert raises(aten.gather.default, data, dim, index) == bool(expected)


@pytest.mark.parametrize(
    ("guard", "op", "options"),
    [
        (compared("scatter_index_in_range"), aten.scatter.src, {}),
        (compared("scatter_by_reduction_index_in_range"), aten.scatter_.reduce, {"reduce": "add"}),
        (compared("scatter_add_index_in_range"), aten.scatter_add_.default, {}),
        (compared("scatter_reduce_index_in_range"), aten.scatter_reduce.two, {"reduce": "amax"}),
        (
            compared("scatter_reduce_index_in_range"),
            aten.scatter_reduce_.two,
            {"reduce": "sum", "include_self": False},
        ),
        (compared("scatter_value_index_in_range"), aten.scatter_.value, None),
        (compared("scatter_value_index_in_range"), aten.scatter.value, None),
    ],
    ids=str,
)
def test_scatter(guard: compared, op: Any, options: dict[str, Any] | None) -> None:
    """scatter and its like: 0 <= index < size, and the CPU kernel refuses the same calls."""

    @parity
    @given(along_a_dim())
    def holds(call: tuple[torch.Tensor, int, int, torch.Tensor]) -> None:
        data, dim, size, index = call
        source = 1.0 if options is None else torch.ones(index.shape)
        expected = outside(index, 0, size)
        args = (data, dim, index, source)
        agrees(ask(op, *args, **(options or {})), expected)
        assert raises(op, *args, **(options or {})) == bool(expected)

    with guard:
        holds()


@st.composite
def rows_of(draw: st.DrawFn, of: Any = shapes) -> tuple[torch.Tensor, int, int, torch.Tensor]:
    """Draw data, a dimension, its size, and a flat list of rows."""
    shape = draw(of)
    rank = max(len(shape), 1)
    dim = draw(st.integers(-rank, rank - 1))
    size = shape[dim] if shape else 1
    count = draw(st.integers(draw(least), 20)) if shape else 1
    return torch.ones(shape), dim, size, draw(indices((count,), size))


def row_width(data: torch.Tensor, dim: int) -> int:
    others = list(data.shape)
    if others:
        del others[dim]
    return math.prod(others)


@compared("index_select_index_in_range")
@parity
@given(rows_of())
def test_index_select(call: tuple[torch.Tensor, int, int, torch.Tensor]) -> None:
    """index_select: 0 <= index < size unless the result is empty, where the CPU still raises."""
    data, dim, size, index = call
    is_launched = index.numel() > 0 and row_width(data, dim) > 0
    expected = outside(index, 0, size) if is_launched else []
    agrees(ask(aten.index_select.default, data, dim, index), expected)
    if is_launched:
        assert raises(aten.index_select.default, data, dim, index) == bool(expected)


@pytest.mark.parametrize(
    ("guard", "op", "wraps", "kinds"),
    [
        (
            compared("index_add_index_in_range"),
            aten.index_add_.default,
            False,
            (torch.int32, torch.int64),
        ),
        (compared("index_copy_index_in_range"), aten.index_copy.default, False, (torch.int64,)),
        (
            compared("index_reduce_index_in_range"),
            aten.index_reduce_.default,
            False,
            (torch.int32, torch.int64),
        ),
        (compared("index_fill_index_in_range"), aten.index_fill_.int_Scalar, True, (torch.int64,)),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:index_reduce")
def test_row_writes(guard: compared, op: Any, wraps: bool, kinds: tuple[torch.dtype, ...]) -> None:
    """index_add and its like: 0 <= index < size, index_fill from -size; only if rows have width."""

    @parity
    @given(rows_of(full_shapes))
    def holds(call: tuple[torch.Tensor, int, int, torch.Tensor]) -> None:
        data, dim, size, index = call
        shape = list(data.shape)
        if shape:
            shape[dim] = index.numel()
        rest: list[Any] = [1.0] if op is aten.index_fill_.int_Scalar else [torch.ones(shape)]
        if op is aten.index_reduce_.default:
            rest.append("amax")
        expected = outside(index, -size if wraps else 0, size) if index.dtype in kinds else []
        agrees(ask(op, data, dim, index, *rest), expected)
        if index.dtype in kinds:
            assert raises(op, data, dim, index, *rest) == bool(expected)

    with guard:
        holds()


@compared("take_index_in_range", "put_index_in_range")
@parity
@given(shapes, st.data())
def test_take_and_put(shape: tuple[int, ...], data: st.DataObject) -> None:
    """take and put: -numel <= index < numel over all elements."""
    values = torch.ones(shape)
    count = values.numel()
    index = data.draw(indices(data.draw(full_shapes), count)).long()
    expected = outside(index, -count, count) if count else []
    source = torch.ones(index.shape)
    agrees(ask(aten.take.default, values, index), expected)
    agrees(ask(aten.put_.default, values, index, source), expected)
    if count:
        assert raises(aten.take.default, values, index) == bool(expected)
        assert raises(aten.put.default, values, index, source) == bool(expected)


@st.composite
def advanced(draw: st.DrawFn) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Draw data and an index list of integers, masks and gaps that broadcast together."""
    shape = tuple(draw(st.lists(st.integers(draw(least), 3), min_size=1, max_size=4)))
    common = tuple(draw(st.lists(st.integers(1, 3), min_size=0, max_size=2)))
    listed: list[torch.Tensor | None] = []
    dim = 0
    while dim < len(shape) and (not listed or draw(st.booleans())):
        kind = draw(st.sampled_from(["gap", *["integer"] * 6, "mask"]))
        if kind == "gap":
            listed.append(None)
        elif kind == "mask":
            bits = draw(st.lists(st.booleans(), min_size=shape[dim], max_size=shape[dim]))
            listed.append(torch.tensor(bits, dtype=torch.bool))
        else:
            sizes = tuple(draw(st.sampled_from([1, size])) for size in common)
            dropped = draw(st.integers(0, len(sizes)))
            listed.append(draw(indices(sizes[dropped:], shape[dim])))
        dim += 1
    return torch.ones(shape), listed


def advanced_by_loop(
    data: torch.Tensor, listed: list[torch.Tensor | None]
) -> tuple[int, list[Offender]] | None:
    """Find the first index tensor with a bad element by loops; ``None`` where nothing is wrong."""
    selected, kept, found = [], [], None
    for at, index in enumerate(listed):
        if index is None:
            kept.append(data.shape[at])
        elif index.dtype == torch.bool:
            selected.append((sum(index.tolist()),))
        else:
            selected.append(tuple(index.shape))
            size = data.shape[at]
            if size == 0:
                return None
            bad = outside(index, -size, size)
            if bad and found is None:
                found = (at, bad)
    try:
        common = torch.broadcast_shapes(*selected)
    except RuntimeError:
        return None
    kept.extend(data.shape[len(listed) :])
    return found if math.prod(common) * math.prod(kept) else None


@compared("index_in_range")
@settings(parity, max_examples=120)
@given(advanced())
def test_advanced_indexing(call: tuple[torch.Tensor, list[torch.Tensor | None]]) -> None:
    """x[i, j]: -size <= index < size, the first bad index tensor told, nothing if nothing runs."""
    data, listed = call
    expected = advanced_by_loop(data, listed)
    found = ask(aten.index.Tensor, data, listed)
    if expected is None:
        assert found is None
        return
    agrees(found, expected[1])
    assert found is not None
    assert found.list_position == found.dim == expected[0]
    assert raises(aten.index.Tensor, data, listed)


@compared("index_put_in_range", "index_put_impl_in_range")
@settings(parity, max_examples=80)
@given(advanced(), st.booleans())
def test_advanced_writes(
    call: tuple[torch.Tensor, list[torch.Tensor | None]], accumulate: bool
) -> None:
    """x[i, j] = v follows the rule of x[i, j], with and without accumulate."""
    data, listed = call
    expected = advanced_by_loop(data, listed)
    value = torch.tensor(2.0)
    for op in (aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default):
        agrees(ask(op, data, listed, value, accumulate), expected[1] if expected else [])
    if expected is not None:
        assert raises(aten.index_put_.default, data, listed, value, accumulate)


@compared("embedding_indices_in_range", "embedding_renorm_indices_in_range")
@parity
@given(st.integers(0, 4), st.integers(0, 3), full_shapes, st.data())
def test_embedding(rows: int, columns: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    """embedding: 0 <= index < rows unless there are no columns; renorm lets -rows wrap."""
    index = data.draw(indices(shape, rows))
    table = torch.ones(rows, columns)
    expected = outside(index, 0, rows) if columns else []
    agrees(ask(aten.embedding.default, table, index), expected)
    if columns and rows:
        assert raises(aten.embedding.default, table, index) == bool(expected)
    wrapped = outside(index, -rows, rows)
    agrees(ask(aten.embedding_renorm_.default, table, index, 1.0, 2.0), wrapped)
    if columns and rows:
        assert raises(aten.embedding_renorm_.default, table, index, 1.0, 2.0) == bool(wrapped)


@compared("embedding_backward_indices_in_range")
@parity
@given(st.integers(1, 4), st.integers(-2, 5), full_shapes, st.data())
def test_embedding_backward(
    rows: int, padding: int, shape: tuple[int, ...], data: st.DataObject
) -> None:
    """The dense backward: 0 <= index < rows, or padding_idx, which the kernel skips."""
    index = data.draw(indices(shape, rows))
    grad = torch.ones(*shape, 2)
    expected = [item for item in outside(index, 0, rows) if item[1] != padding]
    found = ask(aten.embedding_dense_backward.default, grad, index, rows, padding, False)
    agrees(found, expected)


def bags_by_loop(offsets: list[int], count: int) -> bool:
    """Walk the bags as the kernel does; tell whether one ends before it starts."""
    for bag, offset in enumerate(offsets):
        begin = 0 if bag == 0 else offset
        end = offsets[bag + 1] if bag + 1 < len(offsets) else count
        if end < begin:
            return True
    return False


@compared("embedding_bag_offsets_rise")
@settings(parity, max_examples=80)
@given(
    st.integers(0, 5),
    st.one_of(st.just([]), *[st.lists(st.integers(-1, 7), min_size=2, max_size=5)] * 5),
    st.booleans(),
    st.sampled_from([0, 1, 2]),
)
def test_embedding_bag_offsets(
    count: int, offsets: list[int], include_last: bool, mode: int
) -> None:
    """Bags: a finding exactly when the kernel's own walk meets a bag that ends before it starts."""
    if include_last and not offsets:
        return
    used = offsets[:-1] if include_last else offsets
    args = (torch.ones(3, 2), torch.zeros(count, dtype=torch.long), torch.tensor(offsets).long())
    rest = (False, mode, False, None, include_last)
    found = ask(aten._embedding_bag_forward_only.default, *args, *rest)
    assert (found is not None) == bags_by_loop(used, count)
    if found is not None:
        previous = [0, *used[1:]]
        expected = [
            ((at,), used[at])
            for at in range(1, len(used))
            if used[at] < previous[at - 1] or used[at] > count
        ]
        agrees(found, expected)


@compared("embedding_bag_indices_in_range")
@parity
@given(st.data())
def test_embedding_bag_indices(data: st.DataObject) -> None:
    """Bags: 0 <= index < rows, as the CPU kernel says."""
    rows, count = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 8))
    index = data.draw(indices((count,), rows))
    args = (torch.ones(rows, 2), index, torch.zeros(1, dtype=index.dtype))
    expected = outside(index, 0, rows)
    agrees(ask(aten._embedding_bag.default, *args), expected)
    assert raises(aten._embedding_bag.default, *args) == bool(expected)


@compared("masked_scatter_source_suffices")
@settings(parity, max_examples=80)
@given(full_shapes, st.data())
def test_masked_scatter(shape: tuple[int, ...], data: st.DataObject) -> None:
    """masked_scatter: a walk over the spread mask must not run out of source elements."""
    mask_shape = tuple(data.draw(st.sampled_from([1, size])) for size in shape)
    size = math.prod(mask_shape)
    bits = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    mask = torch.tensor(bits, dtype=torch.bool).reshape(mask_shape)
    length = data.draw(st.integers(0, math.prod(shape) + 1))
    target, source = torch.zeros(shape), torch.ones(length)
    used, short = 0, set()
    for position in places(shape):
        own = tuple(0 if limit == 1 else at for at, limit in zip(position, mask_shape, strict=True))
        if bool(mask[own]):
            used += 1
            if used > length:
                short.add(own)
    expected = [(position, 1) for position in sorted(short)]
    for op in (aten.masked_scatter.default, aten.masked_scatter_.default):
        agrees(ask(op, target, mask, source), expected)
        assert raises(op, target, mask, source) == bool(expected)


Pooled = Callable[..., tuple[Any, ...]]
POOLS: list[tuple[compared, Any, int, bool, Pooled]] = [
    (
        compared("max_unpool2d_indices_in_range"),
        aten.max_unpool2d.default,
        2,
        True,
        lambda grad, data, i, p: (grad, i, p),
    ),
    (
        compared("max_unpool3d_indices_in_range"),
        aten.max_unpool3d.default,
        3,
        True,
        lambda grad, data, i, p: (grad, i, p, [1] * 3, [0] * 3),
    ),
    (
        compared("fractional_max_pool2d_indices_in_range"),
        aten.fractional_max_pool2d_backward.default,
        2,
        True,
        lambda grad, data, i, p: (grad, data, [1] * 2, list(grad.shape[-2:]), i),
    ),
    (
        compared("fractional_max_pool3d_indices_in_range"),
        aten.fractional_max_pool3d_backward.default,
        3,
        True,
        lambda grad, data, i, p: (grad, data, [1] * 3, list(grad.shape[-3:]), i),
    ),
    (
        compared("adaptive_max_pool2d_indices_in_range"),
        aten.adaptive_max_pool2d_backward.default,
        2,
        False,
        lambda grad, data, i, p: (grad, data, i),
    ),
    (
        compared("adaptive_max_pool3d_indices_in_range"),
        aten.adaptive_max_pool3d_backward.default,
        3,
        False,
        lambda grad, data, i, p: (grad, data, i),
    ),
]
"""Guard, op, dimensions of a plane, whether the CPU kernel looks, and the op's arguments."""


@pytest.mark.parametrize(
    ("guard", "op", "rank", "looks", "arguments"), POOLS, ids=[str(item[1]) for item in POOLS]
)
def test_pooling(guard: compared, op: Any, rank: int, looks: bool, arguments: Pooled) -> None:
    """Pooling: 0 <= index < elements of the plane, as the CPU kernel says where it looks."""

    @parity
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        sizes = st.lists(st.integers(1, 3), min_size=rank, max_size=rank)
        plane, pooled = data.draw(sizes), data.draw(sizes)
        size = math.prod(plane)
        index = data.draw(indices((1, 1, *pooled), size)).long()
        call = arguments(torch.ones(1, 1, *pooled), torch.ones(1, 1, *plane), index, plane)
        expected = outside(index, 0, size)
        agrees(ask(op, *call), expected)
        if looks:
            assert raises(op, *call) == bool(expected)

    with guard:
        holds()


@compared("compressed_sparse_indices_hold")
@settings(parity, max_examples=80)
@given(st.data())
def test_sparse_invariants(data: st.DataObject) -> None:
    """Compressed sparse indices: a finding exactly when the CPU's own validation raises."""
    rows, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    kind = data.draw(st.sampled_from([torch.int32, torch.int64]))
    counts = data.draw(st.lists(st.integers(0, columns), min_size=rows, max_size=rows))
    starts = [0, *itertools.accumulate(counts)]
    nnz = starts[-1]
    places_ = [sorted(data.draw(st.permutations(range(columns)))[:count]) for count in counts]
    plain = list(itertools.chain.from_iterable(places_))
    for values, high in ((starts, nnz + 1), (plain, columns + 1)):
        if values and data.draw(st.integers(0, 2)):
            at = data.draw(st.integers(0, len(values) - 1))
            values[at] = data.draw(st.integers(-1, high))
    args = (
        data.draw(st.booleans()),
        torch.tensor(starts, dtype=kind),
        torch.tensor(plain, dtype=kind),
        rows,
        columns,
        nnz,
    )
    op = aten._validate_compressed_sparse_indices.default
    found = ask(op, *args)
    assert (found is not None) == raises(op, *args)
