"""The report of an exception of somebody else's, kept beside it.

The exception itself gets a note and nothing more, so that it can be pickled, copied and compared as
if nobody had looked at it.
"""

from __future__ import annotations

from cudalens.core._python import add_note, notes_of
from cudalens.core.report import Report

_MOST = 100
_by_note: dict[int, tuple[str, Report]] = {}
"""The last reports, by the ``id`` of the note of their exception, which is kept: no other note has
that number."""


def attach(error: BaseException, report: Report, line: str) -> None:
    """Add a note to an exception, by which :func:`report_beside` finds the report again."""
    note = (line + " ")[:-1]  # an object of its own: the text alone may be that of another note
    while len(_by_note) >= _MOST:
        _by_note.pop(next(iter(_by_note)), None)
    _by_note[id(note)] = note, report
    add_note(error, note)


def replace_report(error: BaseException, report: Report) -> None:
    """Let an exception that has a report have another."""
    for note in notes_of(error):
        if id(note) in _by_note:
            _by_note[id(note)] = note, report


def report_beside(error: BaseException | None) -> Report | None:
    """Return the report of an exception, ``None`` where it has none or where that is long ago."""
    for note in () if error is None else notes_of(error):
        if id(note) in _by_note:
            return _by_note[id(note)][1]
    return None
