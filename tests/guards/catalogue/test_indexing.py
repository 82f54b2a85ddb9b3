"""Guards of lookups, indexing, gather and scatter: who is at fault, and what must stay silent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import cudalens
from cudalens.core.report_types import Offender, Violation
from cudalens.guards import GUARDS, full_name
from cudalens.guards._ranges import FEW
from tests.cpu_guards import Collector, assert_said, deterministic, guarded, said_id
from tests.guards.test_catalogue import Ops
from tests.releases import takes_modulo
from tests.verdicts import ask

tensor, zeros, ones, aten = torch.tensor, torch.zeros, torch.ones, torch.ops.aten


@pytest.fixture
def guards() -> Iterator[Collector]:
    """Only for those who ask: other tests here make the bad calls themselves."""
    with guarded() as collector:
        yield collector


def findings(op: Any, *args: Any, **options: Any) -> list[Violation]:
    """Ask every guard of an op about a call, without making the call."""
    return [found for _, found in ask(op, *args, **options)]


def only(op: Any, *args: Any, **kwargs: Any) -> Violation:
    (found,) = findings(op, *args, **kwargs)
    return found


MASK = zeros(3, 4, dtype=torch.bool).fill_(True)
IMPL, BACKWARD = aten._index_put_impl_.default, aten.embedding_dense_backward.default
ONE_BAD = (IMPL, zeros(3), [tensor([3])], ones(1))
BAG = (aten._embedding_bag.default, zeros(3, 2), tensor([0, 1, 2]))
SPARSE = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (3,), check_invariants=True)
SAID: list[tuple[tuple[Any, ...], dict[str, Any] | None]] = [
    # A bad column index is told with its place, its value and the dimension that it missed.
    (
        (aten.gather.default, zeros(2, 5), 1, tensor([[0, 4], [7, 0]])),
        {
            "headline": "{argument}[1, 0] = 7 is outside dimension 1 (size 5) of {related}",
            **{"argument": "index", "related": "self", "size": 5, "dim": 1},
            **{"bounds.text": "0 … 4", "at": [(1, 0)]},
        },
    ),
    # Where negative values count from the end the interval starts at minus the size.
    (
        (aten.index.Tensor, zeros(5), [tensor([0, 1, 7])]),
        {
            "headline": "{argument}[0][2] = 7 is outside dimension 0 (size 5) of {related}",
            "bounds.text": "-5 … 4",
        },
    ),
    # None passes one dimension by, a mask as many as it has; the first bad index is told.
    *(
        (
            (aten.index.Tensor, zeros(3, 4, 5), indices),
            {"list_position": place, "dim": dim, "size": size},
        )
        for indices, place, dim, size in (
            ([tensor([0]), tensor([9])], 1, 1, 4),
            ([None, tensor([9])], 1, 1, 4),
            ([None, None, tensor([9])], 2, 2, 5),
            ([tensor([True, False, True]), tensor([1, 9])], 1, 1, 4),
            ([MASK, tensor([9])], 1, 2, 5),
            ([tensor([1, 0, 1], dtype=torch.uint8), tensor([-5, 0])], 1, 1, 4),
            ([tensor([[0], [3]]), None, tensor([[0, 9]])], 0, 0, 3),
        )
    ),
    # Indexing's backward accumulates without a check on CUDA; without accumulate it asserts.
    ((*ONE_BAD, True, True), {"is_silent": True, "device_text": None}),
    ((*ONE_BAD, False, True), {"is_silent": False, "prints": "-sizes[i] <= index"}),
    ((*ONE_BAD, True, False), {"prints": "``"}),
    # A sparse dimension lets negative values count from the end; a strided one does not.
    ((aten.index_select.default, SPARSE, 0, tensor([-3, 2])), None),
    ((aten.index_select.default, SPARSE, 0, tensor([-4])), {"bounds.text": "-3 … 2"}),
    ((aten.index_select.default, zeros(3), 0, tensor([-3])), {"bounds.text": "0 … 2"}),
    # The backward kernel skips padding_idx; the lookup itself has no exception.
    ((BACKWARD, ones(2, 2), tensor([0, -1]), 3, -1, False), None),
    (
        (BACKWARD, ones(3, 2), tensor([0, -2, -1]), 3, -1, False),
        {
            "offenders.first": (Offender(position=(1,), value=-2),),
            **{"bounds.text": "0 … 2 or -1 (padding_idx)", "is_replay_safe": False},
        },
    ),
    ((aten.embedding.default, zeros(3, 2), tensor([-1]), -1), {}),
    # A table without rows refuses every index; one element may be named.
    ((aten.embedding.default, zeros(0, 2), tensor([0])), {"bounds.text": "nothing"}),
    ((aten.index_copy_.default, zeros(1), 0, tensor([1]), ones(1)), {"bounds.text": "0 … 0"}),
    # An offset is bounded by the one before it; the first counts as 0.
    *(
        (
            (*BAG, tensor(offsets)),
            {
                "headline": f"{{argument}}{at}: from the offset before it to the number of "
                "{related}"
            },
        )
        for offsets, at in (
            ([0, 4], "[1] = 4 is outside 0 … 3"),
            ([9, 4, 2], "[1] = 4 is outside 0 … 3"),
            ([0, 2, 1], "[2] = 1 is outside 2 … 3"),
            ([0, 3, 4], "[2] = 4 is outside 3 … 3"),
        )
    ),
    # Elements beyond the source are the offenders, counted after the mask is spread.
    (
        (aten.masked_scatter.default, zeros(4), tensor([True, False, True, True]), ones(2)),
        {
            "headline": "{argument} selects 3 elements but {related} has 2",
            **{"offenders.first": (Offender(position=(3,), value=1),), "is_index": False},
        },
    ),
    (
        (aten.masked_scatter.default, zeros(3, 2), tensor([True, False]), ones(2)),
        {"headline": "{argument} selects 3 elements but {related} has 2", "at": [(0,)]},
    ),
]


@pytest.mark.parametrize(("call", "said"), SAID, ids=said_id)
def test_what_is_said(call: tuple[Any, ...], said: dict[str, Any] | None) -> None:
    found = findings(*call)
    assert len(found) == (said is not None)
    assert_said(next(iter(found), None), said)


def test_masks_cost_nothing() -> None:
    """Reading and writing through bool and uint8 masks dispatches no op of ours."""
    data, value = zeros(3, 4), tensor(1.0)
    masks = [data > 0, zeros(3, 4, dtype=torch.uint8), tensor([True, False, True])]
    with Ops() as ops:
        for mask in masks:
            assert findings(aten.index.Tensor, data, [mask]) == []
            assert findings(aten.index_put_.default, data, [mask], value) == []
    assert not ops.counts


@pytest.mark.usefixtures("nothing_is_few")
def test_index_tensors_of_one_call_share_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three index tensors are judged by one read of the device, one for each dtype."""
    reads: list[int] = []
    plain = torch.Tensor.tolist

    def counted(self: torch.Tensor) -> Any:
        reads.append(self.numel())
        return plain(self)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    good = tensor([0, 1])
    assert findings(aten.index.Tensor, zeros(3, 3, 3), [good, good, good]) == []
    assert reads == [6]
    reads.clear()
    assert findings(aten.index.Tensor, zeros(3, 3, 3), [good, good.int(), good]) == []
    assert sorted(reads) == [2, 4]


embed, bag = nn.functional.embedding, nn.functional.embedding_bag
PUBLIC: dict[str, Any] = {
    "aten::index.Tensor": lambda: zeros(3)[tensor([3])],
    "aten::index_put_": lambda: zeros(3).index_put_((tensor([3]),), ones(1)),
    "aten::index_put": lambda: zeros(3).index_put((tensor([3]),), ones(1)),
    "aten::scatter_.value": lambda: zeros(3).scatter_(0, tensor([3]), 1.0),
    "aten::embedding": lambda: embed(tensor([3]), zeros(3, 2)),
    "aten::_embedding_bag_forward_only": lambda: bag(tensor([[3]]), zeros(3, 2)),
    "aten::embedding_renorm_": lambda: embed(tensor([3]), ones(3, 2), max_norm=1.0),
    "aten::gather": lambda: torch.take_along_dim(zeros(3), tensor([3])),
    "aten::put_": lambda: zeros(3).put_(tensor([3]), ones(1)),
    "aten::scatter_add_": lambda: zeros(3).scatter_add_(0, tensor([3]), ones(1)),
    "aten::index_copy_": lambda: zeros(3).index_copy_(0, tensor([3]), ones(1)),
    "aten::index_fill_.int_Scalar": lambda: zeros(3).index_fill_(0, tensor([3]), 1.0),
}


@pytest.mark.parametrize("op", PUBLIC)
def test_public_functions_reach_their_guard(guards: Collector, op: str) -> None:
    """The public function is stopped at the outermost op that has a guard."""
    found = guards.look(PUBLIC[op])
    assert found is not None and guards.found[0][0] == op
    names = [item.name for item in next(o for o in GUARDS if full_name(o) == op)._schema.arguments]
    assert found.argument in {"index", "indices"} & set(names)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_invariants_are_reached_through_the_constructor(guards: Collector) -> None:
    """Building a CSR tensor with checked invariants meets the guard; unchecked ones do not."""
    bad = (tensor([0, 1, 2]), tensor([0, 2]), ones(2), (2, 2))
    found = guards.look(lambda: torch.sparse_csr_tensor(*bad, check_invariants=True))
    assert found is not None and found.argument == "plain_idx"
    assert guards.look(lambda: torch.sparse_csr_tensor(*bad, check_invariants=False)) is None


BATCH = [[0, 2, 2], [0, 0, 2]]
"""A row of one matrix begins anew what a row of the other goes on with."""


@pytest.mark.parametrize(
    ("compressed", "plain", "argument", "position"),
    [
        ([1, 1, 2], [0, 1], "compressed_idx", (0,)),
        ([0, 1, 1], [0, 1], "compressed_idx", (2,)),
        ([0, -1, 2], [0, 1], "compressed_idx", (1,)),
        ([0, 1, 2], [0, -1], "plain_idx", (1,)),
        ([0, 2, 2], [1, 1], "plain_idx", (1,)),
        ([0, 2, 2], [1, 0], "plain_idx", (1,)),
        (BATCH, [[0, 1], [1, 0]], "plain_idx", (1, 1)),
        (BATCH, [[1, 0], [0, 1]], "plain_idx", (0, 1)),
        (BATCH, [[0, 1], [0, 1]], None, ()),
    ],
)
def test_each_sparse_invariant(
    compressed: list[Any], plain: list[Any], argument: str | None, position: tuple[int, ...]
) -> None:
    """Each invariant is told apart, though CUDA prints the same line for all of them."""
    op = aten._validate_compressed_sparse_indices.default
    call = (True, tensor(compressed), tensor(plain), 2, 2, 2)
    found = [(item.argument, item.offenders.first[0].position) for item in findings(op, *call)]
    assert found == ([(argument, position)] if argument else [])
    with pytest.raises(RuntimeError, match="is not satisfied") if argument else nullcontext():
        op(*call)


NARROW = {
    "index_select": lambda i: (aten.index_select.default, zeros(4, 3), 1, i),
    "embedding": lambda i: (aten.embedding.default, zeros(3, 2), i),
    "index_add": lambda i: (aten.index_add_.default, zeros(2, 3), 1, i, ones(2, len(i))),
    "index_reduce": lambda i: (
        *(aten.index_reduce_.default, zeros(2, 3), 1, i, ones(2, len(i)), "amax"),
    ),
    "multi_margin_loss": lambda i: (aten.multi_margin_loss.default, zeros(len(i), 3), i),
    "max_unpool2d": lambda i: (
        *(aten.max_unpool2d.default, ones(1, 1, len(i)), i.view(1, 1, -1), [1, 3]),
    ),
}
"""Calls whose kernels compare 32 bits of an index, each with a size of 3."""


@pytest.mark.parametrize("name", NARROW)
def test_an_index_that_32_bits_make_a_good_one_asserts_nothing(name: str) -> None:
    """The low 32 bits decide what asserts; all bits decide what is refused, as on the CPU."""
    call = NARROW[name]
    assert findings(*call(tensor([0, 2]))) == []
    for value in (2**32, 2**32 + 2, -(2**32)):
        (found,) = findings(*call(tensor([0, value])))
        assert not found.is_silent and found.device_text is None
        assert "low 32 bits" in found.explanation
        assert [item.value for item in found.offenders.first] == [value]
    for value in (2**32 + 3, 2**31, 3, -1):
        (found,) = findings(*call(tensor([2**32, value])))
        assert found.device_text is not None
        assert found.offenders.count == 2


@pytest.mark.parametrize(
    ("shape", "indices", "fitting", "other"),
    [
        ((4,), [tensor([0, 9])], (2,), (3,)),
        ((4, 3), [tensor([0, 9])], (2, 3), (3, 2)),
        ((4, 3), [None, tensor([0, 9])], (4, 2), (2, 4)),
        ((4, 3, 5), [tensor([0, 9]), None, tensor([1, 2])], (2, 3), (3, 2)),
        ((5, 4, 3), [None, tensor([0, 9]), tensor([1, 2])], (5, 2), (2, 5)),
        ((6, 4, 3, 5), [None, tensor([0, 9]), None, tensor([1, 2])], (2, 6, 3), (6, 2, 3)),
        ((4, 3), [tensor([True, False, True, False]), tensor([0, 9])], (2,), (3,)),
        ((2, 2, 3), [torch.eye(2).bool(), tensor([0, 9])], (2,), (2, 2)),
        ((4, 3), [tensor([[0], [9]])], (1, 3), (1, 1, 1, 3)),
    ],
)
def test_values_that_do_not_fit_are_refused_first(
    shape: tuple[int, ...], indices: list[Any], fitting: tuple[int, ...], other: tuple[int, ...]
) -> None:
    """Torch looks at the shape of what is written before the launch, unless it accumulates."""
    op = aten.index_put_.default
    assert only(op, zeros(shape), indices, ones(fitting)).argument == "indices"
    assert only(op, zeros(shape), indices, ones(())).argument == "indices"
    assert findings(op, zeros(shape), indices, ones(other)) == []
    assert only(op, zeros(shape), indices, ones(other), True).argument == "indices"
    good = [
        item if item is None or item.dtype == torch.bool else item.clamp(max=2) for item in indices
    ]
    op(zeros(shape), good, ones(fitting))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        op(zeros(shape), good, ones(other))


TABLE, NINE = zeros(3, 4), tensor([9])
TAKE, PUT = aten.take.default, aten.put_.default
INDEX, INDEX_PUT = aten.index.Tensor, aten.index_put_.default
SCATTER, ALL = aten.masked_scatter.default, tensor([True] * 4)
REFUSED: list[tuple[Any, tuple[Any, ...], list[tuple[Any, ...]]]] = [
    # Each with calls next to it that torch refuses, or that launch nothing.
    (TAKE, (TABLE, tensor([12])), [(TABLE, tensor([-12, 11])), (TABLE, tensor([12]).int())]),
    (TAKE, (TABLE, tensor([-13])), [(TABLE[:0], tensor([-13]))]),
    (
        PUT,
        (TABLE, tensor([12]), ones(1)),
        [(TABLE, tensor([12]), ones(2)), (TABLE, tensor([12]), ones(1).double())],
    ),
    (
        INDEX,
        (TABLE, [NINE]),
        [
            (TABLE, [NINE.short()]),
            (TABLE, [NINE[:0]]),
            (TABLE, [NINE, NINE[:0]]),
            (TABLE, [None, None, NINE]),
            (TABLE, [NINE, None, None]),
            (TABLE[:, :0], [NINE]),
            (TABLE[:0], [NINE]),
            (TABLE, [NINE, tensor([0, 1]), tensor([0])]),
            (TABLE, [tensor([0, 9]), tensor([0, 1, 2])]),
        ],
    ),
    (
        INDEX,
        (TABLE, [tensor([True, False, True]), NINE]),
        [
            (TABLE, [tensor([True, False]), NINE]),
            (TABLE, [tensor([False] * 3), NINE]),
            (TABLE, [tensor([True] * 3), tensor([0, 9])]),
        ],
    ),
    (INDEX, (TABLE, [tensor(False), NINE]), []),
    (
        INDEX_PUT,
        (TABLE, [NINE], ones(1)),
        [(TABLE, [NINE], ones(1).double()), (TABLE, [NINE], ones(3))],
    ),
    (
        IMPL,
        (TABLE, [NINE], ones(1), True, True),
        [(TABLE, [NINE], ones(1).double(), True, True)],
    ),
    (
        SCATTER,
        (zeros(3, 4), ALL, ones(11)),
        [
            (zeros(3, 4), ALL, ones(12)),
            (zeros(3, 4), ALL.byte(), ones(11)),
            (zeros(3, 4), ALL[:3], ones(11)),
            (zeros(3, 4), ALL, ones(11).double()),
            (zeros(3, 0), ALL[:0], ones(0)),
        ],
    ),
    (SCATTER, (zeros(()), ALL, ones(3)), [(zeros(()), ALL, ones(4))]),
]


@pytest.mark.parametrize(("op", "launched", "others"), REFUSED)
def test_what_torch_refuses_or_does_not_launch_is_not_judged(
    op: Any, launched: tuple[Any, ...], others: list[tuple[Any, ...]]
) -> None:
    assert findings(op, *launched)
    assert [findings(op, *other) for other in others] == [[] for _ in others]


@pytest.mark.parametrize(("count", "is_silent"), [(1, False), (2, True)])
def test_several_values_are_sorted_where_the_order_must_not_matter(
    count: int, is_silent: bool
) -> None:
    with deterministic():
        found = only(IMPL, zeros(3), [tensor([3] * count)], ones(count), False, True)
    assert found.is_silent is is_silent


def test_expanded_index_is_reduced_once() -> None:
    """The repeats of an expanded index are not read again; positions are those of the op."""
    index = (torch.arange(FEW + 1) // FEW * 3).view(FEW + 1, 1).expand(FEW + 1, 50)
    with Ops() as ops:
        found = only(aten.gather.default, zeros(3, 50), 0, index)
    assert ops.reduced[0] == FEW + 1
    assert found.offenders.count == 50
    assert found.offenders.first[0].position == (FEW, 0)


def test_training_on_valid_indices_is_undisturbed() -> None:
    """Results and gradients are the same with guards as without, and nothing is reported."""

    def step() -> list[torch.Tensor]:
        torch.manual_seed(0)
        table = torch.randn(5, 3, requires_grad=True)
        rows = nn.functional.embedding(tensor([0, 4, 4]), table)
        picked = rows[tensor([-1, 0]), tensor([0, 2])]
        spread = zeros(4).scatter_add(0, tensor([3, 0]), picked)
        taken = spread.index_select(0, tensor([0, 3])).gather(0, tensor([1, 0]))
        taken.sum().backward()
        return [taken.detach(), table.grad]

    plain = step()
    with guarded() as guards:
        checked = step()
    assert guards.found == []
    assert all(map(torch.equal, plain, checked))


# --- take_along_dim: composite, silent -----------------------------------------------------------


@takes_modulo
@pytest.mark.parametrize(("last", "gradient"), [(2, [1.0, 0.0, 1.0]), (3, [2.0, 0.0, 0.0])])
def test_take_along_dim_beyond_the_size_is_a_silent_finding(
    sim: object, last: int, gradient: list[float]
) -> None:
    """Torch takes the index modulo the size on every device: the op runs, a warning is shown."""
    values = torch.tensor([1.0, 2.0, 3.0], device="cuda", requires_grad=True)
    with cudalens.check() as session:
        taken = torch.take_along_dim(values, torch.tensor([-3, last], device="cuda"), 0)
        taken.sum().backward()
    assert values.grad is not None and values.grad.tolist() == gradient
    if last == 2:
        assert session.report is None
        return
    assert session.report is not None and session.report.kind == "silent"
    assert (
        session.report.headline_schema == "indices[1] = 3 is outside dimension 0 (size 3) of self"
    )


@takes_modulo
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize(("index", "findings"), [(2, 0), (3, 1)])
def test_take_along_dim_is_looked_at_whether_autograd_records_or_not(
    sim: object, mode: Any, index: int, findings: int
) -> None:
    """Inference mode goes past the autograd keys."""
    with cudalens.check() as session, mode():
        torch.take_along_dim(
            torch.arange(3.0, device="cuda"), torch.tensor([index], device="cuda"), 0
        )
    assert len(session.warnings) == findings
