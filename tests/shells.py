"""A shell of its own for one test, without history and with what it displays kept."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config


def forget(shell: InteractiveShell) -> None:
    """End a shell, and take back what it has asked Python to do when the process ends.

    It would clear its names and collect garbage then: half a second for each shell, with torch.
    """
    shell.history_manager.end_session()
    atexit.unregister(shell.atexit_operations)
    atexit.unregister(shell.magics_manager.registry["ScriptMagics"].kill_bg_processes)
    InteractiveShell.clear_instance()


@contextmanager
def new_shell() -> Iterator[Any]:
    """Return a shell of its own; unload the extension and forget the shell afterwards."""
    config = Config()
    config.HistoryManager.hist_file = ":memory:"
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
