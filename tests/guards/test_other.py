"""Guards of repeats, segments, stated assertions and pivots, and an API that leads elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import tensor

from cudalens import simulate
from tests.cpu_guards import Collector, assert_said, guarded
from tests.releases import release

aten = torch.ops.aten
HAS_GPU = torch.cuda.is_available()
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


# --- what leads to another op --------------------------------------------------------------------


@pytest.mark.skipif(HAS_GPU, reason="the simulated device stands aside for a real GPU")
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
