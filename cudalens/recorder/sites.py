"""The place of a call: the user's line, the module and the phase, found in a few steps per op.

Walking the whole stack for each call would cost more than the call.  So the walk stops at the first
frame whose place is already known: hooks record it for a module's call, an optimizer's step and a
backward pass.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Final, NamedTuple, TypeAlias
from weakref import ref

from torch import nn

from cudalens.core.report_types import LineRef, Phase
from cudalens.source.files import is_user_file, torch_path
from cudalens.source.locate import locate_line
from cudalens.source.module_path import paths_below
from cudalens.source.stack import StackEntry, line_of, place_of

_OTHER, _USER, _NOTED = range(3)
_OPTIMIZED: Final = inspect.CO_OPTIMIZED
_NOTED_FILES: Final = ("nn/modules/module.py", "optim/optimizer.py")
_BACKWARD: Final = str(Path(__file__).with_name("backward.py"))


class Site:
    """A place shared by many calls: a module's call, an optimizer's step, a backward pass."""

    __slots__ = ("closure", "code", "is_brief", "lasti", "methods", "module", "outer", "phase")

    def __init__(self, phase: Phase, base: RawSite, module: nn.Module | None = None) -> None:
        self.phase = phase
        # Inside optimizers no inputs are recorded: they do not explain where a bad value came from.
        self.is_brief = phase == "optimizer" and module is None
        self.module = None if module is None else ref(module)
        self.closure: Site | None = None
        """For a step with a closure: the place of the calls in the closure."""
        self.methods: frozenset[CodeType] = frozenset()
        """For a step with a closure: the code of the optimizer's own methods."""
        self.code: CodeType | None
        """The code of the user's innermost line that led here."""
        self.outer: Site | None
        if isinstance(base, tuple):
            self.code, self.lasti, self.outer = base
        else:
            self.outer = base
            self.code, self.lasti = (None, 0) if base is None else (base.code, base.lasti)


RawSite: TypeAlias = "Site | tuple[CodeType, int, Site | None] | None"
"""A shared place, or a user's line in one: its code, its instruction, and the shared place."""


class SiteTracker:
    """Keep the shared places that are currently on the stack."""

    def __init__(self) -> None:
        self._kinds = _FileKinds()
        self._noted: dict[int, Site] = {}
        self._module_code: CodeType | None = None
        self._step_code: CodeType | None = None

    def of(self, frame: FrameType | None) -> RawSite:  # the hot path: no function calls
        """Return the place of the call that ``frame`` is making."""
        user: CodeType | None = None
        site: Site | None = None
        lasti = 0
        kinds = self._kinds
        while frame is not None:
            code = frame.f_code
            kind = kinds[code.co_filename]
            if kind:
                if kind == _USER:
                    if user is None:
                        user, lasti = code, frame.f_lasti
                    if not code.co_flags & _OPTIMIZED:  # the top level of a cell or a file
                        break
                elif (
                    code is self._module_code
                    or code is self._step_code
                    or code.co_name == "run_backward"
                ):
                    # An entry of a dead frame at the same address cannot be hit: a live frame of
                    # this code has overwritten it when it was entered.
                    site = self._noted.get(id(frame))
                    if site is not None:
                        break
            frame = frame.f_back
        if user is None:
            return site
        if site is not None and site.closure is not None and user not in site.methods:
            site = site.closure
        return user, lasti, site

    def enter_backward(self, frame: FrameType) -> Site:
        """Record a backward pass; ``frame`` runs ``run_backward``."""
        site = self._noted[id(frame)] = Site("backward", self.of(frame.f_back))
        return site

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """Record a module's call: a global forward pre-hook."""
        frame = sys._getframe(1)
        self._module_code = frame.f_code
        base = self.of(frame.f_back)
        outer = base[2] if isinstance(base, tuple) else base
        phase: Phase = "backward" if outer is not None and outer.phase == "backward" else "forward"
        self._noted[id(frame)] = Site(phase, base, module)

    def enter_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Record an optimizer's step: a global step pre-hook."""
        frame = sys._getframe(1)
        self._step_code = frame.f_code
        base = self.of(frame.f_back)
        site = self._noted[id(frame)] = Site("optimizer", base)
        if any(callable(item) for item in (*args[1:], *kwargs.values())):
            site.closure = Site("forward", base)
            functions = (it for kind in type(optimizer).__mro__ for it in vars(kind).values())
            # torch wraps `step` in profiling and `no_grad`. The running frame is the unwrapped one.
            inner = (inspect.unwrap(it) for it in functions if type(it) is FunctionType)
            site.methods = frozenset(it.__code__ for it in inner if type(it) is FunctionType)


class _FileKinds(dict[str, int]):
    """Cache from filename to the kind of its frames."""

    def __missing__(self, filename: str) -> int:
        if torch_path(filename) in _NOTED_FILES or filename == _BACKWARD:
            kind = _NOTED
        else:
            kind = _USER if is_user_file(filename) else _OTHER
        self[filename] = kind
        return kind


# --- reading, after a failure --------------------------------------------------------------------


def shared_site(site: RawSite) -> Site | None:
    """Return the innermost shared place of a call."""
    return site[2] if isinstance(site, tuple) else site


def shared_sites(site: RawSite) -> Iterator[Site]:
    """Yield the shared places of a call, innermost first."""
    shared = shared_site(site)
    while shared is not None:
        yield shared
        shared = shared.outer


def phase_of(site: RawSite) -> Phase:
    """Return the phase of a place."""
    shared = shared_site(site)
    return "forward" if shared is None else shared.phase


def entries_of(site: RawSite) -> list[StackEntry]:
    """Return the user's lines that led to a place, outermost first."""
    lines = [site[:2]] if isinstance(site, tuple) else []
    lines += [(item.code, item.lasti) for item in shared_sites(site) if item.code is not None]
    lines = list(dict.fromkeys(lines))
    return [StackEntry(code, line_of(code, lasti), lasti) for code, lasti in reversed(lines)]


def codes_of(shared: Site | None) -> Iterator[CodeType]:
    """Yield the code of the lines that led to a shared place, innermost first."""
    yield from (item.code for item in shared_sites(shared) if item.code is not None)


class RunningModule(NamedTuple):
    """The path of a module, its class name, and the root module that the path starts from."""

    path: str | None = None
    type_name: str | None = None
    root: nn.Module | None = None


class SiteReader:
    """Resolve places to source lines and module paths, each once."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, int], LineRef | None] = {}
        self._paths: dict[int, dict[int, str]] = {}

    def line(self, site: RawSite) -> LineRef | None:
        """Return the user's innermost line."""
        entries = [item for item in entries_of(site) if not place_of(item).is_generated]
        if not entries:
            return None
        key = (id(entries[-1].code), entries[-1].lasti)
        if key not in self._lines:
            self._lines[key] = locate_line(entries[-1:])
        return self._lines[key]

    def module(self, site: RawSite) -> RunningModule:
        """Return the innermost running module by its path in the outermost running one."""
        running = [
            module
            for item in shared_sites(site)
            if item.module is not None and (module := item.module()) is not None
        ]
        if not running:
            return RunningModule()
        root = running[-1]
        if id(root) not in self._paths:
            self._paths[id(root)] = paths_below(root)
        paths = self._paths[id(root)]
        # A module that none above it registers has no path: take the nearest one around it.
        inner = next(item for item in running if id(item) in paths)
        path = paths[id(inner)]
        return RunningModule(path, type(inner).__name__, root) if path else RunningModule()
