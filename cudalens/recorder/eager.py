"""Run compiled functions eagerly inside a checked block, so that guards see their ops.

Importing the compiler takes seconds, so it is not imported for this.  If the block is the first to
import it, an import hook sets the stance before anything can be compiled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

from cudalens.core._compiler import COMPILER
from cudalens.core.late_import import when_loaded
from cudalens.recorder._torch import remove_stance

RAN_EAGERLY = "compiled functions ran eagerly in this block; --no-force-eager keeps them compiled"
_WRAPPER_FILE = "torch/_dynamo/eval_frame.py"
_WRAPPER = "_TorchDynamoContext."
"""The class whose wrappers run compiled code.  Code that the same file excludes from compilation,
such as a checkpoint, runs through another class."""


# The stance is global to the process, and blocks of several threads may overlap: the first sets
# it, the last one removes it.
_lock = threading.RLock()
_open: list[EagerCompiler] = []


def limit_of(codes: Iterable[CodeType]) -> tuple[str, ...]:
    """Return the note for a report whose stack contains a compiled function that ran eagerly.

    Empty for other stacks, and where compiled functions stay compiled.

    Args:
        codes: the code objects of the stack.
    """
    passes = any(
        code.co_filename.replace("\\", "/").endswith(_WRAPPER_FILE)
        and code.co_qualname.startswith(_WRAPPER)
        for code in codes
    )
    return (RAN_EAGERLY,) if _open and passes else ()


class EagerCompiler:
    """Set the compiler's stance to ``force_eager`` while open, also if it is imported later.

    A stance that the program sets inside is kept.
    """

    _stance: Any = None

    def __enter__(self) -> EagerCompiler:
        """Set the stance, or wait for the compiler to be imported."""
        self._leave = when_loaded(COMPILER, self._set_stance)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the stance."""
        self._leave()

    def _set_stance(self, compiler: Any) -> Callable[[], None]:
        with _lock:
            if not _open:
                # On the class, because the stance belongs to the process and not to one block.
                type(self)._stance = compiler.set_stance("force_eager")
            _open.append(self)
        return self._release

    def _release(self) -> None:
        with _lock:
            _open.remove(self)
            if not _open:
                remove_stance(type(self)._stance)
                type(self)._stance = None
