"""The exceptions of cudalens.

::

    RuntimeError
     ├── DeviceAssertError            a guard stopped an op that would have asserted on the device
     │    ├── DeviceIndexError        … also an IndexError: the CPU would have called it one
     │    └── DeviceValueError        … also a ValueError
     ├── NonFiniteError               a NaN or an infinity that matters (only with ``nan``)
     └── SimulationError              the rehearsal device cannot be started here
          └── NotRehearsedError       … also a NotImplementedError: a feature it does not imitate

``except RuntimeError`` catches them as it does CUDA's own error, ``except IndexError`` and
``except ValueError`` as on the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudalens.core.report import Report


class _ReportedError(Exception):
    """An exception with its report."""

    def __init__(self, message: str, report: Report | None = None) -> None:
        super().__init__(message)
        self.report = report

    def __reduce__(self) -> tuple[object, ...]:
        # Multiprocessing and DataLoader workers pickle exceptions; args alone lose the report.
        return (type(self), (str(self), self.report))


class DeviceAssertError(_ReportedError, RuntimeError):
    """An op was stopped before its launch because a device-side assert would have fired.

    ``str()`` is complete by itself; ``report`` is the :class:`cudalens.Report`.

    Example:
        >>> with cudalens.guard():
        ...     try:
        ...         torch.zeros(3, device="cuda")[torch.tensor([3], device="cuda")]
        ...     except cudalens.DeviceAssertError as error:
        ...         print(error.report.argument, error.report.bounds.max)
        indices 2
    """


class DeviceIndexError(DeviceAssertError, IndexError):
    """An index, label or id is outside the tensor, table or classes that it selects from."""


class DeviceValueError(DeviceAssertError, ValueError):
    """A value is outside the interval that the op accepts, or is not a number."""


class NonFiniteError(_ReportedError, RuntimeError, FloatingPointError):
    """A NaN or an infinity has reached the loss, a gradient or a parameter, or a NaN the host.

    Raised only where it was asked for: ``%%cudacheck --nan`` or ``check(nan=True)``; with
    ``strict`` by the call that made it.
    """


class SimulationError(RuntimeError):
    """The rehearsal device cannot be started in this process."""


class NotRehearsedError(SimulationError, NotImplementedError):
    """The rehearsal device does not imitate this feature."""


class DeviceOffError(SimulationError, NotImplementedError):
    """A tensor of the rehearsal device was used or made after the device was turned off."""


class GuardRegistrationError(ValueError):
    """A guard was registered for an op that does not exist, or in a form that cannot be called."""


class SilentFindingWarning(UserWarning):
    """An op's result is certainly wrong, although neither CUDA nor the CPU complains."""
