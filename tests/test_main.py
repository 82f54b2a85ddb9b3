"""The command line: exit status, arguments and what is printed where."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cudalens.__main__ import main
from cudalens.core.report import Report

ROOT = Path(__file__).parent.parent
Run = Callable[..., subprocess.CompletedProcess[str]]

FAILING = """\
import cudalens
import torch
import torch.nn.functional as F

device = cudalens.ensure_cuda()


def step(logits, y):
    return F.cross_entropy(logits, y)


step(torch.zeros(32, 10, device=device), torch.arange(32, device=device) % 10 + 1)
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run ``python -m cudalens`` in a folder of its own."""

    def run_it(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "cudalens", *words],
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=240,
            check=False,
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "PYTHONIOENCODING": "utf-8",
                "OMP_NUM_THREADS": "1",
                "COLUMNS": "100",
                **environment,
            },
        )

    return run_it


@pytest.fixture
def run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run the command line in this process: for what needs neither its start nor its end."""

    def run_it(*words: str) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setenv("COLUMNS", "100")
            patch.setattr(sys, "argv", ["cudalens", *words])
            patch.setattr(sys, "path", [str(tmp_path), *sys.path])
            try:
                status = main()
            except SystemExit as end:
                status = end.code or 0
        return subprocess.CompletedProcess(words, status, *capsys.readouterr())

    return run_it


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_script_named_from_here_sees_what_python_would_show_it(run: Run, tmp_path: Path) -> None:
    """Its own path is absolute, also in the report's and pickle's eyes; argv stays as typed."""
    text = "import sys, pickle\nclass A: ...\npickle.dumps(A())\nprint(__file__, sys.argv[0])\n"
    path = script(tmp_path, text + FAILING)
    done = run("--json", "report.json", "train.py")
    plain = subprocess.run(
        [sys.executable, "train.py"], capture_output=True, text=True, cwd=tmp_path, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.splitlines()[0] == plain.stdout.splitlines()[0] == f"{path} train.py"
    found = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert found["source"]["file"] == str(path)


def test_a_script_sees_what_it_would_see_alone(run: Run, tmp_path: Path) -> None:
    """Its name, arguments and import path; options behind it are its own."""
    script(tmp_path, "answer = 42\n", "below/helper.py")
    script(
        tmp_path,
        "import sys, helper\nprint(__name__, sys.argv, helper.answer, sys.path[0])\n",
        "below/train.py",
    )
    done = run("--fast", "below/train.py", "--fast", "-m", "x")
    folder = (tmp_path / "below").resolve()
    assert done.returncode == 0, done.stderr
    expected = ["below/train.py", "--fast", "-m", "x"]
    assert done.stdout == f"__main__ {expected!r} 42 {folder}\n"
    assert done.stderr == ""


def test_a_module_runs_as_with_python_m(run: Run, tmp_path: Path) -> None:
    """Found from the current folder, with its file as argv[0]."""
    script(tmp_path, "", "package/__init__.py")
    script(tmp_path, "import sys\nprint(__name__, sys.argv[1:], __package__)\n", "package/go.py")
    done = run("-m", "package.go", "--nan", "7")
    assert (done.returncode, done.stdout) == (0, "__main__ ['--nan', '7'] package\n"), done.stderr


@pytest.mark.parametrize(
    ("ending", "status", "error"),
    [
        ("", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("raise SystemExit('no data')", 1, "no data\n"),
    ],
)
def test_the_exit_status_is_the_scripts(
    run: Run, tmp_path: Path, ending: str, status: int, error: str
) -> None:
    """None, a number and a text mean what they mean to Python."""
    script(tmp_path, f"print('ran')\n{ending}\n")
    done = run("train.py")
    assert (done.returncode, done.stdout, done.stderr) == (status, "ran\n", error)


@pytest.mark.parametrize("ending", ["raise SystemExit", "raise SystemExit(0)"])
def test_a_script_may_end_itself_well(run_here: Run, tmp_path: Path, ending: str) -> None:
    """It passes as SystemExit, with its status."""
    script(tmp_path, f"print('ran')\n{ending}\nprint('no')\n")
    done = run_here("train.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")


def test_a_failure_prints_traceback_then_report(run: Run, tmp_path: Path) -> None:
    """On stderr, the report last, without a frame of ours; exit status 1."""
    script(tmp_path, FAILING)
    done = run("--json", "found.json", "train.py")
    assert done.returncode == 1
    trace, _, report = done.stderr.partition("DeviceIndexError: ")
    assert trace.startswith("Traceback (most recent call last):\n")
    assert "runpy" not in trace
    assert "cudalens/" not in trace.replace(str(tmp_path), "")
    assert 'train.py", line 9, in step' in trace
    assert "10 is outside the 10 classes" in report.partition("✗")[2]
    assert "train.py line 9" in report
    saved = Report.from_dict(json.loads((tmp_path / "found.json").read_text(encoding="utf-8")))
    assert saved.source is not None
    assert (saved.source.line, saved.source.cell) == (9, None)
    assert saved.expression == "y"


def test_an_error_without_torch_is_pythons_own(run: Run, tmp_path: Path) -> None:
    """The traceback is the one that Python prints, and there is no report."""
    path = script(tmp_path, "def f():\n    return 1 / 0\n\n\nf()\n")
    done = run("train.py")
    alone = subprocess.run(
        [sys.executable, path.name],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == alone.returncode == 1
    shorter = alone.stderr.replace(f"{tmp_path}{os.sep}", "")
    assert done.stderr.replace(f"{tmp_path}{os.sep}", "") == shorter


def test_a_syntax_error_is_one_of_the_script(run_here: Run, tmp_path: Path) -> None:
    """It is shown with the script's line."""
    script(tmp_path, "a = 1\nb = (\n")
    done = run_here("train.py")
    assert done.returncode == 1
    assert 'train.py", line 2' in done.stderr
    assert "runpy" not in done.stderr


@pytest.mark.usefixtures("sim")
def test_a_swallowed_finding_is_reported_and_the_status_kept(run_here: Run, tmp_path: Path) -> None:
    """The script went on and ended well; the report still is there to read."""
    body = FAILING.replace("    return F", "    try:\n        return F", 1).replace(
        "(logits, y)\n\n", "(logits, y)\n    except IndexError:\n        return None\n\n", 1
    )
    script(tmp_path, body.replace("def step(logits, y):\n    except", "def step"))
    done = run_here("train.py")
    assert done.returncode == 0, done.stderr
    assert "10 is outside the 10 classes" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="signals differ")
def test_an_interrupted_script_ends_with_130(run: Run, tmp_path: Path) -> None:
    """As a shell reports an interrupt."""
    script(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('no')\n")
    done = run("train.py")
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert "no" not in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bogus", "train.py"], "--bogus"),
        (["--fast"], "nothing to run"),
        (["-m"], "-m needs"),
        (["-r", "found", "train.py"], "--json FILE"),
        (["missing.py"], "missing.py"),
        (["show"], "expected: cudalens show report.json"),
        (["guards", "--xml"], "--json or nothing"),
    ],
)
def test_misuse_is_one_line(run_here: Run, words: list[str], said: str) -> None:
    """Exit status 2, one line on stderr."""
    done = run_here(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("cudalens: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help(run_here: Run, words: list[str]) -> None:
    """The forms and every option."""
    done = run_here(*words)
    assert done.returncode == 0
    assert "cudalens guards" in done.stdout
    assert "--max-ops" in done.stdout


def test_without_torch_a_run_is_one_line(run: Run, tmp_path: Path) -> None:
    """The script is not run."""
    script(tmp_path, "raise ModuleNotFoundError('No module named torch', name='torch')", "torch.py")
    script(tmp_path, "print('ran')\n")
    done = run("train.py", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "cudalens: cudalens needs torch, which is not installed here\n"


def test_demo_prints_the_report_and_writes_the_page(run: Run, tmp_path: Path) -> None:
    """The quickstart's failing cell, on a GPU or on the rehearsal device."""
    done = run("demo")
    assert done.returncode == 0, done.stderr
    assert "10 is outside the 10 classes" in done.stdout
    assert "F.cross_entropy(logits, y)" in done.stdout
    page = (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
    assert "10 is outside the 10 classes" in page


def test_guards_lists_the_catalogue(run_here: Run) -> None:
    """As a table and as JSON, the same guards."""
    rows = json.loads(run_here("guards", "--json").stdout)
    table = run_here("guards").stdout
    assert len(rows) >= 10
    assert {"op", "guard", "precondition", "source", "cost", "frequency"} <= set(rows[0])
    for row in rows:
        for op in row["op"]:
            assert op.removeprefix("aten::").partition(".")[0] in table
    assert "…" not in table.replace("0 … ", ""), "nothing is cut off"
    for word in ("very common", "(warning)", "one reduction over the", "torch 2.13.0"):
        assert word in table


def test_show_prints_a_saved_report(run_here: Run, tmp_path: Path) -> None:
    """What was saved is shown; what is no report gets one line."""
    report = Report(headline="y[3] = 10 is outside")
    report.save(tmp_path / "report.json")
    done = run_here("show", "report.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "y[3] = 10 is outside" in done.stdout
    bad_kind = '{"schema_version": 1, "kind": []}'
    for text in ("not json", "[]", '{"schema_version": 99}', bad_kind, bad_kind[:-3] + "{}}"):
        (tmp_path / "other.json").write_text(text, encoding="utf-8")
        done = run_here("show", "other.json")
        assert done.returncode == 1
        assert done.stderr.startswith("cudalens: other.json is not a report")
        assert done.stderr.count("\n") == 1
    assert run_here("show", "missing.json").returncode == 1


@pytest.mark.parametrize("words", [["show", "report.json"], ["guards"], ["guards", "--json"]])
def test_a_reader_that_leaves_early_gets_no_traceback(words: list[str], tmp_path: Path) -> None:
    """As in ``cudalens guards | head``: nothing on stderr, and a status that says it."""
    Report(headline="y[3] = 10 is outside").save(tmp_path / "report.json")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        done = subprocess.run(
            [sys.executable, "-m", "cudalens", *words],
            stdout=gone,
            stderr=subprocess.PIPE,
            text=True,
            timeout=240,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    assert (done.returncode, done.stderr) == (1, "")
