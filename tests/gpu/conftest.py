"""Runs the suite once a session, within its time, and writes what it saw."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import report
import suite

HARD_LIMIT_S = 8 * 60
_written: list[str] = []


@pytest.fixture(scope="session")
def results() -> Iterator[suite.Results]:
    """Run everything; the page and the texts are written at once, whatever the verdicts are."""
    import torch

    faulthandler.dump_traceback_later(HARD_LIMIT_S, exit=True)
    found = suite.run_all(suite.Clock(), torch.cuda.get_device_capability())
    about = report.machine()
    # A machine that keeps nothing: its caller says where to put a second copy.
    extra = [Path(folder) for folder in [os.environ.get("OUT")] if folder]
    report.write(found, about, report.ROOT, *extra)
    _written.append(report.page(found, about))
    faulthandler.cancel_dump_traceback_later()
    yield found


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the one table."""
    for text in _written:
        terminalreporter.write_line("")
        terminalreporter.write(text)
