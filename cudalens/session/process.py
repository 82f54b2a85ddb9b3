"""The public functions for the whole process: install, uninstall, guard, register and status."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from cudalens import guards, simulate
from cudalens.core import _torch
from cudalens.core._python import add_note
from cudalens.core.limits import Limits
from cudalens.core.report import Report
from cudalens.core.report_types import format_count
from cudalens.evidence.context import describe
from cudalens.evidence.finding import on_past_violation, on_violation
from cudalens.guards.interceptor import Interceptor
from cudalens.guards.pending import PENDING
from cudalens.guards.process import PROCESS
from cudalens.session.succession import SUCCESSION
from cudalens.source.files import is_user_file
from cudalens.source.shown_frames import hide_own_frames
from cudalens.source.stack import is_loader_worker

if TYPE_CHECKING:
    import torch

    from cudalens.core.report_types import Violation
    from cudalens.simulate import Simulation


_FILES = 1024


def acquire(*, is_deferred: bool = False, in_compiled: bool = False) -> None:
    """Increment the guards' install count; :meth:`PROCESS.release` decrements it.

    Raises:
        DeviceAssertError: a call that was made before, and is looked at only now.
    """
    _raise(PROCESS.settle())
    PROCESS.acquire(
        lambda devices: Interceptor(
            on_violation,
            PROCESS.internal_error,
            devices=devices,
            on_failed_call=PROCESS.call_failed,
            on_past_violation=on_past_violation,
            # Deferred guards ask this for each frame of each call.
            is_users=lru_cache(_FILES)(is_user_file),
        ),
        is_deferred=is_deferred,
        in_compiled=in_compiled,
    )


def install(*, deferred: bool = False) -> None:
    """Install the guards for the whole process and all its threads; calls nest.

    Args:
        deferred: do not wait for the GPU at a call: values are checked later, see :func:`settle`.
            While any other part of the process uses normal guards, all guards check immediately.

    Example:
        >>> cudalens.install()
        >>> table = torch.zeros(3, 2, device="cuda")
        >>> table[torch.tensor([3], device="cuda")]
        Traceback (most recent call last):
        cudalens.core.errors.DeviceIndexError: ...
        >>> cudalens.uninstall()
    """
    acquire(is_deferred=deferred)
    PROCESS.installs.append(deferred)
    if deferred:
        _report_at_exit()


def uninstall() -> None:
    """Undo one :func:`install`; do nothing if there was none.

    Raises:
        DeviceAssertError: a finding of deferred guards that was not raised before.

    Example:
        >>> cudalens.install()
        >>> cudalens.uninstall()
    """
    SUCCESSION.forget()
    is_deferred = PROCESS.installs.pop() if PROCESS.installs else False
    # The last release removes what settles, so it comes second.
    error = PROCESS.settle() if is_deferred else None
    PROCESS.release(is_deferred=is_deferred)
    _raise(error)


def guard(*, deferred: bool = False) -> AbstractContextManager[None]:
    """Return a context manager that installs the guards, in all threads.

    Args:
        deferred: as for :func:`install`; pending checks are finished at the end of the block.

    Example:
        >>> with cudalens.guard():
        ...     torch.zeros(3, device="cuda")[torch.tensor([2], device="cuda")].item()
        0.0
    """
    return _GuardedBlock(deferred)


class _GuardedBlock(ContextDecorator, AbstractContextManager[None]):
    # Not `@contextmanager`: contextlib sets the traceback of an exception that leaves it.
    def __init__(self, is_deferred: bool) -> None:
        self._is_deferred = is_deferred

    def __enter__(self) -> None:
        acquire(is_deferred=self._is_deferred)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            late: BaseException | None = None
            if self._is_deferred and error is not None:
                late = Limits().attempt("pending checks", PROCESS.settle)
                late = None if late is None else in_place_of(error, late)
            elif self._is_deferred:
                late = PROCESS.settle()
            _raise(late)
        finally:
            PROCESS.release(is_deferred=self._is_deferred)


_SKIPS = {"_pytest.outcomes": "Skipped", "unittest.case": "SkipTest"}


def in_place_of(error: BaseException, finding: BaseException) -> BaseException | None:
    """Return the finding if it replaces the exception that ends its block, else ``None``.

    It replaces one that means success, such as ``sys.exit(0)``.  Any other exception is kept, and
    gets a note.
    """
    # Not imported: a program that skips a test has loaded the module.
    skips = [getattr(sys.modules.get(module), name, ()) for module, name in _SKIPS.items()]
    is_exit = isinstance(error, SystemExit) and not error.code
    if is_exit or isinstance(error, (GeneratorExit, *filter(None, skips))):
        # The exit that it replaces is not its cause.
        finding.__suppress_context__ = True
        return finding
    line = str(finding).partition("\n")[0]
    add_note(error, f"cudalens: found before this: {line}")
    return None


def settle() -> None:
    """Wait for all pending checks of deferred guards; free if there are none.

    Raises:
        DeviceAssertError: the first finding; the others are its notes.
        RuntimeError: a CUDA graph is being captured.

    Example:
        >>> with cudalens.guard(deferred=True):
        ...     rows = torch.zeros(3, device="cuda")[torch.tensor([3], device="cuda")]
        ...     cudalens.settle()
        Traceback (most recent call last):
        cudalens.core.errors.DeviceIndexError: ...
    """
    # A lost device counts as capturing, too, and must raise its own error.
    if PENDING and _torch.is_capturing() and _torch.is_device_usable():
        msg = "cudalens.settle() cannot wait while a CUDA graph is captured: call it after a replay"
        raise RuntimeError(msg)
    if not PENDING and PENDING.inherited:
        count, PENDING.inherited = PENDING.inherited, 0
        checks = format_count(count, "check")
        warnings.warn(
            f"pending when this process was forked, so for its parent to settle: {checks}",
            stacklevel=2,
        )
    _raise(PROCESS.settle())


def _clean_worker_errors() -> None:
    """Hide our frames in the errors of a forked ``DataLoader`` worker.

    A worker sends its error as the text of the whole traceback.
    """
    if not (PROCESS.is_installed and is_loader_worker()):
        return
    wrapper = _torch.ExceptionWrapper
    before = wrapper.__init__

    def wrap(self: Any, exc_info: Any = None, *args: Any, **kwargs: Any) -> None:
        kind, error, trace = sys.exc_info() if exc_info is None else exc_info
        if error is not None:
            hide_own_frames(error)
            trace = error.__traceback__
        before(self, (kind, error, trace), *args, **kwargs)

    # Never restored, because the worker is a process of its own.
    wrapper.__init__ = wrap


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_clean_worker_errors)


def _raise(error: BaseException | None) -> None:
    if error is not None:
        hide_own_frames(error)
        raise error


@cache  # once for the process
def _report_at_exit() -> None:
    """Settle pending checks when the program ends: its last op may be the bad one."""

    @atexit.register
    def report() -> None:
        error = Limits().attempt("pending checks", PROCESS.settle)  # the device may be lost
        if error is not None:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)


def last_report() -> Report | None:
    """Return the report of the last finding or failure of this process, or ``None``.

    Example:
        >>> with cudalens.guard():
        ...     torch.zeros(3, device="cuda")[torch.tensor([3], device="cuda")]
        Traceback (most recent call last):
        cudalens.core.errors.DeviceIndexError: ...
        >>> cudalens.last_report().offenders.first[0].value
        3
    """
    return PROCESS.last


def register_guard(
    op: Any, check: Callable[..., Violation | str | None], name: str | None = None
) -> Callable[[], None]:
    """Add a guard of your own for an op of your own; it acts at once where guards are installed.

    A second guard of the same name for the same op takes the place of the first, so that a cell
    may run twice.

    Args:
        op: ``"mylib::lookup"``, an overload such as ``torch.ops.mylib.lookup.default``, or what
            ``torch.library.custom_op`` returned.
        check: takes arguments of the op by their schema names; returns ``None`` when all is well,
            else a sentence or a :class:`cudalens.Violation`.
        name: what a report calls the guard; that of the function by default.  A lambda without it
            has none, and replaces nothing.

    Returns:
        a function that takes the guard out again; calling it twice is harmless.

    Raises:
        GuardRegistrationError: the op does not exist, it has no argument of that name, or ``check``
            is not a function.

    Example:
        >>> def not_empty(self):
        ...     return None if self.numel() else "the input of median has no elements"
        >>> remove = cudalens.register_guard("aten::median", not_empty)
        >>> with cudalens.guard():
        ...     torch.zeros(0, device="cuda").median()
        Traceback (most recent call last):
        cudalens.core.errors.DeviceValueError: the input of median has no elements...
        >>> remove()
    """
    entry = guards.add(op, check, name)
    PROCESS.refresh()

    def undo() -> None:
        guards.remove(entry)
        PROCESS.refresh()

    return undo


# --- status --------------------------------------------------------------------------------------


def note_check(checked: int, recorded: int, report: Report | None) -> None:
    """Store the line that ``status`` shows about the last checked block."""
    calls, ops = format_count(checked, "guarded call"), format_count(recorded, "op")
    found = "nothing" if report is None else "a problem"
    PROCESS.last_check = f"{calls} checked, {ops} recorded, {found} found"


def status() -> str:
    """Return one line each for the guards, CUDA, the last check and the last finding."""
    last = PROCESS.last
    lines = [
        ("guards", _guards()),
        ("CUDA", _cuda()),
        ("last check", PROCESS.last_check),
        ("last finding", "none" if last is None else last.headline),
    ]
    return "\n".join(f"{name + ':':<14}{text}" for name, text in lines)


def _guards() -> str:
    if not PROCESS.is_installed:
        return "not installed"
    if not PROCESS.is_deferred:
        return "installed"
    return f"installed, deferred: {format_count(PENDING.count, 'call')} pending"


def _cuda() -> str:
    import torch

    if simulate.current() is not None:
        name = f"{simulate.DEVICE_NAME}, a rehearsal and not a GPU"
    elif not torch.cuda.is_available():
        return "no GPU; `%cudacheck simulate` turns on a rehearsal device"
    elif not torch.cuda.is_initialized():
        return "a GPU that this process has not used yet"
    else:
        name = describe().device or "a GPU"
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return f"lost: an earlier CUDA kernel failed. Restart the notebook or the process ({name})"
    return f"fine ({name})"


# --- the CUDA device: the real one, else the simulated one --------------------------------------


def start_simulation() -> Simulation | None:
    """Start the rehearsal device unless it runs, and print what it is.

    Returns:
        the simulation; ``None`` where it was running before.

    Raises:
        SimulationError: it cannot be started in this process.
    """
    started = simulate.start(announce=False) if simulate.current() is None else None
    print(simulate.ANNOUNCEMENT)
    return started


def stop_simulation() -> None:
    """Stop the rehearsal device, and print whether it was running."""
    running = simulate.current()
    if running is not None:
        running.stop()
    print("no rehearsal device" if running is None else "rehearsal device off")


def ensure_cuda() -> torch.device:
    """Return ``torch.device("cuda")`` and print which device it is.

    Starts the rehearsal device on a machine without a GPU.

    Returns:
        the :class:`torch.device`.

    Raises:
        cudalens.simulate.SimulationError: there is no GPU, and the rehearsal device cannot start.

    Example:
        >>> device = cudalens.ensure_cuda()
        cuda: ...
        >>> device
        device(type='cuda')
    """
    import torch

    if simulate.current() is not None:
        print(f"cuda: {simulate.DEVICE_NAME}, a rehearsal and not a GPU")
    elif torch.cuda.is_available():
        print(f"cuda: {torch.cuda.get_device_name()}")
    else:
        simulate.start()
    return torch.device("cuda")
