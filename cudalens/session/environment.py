"""``CUDALENS=on|fast|nan|nan=strict|deferred`` in the environment: a whole process is checked."""

from __future__ import annotations

import atexit
import sys
from functools import partial

from cudalens.session import process
from cudalens.session.options import MODES
from cudalens.session.session import CheckSession


def begin(mode: str) -> None:
    """Check this process until it ends; print one line for a word that ``MODES`` does not have.

    ``fast`` and ``deferred`` install the guards as :func:`cudalens.install` does; the
    others open a block that lasts as long as the process, and print its report at the end.
    """
    if mode in ("fast", "deferred"):
        process.install(deferred=mode == "deferred")
    elif mode in MODES:
        session = CheckSession(**MODES[mode]).open()
        session.show_early = partial(_print_report, session)
        atexit.register(_end, session)
    else:
        print(f"cudalens: CUDALENS={mode!r} is none of {', '.join(MODES)}", file=sys.stderr)


def _end(session: CheckSession) -> None:
    # There Python has stored the exception that it has printed, and that ends the program.
    session.close(getattr(sys, "last_value", None))
    if not session.is_shown_early:
        _print_report(session)


def _print_report(session: CheckSession) -> None:
    if session.report is not None:
        print(session.report.to_text(), file=sys.stderr)
