"""Every guard against a loop over single elements, and against the CPU kernels that raise."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, tensor

from cudalens.core.report_types import Violation
from cudalens.guards import GUARDS, _ranges, engine
from cudalens.guards.catalogue import sampling
from tests.calls import CASES as AT_BOUND
from tests.calls import UNCHECKED, op_of
from tests.guards.parity import (
    CASES,
    FEW,
    LAYOUTS,
    Bad,
    Call,
    Case,
    Draw,
    advanced,
    along_a_dim,
    case,
    elements,
    falling,
    first_bad_index,
    full_shapes,
    ints,
    labels,
    laid_out,
    loop,
    mixed,
    numbers,
    offsets,
    outside,
    spans,
)
from tests.guards.test_catalogue import CATALOGUE
from tests.releases import release
from tests.verdicts import ask

aten = torch.ops.aten
ones, zeros = torch.ones, torch.zeros
TAKE_ALONG_DIM = aten.take_along_dim.default if release() >= (2, 10) else None  # modulo since
GROUPED, SCALED, SCALED_V2 = (
    getattr(getattr(aten, name, None), "default", None)  # from 2.8 on; the last: 2.10
    for name in ("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")
)


def raises(op: Any, *args: Any, **options: Any) -> bool:
    """Return whether the CPU kernel refuses the call; copies are given to ops that write."""

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone()
        return [copied(item) for item in value] if isinstance(value, list) else value

    try:
        op(*map(copied, args), **options)
    except (IndexError, RuntimeError):
        return True
    return False


def agree(found: Violation | None, wanted: Tensor | None, bad: Bad | bool) -> None:
    """Assert that a finding lists exactly the elements that the loop found, or that none did."""
    assert (found is not None) == bool(bad)
    if found is None or wanted is None or isinstance(bad, bool):
        return
    assert (found.offenders.count, found.offenders.total) == (len(bad), wanted.numel())
    assert [item.position for item in found.offenders.first] == [place for place, _ in bad[:20]]
    for item, (_, value) in zip(found.offenders.first, bad, strict=False):
        if isinstance(value, float) and not math.isfinite(value):
            assert item.value == str(value)
        else:
            assert tensor(item.value, dtype=wanted.dtype).item() == value


def is_refused(op: Any, call: Call) -> bool:
    """Return whether the loop, or the CPU kernel in its place, finds anything bad in a call."""
    return raises(op, *call.args) if call.bad is None else bool(call.bad)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_guard_finds_what_a_loop_finds(case: Case) -> None:
    """And where the CPU kernel looks it refuses the same calls.

    Half of the calls are as they are drawn, the others drawn until something is bad: a third must
    violate the guard, and some must not.  A few integers are reduced on the host, or as
    many are.
    """
    told: list[str | None] = []

    def holds(call: Call, is_few: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for module in () if is_few else (_ranges, engine, sampling):
                patch.setattr(module, "FEW", -1)
            found = ask(case.op, *call.args, **call.options)
        assert len(found) <= 1
        guard, violation = found[0] if found else (None, None)
        told.append(guard)
        bad = is_refused(case.op, call) if call.bad is None else call.bad
        agree(violation, call.tensor, bad)
        assert violation is None or call.says(violation)
        if call.on_cpu:
            assert raises(case.op, *call.args, **call.options) == bool(bad)

    half = settings(
        max_examples=case.examples // 2,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )
    for calls in (case.calls, case.calls.filter(partial(is_refused, case.op))):
        # A seed, not derandomize, which draws other calls after each change of these lines.
        seed(1)(half(given(calls, st.booleans())(holds)))()
    violating, calls = told.count(case.guard), len(told)
    assert calls <= 3 * violating < 3 * calls, f"{violating} of {calls} calls violate it"


def test_every_guard_is_held_against_a_loop_or_a_call_at_its_bound() -> None:
    """One interval is looked at in one way: its op has calls at the bound and one step beyond."""
    ops = {op_of(f"aten::{op}") for item in (*AT_BOUND, *UNCHECKED) for op in item.ops}
    guarded = {entry.name for op in ops for entry in GUARDS.get(op, ())}
    assert {entry.name for entry in CATALOGUE} == {item.guard for item in CASES} | guarded


# --- indexing -------------------------------------------------------------------------------------


@case("gather_index_in_range", aten.gather.default)
def gather(draw: Draw) -> Call:
    data, dim, size, index = draw(along_a_dim())
    return Call(args=(data, dim, index), tensor=index, bad=outside(index, 0, size))


BOTH = (torch.int32, torch.int64)


@case("index_in_range", aten.index.Tensor, examples=120)
@case("index_put_in_range", aten.index_put_.default, examples=120, writes=True)
@case("index_put_in_range", aten.index_put.default, examples=120, writes=True)
@case("index_put_in_range", aten._index_put_impl_.default, examples=120, writes=True)
def selection(draw: Draw, writes: bool = False) -> Call:
    """The first bad index tensor is told, nothing where nothing runs."""
    data, listed = draw(advanced())
    place, bad = first_bad_index(data, listed)
    return Call(
        args=(data, listed, tensor(2.0), draw(st.booleans())) if writes else (data, listed),
        tensor=listed[place],
        bad=bad,
        on_cpu=bool(bad),
        says=lambda found: found.list_position == found.dim == place,
    )


@case("take_along_dim_indices_in_range", TAKE_ALONG_DIM)
def along_dim(draw: Draw) -> Call:
    """Whatever the other dimension broadcasts."""
    size, count, dim = draw(st.integers(1, 5)), draw(FEW), draw(st.sampled_from([0, 1, -1]))
    wild = st.sampled_from([-size - 1, size, size + 1, 2**40])
    index = tensor(draw(mixed(count, st.integers(-size, size - 1), wild)))
    index = index.reshape((count, 1) if dim == 0 else (1, count))
    source = zeros((size, 3) if dim == 0 else (3, size))
    bad = outside(index, -size, size)
    return Call(args=(source, index, dim), tensor=index, bad=bad, on_cpu=False)


@case("masked_scatter_source_suffices", aten.masked_scatter.default, examples=80)
@case("masked_scatter_source_suffices", aten.masked_scatter_.default, examples=80)
def masked_scatter(draw: Draw) -> Call:
    """A walk over the spread mask must not run out of source elements."""
    shape = draw(full_shapes)
    mask_shape = tuple(draw(st.sampled_from([1, size])) for size in shape)
    size = math.prod(mask_shape)
    bits = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    mask = tensor(bits, dtype=torch.bool).reshape(mask_shape)
    length = draw(st.integers(0, math.prod(shape) // 2 + 1))
    used, short = 0, set()
    for position, _ in elements(zeros(shape)):
        own = tuple(0 if limit == 1 else at for at, limit in zip(position, mask_shape, strict=True))
        used += bool(mask[own])
        if mask[own] and used > length:
            short.add(own)
    bad = [(position, 1) for position in sorted(short)]
    return Call(args=(zeros(shape), mask, ones(length)), tensor=mask, bad=bad)


# --- tables ---------------------------------------------------------------------------------------


@case("embedding_bag_offsets_rise", aten._embedding_bag_forward_only.default, examples=80)
def bag_offsets(draw: Draw) -> Call:
    """The kernel's own walk meets a bag that ends before it starts."""
    count, has_last = draw(st.integers(0, 5)), draw(st.booleans())
    given = draw(st.lists(st.integers(-1, 7), min_size=2, max_size=5))
    used = given[:-1] if has_last else given
    bad = [
        ((at,), used[at])
        for at in range(1, len(used))
        if not (0 if at == 1 else used[at - 1]) <= used[at] <= count
    ]
    kind = draw(st.sampled_from(BOTH))
    index, starts = zeros(count, dtype=kind), tensor(given, dtype=kind)
    args = (ones(3, 2), index, starts, False, draw(st.integers(0, 2)), False, None, has_last)
    return Call(args=args, tensor=starts, bad=bad, on_cpu=False)


# --- losses ---------------------------------------------------------------------------------------


@case("nll_loss_target_in_range", aten.nll_loss_forward.default)
@case("nll_loss_target_in_range", aten.nll_loss2d_forward.default, pixels=True)
@case("nll_loss_backward_target_in_range", aten.nll_loss_backward.default, grads=True)
@case(
    "nll_loss_backward_target_in_range", aten.nll_loss2d_backward.default, pixels=True, grads=True
)
def class_targets(draw: Draw, pixels: bool = False, grads: bool = False) -> Call:
    classes, reduction = draw(st.integers(0, 12)), draw(st.integers(0, 2))
    shape = (draw(FEW), draw(FEW), draw(FEW)) if pixels else (draw(st.integers(1, 30)),)
    ignored = draw(st.sampled_from([-100, -100, 255, 0, classes, 2**40]))
    values = draw(labels(classes, ignored, count=math.prod(shape)))
    target = laid_out(tensor(values).reshape(shape), draw(LAYOUTS))
    args: tuple[Any, ...] = (zeros(shape[0], classes, *shape[1:]), target, None, reduction, ignored)
    if grads:
        args = (ones(shape if reduction == 0 else ()), *args, ones(()))
    bad = loop(target, lambda t: t == ignored or 0 <= t < classes)
    return Call(args=args, tensor=target, bad=bad, on_cpu=not grads)


BCE = aten.binary_cross_entropy.default


@case("binary_cross_entropy_input_in_unit_interval", BCE, argument="self")
@case("binary_cross_entropy_target_in_unit_interval", BCE, argument="target")
def probabilities_of_a_loss(draw: Draw, argument: str) -> Call:
    values = draw(numbers(0, 1))
    half = torch.full_like(values, 0.5)
    return Call(
        args=(values, half) if argument == "self" else (half, values),
        tensor=values,
        bad=loop(values, lambda x: 0 <= x <= 1),
        says=lambda found: found.argument == argument,
    )


# --- sampling -------------------------------------------------------------------------------------


@case("bernoulli_input_in_unit_interval", aten.bernoulli.default)
@case("bernoulli_input_in_unit_interval", aten.bernoulli.out, has_out=True)
@case("bernoulli_input_in_unit_interval", aten.bernoulli.out, has_out=True, rounds=True)
@case("bernoulli_p_in_unit_interval", aten.bernoulli_.Tensor, fills=True)
@case("bernoulli_p_in_unit_interval", aten.bernoulli_.Tensor, fills=True, rounds=True)
def probabilities(
    draw: Draw, has_out: bool = False, fills: bool = False, rounds: bool = False
) -> Call:
    """The CPU kernel compares unrounded, CUDA's in float32 where that is drawn."""
    p = draw(numbers(0, 1))
    p = p.double() if rounds else p
    bad = loop(p, lambda x: 0 <= (tensor(x).item() if rounds else x) <= 1)
    drawn = zeros(p.shape) if rounds else torch.zeros_like(p)
    options = {"out": drawn} if has_out else {}
    args = (drawn, p) if fills else (p,)
    return Call(args=args, options=options, tensor=p, bad=bad, on_cpu=not rounds)


@case("multinomial_weights_drawable", aten.multinomial.default)
def weights(draw: Draw) -> Call:
    """Weights, and then the sums of the rows."""
    given = draw(numbers(0, 2))
    for row in draw(st.lists(st.integers(0, 4), max_size=1)):
        given[row % given.size(0)] = 0
    bad, wanted = loop(given, lambda x: 0 <= x < math.inf), given
    if not bad:
        wanted = given.sum(-1)
        bad = [((i,), 0.0) for i, row in enumerate(given.tolist()) if sum(row) == 0]
    how = draw(st.sampled_from([(1, False), (1, True), (2, True)]))
    return Call(args=(given, *how), tensor=wanted, bad=bad)


# --- pooling and layouts ------------------------------------------------------------------


@case(
    "compressed_sparse_indices_hold", aten._validate_compressed_sparse_indices.default, examples=80
)
def sparse_invariants(draw: Draw) -> Call:
    """A finding exactly when the CPU's own validation raises."""
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    counts = draw(st.lists(st.integers(0, columns), min_size=rows, max_size=rows))
    starts = [0, *itertools.accumulate(counts)]
    nnz = starts[-1]
    lines = [sorted(draw(st.permutations(range(columns)))[:count]) for count in counts]
    plain = list(itertools.chain.from_iterable(lines))
    for values, high in ((starts, nnz + 1), (plain, columns + 1)):
        if values and draw(st.integers(0, 2)):
            values[draw(st.integers(0, len(values) - 1))] = draw(st.integers(-1, high))
    kind = draw(st.sampled_from(BOTH))
    both = (tensor(starts, dtype=kind), tensor(plain, dtype=kind))
    return Call(args=(draw(st.booleans()), *both, rows, columns, nnz), bad=None)


# --- lengths --------------------------------------------------------------------------------------


@case("repeats_fill_output", aten.repeat_interleave.Tensor)
def repeats(draw: Draw) -> Call:
    """A negative repeat is not for the CPU kernel: it writes beyond the result before it looks."""
    drawn = draw(
        st.integers(0, 8).flatmap(lambda n: mixed(n, st.integers(0, 4), st.integers(-3, 0)))
    )
    counts = laid_out(tensor(drawn, dtype=draw(st.sampled_from(BOTH))), draw(LAYOUTS))
    size = max(sum(drawn) + draw(st.sampled_from([0, 1, -1])), 0)
    negative = loop(counts, lambda n: n >= 0)
    bad = negative or (bool(drawn) and sum(drawn) != size)
    options = {"output_size": size}
    return Call(args=(counts,), options=options, tensor=counts, bad=bad, on_cpu=not negative)


@case("segment_lengths_not_negative", aten.segment_reduce.default, is_asserted=True)
@case("segments_lie_in_data", aten.segment_reduce.default)
@case("segment_lengths_not_negative", aten.segment_reduce.default, is_asserted=True, by="lengths")
@case("segments_lie_in_data", aten.segment_reduce.default, by="lengths")
def segments(draw: Draw, is_asserted: bool = False, by: str = "offsets") -> Call:
    """Segments of several dimensions and of a mean are asserted not to have a length below 0."""
    is_flat = draw(st.booleans())
    reduce = draw(st.sampled_from(["mean"] if is_flat and is_asserted else ["sum", "max"]))
    size = draw(st.sampled_from([2, 16, 16]) if is_asserted else st.integers(1, 6))
    most = -1 if is_asserted else 9
    if by == "offsets":
        given = draw(offsets(most=most))
        down, beyond = falling(given), spans(given, size)
    else:
        steps = mixed(draw(FEW), st.integers(0, 2), st.integers(-2, most))
        given, ends = draw(steps.map(lambda n: (n, [*itertools.accumulate(n)])))
        down = loop(tensor(given), lambda n: n >= 0)
        beyond = [((i,), n) for i, n in enumerate(given) if n and ends[i] > size]
    values = torch.rand(size) if is_flat or not is_asserted else torch.rand(size, 2)
    is_told = is_asserted and bool(down)
    options = {by: tensor(given), "unsafe": True}
    return Call(
        args=(values, reduce),
        options=options,
        tensor=tensor(given),
        bad=down or beyond,
        on_cpu=False,
        says=lambda found: found.is_silent != is_told and not found.is_replay_safe,
    )


@case("grouped_mm_offsets_in_range", GROUPED, scales=None)
@case("scaled_grouped_mm_offsets_in_range", SCALED, scales=ones(4))
@case("scaled_grouped_mm_offsets_in_range", SCALED_V2, scales=[ones(4)])
def groups_of_rows(draw: Draw, scales: Any) -> Call:
    """Ends of groups against a walk: the first assertion that fails names its offsets."""
    rows = draw(st.integers(1, 20))
    ends = sorted(draw(st.lists(st.integers(0, rows), min_size=3, max_size=3)))
    if draw(st.sampled_from([True, True, False])):
        ends[draw(st.integers(0, 2))] = draw(st.sampled_from([-1, rows + 1, rows + 9]))
    down = [((at[0] - 1,), end) for at, end in falling([0, *ends])]
    beyond = [((i,), end) for i, end in enumerate(ends) if end > rows]
    both = (zeros(rows, 16), zeros(3, 16, 16).mT.contiguous().mT)
    kind = torch.bfloat16 if scales is None else torch.float8_e4m3fn
    rest: tuple[Any, ...] = () if scales is None else (scales, scales)
    if isinstance(scales, list):
        rest = (scales, [1], [0], scales, [1], [0])
    args = (*(item.to(kind) for item in both), *rest, ints(ends))
    return Call(args=args, tensor=ints(ends), bad=down or beyond, on_cpu=False)
