"""Guards inside compiled code: the op that looks at an index there, and the installation.

A pass has each index brought into bounds by our op, which has its extremes looked at as a deferred
guard does.  What they mean (op, argument, bounds, line) are arguments of the call: code from a warm
cache says the same as code just made.

Ops that inductor leaves to torch's own kernels come by the dispatcher, and are guarded there.

Not here: what is put into a graph (``compiled_graph.py``); how a pending check is read and reported
(``pending.py``, ``deferred.py``).
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable
from functools import cache, lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cudalens.core import _compiler, _torch
from cudalens.core._python import Uninterrupted, raise_if_outside
from cudalens.core.errors import DeviceIndexError
from cudalens.core.limits import failure_line
from cudalens.guards import GUARDS
from cudalens.guards._ranges import extremes, lies_within
from cudalens.guards.captured import CAPTURED
from cudalens.guards.compiled_graph import guard_graph
from cudalens.guards.deferred import ReportViolation, violation_of
from cudalens.guards.engine import Within, in_bounds
from cudalens.guards.past_calls import IsUsers, PastCall, StackLine, running_call
from cudalens.guards.pending import PENDING, Check

NO_HOOK = "compiled code is not guarded: {reason}"
NO_ROOM = "a CUDA graph was captured with checks that cannot be noted: guards make room at calls"
_read = lru_cache(256)(json.loads)

_installed: list[CompiledGuards] = []
"""Those who are told what compiled code finds: the last of them, or nobody."""


class CompiledGuards:
    """The guards inside compiled code: :meth:`install` puts them in, :meth:`uninstall` takes out.

    Functions that were compiled without them are compiled anew when they are next called, and so
    are those compiled with them once they are gone.

    Args:
        report_violation: makes the report of a finding, and returns what is to be raised.
        on_internal_error: told, in one line, when a guard cannot be put in; the code is compiled
            without it.
        devices: device types to act on, instead of the accelerators.
        is_users: whether a file is the user's.
    """

    def __init__(
        self,
        report_violation: ReportViolation,
        on_internal_error: Callable[[str], None],
        *,
        is_users: IsUsers = lambda file: False,
        devices: Iterable[str] | None = None,
    ) -> None:
        self.is_users, self.complain = is_users, on_internal_error
        self._report_violation = report_violation
        self._devices = frozenset(devices) if devices is not None else _torch.ACCELERATORS
        self._undo: list[Callable[[], None]] = []
        self._lock = threading.RLock()

    def install(self) -> None:
        """Put the pass in, or wait for the compiler to be imported; does nothing twice."""
        with Uninterrupted(), self._lock:
            if not self._undo:
                _installed.append(self)
                self._undo.append(_compiler.when_loaded(_compiler.COMPILER_CONFIG, self._enter))
                _compiler.forget_compiled_code()

    def uninstall(self) -> None:
        """Take the pass out; what is still pending is reported as before."""
        with Uninterrupted(), self._lock:
            if self._undo:
                for _ in range(len(self._undo)):
                    self._undo.pop()()
                _installed.remove(self)
                _compiler.forget_compiled_code()

    def _enter(self, config: ModuleType) -> None:
        _define_op()
        try:
            undo = _compiler.rewrite_compiled_graphs(config, self._rewrite, self._identity)
            self._undo.append(undo)
        except NotImplementedError as error:
            self.complain(NO_HOOK.format(reason=error))

    def _rewrite(self, graph: Any) -> None:
        try:
            guard_graph(graph, self._devices)
        except Exception as failure:  # a guard that fails must never stop a compilation
            raise_if_outside(failure)
            self.complain(failure_line("guards of a compiled graph", failure))

    def _identity(self) -> str | None:
        """Return what distinguishes guarded code in inductor's caches: the lines travel in it.

        The same graph may come from other lines, so that their code objects belong to it.
        """
        codes = _compiler.code_being_compiled()
        if codes is None:
            return None
        digest = hashlib.sha256(_own_source() + repr(sorted(self._devices)).encode())
        for code in codes:
            lines = (code.co_filename, code.co_firstlineno, code.co_code, code.co_linetable)
            digest.update(repr(lines).encode())
        return digest.hexdigest()

    def report(
        self,
        check: dict[str, Any],
        need: Within,
        stack: tuple[StackLine, ...],
        smallest: int,
        largest: int,
        replay: int | None = None,
    ) -> BaseException | None:
        """Report a finding, and return what is to be raised."""
        lines = tuple(_line(*frame) for frame in check["frames"])
        past = PastCall(
            lines=stack if check["backward"] else (*stack, *lines),
            in_backward=check["backward"],
            forward=lines if check["backward"] else (),
        )
        op = _torch.op_of(check["op"])
        violation = violation_of(need, smallest, largest, replay=replay)
        return self._report_violation(op, GUARDS[op][0], violation, past)


@cache
def _own_source() -> bytes:
    # What is put into a graph follows from the catalogue, too.
    return b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))


def _line(file: str, line: int, function: str) -> StackLine:
    """Return a line of the user's in the form of one that ran: inside compiled code none does."""
    code = compile("0", file, "exec").replace(co_firstlineno=line, co_name=function)
    positions = enumerate(code.co_positions())
    return code, next(2 * at for at, position in positions if position[0] == line)


# --- the op ---------------------------------------------------------------------------------------


def _in_bounds(index: Tensor, low: int, high: int, meaning: str) -> Tensor:
    """Return a copy of an index of a compiled graph in bounds; the host does not wait for it.

    Raises:
        DeviceIndexError: it was out of bounds, in code that outlives the guards; nothing else
            would say it.
    """
    check = _read(meaning)
    need = Within(low=low, high=high, **check["need"])
    if index.numel() == 0:
        pass
    elif not _installed:
        if not (_torch.is_capturing() or lies_within(index, low, high)):
            raise DeviceIndexError(violation_of(need, *extremes(index)).sentence())
    elif _torch.is_capturing() and not CAPTURED.has_room(index.device):
        _installed[-1].complain(NO_ROOM)
    else:
        thread, stack = running_call(_installed[-1].is_users)
        report = partial(_installed[-1].report, check, need, stack)
        PENDING.note(index, Check(low, high, report, thread))
    safe = in_bounds(need, index.contiguous())
    return safe.clone() if safe is index else safe


@cache
def _define_op() -> Any:
    """Define ``cudalens::in_bounds`` once for the process: compiled code may outlive the guards."""
    library = torch.library.Library("cudalens", "DEF")
    library.define("in_bounds(Tensor index, SymInt low, SymInt high, str meaning) -> Tensor")
    library.impl("in_bounds", _in_bounds, "CompositeExplicitAutograd")
    library.impl("in_bounds", lambda index, *_: index.new_empty(index.shape), "Meta")
    return library
