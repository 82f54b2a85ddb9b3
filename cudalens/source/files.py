"""Whose file is it?  Notebook cells by number, the user's files, and everybody else's.

A cell has one of three kinds of file name: ``/tmp/ipykernel_PID/HASH.py`` (ipykernel),
``<ipython-input-N-hash>`` (IPython), or a name that a front end told us with
:func:`register_cell`.  Nothing here imports IPython or torch: what is not loaded is not in use.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from types import FrameType
from typing import Any, cast

_numbers: dict[str, int] = {}
_typed: dict[str, tuple[str, ...]] = {}
_shared: set[str] = set()
_noted: dict[str, int] = {}
_IPYTHON_NAME = re.compile(r"<ipython-input-(\d+)-[0-9a-f]+>")
_IPYKERNEL_NAME = re.compile(r"[/\\]ipykernel_\d+[/\\]\d+\.py")
# Names in angle brackets are generated code, except where a person typed the lines.
_CELL_NAME = "<cell line: "
"""So begins the name of a cell's code before IPython 8."""
_TYPED = ("<stdin>", "<python-input-", "<doctest ")
_MACHINERY = frozenset({"IPython", "ipykernel"})


def register_cell(
    filename: str, number: int, lines: Sequence[str], typed: Sequence[str] = ()
) -> None:
    """Tell that code compiled as ``filename`` is cell ``number`` and reads ``lines``.

    ``typed`` are its first lines, or all, as the user typed them: some may be no Python.
    """
    _numbers[filename] = number
    note_typed(filename, typed)
    text = [line if line.endswith("\n") else line + "\n" for line in lines]
    # A modification time of None keeps linecache.checkcache from dropping the entry.
    entry = (sum(map(len, text)), None, text, filename)
    for cache in _line_caches():
        cache[filename] = entry


def note_typed(filename: str, typed: Sequence[str]) -> None:
    """Return how the user typed the first lines of a cell that the shell knows already."""
    _typed[filename] = tuple(typed)


def forget_cell(filename: str) -> None:
    """Undo :func:`register_cell`; a name that was never registered is fine."""
    _typed.pop(filename, None)
    if _numbers.pop(filename, None) is not None:
        for cache in _line_caches():
            cache.pop(filename, None)


def note_cell(filename: str, number: int) -> None:
    """Tell the number of a cell, for a shell that keeps no map of its own."""
    _noted[filename] = number


def note_running(shell: Any) -> None:
    """Tell the number of the cell that is running, where nobody else will."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_name.startswith(_CELL_NAME):
        frame = frame.f_back
    if frame is not None:
        note_cell(frame.f_code.co_filename, shell.execution_count)


def forget_noted() -> None:
    """Undo every :func:`note_cell`."""
    _noted.clear()


def cells_of(shell: Any) -> Mapping[str, int]:
    """Return a shell's map from the file names of its cells to their numbers."""
    names = getattr(shell.compile, "_filename_map", None)  # since IPython 8.0
    return names if isinstance(names, dict) else _noted


def share_name(filename: str) -> None:
    """Tell that code of several cells is compiled as ``filename``: the name tells no cell."""
    _shared.add(filename)


def unshare_name(filename: str) -> None:
    """Undo :func:`share_name`; a name that was never told is fine."""
    _shared.discard(filename)


def is_shared(filename: str) -> bool:
    """Return whether code of several cells has this name."""
    return filename in _shared


def cell_number(filename: str) -> int | None:
    """Return the number of the cell that was compiled as ``filename``, ``None`` for other code."""
    number = _numbers.get(filename)
    if number is None:
        number = _compiler_map().get(filename)
    if number is None and (match := _IPYTHON_NAME.fullmatch(filename)):
        number = int(match[1])
    return number


def source_lines(filename: str) -> list[str]:
    """Read the lines of a file or cell, without line breaks; empty when there is no source."""
    entry = linecache.cache.get(filename)
    linecache.checkcache(filename)
    lines = linecache.getlines(filename)
    if not lines and entry is not None:
        # The entry described something that is no file: checkcache was wrong to drop it.
        linecache.cache[filename] = entry
        lines = linecache.getlines(filename)
    return [line.rstrip("\r\n") for line in lines]


def typed_of(filename: str) -> tuple[str, ...]:
    """Return the first lines of a cell as the user typed them, none where nobody told."""
    return _typed.get(filename, ())


def typed_line(filename: str, lines: Sequence[str], number: int) -> str:
    """Return line ``number`` of ``lines`` as the user typed it."""
    typed = _typed.get(filename, ())
    return typed[number - 1] if number <= len(typed) else lines[number - 1]


def is_top(name: str) -> bool:
    """Return whether code of this name is that of a module or of a cell, and no function's."""
    return name == "<module>" or name.startswith(_CELL_NAME)


def is_user_file(filename: str) -> bool:
    """Return whether code of this file is the user's: a cell, a script, a module of a project.

    The standard library, installed packages, generated code and this package are not.
    """
    if filename.startswith("<"):
        is_known = filename.startswith(_TYPED) or is_shared(filename)
        return is_known or cell_number(filename) is not None
    if _IPYKERNEL_NAME.search(filename) or cell_number(filename) is not None:
        return True
    return not (is_own_file(filename) or is_torch_file(filename) or _is_library_path(filename))


def is_user_source(filename: str) -> bool:
    """Return whether code of this file is the user's, and the name tells of which text."""
    return is_user_file(filename) and not is_shared(filename)


def is_own_file(filename: str) -> bool:
    """Return whether the file belongs to this package."""
    return _is_below(filename, _OWN_ROOT)


def is_torch_file(filename: str) -> bool:
    """Return whether the file belongs to torch, wherever torch is installed."""
    root = _torch_root()
    return root is not None and _is_below(filename, root)


def torch_path(filename: str) -> str:
    """Return a torch file's path below the package, with forward slashes: ``nn/functional.py``."""
    root = _torch_root()
    if root is None or not _is_below(filename, root):
        return ""
    return filename[len(root) + 1 :].replace(os.sep, "/")


@functools.lru_cache(maxsize=4096)
def is_machinery(filename: str) -> bool:
    """Return whether the file is what runs cells and scripts: IPython, ipykernel, runpy."""
    if filename == "<frozen runpy>":
        return True
    parts = PurePath(filename).parts
    if parts and parts[-1] == "runpy.py" and _is_library_path(filename):
        return True
    return any(
        here in {"site-packages", "dist-packages"} and package in _MACHINERY
        for here, package in itertools.pairwise(parts)
    )


_OWN_ROOT = str(Path(__file__).absolute().parents[1])


def running_shell() -> Any:
    """Return the running IPython shell, ``None`` where there is none."""
    ipython = sys.modules.get("IPython")
    get_shell = getattr(ipython, "get_ipython", None)
    return get_shell() if get_shell is not None else None


def _compiler_map() -> Mapping[str, int]:
    shell = running_shell()
    return {} if shell is None else cells_of(shell)


def _torch_root() -> str | None:
    file = getattr(sys.modules.get("torch"), "__file__", None)
    return None if file is None else str(PurePath(file).parent)


def _line_caches() -> tuple[dict[str, Any], ...]:
    """Return Python's cache of lines, and that which IPython 7 writes over it."""
    shells = getattr(linecache, "_ipython_cache", {})
    return cast("dict[str, Any]", linecache.cache), shells


def _is_below(filename: str, root: str) -> bool:
    return filename.startswith(root + os.sep)


@functools.lru_cache(maxsize=4096)
def _is_library_path(filename: str) -> bool:
    path = os.path.abspath(filename)  # noqa: PTH100  resolve() would follow the user's links
    parts = PurePath(path).parts
    if "site-packages" in parts or "dist-packages" in parts:
        return True
    return any(_is_below(path, root) for root in _library_roots())


@functools.cache
def _library_roots() -> tuple[str, ...]:
    # Not sys.prefix itself: a project may hold its environment, or live inside it.
    paths = sysconfig.get_paths()
    roots = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")]
    roots.append(str(PurePath(os.__file__).parent))
    roots += [os.path.realpath(root) for root in roots]
    return tuple(dict.fromkeys(roots))
