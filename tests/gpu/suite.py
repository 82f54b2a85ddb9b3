"""Runs every case in a process of its own, within a time limit, and collects what came of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cases import CASES
from extras import EXTRAS, STICKY
from faults import FAULTS
from frameworks import FRAMEWORKS
from harmless import HARMLESS
from notebook_runs import NAMES
from steps import STEPS
from worker import RESULT

LIMIT_S = 7 * 60
"""What is not begun by then is not begun; the whole run stops itself a minute later."""
CASE_LIMIT_S = 120
NOTEBOOK_LIMIT_S = 240
GRACE_S = 15
"""How long a process that was ended may take to be gone, or to close what it writes to."""
PROCESSES = min(14, max(4, (os.cpu_count() or 4) - 2))
"""Each spends most of its time importing torch, on one core."""
MAX_STDERR = 40_000
"""Characters kept of the beginning of what a process printed, where ten thousand threads may
assert, and as many of its end, where Python says why it failed."""
_WORKER = Path(__file__).with_name("worker.py")

MODES = (
    *("bare", "guarded", "rehearsed", "fault", "harmless"),
    *("extra", "step", "notebook", "framework"),
)
NAMES_OF_EXTRAS = (STICKY, *(item.name for item in EXTRAS))

Results = dict[str, Any]


class Clock:
    """The time that is left."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._end = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds until nothing new is begun."""
        return self._end - time.monotonic()


def run_one(mode: str, name: str, clock: Clock) -> dict[str, Any]:
    """Run one case in a fresh process; what it printed comes along as ``stderr``."""
    if clock.left_s <= 0:
        return {"unavailable": "not begun: the time was up"}
    limit = NOTEBOOK_LIMIT_S if mode == "notebook" else CASE_LIMIT_S
    child = subprocess.Popen(
        [sys.executable, str(_WORKER), mode, name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment(mode),
        start_new_session=True,
    )
    is_late = False
    try:
        said, printed = child.communicate(timeout=max(1.0, min(limit, clock.left_s)))
    except subprocess.TimeoutExpired:
        is_late = True
        said, printed = _end(child)
    if len(printed) > 2 * MAX_STDERR:
        printed = f"{printed[:MAX_STDERR]}\n…\n{printed[-MAX_STDERR:]}"
    lines = [line for line in said.splitlines() if line.startswith(RESULT)]
    if lines:
        # What came of it is known, however the process ended: after an assertion some abort.
        return {**json.loads(lines[-1].removeprefix(RESULT)), "stderr": printed}
    last = (printed.strip().splitlines() or [""])[-1]
    why = "stopped: it took too long" if is_late else f"ended with {child.returncode}: {last}"
    return {"unavailable": why, "is_broken": True, "stderr": printed}


def _end(child: subprocess.Popen[str]) -> tuple[str, str]:
    """End a process and those that it started, and give what they had printed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    try:
        return child.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired as error:  # stuck in the driver, or its output is held open
        return _text(error.stdout), _text(error.stderr)


def _text(printed: bytes | str | None) -> str:
    return printed.decode(errors="replace") if isinstance(printed, bytes) else printed or ""


def environment(mode: str) -> dict[str, str]:
    """Return the environment of a case: the rehearsal must not see the GPU."""
    own = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    own["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of processes for one kernel
    own.pop("CUDA_LAUNCH_BLOCKING", None)
    if mode == "rehearsed":
        own["CUDA_VISIBLE_DEVICES"] = ""
    return own


def run_all(clock: Clock, capability: tuple[int, int]) -> Results:
    """Run everything that this GPU can run."""
    fit = [case.record for case in CASES if case.capability <= capability]
    results: Results = {mode: {} for mode in MODES}
    jobs = [(mode, name) for name in fit for mode in ("bare", "guarded", "rehearsed")]
    cells = [("fault", item.name) for item in FAULTS]
    cells += [("harmless", item.name) for item in HARMLESS]
    cells += [("extra", name) for name in NAMES_OF_EXTRAS]
    cells += [("framework", name) for name in FRAMEWORKS]
    _run(cells + jobs, clock, results, PROCESSES)
    # One after the other: they measure time and memory.
    _run([("step", name) for name in STEPS], clock, results, 1)
    _run([("notebook", name) for name in NAMES], clock, results, PROCESSES)
    return results


def _run(jobs: Iterable[tuple[str, str]], clock: Clock, results: Results, processes: int) -> None:
    pool = ThreadPoolExecutor(processes)
    running = [(mode, name, pool.submit(run_one, mode, name, clock)) for mode, name in jobs]
    for mode, name, future in running:
        try:
            found = future.result(max(0.0, clock.left_s + 2 * GRACE_S))
        except TimeoutError:
            found = {"unavailable": "stopped: it could not be ended", "is_broken": True}
        except Exception as error:  # our failure in one case must not lose what the others saw
            found = {"unavailable": f"not read: {error!r}", "is_broken": True}
        results[mode][name] = found
    # One that cannot be ended is not waited for: the page is written without it.
    pool.shutdown(wait=False, cancel_futures=True)


def keep(results: Results, folder: Path) -> None:
    """Write everything that was seen, also what the page does not say."""
    text = json.dumps(results, indent=1, ensure_ascii=False)
    (folder / "results.json").write_text(text, encoding="utf-8")
