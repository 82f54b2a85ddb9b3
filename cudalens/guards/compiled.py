"""Guards inside compiled code: the op that looks at an index there, and the installation.

A pass has each index brought into bounds by our op, which has its extremes looked at as a deferred
guard does.  What they mean (op, argument, bounds, line) are arguments of the call: code from a warm
cache says the same as code just made.

Ops that inductor leaves to torch's own kernels come by the dispatcher, and are guarded there.

Not here: what is put into a graph (``compiled_graph.py``); how a pending check is read and told
(``pending.py``, ``deferred.py``).
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache, lru_cache, partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor

from cudalens.core import _compiler, _torch
from cudalens.core._python import Uninterrupted, raise_if_outside
from cudalens.core.errors import DeviceIndexError
from cudalens.core.late_import import when_imported
from cudalens.core.report_types import Violation
from cudalens.guards._dims import NEGATIVES_STOP, NEGATIVES_WRAP
from cudalens.guards._ranges import extremes, lies_within
from cudalens.guards.captured import CAPTURED
from cudalens.guards.compiled_graph import CompiledCheck, guard_graph
from cudalens.guards.deferred import violation_of
from cudalens.guards.engine import Within, in_bounds
from cudalens.guards.past_calls import IsUsers, PastCall, StackLine, running_call
from cudalens.guards.pending import PENDING, Check

NO_HOOK = "compiled code is not guarded: {reason}"
OTHER_BACKEND = (
    "code compiled with backend={name} is guarded only at the ops that torch itself runs"
)
NO_ROOM = "a CUDA graph was captured with checks that cannot be noted: guards make room at calls"


# --- the op ---------------------------------------------------------------------------------------


Tell = Callable[[CompiledCheck, Violation, PastCall], "BaseException | None"]


class _Listening:
    """Who is told what compiled code notes: the guards that are installed, or nobody."""

    tell: Tell | None = None
    complain: Callable[[str], None]
    is_users: IsUsers


def _in_bounds(index: Tensor, low: int, high: int, meaning: str) -> Tensor:
    """Return a copy of an index of a compiled graph in bounds; the host does not wait for it.

    Raises:
        DeviceIndexError: it was out of bounds, in code that outlives the guards; nothing else
            would say it.
    """
    check = _read(meaning)
    why = NEGATIVES_WRAP if check.wraps else NEGATIVES_STOP
    need = Within(
        check.argument, low, high, item=check.item, of=check.related, dim=check.dim, why=why
    )
    tell = _Listening.tell
    if index.numel() == 0:
        pass
    elif tell is None:
        if not (_torch.is_capturing() or lies_within(index, low, high)):
            raise DeviceIndexError(violation_of(need, *extremes(index)).sentence())
    elif _torch.is_capturing() and not CAPTURED.has_room(index.device):
        _Listening.complain(NO_ROOM)
    else:
        thread, stack = running_call(_Listening.is_users)
        report = partial(_report, tell, check, need, stack)
        PENDING.note(index, Check(low, high, report, thread))
    safe = in_bounds(need, index.contiguous())
    return safe.clone() if safe is index else safe


def _report(
    tell: Tell,
    check: CompiledCheck,
    need: Within,
    stack: tuple[StackLine, ...],
    smallest: int,
    largest: int,
    replay: int | None = None,
) -> BaseException | None:
    lines = tuple(_line(*frame) for frame in check.frames)
    past = PastCall(
        lines=stack if check.backward else (*stack, *lines),
        in_backward=check.backward,
        forward=lines if check.backward else (),
    )
    return tell(check, violation_of(need, smallest, largest, replay=replay), past)


def _line(file: str, line: int, function: str) -> StackLine:
    """Return a line of the user's in the form of one that ran: inside compiled code none does."""
    code = compile("0", file, "exec").replace(co_firstlineno=line, co_name=function)
    positions = enumerate(code.co_positions())
    return code, next(2 * at for at, position in positions if position[0] == line)


@lru_cache(256)
def _read(meaning: str) -> CompiledCheck:
    item = json.loads(meaning)
    return CompiledCheck(**{**item, "frames": tuple(map(tuple, item["frames"]))})


@cache
def _define_op() -> Any:
    """Define ``cudalens::in_bounds`` once for the process: compiled code may outlive the guards."""
    library = torch.library.Library("cudalens", "DEF")
    library.define("in_bounds(Tensor index, SymInt low, SymInt high, str meaning) -> Tensor")
    library.impl("in_bounds", _in_bounds, "CompositeExplicitAutograd")
    library.impl("in_bounds", lambda index, *_: index.new_empty(index.shape), "Meta")
    return library


# --- installation ---------------------------------------------------------------------------------


class CompiledGuards:
    """The guards inside compiled code: :meth:`install` puts them in, :meth:`uninstall` takes out.

    Functions that were compiled without them are compiled anew when they are next called, and so
    are those compiled with them once they are gone.

    Args:
        tell: makes the report of a finding, of which the extremes and the lines are known, and
            returns what is to be raised.
        on_internal_error: told, in one line, when a guard cannot be put in; the code is compiled
            without it.
        devices: device types to act on, instead of the accelerators.
        is_users: whether a file is the user's.
    """

    def __init__(
        self,
        tell: Tell,
        on_internal_error: Callable[[str], None],
        *,
        is_users: IsUsers = lambda file: False,
        devices: Iterable[str] | None = None,
    ) -> None:
        self._tell, self._is_users = tell, is_users
        self._on_internal_error = on_internal_error
        self._devices = frozenset(devices) if devices is not None else _torch.ACCELERATORS
        self._undo: list[Callable[[], None]] = []
        self._backends: set[str] = set()
        self._lock = threading.RLock()

    def install(self) -> None:
        """Put the pass in, or wait for the compiler to be imported; does nothing twice."""
        with Uninterrupted(), self._lock:
            if self._undo:
                return
            _Listening.tell, _Listening.complain = self._tell, self._on_internal_error
            _Listening.is_users = self._is_users
            self._undo.append(_compiler.tell_of_backends(self._tell_of_backend))
            config = sys.modules.get(_compiler.COMPILER_CONFIG)
            if config is None:
                self._undo.append(when_imported(_compiler.COMPILER_CONFIG, self._enter))
            else:
                self._enter(config)
                _compiler.forget_compiled_code()

    def uninstall(self) -> None:
        """Take the pass out; what is still pending is told as before."""
        with Uninterrupted(), self._lock:
            if self._undo:
                for _ in range(len(self._undo)):
                    self._undo.pop()()
                _Listening.tell = None
                _compiler.forget_compiled_code()

    def _enter(self, config: ModuleType) -> None:
        _define_op()
        try:
            undo = _compiler.rewrite_compiled_graphs(config, self._rewrite, self._identity)
            self._undo.append(undo)
        except NotImplementedError as error:
            self._on_internal_error(NO_HOOK.format(reason=error))

    def _tell_of_backend(self, name: str) -> None:
        if name not in self._backends:
            self._backends.add(name)
            self._on_internal_error(OTHER_BACKEND.format(name=name))

    def _rewrite(self, graph: Any) -> None:
        try:
            guard_graph(graph, self._devices)
        except Exception as failure:  # a guard that fails must never stop a compilation
            raise_if_outside(failure)
            kind = type(failure).__name__
            self._on_internal_error(f"a compiled graph is not guarded: {kind}: {failure}")

    def _identity(self) -> str | None:
        """Return what tells guarded code in inductor's caches: the lines travel in it.

        The same graph may come from other lines, so that their code objects belong to it.
        """
        codes = _compiler.code_being_compiled()
        if codes is None:
            return None
        parts = [_own_source(), *sorted(self._devices), *map(_format_code, codes)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def _own_source() -> str:
    # What is put into a graph follows from the catalogue, too.
    files = sorted(Path(__file__).parent.glob("*.py"))
    sources = b"".join(file.read_bytes() for file in files)
    return hashlib.sha256(sources).hexdigest()


def _format_code(code: CodeType) -> str:
    """Return what tells a code object and its lines, in this process and in others."""
    table = hashlib.sha256(code.co_code + code.co_linetable).hexdigest()
    return f"{code.co_filename}:{code.co_firstlineno}:{code.co_qualname}:{table}"
