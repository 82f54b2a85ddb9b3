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
    """Let a compiler give code of ``%time`` the name and the lines of its cell.

    Python looks a call up in the class.  That of this one object is replaced, as other shells
    have compilers of the same class.

    Args:
        places: by the text that ``%time`` has read, the place of that text; read at each call.

    Returns:
        a function that undoes it.
    """
    kind = type(compiler)

    def compiled(compiler: Any, source: Any, filename: str, *args: Any, **options: Any) -> Any:
        if filename.startswith("<timed "):
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
