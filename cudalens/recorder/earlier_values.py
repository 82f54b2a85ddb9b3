"""The range of values that guards have read in earlier calls of a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from cudalens.recorder.sites import RawSite, shared_site

_MODE = str(Path(__file__).with_name("mode.py"))
_DETOUR = torch.overrides.__file__
_PASSING = frozenset([_MODE, _DETOUR])


class EarlierValues:
    """Number of calls, smallest and largest value, by place of the call and argument."""

    def __init__(self) -> None:
        self._extremes: dict[tuple[Any, ...], list[Any]] = {}
        """``[calls, smallest, largest, number of the last call, objects behind the key's ids]``."""

    def note(
        self,
        frame: FrameType,
        site: RawSite,
        values: Sequence[tuple[str, float, float]],
        number: int,
    ) -> None:
        """Add what guards have read in one call.

        Args:
            frame: the frame that made the call, or one of ours below it.
            values: argument, smallest and largest value.
            number: the number of the call.
        """
        caller = caller_of(frame) if frame.f_code.co_filename in _PASSING else frame
        place, codes = _place(caller, site)
        for argument, low, high in values:
            seen = self._extremes.get((place, argument))
            if seen is None:
                # A list, because each later call changes it in place.
                self._extremes[place, argument] = [1, low, high, number, codes]
                continue
            if seen[3] != number:  # else another guard has read it in the same call
                seen[0] += 1
                seen[3] = number
            if low < seen[1] or high > seen[2]:
                seen[1], seen[2] = min(seen[1], low), max(seen[2], high)

    def find(self, caller: FrameType | None, site: RawSite, argument: str) -> dict[str, Any] | None:
        """Return the range of an argument in earlier calls from a place, ``None`` without any.

        If the user's own line called the module, the calls of all modules on it count: ``modules``
        lists each other module with its calls, smallest and largest value.
        """
        place = _place(caller, site)[0]
        is_of_line = place[0] == place[2] or _is_called_by_user(site)
        entries = [
            (key[-1], values)
            for (key, name), values in self._extremes.items()
            if name == argument and key[:-1] == place[:-1] and (is_of_line or key == place)
        ]
        if not entries:
            return None
        calls, lows, highs = zip(*(values[:3] for _, values in entries), strict=True)
        others = [values for number, values in entries if number != place[-1]]
        return {
            "calls": sum(calls),
            "min": min(lows),
            "max": max(highs),
            "modules": [(it[4][2] and it[4][2](), *it[:3]) for it in others],
        }


def _is_called_by_user(site: RawSite) -> bool:
    """Return whether the user's own line called the running module, not a library."""
    shared = shared_site(site)
    outer = None if shared is None else shared.outer
    if shared is None or outer is None:
        return True
    return (shared.code, shared.lasti) != (outer.code, outer.lasti)


def caller_of(frame: FrameType | None) -> FrameType | None:
    """Return the user's frame that made a call, given the frame that called the mode."""
    while frame is not None and frame.f_code.co_filename in _PASSING:
        if frame.f_code.co_filename == _DETOUR:
            frame = frame.f_back  # behind it: the torch function written in Python
        frame = None if frame is None else frame.f_back
    return frame


def _place(caller: FrameType | None, site: RawSite) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Return the instruction that made a call, the user's line and the module, as a tuple of ids.

    Hashing a code object is slow.  Its ``id`` is unique while it lives: keep the object, too.

    Returns:
        The key, and the objects behind its ids: code, code, and a reference to the module.
    """
    if isinstance(site, tuple):
        line, lasti, shared = site
    elif site is None:
        line, lasti, shared = None, 0, None
    else:
        line, lasti, shared = site.code, site.lasti, site
    module = None if shared is None else shared.module
    code, at = (None, 0) if caller is None else (caller.f_code, caller.f_lasti)
    return (id(code), at, id(line), lasti, id(module and module())), (code, line, module)
