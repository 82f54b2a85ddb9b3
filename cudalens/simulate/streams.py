"""Streams and events of the rehearsal device: everything is finished when a call returns."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from cudalens.simulate.state import refusal

if TYPE_CHECKING:
    from cudalens.simulate.state import DeviceState


class _Bound:
    """The device that streams and events wait for; none while no simulation runs.

    Programs and torch make them by their classes, which nobody hands a device, and keep them beyond
    the end of the simulation.
    """

    state: DeviceState | None = None


_current = threading.local()


def bind_state(state: DeviceState | None) -> None:
    """Let streams and events wait for the device of the running simulation."""
    _Bound.state = state


def check_context() -> None:
    """Raise the sticky error of the running simulation, if it has one."""
    if _Bound.state is not None:
        _Bound.state.check_context()


def _wait() -> None:
    if _Bound.state is not None:
        _Bound.state.sync()


class Stream(torch.Stream):
    """A stream of the rehearsal device; work on it never overlaps."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:  # noqa: D102
        if _Bound.state is not None and device is not None:
            _Bound.state.check_device_index(torch.device(device).index)
        return super().__new__(cls, "cuda")

    @property
    def cuda_stream(self) -> int:
        """Return the native handle: the default stream's, which is 0."""
        return 0

    @property
    def priority(self) -> int:
        """Return the priority, always 0."""
        return 0

    def query(self) -> bool:
        """Return whether all work is done; raise what is pending."""
        _wait()
        return True

    def synchronize(self) -> None:
        """Wait for the device: raise what is pending."""
        if _Bound.state is not None:
            _Bound.state.synchronizing()

    def wait_event(self, event: Any) -> None:
        """Return at once: the event is over."""
        check_context()

    def wait_stream(self, stream: Any) -> None:
        """Return at once: the other stream is idle."""
        check_context()

    def record_event(self, event: Any = None) -> Event:
        """Record an event on this stream."""
        event = Event() if event is None else event
        event.record(self)
        return event  # type: ignore[no-any-return]


class Event(torch.Event):
    """An event of the rehearsal device; its time is the host's clock."""

    def __new__(  # noqa: D102
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> Event:
        event = super().__new__(cls, "cuda")
        event._is_timed = enable_timing
        event._time_s = None
        return event

    _is_timed: bool
    _time_s: float | None

    @property
    def cuda_event(self) -> int:
        """Return the native handle, which does not exist: 0."""
        return 0

    def record(self, stream: Any = None) -> None:
        """Take the time."""
        check_context()
        self._time_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once: all work is done."""
        check_context()

    def query(self) -> bool:
        """Return whether the recorded work is done; raise what is pending."""
        _wait()
        return True

    def synchronize(self) -> None:
        """Wait for the device: raise what is pending."""
        _wait()

    def elapsed_time(self, end_event: Any) -> float:
        """Return milliseconds of host time between two recorded events with timing."""
        _wait()
        if not self._is_timed or not end_event._is_timed:
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._time_s is None or end_event._time_s is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return float(end_event._time_s - self._time_s) * 1000.0

    # There is no other process that could see the event.
    ipc_handle = refusal("an interprocess event")


def current_stream(device: Any = None) -> Stream:
    """Return the stream that is the current one of this thread, the default one at first."""
    stream: Stream | None = getattr(_current, "stream", None)
    return Stream() if stream is None else stream


def default_stream(device: Any = None) -> Stream:
    """Return the default stream."""
    return Stream()


def set_stream(stream: Stream | None) -> None:
    """Make a stream the current one of this thread; None is ignored, as in torch."""
    if stream is not None:
        _current.stream = stream
