"""How the GPU suite runs its processes, without a GPU: time, hangs, crashes, what is kept."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).parent / "gpu"
sys.path.insert(0, str(GPU))

import suite  # noqa: E402
from faults import FAULTS  # noqa: E402
from harmless import HARMLESS  # noqa: E402
from notebook_runs import NAMES  # noqa: E402
from steps import STEPS  # noqa: E402

from tests.processes import python  # noqa: E402

Run = Callable[[str], dict[str, Any]]


def test_nothing_is_begun_when_the_time_is_up() -> None:
    """A case that did not run says so, and does not count as seen."""
    found = suite.run_one("bare", "index_get", suite.Clock(0))
    assert found == {"unavailable": "not begun: the time was up"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Let a worker run this code, for two seconds at most, and return what is known of it."""
    monkeypatch.setattr(suite, "_WORKER", tmp_path / "worker.py")
    monkeypatch.setattr(suite, "CASE_LIMIT_S", 2)

    def run_it(code: str) -> dict[str, Any]:
        (tmp_path / "worker.py").write_text(code, encoding="utf-8")
        return suite.run_one("bare", "x", suite.Clock(100))

    return run_it


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import time; time.sleep(60)", "stopped: it took too long"),
        # What it started holds its output open, and ends with it.
        (
            "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)",
            "stopped: it took too long",
        ),
        ("import sys; sys.exit('broken')", "ended with 1: broken"),
        ("import os; os.abort()", "ended with -6: "),
    ],
)
def test_a_case_that_hangs_or_dies_is_said(code: str, reason: str, run: Run) -> None:
    began = time.monotonic()
    found = run(code)
    assert (found["unavailable"], found["is_broken"]) == (reason, True)
    assert time.monotonic() - began < suite.GRACE_S


@pytest.mark.parametrize("end", ["import os; os.abort()", "import time; time.sleep(60)"])
def test_what_is_known_is_kept_however_a_process_ends(end: str, run: Run) -> None:
    """After a real assertion a process may abort or hang on its way out."""
    code = (
        "import sys\nprint('K.cu:7: it asserts', file=sys.stderr, flush=True)\n"
        "print('printed by a kernel, without an end', end='')\n"
        f"print('\\n{suite.RESULT}' + '{{\"error\": null}}', flush=True)\n{end}"
    )
    found = run(code)
    assert (found["error"], "unavailable" in found) == (None, False)
    assert found["stderr"].startswith("K.cu:7: it asserts")


def test_of_endless_output_the_beginning_and_the_end_are_kept(run: Run) -> None:
    """The first assertion is the one that counts, and the last line says why it ended."""
    code = f"import sys; sys.stderr.write('first' + 'x' * {3 * suite.MAX_STDERR}); sys.exit('last')"
    found = run(code)
    assert found["stderr"].startswith("first") and found["stderr"].endswith("last\n")
    assert len(found["stderr"]) == 2 * suite.MAX_STDERR + len("\n…\n")


def test_a_process_that_cannot_be_ended_does_not_hold_up_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver can keep one that was killed; the others are told all the same."""
    gone = threading.Event()

    def stuck(mode: str, name: str, clock: Any) -> dict[str, Any]:
        if name == "stuck":
            gone.wait(30)
        return {}

    monkeypatch.setattr(suite, "run_one", stuck)
    monkeypatch.setattr(suite, "GRACE_S", 0.2)
    results: dict[str, Any] = {"bare": {}}
    try:
        suite._run([("bare", "fine"), ("bare", "stuck")], suite.Clock(0), results, 2)
    finally:
        gone.set()
    assert results["bare"]["fine"] == {}
    assert results["bare"]["stuck"]["unavailable"] == "stopped: it could not be ended"


def test_a_result_that_cannot_be_read_does_not_lose_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is ended while it prints leaves half a line."""
    code = f"import sys; print('{suite.RESULT}' + ('{{}}' if sys.argv[2] == 'whole' else '{{'))"
    (tmp_path / "worker.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(suite, "_WORKER", tmp_path / "worker.py")
    results: dict[str, Any] = {"bare": {}}
    suite._run([("bare", "half"), ("bare", "whole")], suite.Clock(100), results, 2)
    assert results["bare"]["half"]["is_broken"]
    assert results["bare"]["half"]["unavailable"].startswith("not read: JSONDecodeError")
    assert results["bare"]["whole"] == {"stderr": ""}


def test_a_run_ends_at_its_limit_also_when_a_test_failed_and_a_thread_is_stuck() -> None:
    """A caller that waits for it would lose what was written."""
    code = (
        "import faulthandler, importlib.util, threading, time\n"
        f"spec = importlib.util.spec_from_file_location('own', {str(GPU / 'conftest.py')!r})\n"
        "own = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(own)\n"
        "own.HARD_LIMIT_S = 0.5\n"
        "own.end_at_the_limit()\n"
        "faulthandler.cancel_dump_traceback_later()\n"  # as pytest does when a test fails
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
    )
    assert python("-c", code, timeout=50).returncode == 1


def test_everything_that_was_seen_can_be_kept(tmp_path: Path) -> None:
    """Also what the page does not say."""
    seen = {"bare": {"take": {"stderr": "…", "value": float("inf")}}}
    suite.keep(seen, tmp_path)
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8")) == seen


def test_only_what_the_gpu_can_run_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a newer generation are left out; everything else is run in each of its ways."""
    seen: list[tuple[str, str]] = []

    def note(mode: str, name: str, clock: Any) -> dict[str, Any]:
        seen.append((mode, name))
        return {}

    monkeypatch.setattr(suite, "run_one", note)
    suite.run_all(suite.Clock(), (8, 0))
    assert ("bare", "index_get") in seen and ("rehearsed", "index_get") in seen
    assert ("bare", "scatter_add_tma") not in seen
    assert {name for mode, name in seen if mode == "fault"} == {fault.name for fault in FAULTS}
    assert {name for mode, name in seen if mode == "harmless"} == {cell.name for cell in HARMLESS}
    assert [name for mode, name in seen if mode == "step"] == list(STEPS)
    assert sorted(name for mode, name in seen if mode == "notebook") == sorted(NAMES)
    before = len(seen)
    suite.run_all(suite.Clock(), (9, 0))
    assert ("bare", "scatter_add_tma") in seen[before:]
