"""Reports of exceptions that cudalens did not raise, in a table outside of them.

The exception itself gets a note and nothing more, so that it can still be pickled, copied and
compared.
"""

from __future__ import annotations

from cudalens.core._python import add_note, notes_of
from cudalens.core.report import Report

_MOST = 100
_by_note: dict[int, tuple[str, Report]] = {}
"""The last reports, by the ``id`` of their exception's note.

The note is kept alive here, so that no other note can have its ``id``.
"""


def attach(error: BaseException, report: Report, line: str) -> None:
    """Add a note to an exception, by which :func:`report_beside` finds the report again."""
    note = (line + " ")[:-1]  # a new object: the same text may be another exception's note
    while len(_by_note) >= _MOST:
        _by_note.pop(next(iter(_by_note)), None)
    _by_note[id(note)] = note, report
    add_note(error, note)


def replace_report(error: BaseException, report: Report) -> None:
    """Replace the report of an exception that has one."""
    for note in notes_of(error):
        if id(note) in _by_note:
            _by_note[id(note)] = note, report


def report_beside(error: BaseException | None) -> Report | None:
    """Return the report of an exception, ``None`` without one or after 100 newer reports."""
    for note in () if error is None else notes_of(error):
        if id(note) in _by_note:
            return _by_note[id(note)][1]
    return None
