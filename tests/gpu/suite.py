"""Runs every case in a process of its own, within a time limit, and collects what came of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cases import CASES
from faults import FAULTS
from harmless import HARMLESS
from notebook_runs import NAMES
from steps import STEPS
from worker import RESULT

LIMIT_S = 7 * 60
"""What is not begun by then is not begun; the whole run stops itself a minute later."""
CASE_LIMIT_S = 120
NOTEBOOK_LIMIT_S = 240
PROCESSES = 8
_WORKER = Path(__file__).with_name("worker.py")

MODES = ("bare", "guarded", "rehearsed", "fault", "harmless", "step", "notebook")

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
    try:
        done = subprocess.run(
            [sys.executable, str(_WORKER), mode, name],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(1.0, min(limit, clock.left_s)),
            env=environment(mode),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"unavailable": "stopped: it took too long", "is_broken": True}
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if not lines:
        last = done.stderr.strip().splitlines()[-1:] or [""]
        return {
            "unavailable": f"ended with {done.returncode}: {last[0]}",
            "is_broken": True,
            "stderr": done.stderr,
        }
    return {**json.loads(lines[-1].removeprefix(RESULT)), "stderr": done.stderr}


def environment(mode: str) -> dict[str, str]:
    """Give the environment of a case: the rehearsal must not see the GPU."""
    own = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
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
    _run(cells + jobs, clock, results, PROCESSES)
    # One after the other: they measure time and memory.
    _run([("step", name) for name in STEPS], clock, results, 1)
    _run([("notebook", name) for name in NAMES], clock, results, PROCESSES)
    return results


def _run(jobs: Iterable[tuple[str, str]], clock: Clock, results: Results, processes: int) -> None:
    with ThreadPoolExecutor(processes) as pool:
        running = [(mode, name, pool.submit(run_one, mode, name, clock)) for mode, name in jobs]
        for mode, name, future in running:
            results[mode][name] = future.result()
