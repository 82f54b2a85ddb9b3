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
        self._extremes: dict[tuple[Any, ...], list[float]] = {}

    def note(
        self, frame: FrameType, site: RawSite, values: Sequence[tuple[str, float, float]]
    ) -> None:
        """Note what was read in a call: argument, smallest and largest value of each."""
        caller = caller_of(frame) if frame.f_code.co_filename in _PASSING else frame
        place, counted = _place(caller, site), set()
        for argument, low, high in values:
            seen = self._extremes.setdefault((place, argument), [0, low, high])
            if argument not in counted:  # several guards may have looked at it
                counted.add(argument)
                seen[0] += 1
            seen[1], seen[2] = min(seen[1], low), max(seen[2], high)

    def find(
        self, caller: FrameType | None, site: RawSite, argument: str
    ) -> dict[str, float] | None:
        """Return what earlier calls from a place gave to an argument, ``None`` without any."""
        values = self._extremes.get((_place(caller, site), argument))
        return None if values is None else dict(zip(("calls", "min", "max"), values, strict=True))


def caller_of(frame: FrameType | None) -> FrameType | None:
    """Return the frame that made a call, given that which called the mode."""
    while frame is not None and frame.f_code.co_filename == _MODE:
        frame = frame.f_back  # of another recorder
    if frame is None or frame.f_code.co_filename != _DETOUR or frame.f_back is None:
        return frame
    return frame.f_back.f_back  # a function written in Python asks its modes


def _place(caller: FrameType | None, site: RawSite) -> tuple[Any, ...]:
    """Return the instruction that made a call, the user's line and the module."""
    shared = shared_site(site)
    line = site[:2] if isinstance(site, tuple) else shared and (shared.code, shared.lasti)
    module = None if shared is None else shared.module
    call = (None, 0) if caller is None else (caller.f_code, caller.f_lasti)
    return *call, line, id(module and module())
