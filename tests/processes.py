"""Runs Python in a process of its own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FAILING = """\
import cudalens
import torch
import torch.nn.functional as F

device = cudalens.ensure_cuda()


def step(logits, y):
    return F.cross_entropy(logits, y)


step(torch.zeros(32, 10, device=device), torch.arange(32, device=device) % 10 + 1)
"""
"""A script that a guard stops."""


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    """Write a program, and return its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process that imports this checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}
    own["PYTHONDONTWRITEBYTECODE"] = ""  # else each of them compiles the package anew
    return {**os.environ, **own, **more}


def python(
    *words: str,
    timeout: float = 240,
    cwd: Path = ROOT,
    fresh: bool = False,
    streams: Mapping[str, Any] | None = None,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words, this checkout on its path, and its output captured.

    The process is a fork of one that has imported torch, which takes most of the time of a start.
    A test of the start itself asks for a ``fresh`` one, or for ``streams`` of its own.
    """
    if not (fresh or streams or any(name.startswith("PYTHON") for name in more)):
        return _server().run(words, timeout, cwd, environment(**more))
    return subprocess.run(
        [sys.executable, *words],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **(streams or {})},
        text=True,
        encoding="utf-8",
        timeout=timeout,
        check=False,
        cwd=cwd,
        env=environment(**more),
    )


class _ForkServer:
    """A process that has imported torch and runs programs in forks of itself."""

    def __init__(self) -> None:
        self._line, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(far.fileno())],
                pass_fds=[far.fileno()], cwd=ROOT, env=environment(),
            )  # fmt: skip
        atexit.register(self.end)

    def run(
        self, words: tuple[str, ...], timeout: float, cwd: Path, env: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run one program; see :func:`python`."""
        request = json.dumps({"words": words, "cwd": str(cwd), "env": env}).encode()
        pipes = os.pipe(), os.pipe()
        with Path(os.devnull).open() as empty:
            streams = [empty.fileno(), *(write for _, write in pipes)]
            try:
                socket.send_fds(self._line, [request], streams)
            except BrokenPipeError:
                raise RuntimeError(f"{self._process.args} ended: {self._process.wait()}") from None
        for _, write in pipes:
            os.close(write)
        pid = int(self._line.recv(64))
        texts, ended = _read_to_the_end([read for read, _ in pipes], self._line, timeout)
        if not ended:
            with contextlib.suppress(ProcessLookupError):  # what it started may hold the pipes
                os.kill(pid, signal.SIGKILL)
        status = int(self._line.recv(64))
        if not ended:
            raise subprocess.TimeoutExpired(words, timeout, *texts)
        return subprocess.CompletedProcess(words, status, *texts)

    def end(self) -> None:
        """End the server."""
        self._line.close()
        self._process.wait()


@functools.cache
def _server() -> _ForkServer:
    return _ForkServer()


def _read_to_the_end(
    pipes: list[int], line: socket.socket, timeout: float
) -> tuple[list[str], bool]:
    """Return what came through each pipe, and whether all that write there have ended in time.

    A program that the first one started, as tee, may write for a moment after that has ended.
    """
    parts: dict[int, bytes] = dict.fromkeys(pipes, b"")
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as waited_for:
        for end in (*pipes, line.fileno()):
            waited_for.register(end, selectors.EVENT_READ)
        while waited_for.get_map():
            ready = waited_for.select(max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for key, _ in ready:
                part = os.read(key.fd, 1 << 16) if key.fd in parts else b""
                if part:
                    parts[key.fd] += part
                else:
                    waited_for.unregister(key.fd)
        ended = not waited_for.get_map()
    for end in pipes:
        os.close(end)
    return [part.decode().replace("\r\n", "\n") for part in parts.values()], ended
