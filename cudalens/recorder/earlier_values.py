"""Values that guards have read in earlier calls of a line: evidence for every cause rule."""

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
    """Number of calls, smallest and largest value by the place of a call and its argument."""

    def __init__(self) -> None:
        self._extremes: dict[tuple[Any, ...], list[Any]] = {}
        """Calls, smallest, largest, number of the last call, and what its key numbers."""

    def note(
        self,
        frame: FrameType,
        site: RawSite,
        values: Sequence[tuple[str, float, float]],
        number: int,
    ) -> None:
        """Note what was read in a call: argument, smallest and largest value of each.

        Args:
            number: of the call.
        """
        caller = caller_of(frame) if frame.f_code.co_filename in _PASSING else frame
        place, codes = _place(caller, site)
        for argument, low, high in values:
            seen = self._extremes.get((place, argument))
            if seen is None:
                self._extremes[place, argument] = [1, low, high, number, codes]
                continue
            if seen[3] != number:  # several guards may have looked at it
                seen[0] += 1
                seen[3] = number
            if low < seen[1] or high > seen[2]:
                seen[1], seen[2] = min(seen[1], low), max(seen[2], high)

    def find(self, caller: FrameType | None, site: RawSite, argument: str) -> dict[str, Any] | None:
        """Return what earlier calls from a place gave to an argument, ``None`` without any.

        Where the user's own line called the module, the calls of all modules count: ``modules``
        has each of the others with its calls, smallest and largest value.
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
    """Return whether a line of the user's called the module that runs, and no library's."""
    shared = shared_site(site)
    outer = None if shared is None else shared.outer
    if shared is None or outer is None:
        return True
    return (shared.code, shared.lasti) != (outer.code, outer.lasti)


def caller_of(frame: FrameType | None) -> FrameType | None:
    """Return the frame that made a call, given that which called the mode."""
    while frame is not None and frame.f_code.co_filename in _PASSING:
        if frame.f_code.co_filename == _DETOUR:
            frame = frame.f_back  # a function written in Python asks its modes
        frame = None if frame is None else frame.f_back
    return frame


def _place(caller: FrameType | None, site: RawSite) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """Return the instruction that made a call, the user's line and the module, all as numbers.

    Code itself is slow to hash.  Its number is its own for as long as the code lives.

    Returns:
        the numbers, and what they are of: code, code, and a reference to the module.
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
