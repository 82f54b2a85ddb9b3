"""Runs each test in a fork of a process that has imported torch and never used CUDA.

A lost device is a process's end, and importing torch takes two seconds.  ``make test-cuda-host``
leaves out the conftest files above: they ask whether there is a device, and after that question
torch refuses CUDA in a fork.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cudalens

SECONDS = 600
"""A test that takes longer hangs."""
IS_ON_STANDIN = bool(os.environ.get("CUDALENS_STANDIN"))
collect_ignore_glob: list[str] = [] if IS_ON_STANDIN else ["test_*.py"]


def pytest_collection_finish() -> None:
    """Import what most tests import, once, before the forks."""
    if not IS_ON_STANDIN:
        return
    for module in pkgutil.walk_packages(cudalens.__path__, "cudalens."):
        if module.name.split(".")[1] in {"evidence", "guards", "recorder", "render", "session"}:
            importlib.import_module(module.name)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run setup, call and teardown in a fork; the reports come back through a pipe."""
    if not IS_ON_STANDIN:
        return None  # in a run of the whole suite pytest asks this hook for every test
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _run_in_child(item, nextitem, write)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    hooks = item.config.hook
    data = json.loads(text) if text else []
    reports = [hooks.pytest_report_from_serializable(config=item.config, data=r) for r in data]
    if status or not reports:
        reports.append(_crashed(item, os.waitstatus_to_exitcode(status)))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _run_in_child(item: pytest.Item, nextitem: pytest.Item | None, write: int) -> None:
    from _pytest.runner import runtestprotocol

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)
    status = 70
    try:
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        hooks, config = item.config.hook, item.config
        data = [hooks.pytest_report_to_serializable(config=config, report=r) for r in reports]
        os.write(write, json.dumps(data).encode())
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _crashed(item: pytest.Item, status: int) -> pytest.TestReport:
    capture: Any = item.config.pluginmanager.getplugin("capturemanager")
    printed = "".join(capture.read_global_capture()) if capture.is_globally_capturing() else ""
    why = f"the test's process ended with {status}\n{printed}"
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")


@pytest.fixture
def notebook(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Return a shell that has loaded cudalens and imported what its cells use."""
    from tests.shells import Notebook, new_shell

    with new_shell() as shell:
        shell.run_line_magic("load_ext", "cudalens")
        shell.run_cell(
            "import torch, torch.nn.functional as F\nfrom tests import standin", store_history=True
        )
        yield Notebook(shell, capsys)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
