"""Guards of repeats, segments, stated assertions and pivots, and an API that leads elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import tensor

from cudalens import simulate
from tests.cpu_guards import Collector, guarded, positions
from tests.releases import here, release

aten = torch.ops.aten
HAS_GPU = torch.cuda.is_available()


# --- repeat_interleave ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("repeats", "size", "headline", "line"),
    [
        ([2, 0, 1], 3, None, ""),
        ([2, 0, 1], 4, "{argument} sums to 3, and output_size is 4", "Repeat.cu:20"),
        ([2, 0, 1], 0, "{argument} sums to 3, and output_size is 0", "Repeat.cu:20"),
        ([3, -1, 1], 3, "{argument}[1] = -1 is negative", "Repeat.cu:33"),
        ([3, -1, -2], 1, "{argument}[1] = -1 is negative", "Repeat.cu:20"),
        ([0, 0], 0, None, ""),
    ],
)
def test_repeats_fill_the_output(
    guards: Collector,
    dtype: torch.dtype,
    repeats: list[int],
    size: int,
    headline: str | None,
    line: str,
) -> None:
    """Repeats must be at least 0 and sum to the size that was promised."""
    counts = tensor(repeats, dtype=dtype)
    values = torch.arange(len(repeats))
    found = guards.look(lambda: torch.repeat_interleave(values, counts, output_size=size))
    assert (found.headline if found else None) == headline
    if found:
        assert found.device_text is not None and found.device_text.startswith(here(line))
        assert found.is_replay_safe == ("sums to" in found.headline)


def test_negative_repeats_are_all_listed(guards: Collector) -> None:
    """Each negative repeat is an offender."""
    repeats = tensor([3, -1, -2])
    found = guards.look(lambda: torch.repeat_interleave(repeats, output_size=0))
    assert found is not None
    assert positions(found) == [(1,), (2,)]
    assert (found.offenders.count, found.offenders.total) == (2, 3)


# --- segment_reduce ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "segments", [{"offsets": tensor([[0, 3, 4], [0, 5, 5]])}, {"lengths": tensor([[3, 1], [4, 1]])}]
)
def test_segments_of_each_row(guards: Collector, segments: dict[str, torch.Tensor]) -> None:
    """Rows have segments of their own where the reduced dimension is the second."""
    call = lambda: torch.segment_reduce(torch.rand(2, 4), "sum", **segments, axis=1, unsafe=True)
    found = guards.look(call)
    assert found is not None and found.guard == "segments_lie_in_data"
    assert positions(found) == [(1, 1)]


def test_long_segment_says_where_it_ends(guards: Collector) -> None:
    """A length is only wrong by the place where its segment ends, which the finding states."""
    call = lambda: torch.segment_reduce(torch.rand(4), "sum", lengths=tensor([3, 2]), unsafe=True)
    found = guards.look(call)
    assert found is not None
    assert found.headline == (
        "{argument}[1] = 2 ends its segment at 5, which is outside the 4 elements of {related}"
    )


# --- stated assertions ---------------------------------------------------------------------------


def test_the_message_of_a_statement_is_repeated(guards: Collector) -> None:
    """As it is, also where it looks like a template's."""
    found = guards.look(lambda: torch._assert_async(tensor(0.0).half(), "sizes {differ}"))
    assert found is not None
    assert found.explanation == "The statement reads: sizes {differ}."
    assert found.device_text is not None and "`sizes {differ}`" in found.device_text
    assert "{differ}" not in found.headline


def test_nested_index_put_states_its_bound(guards: Collector) -> None:
    """Writing beyond the end of a ragged row is found through the assertion that torch states."""
    rows = [torch.zeros(2, 3), torch.zeros(4, 3)]
    ragged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    put = torch.ops.aten.index_put_.default
    good = (tensor([0, 1]), tensor([1, 3]), tensor([0, 0]))
    bad = (tensor([0, 1]), tensor([2, 3]), tensor([0, 0]))
    assert guards.look(lambda: put(ragged, good, tensor(1.0))) is None
    found = guards.look(lambda: put(ragged, bad, tensor(1.0)))
    assert found is not None and found.guard == "assert_async_message_holds"
    assert "ragged dimension are out of bounds" in found.explanation


# --- pivots --------------------------------------------------------------------------------------


def test_pivots_that_are_not_unpacked_are_not_read(guards: Collector) -> None:
    """Neither the kernel nor the guard looks at them."""
    pivots = tensor([1, 4, 3], dtype=torch.int32)
    call = lambda: torch.lu_unpack(torch.rand(3, 3), pivots, unpack_pivots=False)
    assert guards.look(call) is None


@pytest.mark.parametrize(("pivots", "bad"), [([1, 2, 9], []), ([1, 4, 9], [(1,)])])
def test_pivots_beyond_the_rows_are_not_read(
    guards: Collector, pivots: list[int], bad: list[Any]
) -> None:
    """torch before 2.14 takes more pivots than rows and leaves the rest alone."""
    given = tensor(pivots, dtype=torch.int32)
    call = lambda: torch.lu_unpack(torch.rand(2, 3), given)
    if release() >= (2, 14):
        with pytest.raises(ValueError, match="LU_pivots"):
            guards.look(call)
        return
    found = guards.look(call)
    assert (positions(found) if found else []) == bad


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
