"""Which silent findings were told already: one line of a loop gives one report, not thousands."""

from __future__ import annotations

import sys
from types import CodeType
from weakref import WeakKeyDictionary

from cudalens.core.report_types import Violation
from cudalens.guards.process import PROCESS
from cudalens.source.files import is_user_file

_Places = WeakKeyDictionary[CodeType, set[tuple[int, str, str]]]

_told: WeakKeyDictionary[object, _Places] = WeakKeyDictionary()
"""For each check, and for the guards as installed where no check listens.

A cell that is run again is new code, and is told of again.
"""


def is_repeated(violation: Violation) -> bool:
    """Tell whether the running instruction of the user's has met this finding before."""
    frame = sys._getframe(1)
    while not is_user_file(frame.f_code.co_filename):
        if frame.f_back is None:
            return False  # a thread of autograd's own: nobody knows which line it is
        frame = frame.f_back
    places = _told.setdefault(PROCESS.audience, WeakKeyDictionary())
    met = places.setdefault(frame.f_code, set())
    here = frame.f_lasti, violation.guard, violation.argument
    if here in met:
        return True
    met.add(here)
    return False
