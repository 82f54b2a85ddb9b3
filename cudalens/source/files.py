"""Owner of a file: notebook cells by number, the user's files, and everyone else's.

A cell has one of three kinds of file name: ``/tmp/ipykernel_PID/HASH.py`` (ipykernel),
``<ipython-input-N-hash>`` (IPython), or a name that a front end has registered in
:data:`CELLS`.  Nothing here imports IPython or torch: what is not loaded is not in use.
"""

from __future__ import annotations

import csv
import functools
import linecache
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any, cast

from cudalens.core._python import innermost
from cudalens.source.edited import ImportedFiles, is_edited

MAX_SOURCES = 128
"""Number of files and cells whose lines and syntax are cached."""
_IPYTHON_NAME = re.compile(r"<ipython-input-(\d+)-[0-9a-f]+>")
_MARIMO_NAME = re.compile(r"[/\\]marimo_\d+[/\\]__marimo__cell_(.+)_\.py$")
_IPYKERNEL_NAME = re.compile(r"[/\\]ipykernel_\d+[/\\]\d+\.py")
# Names in angle brackets are generated code, except where a person typed the lines.
_CELL_NAME = "<cell line: "
"""Start of the name of a cell's code before IPython 8."""
_TYPED = ("<stdin>", "<python-input-", "<doctest ")
_FULL_ENTRY = 4
"""The length of a linecache entry with lines; a lazy entry, which can load them, is shorter."""
_MACHINERY = ("IPython", "ipykernel")


class CellRegistry:
    """Facts on cells that the shell does not keep, by the file name of a cell's code."""

    def __init__(self) -> None:
        self.numbers: dict[str, int | None] = {}
        """Numbers of registered texts; ``None`` for a text that is no cell of its own."""
        self.titles: dict[str, str] = {}
        """The name that a report shows in place of the file name."""
        self.typed: dict[str, tuple[str, ...]] = {}
        """The first lines of a cell as the user typed them."""
        self.numbers_of_shell: dict[str, int] = {}
        """Numbers of the shell's own cells, where IPython keeps no map of file names."""
        self.sources: dict[str, Source] = {}
        """A cache of the files that were read last; the newest is last."""
        self.imported = ImportedFiles()

    def register(
        self,
        filename: str,
        number: int | None,
        lines: Sequence[str],
        typed: Sequence[str] = (),
        title: str = "",
    ) -> None:
        """Register code compiled as ``filename`` as cell ``number`` with these lines.

        Args:
            filename: the file name in the code.
            number: ``None`` for a text of the user's that is no cell of its own.
            lines: the lines as Python.
            typed: its first lines, or all, as the user typed them: some may be no Python.
            title: the name that a report shows in place of the file name.
        """
        self.numbers[filename] = number
        if title:
            self.titles[filename] = title
        self.typed[filename] = tuple(typed)
        text = [line if line.endswith("\n") else line + "\n" for line in lines]
        # A modification time of None keeps linecache.checkcache from dropping the entry.
        entry = (sum(map(len, text)), None, text, filename)
        for cache in _line_caches():
            cache[filename] = entry

    def forget(self, filename: str) -> None:
        """Undo :meth:`register`; a name that was never registered is fine."""
        self.typed.pop(filename, None)
        self.titles.pop(filename, None)
        if filename in self.numbers:
            del self.numbers[filename]
            for cache in _line_caches():
                cache.pop(filename, None)

    @contextmanager
    def as_typed(self) -> Iterator[None]:
        """Make linecache return cells as they were typed, for a debugger: it parses none."""
        kept = [
            (cache, name, cache[name])
            for cache in _line_caches()
            for name in self.typed
            if len(cache.get(name, ())) == 4
        ]
        for cache, name, (size, time, lines, title) in kept:
            typed = [f"{line}\n" for line in self.typed[name]]
            cache[name] = (size, time, [*typed, *lines[len(typed) :]], title)
        try:
            yield
        finally:
            for cache, name, entry in kept:
                cache[name] = entry

    def of_shell(self, shell: Any) -> Mapping[str, int]:
        """Return the numbers of a shell's cells by file name."""
        names = getattr(shell.compile, "_filename_map", None)  # since IPython 8.0
        return names if isinstance(names, dict) else self.numbers_of_shell

    def note_running(self, shell: Any) -> None:
        """Record the running cell's number, for a shell without a map of file names."""
        frame = innermost(lambda frame: frame.f_code.co_name.startswith(_CELL_NAME))
        if frame is not None:
            self.numbers_of_shell[frame.f_code.co_filename] = shell.execution_count

    def names(self) -> list[str]:
        """Return the file names of the known cells, the newest first."""
        numbers = self._all()
        return sorted(numbers, key=lambda name: numbers[name] or 0, reverse=True)

    def is_shared(self, number: int) -> bool:
        """Return whether several cells have the same number, as cells without history do."""
        return list(self._all().values()).count(number) > 1

    def _all(self) -> dict[str, int | None]:
        shell = running_shell()
        return {**({} if shell is None else self.of_shell(shell)), **self.numbers}


CELLS = CellRegistry()
"""The cells of this process.  A frame refers to its cell by its file name alone."""


def title_of(filename: str) -> str:
    """Return the name of a file that a report shows; for marimo's cells, that of the cell."""
    cell = _MARIMO_NAME.search(filename)
    return f"marimo cell {cell[1]}" if cell else CELLS.titles.get(filename, filename)


def cell_number(filename: str) -> int | None:
    """Return the number of the cell that was compiled as ``filename``, ``None`` for other code."""
    if filename in CELLS.numbers:
        return CELLS.numbers[filename]
    shell = running_shell()
    names = {} if shell is None else CELLS.of_shell(shell)
    # A shell with a map knows its cells: code that it runs for %run is not the next of them.
    if not names and (match := _IPYTHON_NAME.fullmatch(filename)):
        return int(match[1])
    return names.get(filename)


def place_of_code(filename: str) -> tuple[int | None, str | None]:
    """Return the number of the cell that was compiled as ``filename``, and the name of a file.

    Cells that are run without history share one number.  Such a cell has both: the name of its
    code distinguishes it from the others.
    """
    cell = cell_number(filename)
    if cell is None:
        return None, title_of(filename)
    return cell, PurePath(filename).name if CELLS.is_shared(cell) else None


class Source:
    """The lines of one version of a file or cell; compared by identity, as a key of caches."""

    def __init__(self, cached: list[str], spec: object = None, *, is_edited: bool = False) -> None:
        self.cached = cached
        """The list of lines in linecache: another list is another version."""
        self.spec = spec
        """The spec of the module: a reloaded module has another."""
        self.is_edited = is_edited
        """True if the lines are not those that ran; ``lines`` is empty then."""
        self.lines = [] if is_edited else [line.rstrip("\r\n") for line in cached]


def source(filename: str) -> Source:
    """Read a file or cell; without lines when there is no source, or not the one that ran.

    It is the same object until the source changes, so results can be cached by it.
    """
    entry = linecache.cache.get(filename)
    linecache.checkcache(filename)
    lines = linecache.getlines(filename)
    if not lines and entry is not None:
        # checkcache drops an entry whose file does not exist, also where it never was a file.
        linecache.cache[filename] = entry
        lines = linecache.getlines(filename)
    sources = CELLS.sources
    cached = sources.pop(filename, None)
    # A module is compared each time: it may have been reloaded since.
    if cached is None or cached.cached is not lines or cached.spec is not None:
        cached = _version(filename, lines, cached)
    sources[filename] = cached
    while len(sources) > MAX_SOURCES:
        sources.pop(next(iter(sources)), None)
    return cached


def _version(filename: str, lines: list[str], cached: Source | None) -> Source:
    """Return the current lines of a file or cell; the cached object while they are unchanged."""
    stored: Any = linecache.cache.get(filename, ())
    # A cell has no modification time, and its lines are always those that ran.
    is_file = len(stored) == _FULL_ENTRY and stored[1] is not None and is_user_file(filename)
    module = CELLS.imported.module_of(filename) if is_file else None
    spec = None if module is None else vars(module).get("__spec__")
    if cached is not None and cached.cached is lines and cached.spec is spec:
        return cached
    edited = module is not None and is_edited(module, filename, lines)
    return Source(lines, spec, is_edited=edited)


def source_lines(filename: str) -> list[str]:
    """Return the lines of a file or cell, without line breaks; empty when there is no source."""
    return source(filename).lines


def typed_line(filename: str, lines: Sequence[str], number: int) -> str:
    """Return line ``number`` of ``lines`` as the user typed it."""
    typed = CELLS.typed.get(filename, ())
    return typed[number - 1] if number <= len(typed) else lines[number - 1]


def is_top(name: str) -> bool:
    """Return whether code of this name is that of a module or of a cell, and no function's."""
    return name == "<module>" or name.startswith(_CELL_NAME)


def is_user_file(filename: str) -> bool:
    """Return whether code of this file is the user's: a cell, a script, a module of a project.

    The standard library, installed packages, generated code and this package are not.
    """
    if cell_number(filename) is not None or _IPYKERNEL_NAME.search(filename):
        return True
    if filename.startswith("<"):
        is_typed = filename.startswith(_TYPED) or _IPYTHON_NAME.fullmatch(filename) is not None
        return is_typed or filename in CELLS.numbers
    written_by_torch = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # inductor sets it
    if written_by_torch is not None and _is_below(filename, written_by_torch):
        return False
    if is_own_file(filename) or is_torch_file(filename) or _is_library_path(filename):
        return False
    return not _is_generated(filename)


def is_own_file(filename: str) -> bool:
    """Return whether the file belongs to this package."""
    return _is_below(filename, _OWN_ROOT)


def is_torch_file(filename: str) -> bool:
    """Return whether the file belongs to torch, wherever torch is installed."""
    return bool(torch_path(filename))


def torch_path(filename: str) -> str:
    """Return a torch file's path below the package, with forward slashes: ``nn/functional.py``."""
    file = getattr(sys.modules.get("torch"), "__file__", None)
    root = None if file is None else str(PurePath(file).parent)
    if root is None or not _is_below(filename, root):
        return ""
    return filename[len(root) + 1 :].replace(os.sep, "/")


@functools.lru_cache(maxsize=4096)
def is_machinery(filename: str) -> bool:
    """Return whether the file's code runs cells and scripts: IPython, ipykernel, runpy."""
    if filename == "<frozen runpy>":
        return True
    parts = PurePath(filename).parts
    if parts and parts[-1] == "runpy.py" and _is_library_path(filename):
        return True
    files = (getattr(sys.modules.get(name), "__file__", None) for name in _MACHINERY)
    return any(_is_below(filename, str(PurePath(file).parent)) for file in files if file)


_OWN_ROOT = str(Path(__file__).absolute().parents[1])


def running_shell() -> Any:
    """Return the running IPython shell, ``None`` where there is none."""
    ipython = sys.modules.get("IPython")
    get_shell = getattr(ipython, "get_ipython", None)
    return get_shell() if get_shell is not None else None


def _line_caches() -> tuple[dict[str, Any], ...]:
    """Return linecache's cache, and the one that IPython 7 copies over it."""
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
    is_in_root = any(_is_below(path, root) for root in _library_roots())
    return is_in_root or _is_installed(path) or _is_foreign_package(path)


def _is_installed(path: str) -> bool:
    """Return whether the file belongs to a package that is installed in a search path's folder.

    ``pip install --target`` writes the list of a package's files beside it, into ``dist-info``.  A
    user's script in the same folder is not on that list.
    """
    for entry in _entries_above(path):
        name = path[len(entry) + 1 :].replace(os.sep, "/")
        try:
            changed = Path(entry).stat().st_mtime_ns
        except OSError:
            continue
        if name in _installed_files(entry, changed):
            return True
    return False


def _entries_above(path: str) -> list[str]:
    """Return the folders of the search path that a file is below."""
    entries = dict.fromkeys(map(os.path.abspath, sys.path))
    return [entry for entry in entries if _is_below(path, entry)]


# The random part that ``tempfile`` appends to a prefix.
_DRAWN_NAME = re.compile(r"[a-z0-9_]{8}")


@functools.lru_cache(maxsize=4096)
def _is_generated(filename: str) -> bool:
    """Return whether a library generated the file at run time, as torch_geometric does.

    The module then has a name inside the library, or ``tempfile`` chose the name of the file.
    """
    # Imported with the first report, as loading the extension has to be cheap.
    from cudalens.source.safe_eval import instance_dict

    # A program may put any object into `sys.modules`.
    modules = (item for item in list(sys.modules.values()) if issubclass(type(item), ModuleType))
    spaces = map(instance_dict, modules)
    names = [space.get("__name__") for space in spaces if space.get("__file__") == filename]
    return any(
        isinstance(name, str) and (_is_beside_package(name, filename) or _is_drawn(name, filename))
        for name in names
    )


def _is_beside_package(name: str, filename: str) -> bool:
    """Return whether a module has a name inside an installed package, but no file there."""
    package, _, own_name = name.rpartition(".")
    # Imported with the first report, as loading the extension has to be cheap.
    from cudalens.source.safe_eval import instance_dict

    parent = instance_dict(sys.modules.get(package)) if own_name else {}
    init, folders = parent.get("__file__"), cast("Iterable[object]", parent.get("__path__") or ())
    is_installed = isinstance(init, str) and (is_torch_file(init) or _is_library_path(init))
    return is_installed and not any(_is_below(filename, str(folder)) for folder in folders)


def _is_drawn(name: str, filename: str) -> bool:
    """Return whether ``tempfile`` named a module's file, with the module or ``tmp`` as prefix."""
    path, stem = os.path.realpath(filename), PurePath(filename).stem
    return _is_below(path, os.path.realpath(tempfile.gettempdir())) and any(
        stem.startswith(prefix) and _DRAWN_NAME.fullmatch(stem[len(prefix) :]) is not None
        for prefix in (f"{name}_", "tmp")
    )


_CHECKOUT = (".git", "pyproject.toml", "setup.py", "setup.cfg")


def _is_foreign_package(path: str) -> bool:
    """Return whether the file is in a package of the search path that is not the user's project.

    Code below the working directory, beside the running script or in a checkout is the user's: a
    notebook that runs ``sys.path.append("../src")`` imports its own project.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None) or "a script here"
    own = (os.getcwd(), os.path.dirname(os.path.abspath(script)))  # noqa: PTH100, PTH109, PTH120
    if any(_is_below(path, folder) for folder in own):
        return False
    for entry in map(Path, _entries_above(path)):
        package = PurePath(path).relative_to(entry).parts[0]
        if (entry / package / "__init__.py").is_file():
            folders = (entry, *entry.parents)
            return not any((at / mark).exists() for at in folders for mark in _CHECKOUT)
    return False


@functools.lru_cache(maxsize=64)
def _installed_files(folder: str, changed: int) -> frozenset[str]:
    """Return the Python files of the packages that were installed into a folder.

    ``changed``, the folder's modification time, keys the cache: a package may be installed later.
    """
    from importlib.metadata import distributions  # loading the extension stays cheap

    installed: set[str] = set()
    for distribution in distributions(path=[folder]):
        try:
            installed.update(map(str, distribution.files or ()))
        except (OSError, ValueError, csv.Error):
            continue
    return frozenset(installed)


# Called here, at import: in Python 3.13 an interrupt of the first call breaks it for the process.
sysconfig.get_config_vars()


@functools.cache
def _library_roots() -> tuple[str, ...]:
    # Not sys.prefix itself: a project may hold its environment, or live inside it.
    paths = sysconfig.get_paths()
    roots = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")]
    roots.append(str(PurePath(os.__file__).parent))
    roots += [os.path.realpath(root) for root in roots]
    return tuple(dict.fromkeys(roots))
