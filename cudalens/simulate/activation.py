"""Start and stop the simulation: every step is checked, and undone when a later one fails."""

from __future__ import annotations

import platform
import sys
import warnings
from typing import Any, ClassVar, Final

import torch

from cudalens.core.errors import SimulationError
from cudalens.simulate._internals import install_device
from cudalens.simulate.asserts import Rule
from cudalens.simulate.dispatch import Registrations
from cudalens.simulate.kernels import Runtime
from cudalens.simulate.memory import METER
from cudalens.simulate.op_schema import yaml_facts
from cudalens.simulate.state import DeviceState
from cudalens.simulate.surface import Patches, patch_surface

TESTED: Final = ("2.11", "2.12", "2.13", "2.14")
ANNOUNCEMENT: Final = (
    "Rehearsal device: cuda code runs on the CPU, and out-of-range values fail late and stick as"
    " on CUDA. Not a GPU."
)

_user_rules: dict[str, Rule] = {}


def _refuse_where_untested() -> None:
    if _has_gpu():
        raise SimulationError("This machine has a GPU: use it, the simulated device is not needed.")
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in TESTED:
        raise SimulationError(
            f"The simulated device is not tested with torch {torch.__version__}; tested are"
            f" {', '.join(TESTED)}."
        )
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        raise SimulationError(
            f"The simulated device is not tested on {sys.platform} {platform.machine()}; tested"
            " is linux x86_64."
        )


def _has_gpu() -> bool:
    # A CUDA build without a driver warns that it found none: exactly what is asked here.
    with warnings.catch_warnings(action="ignore"):
        return torch.cuda.is_available()


_off: Final = Registrations()
"""What answers to tensors that outlive their device, and to requests for new ones."""


class Simulation:
    """The running simulated CUDA device; use it in a with statement or call `stop`.

    A with statement around a simulation that was running before leaves it running.
    """

    running: ClassVar[Simulation | None] = None
    """The simulation of this process; there is one device."""

    def __init__(self, state: DeviceState) -> None:
        self._runtime = Runtime(state=state, rules=_user_rules)
        self._registrations = Registrations()
        self._patches = Patches()
        self._is_joined = False
        """Whether the last `start` found this simulation running."""
        self._ends: list[bool] = []
        """For each open with statement: whether leaving it stops the simulation."""

    @property
    def is_active(self) -> bool:
        """Return whether this simulation is the running one."""
        return Simulation.running is self

    @property
    def is_poisoned(self) -> bool:
        """Return whether a device assert was raised, after which every launch fails."""
        return self._runtime.state.is_poisoned

    @property
    def pending(self) -> str | None:
        """Return the assert line that no call has reported yet."""
        return self._runtime.state.pending

    @property
    def fault(self) -> object | None:
        """Return what poisoned the device, one object for one fault; ``None`` while it lives."""
        state = self._runtime.state
        return state.failure if state.is_poisoned else None

    def reset(self) -> None:
        """Clear the pending or sticky error; a real device needs a new process for that."""
        self._runtime.state.reset()

    def device_assert(self, op_name: str, text: str) -> None:
        """Let a kernel of the user's own assert on the device: it surfaces late and sticks.

        text: the whole line that the kernel would print.
        """
        self._runtime.state.device_assert(op_name, text)

    def memory_allocated(self) -> int:
        """Return the bytes of all live tensors of the device, each storage rounded up to 512."""
        return METER.allocated_bytes

    def stop(self) -> None:
        """Restore everything that was patched or registered; does nothing when not running."""
        if Simulation.running is not self:
            return
        Simulation.running = None
        self._remove()
        _off.turn_off()

    def __enter__(self) -> Simulation:
        self._ends.append(not self._is_joined and not self._ends)
        self._is_joined = False
        return self

    def __exit__(self, *_: object) -> None:
        if self._ends.pop():
            self.stop()

    def _install(self) -> None:
        try:
            yaml_facts()
            _off.remove()
            install_device()
            self._set_flags()
            # CUDA's default generator follows an earlier torch.manual_seed, else it is arbitrary.
            self._runtime.generator.manual_seed(torch.initial_seed())
            patch_surface(self._patches, self._runtime)
            self._registrations.install(self._runtime)
            _probe()
        except BaseException:
            self._remove()
            raise

    def _remove(self) -> None:
        self._registrations.remove()
        self._patches.close()

    def _set_flags(self) -> None:
        """Keep composite code away from kernels that exist on a GPU only."""
        c: Any = torch._C
        for setter, getter in (
            (c._set_cudnn_enabled, c._get_cudnn_enabled),
            (c._set_sdp_use_flash, c._get_flash_sdp_enabled),
            (c._set_sdp_use_mem_efficient, c._get_mem_efficient_sdp_enabled),
            (c._set_sdp_use_cudnn, c._get_cudnn_sdp_enabled),
        ):
            self._patches.callback(setter, getter())
            setter(False)


def _probe() -> None:
    """Run one backward: an engine that started before the device has no thread for it."""
    try:
        leaf = torch.ones(1, device="cuda", requires_grad=True)
        (leaf * 2).sum().backward()
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        raise SimulationError(
            "This process already ran a backward: restart the kernel first, or start the script"
            " again, and turn the simulation on before any backward."
        ) from None


def start(
    *,
    lag: int | None = None,
    seed: int | None = None,
    blocking: bool | None = None,
    announce: bool = True,
) -> Simulation:
    """Start the simulated CUDA device, or return the one that is running.

    lag: launches after which an assert surfaces; None: only when the process waits for the device.
    seed: draw the lag of each assert from 0..lag instead.
    blocking: raise at the failing launch; None reads CUDA_LAUNCH_BLOCKING at each launch.
    Raises SimulationError where a GPU is present, on an untested torch build or platform, and when
    the process already ran a backward.
    """
    if Simulation.running is not None:
        Simulation.running._is_joined = True
        return Simulation.running
    _refuse_where_untested()
    simulation = Simulation(DeviceState(lag=lag, seed=seed, blocking=blocking))
    simulation._install()
    Simulation.running = simulation
    if announce:
        print(ANNOUNCEMENT)
    return simulation


def register_assert(op_name: str, rule: Rule) -> None:
    """Let an op of the simulated device assert as `rule` says, such as one of an extension.

    op_name: full overload name, such as ``myops::lookup`` or ``myops::lookup.out``.
    """
    _user_rules[op_name] = rule
    if Simulation.running is not None:
        Simulation.running._registrations.ensure(Simulation.running._runtime, op_name)


def unregister_assert(op_name: str) -> None:
    """Take back `register_assert`."""
    _user_rules.pop(op_name, None)
