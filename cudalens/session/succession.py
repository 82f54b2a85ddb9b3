"""Checked blocks in sequence: the recorder of one hands its knowledge on to the next.

Only while no unchecked code runs in between that could write to a tensor.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from types import FrameType
from typing import Any

from cudalens.source.files import cell_number, is_user_file


class Succession:
    """The sequence of checked blocks of this process."""

    def __init__(self) -> None:
        self._earlier: Any = None
        """The calls that the last block has handed on."""
        self._open = 0
        self.sees_cells = False
        """True while a shell reports each unchecked cell before it runs."""

    def begin(self, recorder: Any) -> None:
        """Pass on what the last block left; without a recorder, it is lost."""
        self._open += 1
        earlier, self._earlier = self._earlier, None
        if earlier is not None and recorder is not None:
            recorder.follow(earlier)

    def end(self, recorder: Any) -> None:
        """Keep what a block hands on.

        Args:
            recorder: ``None`` if unknown code may run after the block.
        """
        self._open = max(0, self._open - 1)
        self._earlier = None
        if recorder is not None and not self._open:
            self._earlier = recorder.handed_on()

    def forget(self) -> None:
        """Drop what was handed on."""
        self._earlier = None

    def before_unchecked(self, statements: Sequence[ast.stmt]) -> None:
        """Drop what was handed on if the next, unchecked cell may write to a tensor."""
        if self._earlier is None:
            return
        from cudalens.source.unchecked import is_next_checked

        if is_next_checked(statements) is False:
            self.forget()

    def is_followed(self, frame: FrameType | None, error: BaseException | None) -> bool:
        """Return whether no unchecked code after a ``with`` block can write to a tensor.

        Args:
            frame: the frame that ends the block.
            error: the exception that leaves the block.
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
            return is_cell  # the exception ends the cell, so the next cell decides
        is_checked = is_next_checked(statements)
        return is_cell if is_checked is None else is_checked


SUCCESSION = Succession()
