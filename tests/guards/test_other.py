"""Guards of repeats, segments and stated assertions; an API that leads to another op's guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import tensor

from cudalens import simulate
from tests.cpu_guards import Collector, assert_said, guarded, said_id

aten = torch.ops.aten
without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the rehearsal device stands aside for a real GPU"
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
            ([3, -1, 1], 3, NEGATIVE, "Repeat.cu:36"),
            ([3, -1, -2], 1, NEGATIVE, "Repeat.cu:20"),
            ([0, 0], 0, None, ""),
        )
    ),
    # What a negative number breaks is said of repeats, and of offsets as an order.
    (lambda: repeated([3, -1, 1], 3, torch.int64), {"bounds.text": "at least 0"}),
    (
        lambda: segments(4, offsets=tensor([0, 3, 2])),
        {"at": [(2,)], "bounds.text": "no smaller than the offset before it"},
    ),
    # Rows have segments of their own where the reduced dimension is the second.
    *(
        (
            lambda of=of, axis=axis: segments(2, 4, **of, axis=axis),
            {"guard": "segments_lie_in_data", "at": [(1, 1)]},
        )
        for axis in (1, -1)
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
        {"guard": "assert_async_holds", "why": "ragged dimension are out of bounds"},
    ),
]


@pytest.mark.parametrize(("call", "said"), SAID, ids=said_id)
def test_what_is_said(guards: Collector, call: Any, said: dict[str, Any] | None) -> None:
    assert_said(guards.look(call), said)


# --- on the rehearsal device ----------------------------------------------------------------------


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
        names = [(op, violation.guard) for op, violation in collector.found]
        assert (torch.ones(3).cuda() + 1).sum().item() == 6
    assert names == [("aten::_embedding_bag_backward", "embedding_bag_backward_indices_in_range")]


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
