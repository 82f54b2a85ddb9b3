"""Code of ``%time`` in a cell: it gets the file name and the line numbers of that cell.

The shell compiles it under a name of its own, ``<timed exec>``, and counts its lines from one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from cudalens.notebook import _ipython
from cudalens.notebook.statement import CellPlace


def place_timed(compiler: Any, places: Mapping[str, CellPlace | None]) -> Callable[[], None]:
    """Make a compiler use the file name and the lines of the cell for code of ``%time``.

    Python looks ``__call__`` up in the class.  The class of this one object is replaced, as other
    shells have compilers of the same class.

    Args:
        places: the place of each text that ``%time`` has read; looked up at each call.

    Returns:
        a function that restores the class.
    """
    kind = type(compiler)

    def compiled(compiler: Any, source: Any, filename: str, *args: Any, **options: Any) -> Any:
        if filename.startswith("<timed "):  # IPython's <timed eval> and <timed exec>
            place = places.get(_ipython.text_of_time(sys._getframe()))
            if place is not None:
                place.move(source)
                filename = place.filename
        return kind.__call__(compiler, source, filename, *args, **options)

    ours = type(kind.__name__, (kind,), {"__call__": compiled, "__module__": kind.__module__})

    def undo() -> None:
        if type(compiler) is ours:
            compiler.__class__ = kind

    compiler.__class__ = ours
    return undo
