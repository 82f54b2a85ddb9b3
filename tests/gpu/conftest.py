"""Runs the suite once a session, within its time, and writes what it saw."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import hour
import report
import suite

HARD_LIMIT_S = 8 * 60
RESULTS = os.environ.get("CUDALENS_GPU_RESULTS")
"""A file of ``hour.py``'s: it is judged, and nothing is run."""
if RESULTS:
    collect_ignore = ["test_captured_on_gpu.py"]
_written: list[str] = []


def end_at_the_limit() -> None:
    """End this process in time, also where it only waits for one that the driver holds."""
    faulthandler.dump_traceback_later(HARD_LIMIT_S, exit=True)
    # pytest takes that back at the first test that fails.
    timer = threading.Timer(HARD_LIMIT_S, os._exit, (1,))
    timer.daemon = True
    timer.start()


@pytest.fixture(scope="session", autouse=True)
def hard_limit() -> None:
    """Begin the time with the first test, whichever it is: each may hang."""
    if not RESULTS:
        end_at_the_limit()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave graphs and compiled code to the end: they run in this process and may hang."""
    items.sort(key=lambda item: item.path.name == "test_captured_on_gpu.py")


@pytest.fixture(scope="session")
def results() -> Iterator[suite.Results]:
    """Run everything; the page and the texts are written at once, whatever the verdicts are."""
    if RESULTS:  # seen elsewhere: no device is needed
        yield hour.completed(json.loads(Path(RESULTS).read_text(encoding="utf-8")))
        return
    import torch

    about = report.machine()
    found = suite.run_all(suite.Clock(), torch.cuda.get_device_capability())
    # A machine that keeps nothing: its caller says where to put a second copy.
    extra = [Path(folder) for folder in [os.environ.get("OUT")] if folder]
    for folder in extra:
        suite.keep(found, folder)
    report.write(found, about, *extra, report.ROOT)
    _written.append(report.page(found, about))
    yield found


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for text in _written:
        terminalreporter.write_line("")
        terminalreporter.write(text)
    terminalreporter.flush()
