"""Guards of what no kernel looks at: gradients of tables, packed sequences, pivots, conversions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from cudalens import simulate
from tests.cpu_guards import Collector, guarded, positions
from tests.loop_oracle import agree, compared, labels, loop, mixed, parity

aten = torch.ops.aten


@pytest.fixture(scope="module")
def guards() -> Iterator[Collector]:
    with guarded() as collector:
        yield collector


def spans(ends: list[int], size: int, longest: int | None = None) -> list[Any]:
    """Walk the spans as a kernel does, and note the offsets whose span leaves the data."""
    bad = set()
    for i, (start, end) in enumerate(pairwise(ends)):
        read = list(range(start, end))[:longest]
        if read and read[0] < 0:
            bad.add(i)
        if read and read[-1] >= size:
            bad.add(i + 1)
    return [((i,), ends[i]) for i in sorted(bad)]


OFFSETS = st.builds(
    lambda start, steps: [start, *(start + sum(steps[: i + 1]) for i in range(len(steps)))],
    st.sampled_from([0, 0, 0, 1, -1]),
    st.integers(1, 5).flatmap(lambda n: mixed(n, st.integers(0, 3), st.integers(-2, 9))),
)


# --- gradients of tables -------------------------------------------------------------------------


@compared(
    "embedding_bag_backward_indices_in_range", "embedding_bag_weight_backward_indices_in_range"
)
@parity
@given(data=st.data(), rows=st.integers(1, 5), padding=st.sampled_from([-1, 0, 4]))
def test_gradient_of_a_bag(guards: Collector, data: Any, rows: int, padding: int) -> None:
    """Indices of a bag's gradient against a loop; the padding index is passed over."""
    drawn = data.draw(st.integers(1, 6).flatmap(lambda count: labels(rows, count=count)))
    dtype = torch.int64
    indices = tensor(drawn, dtype=dtype)
    bad = loop(indices, lambda i: 0 <= i < rows or i == padding)
    bag, size, none = torch.zeros_like(indices), tensor([len(drawn)]), tensor([], dtype=dtype)
    grad, offsets = torch.ones(1, 2), tensor([0])
    dense = lambda: aten._embedding_bag_dense_backward(
        grad, indices, bag, size, none, rows, False, 0, None, padding
    )
    weights = lambda: aten._embedding_bag_per_sample_weights_backward(
        grad, torch.ones(rows, 2), indices, offsets, bag, 0, padding
    )
    for call in (dense, weights):
        # On to the kernel only where nothing is wrong: it writes out of bounds.
        if bad or (padding < rows and padding not in drawn):
            found = guards.look(call)
            agree(found, indices, bad)
            assert found is None or not found.is_replay_safe


def test_bag_indices_changed_before_backward(guards: Collector) -> None:
    """Indices that .data changed after the forward call are found where the gradient is made."""
    for mode, options in (("sum", {"per_sample_weights": torch.ones(3)}), ("mean", {})):
        indices = tensor([0, 1, 2])
        table = torch.ones(3, 2, requires_grad=True)
        bags = F.embedding_bag(indices, table, tensor([0]), mode=mode, **options)
        assert guards.look(lambda: bags.sum().backward(retain_graph=True)) is None  # noqa: B023
        indices.data[1] = 3
        found = guards.look(lambda: bags.sum().backward())  # noqa: B023
        assert found is not None and positions(found) == [(1,)]
        assert guards.found[0][0] == "aten::_embedding_bag_backward"


@pytest.mark.parametrize(("maxima", "bad"), [([[2, 0]], []), ([[2, 3]], [(0, 1)])])
def test_maxima_of_a_bag(guards: Collector, maxima: list[list[int]], bad: list[Any]) -> None:
    """In a bag of maxima the index of each maximum says where the gradient goes."""
    call = lambda: aten._embedding_bag_dense_backward(
        torch.ones(1, 2), tensor([0]), tensor([0]), tensor([1]), tensor(maxima), 3, False, 2, None
    )
    found = guards.look(call)
    assert (positions(found) if found else []) == bad


@pytest.mark.skipif(torch.cuda.is_available(), reason="the rehearsal stands aside for a GPU")
def test_the_rehearsal_takes_no_harm() -> None:
    """What CUDA would write out of bounds is a finding there too, and the process lives on."""
    with simulate.start(announce=False), guarded("cuda") as collector:
        collector.lets_pass = True
        indices = tensor([0, 1, 2]).cuda()
        table = torch.ones(3, 2, device="cuda", requires_grad=True)
        bags = F.embedding_bag(indices, table, tensor([0]).cuda())
        indices.data[1] = 999_999
        bags.sum().backward()
        torch._convert_indices_from_coo_to_csr(tensor([0, 99]).cuda(), 3)
        pivots = tensor([1, 9], dtype=torch.int32).cuda()
        torch.linalg.lu_solve(torch.eye(2).cuda(), pivots, torch.ones(2, 1).cuda())
        names = [violation.guard for _, violation in collector.found]
        assert (torch.ones(3).cuda() + 1).sum().item() == 6
    assert names == [
        "embedding_bag_backward_indices_in_range",
        "coordinates_lie_in_rows",
        "lu_solve_pivots_in_range",
    ]


# --- segments, again in backward -----------------------------------------------------------------


@compared("segments_still_lie_in_data")
@parity
@given(ends=OFFSETS, size=st.integers(1, 6), reduce=st.sampled_from(["sum", "mean", "max"]))
def test_segments_in_backward(guards: Collector, ends: list[int], size: int, reduce: str) -> None:
    """Offsets that were changed after the forward call, against a walk over the segments."""
    falling = [((i + 1,), b) for i, (a, b) in enumerate(pairwise(ends)) if b < a]
    bad = falling or spans(ends, size)
    out = torch.ones(len(ends) - 1)
    call = lambda: aten._segment_reduce_backward(
        out, out, torch.ones(size), reduce, offsets=tensor(ends)
    )
    if bad:
        agree(guards.look(call), tensor(ends), bad)
    elif ends[0] == 0:
        assert guards.look(call) is None


def test_segment_lengths_changed_before_backward(guards: Collector) -> None:
    """Lengths that .data made longer than the data are found in backward."""
    lengths = tensor([2, 1])
    values = torch.rand(3, requires_grad=True)
    loss = torch.segment_reduce(values, "sum", lengths=lengths).sum()
    lengths.data[1] = 2
    found = guards.look(loss.backward)
    assert found is not None and found.guard == "segments_still_lie_in_data"
    assert positions(found) == [(1,)]


# --- packed sequences ----------------------------------------------------------------------------


def attention(kind: str, rows: int, query: list[int], key: list[int]) -> Callable[[], Any]:
    q, k = (tensor(item, dtype=torch.int32) for item in (query, key))
    if kind == "flash":
        data = torch.zeros(rows, 1, 8)
        return lambda: aten._flash_attention_forward(
            data, data, data, q, k, rows, rows, 0.0, False, False
        )
    data = torch.zeros(1, rows, 1, 8)
    return lambda: aten._efficient_attention_forward(
        data, data, data, None, q, k, rows, rows, 0.0, 0
    )


PACKED = {
    ("flash", "q"): compared("flash_query_sequences_lie_in_query"),
    ("flash", "k"): compared("flash_key_sequences_lie_in_key"),
    ("efficient", "q"): compared("efficient_query_sequences_lie_in_query"),
    ("efficient", "k"): compared("efficient_key_sequences_lie_in_key"),
}


@pytest.mark.parametrize(("kind", "side"), PACKED)
def test_packed_sequences(guards: Collector, kind: str, side: str) -> None:
    """Offsets of packed queries and of packed keys against a walk over the sequences."""

    @parity
    @given(ends=OFFSETS, rows=st.integers(1, 8))
    def holds(ends: list[int], rows: int) -> None:
        whole = [0, rows]
        call = attention(kind, rows, *((ends, whole) if side == "q" else (whole, ends)))
        error = guards.unguarded(call)
        assert isinstance(error, NotImplementedError)  # no kernel on the CPU
        found = guards.found[0][1] if guards.found else None
        agree(found, tensor(ends), spans(ends, rows))
        assert found is None or found.argument.endswith(f"_{side}")

    with PACKED[kind, side]:
        holds()


def test_pages_of_keys_are_no_packed_keys(guards: Collector) -> None:
    """Keys in pages have four dimensions, and their offsets are no rows of the tensor."""
    query, pages = torch.zeros(3, 1, 8), torch.zeros(2, 4, 1, 8)
    q, k = tensor([0, 3], dtype=torch.int32), tensor([0, 99], dtype=torch.int32)
    guards.unguarded(
        lambda: aten._flash_attention_forward(
            query, pages, pages, q, k, 3, 99, 0.0, False, False, block_table=tensor([[0, 1]])
        )
    )
    assert guards.found == []


@compared("jagged_rows_lie_in_values")
@parity
@given(ends=OFFSETS, rows=st.integers(1, 8), longest=st.integers(1, 4))
def test_jagged_rows(guards: Collector, ends: list[int], rows: int, longest: int) -> None:
    """Offsets of a jagged tensor against a walk over its rows, each cut to the longest."""
    bad = spans(ends, rows, longest)
    call = lambda: aten._jagged_to_padded_dense_forward(
        torch.ones(rows, 1), [tensor(ends)], [longest]
    )
    if bad or ends == sorted(ends):
        agree(guards.look(call), tensor(ends), bad)


# --- pivots --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pivots", "lu_bad", "ldl_bad"),
    [
        ([1, 2, 3], [], []),
        ([3, 3, 3], [], []),
        ([1, 4, 3], [(1,)], [(1,)]),
        ([0, 2, 3], [(0,)], [(0,)]),
        ([-3, -3, 3], [(0,), (1,)], []),
        ([1, 2, -4], [(2,)], [(2,)]),
        ([1, 2, -(2**31)], [(2,)], [(2,)]),
    ],
)
def test_pivots_of_a_solution(
    guards: Collector, pivots: list[int], lu_bad: list[Any], ldl_bad: list[Any]
) -> None:
    """Pivots name rows counted from 1; those of LDL factors are negative in blocks of two."""
    given_pivots, right = tensor(pivots, dtype=torch.int32), torch.ones(3, 1)
    for solve, bad in ((torch.linalg.lu_solve, lu_bad), (torch.linalg.ldl_solve, ldl_bad)):
        # On to LAPACK only where nothing is wrong: it swaps whatever it is told.
        found = guards.look(lambda: solve(torch.eye(3), given_pivots, right))  # noqa: B023
        assert (positions(found) if found else []) == bad


def test_pivots_of_real_factors_pass(guards: Collector) -> None:
    """What the factorisations give is taken, in batches and in the backward of a solution."""
    matrix = (torch.rand(2, 4, 4) + 4 * torch.eye(4)).requires_grad_()
    solution = torch.linalg.solve(matrix, torch.ones(2, 4))
    assert guards.look(lambda: solution.sum().backward()) is None
    symmetric = tensor([[0.0, 1.0], [1.0, 0.0]])
    factors, pivots = torch.linalg.ldl_factor(symmetric)
    assert bool((pivots < 0).any())
    assert guards.look(lambda: torch.linalg.ldl_solve(factors, pivots, torch.ones(2, 1))) is None


# --- conversions of sparse indices ---------------------------------------------------------------


@compared("coordinates_lie_in_rows")
@parity
@given(data=st.data(), size=st.integers(1, 5), dtype=st.sampled_from([torch.int32, torch.int64]))
def test_coordinates(guards: Collector, data: Any, size: int, dtype: torch.dtype) -> None:
    """Row coordinates against a loop; the CPU kernel writes out of bounds, so none runs then."""
    drawn = sorted(data.draw(st.lists(st.integers(-1, size), min_size=1, max_size=6)))
    rows = tensor(drawn, dtype=dtype)
    found = guards.look(lambda: torch._convert_indices_from_coo_to_csr(rows, size))
    agree(found, rows, loop(rows, lambda i: 0 <= i < size))


@compared("row_starts_lie_in_columns")
@parity
@given(ends=OFFSETS, stored=st.integers(1, 8))
def test_row_starts(guards: Collector, ends: list[int], stored: int) -> None:
    """Row starts against a walk over the rows; the CPU kernel writes out of bounds as well."""
    crow, col = tensor(ends), torch.zeros(stored, dtype=torch.int64)
    bad = spans(ends, stored)
    if bad or ends == sorted(ends):
        agree(guards.look(lambda: torch._convert_indices_from_csr_to_coo(crow, col)), crow, bad)


def test_conversions_reach_the_guard_by_the_public_way(guards: Collector) -> None:
    """A coordinate tensor whose invariants nobody checked is found when it is compressed."""
    for row, is_bad in ((2, False), (3, True)):
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            coo = torch.sparse_coo_tensor(tensor([[0, row], [0, 0]]), torch.ones(2), (3, 3))
            found = guards.look(lambda: coo.to_sparse_csr())  # noqa: B023
        assert (found is not None) == is_bad


# --- quantised bags ------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", ["byte", "4bit"])
@pytest.mark.parametrize(
    ("indices", "offsets", "with_last", "bad"),
    [
        ([0, 2], [0, 1], False, []),
        ([0, 3], [0, 1], False, [(1,)]),
        ([-1, 2], [0], False, [(0,)]),
        ([9, 2], [1], False, []),
        ([0, 2, 9], [0, 2], True, []),
        ([0, 9, 2], [0, 2], True, [(1,)]),
    ],
)
def test_quantised_bags(
    guards: Collector,
    bits: str,
    indices: list[int],
    offsets: list[int],
    with_last: bool,
    bad: list[Any],
) -> None:
    """Only the indices that lie in a bag are read from a table of bytes or of four bits."""
    op = getattr(torch.ops.quantized, f"embedding_bag_{bits}_rowwise_offsets")
    table = torch.zeros(3, 12, dtype=torch.uint8)
    rows, starts = tensor(indices), tensor(offsets)
    guards.unguarded(lambda: op(table, rows, starts, include_last_offset=with_last))
    assert [item for _, found in guards.found for item in positions(found)] == bad
