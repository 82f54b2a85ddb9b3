"""Start and stop the rehearsal device: each step is checked, and undone when a later one fails."""

from __future__ import annotations

import atexit
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch

from cudalens.core._torch import no_torch_function
from cudalens.core.errors import SimulationError
from cudalens.guards.process import PROCESS
from cudalens.simulate._internals import CODE, install_device
from cudalens.simulate.dispatch import Registrations
from cudalens.simulate.kernels import Runtime
from cudalens.simulate.memory import METER
from cudalens.simulate.op_schema import yaml_facts
from cudalens.simulate.state import STDERR_FD, DeviceState
from cudalens.simulate.surface import Patches, patch_surface

OLDEST: Final = (2, 8)
TESTED: Final = ("2.8", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
"""Releases that the tests ran with; any other is tried in a process of its own first."""
ANNOUNCEMENT: Final = (
    "Rehearsal device: CUDA code runs on the CPU. As on a GPU, errors appear late and persist."
    " Not a GPU."
)


def _platform() -> str:
    return f"{sys.platform} {platform.machine()}"


def _refuse() -> None:
    # A CUDA build without a driver warns that it found none: exactly what is asked here.
    with warnings.catch_warnings(action="ignore"):
        has_gpu = torch.cuda.is_available()
    if has_gpu:
        raise SimulationError("This machine has a GPU: use it, the rehearsal device is not needed.")
    if sys.platform == "win32":
        raise SimulationError("The rehearsal device needs Linux or macOS: on Windows, use WSL 2.")
    if platform.machine() not in CODE:
        raise SimulationError(
            f"The rehearsal device needs an x86-64 or ARM64 processor; this is {_platform()}."
        )
    if _release() < OLDEST:
        raise SimulationError(
            f"The rehearsal device needs torch {OLDEST[0]}.{OLDEST[1]} or newer; this is torch"
            f" {torch.__version__}."
        )


def _release() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])


def _try_in_another_process(untried: str) -> None:
    """Run the self-check in a child process, so that a crash ends only that."""
    code = "from cudalens.simulate import activation; activation.check_self()"
    # With this process's search path, so that the child imports the same modules.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode < 0:
        raise SimulationError(
            f"The rehearsal device does not work with {untried}: its self-check ended the process"
            f" with signal {-done.returncode}."
        )
    if done.returncode:
        raise SimulationError((done.stderr.splitlines() or ["no reason given"])[-1])


def check_self() -> None:
    """Start the device and end the process, with one line on stderr where a step fails."""
    try:
        Simulation(DeviceState())._install()
    except BaseException as error:
        sys.exit(str(error) or type(error).__name__)


_off: Final = Registrations()
"""Stands in for the device of tensors that outlive it, and refuses new ones."""


class Simulation:
    """The running rehearsal device; use it in a with statement or call `stop`.

    A with statement around a simulation that was running before leaves it running.
    """

    running: ClassVar[Simulation | None] = None
    """The simulation of this process; there is one device."""

    def __init__(self, state: DeviceState) -> None:
        self._runtime = Runtime(state=state)
        self._registrations = Registrations()
        self._patches = Patches()
        self._is_joined = False
        """True if the last `start` found this simulation running."""
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
        """Let a kernel of the user's own assert on the device: the error appears late and persists.

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
        atexit.unregister(self._print_pending)
        self._remove()
        _off.turn_off()

    def __enter__(self) -> Simulation:
        self._ends.append(not self._is_joined and not self._ends)
        self._is_joined = False
        return self

    def __exit__(self, *_: object) -> None:
        if self._ends.pop():
            self.stop()

    def _print_pending(self) -> None:
        """Print the assert of a program that ends without a wait, as CUDA's driver does."""
        if self.pending is not None and not self._runtime.state.is_forked:
            os.write(STDERR_FD, f"{self.pending}\n".encode())

    def _install(self) -> None:
        # In this order; the last ones are a self-check.
        steps: dict[str, Callable[[], object]] = {
            "the list of ops": yaml_facts,
            "registering the device": install_device,
            "setting torch's flags": self._set_flags,
            "answering for torch.cuda": lambda: patch_surface(self._patches, self._runtime),
            "registering kernels": self._register,
            "the self-check's forward and backward": _check_values,
            "the self-check's assertion": self._check_assert,
        }
        try:
            for step, action in steps.items():
                try:
                    with no_torch_function():  # a recorder would take its calls for the user's
                        action()
                except SimulationError:
                    raise
                except Exception as error:
                    reason = str(error).partition("\n")[0]
                    raise SimulationError(
                        f"The rehearsal device does not work with torch {torch.__version__} on"
                        f" {_platform()}: {step} failed: {type(error).__name__}: {reason}"
                    ) from error
        except BaseException:
            self._remove()
            raise

    def _register(self) -> None:
        _off.remove()
        # CUDA's default generator follows an earlier torch.manual_seed, else it is arbitrary.
        self._runtime.generator.manual_seed(torch.initial_seed())
        self._registrations.install(self._runtime)

    def _check_assert(self) -> None:
        """Let one index assert, and forget it before anything waits and prints it."""
        if PROCESS.is_installed:
            return  # a guard would stop the call before the device, and report it
        state = self._runtime.state
        # A blocking device would print and raise the assert at the call.
        was_blocking, state.blocking = state.blocking, False
        try:
            torch.zeros(3, device="cuda")[torch.tensor([3], device="cuda")]
            if self.pending is None:
                raise RuntimeError("an index outside the tensor went unnoticed")
        finally:
            state.blocking = was_blocking
            self.reset()

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


def _check_values() -> None:
    """Compute something, forward and backward."""
    leaf = torch.ones(2, device="cuda", requires_grad=True)
    total = (leaf * 3).sum()
    try:
        total.backward()
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        # An engine that started before the device has no thread for it.
        raise SimulationError(
            "This process already ran a backward: restart the kernel first, or start the script"
            " again, and turn the simulation on before any backward."
        ) from None
    values = (total.item(), leaf.grad.tolist(), str(leaf.grad.device))  # type: ignore[union-attr]
    if values != (6.0, [3.0, 3.0], "cuda:0"):
        raise RuntimeError(f"{values} instead of 6.0, [3.0, 3.0] and cuda:0")


def start(
    *,
    lag: int | None = None,
    seed: int | None = None,
    blocking: bool | None = None,
    announce: bool = True,
) -> Simulation:
    """Start the rehearsal device, or return the one that is running.

    Args:
        lag: launches after which an assert is raised; ``None``: only when the process waits.
        seed: draw the lag of each assert from ``0 … lag``.
        blocking: raise at the failing launch; ``None`` reads ``CUDA_LAUNCH_BLOCKING``.
        announce: print one line that says that this is not a GPU.

    Raises:
        SimulationError: there is a GPU, torch is older than 2.8, the self-check fails, or the
            process has already run a backward pass.

    Example:
        >>> with cudalens.simulate(announce=False):
        ...     torch.ones(2, device="cuda").sum().item()
        2.0
    """
    if Simulation.running is not None:
        Simulation.running._is_joined = True
        return Simulation.running
    _refuse()
    # What the tests did not run with may end the process.
    untried = None if _platform() == "linux x86_64" else _platform()
    if ".".join(map(str, _release())) not in TESTED:
        untried = f"torch {torch.__version__}"
    if untried is not None:
        _try_in_another_process(untried)
    simulation = Simulation(DeviceState(lag=lag, seed=seed, blocking=blocking))
    simulation._install()
    Simulation.running = simulation
    atexit.register(simulation._print_pending)
    if announce:
        print(ANNOUNCEMENT)
        if untried is not None:
            print(f"Not tried with {untried}; the self-check passed.")
    return simulation
