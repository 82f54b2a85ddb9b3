"""Requirements of guards, as data, and the engine that checks them on the device.

A guard's function reads shapes, dtypes and numbers, and returns a requirement.  To check good
values the engine needs one reduction and one copy to the host, or one copy of a few integers.
Positions, bounds and words are collected only for bad values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from cudalens.core.call import THREAD
from cudalens.core.device_asserts import assert_text
from cudalens.core.report_types import Bounds, Violation, format_count
from cudalens.core.tensor_values import outside
from cudalens.guards._ranges import (
    FEW,
    bad_numbers,
    extremes,
    extremes_on_host,
    lies_within,
    out_of_range,
    outside_mask,
    unexpanded,
)

INDEX_DTYPES = (torch.int64, torch.int32)
MASK_DTYPES = (torch.bool, torch.uint8)
"""An index of these dtypes is a mask, and has no bounds."""
UNIT_INTERVAL = Bounds(min=0.0, max=1.0, text="0 … 1")
NARROWED = "The kernel compares the low 32 bits alone: they are another index, and nothing asserts."
Late = Callable[..., Any]
"""A function of the guard's arguments that is called only for bad values."""
Asserts = str | Late | None
"""Key of the kernel's assertion, or a function that returns it; ``None`` if none fires."""


# Made in every guarded call. A frozen dataclass takes twice as long to make.
@dataclass(slots=True)
class Within:
    """Every element of an integer tensor is in ``[low, high]`` or equals ``also_allowed``."""

    argument: str
    """Schema name of the tensor, or of the list that contains it."""
    low: int
    high: int
    _: KW_ONLY
    item: int | None = None
    """Position in the list."""
    also_allowed: int | None = None
    also_allowed_name: str = ""
    mask: Callable[[], Tensor | None] | None = None
    """Returns bool[shape], true for elements that the kernel reads; ``None`` if torch rejects the
    call."""
    masks_first: bool = False
    """``also_allowed`` is common, so it is masked before the reduction, not only for bad values."""
    upper_bound_only: bool = False
    """Smaller values than ``low`` pass too."""
    skip_if: Late | None = None
    """Returns whether torch rejects the call or launches nothing."""
    of: str | None = None
    """Schema name of the argument that sets the bound."""
    dim: int | None = None
    unit: str = ""
    """The noun that is counted: ``row`` for "the 3 rows of …"; empty for a dimension's size."""
    whole: str = "{related}"
    place: str = ""
    """In place of unit and whole."""
    why: str
    asserts: Asserts = None
    narrows: bool | Late = False
    """The kernel compares only the low 32 bits."""
    is_replay_safe: bool = True

    @property
    def size(self) -> int:
        """The number of values in the interval from 0, or from a positive ``low``."""
        return self.high - max(self.low, 0) + 1

    @property
    def where(self) -> str:
        """What bad elements are outside of, in words."""
        if self.place:
            return self.place
        if self.unit:
            return f"the {format_count(self.size, self.unit)} of {self.whole}"
        return f"dimension {self.dim} (size {self.size}) of {self.whole}"


@dataclass(slots=True)
class Between:
    """Every element of a floating-point tensor is in ``[low, high]``; NaN does not."""

    argument: str
    low: float
    high: float
    _: KW_ONLY
    bounds: Bounds
    dtype: torch.dtype | None = None
    """The dtype that the kernel converts the elements to before it compares them."""
    why: str
    asserts: str


@dataclass(slots=True)
class Condition:
    """A condition that is no interval, with a function that checks it."""

    find: Callable[[], Violation | None]


Requirement = Within | list[Within] | Between | Condition
Need = Requirement | None
"""Result of a guard's function; ``None`` if nothing is launched or torch rejects the call."""


def checker(
    requires: Callable[..., Any], parameters: Sequence[str], is_silent: bool
) -> Callable[..., Any]:
    """Return a function of the guard's arguments that checks its requirement.

    It returns ``None`` or the :class:`Violation`, or any other result of ``requires`` as it is.
    """
    places = {name: place for place, name in enumerate(parameters)}

    # Every call of a guarded op passes here, so speed comes before form.
    @wraps(requires)
    def check(*values: Any) -> Any:
        need = requires(*values)
        if need is None:
            return None
        kind = type(need)
        if kind is Within:
            tensor = values[places[need.argument]]
            return None if fulfils(need, tensor) else _outside(need, tensor, values, is_silent)
        if kind is list:
            return _first_outside(need, values[places[need[0].argument]], values, is_silent)
        if kind is Between:
            return _not_between(need, values[places[need.argument]])
        return need.find() if kind is Condition else need

    return check


# --- integers in an interval ----------------------------------------------------------------------


# Every call of a guarded op passes here, so speed comes before form.
def fulfils(need: Within | Between, tensor: Tensor) -> bool:
    """Return whether one read proves that the values of a tensor are good.

    With ``also_allowed`` values among them, a second read may be needed.
    """
    if isinstance(need, Between):
        return _lies_between(need, tensor)
    count = tensor.numel()
    if count == 0:
        return True
    low, high, also_allowed = need.low, need.high, need.also_allowed
    if count <= FEW and need.mask is None:
        # Reduce a few values in Python: inside a training step, each torch call costs more.
        host = tensor if tensor.is_cpu else tensor.cpu()
        least, most = extremes_on_host(host, count)
        if also_allowed is not None and (most > high or least < low):
            values = {*host.reshape(-1).tolist()}
            values.discard(also_allowed)
            if not values:
                return True
            least, most = min(values), max(values)
        return _lie_within(need, least, most)
    if need.masks_first:
        if also_allowed is not None and not low <= also_allowed <= high:
            if high < low:
                return extremes(tensor) == (also_allowed, also_allowed)
            # Replace `also_allowed` by a good value, so that one reduction checks the others.
            tensor = tensor.masked_fill(tensor == also_allowed, low)
        if need.mask is not None:
            read = need.mask()
            if read is None:
                return True
            tensor = tensor.masked_fill(~read, low)
    smallest, largest = extremes(tensor)
    # `low` may be the replacement, not a value of the user's: then the extreme is not recorded.
    return _lie_within(need, smallest, largest, is_exact=not need.masks_first or smallest > low)


def _lie_within(need: Within, least: int, most: int, is_exact: bool = True) -> bool:
    """Return whether the extremes of a tensor are good, and pass good ones to open recorders."""
    if most > need.high or (least < need.low and not need.upper_bound_only):
        return False
    if is_exact and (lists := THREAD.running.extremes):
        name = need.argument if need.item is None else f"{need.argument}[{need.item}]"
        for read in lists:
            read.append((name, least, most))
    return True


def _first_outside(
    needs: list[Within], tensors: Any, values: Sequence[Any], is_silent: bool
) -> Violation | None:
    """Check several tensors of a list; those on one device share one buffer and one copy."""
    items = [tensors[need.item] for need in needs]
    are_few = not [item for item in items if not item.is_cpu or item.numel() > FEW]
    if are_few or len(needs) == 1:
        for need, tensor in zip(needs, items, strict=True):
            if not fulfils(need, tensor):
                return _outside(need, tensor, values, is_silent)
        return None
    for need, tensor, (smallest, largest) in zip(needs, items, _all_extremes(items), strict=True):
        if not _lie_within(need, smallest, largest):
            return _outside(need, tensor, values, is_silent)
    return None


def _all_extremes(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(number)
    extremes: dict[int, tuple[int, int]] = {}
    for members in groups.values():
        buffer = tensors[members[0]].new_empty(len(members), 2)
        for number, row in zip(members, buffer.unbind(), strict=True):
            torch.aminmax(unexpanded(tensors[number]), out=row.unbind())
        extremes.update(zip(members, buffer.tolist(), strict=True))
    return [extremes[number] for number in range(len(tensors))]


def _outside(
    need: Within, tensor: Tensor, values: Sequence[Any], is_silent: bool
) -> Violation | None:
    """Return the violation, or ``None`` if all values outside the interval are allowed."""
    if need.skip_if is not None and need.skip_if(*values):
        return None
    # uint8 elements are compared as int64: -100 must not become 156.
    wide = tensor if tensor.dtype in INDEX_DTYPES else tensor.to(torch.int64)
    bad = wide > need.high if need.upper_bound_only else outside(wide, need.low, need.high)
    if need.also_allowed is not None:
        bad &= wide != need.also_allowed
    read = None if need.mask is None else need.mask()
    bad = bad if read is None else bad & read
    has_exceptions = need.also_allowed is not None or need.mask is not None
    if has_exceptions and not bool(bad.any()):
        return None
    narrows = need.narrows(*values) if callable(need.narrows) else need.narrows
    is_narrowed = narrows and lies_within(tensor.to(torch.int32), 0, need.high)
    key = need.asserts(*values) if callable(need.asserts) else need.asserts
    also: tuple[tuple[int, str], ...] = ()
    if need.also_allowed is not None and not need.low <= need.also_allowed <= need.high:
        also = ((need.also_allowed, need.also_allowed_name),)
    return out_of_range(
        tensor,
        argument=need.argument,
        low=need.low,
        high=need.high,
        place=need.where,
        why=NARROWED if is_narrowed else need.why,
        device_text=None if is_narrowed or key is None else assert_text(key),
        also=also,
        bad=bad,
        related=need.of,
        size=need.size,
        unit=need.unit,
        dim=need.dim,
        list_position=need.item,
        is_silent=is_silent,
        is_replay_safe=need.is_replay_safe,
    )


def violation(need: Within | Between, tensor: Tensor, *, is_silent: bool) -> Violation:
    """Return the violation of a requirement whose late functions are resolved."""
    violation = (
        _not_between(need, tensor)
        if isinstance(need, Between)
        else _outside(need, tensor, (), is_silent)
    )
    assert violation is not None
    return violation


# --- values that are in bounds --------------------------------------------------------------------


def interval(need: Within | Between) -> tuple[float, float, Any]:
    """Return the interval for the extremes of a good tensor, and an exception to it.

    The exception is a value that is allowed outside the interval, a dtype that the values are
    converted to, or ``None``.  An ``also_allowed`` right below the interval widens it by one.
    """
    if isinstance(need, Between):
        return need.low, need.high, need.dtype
    low: float = -math.inf if need.upper_bound_only else need.low
    marked = need.also_allowed
    if marked is None or low <= marked <= need.high:
        return low, need.high, None
    if marked == low - 1:
        return marked, need.high, None
    return low, need.high, marked


def replacer(need: Within | Between, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a function that clamps values into the bounds; it does not change a good tensor.

    Args:
        dtype: the dtype of the tensors; the interval must contain a value of it.
    """
    low, high, marked = interval(need)
    if isinstance(need, Between):

        def clamp_numbers(tensor: Tensor) -> Tensor:
            # By default `nan_to_num` replaces infinities, too, which `clamp_` must still see.
            finite = tensor.nan_to_num(nan=low, posinf=math.inf, neginf=-math.inf)
            return finite.clamp_(low, high)

        return clamp_numbers
    limit = torch.iinfo(dtype)
    # torch rejects a bound that the dtype cannot hold, and no value lies beyond it.
    floor = None if low < limit.min else low
    ceiling = None if high > limit.max else high

    def clamp(tensor: Tensor) -> Tensor:
        if floor is None and ceiling is None:
            return tensor
        clamped = tensor.clamp(floor, ceiling)
        return clamped if marked is None else clamped.masked_fill_(tensor == marked, marked)

    return clamp


def in_bounds(need: Within | Between, tensor: Tensor) -> Tensor:
    """Return a tensor clamped into the bounds; a good tensor is unchanged.

    Args:
        tensor: a tensor with a dtype that the interval contains a value of.
    """
    return replacer(need, tensor.dtype)(tensor)


# --- numbers in an interval -----------------------------------------------------------------------


def _lies_between(need: Between, tensor: Tensor) -> bool:
    if tensor.numel() == 0:
        return True
    smallest, largest = extremes(tensor)
    if need.dtype is not None and need.dtype != tensor.dtype:
        # Rounding is monotonic, so it is enough to convert the two extremes.
        smallest, largest = torch.tensor([smallest, largest], dtype=need.dtype).tolist()
    # A NaN is both extremes, and no comparison with it is true.
    if not (need.low <= smallest and largest <= need.high):
        return False
    for read in THREAD.running.extremes:
        read.append((need.argument, smallest, largest))
    return True


def _not_between(need: Between, tensor: Tensor) -> Violation | None:
    if _lies_between(need, tensor):
        return None
    return bad_numbers(
        tensor,
        outside_mask(tensor.to(need.dtype or tensor.dtype), need.low, need.high),
        argument=need.argument,
        bounds=need.bounds,
        why=need.why,
        device_text=assert_text(need.asserts),
    )
