"""The rehearsal device, for machines without a GPU: ordinary cuda code fails as on a GPU.

The work runs on the CPU.  As on a GPU, errors of out-of-range values appear late and
persist.  It is not a GPU: timings, memory, rounding and low-level faults are not imitated.

The module is callable: ``cudalens.simulate()`` is ``cudalens.simulate.start()``.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from cudalens.core.errors import NotRehearsedError, SimulationError

if TYPE_CHECKING:
    from cudalens.simulate.activation import ANNOUNCEMENT, TESTED, Simulation, start
    from cudalens.simulate.surface import DEVICE_NAME

__all__ = [
    "ANNOUNCEMENT",
    "DEVICE_NAME",
    "TESTED",
    "NotRehearsedError",
    "Simulation",
    "SimulationError",
    "current",
    "start",
]

# Importing this package must not import torch; these names bring it in when they are asked for.
_LAZY = {
    **dict.fromkeys(("ANNOUNCEMENT", "TESTED", "Simulation", "start"), "activation"),
    "DEVICE_NAME": "surface",
}


def current() -> Simulation | None:
    """Return the running simulation, without importing torch when there is none."""
    activation = sys.modules.get(f"{__name__}.activation")
    return activation.Simulation.running if activation is not None else None


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


class CallableModule(ModuleType):
    """Let ``cudalens.simulate`` be the package and the function that starts it."""

    def __call__(
        self,
        *,
        lag: int | None = None,
        seed: int | None = None,
        blocking: bool | None = None,
        announce: bool = True,
    ) -> Simulation:
        """Start the rehearsal device; see `start`."""
        from cudalens.simulate.activation import start

        return start(lag=lag, seed=seed, blocking=blocking, announce=announce)

    if TYPE_CHECKING:  # what type checkers and editors know behind ``cudalens.simulate.``
        ANNOUNCEMENT: str
        DEVICE_NAME: str
        TESTED: tuple[str, ...]
        NotRehearsedError = NotRehearsedError
        Simulation = Simulation
        SimulationError = SimulationError
        current = staticmethod(current)
        start = staticmethod(start)


sys.modules[__name__].__class__ = CallableModule
