"""A training loop of a framework under the guards, with its report beside the checkpoints.

The callbacks open the check when training begins, and close it when training ends.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from cudalens.core.report import Report
from cudalens.session.session import CheckSession


class _Session(CheckSession):
    """Saves each finding at once: frameworks do not call callbacks after an exception."""

    def __init__(self, write: Callable[[Report], None], **options: Any) -> None:
        super().__init__(**options)
        self._write = write

    def add_finding(self, report: Report) -> None:
        """Store a finding, and write it to its file."""
        super().add_finding(report)
        self._write(report)


class TrainingCheck:
    """The guards around one training, and the folder of its report.

    Args:
        deferred: use guards that never wait for the device at a call.
    """

    # Frameworks call no callback after an exception: the next training closes what is still open.
    _open: ClassVar[weakref.WeakSet[TrainingCheck]] = weakref.WeakSet()

    def __init__(self, *, deferred: bool = True) -> None:
        self._options = {"deferred": True} if deferred else {"fast": True}
        self._session: _Session | None = None
        self._thread = 0
        self.written: list[Path] = []
        """The files of the last training."""

    def open(self, folder: str | Path, place: Callable[[], tuple[int, int, int]]) -> None:
        """Turn the guards on, and close a training that an exception ended in this thread.

        Args:
            folder: the folder of the checkpoints.
            place: returns the step, the rank and the number of ranks, which name a report.
        """
        # A list, because `close` removes from the set.
        for other in list(TrainingCheck._open):
            # Another thread may be in the middle of a training of its own.
            if other._thread == threading.get_ident():
                other.close()
        self.written = []
        self._thread = threading.get_ident()
        # No reference to this object: the guards must go when it is deleted, at the latest.
        write = partial(_write, self.written, Path(folder), place)
        session = _Session(write, **self._options)
        session.open()
        self._session = session
        TrainingCheck._open.add(self)
        # After an exception, a framework may do no more than delete the callback and the trainer.
        weakref.finalize(self, session.close)

    def close(self, error: BaseException | None = None) -> None:
        """Turn the guards off; does nothing if they are off.

        Raises:
            DeviceAssertError: a deferred finding that was not raised yet.
        """
        session, self._session = self._session, None
        TrainingCheck._open.discard(self)
        if session is not None:
            session.__exit__(None if error is None else type(error), error, None)


def _write(
    written: list[Path], folder: Path, place: Callable[[], tuple[int, int, int]], report: Report
) -> None:
    if report.kind == "silent" and written:
        return
    step, rank, ranks = place()
    name = f"cudalens-step{step}{f'-rank{rank}' if ranks > 1 else ''}"
    for suffix in (".html", ".json"):
        path = folder / f"{name}{suffix}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            written.append(report.save(path))
        except Exception as failure:  # the finding itself is being raised
            print(f"cudalens: the report was not written to {path}: {failure}", file=sys.stderr)
            return
    print(f"cudalens: the report is in {folder / name}.html", file=sys.stderr)
