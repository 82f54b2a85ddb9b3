"""The command line: exit status, arguments and what is printed where."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from traceback import walk_tb
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from cudalens import __main__ as command_line
from cudalens.__main__ import main
from cudalens.core.errors import DeviceIndexError, SimulationError
from cudalens.core.report import Report
from cudalens.core.report_types import Environment, SourceSpan
from cudalens.core.version import __version__
from cudalens.guards import catalogue_rows
from cudalens.render.tables import guard_list
from cudalens.render.words import page_link
from cudalens.session.options import Options
from tests.builders import make_report
from tests.processes import FAILING, ROOT, python, script

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run the command line in this process: for what needs neither its start nor its end."""

    def run_it(*words: str, columns: int = 100) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setenv("COLUMNS", str(columns))
            patch.setattr(sys, "argv", ["cudalens", *words])
            patch.setattr(sys, "path", [str(tmp_path), *sys.path])
            try:
                status = main()
            except SystemExit as end:
                status = end.code or 0
        return subprocess.CompletedProcess(words, status, *capsys.readouterr())

    return run_it


def test_a_script_sees_what_it_would_see_alone(run_here: Run, tmp_path: Path) -> None:
    script(tmp_path, "answer = 42\n", "below/helper.py")
    text = "import sys, helper\nprint(__name__, sys.argv, helper.answer, sys.path[0])\nx: int = 0\n"
    text += "assert __annotations__ == {'x': int}  # no __future__ import of ours holds here\n"
    script(tmp_path, text, "below/train.py")
    theirs = ["--fast", "-m", "x", "--version", "--help"]
    done = run_here("--fast", "below/train.py", *theirs)
    folder = (tmp_path / "below").resolve()
    assert (done.returncode, done.stderr) == (0, "")
    expected = ["below/train.py", *theirs]
    assert done.stdout == f"__main__ {expected!r} 42 {folder}\n"


def test_a_module_runs_as_with_python_m(run_here: Run, tmp_path: Path) -> None:
    script(tmp_path, "", "package/__init__.py")
    script(tmp_path, "import sys\nprint(__name__, sys.argv[1:], __package__)\n", "package/go.py")
    done = run_here("-m", "package.go", "--nan", "7")
    assert (done.returncode, done.stdout) == (0, "__main__ ['--nan', '7'] package\n"), done.stderr


@pytest.mark.parametrize(
    ("ending", "status"),
    [("", 0), ("raise SystemExit", 0), ("raise SystemExit(0)", 0), ("import sys; sys.exit(7)", 7)],
)
def test_a_script_may_end_itself(run_here: Run, tmp_path: Path, ending: str, status: int) -> None:
    script(tmp_path, f"print('ran')\n{ending}\n")
    done = run_here("train.py")
    assert (done.returncode, done.stdout, done.stderr) == (status, "ran\n", "")


SUPPRESSING = "import contextlib\nwith contextlib.suppress(IndexError):\n    step(torch"
SUPPRESSED = FAILING.replace("step(torch", SUPPRESSING)
OF_NAN = """\
import cudalens, torch
z = torch.zeros(3, device=cudalens.ensure_cuda())
torch.bernoulli((z / z).softmax(0))
"""
ADVICE = r"python -m cudalens --nan, or cudalens\.check\(nan=True\), stops at the first one"
ENDS = {
    "a syntax error of the script": ("a = 1\nb = (\n", 1, r'train\.py", line 2'),
    "interrupted": (
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('went on')\n",
        128 + signal.SIGINT,
        "KeyboardInterrupt$",
    ),
    "a swallowed finding": (SUPPRESSED, 0, "10 is outside the 10 classes"),
    "an exit behind one": (f"{SUPPRESSED}raise SystemExit(3)\n", 3, "10 is outside the 10 classes"),
    "advice for a script": (OF_NAN, 1, ADVICE),
}
"""A script, its exit status, and what is said on stderr."""


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize(("text", "status", "says"), ENDS.values(), ids=ENDS)
def test_how_a_script_ends(
    run_here: Run, tmp_path: Path, text: str, status: int, says: str
) -> None:
    """Nothing is said of how it was run, nor what can be done in a notebook alone."""
    script(tmp_path, text)
    done = run_here("train.py")
    assert done.returncode == status and "went on" not in done.stdout
    said = " ".join(done.stderr.split())
    assert re.search(says, said) and not re.search("runpy|%cudacheck|restart the kernel", said)


def assert_one_line(
    done: subprocess.CompletedProcess[str], status: int, *said: str, begin: str = ""
) -> None:
    """Assert that a run printed nothing but one line on stderr."""
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.startswith(f"cudalens: {begin}")
    assert done.stderr.count("\n") == 1
    assert [text for text in said if text not in done.stderr] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bogus", "train.py"], "--bogus"),
        (["--fast"], "cudalens: nothing to run: name a script, or -m and a module\n"),
        (["-m"], "cudalens: -m needs the name of a module\n"),
        (
            ["-r", "found", "train.py"],
            "-r binds a variable of a notebook; use --json FILE or --html FILE here\n",
        ),
        (["show"], "required: FILE (cudalens show --help"),
        (["guards", "--xml"], "unrecognized arguments: --xml"),
        (["guards", "--jsno"], "did you mean --json?"),
        (["--fsat", "train.py"], "did you mean --fast?"),
        (["demo", "x"], "unrecognized arguments: x"),
        (["page", "a", "b"], "unrecognized arguments: b"),
        (["help", "shwo"], "did you mean show?"),
    ],
)
def test_misuse_is_one_line(run_here: Run, words: list[str], said: str) -> None:
    done = run_here(*words)
    assert_one_line(done, 2, said)
    assert "%" not in done.stderr  # whoever types it here is not sent to the magic


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"], ["--fast", "-h"]])
def test_help(run_here: Run, words: list[str]) -> None:
    done = run_here(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--max-ops" in done.stdout
    # Options that are of a notebook alone are not offered.
    assert "--no-widgets" not in done.stdout
    assert "--report" not in done.stdout
    assert "%" not in done.stdout  # whoever types it here is not sent to the magic
    lines = [line.removeprefix("usage:").strip() for line in done.stdout.splitlines()]
    for form, does in (
        ("cudalens [options] script.py [args...]", ""),
        ("cudalens [options] -m package.module [args...]", ""),
        *((f"cudalens {it.form}", it.does) for it in command_line._COMMANDS.values()),
        ("cudalens --version", "the version of cudalens"),
    ):
        assert (f"{form:<28}{does}" if does else form) in lines


COMMANDS = ("demo", "explain", "guards", "help", "page", "show")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command(run_here: Run, command: str) -> None:
    asked = run_here(command, "--help")
    assert (asked.returncode, asked.stderr) == (0, "")
    assert asked.stdout.startswith(f"usage: cudalens {command}")
    assert asked.stdout == run_here("help", command).stdout == run_here("-h", command).stdout


def test_the_version(run_here: Run) -> None:
    done = run_here("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"cudalens {__version__}\n", "")


# --- files to write -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"), [("train.py/r.html", "exists"), (".", "Is a directory")]
)
@pytest.mark.parametrize("option", ["--html", "--json"])
def test_a_file_that_cannot_be_written_is_refused_before_the_run(
    run_here: Run, tmp_path: Path, option: str, name: str, reason: str
) -> None:
    script(tmp_path, "print('ran')\n")
    begin = f"{option} {name}: it cannot be written: "
    assert_one_line(run_here(option, name, "train.py"), 2, reason, begin=begin)
    script(tmp_path, make_report().to_json(), "a.json")
    assert_one_line(run_here("show", option, name, "a.json"), 2, reason, begin=begin)


def test_a_run_without_a_finding_leaves_no_file(run_here: Run, tmp_path: Path) -> None:
    script(tmp_path, "print('ran')\n")
    assert run_here("--html", "out/r.html", "train.py").stdout == "ran\n"
    assert list((tmp_path / "out").iterdir()) == []


def test_without_torch_a_run_is_one_line(tmp_path: Path) -> None:
    script(tmp_path, "raise ModuleNotFoundError('No module named torch', name='torch')", "torch.py")
    script(tmp_path, "print('ran')\n")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = python("-m", "cudalens", "train.py", cwd=tmp_path, PYTHONPATH=path)
    assert_one_line(done, 1, begin="cudalens needs torch, which is not installed here\n")


@pytest.mark.usefixtures("sim")
def test_demo_prints_the_report_and_writes_the_page(run_here: Run, tmp_path: Path) -> None:
    done = run_here("demo")
    assert done.returncode == 0, done.stderr
    assert "10 is outside the 10 classes" in done.stdout
    line = re.search(r"In \[1\] line (\d+)", done.stdout)
    assert line is not None
    numbered = dict(re.findall(r"^ +(\d+)  (\S.*)$", done.stdout, re.MULTILINE))
    assert numbered[line[1]] == "loss = F.cross_entropy(logits, y)"
    path = Path("demo") / "report.html"
    assert "10 is outside the 10 classes" in (tmp_path / path).read_text(encoding="utf-8")
    assert done.stdout.endswith(f"\n\nThe same as a page: {path}\n")


def test_where_no_rehearsal_can_start_the_demo_says_so(
    run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Mock(side_effect=SimulationError("no rehearsal for this torch"))
    monkeypatch.setattr("cudalens.session.demo.run", refused)
    assert_one_line(run_here("demo"), 1, begin="no rehearsal for this torch\n")


def test_guards_are_found_by_words_and_begin_with_what_people_call(run_here: Run) -> None:
    table = run_here("guards").stdout
    heads = [line for line in table.splitlines() if line and not line.startswith(" ")]
    assert any(line.startswith("nn.Embedding, F.embedding  a very common error") for line in heads)
    assert any(line.startswith("x[i]  a very common error") for line in heads)
    found = run_here("guards", "cross_entropy", "PIXEL").stdout
    assert found.count("also that of a pixel") == 2
    assert "nn.Embedding" not in found
    assert_one_line(run_here("guards", "xyzzy"), 1, begin="no guard mentions 'xyzzy'\n")
    before, behind = run_here("--json", "guards", "gather"), run_here("guards", "gather", "--json")
    assert before.stdout == behind.stdout


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_guards_keep_to_the_width_of_the_terminal(columns: int) -> None:
    text = guard_list(catalogue_rows(), width=columns, color=False)
    assert max(map(len, text.splitlines())) <= columns
    assert "a very common error" in " ".join(text.split())


def test_guards_lists_the_catalogue(run_here: Run) -> None:
    rows = json.loads(run_here("guards", "--json").stdout)
    none = run_here("guards", "--json", "xyzzy")
    assert (none.returncode, none.stdout) == (1, "[]\n")
    table = " ".join(run_here("guards").stdout.split())
    assert len(rows) >= 10
    assert {"op", "api", "guard", "precondition", "source", "cost", "frequency"} <= set(rows[0])
    for row in rows:
        for op in row["op"]:
            assert op.removeprefix("aten::").partition(".")[0] in table
    assert "…" not in table.replace("0 … ", ""), "nothing is cut off"
    for word in ("a very common error", "a warning: CUDA", "a rare error", "torch 2.13.0"):
        assert word in table
    assert rows[0]["cost"] not in table, "what a check costs inside is for the catalogue's page"


def test_show_prints_a_saved_report(run_here: Run, tmp_path: Path) -> None:
    report = Report(headline="y[3] = 10 is outside")
    report.save(tmp_path / "report.json")
    done = run_here("show", "report.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "y[3] = 10 is outside" in done.stdout
    bad_kind = '{"schema_version": 1, "kind": []}'
    for text, said in (
        ("not json", "it is not JSON (Expecting value: line 1 column 1 (char 0))"),
        ("[]", "it contains no cudalens report"),
        ('{"a": 1}', "it contains no cudalens report"),
        ('{"schema_version": 99}', "reads 1 to 4; a newer release of cudalens wrote it"),
        (bad_kind, "is not a report"),
        (bad_kind[:-3] + "{}}", "is not a report"),
        ('{"schema_version": 2, "op": 3}', "another type"),
        ("\x89PNG\xff", "it is not a text file"),
    ):
        (tmp_path / "other.json").write_text(text, encoding="latin-1")
        begin = "other.json is not a report"
        assert_one_line(run_here("show", "other.json"), 1, said, begin=begin)
    (tmp_path / "report.html").write_text("<html>", encoding="utf-8")
    assert_one_line(run_here("show", "report.html"), 1, "it is a page; show takes the .json")
    said = "that can be shown: No such file or directory\n"
    assert_one_line(run_here("show", "missing.json"), 1, said)


def test_show_reads_what_an_editor_saved_with_a_byte_order_mark(
    run_here: Run, tmp_path: Path
) -> None:
    text = json.dumps(Report(headline="y[3] = 10 is outside").to_dict())
    (tmp_path / "report.json").write_text(text, encoding="utf-8-sig")
    done = run_here("show", "report.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "y[3] = 10 is outside" in done.stdout


@pytest.mark.parametrize("form", [(), ("--html", "out.html")])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("phase", "\x1b]0;title\x07"),
        ("headline", {"replace": 1}),
        ("frames", 3),
        ("source", {"line": "7", "text": "x"}),
        ("offenders", {"count": True}),
        ("prevented", "no"),
    ],
)
def test_a_value_of_another_type_is_one_line_in_any_form(
    form: tuple[str, ...], field: str, value: object, run_here: Run, tmp_path: Path
) -> None:
    """It is said which; nothing is written, and nothing hostile reaches the terminal."""
    data = Report(headline="y[3] = 10 is outside").to_dict() | {field: value}
    (tmp_path / "report.json").write_text(json.dumps(data), encoding="utf-8")
    done = run_here("show", "report.json", *form)
    assert_one_line(done, 1, field)
    assert not {"\x1b", "\x07"} & set(done.stdout + done.stderr)
    assert not (tmp_path / "out.html").exists()


def test_show_lists_several_reports(run_here: Run, tmp_path: Path) -> None:
    """With one that is none, the others are listed all the same."""
    for rank in (0, 3):
        source = SourceSpan(file="/work/train.py", line=7 + rank, text="loss = f(y)")
        environment = Environment(rank=rank)
        report = Report(headline=f"y[{rank}] = 10 is outside", source=source, certainty="likely")
        replace(report, environment=environment).save(tmp_path / f"rank{rank}.json")
    done = run_here("show", "rank0.json", "missing.json", "rank3.json")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "missing.json" in done.stderr
    assert done.stdout.splitlines() == [
        "rank0.json",
        "  ✗ y[0] = 10 is outside",
        "    device-side assert · train.py:7 · rank 0 · likely cause",
        "rank3.json",
        "  ✗ y[3] = 10 is outside",
        "    device-side assert · train.py:10 · rank 3 · likely cause",
    ]
    assert run_here("show", "rank0.json", "rank3.json").returncode == 0


def test_show_makes_a_page_of_a_saved_report(run_here: Run, tmp_path: Path) -> None:
    Report(headline="y[3] = 10 is outside").save(tmp_path / "report.json")
    done = run_here("show", "report.json", "--html", "pages/r.html")
    assert done.stderr == f"cudalens: the report is in {Path('pages/r.html')}\n"
    assert "y[3] = 10 is outside" in (tmp_path / "pages" / "r.html").read_text(encoding="utf-8")


# --- logs -----------------------------------------------------------------------------------------

LOG = """\
../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], \
thread: [3,0,0] Assertion `t >= 0 && t < n_classes` failed.
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    print(loss.item())
torch.AcceleratorError: CUDA error: device-side assert triggered
"""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_explain_reads_a_log(run_here: Run, tmp_path: Path, encoding: str) -> None:
    """Also as PowerShell writes it, and with bytes that are no text."""
    odd = b"\xff\xfe\x80 50%\r 100%\r\n" if encoding == "utf-8" else b""
    (tmp_path / "train.log").write_bytes(LOG.encode(encoding) + odd)
    done = run_here("explain", "train.log", "--json", "found/r.json")
    assert done.returncode == 0
    assert done.stdout.startswith("? Likely: F.cross_entropy or F.nll_loss")
    assert "Next time: python -m cudalens train.py finds the value" in done.stdout
    saved = json.loads((tmp_path / "found" / "r.json").read_text(encoding="utf-8"))
    assert (saved["certainty"], saved["source"]["line"]) == ("likely", 9)


@pytest.mark.parametrize("words", [["explain"], ["explain", "-"]])
def test_explain_reads_standard_input_without_torch(tmp_path: Path, words: list[str]) -> None:
    script(tmp_path, "raise ModuleNotFoundError('No module named torch', name='torch')", "torch.py")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    command = ("-m", "cudalens", *words)
    done = python(*command, cwd=tmp_path, streams={"input": LOG}, PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "a label is neither one of the classes" in " ".join(done.stdout.split())


def test_explain_says_that_a_log_shows_nothing(run_here: Run, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("epoch 1\n", encoding="utf-8")
    end = "Traceback (most recent call last):\n  File 'x'\nKeyError: 3\n"
    (tmp_path / "b.log").write_text(end, encoding="utf-8")
    for words, said in (
        (["a.log"], "a.log (1 line) shows no failure of CUDA or torch"),
        (["a.log", "b.log"], "(4 lines) shows no failure of CUDA or torch; its last exception"),
        (["missing.log"], "missing.log cannot be read: No such file or directory"),
        (["."], ". cannot be read: Is a directory"),
    ):
        assert_one_line(run_here("explain", *words), 1, said)


def test_the_page_on_the_command_line_shows_what_explain_says(
    run_here: Run, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"```(\w+)\n(.*?)\n```", page, re.DOTALL))
    (tmp_path / "train.log").write_text(blocks["console"], encoding="utf-8")
    said = run_here("explain", "train.log", columns=80).stdout
    assert said.rstrip() == blocks["text"]
    for command in COMMANDS:
        assert f"`cudalens {command}" in page


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize(
    "failing", ["F.cross_entropy(torch.zeros(2, 3), y)", "torch.nn.Linear(3, 2)(torch.ones(2, 4))"]
)
def test_what_the_report_says_is_not_said_in_the_traceback(
    run_here: Run, tmp_path: Path, failing: str
) -> None:
    """Item 35.7: the script's own lines and the first line of the message, then the report."""
    setup = "import cudalens, torch\nimport torch.nn.functional as F\ncudalens.ensure_cuda()\n"
    script(tmp_path, f"{setup}y = torch.tensor([0, 7])\n{failing}\n")
    said = run_here("train.py").stderr
    before, _, after = said.partition("✗")
    assert failing in before
    assert "torch/nn" not in before
    assert not re.search("^(cudalens:|  (op|where|hint|CUDA) )", before, re.MULTILINE)
    assert "CUDA is fine" in after


def test_a_page_is_drawn_on_a_terminal_and_handed_on_as_it_is(
    run_here: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Item 35.9: no signs of Markdown on a screen; a pipe gets the file's own text."""
    page = (ROOT / "docs" / "errors" / "n-classes.md").read_text(encoding="utf-8")
    assert run_here("page", "n-classes").stdout == f"{page}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["page", "n-classes"]) == 0
    drawn = re.sub("\x1b\\[[\\d;]*m", "", capsys.readouterr().out)
    assert "Class label out of range" in drawn
    assert not re.search("^#|```|`cross_entropy`", drawn, re.MULTILINE)


@pytest.mark.parametrize("words", [["show", "report.json"], ["--help"], ["--version"]])
def test_a_reader_that_leaves_early_gets_no_traceback(words: list[str], tmp_path: Path) -> None:
    """As in ``cudalens guards | head``: nothing on stderr, and a status that says it."""
    Report(headline="y[3] = 10 is outside").save(tmp_path / "report.json")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        done = python("-m", "cudalens", *words, cwd=tmp_path, streams={"stdout": gone})
    assert (done.returncode, done.stderr) == (1, "")


def test_a_misspelt_page_is_answered_with_the_one_that_was_meant(run_here: Run) -> None:
    assert_one_line(run_here("page", "nclasses"), 1, "did you mean n-classes? The pages are ")
    assert_one_line(run_here("page", "Backward"), 1, "did you mean backward-a-second-time? The ")
    assert_one_line(run_here("page", "second"), 1, "did you mean backward-a-second-time? The ")
    assert_one_line(run_here("page", "xyzzy"), 1, "there is no page 'xyzzy'; the pages are ")


# --- parts of the command line --------------------------------------------------------------------


class Closed(io.StringIO):
    """Standard output whose reader has left."""

    def flush(self) -> None:
        raise BrokenPipeError

    def fileno(self) -> int:
        return 99


def test_where_a_reader_has_left_python_flushes_into_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved: list[tuple[int, int]] = []
    monkeypatch.setattr(command_line.os, "open", lambda path, flags: 7 if path == os.devnull else 8)
    monkeypatch.setattr(command_line.os, "dup2", lambda old, new: moved.append((old, new)))
    assert command_line._printed(lambda: 3) == 3
    monkeypatch.setattr(sys, "stdout", Closed())
    assert command_line._printed(lambda: 3) == 1
    assert moved == [(7, 99)]


@pytest.mark.parametrize(
    ("words", "ran"),
    [
        (["--json", "guards", "train.py"], ["train.py"]),
        (["--json", "guards", "-m", "json.tool", "x"], ["json.tool", "x"]),
        (["--fast", "train.py", "guards"], ["train.py", "guards"]),
    ],
)
def test_a_command_behind_json_is_a_file_where_a_program_follows(
    words: list[str], ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "")
    seen: list[list[str]] = []

    def run(options: Options, program: Callable[[], None]) -> int:
        program()
        assert options.json == ("guards" if "--json" in words else None)
        return 5

    monkeypatch.setattr(command_line, "_run", run)
    for name in ("_as_script", "_as_module"):
        monkeypatch.setattr(command_line, name, lambda it, rest: seen.append([str(it), *rest]))
    assert main(words) == 5
    assert seen == [ran]


def test_json_before_a_command_is_an_option_of_the_command(run_here: Run) -> None:
    done = run_here("--json", "guards", "embedding")
    assert json.loads(done.stdout)[0]["op"] and done.returncode == 0


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("trian.py", "there is no script 'trian.py'; did you mean train.py?"),
        ("src/modle.py", "there is no script 'src/modle.py'; did you mean src/model.py?"),
        ("modle.py", "there is no script 'modle.py'"),
        ("x.py", "there is no script 'x.py'"),
        ("./guards", "there is no script './guards'"),
        (
            "gards",
            "there is no script and no command 'gards'; did you mean guards? The commands are "
            "demo, explain, guards, help, page, show",
        ),
        (
            "xyz",
            "there is no script and no command 'xyz'; the commands are demo, explain, guards, "
            "help, page, show",
        ),
    ],
)
def test_what_is_no_script_in_words(run_here: Run, tmp_path: Path, word: str, said: str) -> None:
    script(tmp_path, "")
    script(tmp_path, "", "src/model.py")
    assert_one_line(run_here(word), 2, begin=f"{said}\n")


@pytest.mark.parametrize("is_a_terminal", [True, False])
@pytest.mark.parametrize(("wish", "allowed"), [(None, True), ("", True), ("1", False)])
def test_a_terminal_has_colours_unless_they_are_not_wished(
    is_a_terminal: bool, wish: str | None, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if wish is not None:
        monkeypatch.setenv("NO_COLOR", wish)
    stream = SimpleNamespace(isatty=lambda: is_a_terminal)
    assert command_line._has_colour(stream) is (is_a_terminal and allowed)


@pytest.mark.parametrize("is_a_terminal", [True, False])
def test_a_report_on_a_terminal_has_colours(
    is_a_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = SimpleNamespace(isatty=lambda: is_a_terminal)
    assert ("\x1b[" in command_line._as_text(make_report(), stream)) is is_a_terminal


def test_without_a_terminal_lines_have_a_hundred_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", Mock(side_effect=OSError))
    assert command_line._width() == 100


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("120", 120), ("121", 120)])
def test_lines_are_as_wide_as_the_terminal_up_to_a_limit(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert command_line._width() == width


class Ended(SimpleNamespace):
    """A session that has ended, with what the command line asks of it."""

    def __init__(self, report: Report | None = None, **parts: Any) -> None:
        facts = {"is_shown_early": False, "is_reminder": False, "written": (), **parts}
        super().__init__(report=report, **facts)


def test_the_report_its_page_and_its_files_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    report = make_report()
    command_line._print_report(Ended(None, written=(Path("a.html"),)))
    assert capsys.readouterr() == ("", "")
    command_line._print_report(Ended(report, written=(Path("a.html"), Path("b.json"))))
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(report.to_text(width=100))
    assert err.splitlines()[-3:] == [
        f"cudalens: about this error: {page_link(report).address} "  # type: ignore[union-attr]
        "(offline: cudalens page n-classes)",
        "cudalens: the report is in a.html",
        "cudalens: the report is in b.json",
    ]
    plain = make_report(device_text=None)
    command_line._print_report(Ended(plain))
    assert "about this error" not in capsys.readouterr().err


def test_a_report_that_cannot_be_shown_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Report, "to_text", lambda self, **options: 1 / 0)
    monkeypatch.setattr("cudalens.render.words.page_link", lambda report: 1 / 0)
    command_line._print_report(Ended(make_report()))
    said = "cudalens: the report could not be shown: ZeroDivisionError('division by zero')\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("is_rank", [True, False])
def test_the_report_of_a_rank_is_left_for_the_others(
    is_early: bool, is_rank: bool, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    concluded: list[Any] = []
    rank = SimpleNamespace(conclude=lambda *given: concluded.append(given[:2]))
    monkeypatch.setattr(command_line, "_rank", lambda: rank if is_rank else None)
    error, report = ValueError("mine"), make_report()
    command_line._conclude(Ended(report, is_shown_early=is_early), error)
    err = capsys.readouterr().err
    assert (err == "cudalens: the report is above\n") is is_early
    assert ("y[17] = 10" in err) is not (is_early or is_rank)
    assert concluded == ([(error, report)] if is_rank and not is_early else [])


@pytest.mark.parametrize(
    ("parts", "is_rank", "is_short"),
    [
        ({}, False, True), ({"is_shown_early": True}, False, False),
        ({"is_reminder": True}, False, False), ({}, True, False), ({"report": None}, False, False),
    ],
)  # fmt: skip
def test_a_traceback_is_short_where_the_report_comes_next(
    parts: dict[str, Any], is_rank: bool, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It then has the script's own frames and the first line of the message."""
    shown: list[Any] = []
    monkeypatch.setattr(command_line, "_rank", lambda: "a rank" if is_rank else None)
    monkeypatch.setattr(
        sys,
        "excepthook",
        lambda kind, error, trace: shown.append(
            (kind, str(error), {Path(it.f_code.co_filename).name for it, _ in walk_tb(trace)})
        ),
    )

    class Net(torch.nn.Module):
        def forward(self, error: BaseException) -> None:
            raise error

    report = make_report()
    error = DeviceIndexError("y is bad\nand more", report)
    with pytest.raises(DeviceIndexError) as caught:
        Net()(error)
    command_line._show_exception(Ended(**{"report": report, **parts}), caught.value)
    text = "y is bad" if is_short else "y is bad\nand more"
    files = {"test_main.py", *(() if is_short else ["module.py"])}
    assert shown == [(DeviceIndexError, text, files)]


def test_only_where_torchrun_says_so_is_this_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert command_line._rank() is None
    monkeypatch.setattr("cudalens.integrations.torchrun.Rank.of_environment", lambda: "the rank")
    monkeypatch.setenv("RANK", "0")
    assert command_line._rank() == "the rank"


@pytest.mark.parametrize(("local", "said"), [(None, True), (0, True), (1, False)])
def test_of_several_ranks_one_says_what_is_wrong_with_the_command_line(
    local: int | None, said: bool, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    recorded: list[BaseException] = []
    rank = None if local is None else SimpleNamespace(local=local, record=recorded.append)
    monkeypatch.setattr(command_line, "_rank", lambda: rank)
    assert main(["--bogus", "train.py"]) == 2
    assert bool(capsys.readouterr().err) is said
    assert len(recorded) == (local is not None)
    assert all(error.__traceback__ is None for error in recorded)


def test_scripts_find_modules_in_their_folder_unless_python_was_told_not_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for is_safe, first in ((0, "/scripts"), (1, "first")):
        monkeypatch.setattr(sys, "path", ["first", "second"])
        monkeypatch.setattr(sys, "flags", SimpleNamespace(safe_path=is_safe))
        command_line._import_from(Path("/scripts"))
        assert sys.path == [first, "second"]


def test_a_module_is_looked_for_here_and_a_linked_script_finds_those_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``python -m``, and as Python runs what a link leads to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    path = script(tmp_path, "", "real/train.py")
    (tmp_path / "link.py").symlink_to(path)
    for run, place in (
        (lambda: command_line._as_script(Path("link.py"), []), path.parent.resolve()),
        (lambda: command_line._as_module("real.train", []), tmp_path.resolve()),
    ):
        monkeypatch.setattr(sys, "path", ["first", *sys.path[1:]])
        run()
        assert sys.path[0] == str(place)


@pytest.mark.parametrize("ends", [True, False])
def test_a_script_takes_the_place_of_the_main_module_while_it_runs(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["first"])
    own = sys.modules["__main__"]
    text = "import sys\nprint(sys.modules['__main__'].__file__ == __file__, __name__, sys.argv)\n"
    path = script(tmp_path, text if ends else f"{text}1 / 0\n")
    with nullcontext() if ends else pytest.raises(ZeroDivisionError):
        command_line._as_script(path, ["a"])
    assert sys.modules["__main__"] is own
    assert capsys.readouterr().out == f"True __main__ {[str(path), 'a']}\n"


def test_a_folder_and_an_archive_are_run_by_their_main_module(
    run_here: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "path", ["first"])
    monkeypatch.setattr(sys, "argv", [])
    folder = script(tmp_path, "print(__name__, __file__[-11:])\n", "app/__main__.py").parent
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.write(folder / "__main__.py", "__main__.py")
    assert run_here("app").stdout == "__main__ __main__.py\n"
    for path in (folder, tmp_path / "app.zip"):
        command_line._as_script(path, [])
        assert capsys.readouterr().out == "__main__ __main__.py\n"


def test_what_explain_found_nothing_in_is_named(
    run_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.log", "b.log"):
        script(tmp_path, "all is well\n", name)
    done = run_here("explain", "a.log", "b.log")
    assert done.stderr == (
        "cudalens: a.log and b.log (2 lines) shows no failure of CUDA or torch\n"
    )
    buffer = io.BufferedReader(io.BytesIO(b"all is well\n"))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=buffer, isatty=lambda: False))
    done = run_here("explain")
    assert done.stderr.startswith("cudalens: standard input (1 line) shows no failure of CUDA")
    done = run_here("explain", "gone.log")
    assert done.stderr == "cudalens: gone.log cannot be read: No such file or directory\n"
    assert done.returncode == 1
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    done = run_here("explain")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("cudalens: name a log, or hand it over: python train.py 2>&1 |")


def test_what_show_cannot_read_is_a_line_and_the_rest_is_shown(
    run_here: Run, tmp_path: Path
) -> None:
    script(tmp_path, make_report().to_json(), "a.json")
    script(tmp_path, "<html>", "b.HTM")
    done = run_here("show", "a.json", "b.HTM")
    assert done.returncode == 1
    assert done.stderr == (
        "cudalens: b.HTM is not a report that can be shown: it is a page; show takes the .json\n"
    )
    assert done.stdout.splitlines()[0] == "a.json"
    done = run_here("show", "--html", "c.html", "a.json")
    assert (done.returncode, done.stderr) == (0, "cudalens: the report is in c.html\n")
    assert done.stdout.startswith(make_report().to_text(width=100)[:20])
    done = run_here("show", "--html", "d.html", "a.json", "a.json")
    assert not (tmp_path / "d.html").exists() and done.stdout.count("a.json") == 2


def test_the_help_of_a_command_that_there_is_not(run_here: Run) -> None:
    assert "usage: cudalens guards" in run_here("help", "guards").stdout
    done = run_here("help", "gards")
    assert done.returncode == 2 and "did you mean guards?" in done.stderr
    assert run_here("help").stdout == run_here("--help").stdout == run_here().stdout


def test_pages_are_listed_and_looked_for_in_capitals_or_not(run_here: Run) -> None:
    assert "n-classes" in run_here("page").stdout
    done = run_here("page", "N-CLASS")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("cudalens: there is no page 'N-CLASS'; did you mean n-classes?")
    done = run_here("page", "qqq")
    assert done.stderr.startswith("cudalens: there is no page 'qqq'; the pages are ")
