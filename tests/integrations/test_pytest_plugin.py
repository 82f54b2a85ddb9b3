"""The pytest plugin in a pytest of its own, on the rehearsal device."""

from __future__ import annotations

import re
import subprocess
import xml.etree.ElementTree as ET
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from cudalens.integrations import pytest_plugin
from cudalens.integrations.pytest_plugin import (
    _HEADLINE,
    _IS_LOST,
    _REPORT,
    pytest_configure,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    pytest_terminal_summary,
)
from tests.processes import python
from tests.releases import needs_rehearsal

CONFTEST = """
import pytest
import cudalens

@pytest.fixture(autouse=True, scope="session")
def device():
    with cudalens.simulate.start():
        yield
"""
BAD = """
import pytest
import torch
from torch.nn import functional as F

def train(labels):
    scores = torch.zeros(4, 3, device="cuda")
    return F.cross_entropy(scores, torch.tensor(labels, device="cuda")).item()

def test_bad_label():
    train([0, 1, 3, 2])

def test_good_labels():
    train([0, 1, 2, 2])
"""


def run(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on a file of tests, with no other plugin but those named here."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(text)
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:cudacheck"]
    command += ["-p", "cudalens.integrations.pytest_plugin", *words]
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100"}
    return python(*command, cwd=folder, **alone)


@needs_rehearsal
def test_a_bad_value_fails_with_the_report_and_the_next_test_runs(tmp_path: Path) -> None:
    done = run(tmp_path, BAD, "--cudacheck", "--junitxml=found.xml")
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert re.search(r"-+ cudalens -+", done.stdout)
    assert "is outside the 3 classes of scores" in done.stdout
    found = ET.parse(tmp_path / "found.xml").getroot().iter("property")
    assert {item.get("name"): item.get("value") for item in found} == {
        "cudalens_kind": "device_assert",
        "cudalens_op": "aten::nll_loss_forward",
        "cudalens_headline": 'torch.tensor(labels, device="cuda")[2] = 3 is outside the 3 classes '
        "of scores",
    }


def test_without_the_option_nothing_of_ours_is_loaded(tmp_path: Path) -> None:
    """Off, it costs nothing: no torch, and the device asserts as it does."""
    text = "import sys\ndef test_it():\n    assert 'cudalens.session.session' not in sys.modules\n"
    done = run(tmp_path, text, "-p", "no:conftest", "--noconftest")
    assert "1 passed" in done.stdout, done.stdout + done.stderr


def marked(mark: str) -> str:
    return BAD.replace("def test_bad_label", f"@pytest.mark.cudacheck({mark})\ndef test_bad_label")


QUIET = (
    BAD.partition("def test_bad_label")[0]
    + """
import os
import threading

def test_caught():
    with pytest.raises(IndexError):
        train([0, 1, 3, 2])

def test_in_a_thread():
    def body():
        with pytest.raises(IndexError):
            train([0, 1, 4, 2])
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()

def test_nothing():
    train([0, 1, 2, 2])

def test_descriptor(capfd):
    os.write(2, b"to the descriptor\\n")
    assert capfd.readouterr().err == "to the descriptor\\n"

def test_shapes():
    rows = torch.zeros(2, 3, device="cuda")
    rows @ rows
"""
)
"""Findings that fail no test, a test that captures the descriptors, and torch's own exception."""


@needs_rehearsal
def test_findings_of_tests_that_pass_are_in_the_summary(tmp_path: Path) -> None:
    """Each once, with the test's name; a failure has the report, and no notes that repeat it."""
    done = run(tmp_path, QUIET, "--cudacheck")
    assert "1 failed, 4 passed" in done.stdout, done.stdout + done.stderr
    failure, _, summary = done.stdout.partition("Found in tests that did not fail by it")
    assert re.search(r"test_it.py::test_caught: .*\] = 3 is outside the 3 classes", summary)
    assert re.search(r"test_it.py::test_in_a_thread: .*\] = 4 is outside the 3 classes", summary)
    assert "test_nothing" not in summary and "test_descriptor" not in summary
    assert re.search("E       RuntimeError: (mm: )?mat1 and mat2", failure)
    assert "E       cudalens:" not in failure and failure.count("✗ rows and rows shapes") == 1


LOG = "import torch\ndef test_it():\n    torch.zeros(2, device='cuda').log()\n"
LOG_LOSS = """
import torch
def test_it():
    x = torch.zeros(2, device="cuda", requires_grad=True)
    (x - 1).log().sum().backward()
"""
EXPECTING = BAD.replace("train([0, 1, 3", "with pytest.raises(IndexError): train([0, 1, 3")
IN_FIXTURE = BAD.replace("def test_bad_label():", "@pytest.fixture\ndef bad():")
IN_FIXTURE += "\n\ndef test_it(bad):\n    pass\n"
ONE = ("-k", "bad_label")
ENDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "marked": (marked("fast=True"), ONE, "DeviceIndexError"),
    "left out": (marked("False"), ("--cudacheck", *ONE), "device-side assert"),
    "deferred": (BAD, ("--cudacheck=deferred", *ONE), "DeviceIndexError"),
    "nan": (LOG_LOSS, ("--cudacheck=nan",), "NonFiniteError"),
    "nan that nothing reads": (LOG, ("--cudacheck=nan",), "1 passed"),
    "nan, strict": (LOG, ("--cudacheck=nan=strict",), "NonFiniteError"),
    "nan, not asked for": (LOG, ("--cudacheck",), "1 passed"),
    "expected": (EXPECTING, ("--cudacheck",), "2 passed"),
    "in a fixture": (IN_FIXTURE, ("--cudacheck",), "1 passed, 1 error"),
    "all, guards alone": (BAD, ("--cudacheck=fast", *ONE), "DeviceIndexError"),
    "off": (BAD, ONE, "device-side assert"),
}
"""What is tested, the words behind pytest, and what its summary says then."""
NOT_IN_CI = dict.fromkeys(("all, guards alone", "off"), pytest.mark.all)


@pytest.mark.parametrize(
    ("text", "words", "end"),
    [
        pytest.param(*case, id=name, marks=NOT_IN_CI.get(name, pytest.mark.thorough))
        for name, case in ENDS.items()
    ],
)
def test_marker_and_option(tmp_path: Path, text: str, words: tuple[str, ...], end: str) -> None:
    done = run(tmp_path, text, *words)
    assert end in done.stdout.rpartition("short test summary info")[2], done.stdout + done.stderr


LOST = """
import pytest
import torch
import cudalens

LIBRARY = torch.library.Library("plugin_test", "DEF")
LIBRARY.define("lookup(Tensor rows) -> Tensor")

def lookup(rows):
    cudalens.simulate.current().device_assert("plugin_test::lookup", LINE)
    return rows.clone()

LINE = "a.cu:1: k: block: [0,0,0], thread: [0,0,0] Assertion `i < 3` failed."
LIBRARY.impl("lookup", lookup, "CUDA")

@pytest.mark.cudacheck(False)
def test_before():
    torch.zeros(1, device="cuda").item()

def test_lost():
    torch.ops.plugin_test.lookup(torch.zeros(1, device="cuda")).item()

def test_after():
    torch.ones(1, device="cuda").item()
"""
"""An op without a guard: its assert is met, not prevented."""


@pytest.mark.thorough
def test_a_lost_context_is_said_once(tmp_path: Path) -> None:
    done = run(tmp_path, LOST, "--cudacheck")
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("A test lost CUDA for this process") == 1


@pytest.mark.thorough
def test_a_worker_that_lost_its_context_is_replaced(tmp_path: Path) -> None:
    done = run(tmp_path, LOST, "--cudacheck", "-p", "xdist", "-n", "1")
    assert "replacing crashed worker" in done.stdout, done.stdout + done.stderr
    assert re.search(r"FAILED test_it.py::test_lost", done.stdout)
    assert "test_after" not in done.stdout.partition("short test summary info")[2]
    assert "2 passed" in done.stdout


@pytest.mark.all
@pytest.mark.parametrize("words", [["--cudacheck", "below"], ["--cudacheck", "below/test_b.py"]])
def test_a_path_behind_the_option_is_a_path(tmp_path: Path, words: list[str]) -> None:
    """As in ``addopts = --cudacheck``, behind which everything that is typed comes."""
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--of-conftest')\n"
    )
    (tmp_path / "below" / "test_b.py").write_text(BAD)
    done = run(tmp_path, "def test_not_asked_for():\n    assert False\n", *words)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "is outside the 3 classes of scores" in done.stdout
    assert "1 failed, 1 passed" in run(tmp_path, BAD, *words, "--of-conftest=1").stdout


@pytest.mark.parametrize("mode", ["slow", ""])
def test_a_mode_that_there_is_not_is_refused(mode: str) -> None:
    with pytest.raises(
        pytest.UsageError,
        match=rf"^--cudacheck: invalid choice: .{mode}. \(choose from on, fast, ",
    ):
        pytest_configure(Mock(getoption=Mock(return_value=mode)))


@pytest.mark.parametrize("mode", [None, *pytest_plugin.MODES])
def test_the_marker_is_described_in_each_mode(mode: str | None) -> None:
    config = Mock(getoption=Mock(return_value=mode))
    pytest_configure(config)
    ((kind, line),) = (call.args for call in config.addinivalue_line.call_args_list)
    assert kind == "markers" and line == (
        "cudacheck(fast=False, nan=False, deferred=False): run the test under cudalens.check with "
        "these options, cudacheck(False) without it"
    )


@pytest.mark.parametrize(
    ("words", "mode"), [([], None), (["--cudacheck"], "on"), (["--cudacheck", "nan"], "nan")]
)
def test_the_option_takes_a_mode_or_none(words: list[str], mode: str | None) -> None:
    parser = pytest.Parser(_ispytest=True)
    pytest_plugin.pytest_addoption(parser)
    assert parser.parse_known_args(words).cudacheck == mode


def summary(reports: dict[str, list[Any]], *, is_lost: bool) -> tuple[list[str], str]:
    """Return the sections and the text that the plugin adds to the terminal's summary."""
    terminal = Mock(getreports=lambda outcome: reports.get(outcome, []))
    config: Any = SimpleNamespace(stash=pytest.Stash())
    if is_lost:
        config.stash[_IS_LOST] = True
    pytest_terminal_summary(terminal, config)
    sections = [call.args[0] for call in terminal.section.call_args_list]
    return sections, "\n".join(call.args[0] for call in terminal.line.call_args_list)


def finished(nodeid: str, when: str, *properties: tuple[str, str]) -> Any:
    return SimpleNamespace(nodeid=nodeid, when=when, user_properties=list(properties))


@pytest.mark.parametrize("outcome", ["passed", "skipped"])
def test_a_finding_of_a_test_that_did_not_fail_is_listed_once(outcome: str) -> None:
    """The report of each phase has the properties: those of the call are the test's."""
    found = [("cudalens_op", "aten::index"), (_HEADLINE, "a bad label")]
    phases = [finished("test_it.py::test_a", when, *found) for when in ("call", "teardown")]
    sections, text = summary({outcome: phases, "failed": phases}, is_lost=False)
    assert sections == ["cudalens"]
    assert text.splitlines() == [
        "Found in tests that did not fail by it: caught by a handler, or in a thread.",
        "  test_it.py::test_a: a bad label",
    ]


def test_without_a_finding_the_summary_stays_as_it_is() -> None:
    good = finished("test_it.py::test_a", "call", ("other", "property"))
    assert summary({"passed": [good]}, is_lost=False) == ([], "")


def test_a_lost_context_is_said_where_no_test_passed_with_a_finding() -> None:
    sections, text = summary({}, is_lost=True)
    assert sections == ["cudalens"]
    assert text == (
        "A test lost CUDA for this process: tests behind it that use the GPU fail for that reason "
        "alone. With pytest-xdist (-n 1) a new worker takes over."
    )


@pytest.mark.parametrize("is_usable", [True, False, None])
@pytest.mark.parametrize("failed", [True, False])
def test_a_report_of_the_check_goes_to_the_report_of_the_test_once(
    is_usable: bool | None, failed: bool
) -> None:
    """A context that is lost is remembered, one of which nothing is known is not."""
    finding = Mock(
        kind="index", op=SimpleNamespace(name="op"), headline="h", context_usable=is_usable
    )
    finding.to_text.return_value = "the text"
    item: Any = SimpleNamespace(
        stash=pytest.Stash(), user_properties=[], config=SimpleNamespace(stash=pytest.Stash())
    )
    item.stash[_REPORT] = finding
    for sections in ([("cudalens", "the text")] if failed else [], []):
        report: Any = SimpleNamespace(failed=failed, sections=[])
        made = pytest_runtest_makereport(item, Mock(excinfo=None))
        next(made)
        with pytest.raises(StopIteration) as end:
            made.send(report)
        assert end.value.value is report
        assert report.sections == sections
    wanted = [("cudalens_kind", "index"), ("cudalens_op", "op"), (_HEADLINE, "h")]
    assert item.user_properties == wanted
    assert item.config.stash.get(_IS_LOST, False) is (is_usable is False)


@pytest.mark.parametrize("is_worker", [True, False])
@pytest.mark.parametrize("is_lost", [True, False, None])
def test_a_worker_alone_ends_after_it_lost_its_context(
    is_worker: bool, is_lost: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    config = SimpleNamespace(stash=pytest.Stash(), **({"workerinput": {}} if is_worker else {}))
    if is_lost is not None:  # no test has had a report yet
        config.stash[_IS_LOST] = is_lost
    item: Any = SimpleNamespace(config=config)
    run = pytest_runtest_protocol(item)
    next(run)
    assert ended == []
    with pytest.raises(StopIteration) as end:
        run.send("done")
    assert end.value.value == "done"
    assert ended == ([1] if is_worker and is_lost else [])


@pytest.mark.parametrize(
    ("mode", "marker", "options"),
    [
        (None, None, None),
        ("on", None, {}),
        ("nan=strict", None, {"nan": "strict"}),
        (None, ((), {}), {}),
        (None, ((), {"fast": True}), {"fast": True}),
        ("nan", ((), {"fast": True}), {"fast": True}),
        ("nan", ((False,), {}), None),
        (None, ((False,), {}), None),
    ],
)
def test_a_marker_goes_before_the_option(
    mode: str | None, marker: Any, options: dict[str, Any] | None
) -> None:
    mark = None if marker is None else SimpleNamespace(args=marker[0], kwargs=marker[1])
    item: Any = Mock(**{"config.getoption.return_value": mode})
    item.get_closest_marker.return_value = mark
    assert pytest_plugin._options(item) == options
    assert item.config.getoption.call_args.args == item.get_closest_marker.call_args.args


def ran(item: Any, options: dict[str, Any] | None, outcome: Any) -> Any:
    """Run a test of the plugin's, which returns or raises an outcome."""
    running = pytest_plugin._checked(item, options)
    next(running)
    try:
        if isinstance(outcome, BaseException):
            running.throw(outcome)
        running.send(outcome)
    except StopIteration as end:
        return end.value
    return None


@pytest.mark.parametrize(
    ("fixtures", "reads"),
    [((), True), (("capsys",), True), (("capfd",), False), (("a", "capfdbinary"), False)],
)
def test_a_test_that_captures_the_descriptor_keeps_it(
    fixtures: tuple[str, ...], reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions: list[Any] = []

    class Session(nullcontext[None]):
        report = "the report"
        reads_stderr = True

        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.options = options
            sessions.append(self)

    monkeypatch.setattr("cudalens.session.session.check", Session)
    item: Any = SimpleNamespace(fixturenames=fixtures, stash={})
    assert ran(item, {"fast": True}, 3) == 3
    assert ran(item, None, 4) == 4
    (session,) = sessions
    assert (session.options, session.reads_stderr) == ({"fast": True}, reads)
    assert item.stash == {_REPORT: "the report"}
    item.stash.clear()
    with pytest.raises(ZeroDivisionError):
        ran(item, {}, ZeroDivisionError())
    assert item.stash == {_REPORT: "the report"}
    monkeypatch.setattr(Session, "report", None)
    item.stash.clear()
    ran(item, {}, 3)
    assert item.stash == {}


@pytest.mark.parametrize("mode", [None, "on"])
def test_fixtures_are_guarded_alone_and_the_test_as_it_asks(
    mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def checked(item: Any, options: Any) -> Any:
        asked.append(options)
        return (yield)

    monkeypatch.setattr(pytest_plugin, "_checked", checked)
    item: Any = Mock(**{"config.getoption.return_value": mode and "nan"})
    item.get_closest_marker.return_value = None
    for hook in (
        pytest_plugin.pytest_runtest_setup,
        pytest_plugin.pytest_runtest_call,
        pytest_plugin.pytest_runtest_teardown,
    ):
        next(hook(item))
    fast, own = (None, None) if mode is None else ({"fast": True}, {"nan": True})
    assert asked == [fast, own, fast]


@pytest.mark.parametrize(
    ("words", "read_as"),
    [
        (["--cudacheck", "tests"], ["--cudacheck=on", "tests"]),
        (["--cudacheck", "fast", "tests"], ["--cudacheck", "fast", "tests"]),
        (["--cudacheck=nan", "tests"], ["--cudacheck=nan", "tests"]),
        (["tests", "--cudacheck"], ["tests", "--cudacheck"]),
        (["-x", "tests"], ["-x", "tests"]),
    ],
)
def test_a_path_is_no_mode(words: list[str], read_as: list[str]) -> None:
    parser: Any = Mock()
    parser.parse_known_args.side_effect = lambda args: SimpleNamespace(file_or_dir=list(args))
    config: Any = SimpleNamespace(known_args_namespace=SimpleNamespace())
    pytest_plugin.pytest_load_initial_conftests(config, parser, words)
    assert words == read_as == config.known_args_namespace.file_or_dir
