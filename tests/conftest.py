"""Fixtures that every test shares, and the proof that nothing stays installed."""

from __future__ import annotations

import gc
import linecache
import os
import re
import signal
import sys
import threading
import types
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from cudalens import guards, simulate
from cudalens.evidence import trial
from cudalens.guards.process import PROCESS
from cudalens.simulate.activation import OLDEST
from cudalens.source import files
from tests.amount import LEVEL, LEVELS, is_left_out
from tests.releases import release

# Checks the syntax of addresses for whoever imports jsonschema, and takes 1.3 s to be imported.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

IS_TOLD = bool(os.environ.get("CUDALENS_GPU_RESULTS"))
"""Judged is what was seen on another machine."""
HAS_GPU = torch.cuda.is_available()
HAS_DEVICE = HAS_GPU or release() >= OLDEST
"""Whether this torch has the rehearsal device; else tests that start it are skipped."""
MAX_ID = 60
"""Characters of a case's name that is made from its value."""
FUNCTORCH = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode


def pytest_configure(config: pytest.Config) -> None:
    """Prepare autograd for the rehearsal device before any test runs a backward pass."""
    torch.set_num_threads(1)
    # What a forked process runs is not measured: the tracer it inherits would only slow it.
    os.register_at_fork(after_in_child=_stop_tracing)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A run in the background inherits a deaf ear; the tests of interrupts need a good one.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A loader whose dataset has failed waits that long for its worker, by itself 5 s.
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5
    # What is tried must not depend on how fast the machine is, or on what measures the coverage.
    trial.MAX_SECONDS = 20.0
    if HAS_DEVICE and not HAS_GPU:
        simulate.start(announce=False).stop()


def _stop_tracing() -> None:
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]


def pytest_report_header() -> str:
    """Say how much the tests try."""
    return f"CUDALENS_TESTS: {LEVEL} of {', '.join(LEVELS)}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import torch's operator database, which takes seconds, for tests that are left out.

    A file that is named on the command line is collected, so that pytest says what was left out.
    """
    if LEVEL != "quick" or not collection_path.name.endswith("opinfo.py"):
        return None
    return None if any(collection_path.name in word for word in config.args) else True


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a case by what it is made of where pytest would only count: ``call0``, ``<lambda>``."""
    if isinstance(val, types.FunctionType) and val.__name__ == "<lambda>":
        return _body_of(val)
    if isinstance(val, torch.dtype):
        return str(val).removeprefix("torch.")
    if not isinstance(val, (tuple, list, dict, torch.Size)):
        return None
    # Workers that share a run must give a case one name: no address, and no random parameter.
    is_fixed = re.search(" at 0x|Parameter containing", repr(val)) is None
    return _short(repr(val)) if is_fixed else None


def _body_of(function: types.FunctionType) -> str | None:
    """Return the source of a lambda's body, cut to the length of a name."""
    places = [at for at in function.__code__.co_positions() if None not in at and at[2] != at[3]]
    if not places:
        return None
    first, last, start, end = max(places, key=lambda at: (at[1] - at[0], at[3] - at[2]))  # type: ignore[operator]
    lines = linecache.getlines(function.__code__.co_filename)[first - 1 : last]  # type: ignore[operator]
    whole = "".join(lines).encode()
    rest = len(lines[-1].encode()) - end if lines else 0  # type: ignore[operator]
    return _short(whole[start : len(whole) - rest].decode()) or None


def _short(text: str) -> str:
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= MAX_ID else f"{text[: MAX_ID - 1]}…"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is above the level, and put the tests with a device first in their files.

    They share the device, which stops for a test without one.  Tests of real hardware run only
    where there is hardware.
    """
    kept, left_out = [], []
    for item in items:
        markers = {marker.name for marker in item.iter_markers()}
        (left_out if is_left_out(markers) else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = kept
    order = {path: number for number, path in enumerate(dict.fromkeys(i.path for i in items))}
    # What takes minutes is begun first: another worker can then take the rest.
    items.sort(
        key=lambda item: (
            item.get_closest_marker("thorough") is None,
            order[item.path],
            "sim" not in _fixtures_of(item),
        )
    )
    for item in items:
        if "gpu" in item.keywords and not HAS_GPU and not IS_TOLD:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish() -> None:
    """Keep the collector from walking over thousands of collected tests in each of them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Leave tests with ``no_cover`` untraced in workers too, where pytest-cov pauses nothing."""
    tracer = sys.gettrace()
    if "no_cover" in item.keywords:
        sys.settrace(None)
    try:
        return (yield)
    except simulate.SimulationError as error:
        if HAS_DEVICE:
            raise
        pytest.skip(str(error))
    finally:
        sys.settrace(tracer)


def _fixtures_of(item: pytest.Item) -> Sequence[str]:
    return getattr(item, "fixturenames", ())


@pytest.fixture(scope="module", autouse=True)
def device_ends_with_its_module() -> Iterator[None]:
    """Stop the simulated device that the tests of a module shared, and assert that it is gone."""
    yield
    if (shared := simulate.current()) is not None:
        shared.stop()
    assert torch.cuda.is_available() == HAS_GPU


@pytest.fixture
def no_callback_of_the_collector() -> Iterator[None]:
    """Let no collection call back: Python drops what a signal handler raises in there.

    Hypothesis measures collections so, in each process that has run one of its tests.
    """
    kept = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = kept


@pytest.fixture(autouse=True)
def no_cells_of_other_tests() -> Iterator[None]:
    """Forget the cells of a test: the origin of a size is looked for in all cells of a kernel."""
    before = set(files.CELLS.names())
    yield
    for name in set(files.CELLS.names()) - before:
        files.CELLS.forget(name)


@pytest.fixture(autouse=True)
def nothing_stays_installed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Assert, after every test, that no guard, session, mode or simulated device is left.

    The device of the fixture ``sim`` alone runs on, for the next test of the module that asks for
    it; a test that does not ask for it finds none.
    """
    shared = simulate.current()
    if shared is not None and "sim" not in request.fixturenames:
        shared.stop()
    # The first use of torch.compile switches this off for the whole process.
    torch.distributions.Distribution.set_default_validate_args(True)
    yield
    left = []
    if PROCESS.is_installed:
        left.append("guards")
    if PROCESS.listeners:
        left.append("an open session")
        for session in PROCESS.listeners:  # the next test is not to fail of it too
            session.remove()
    if torch._C._len_torch_dispatch_stack():
        left.append("a dispatch mode")
    running = simulate.current()
    if running is not None and running is not _Device.shared:
        left.append("a simulated device of its own")
        running.stop()
    PROCESS.last = PROCESS.lost = None
    if torch._C._dispatch_tls_is_dispatch_key_excluded(FUNCTORCH):
        # Where printing a tensor failed in a cell that is not checked, what the shell keeps of the
        # exception leaves functorch turned off.
        for kept in gc.get_objects():
            if type(kept) is FrameType and kept.f_code.co_name == "_str":
                kept.clear()
        if torch._C._dispatch_tls_is_dispatch_key_excluded(FUNCTORCH):
            left.append("functorch turned off")
    assert not left, f"left installed: {', '.join(left)}"


class _Device:
    """The simulated device that the fixture `sim` has started last."""

    shared: simulate.Simulation | None = None


@pytest.fixture
def sim() -> Iterator[simulate.Simulation]:
    """Return the simulated CUDA device of the module, as one that was just started.

    Starting one takes longer than most tests.  A test of starting and stopping has its own.
    """
    if not HAS_DEVICE:
        pytest.skip("this torch has no rehearsal device")
    simulation = simulate.current()
    if simulation is None:
        simulation = _Device.shared = simulate.start(announce=False).__enter__()
    else:
        simulation._runtime.generator.manual_seed(torch.initial_seed())
    yield simulation
    simulation.reset()
    assert simulation._ends == [True], "a with statement of the device is open"


@pytest.fixture
def notebook(sim: simulate.Simulation, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Return a shell in which ``tests.shells.BAD`` is stopped; its next cell is the second."""
    from tests.shells import SETUP, Notebook, shell_with_cudalens

    with shell_with_cudalens() as shell:
        opened = Notebook(shell, capsys)
        opened.run(SETUP)
        yield opened


@pytest.fixture
def untouched_catalogue() -> Iterator[None]:
    """Put the catalogue of guards back as it was."""
    table, registered = dict(guards._table), list(guards._base._registered)
    yield
    guards._table.clear()
    guards._table.update(table)
    guards._base._registered[:] = registered


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Let guards that are installed inside the test act on CPU tensors."""
    with PROCESS.acting_on("cpu"):
        yield
