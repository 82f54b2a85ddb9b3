"""What a block has found, counted and put into words."""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cudalens
from cudalens import simulate
from cudalens.core.report import Frame, Report, SourceSpan
from cudalens.core.report_types import OpName
from cudalens.session.findings import MAX_FINDINGS, Findings, Outcome, SwallowedFinding
from cudalens.source.locate import CallSite


def raised(headline: str) -> Report:
    return Report(kind="device_assert", headline=headline)


def silent(line: int) -> Report:
    return Report(kind="silent", headline=f"line {line}", source=SourceSpan(line=line))


def findings_of(*reports: Report) -> Findings:
    findings = Findings()
    for report in reports:
        findings.add(report)
    return findings


def test_one_finding_alone_leaves_nothing_to_list() -> None:
    for first, second in ((raised("a"), raised("b")), (silent(1), silent(2))):
        assert findings_of(first).others(first) == ""
        said = findings_of(first, second).others(first)
        assert said == f"1 more in this block: {second.headline}."


def test_a_cell_is_called_a_cell() -> None:
    """A script has none: what else was found there is in its block."""
    first = Report(kind="device_assert", headline="a", source=SourceSpan(cell=3, line=1))
    said = findings_of(first, raised("b")).others(first)
    assert said == "1 more in this cell: b."


def test_silent_findings_count_once_a_line() -> None:
    assert len(findings_of(silent(1), silent(1)).silent.first) == 1
    assert len(findings_of(silent(1), silent(2)).silent.first) == 2


@pytest.mark.parametrize(("line", "argument", "count"), [(1, "y", 1), (2, "y", 2), (1, "x", 2)])
def test_the_backward_of_a_silent_finding_is_no_second_one(
    line: int, argument: str, count: int
) -> None:
    found = replace(silent(1), argument="y")
    later = replace(silent(9), argument=argument, forward_source=SourceSpan(line=line))
    assert len(findings_of(found, later).silent.first) == count


def test_findings_of_another_kind_say_their_kind() -> None:
    first, error = raised("a"), Report(kind="cuda_error", headline="out of memory.")
    findings = findings_of(first, raised("b"), silent(1))
    assert findings.others(error, has_ended=True) == (
        "2 more in this block did not end it: device assert: a; device assert: b."
        " 1 more in this block: silent: line 1."
    )
    assert findings_of(silent(1)).others(error) == "1 more in this block: silent: line 1."


def test_the_finding_that_ended_the_block_is_not_among_the_others() -> None:
    first, last = raised("a"), raised("b")
    findings = findings_of(first, last)
    assert findings.others(last, has_ended=True) == "1 more in this block did not end it: a."
    assert findings.others(raised("c")) == "2 more in this block: a; b."


@pytest.mark.parametrize("kinds", [5, 6])
def test_five_are_named_and_all_are_counted(kinds: int) -> None:
    first = raised("first")
    later = [raised(f"finding {number}") for number in range(kinds)] * 2
    said = findings_of(first, *later).others(first)
    assert said.startswith(f"{kinds * 2} more in this block: finding 0 (2 times); ")
    assert said.count("(2 times)") == 5


@pytest.mark.parametrize("number", [MAX_FINDINGS, MAX_FINDINGS + 1])
def test_what_is_not_kept_whole_is_counted(number: int) -> None:
    reports = [raised("again") for _ in range(number)]
    findings = findings_of(*reports)
    assert len(findings.raised.first) == MAX_FINDINGS
    assert findings.fired() == f"{number} calls were stopped"
    assert f"again ({number - 1} times)" in findings.others(reports[0])
    assert findings.has(reports[-1])
    assert not findings.has(raised("again"))


@pytest.mark.parametrize("number", [1, MAX_FINDINGS, MAX_FINDINGS + 2])
def test_the_last_finding_comes_first(number: int) -> None:
    """Of several that became one error, the one that was raised last did."""
    reports = [raised(str(at)) for at in range(number)]
    last, *earlier = findings_of(*reports).raised.kept
    assert last is reports[-1]
    assert earlier == reports[:MAX_FINDINGS][::-1]


def test_words_that_were_seen_before_are_counted_however_many_others_there_are() -> None:
    reports = [raised(f"finding {number}") for number in range(MAX_FINDINGS + 5)]
    findings = findings_of(*reports, reports[1])
    said = findings.others(raised("another"))
    assert said.startswith(f"{MAX_FINDINGS + 6} more in this block: finding 0; finding 1 (2 times)")


def test_silent_findings_differ_by_op_line_or_argument() -> None:
    one = replace(silent(1), argument="y", op=OpName(name="aten::one"))
    backward = replace(silent(9), argument="y", forward_source=SourceSpan(line=1))
    for other, count in (
        (one, 1),
        (replace(one, op=OpName(name="aten::other")), 2),
        (replace(one, argument="x"), 2),
        (replace(one, source=SourceSpan(line=2)), 2),
        (replace(one, source=None), 2),
    ):
        assert len(findings_of(one, other).silent.first) == count
    assert findings_of(replace(one, source=None), backward).silent.count == 2
    assert findings_of(one).raised.count == 0


@pytest.mark.parametrize("count", [0, 1, 2])
def test_how_many_calls_were_stopped(count: int) -> None:
    findings = findings_of(*(raised("a") for _ in range(count)), silent(1))
    words = {0: "0 calls were stopped", 1: "1 call was stopped", 2: "2 calls were stopped"}
    assert findings.fired() == words[count]


# --- the report of a block ------------------------------------------------------------------------

FOUND, ERROR, SILENT = raised("found"), Report(kind="cuda_error", headline="error"), silent(1)


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        ({}, None),
        ({"silent": SILENT}, SILENT),
        ({"silent": SILENT, "finding": FOUND}, FOUND),
        ({"silent": SILENT, "finding": FOUND, "error": ERROR}, ERROR),
    ],
)
def test_an_error_is_shown_before_a_finding_and_that_before_a_silent_one(
    parts: dict[str, Report], shown: Report | None
) -> None:
    assert Outcome(**parts).shown is shown  # type: ignore[arg-type]


def test_a_report_that_was_made_in_an_earlier_block_is_a_reminder() -> None:
    assert Outcome(error=ERROR, earlier=ERROR).is_reminder
    assert not Outcome(error=ERROR).is_reminder
    assert not Outcome(error=ERROR, earlier=FOUND).is_reminder
    assert not Outcome(finding=FOUND, earlier=FOUND).is_reminder
    assert not Outcome().is_reminder
    findings = findings_of(FOUND)
    report = Outcome(error=ERROR, earlier=ERROR).report(findings, ("a limit",))
    assert report == replace(ERROR, limits=("a limit",))


def test_a_report_to_which_the_end_adds_nothing_is_itself() -> None:
    assert Outcome(finding=FOUND).report(findings_of(FOUND)) is FOUND
    known = replace(FOUND, limits=("a limit",))
    assert Outcome(finding=known).report(findings_of(known), ("a limit",)) is known
    report = Outcome(finding=known).report(findings_of(known), ("another", "a limit"))
    assert report == replace(known, limits=("a limit", "another"))


def test_what_else_was_found_is_told_and_observed() -> None:
    shown = replace(FOUND, explanation="Why.")
    report = Outcome(finding=shown).report(findings_of(shown, raised("b"), silent(1)))
    others = "1 more in this block did not end it: b. 1 more in this block: silent: line 1."
    assert report.explanation == f"Why. {others}"
    (line,) = report.observations
    assert (line.kind, line.text) == ("others", others.removesuffix("."))
    swallowed = SwallowedFinding(other="KeyError")
    report = Outcome(finding=shown, swallowed=swallowed).report(findings_of(shown, raised("b")))
    assert report.explanation == (
        "Why. This error did not leave the block, and KeyError was raised later. 2 calls were "
        "stopped. 1 more in this block: b."
    )
    report = Outcome(silent=SILENT).report(findings_of(SILENT, raised("b")))
    assert report.explanation == "1 more in this block: device assert: b."


@pytest.mark.parametrize("usable", [False, True, None])
def test_an_error_that_lost_the_device_says_so_of_the_block(usable: bool | None) -> None:
    error = replace(ERROR, context_usable=usable)
    report = Outcome(error=error, finding=FOUND).report(findings_of())
    assert report.context_usable is usable


def test_the_line_of_the_traceback_is_taken_where_none_is_known() -> None:
    here, there = SourceSpan(line=3), SourceSpan(line=9)
    outer, inner = (Frame(file="a.py", line=line, function="f") for line in (1, 2))
    site = CallSite(source=there, api="F.embedding", frames=(outer, inner))
    report = Outcome(finding=FOUND, site=site).report(findings_of(FOUND))
    assert (report.source, report.op.api) == (there, "F.embedding")
    known = replace(FOUND, source=here, op=OpName(api="F.linear"), frames=(inner,))
    report = Outcome(finding=known, site=site).report(findings_of(known))
    assert (report.source, report.op.api) == (here, "F.linear")
    assert report.frames == (outer, inner)  # the traceback knows all of them
    report = Outcome(finding=known, site=CallSite(source=there)).report(findings_of(known))
    assert report.frames == (inner,)


@pytest.mark.parametrize(
    ("swallowed", "sentence"),
    [
        (SwallowedFinding(), "this error did not leave the block"),
        (
            SwallowedFinding(other="KeyError"),
            "this error did not leave the block, and KeyError was raised later",
        ),
        (
            SwallowedFinding(was_shown=True, is_of_thread=True, other="KeyError"),
            "IPython printed this error while the block ran, as %run, %%capture and a failing "
            "display do, and KeyError was raised later",
        ),
        (
            SwallowedFinding(was_raised_while_handled=True, other="KeyError"),
            "KeyError was raised while this error was being handled",
        ),
        (
            SwallowedFinding(is_of_thread=True, other="KeyError"),
            "this error was raised in another thread and did not leave the block,"
            " and KeyError was raised",
        ),
    ],
)
def test_what_became_of_a_finding(swallowed: SwallowedFinding, sentence: str) -> None:
    """Of errors behind one that did not leave its block: ``test_session.py``."""
    assert swallowed.sentence("block") == sentence


SCRIPTED = """
import torch
@torch.jit.script
def look_up(table: torch.Tensor, index: torch.Tensor):
    return table[index]
"""


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_finding_in_the_words_of_torchscript_has_left_the_block(
    sim: simulate.Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises an error of its own, which holds the text of the finding."""
    (tmp_path / "scripted.py").write_text(SCRIPTED, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    look_up = importlib.import_module("scripted").look_up
    table, bad = torch.ones(3, device="cuda"), torch.tensor([9], device="cuda")
    with pytest.raises(RuntimeError) as caught, cudalens.check() as session:
        look_up(table, bad)
    assert "TorchScript" in str(caught.value)
    assert session.swallowed is None
    assert "did not leave" not in session.report.to_text()
    assert any(note.startswith("cudalens: ") for note in caught.value.__notes__)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("mode", ["full", "fast"])
def test_the_text_of_torchscripts_error_names_no_frame_of_ours(
    mode: str,
    device: str,
    sim: simulate.Simulation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lists the frames that an exception of Python's has come through."""
    (tmp_path / "scripted_last.py").write_text(SCRIPTED, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    look_up = importlib.import_module("scripted_last").look_up
    table, bad = torch.ones(3, device=device), torch.tensor([9], device=device)
    with pytest.raises(RuntimeError) as caught, cudalens.check(fast=mode == "fast"):
        look_up(table, bad)
    text = str(caught.value)
    assert "9" in text
    assert "interceptor.py" not in text


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_another_error_of_torchscript_is_not_the_finding(
    sim: simulate.Simulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scripted_too.py").write_text(SCRIPTED, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    look_up = importlib.import_module("scripted_too").look_up
    table, bad = torch.ones(3, device="cuda"), torch.tensor([9], device="cuda")
    with pytest.raises(RuntimeError), cudalens.check() as session:
        with contextlib.suppress(cudalens.DeviceIndexError):
            table[bad]
        look_up(table, torch.ones(1, device="cuda"))
    assert (session.report.kind, session.swallowed) == ("host_error", None)
    assert "1 more in this block did not end it: " in session.report.explanation
