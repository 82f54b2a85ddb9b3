"""A shell of its own for one test, without history and with what it displays kept."""

from __future__ import annotations

import atexit
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import IPython
import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from traitlets.config import Config

import cudalens

SETUP = """\
import torch, torch.nn.functional as F
table = torch.zeros(5, 2, device="cuda")
ids = torch.tensor([1, 7, 2], device="cuda")"""
"""The first cell of the fixture ``notebook``: a table, and an index that lies outside it."""
BAD = "F.embedding(ids, table)"
ANSI = re.compile(r"\x1b\[[\d;]*m")


def forget(shell: InteractiveShell) -> None:
    """End a shell, and take back what it has asked Python to do when the process ends.

    It would clear its names and collect garbage then: half a second for each shell, with torch.
    """
    shell.history_manager.end_session()
    atexit.unregister(shell.atexit_operations)
    # By ``dict``: the registry would otherwise make the magics of scripts, which takes longer.
    if (scripts := dict.get(shell.magics_manager.registry, "ScriptMagics")) is not None:
        atexit.unregister(scripts.kill_bg_processes)
    InteractiveShell.clear_instance()


@contextmanager
def new_shell() -> Iterator[Any]:
    """Return a shell of its own; unload the extension and forget the shell afterwards."""
    config = Config()
    config.HistoryManager.hist_file = ":memory:"
    # The tests look at text alone, and to colour a traceback takes as long as to make it.
    config.InteractiveShell.colors = "nocolor" if IPython.version_info >= (9,) else "NoColor"
    hook, paths = sys.excepthook, list(sys.path)
    shell = InteractiveShell.instance(config=config)
    shell.display_pub = CapturingDisplayPublisher()
    try:
        yield shell
    finally:
        if "cudalens" in shell.extension_manager.loaded:
            shell.extension_manager.unload_extension("cudalens")
        forget(shell)
        sys.excepthook, sys.path[:] = hook, paths


@contextmanager
def shell_with_cudalens() -> Iterator[Any]:
    """Return a shell that has loaded the extension."""
    with new_shell() as shell:
        shell.run_line_magic("load_ext", "cudalens")
        yield shell


def run(shell: Any, cell: str) -> tuple[BaseException | None, list[dict[str, Any]]]:
    """Run a cell as a user does; return its error and the bundles that it displayed."""
    shell.display_pub.outputs.clear()
    result = shell.run_cell(cell, store_history=True)
    shown = [dict(item["data"]) for item in shell.display_pub.outputs]
    return result.error_before_exec or result.error_in_exec, shown


def innermost(trace: TracebackType | None) -> tuple[str, int, str]:
    """Return file, line and function of the frame that raised."""
    frame = traceback.extract_tb(trace)[-1]
    return frame.filename, frame.lineno or 0, frame.name


@dataclass
class Notebook:
    """A shell with the extension loaded, and what its last cell raised, printed and displayed."""

    shell: InteractiveShell
    capsys: pytest.CaptureFixture[str]
    out: str = ""
    err: str = ""
    shown: list[dict[str, Any]] = field(default_factory=list)
    error: BaseException | None = None

    def run(self, cell: str) -> ExecutionResult:
        """Run a cell as a user does."""
        self.capsys.readouterr()
        self.shell.display_pub.outputs.clear()
        result = self.shell.run_cell(cell, store_history=True)
        self.out, self.err = (ANSI.sub("", text) for text in self.capsys.readouterr())
        self.shown = [dict(item["data"]) for item in self.shell.display_pub.outputs]
        self.error = result.error_before_exec or result.error_in_exec
        return result

    def stopped(self, cell: str) -> ExecutionResult:
        """Run a cell that a guard stops."""
        result = self.run(cell)
        assert isinstance(result.error_in_exec, cudalens.DeviceIndexError)
        return result

    def under(self, how: str) -> str:
        """Return the magic to put before a cell, empty where ``on`` has turned it on for all."""
        if how.startswith("%cudacheck on"):
            self.run(how)
            return ""
        return how

    @property
    def names(self) -> dict[str, Any]:
        return self.shell.user_ns

    @property
    def count(self) -> int:
        """The number of the last cell."""
        return self.shell.execution_count - 1
