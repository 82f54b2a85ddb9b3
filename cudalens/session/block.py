"""``cudalens.check``: a checked block of Python code that no front end stands around."""

from __future__ import annotations

import warnings
from functools import partial
from types import TracebackType
from typing import Any

from cudalens.core.errors import SilentFindingWarning
from cudalens.diagnosis import fallback
from cudalens.diagnosis.diagnose import message
from cudalens.session.session import CheckSession


class CheckedBlock(CheckSession):
    """A session whose report nobody shows: what raises nothing is a warning of Python's."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the session; the exception goes on."""
        super().__exit__(kind, error, traceback)
        report = self.report
        if error is None and report is not None and report.kind == "silent":
            text = self._attempt("message", partial(message, report)) or fallback.sentence(report)
            warnings.warn(text, SilentFindingWarning, stacklevel=2)


def check(**options: Any) -> CheckedBlock:
    """Check a block of code as ``%%cudacheck`` checks a cell; options as keyword arguments.

    Args:
        options: those of :class:`CheckSession`; ``--no-sync`` is ``no_sync=True`` (``sync=False``).

    Returns:
        a context manager; its ``report`` is the :class:`Report`, ``None`` when nothing is wrong.
    """
    for name in [item for item in options if item.startswith("no_")]:
        options[name.removeprefix("no_")] = not options.pop(name)
    return CheckedBlock(**options)
