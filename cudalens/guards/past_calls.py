"""What is kept of a call while its check is pending, and what is told of it once it is bad.

The tensors at fault are kept alive while there is room (``pending.KEPT_BYTES``), the others are
not: a report shows those that live and are unchanged, and says what is gone.

Not here: which calls are looked at later, and with which values they go on (``deferred.py``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core.report_types import Bounds, Offenders, Violation
from cudalens.guards._base import Guard
from cudalens.guards._ranges import extremes, format_interval
from cudalens.guards.captured import CAPTURED
from cudalens.guards.engine import Between, Within
from cudalens.guards.pending import PENDING

MAX_FRAMES = 150
_BACKWARD = "_engine_run_backward"

StackLine = tuple[CodeType, int]
"""The code of a frame and its instruction, which hold no variable."""


@dataclass(frozen=True, kw_only=True)
class PastCall:
    """What is known of a call that was made some time ago."""

    stack: tuple[StackLine, ...]
    """Outermost first."""
    in_backward: bool
    forward: tuple[StackLine, ...] = ()
    """For a call in backward: where the forward op was called, where that is known."""
    is_whole: bool = True
    """Whether every tensor that it was given lives, unchanged as far as that is known."""
    written: tuple[str, ...] = ()
    """The arguments that were written to with values in place of the bad ones."""
    limits: tuple[str, ...] = ()


Tell = Callable[[Any, Guard, Violation, dict[str, Any], PastCall], BaseException | None]
"""Reports a finding of a past call: its op, the guard, what was found, and the arguments by their
names in the schema, ``None`` for a tensor that is gone."""


class _Kept:
    """One tensor of a past call: the tensor itself where there is room, else while it lives."""

    __slots__ = ("device", "dtype", "held", "shape", "stride", "version", "weak")

    def __init__(self, tensor: Tensor) -> None:
        self.held: Tensor | None = None
        self.weak = ref(tensor)
        self.version = None if tensor.is_inference() else tensor._version
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.stride = tensor.stride() if is_strided(tensor) else ()

    @property
    def tensor(self) -> Tensor | None:
        """Return the tensor while it lives and nobody is known to have written to it."""
        tensor = self.weak() if self.held is None else self.held
        if tensor is None or (self.version is not None and tensor._version != self.version):
            return None
        return tensor

    @property
    def form(self) -> Tensor:
        """Return the tensor, else one of the same form, whose values say nothing."""
        if (tensor := self.tensor) is not None:
            return tensor
        try:
            return torch.empty_strided(
                self.shape, self.stride, dtype=self.dtype, device=self.device
            )
        except RuntimeError:  # no memory for it
            return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)


class PendingCall:
    """A call that was made while its values were not known yet."""

    __slots__ = (
        "_kept",
        "_told",
        "_values",
        "in_backward",
        "is_deterministic",
        "op",
        "stack",
        "tell",
    )

    def __init__(self, op: Any, values: Mapping[str, Any], tell: Tell) -> None:
        self.op = op
        self.tell = tell
        self.in_backward = _torch.current_node() is not None
        self.is_deterministic = torch.are_deterministic_algorithms_enabled()
        self.stack = running_lines()
        self._values: dict[str, Any] = {}
        self._kept: dict[int, _Kept] = {}
        """By the ``id`` that the tensor had."""
        self._told: set[Guard] = set()
        for name, value in values.items():
            items = [
                self.kept(item) if isinstance(item, Tensor) else item for item in items_of(value)
            ]
            self._values[name] = items if isinstance(value, (list, tuple)) else items[0]

    def kept(self, tensor: Tensor) -> _Kept:
        """Return what is kept of a tensor of the call, while the call is being made."""
        kept = self._kept.get(id(tensor))
        if kept is None:
            kept = self._kept[id(tensor)] = _Kept(tensor)
        return kept

    def hold(self, tensor: Tensor) -> int:
        """Keep a tensor alive where there is room; return how many bytes that takes."""
        kept = self._kept[id(tensor)]
        if kept.held is not None:
            return 0
        size = tensor.untyped_storage().nbytes()
        # What is captured stays pending for good.
        if not PENDING.has_room(size) or _torch.is_capturing():
            return 0
        kept.held = tensor
        return size

    # --- a finding --------------------------------------------------------------------------------

    def found(
        self, guard: Guard, is_replaced: bool, deciding: list[_Kept], smallest: Any, largest: Any
    ) -> BaseException | None:
        """Return what is to be raised for extremes that are out of bounds, if they are.

        Args:
            deciding: the tensor at fault, and those whose values decide too.
        """
        # They choose the kernel, and so what it takes.
        with _torch.deterministic(self.is_deterministic):
            if guard in self._told and CAPTURED.replay is None:
                return None
            limits: list[str] = []
            # As the guard's function takes them: the form of a tensor is enough for it.
            values = [self._argument(name, attrgetter("form")) for name in guard.parameters]
            is_whole = all(item.tensor is not None for item in self._kept.values())
            is_intact = all(item.tensor is not None for item in deciding)
            if is_intact and _is_as_seen(deciding[0], smallest, largest):
                violation = guard.check(*values)
            else:
                violation = _by_extremes(guard, values, deciding[0], smallest, largest)
                limits.append(
                    "the values at fault were written to, or freed, before the check came back: "
                    "the smallest and the largest of them are known alone"
                )
            if violation is None or self._is_told(deciding[0]):
                return None
            self._told.add(guard)
            arguments = {name: self._argument(name, attrgetter("tensor")) for name in self._values}
            if not is_whole:
                limits.append("tensors of the call that are gone, or have changed, are not shown")
            past = PastCall(
                stack=self.stack,
                in_backward=self.in_backward,
                is_whole=is_whole and not limits,
                written=tuple(_written(self.op)) if is_replaced else (),
                limits=tuple(limits),
            )
            return self.tell(self.op, guard, violation, arguments, past)

    def _is_told(self, kept: _Kept) -> bool:
        """Return whether backward only read again what its forward call has been told of."""
        tensor = kept.tensor
        if tensor is None:
            return False
        place = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape
        is_known = (*place, kept.version) in PENDING.told
        PENDING.told.add((*place, kept.version))
        return is_known and self.in_backward

    def _argument(self, name: str, of: Callable[[_Kept], Tensor | None]) -> Any:
        """Return an argument with what ``of`` gives for each of its tensors."""
        value = self._values[name]
        items = [of(item) if isinstance(item, _Kept) else item for item in items_of(value)]
        return items if isinstance(value, list) else items[0]


def items_of(value: Any) -> Sequence[Any]:
    """Return the items of an argument that is a list, else the argument alone."""
    return value if isinstance(value, (list, tuple)) else [value]


def _is_as_seen(kept: _Kept, smallest: Any, largest: Any) -> bool:
    """Return whether a tensor still has the extremes that it had when the call was made."""
    tensor = kept.tensor
    if tensor is None:
        return False
    least, most = extremes(tensor)
    # Exceptions such as ignore_index may have been left out of the slot.
    is_same = _agrees(least, smallest) or least < smallest
    return is_same and (_agrees(most, largest) or most > largest)


def _agrees(now: Any, then: Any) -> bool:
    return bool(now == then or (now != now and then != then))  # noqa: PLR0124  NaN


def _by_extremes(
    guard: Guard, values: Sequence[Any], kept: _Kept, smallest: Any, largest: Any
) -> Violation | None:
    """Describe a finding by the extremes alone; ``None`` where they prove nothing."""
    need = guard.requires(*values)
    if isinstance(need, list):
        bad = (item for item in need if not item.low <= smallest <= largest <= item.high)
        need = next(bad, None)
    if not isinstance(need, (Within, Between)) or not _is_exact(need, values):
        return None
    if isinstance(need, Between):
        if need.dtype is not None:
            pair = torch.tensor([smallest, largest], dtype=kept.dtype).to(need.dtype)
            smallest, largest = pair.tolist()
            if need.low <= smallest and largest <= need.high:
                return None
        place, bounds = f"the interval {need.bounds.text}", need.bounds
        related = size = dim = item = None
    else:
        also = () if need.also_allowed is None else ((need.also_allowed, need.also_allowed_name),)
        text = format_interval(need.low, need.high, also)
        bounds = Bounds(min=need.low, max=need.high, text=text)
        place, related, size, dim, item = need.where, need.of, need.size, need.dim, need.item
    worst = smallest if not need.low <= smallest else largest
    part = "" if item is None else f"[{item}]"
    return Violation(
        argument=need.argument,
        headline=f"{{argument}}{part} held {worst}, which is outside {place}",
        explanation=need.why,
        offenders=Offenders(total=math.prod(kept.shape)),
        bounds=bounds,
        is_index=isinstance(need, Within),
        related=related,
        size=size,
        dim=dim,
        list_position=item,
        is_silent=guard.is_silent,
        is_replay_safe=False,
    )


def _written(op: Any) -> list[str]:
    """Return the arguments that an op writes to."""
    return [
        argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def running_lines() -> tuple[StackLine, ...]:
    """Return the lines that run, outermost first; in autograd's threads those of who waits."""
    lines = _lines(sys._getframe(1))
    if any(not _is_ours(code) for code, _ in lines):
        return lines
    for frame in list(sys._current_frames().values()):
        if frame.f_code.co_name == _BACKWARD:
            return _lines(frame)
    return lines


_PACKAGE = __file__.rpartition("guards")[0]


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_PACKAGE) or code.co_filename.endswith("_ops.py")


def _lines(frame: FrameType | None) -> tuple[StackLine, ...]:
    found: list[StackLine] = []
    while frame is not None and len(found) < MAX_FRAMES:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    found.reverse()
    return tuple(found)


def _is_exact(need: Within | Between, values: Sequence[Any]) -> bool:
    """Return whether extremes out of bounds are a finding, whatever other values are."""
    if isinstance(need, Between):
        return True
    # A mask that selects nothing: no index is read.
    is_masked = need.skip_if is not None and any(map(_is_mask, values))
    if need.mask is not None or is_masked:
        return False
    return (
        need.also_allowed is None
        or need.masks_first
        or need.low - 1 <= need.also_allowed <= need.high
    )


def is_strided(tensor: Tensor) -> bool:
    """Return whether an empty tensor of the same form can be made."""
    return tensor.layout == torch.strided and not tensor.is_quantized


def _is_mask(value: object) -> bool:
    return any(
        isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)
        for item in items_of(value)
    )
