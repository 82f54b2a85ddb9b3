"""Guards for the whole process, as users switch them: install, uninstall, guard, register."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cudalens import guards, simulate
from cudalens.core.report import Report
from cudalens.evidence.context import describe
from cudalens.evidence.finding import on_violation
from cudalens.guards.interceptor import Interceptor
from cudalens.guards.process import PROCESS


def acquire() -> None:
    """Want the guards once more; :meth:`PROCESS.release` undoes it."""
    PROCESS.acquire(
        lambda devices: Interceptor(on_violation, PROCESS.internal_error, devices=devices)
    )


def install() -> None:
    """Install the guards for the whole process and all its threads; calls nest."""
    acquire()


def uninstall() -> None:
    """Undo one :func:`install`; harmless when there was none."""
    PROCESS.release()


@contextmanager
def guard() -> Iterator[None]:
    """Install the guards for the duration of a block, in all threads."""
    acquire()
    try:
        yield
    finally:
        PROCESS.release()


def last_report() -> Report | None:
    """Return the report of the last finding or failure of this process."""
    return PROCESS.last


def register_guard(op: Any, check: Callable[..., Any]) -> None:
    """Add a guard of your own for an op of your own; it acts at once where guards are installed.

    Args:
        op: ``"mylib::lookup"``, an overload such as ``torch.ops.mylib.lookup.default``, or what
            ``torch.library.custom_op`` returned.
        check: takes arguments of the op by their schema names; returns ``None`` when all is well,
            else a sentence or a :class:`cudalens.core.report_types.Violation`.

    Raises:
        GuardRegistrationError: there is no such op, it has no argument of that name, or ``check``
            is no function.
    """
    guards.register(op, check)
    PROCESS.refresh()


# --- status --------------------------------------------------------------------------------------


def status() -> str:
    """Return one line each for the guards, the device and the last finding of this process."""
    last = PROCESS.last
    lines = [
        ("guards", "installed" if PROCESS.is_installed else "not installed"),
        ("device", _device()),
        ("last finding", "none" if last is None else f"{last.kind}: {last.headline_own}"),
    ]
    return "\n".join(f"{name + ':':<14}{text}" for name, text in lines)


def _device() -> str:
    import torch

    if simulate.current() is not None:
        return f"{simulate.DEVICE_NAME}, a rehearsal and not a GPU"
    if not torch.cuda.is_available():
        return "no GPU; `%cudacheck simulate` turns on a rehearsal device"
    return describe().device or "a GPU that this process has not used yet"


# --- the CUDA device: the real one, else the simulated one --------------------------------------


def start_simulation() -> Any | None:
    """Start the simulated device unless it runs, and print what it is.

    Returns:
        the simulation; ``None`` where it was running before.

    Raises:
        SimulationError: it cannot be started in this process.
    """
    started = simulate.start(announce=False) if simulate.current() is None else None
    print(simulate.ANNOUNCEMENT)
    return started


def stop_simulation() -> bool:
    """Stop the simulated device; return whether it was running."""
    running = simulate.current()
    if running is not None:
        running.stop()
    return running is not None


def ensure_cuda() -> Any:
    """Return ``torch.device("cuda")``, and say in one line which device stands behind it.

    Starts the simulated device where there is no GPU.

    Returns:
        the :class:`torch.device`.

    Raises:
        cudalens.simulate.SimulationError: there is no GPU and the simulation cannot start here.
    """
    import torch

    if simulate.current() is not None:
        print(f"cuda: {simulate.DEVICE_NAME}, a rehearsal and not a GPU")
    elif torch.cuda.is_available():
        print(f"cuda: {torch.cuda.get_device_name()}")
    else:
        simulate.start()
    return torch.device("cuda")
