"""A stand-in for CUDA's runtime library: torch's CUDA build on a machine without a GPU.

torch's CUDA wheel links CUDA's runtime library dynamically.  Where a library of that name is loaded
first, everything above it is torch's own compiled code: the caching allocators, pinned memory,
streams, events, CUDA graphs, autograd's device thread, ``C10_CUDA_CHECK`` and its texts, and the
destructors that abort.  Kernels do nothing; ``values.py`` puts the CPU's results in their place.

It shows what torch's host code does.  It shows nothing of kernels, the driver, time, cuBLAS,
cuDNN, NCCL or Triton; and which calls return a sticky error is written in ``runtime.c`` after
documentation and public logs, not asked of a device.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ASSERT, ILLEGAL_ADDRESS, LAUNCH_FAILURE, OUT_OF_MEMORY = 710, 700, 719, 2
LINE = "Ext.cu:12: kernel_x: block: [0,0,0], thread: [3,0,0] Assertion `i < n` failed."
"""What an assertion prints that no record of torch's kernels knows."""
FOLDER = Path(os.environ.get("CUDALENS_STANDIN", ""))
"""Where ``build.py`` put the libraries."""
_COUNTS = ("waits", "blocked", "launches", "copies_out")
_text, _number = ctypes.c_char_p, ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "shift": (ctypes.c_ssize_t,),
    "count": (_number, _text),
    "fault": (None, _text, _number, ctypes.c_int, _text),
    "fail_next": (None, ctypes.c_int, _text),
    "lag": (None, ctypes.c_int),
    "narrow": (None, ctypes.c_int),
    "python": (None, ctypes.c_void_p),
    "capture": (ctypes.c_int, ctypes.c_void_p, _number),
    "launch": (ctypes.c_int, _text, ctypes.c_void_p),
}
library = SimpleNamespace()
"""The functions ``standin_…`` of the runtime library."""


def load_libraries() -> None:
    """Load the libraries, before torch: its own then find these by name."""
    (path,) = FOLDER.glob("libcudart.so.*")
    runtime = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    for path in FOLDER.glob("*.so.*"):
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(runtime, f"standin_{name}")
        function.restype, function.argtypes = result, arguments
        setattr(library, name, function)


def count(what: str) -> int:
    """Return a count: waits of the host, those ``blocked`` by queued work, launches, copies_out.

    ``context`` is 1 once there is one, ``healthy`` 0 once a kernel has failed.
    """
    return int(library.count(what.encode()))


@contextmanager
def counting() -> Iterator[SimpleNamespace]:
    """Count within a block; the result has the counts once the block is over."""
    before = {name: count(name) for name in _COUNTS}
    seen = SimpleNamespace()
    yield seen
    for name, number in before.items():
        setattr(seen, name, count(name) - number)


def fault(what: str, at: int = 1, code: int = ASSERT, text: str = LINE) -> None:
    """Let the ``at``-th launch from now fail whose kernel's name contains ``what``.

    ``call:cudaMalloc`` means calls of that function of the library.  Codes from 700 on stick.
    """
    library.fault(what.encode(), at, code, text.encode())


def lag(is_on: bool = True) -> None:
    """Let nothing be done before the host waits for it, in place of at once."""
    library.lag(is_on)


def narrow() -> None:
    """Let calls return no sticky error of which it is not known that they do."""
    library.narrow(1)
