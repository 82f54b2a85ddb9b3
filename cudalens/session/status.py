"""Says in text what is installed, on which device, and what the last finding was."""

from __future__ import annotations

from cudalens import simulate
from cudalens.evidence.environment import describe
from cudalens.guards.process import PROCESS

__all__ = ["status"]


def status() -> str:
    """Give one line each for the guards, the device and the last finding of this process."""
    last = PROCESS.last
    lines = [
        ("guards", "installed" if PROCESS.is_installed else "not installed"),
        ("device", _device()),
        ("last finding", "none" if last is None else f"{last.kind}: {last.headline}"),
    ]
    return "\n".join(f"{name + ':':<14}{text}" for name, text in lines)


def _device() -> str:
    import torch

    if simulate.current() is not None:
        return f"{simulate.DEVICE_NAME}, a rehearsal and not a GPU"
    if not torch.cuda.is_available():
        return "no GPU; `%cudacheck simulate` turns on a rehearsal device"
    return describe().device or "a GPU that this process has not used yet"
