"""All that needs a GPU, in one process tree: ``python tests/gpu/hour.py``, into folder ``$OUT``.

For a machine that is lent for minutes, without network, make, git or a virtual environment.  This
process imports torch and cudalens once and asks CUDA nothing, so that it can be forked: each case
is a fork with a context of its own, which may be lost, and pays for no import.  The phases come in
the order of their value, each within a limit, and what was seen is written after each.  Judged is
at home: ``CUDALENS_GPU_RESULTS=results.json pytest tests/gpu`` needs no device.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(HERE)]

import report  # noqa: E402
import suite  # noqa: E402
import torch  # noqa: E402
import worker  # noqa: E402
from cases import CASES  # noqa: E402
from faults import FAULTS  # noqa: E402
from frameworks import FRAMEWORKS  # noqa: E402
from harmless import HARMLESS  # noqa: E402
from notebook_runs import NAMES  # noqa: E402
from steps import STEPS  # noqa: E402

Job = tuple[str, str]
LIMIT_S = float(os.environ.get("HOUR_S", "480"))
"""Nothing goes on beyond it: a machine of 15 minutes has to start and to send things, too."""
PROCESSES = min(14, max(2, (os.cpu_count() or 4) - 2))
STARTED = time.monotonic()
JUNIT = Path(tempfile.gettempdir()) / "captured.xml"
ABOUT = "import json, report; print('ABOUT' + json.dumps(report.machine()))"
ONLY = re.compile(os.environ.get("HOUR_ONLY", ""))
"""Runs the cases alone whose kind and name match, such as ``step in turn``."""
NOT_BEGUN = {"unavailable": "not begun: the time was up"}
NOT_ASKED = {"unavailable": "not asked in this run"}
PACKAGES = ("evidence", "guards", "recorder", "session", "simulate", "diagnosis", "source")


def left_s() -> float:
    return LIMIT_S - (time.monotonic() - STARTED)


@dataclass
class Running:
    """A fork that runs one case."""

    job: Job
    pid: int
    pipe: int
    printed: Any
    end: float
    said: bytes = field(default=b"")


class Hour:
    """What was seen so far, and where it is written."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.results: dict[str, Any] = {mode: {} for mode in suite.MODES}
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        line = f"{time.monotonic() - STARTED:6.1f} s  {text}"
        self.lines.append(line)
        print(line, flush=True)
        (self.out / "summary.txt").write_text("\n".join(self.lines) + "\n", encoding="utf-8")

    def write(self) -> None:
        """Write all files anew, flat: deeper folders may not come back."""
        suite.keep(self.results, self.out)
        about = self.results.get("about")
        if about is None:
            return  # not hardware: no page
        with contextlib.suppress(Exception):  # a page can be made again from the results
            full = completed(self.results)
            (self.out / "verified.md").write_text(report.page(full, about), encoding="utf-8")
            file, text = report.texts(full, about)
            (self.out / file).write_text(text, encoding="utf-8")

    def phase(self, title: str, jobs: Sequence[Job], processes: int, phase_s: float) -> None:
        """Run cases in forks, at most so many at a time; what is not done in time says so."""
        jobs = [job for job in jobs if ONLY.search(" ".join(job))]
        end = time.monotonic() + min(phase_s, max(0.0, left_s()))
        waiting, running = list(jobs), list[Running]()
        while waiting or running:
            if time.monotonic() >= end:
                for job in waiting:
                    self._note(job, dict(NOT_BEGUN))
                waiting.clear()
            while waiting and len(running) < processes:
                running.append(begin(waiting.pop(0), end))
            if running:
                time.sleep(0.02)  # a pipe at its end would wake a select at once, and for ever
            for one in list(running):
                found = look(one)
                if found is not None:
                    running.remove(one)
                    self._note(one.job, found)
        bad = [name for mode, name in jobs if "unavailable" in self.results[mode][name]]
        self.say(f"{title}: {len(jobs) - len(bad)} of {len(jobs)} run; not: {', '.join(bad[:9])}")
        self.write()

    def _note(self, job: Job, found: dict[str, Any]) -> None:
        self.results[job[0]][job[1]] = found

    def captured(self, words: str, limit_s: float) -> None:
        """Graphs and compiled code in a pytest of their own, which may hang."""
        limit_s = min(limit_s, left_s())
        if limit_s <= 0:
            return self.say(f"captured, {words}: {NOT_BEGUN['unavailable']}")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "gpu",
            f"--junitxml={JUNIT}",
            "-k",
        ]
        command += [words, str(HERE / "test_captured_on_gpu.py")]
        JUNIT.unlink(missing_ok=True)
        with (self.out / "captured.txt").open("a", encoding="utf-8") as log:
            child = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )
            try:
                status: object = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = "stopped: it took too long"
                os.killpg(child.pid, signal.SIGKILL)
        if JUNIT.exists():
            self.results.setdefault("captured", {}).update(outcomes(JUNIT))
            self.write()
        return self.say(f"captured, {words}: {status}")

    def crumbs(self, limit_s: float) -> None:
        """Ask whether a word behind each call names the call that failed, and what it costs."""
        found = self.results["breadcrumbs"] = []
        command = [sys.executable, str(HERE / "breadcrumbs.py")]
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                text=True,
                timeout=min(limit_s, left_s()),
                check=False,
            )
            found += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        self.say(f"breadcrumbs: {len(found)} answers")
        self.write()


def outcomes(file: Path) -> dict[str, str]:
    """Return the verdict of each test of a file of pytest's: ``passed``, or why not."""
    found = {}
    for case in ElementTree.parse(file).iter("testcase"):
        bad = next((item for item in case if item.tag in ("failure", "error", "skipped")), None)
        found[case.attrib["name"]] = "passed" if bad is None else bad.attrib.get("message", bad.tag)
    return found


def begin(job: Job, end: float) -> Running:
    """Fork a process for a case."""
    printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed where the case is over
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _run(job, write, printed.fileno())
    os.close(write)
    os.set_blocking(read, False)
    limit = suite.NOTEBOOK_LIMIT_S if job[0] == "notebook" else suite.CASE_LIMIT_S
    return Running(job, pid, read, printed, min(end, time.monotonic() + limit))


def _run(job: Job, pipe: int, printed: int) -> None:
    """Run a case in this fork, and end it past all that an interpreter's end would free."""
    try:
        os.setsid()
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        os.environ.update(suite.environment(job[0]))
        os.environ.pop("CUDA_LAUNCH_BLOCKING", None)
        torch.set_num_threads(1)  # torch is imported: it reads OMP_NUM_THREADS no more
        if job[0] == "rehearsed":  # torch's CUDA build is loaded here: that needs a fresh start
            found = suite.run_one(*job, suite.Clock(suite.CASE_LIMIT_S))
        else:
            found = worker.main(*job)
    except BaseException as error:
        traceback.print_exc()
        found = {"unavailable": f"{type(error).__name__}: {error}"[:500], "is_broken": True}
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        os.set_blocking(pipe, True)
        view = memoryview(json.dumps(found).encode())
        while view:
            view = view[os.write(pipe, view) :]
    os._exit(0)


def look(one: Running) -> dict[str, Any] | None:
    """Return what came of a case, ``None`` while it runs."""
    with contextlib.suppress(BlockingIOError):
        while part := os.read(one.pipe, 1 << 16):
            one.said += part
    gone, status = os.waitpid(one.pid, os.WNOHANG)
    is_late = not gone and time.monotonic() > one.end
    if not gone and not is_late:
        return None
    if is_late:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
    else:
        with contextlib.suppress(BlockingIOError):
            while part := os.read(one.pipe, 1 << 16):
                one.said += part
    os.close(one.pipe)
    one.printed.seek(0)
    text = one.printed.read().decode(errors="replace")
    one.printed.close()
    if len(text) > 2 * suite.MAX_STDERR:
        text = f"{text[: suite.MAX_STDERR]}\n…\n{text[-suite.MAX_STDERR :]}"
    if one.said and not is_late:
        return {**json.loads(one.said), "stderr": text}
    code = os.waitstatus_to_exitcode(status)
    why = "stopped: it took too long" if is_late else f"ended with {code}"
    return {"unavailable": why, "is_broken": True, "stderr": text}


def completed(results: dict[str, Any]) -> dict[str, Any]:
    """Return results in which a case that has none says that it was not asked."""
    names = {
        **{mode: [case.record for case in CASES] for mode in ("bare", "guarded", "rehearsed")},
        "fault": [item.name for item in FAULTS],
        "harmless": [item.name for item in HARMLESS],
        "extra": list(suite.NAMES_OF_EXTRAS),
        "step": list(STEPS),
        "notebook": list(NAMES),
        "framework": list(FRAMEWORKS),
    }
    return results | {
        mode: {name: results.get(mode, {}).get(name, dict(NOT_ASKED)) for name in of_mode}
        for mode, of_mode in names.items()
    }


def machine(hour: Hour) -> dict[str, str] | None:
    """Ask for the device in a process of its own: who has asked cannot be forked any more."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", ABOUT],
            env=environment, capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        hour.say("the device did not answer in 90 s")
        return None
    for line in done.stdout.splitlines():
        if line.startswith("ABOUT"):
            found: dict[str, str] = json.loads(line.removeprefix("ABOUT"))
            return found
    hour.say("no hardware: " + (done.stderr.strip().splitlines() or ["no answer"])[-1])
    return None


def main() -> int:
    out = Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="hour-"))
    out.mkdir(parents=True, exist_ok=True)
    hour = Hour(out)
    hour.say(f"Python {sys.version.split()[0]}, {PROCESSES} processes, results in {out}")
    hour.results["about"] = machine(hour)
    hour.say(f"{hour.results['about']}")
    import cudalens

    for module in pkgutil.walk_packages(cudalens.__path__, "cudalens."):
        if module.name.split(".")[1] in PACKAGES:
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    hour.say("imported")
    records = [case.record for case in CASES]
    is_slow = {item.name for item in (*FAULTS, *HARMLESS) if "compile(" in item.code}
    is_slow |= {item.name for item in FAULTS if "compile(" in item.before}
    is_slow |= {item.name for item in HARMLESS if item.needs_bytes}
    is_slow -= {item.name for item in FAULTS if "_compile_kernel" in item.code}
    faults = [("fault", item.name) for item in FAULTS]
    cells = [("harmless", item.name) for item in HARMLESS]
    for title, jobs, processes, seconds in (
        ("prevented", [("guarded", name) for name in records], PROCESSES, 90),
        ("asserts", [("bare", name) for name in records], PROCESSES, 90),
        ("post-mortem", [job for job in faults if job[1] not in is_slow], PROCESSES, 60),
        ("after an assert", [("extra", name) for name in suite.NAMES_OF_EXTRAS], PROCESSES, 60),
        ("steps", [("step", name) for name in STEPS], 1, 120),
        ("harmless", [job for job in cells if job[1] not in is_slow], PROCESSES, 60),
        ("notebooks", [("notebook", name) for name in NAMES], PROCESSES, 110),
        ("frameworks", [("framework", name) for name in FRAMEWORKS], PROCESSES, 60),
        ("rehearsed", [("rehearsed", name) for name in records], PROCESSES, 60),
    ):
        hour.phase(title, jobs, processes, seconds)
    hour.crumbs(45)
    hour.captured("not compiled", 60)
    last = [job for job in faults + cells if job[1] in is_slow]
    hour.phase("compiled and large", last, PROCESSES, 90)
    hour.captured("compiled", 90)
    hour.say("end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
