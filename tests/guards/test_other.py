"""Guards of repeats, segments, stated assertions, pivots, packed sequences and conversions.

Also of an API that leads elsewhere, and of what no kernel looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import tensor

from cudalens import simulate
from tests.cpu_guards import Collector, assert_said, guarded
from tests.releases import release

aten = torch.ops.aten
without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the simulated device stands aside for a real GPU"
)
RAGGED = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged)
SUMS, NEGATIVE = "{argument} sums to 3, and output_size is ", "{argument}[1] = -1 is negative"


def repeated(repeats: list[int], size: int, dtype: torch.dtype) -> torch.Tensor:
    counts = tensor(repeats, dtype=dtype)
    return torch.repeat_interleave(torch.arange(len(repeats)), counts, output_size=size)


def segments(*shape: int, **options: Any) -> torch.Tensor:
    return torch.segment_reduce(torch.rand(shape), "sum", **options, unsafe=True)


def put_in_ragged(*rows: int) -> Any:
    places = tensor([0, 1]), tensor(rows), tensor([0, 0])
    return aten.index_put_.default(RAGGED, places, tensor(1.0))


def compressed(row: int) -> torch.Tensor:
    """Compress a coordinate tensor whose invariants nobody checked."""
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        coo = torch.sparse_coo_tensor(tensor([[0, row], [0, 0]]), torch.ones(2), (3, 3))
        return coo.to_sparse_csr()


def pivots(*values: int) -> torch.Tensor:
    return tensor(values, dtype=torch.int32)


SAID: list[tuple[Callable[[], Any], dict[str, Any] | None]] = [
    # Repeats must be at least 0 and sum to the size that was promised.
    *(
        (
            lambda given=given, size=size, dtype=dtype: repeated(given, size, dtype),
            headline and {"headline": headline, "line": line, "is_replay_safe": "sums" in headline},
        )
        for dtype in (torch.int32, torch.int64)
        for given, size, headline, line in (
            ([2, 0, 1], 3, None, ""),
            ([2, 0, 1], 4, f"{SUMS}4", "Repeat.cu:20"),
            ([2, 0, 1], 0, f"{SUMS}0", "Repeat.cu:20"),
            ([3, -1, 1], 3, NEGATIVE, "Repeat.cu:33"),
            ([3, -1, -2], 1, NEGATIVE, "Repeat.cu:20"),
            ([0, 0], 0, None, ""),
        )
    ),
    # Rows have segments of their own where the reduced dimension is the second.
    *(
        (
            lambda of=of: segments(2, 4, **of, axis=1),
            {"guard": "segments_lie_in_data", "at": [(1, 1)]},
        )
        for of in (
            {"offsets": tensor([[0, 3, 4], [0, 5, 5]])},
            {"lengths": tensor([[3, 1], [4, 1]])},
        )
    ),
    # A length is only wrong by the place where its segment ends, which the finding states.
    (
        lambda: segments(4, lengths=tensor([3, 2])),
        {
            "headline": "{argument}[1] = 2 ends its segment at 5, which is outside the 4 elements "
            "of {related}"
        },
    ),
    # The message of a statement is repeated as it is, also where it looks like a template's.
    (
        lambda: torch._assert_async(tensor(0.0).half(), "sizes {differ}"),
        {
            "headline": "{argument} = 0.0, where the program states that it is not zero",
            "explanation": "The statement reads: sizes {differ}.",
            "prints": "`sizes {differ}`",
        },
    ),
    # Writing beyond the end of a ragged row is found through the assertion that torch states.
    (lambda: put_in_ragged(1, 3), None),
    (
        lambda: put_in_ragged(2, 3),
        {"guard": "assert_async_message_holds", "why": "ragged dimension are out of bounds"},
    ),
    # Pivots that are not unpacked are read by neither the kernel nor the guard.
    (lambda: torch.lu_unpack(torch.rand(3, 3), pivots(1, 4, 3), unpack_pivots=False), None),
    # Conversions reach the guard by the public way.
    (lambda: compressed(2), None),
    (lambda: compressed(3), {"guard": "coordinates_lie_in_rows"}),
]


@pytest.mark.parametrize(("call", "said"), SAID)
def test_what_is_said(guards: Collector, call: Any, said: dict[str, Any] | None) -> None:
    assert_said(guards.look(call), said)


@pytest.mark.parametrize(("second", "said"), [(2, None), (4, {"at": [(1,)]})])
def test_pivots_beyond_the_rows_are_not_read(
    guards: Collector, second: int, said: dict[str, Any] | None
) -> None:
    """torch before 2.14 takes more pivots than rows and leaves the rest alone."""
    call = lambda: torch.lu_unpack(torch.rand(2, 3), pivots(1, second, 9))
    if release() >= (2, 14):
        with pytest.raises(ValueError, match="LU_pivots"):
            guards.look(call)
        return
    assert_said(guards.look(call), said)


def test_pivots_of_real_factors_pass(guards: Collector) -> None:
    """What the factorisations give is taken, in batches and in the backward of a solution."""
    matrix = (torch.rand(2, 4, 4) + 4 * torch.eye(4)).requires_grad_()
    solution = torch.linalg.solve(matrix, torch.ones(2, 4))
    assert guards.look(lambda: solution.sum().backward()) is None
    factors, pivots = torch.linalg.lu_factor(torch.rand(2, 4, 4))
    assert guards.look(lambda: torch.lu_unpack(factors, pivots)) is None
    symmetric = tensor([[0.0, 1.0], [1.0, 0.0]])
    factors, pivots = torch.linalg.ldl_factor(symmetric)
    assert bool((pivots < 0).any())
    assert guards.look(lambda: torch.linalg.ldl_solve(factors, pivots, torch.ones(2, 1))) is None


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


# --- on the simulated device ----------------------------------------------------------------------


@without_gpu
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
        names = [(op, violation.guard) for op, violation in collector.found]
        assert (torch.ones(3).cuda() + 1).sum().item() == 6
    assert names == [
        ("aten::_embedding_bag_backward", "embedding_bag_backward_indices_in_range"),
        ("aten::_convert_indices_from_coo_to_csr", "coordinates_lie_in_rows"),
        ("aten::linalg_lu_solve", "lu_solve_pivots_in_range"),
    ]


@without_gpu
@pytest.mark.parametrize(("q", "is_bad"), [([0.0, 1.0], False), ([0.5, 1.5], True)])
def test_quantile_levels_reach_gather(q: list[float], is_bad: bool) -> None:
    """A level beyond 1, which CUDA does not check, is found where its rank is gathered."""
    with simulate.start(announce=False), guarded("cuda") as collector:
        values = torch.arange(4.0, device="cuda")
        levels = tensor(q).to("cuda")
        found = collector.look(lambda: torch.quantile(values, levels))
        assert (found is not None) == is_bad
        if found:
            assert collector.found[0][0].startswith("aten::gather")
