"""How a block is left: which report an exception has, and whose finding it was raised for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cudalens import DeviceIndexError, NonFiniteError
from cudalens.core.limits import Limits
from cudalens.diagnosis.diagnose import format_message
from cudalens.session import exit as module
from cudalens.session.exit import (
    complete_message,
    explained,
    has_become,
    is_retold,
    leads_to,
    report_of_own,
    write_files,
)
from tests.builders import make_report

FINDING = make_report()


def caught(run: Any) -> Any:
    try:
        run()
    except Exception as error:
        return error
    raise AssertionError


def guarded() -> None:
    raise DeviceIndexError("found", FINDING)


def raised_from() -> None:
    try:
        guarded()
    except DeviceIndexError as error:
        raise ValueError("mine") from error


def raised_in_its_place() -> None:
    try:
        guarded()
    except DeviceIndexError:
        raise ValueError("mine")  # noqa: B904


def failed_in_the_clause() -> None:
    try:
        guarded()
    except DeviceIndexError:
        int("no number")


def raised_below() -> None:
    try:
        guarded()
    except DeviceIndexError:
        raises()


def raises() -> None:
    raise ValueError("mine")


@pytest.mark.parametrize(
    ("run", "become"),
    [
        (raised_from, True), (raised_in_its_place, True), (failed_in_the_clause, False),
        (raised_below, False), (raises, False),
    ],
)  # fmt: skip
def test_what_was_raised_in_place_of_a_finding(run: Any, become: bool) -> None:
    error = caught(run)
    assert has_become(FINDING, error) is become
    assert not has_become(make_report(), error)


def test_a_finding_leads_to_what_has_it_as_cause_or_context() -> None:
    error = caught(raised_in_its_place)
    assert leads_to(FINDING, error, "__context__")
    assert not leads_to(FINDING, error, "__cause__")
    assert not leads_to(FINDING, caught(guarded), "__context__")  # it is the error itself
    assert leads_to(FINDING, caught(raised_from), "__cause__")


def test_torchscript_tells_a_finding_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_of_torchscript", lambda error: True)
    assert is_retold(FINDING, RuntimeError(f"The following: {FINDING.headline}"))
    assert is_retold(FINDING, RuntimeError(f"The following: {FINDING.headline_schema}"))
    assert not is_retold(FINDING, RuntimeError("another"))
    assert not is_retold(make_report(headline="", headline_schema=""), RuntimeError("another"))
    assert not is_retold(FINDING, None)
    monkeypatch.setattr(module, "is_of_torchscript", lambda error: False)
    assert not is_retold(FINDING, RuntimeError(FINDING.headline))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (format_message(FINDING), True), (f"replica 1: {format_message(FINDING)}", True),
        (FINDING.headline, True), (FINDING.headline_schema, True), ("another", False),
    ],
)  # fmt: skip
def test_an_exception_of_ours_without_a_report_has_that_of_its_words(
    text: str, found: bool
) -> None:
    error = DeviceIndexError(text, None)
    match = report_of_own(error, [make_report(headline="other"), FINDING])
    assert match is (FINDING if found else None)


@pytest.mark.parametrize(
    ("kind", "name", "prevented"),
    [(DeviceIndexError, "device_assert", True), (NonFiniteError, "nonfinite", False)],
)
def test_where_no_report_could_be_made_the_sentence_is_all(
    monkeypatch: pytest.MonkeyPatch, kind: Any, name: str, prevented: bool
) -> None:
    def run() -> None:
        raise kind("y[0] = 9 is outside\nmore", None)

    error = caught(run)
    assert report_of_own(error, []) is None  # somebody else raised it
    monkeypatch.setattr(module, "is_own_file", lambda name: True)
    report = report_of_own(error, [])
    assert report is not None
    assert (report.kind, report.prevented, report.headline) == (
        name,
        prevented,
        "y[0] = 9 is outside",
    )
    assert (report.certainty, report.context_usable) == ("proven", True)


def test_the_line_of_the_traceback_goes_into_the_message_that_was_made_before() -> None:
    before, report = make_report(headline="before"), make_report(headline="after")
    error = DeviceIndexError(format_message(before), before)
    complete_message(error, before, report)
    assert str(error) == format_message(report)
    other = ValueError("mine", 3)
    complete_message(other, before, report)
    assert other.args == ("mine", 3)


def test_a_place_is_read_from_the_traceback_only_where_it_is_not_known() -> None:
    report = make_report(source=None)
    error = caught(lambda: guarded())
    error.report = report
    site = module.site_from_traceback(error, report)
    assert site is not None
    assert site.source is not None
    assert site.source.text == 'raise DeviceIndexError("found", FINDING)'
    assert module.site_from_traceback(error, make_report(source=None)) is None
    error.report = FINDING
    assert module.site_from_traceback(error, FINDING) is None


def test_files_are_written_and_what_cannot_be_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, data = tmp_path / "new" / "a.json", tmp_path / "b.html"
    written, failures = write_files(FINDING, page, str(data))
    assert (written, failures) == ((page, data), ())
    assert page.read_text(encoding="utf-8").startswith("<")
    assert json.loads(data.read_text(encoding="utf-8"))["headline"] == FINDING.headline
    assert write_files(FINDING, None, None) == ((), ())
    written, failures = write_files(FINDING, data / "below.html", page)
    assert written == (page,)
    assert len(failures) == 1
    assert failures[0].startswith("below.html was not written: ")
    written, failures = write_files(FINDING, tmp_path, page)  # a folder takes no text
    assert (written, len(failures)) == ((page,), 1)


def test_what_is_none_of_torchs_business_has_no_report() -> None:
    assert explained(ValueError("mine"), None, None, 0.0, Limits()) is None
    assert explained(KeyboardInterrupt(), None, None, 0.0, Limits(), is_refused=True) is None


def test_the_report_that_is_there_is_the_report() -> None:
    error = caught(lambda: torch.ones(2) @ torch.ones(3))
    early = make_report()
    assert explained(error, None, None, 0.0, Limits(), early=early) is early
    assert len(error.__notes__) == 1
    assert explained(error, None, None, 0.0, Limits()) is early  # one inside has reported it
    assert len(error.__notes__) == 1
    other = caught(lambda: torch.ones(2) @ torch.ones(3))
    report = explained(other, None, None, 0.0, Limits())
    assert report is not None
    assert report.kind == "host_error"
    assert other.__notes__[0].startswith("cudalens: ")


@pytest.mark.parametrize("was_lost", [True, False])
def test_the_records_of_a_block_are_no_evidence_where_the_device_was_lost_before(
    was_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of calls that the device refused; what cannot be explained is told in its words."""
    given: list[Any] = []

    def fail(*arguments: Any, **options: Any) -> Any:
        given.append((*arguments[1:], options))
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(module.exception, "evidence_of_error", fail)
    recorder, limits = SimpleNamespace(call_of=lambda error: None), Limits()
    error = caught(lambda: torch.ones(2) @ torch.ones(3))
    report = explained(error, recorder, "printed", 3.0, limits, was_lost=was_lost)
    options = {"started": 3.0, "raised": None, "was_lost": was_lost}
    assert given == [(None if was_lost else recorder, "printed", options)]
    assert report is not None and report.limits == tuple(limits.lines)
    assert len(limits.lines) == 1 and "of ours" in limits.lines[0]


@pytest.mark.parametrize(
    ("is_lost", "earlier", "is_reminder"), [(True, True, True), (True, False, False),
    (False, True, False)],
)  # fmt: skip
def test_of_a_lost_device_the_failure_that_ended_it_is_the_report(
    is_lost: bool, earlier: bool, is_reminder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.lost_context, "is_lost", lambda facts: is_lost)
    monkeypatch.setattr(module.lost_context, "end", lambda: FINDING if earlier else None)
    error = caught(lambda: torch.ones(2) @ torch.ones(3))
    report = explained(error, None, None, 0.0, Limits())
    assert (report is FINDING) is is_reminder
    (line,) = error.__notes__
    assert (line == f"cudalens: {module.lost_context.reminder(FINDING)}") is is_reminder


def test_an_error_of_another_process_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.lost_context, "is_of_another", lambda error: True)
    monkeypatch.setattr(module.exception, "report_of_another", lambda error: FINDING)
    error = caught(lambda: torch.ones(2) @ torch.ones(3))
    assert explained(error, None, None, 0.0, Limits()) is FINDING


def test_a_users_own_exception_is_explained_where_a_guarded_op_raised_it() -> None:
    error = caught(raises)
    assert explained(error, None, None, 0.0, Limits()) is None
    assert not hasattr(error, "__notes__")
    report = explained(error, None, None, 0.0, Limits(), is_refused=True)
    assert report is not None and "mine" in report.headline


def test_a_finding_is_noted_on_torchs_exception_once() -> None:
    error, own = caught(lambda: torch.ones(2) @ torch.ones(3)), caught(raises)
    for _ in range(2):
        module.note_finding(error, FINDING)
        module.note_finding(own, FINDING)
    assert error.__notes__ == [module.note_line(FINDING, Limits())]
    assert not hasattr(own, "__notes__")


def test_a_note_that_cannot_be_made_is_the_headline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "format_note", lambda report: 1 / 0)
    limits = Limits()
    assert module.note_line(FINDING, limits) == f"cudalens: {FINDING.headline}"
    assert len(limits.lines) == 1


def test_an_exception_explained_early_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = caught(raises)
    trace = error.__traceback__
    report = module.explained_early(error, None, None, Limits())
    assert "mine" in report.headline
    assert error.__traceback__ is trace and not hasattr(error, "__notes__")
    monkeypatch.setattr(module, "diagnose", lambda evidence: 1 / 0)
    assert "mine" in module.explained_early(error, None, None, Limits()).headline
    assert error.__traceback__ is trace


def test_an_early_explanation_has_the_callers_and_what_the_block_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error, limits, given = caught(raises), Limits(), []
    limits.add("no memory")
    trace = error.__traceback__
    recorder = SimpleNamespace(call_of=lambda it: "the call" if it is error else None)

    def fails(error: BaseException, *of_block: Any, raised: Any, **_: Any) -> None:
        given.append((*of_block, raised, error.__traceback__ is trace))
        raise ValueError

    monkeypatch.setattr(module.exception, "evidence_of_error", fails)
    report = module.explained_early(error, recorder, "text", limits)
    assert given == [(recorder, "text", "the call", False)]
    assert report.limits == ("no memory",)


class Seeing(torch.Tensor):
    """A tensor that records which functions it is given to."""

    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("is_early", [True, False])
def test_a_subclass_does_not_see_what_is_asked_of_its_tensors(is_early: bool) -> None:
    tensor = torch.ones(2).as_subclass(Seeing)
    error = caught(lambda: tensor @ torch.ones(3))
    Seeing.seen.clear()
    if is_early:
        module.explained_early(error, None, None, Limits())
    else:
        explained(error, None, None, 0.0, Limits())
    assert Seeing.seen == []


def test_a_time_out_of_the_users_is_not_taken_for_a_failure_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal handler may run while we explain: what it raises is the program's."""
    error = caught(raises)
    trace = error.__traceback__

    def handler(number: int, frame: Any) -> None:
        raise TimeoutError("theirs")

    def interrupted(evidence: Any) -> Any:
        handler(14, sys._getframe())

    monkeypatch.setattr(module, "diagnose", interrupted)
    with pytest.raises(TimeoutError, match="theirs"):
        module.explained_early(error, None, None, Limits())
    assert error.__traceback__ is trace
