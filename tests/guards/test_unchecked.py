"""Guards of what no kernel looks at: gradients of tables, packed sequences, pivots, conversions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import tensor

from cudalens import simulate
from tests.cpu_guards import Collector, guarded, positions

aten = torch.ops.aten


# --- gradients of tables -------------------------------------------------------------------------


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


# --- packed sequences ----------------------------------------------------------------------------


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


# --- pivots --------------------------------------------------------------------------------------


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


# --- conversions of sparse indices ---------------------------------------------------------------


def test_conversions_reach_the_guard_by_the_public_way(guards: Collector) -> None:
    """A coordinate tensor whose invariants nobody checked is found when it is compressed."""
    for row, is_bad in ((2, False), (3, True)):
        with torch.sparse.check_sparse_tensor_invariants(enable=False):
            coo = torch.sparse_coo_tensor(tensor([[0, row], [0, 0]]), torch.ones(2), (3, 3))
            found = guards.look(lambda: coo.to_sparse_csr())  # noqa: B023
        assert (found is not None) == is_bad
