"""Cases that hold a guard against a plain Python loop over the elements, and how they are drawn.

The loops know nothing of the guards: they walk elements in row-major order as the kernels do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from cudalens.core.report_types import Violation
from tests.cpu_guards import strided, transposed
from tests.releases import release

Bad = list[tuple[tuple[int, ...], Any]]
Draw = st.DrawFn
HUGE = (2**31 - 1, 2**31, 2**32, 2**40, -(2**31), -(2**31) - 1, -(2**40), 2**63 - 1, -(2**63))
FEW = st.integers(1, 4)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call, and what a loop finds in it."""

    args: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    tensor: Tensor | None = None
    """What the bad elements lie in."""
    bad: Bad | bool | None
    """The bad elements; whether there are any, where that is all that is told; ``None`` where the
    CPU kernel is the oracle.
    """
    on_cpu: bool = True
    """Whether the CPU kernel raises where anything is bad, and there alone."""
    says: Callable[[Violation], bool] = lambda found: True
    """What else is true of a finding."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A guard, the op that it is held against a loop on, and the calls."""

    guard: str
    op: Any
    calls: st.SearchStrategy[Call]
    examples: int

    def __str__(self) -> str:
        return f"{self.guard}-{self.op}"


CASES: list[Case] = []


def case(
    guard: str, op: Any, *, examples: int = 40, **chosen: Any
) -> Callable[[Callable[..., Call]], Callable[..., Call]]:
    """Enter the decorated function, which draws a call, for this guard of an op.

    Args:
        op: ``None`` where this torch has no such op: nothing is entered.
        chosen: arguments of the function.
    """

    def enter(make: Callable[..., Call]) -> Callable[..., Call]:
        if op is None:
            return make
        if "op" in signature(make).parameters:
            chosen["op"] = op
        calls = st.composite(make)(**chosen)
        CASES.append(Case(guard=guard, op=op, calls=calls, examples=examples))
        return make

    return enter


# --- loops ----------------------------------------------------------------------------------------


def elements(tensor: Tensor) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Return every element with its position, in row-major order, one by one."""
    places = itertools.product(*map(range, tensor.shape))
    flat = tensor.reshape(-1).tolist()
    return zip(places, flat, strict=True)


def loop(tensor: Tensor, is_good: Callable[[Any], bool]) -> Bad:
    """Return the bad elements as a plain loop finds them."""
    return [(position, value) for position, value in elements(tensor) if not is_good(value)]


def outside(index: Tensor, low: int, high: int) -> Bad:
    return loop(index, lambda value: low <= value < high)


def spans(ends: Sequence[int], size: int) -> Bad:
    """Walk the spans as a kernel does, and note the offsets whose span leaves the data."""
    bad = set()
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        read = range(start, end)
        if read and read[0] < 0:
            bad.add(i)
        if read and read[-1] >= size:
            bad.add(i + 1)
    return [((i,), ends[i]) for i in sorted(bad)]


def falling(ends: Sequence[int]) -> Bad:
    """Return the ends that are smaller than the one before."""
    return [((i + 1,), b) for i, (a, b) in enumerate(itertools.pairwise(ends)) if b < a]


# --- values ---------------------------------------------------------------------------------------


def laid_out(values: Tensor, layout: str) -> Tensor:
    """Return the same values in another memory layout."""
    if layout == "transposed" and values.dim():
        return transposed(values)
    if layout == "strided" and values.dim():
        return strided(values)
    if layout == "offset":
        return torch.cat([values.new_full((3,), 99), values.reshape(-1)])[3:].view(values.shape)
    return values


NARROW = torch.int32 if release() >= (2, 8) else torch.int64
"""What every op with an index takes beside int64, since torch 2.8."""
LAYOUTS = st.sampled_from(["plain", "transposed", "strided", "offset"])


@st.composite
def indices(draw: Draw, shape: tuple[int, ...], size: int) -> Tensor:
    """Draw an index: good, at the lower bound, or with some beyond; of any layout."""
    dtype = draw(st.sampled_from([*[torch.int64] * 3, NARROW]))
    count = math.prod(shape)
    values = draw(st.lists(st.integers(0, max(size - 1, 0)), min_size=count, max_size=count))
    odd = draw(st.sampled_from([[-size, -1], [-size - 1, size, size + 1, *HUGE]]))
    if count:
        for at in draw(st.lists(st.integers(0, count - 1), max_size=4)):
            values[at] = draw(st.sampled_from(odd))
    limits = torch.iinfo(dtype)
    kept = [min(max(value, limits.min), limits.max) for value in values]
    return laid_out(torch.tensor(kept, dtype=dtype).reshape(shape), draw(LAYOUTS))


@st.composite
def mixed(draw: Draw, count: int, good: Any, bad: Any) -> list[Any]:
    """Draw values, and in half of the lists up to three of the bad among them."""
    values = draw(st.lists(good, min_size=count, max_size=count))
    if values and draw(st.booleans()):
        for at in draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3)):
            values[at] = draw(bad)
    return values


def labels(classes: int, *others: int, count: int) -> st.SearchStrategy[list[int]]:
    """Draw classes, and among them some beyond and numbers of 32 bits and more."""
    wild = (classes, classes + 1, -1, -100, 255, 2**31, 2**32 + 1, -(2**33))
    good = st.integers(0, max(classes - 1, 0))
    return mixed(count, st.one_of(good, st.sampled_from(others or (0,))), st.sampled_from(wild))


def offsets(*, most: int = 9) -> st.SearchStrategy[list[int]]:
    """Draw offsets, some with a step below 0, or above 3."""
    return st.builds(
        lambda start, steps: [start, *(start + sum(steps[: i + 1]) for i in range(len(steps)))],
        st.sampled_from([0, 0, 0, 1, -1]),
        st.integers(1, 5).flatmap(lambda n: mixed(n, st.integers(0, 3), st.integers(-2, most))),
    )


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@st.composite
def numbers(draw: Draw, low: float, high: float) -> Tensor:
    """Draw a matrix of any float dtype, mostly inside the bounds, with what surrounds them."""
    dtype = draw(st.sampled_from(FLOATS))
    shape = [draw(st.integers(1, 5)) for _ in range(2)]
    step = torch.tensor([-math.inf, math.inf], dtype=dtype)
    beyond = torch.tensor([low, high], dtype=dtype).nextafter(step).tolist()
    if dtype.itemsize == 2:
        beyond = [low - 0.5, high + 0.5]
    odd = st.sampled_from([low, high, -0.0, -1e-30, *beyond, math.nan, math.inf, -math.inf])
    values = draw(mixed(math.prod(shape), st.floats(low, high, width=16), odd))
    return laid_out(torch.tensor(values, dtype=dtype).reshape(shape), draw(LAYOUTS))


least = st.sampled_from([1, 1, 0])
"""The smallest size of a dimension: a tensor without elements is drawn now and then."""
shapes = least.flatmap(lambda size: st.lists(st.integers(size, 4), max_size=3)).map(tuple)
full_shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)


@st.composite
def along_a_dim(draw: Draw) -> tuple[Tensor, int, int, Tensor]:
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


@st.composite
def advanced(draw: Draw) -> tuple[Tensor, list[Tensor | None]]:
    """Draw data and an index list of integers, masks and gaps that broadcast together."""
    shape = tuple(draw(st.lists(st.integers(draw(least), 3), min_size=1, max_size=3)))
    common = tuple(draw(st.lists(st.integers(1, 3), min_size=0, max_size=2)))
    listed: list[Tensor | None] = []
    while len(listed) < len(shape) and (not listed or draw(st.booleans())):
        size = shape[len(listed)]
        kind = draw(st.sampled_from(["gap", "integer", "integer", "mask"]))
        if kind == "gap":
            listed.append(None)
        elif kind == "mask":
            bits = draw(st.lists(st.booleans(), min_size=size, max_size=size))
            listed.append(torch.tensor(bits, dtype=torch.bool))
        else:
            sizes = tuple(draw(st.sampled_from([1, size])) for size in common)
            listed.append(draw(indices(sizes[draw(st.integers(0, len(sizes))) :], size)))
    return torch.ones(shape), listed


def first_bad_index(data: Tensor, listed: list[Tensor | None]) -> tuple[int, Bad]:
    """Find the first index tensor with a bad element; nothing where nothing is wrong."""
    selected, kept, found = [], [], (0, Bad())
    for at, index in enumerate(listed):
        if index is None:
            kept.append(data.shape[at])
        elif index.dtype == torch.bool:
            selected.append((sum(index.tolist()),))
        else:
            selected.append(tuple(index.shape))
            size = data.shape[at]
            bad = outside(index, -size, size)
            if size == 0:
                return 0, []
            if bad and not found[1]:
                found = (at, bad)
    try:
        common = torch.broadcast_shapes(*selected)
    except RuntimeError:
        return 0, []
    kept.extend(data.shape[len(listed) :])
    return found if math.prod(common) * math.prod(kept) else (0, [])


ints = partial(torch.tensor, dtype=torch.int32)
