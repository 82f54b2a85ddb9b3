"""Does a word that the stream writes after each call name the call that failed?

``python tests/gpu/breadcrumbs.py`` on a machine with a GPU prints a line of JSON per question.
After each call of torch the stream is asked to write the call's number into pinned host memory
(``cuStreamWriteValue32``).  A stream works in order, so after a fault the word should hold the
number of the last call that was finished, and the one behind it is the call that failed.  Reading
the word waits for nothing.  Each case runs in a fork: its context is lost.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

from faults import KERNEL, name_a_toolkit  # noqa: E402

BAD, CALLS, REPEATS = 5, 40, 5
"""The number of the call that fails, how many are launched, and how often each case runs."""
FAULTS = {
    "illegal access": "rows = torch.tensor([0, 2**40], device='cuda')\nunchecked = 1",
    "assert": "rows = torch.tensor([0, 9, 3], device='cuda')\nunchecked = 0",
}
DEFAULT = 0
"""CU_STREAM_WRITE_VALUE_DEFAULT.  CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER was refused by an H200
with driver 580: invalid value."""


class Word:
    """A word of pinned host memory, and the driver's call that has a stream write it."""

    def __init__(self) -> None:
        import torch

        self.driver = ctypes.CDLL("libcuda.so.1")
        self._write = self.driver.cuStreamWriteValue32_v2
        self._write.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32]
        self._memory = torch.zeros(16, dtype=torch.int32).pin_memory()
        self._address = self._memory.data_ptr()
        self._host = ctypes.c_int32.from_address(self._address)

    def put(self, number: int, stream: Any) -> int:
        """Have the stream write a number behind all that it was given; return the status."""
        return int(self._write(stream.cuda_stream, self._address, number, DEFAULT))

    @property
    def value(self) -> int:
        return self._host.value


def find(fault: str, *, is_side: bool) -> dict[str, Any]:
    """Launch calls of which one fails, and tell what the word says.

    Returns:
        What it ``said`` at once, after 0.2 s and after a wait, beside the number of the last call
        that was ``finished``.
    """
    import torch

    names: dict[str, Any] = {}
    exec(KERNEL + FAULTS[fault], names)
    torch.cuda.synchronize()
    word, other = Word(), Word()
    stream = torch.cuda.Stream() if is_side else torch.cuda.current_stream()
    statuses, error = [], None
    x = torch.ones(1024, device="cuda")
    torch.cuda.synchronize()
    try:
        for number in range(1, CALLS + 1):
            with torch.cuda.stream(stream):
                if number == BAD:
                    names["torch"].ops.gpu_suite.pick(
                        names["table"], names["rows"], names["unchecked"]
                    )
                else:
                    x = x + 1
            statuses.append(word.put(number, stream))
            if is_side:  # good work elsewhere at the same time, with a word of its own
                names["table"] + 1
                other.put(number, torch.cuda.current_stream())
    except RuntimeError as raised:
        error = f"{type(raised).__name__} at call {len(statuses) + 1}"
    said = [word.value]
    time.sleep(0.2)
    said.append(word.value)
    try:
        torch.cuda.synchronize()
    except RuntimeError as raised:
        error = error or f"{type(raised).__name__} in synchronize"
    said.append(word.value)
    return {
        "said": said,
        "finished": BAD - 1,
        "statuses": sorted(set(statuses)),
        "raised": error,
        "on the other stream": other.value if is_side else None,
    }


def cost() -> dict[str, Any]:
    """Time small and large kernels alone, with a word after each, and with a wait after each."""
    import torch

    word, stream = Word(), torch.cuda.current_stream()
    small, large = torch.ones(64, device="cuda"), torch.randn(2048, 2048, device="cuda")
    found: dict[str, Any] = {}

    def timed(label: str, work: Any, after: Any, count: int) -> None:
        best = []
        for _ in range(5):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for number in range(count):
                work()
                after(number)
            issued = time.perf_counter()
            torch.cuda.synchronize()
            best.append(((issued - started) / count, (time.perf_counter() - started) / count))
        issued_s, done_s = (min(column) for column in zip(*best, strict=True))
        found[label] = {"issued_us": issued_s * 1e6, "done_us": done_s * 1e6}

    ways = {
        "alone": lambda number: None,
        "with a word": lambda number: word.put(number, stream),
        "with a wait": lambda number: torch.cuda.synchronize(),
    }
    for title, work, count in (
        ("small add", lambda: small + 1, 3000),
        ("matmul 2048", lambda: large @ large, 300),
    ):
        for way, after in ways.items():
            timed(f"{title} {way}", work, after, count)
    return found


def forked(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a function says in a process of its own."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            found = run()
        except BaseException as error:
            found = {"failed": f"{type(error).__name__}: {error}"[:400]}
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else {"failed": "the process ended"}


def main() -> None:
    name_a_toolkit()
    import torch  # noqa: F401 - imported once, for all forks; CUDA is asked nothing here

    for fault in FAULTS:
        for is_side in (False, True):
            what = f"{fault}, {'on a side stream' if is_side else 'one stream'}"
            for _ in range(REPEATS):
                found = forked(partial(find, fault, is_side=is_side))
                print(json.dumps({what: found}), flush=True)
    print(json.dumps({"cost": forked(cost)}), flush=True)


if __name__ == "__main__":
    main()
