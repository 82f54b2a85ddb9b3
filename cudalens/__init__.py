"""Find bad values before they crash a CUDA kernel.

``%load_ext cudalens``, then ``%%cudacheck`` over a cell.  In a script::

    import cudalens

    try:
        with cudalens.check() as check:
            train()
    finally:
        print(check.report)

Importing this package loads neither torch nor IPython: every public name is fetched on first use.
With ``CUDALENS=on``, ``fast``, ``nan``, ``nan=strict`` or ``deferred`` in the environment it begins
the check.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from cudalens.core.version import __version__

if TYPE_CHECKING:
    from cudalens.core.errors import (
        DeviceAssertError,
        DeviceIndexError,
        DeviceValueError,
        GuardRegistrationError,
        NonFiniteError,
        SilentFindingWarning,
    )
    from cudalens.core.report import Report
    from cudalens.core.report_types import Violation
    from cudalens.guards import GUARDS
    from cudalens.session.process import (
        ensure_cuda,
        guard,
        install,
        last_report,
        register_guard,
        settle,
        uninstall,
    )
    from cudalens.session.session import CheckSession, check
    from cudalens.simulate import CallableModule

    simulate: CallableModule

__all__ = [
    "GUARDS",
    "CheckSession",
    "DeviceAssertError",
    "DeviceIndexError",
    "DeviceValueError",
    "GuardRegistrationError",
    "NonFiniteError",
    "Report",
    "SilentFindingWarning",
    "Violation",
    "__version__",
    "check",
    "ensure_cuda",
    "guard",
    "install",
    "last_report",
    "register_guard",
    "settle",
    "simulate",
    "uninstall",
]

_NAMES = {
    "guards": ("GUARDS",),
    "core.errors": (
        *("DeviceAssertError", "DeviceIndexError", "DeviceValueError"),
        *("GuardRegistrationError", "NonFiniteError", "SilentFindingWarning"),
    ),
    "core.report": ("Report",),
    "core.report_types": ("Violation",),
    "session.process": (
        *("ensure_cuda", "guard", "install", "last_report"),
        *("register_guard", "settle", "uninstall"),
    ),
    "session.session": ("CheckSession", "check"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}


if not TYPE_CHECKING:  # a type checker is to tell a name that there is not

    def __getattr__(name: str) -> Any:
        if name == "simulate":
            # The package of this name is callable, so that it is the function of this name too.
            return importlib.import_module("cudalens.simulate")
        try:
            home = _HOMES[name]
        except KeyError:
            msg = f"module 'cudalens' has no attribute {name!r}"
            raise AttributeError(msg) from None
        value = getattr(importlib.import_module(f"cudalens.{home}"), name)
        # The next access finds it without this function.
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """Register the magics: called by ``%load_ext cudalens``."""
    from cudalens.notebook import magics

    magics.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Remove everything again: called by ``%unload_ext cudalens``."""
    from cudalens.notebook import magics

    magics.unload(shell)


if os.environ.get("CUDALENS"):
    from cudalens.session import environment

    environment.begin(os.environ["CUDALENS"])
