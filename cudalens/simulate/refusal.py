"""The errors with which the simulation says no.

::

    RuntimeError
     └── SimulationError              the simulation cannot be started here
          └── NotRehearsedError       … also a NotImplementedError: a feature it does not imitate
"""

from __future__ import annotations


class SimulationError(RuntimeError):
    """The simulated device cannot be started in this process."""


class NotRehearsedError(SimulationError, NotImplementedError):
    """The simulated device does not imitate this feature."""


def not_rehearsed(what: str) -> NotRehearsedError:
    """Return the error for a feature that needs hardware or the plain CPU."""
    return NotRehearsedError(
        f"{what} is not rehearsed on the simulated CUDA device: it needs a real GPU or the CPU"
    )
