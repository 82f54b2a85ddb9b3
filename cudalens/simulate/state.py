"""The errors of the rehearsal device: a sticky one, recorded late, raised later and kept for ever.

CUDA reports a device-side assert when the process next waits for the device, and every launch after
that fails with the same error. The state belongs to the process, not to a thread.
"""

from __future__ import annotations

import os
import random
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch

from cudalens.core.device_asserts import ASSERT_CODE
from cudalens.core.errors import NotRehearsedError

INVALID_DEVICE_CODE: Final = 101  # cudaErrorInvalidDevice
_ASSERT_TEXT: Final = (
    "CUDA error: device-side assert triggered\n"
    "Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda/cuda-runtime-api/"
    "group__CUDART__TYPES.html for more information.\n"
)
_INVALID_DEVICE_TEXT: Final = (
    "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?\n"
    "For more detailed error information, run with CUDA_LOG_FILE=stderr\n"
)
_FORKED_TEXT: Final = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use"
    " the 'spawn' start method"
)
_ASYNC_TEXT: Final = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the"
    " stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)
_SYNC_TEXT: Final = "called a synchronizing CUDA operation"
_RAISES: Final = 2
_NO_CUBLAS_TEXT: Final = (
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
)
STDERR_FD: Final = 2  # CUDA's driver writes here, past sys.stderr


@dataclass(frozen=True, kw_only=True)
class DeviceFailure:
    """The first failing kernel, and the line it would have printed."""

    op: str
    text: str


class DeviceState:
    """Hold the pending or sticky error of the device and decide when a call has to raise it."""

    def __init__(
        self, *, lag: int | None = None, seed: int | None = None, blocking: bool | None = None
    ) -> None:
        self._lock = threading.Lock()
        self.blocking = blocking
        self._lag = lag
        self._random = random.Random(seed) if seed is not None else None
        self._launches_left: int | None = None
        self.failure: DeviceFailure | None = None
        """The first failure, reported or not."""
        self.is_poisoned = False
        """True if the error has been raised, after which every launch raises it again."""
        self._has_cublas = False
        self._forks = Forks.count
        self.sync_debug_mode = 0
        self.sync_count = 0
        """Number of times the host waited in a call that this mode reports: the benchmarks ask."""

    @property
    def pending(self) -> str | None:
        """Return the assert line of a failure that no call has reported yet."""
        failure = self.failure
        return failure.text if failure is not None and not self.is_poisoned else None

    @property
    def is_blocking(self) -> bool:
        """Return whether each launch waits, as CUDA_LAUNCH_BLOCKING=1 makes it."""
        if self.blocking is not None:
            return self.blocking
        return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")

    def reset(self) -> None:
        """Forget pending and sticky errors; no CUDA call can do this."""
        with self._lock:
            self.failure = None
            self.is_poisoned = False
            self._has_cublas = False
            self._launches_left = None
            self.sync_debug_mode = 0

    def device_assert(self, op: str, text: str) -> None:
        """Record an assert of a kernel that was just launched; the first one wins."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = DeviceFailure(op=op, text=text)
            self._launches_left = self._lag
            if self._lag is not None and self._random is not None:
                self._launches_left = self._random.randint(0, self._lag)
        if self.is_blocking:
            self._raise()

    def launch(self) -> None:
        """Account for one kernel launch; raise what an earlier one left behind once it is due."""
        self.check_process()
        if self.failure is None:
            return
        if not self.is_poisoned:
            with self._lock:
                if self._launches_left is None:
                    return
                if self._launches_left > 0:
                    self._launches_left -= 1
                    return
        self._raise()

    def use_cublas(self) -> None:
        """Make the handle of cuBLAS with the first op that needs it, which waits for the device.

        On a lost context cuBLAS cannot make it, and torch raises its status, not CUDA's error.
        """
        self.check_process()
        if self._has_cublas:
            return
        if self.failure is not None:
            self._report()
            raise RuntimeError(_NO_CUBLAS_TEXT)
        self._has_cublas = True

    def set_sync_debug_mode(self, mode: int) -> None:
        """Choose what happens at a wait of the host: 0 nothing, 1 a warning, 2 an error."""
        if not 0 <= mode <= _RAISES:
            msg = "invalid value of debug_mode, expected one of `default`, `warn`, `error`"
            raise RuntimeError(msg)
        self.sync_debug_mode = mode

    def synchronizing(self) -> None:
        """Wait for the device in a call that the debugging mode of synchronization speaks of.

        Not ``torch.cuda.synchronize`` and not an event's: those say themselves that they wait.
        """
        self.sync_count += 1
        if self.sync_debug_mode == _RAISES:
            raise RuntimeError(_SYNC_TEXT)
        if self.sync_debug_mode:
            warnings.warn(_SYNC_TEXT, stacklevel=2)
        self.sync()

    def sync(self) -> None:
        """Wait for the device: raise what is pending."""
        self.check_process()
        if self.failure is not None:
            self._raise()

    def check_context(self) -> None:
        """Raise the sticky error in a call that needs the context, and does not launch or wait."""
        if self.is_poisoned:
            self._raise()

    def _report(self) -> bool:
        """Print what a failure has left behind, once; return whether there is one."""
        with self._lock:
            # Under the lock, so that of several threads only one prints.
            failure, is_first = self.failure, not self.is_poisoned
            if failure is None:
                return False
            self.is_poisoned = True
        if is_first:
            os.write(STDERR_FD, f"{failure.text}\n".encode())
        return True

    def _raise(self) -> None:
        if not self._report():
            return
        advice = "" if self.is_blocking else _ASYNC_TEXT
        raise _error(_ASSERT_TEXT + advice, ASSERT_CODE)

    @property
    def is_forked(self) -> bool:
        """Return whether this is a child process, which CUDA does not serve."""
        return Forks.count != self._forks

    def check_process(self) -> None:
        """Raise torch's error in a child process, such as a worker of a data loader."""
        if self.is_forked:
            raise RuntimeError(_FORKED_TEXT)

    def check_device_index(self, index: int | None) -> None:
        """Raise CUDA's error for a device that does not exist; the simulation has cuda:0 only."""
        if index is not None and index > 0:
            raise _error(_INVALID_DEVICE_TEXT, INVALID_DEVICE_CODE)


class Forks:
    """Number of forks between this process and the one that has loaded this module.

    Asked at every launch, also where the compiler traces it, which does not know ``os.getpid``.
    """

    count = 0

    @classmethod
    def add(cls) -> None:
        """Count a fork, in the child."""
        cls.count += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Forks.add)


def _error(text: str, code: int) -> Exception:
    """Return the error in the words of torch 2.13 and later."""
    error = torch.AcceleratorError(text)
    # The constructor does not set it. Where CUDA fails, torch does so in C++.
    error.error_code = code  # type: ignore[attr-defined]
    return error


def not_rehearsed(what: str) -> NotRehearsedError:
    """Return the error for a feature that needs hardware or the plain CPU."""
    return NotRehearsedError(f"{what} is not rehearsed: it needs a real GPU or the CPU")


def refusal(what: str) -> Callable[..., Any]:
    """Return a function that raises this error, whatever it is asked."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        __tracebackhide__ = True
        raise not_rehearsed(what)

    return refuse
