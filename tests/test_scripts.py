"""Scripts that the command line runs in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cudalens.core.report import Report
from tests.processes import FAILING, python, script
from tests.releases import needs_rehearsal

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run ``python -m cudalens`` in a folder of its own."""

    def run_it(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return python("-m", "cudalens", *words, cwd=tmp_path, **{"COLUMNS": "100", **environment})

    return run_it


@needs_rehearsal
def test_a_script_named_from_here_sees_what_python_would_show_it(run: Run, tmp_path: Path) -> None:
    """Its own path is absolute, also in the report's and pickle's eyes; argv stays as typed."""
    text = "import sys, pickle\nclass A: ...\npickle.dumps(A())\nprint(__file__, sys.argv[0])\n"
    path = script(tmp_path, text + FAILING)
    done = run("--json", "report.json", "train.py")
    plain = python("train.py", cwd=tmp_path)
    assert done.stdout.splitlines()[0] == plain.stdout.splitlines()[0] == f"{path} train.py"
    found = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert found["source"]["file"] == str(path)


def test_the_exit_status_is_the_scripts(run: Run, tmp_path: Path) -> None:
    script(tmp_path, "print('ran')\nraise SystemExit('no data')\n")
    done = run("train.py")
    assert (done.returncode, done.stdout, done.stderr) == (1, "ran\n", "no data\n")


@needs_rehearsal
def test_a_failure_prints_traceback_then_report(run: Run, tmp_path: Path) -> None:
    """Behind both stand the files of the report, whose folders are made; stdout is the script's."""
    script(tmp_path, FAILING)
    page, data = tmp_path / "out/new/r.html", tmp_path / "found.json"
    done = run("--html", "out/new/r.html", "--json", "found.json", "train.py")
    assert done.returncode == 1
    files = [f"cudalens: the report is in {path}" for path in (page, data)]
    assert done.stderr.splitlines()[-2:] == files
    assert "found.json" not in done.stdout
    assert "10 is outside the 10 classes" in page.read_text("utf-8")
    trace, _, report = done.stderr.partition("DeviceIndexError: ")
    assert trace.startswith("Traceback (most recent call last):\n")
    assert "runpy" not in trace
    assert "cudalens/" not in trace.replace(str(tmp_path), "")
    assert 'train.py", line 9, in step' in trace
    assert "10 is outside the 10 classes" in report.partition("✗")[2]
    assert "train.py:9" in report
    saved = Report.from_dict(json.loads(data.read_text(encoding="utf-8")))
    assert (saved.source.line, saved.source.cell) == (9, None)
    assert saved.expression == "y"
    assert "cudalens: about this error: https://" in done.stderr
    assert "(offline: cudalens page n-classes)" in done.stderr


def test_an_error_without_torch_is_pythons_own(run: Run, tmp_path: Path) -> None:
    path = script(tmp_path, "def f():\n    return 1 / 0\n\n\nf()\n")
    done = run("train.py")
    alone = python(path.name, cwd=tmp_path)
    assert done.returncode == alone.returncode == 1
    shorter = alone.stderr.replace(f"{tmp_path}{os.sep}", "")
    assert done.stderr.replace(f"{tmp_path}{os.sep}", "") == shorter


def test_a_reader_that_leaves_early_is_no_traceback_of_a_long_list(tmp_path: Path) -> None:
    """As in ``cudalens guards | head``."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        done = python("-m", "cudalens", "guards", cwd=tmp_path, streams={"stdout": gone})
    assert (done.returncode, done.stderr) == (1, "")
