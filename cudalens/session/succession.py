"""Checked blocks one after another: what the recorder of one hands on to that of the next.

It is handed on only while no unchecked code runs that could write to a tensor unseen.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from types import FrameType
from typing import Any

from cudalens.source.files import cell_number, is_user_file


class Succession:
    """The checked blocks of this process: no object of the user's leads from one to the next."""

    def __init__(self) -> None:
        self._earlier: Any = None
        """What the last block has handed on."""
        self._open = 0
        self.sees_cells = False
        """True while a shell tells of each cell that runs unchecked."""

    def begin(self, recorder: Any) -> None:
        """Take what was handed on; a block without a recorder can only lose it."""
        self._open += 1
        earlier, self._earlier = self._earlier, None
        if earlier is not None and recorder is not None:
            recorder.follow(earlier)

    def end(self, recorder: Any) -> None:
        """Keep what a block hands on.

        Args:
            recorder: ``None`` where what runs after the block is not known.
        """
        self._open = max(0, self._open - 1)
        self._earlier = None
        if recorder is not None and not self._open:
            self._earlier = recorder.handed_on()

    def forget(self) -> None:
        """Forget what was handed on."""
        self._earlier = None

    def before_unchecked(self, statements: Sequence[ast.stmt]) -> None:
        """Forget what was handed on if a cell that is about to run may write to a tensor."""
        if self._earlier is None:
            return
        from cudalens.source.unchecked import is_next_checked

        if is_next_checked(statements) is False:
            self.forget()

    def is_followed(self, frame: FrameType | None, error: BaseException | None) -> bool:
        """Return whether after a ``with`` block nothing can write to a tensor unseen.

        Args:
            frame: which calls the end of the block.
            error: that leaves the block.
        """
        from cudalens.source.unchecked import is_next_checked, statements_after

        while frame is not None and not is_user_file(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return False
        filename = frame.f_code.co_filename
        found = statements_after(filename, frame.f_lineno)
        if found is None:
            return False
        statements, is_top = found
        is_cell = is_top and self.sees_cells and cell_number(filename) is not None
        if error is not None:
            return is_cell  # it ends the cell
        is_checked = is_next_checked(statements)
        return is_cell if is_checked is None else is_checked


SUCCESSION = Succession()
