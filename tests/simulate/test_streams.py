"""Streams and events of the rehearsal device: what they answer, and what they raise."""

from __future__ import annotations

import threading

import pytest
import torch

from cudalens.simulate import Simulation, streams

pytestmark = pytest.mark.usefixtures("sim")
LINE = "mine.cu:1: Assertion `x` failed."


def test_a_stream_has_no_work_left() -> None:
    stream = torch.cuda.Stream()
    assert (stream.query(), stream.cuda_stream, stream.priority) == (True, 0, 0)
    event = stream.record_event()
    assert event.query() and event.cuda_event == 0
    assert stream.record_event(event) is event
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.Stream(device=1)
    torch.cuda.Stream(device=0)


def test_the_current_stream_is_that_of_a_thread() -> None:
    stream = torch.cuda.Stream()
    before = streams.current_stream()
    try:
        torch.cuda.set_stream(stream)
        assert streams.current_stream() is stream
        torch.cuda.set_stream(None)  # type: ignore[arg-type]
        assert streams.current_stream() is stream
        assert streams.default_stream() is not stream
        seen: list[torch.Stream] = []
        thread = threading.Thread(target=lambda: seen.append(streams.current_stream()))
        thread.start()
        thread.join()
        assert seen[0] is not stream
    finally:
        streams.set_stream(before)


def test_time_lies_between_two_recorded_events_that_have_it() -> None:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with pytest.raises(ValueError, match="must be recorded"):
        first.elapsed_time(last)
    first.record()
    with pytest.raises(ValueError, match="must be recorded"):
        first.elapsed_time(last)
    last.record()
    assert first.elapsed_time(last) >= 0 >= last.elapsed_time(first)
    first._time_s, last._time_s = 1.0, 1.5
    assert first.elapsed_time(last) == 500.0
    plain = torch.cuda.Event()
    plain.record()
    for pair in ((first, plain), (plain, first)):
        with pytest.raises(ValueError, match="enable_timing=True"):
            pair[0].elapsed_time(pair[1])


@pytest.mark.parametrize(
    "wait",
    [
        lambda stream, event: stream.query(),
        lambda stream, event: stream.synchronize(),
        lambda stream, event: event.query(),
        lambda stream, event: event.synchronize(),
        lambda stream, event: event.elapsed_time(event),
        lambda stream, event: torch.cuda.synchronize(),
    ],
)
def test_a_wait_raises_what_is_pending(sim: Simulation, wait: object) -> None:
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    sim.device_assert("aten::mine", LINE)
    with pytest.raises(RuntimeError, match="device-side assert"):
        wait(stream, event)  # type: ignore[operator]
    sim.reset()


@pytest.mark.parametrize("name", ["wait_event", "wait_stream", "record_event", "record", "wait"])
def test_what_does_not_wait_raises_only_what_was_raised_before(sim: Simulation, name: str) -> None:
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    call = {
        "wait_event": lambda: stream.wait_event(event),
        "wait_stream": lambda: stream.wait_stream(stream),
        "record_event": lambda: stream.record_event(event),
        "record": event.record,
        "wait": event.wait,
    }[name]
    sim.device_assert("aten::mine", LINE)
    call()
    with pytest.raises(RuntimeError):
        torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="device-side assert"):
        call()
    sim.reset()
    call()


def test_without_a_simulation_nothing_is_waited_for(sim: Simulation) -> None:
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    sim.device_assert("aten::mine", LINE)
    bound = streams._Bound.state
    try:
        streams.bind_state(None)
        assert stream.query() and event.query()
        stream.synchronize()
        streams.check_context()
    finally:
        streams.bind_state(bound)
    sim.reset()
