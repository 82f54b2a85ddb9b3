"""Fixtures that every test shares, and the proof that nothing stays installed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator, Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from cudalens import simulate
from cudalens.guards.process import PROCESS

HAS_GPU = torch.cuda.is_available()
LONGEST = ("test_opinfo.py", "test_widget.py", "test_benchmarks.py", "test_fault_injection.py")
"""Files of minutes: two workers are done at the same time only when these are begun first."""


def pytest_configure(config: pytest.Config) -> None:
    """Prepare autograd for the rehearsal device before any test runs a backward pass."""
    torch.set_num_threads(1)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A run in the background inherits a deaf ear; the tests of interrupts need a good one.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not HAS_GPU:
        simulate.start(announce=False).stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real hardware run only where there is hardware, the longest files first."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Leave tests with ``no_cover`` untraced, in workers too.

    A worker is a subprocess, in which coverage has begun once more for itself: when the plugin
    pauses its own, that one goes on.
    """
    tracer = sys.gettrace()
    if "no_cover" in item.keywords:
        sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)


@pytest.fixture(autouse=True)
def nothing_stays_installed() -> Iterator[None]:
    """Assert, after every test, that no guard, session, mode or simulated device is left."""
    # The first use of torch.compile switches this off for the whole process.
    torch.distributions.Distribution.set_default_validate_args(True)
    yield
    left = []
    if PROCESS.is_installed:
        left.append("guards")
    if PROCESS.listeners:
        left.append("an open session")
    if torch._C._len_torch_dispatch_stack():
        left.append("a dispatch mode")
    if simulate.current() is not None:
        left.append("the simulated device")
        simulate.current().stop()
    PROCESS.last = PROCESS.lost = None
    assert not left, f"left installed: {', '.join(left)}"


@pytest.fixture
def sim() -> Iterator[simulate.Simulation]:
    """Turn the simulated CUDA device on for one test, with a clean error state."""
    with simulate.start(announce=False) as simulation:
        yield simulation
        simulation.reset()


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Let guards that are installed inside the test act on CPU tensors."""
    with PROCESS.acting_on("cpu"):
        yield
