"""Values that guards have read in earlier calls of a line: evidence for every cause rule."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from cudalens.recorder.sites import RawSite, shared_site

_MAX_NOTED = 1000
_MODE = str(Path(__file__).with_name("mode.py"))
_DETOUR = torch.overrides.__file__
_PASSING = frozenset([_MODE, _DETOUR])

Place = tuple[CodeType | None, int, RawSite]
"""The code and the instruction that made a call, and the user's line."""


class EarlierValues:
    """Number of calls, smallest and largest value by the place of a call and its argument."""

    def __init__(self) -> None:
        self._extremes: dict[tuple[Any, ...], list[float]] = {}
        self._noted: deque[tuple[Place, Sequence[tuple[str, float, float]]]] = deque()

    def note(
        self, frame: FrameType, site: RawSite, values: Sequence[tuple[str, float, float]]
    ) -> None:
        """Note what was read in a call: argument, smallest and largest value of each."""
        caller = caller_of(frame) if frame.f_code.co_filename in _PASSING else frame
        self._noted.append((_place(caller, site), values))
        if len(self._noted) >= _MAX_NOTED:
            self._sum_up()

    def find(
        self, caller: FrameType | None, site: RawSite, argument: str
    ) -> dict[str, float] | None:
        """Return what earlier calls from a place gave to an argument, ``None`` without any."""
        self._sum_up()
        values = self._extremes.get((*_key(_place(caller, site)), argument))
        return None if values is None else dict(zip(("calls", "min", "max"), values, strict=True))

    def _sum_up(self) -> None:
        while self._noted:
            place, values = self._noted.popleft()
            key = _key(place)
            # Several guards may have looked at one argument.
            for argument in {argument: None for argument, _, _ in values}:
                ends = [end for name, *pair in values if name == argument for end in pair]
                seen = self._extremes.setdefault((*key, argument), [0, ends[0], ends[0]])
                seen[:] = seen[0] + 1, min(seen[1], *ends), max(seen[2], *ends)


def caller_of(frame: FrameType | None) -> FrameType | None:
    """Return the frame that made a call, given that which called the mode."""
    while frame is not None and frame.f_code.co_filename == _MODE:
        frame = frame.f_back  # of another recorder
    if frame is None or frame.f_code.co_filename != _DETOUR or frame.f_back is None:
        return frame
    return frame.f_back.f_back  # a function written in Python asks its modes


def _place(caller: FrameType | None, site: RawSite) -> Place:
    return (None, 0, site) if caller is None else (caller.f_code, caller.f_lasti, site)


def _key(place: Place) -> tuple[Any, ...]:
    """Return the call's instruction, the user's line and the module of a place."""
    *call, site = place
    shared = shared_site(site)
    line = site[:2] if isinstance(site, tuple) else shared and (shared.code, shared.lasti)
    module = None if shared is None else shared.module
    return *call, line, id(module and module())
