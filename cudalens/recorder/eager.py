"""Let compiled functions run eagerly inside a checked block, so that their ops can be seen.

Importing the compiler takes seconds, so it is not imported for this: where the block itself is the
first to need it, its import is noticed and the stance set before anything can be compiled.
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
"""The class whose functions run what was compiled.  What the same file keeps from being compiled,
such as a checkpoint, runs through another one."""


# The stance belongs to the process, and blocks of several threads may overlap: the first of them
# sets it, the last takes it away again.
_lock = threading.RLock()
_open: list[EagerCompiler] = []


def limit_of(codes: Iterable[CodeType]) -> tuple[str, ...]:
    """Return the line for a report whose stack, by its code objects, passes a compiled function.

    Empty where it does not, and where compiled functions stay compiled.
    """
    passes = any(
        code.co_filename.replace("\\", "/").endswith(_WRAPPER_FILE)
        and code.co_qualname.startswith(_WRAPPER)
        for code in codes
    )
    return (RAN_EAGERLY,) if _open and passes else ()


class EagerCompiler:
    """Keep torch's compiler in the stance ``force_eager`` while open, loaded or not yet.

    A stance that the program sets meanwhile stays.
    """

    _stance: Any = None

    def __enter__(self) -> EagerCompiler:
        """Set the stance, or wait for the compiler to be imported."""
        self._leave = when_loaded(COMPILER, self._set_stance)
        return self

    def __exit__(self, *_: object) -> None:
        """Return the stance back as it was."""
        self._leave()

    def _set_stance(self, compiler: Any) -> Callable[[], None]:
        with _lock:
            if not _open:
                type(self)._stance = compiler.set_stance("force_eager")
            _open.append(self)
        return self._release

    def _release(self) -> None:
        with _lock:
            _open.remove(self)
            if not _open:
                remove_stance(type(self)._stance)
                type(self)._stance = None
