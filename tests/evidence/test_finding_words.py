"""What becomes of a guard's finding: raised, warned of, said once, told of a call that is over."""

from __future__ import annotations

import dis
import sys
import warnings
from itertools import count
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch

from cudalens import DeviceIndexError, DeviceValueError, NonFiniteError, SilentFindingWarning
from cudalens.core.call import ApiCall, Call, OpCall
from cudalens.core.report_types import Offender, Offenders, Violation
from cudalens.evidence import collect, finding
from cudalens.evidence.call_stack import entries_of
from cudalens.evidence.failure import FailureContext
from cudalens.guards.past_calls import PastCall
from tests.probes import cell

OWN = sys._getframe().f_code
LIBRARY = torch.overrides.wrap_torch_function.__code__


def violation(value: Any = 9, **more: Any) -> Violation:
    first = (Offender(position=(1,), value=value), Offender(position=(2,), value=value))
    offenders = Offenders(count=2, total=4, first=first, min=0, max=9)
    given = {"guard": "g", "op": "aten::embedding", "argument": "index", "offenders": offenders}
    return Violation(headline="{argument}[1] is bad", explanation="Why.", **{**given, **more})


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({"is_index": True}, DeviceIndexError), ({"is_index": False}, DeviceValueError),
        ({"is_silent": True}, SilentFindingWarning),
    ],
)  # fmt: skip
def test_what_is_raised_for_a_finding(facts: dict[str, bool], kind: type[Exception]) -> None:
    report: Any = object()
    with warnings.catch_warnings():
        warnings.simplefilter("error", SilentFindingWarning)
        error: Any = finding._raised(violation(**facts), "text", report)
    assert type(error) is kind
    assert str(error) == "text"
    if kind is not SilentFindingWarning:
        assert error.report is report


def test_a_silent_finding_is_a_warning_unless_a_check_listens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent, report = violation(is_silent=True), SimpleNamespace()
    with pytest.warns(SilentFindingWarning, match="text"):
        assert finding._raised(silent, "text", report) is None  # type: ignore[arg-type]
    monkeypatch.setattr(finding, "PROCESS", SimpleNamespace(listeners=[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert finding._raised(silent, "text", report) is None  # type: ignore[arg-type]


NUMBERS = count(1)


def fresh() -> CodeType:
    """Return the code of a cell that nobody has run."""
    return compile("x", f"<ipython-input-{next(NUMBERS)}-0123456789ab>", "exec")


def test_a_line_meets_a_silent_finding_once() -> None:
    code, item = fresh(), violation()
    assert not finding.is_repeated(item, (code, 2))
    assert finding.is_repeated(item, (code, 2))
    assert not finding.is_repeated(item, (code, 4))
    assert not finding.is_repeated(violation(guard="other"), (code, 2))
    assert not finding.is_repeated(violation(argument="other"), (code, 2))
    other = fresh()
    assert other == code  # Python calls them equal: they differ by their files
    assert not finding.is_repeated(item, (other, 2))
    assert not finding.is_repeated(item, None)
    assert not finding.is_repeated(item, None)


def test_the_deepest_line_of_the_users() -> None:
    code = fresh()
    lines = [(OWN, 0), (code, 2), (LIBRARY, 4)]
    assert finding._users_line(lines) == (code, 2)
    assert finding._users_line(lines[:1]) == (OWN, 0)
    assert finding._users_line(lines[2:]) is None
    running = finding._running_line()
    assert running is not None
    assert running[0] is sys._getframe().f_code


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (0, "Its values went from 0 to 9. To see"),
        (1, "from 0 to 9, 1 guarded call ago. To see"),
        (3, "from 0 to 9, 3 guarded calls ago. To see"),
        (None, "from 0 to 9, in the replays of a CUDA graph. To see"),
    ],
)
def test_a_finding_of_a_call_that_is_over_says_how_long_ago(
    monkeypatch: pytest.MonkeyPatch, calls: int | None, words: str
) -> None:
    told: list[Any] = []

    def reported(item: Violation, full: Any, *, is_deferred: bool = False) -> tuple[str, Any]:
        told.append((item.explanation, is_deferred))
        return "text", None

    monkeypatch.setattr(finding, "_reported", reported)
    past = PastCall(lines=((fresh(), 2),), in_backward=False, calls_ago=calls)
    assert isinstance(finding.on_past_violation(violation(is_index=True), past), DeviceIndexError)
    ((text, is_deferred),) = told
    assert text.startswith("Why. Its values")
    assert words in text
    assert text.endswith("run it without deferred guards.")
    assert is_deferred
    silent = violation(is_silent=True)
    with pytest.warns(SilentFindingWarning):
        finding.on_past_violation(silent, past)
    finding.on_past_violation(silent, past)
    assert len(told) == 2


@pytest.mark.parametrize(
    ("value", "argument", "has_watch", "asked"),
    [("nan", "index", True, True), (9, "index", True, False), ("nan", "other", True, False),
     ("nan", "index", False, False)],
)  # fmt: skip
def test_a_nan_that_arrived_is_told_by_the_watch(
    monkeypatch: pytest.MonkeyPatch, value: Any, argument: str, has_watch: bool, asked: bool
) -> None:
    error, bad = ValueError(), torch.ones(2)
    watch = SimpleNamespace(of_guard=lambda op, tensor, site: (error, op, tensor))
    sites = SimpleNamespace(of=lambda frame: None)
    recorder = SimpleNamespace(watch=watch if has_watch else None, sites=sites)
    monkeypatch.setattr(finding, "current_recorder", lambda: recorder)
    op = OpCall(op=None, args=(), kwargs={}, arguments={"index": bad})
    found: Any = finding._nan_that_arrived(violation(value, argument=argument), op)
    assert found == ((error, "aten::embedding", bad) if asked else None)


EMBEDDING = torch.ops.aten.embedding.default


@pytest.mark.parametrize(
    ("op", "func", "replayed"),
    [
        (None, torch.embedding, None), (EMBEDDING, None, EMBEDDING),
        (EMBEDDING, torch.embedding, EMBEDDING), (EMBEDDING, torch._C._nn.one_hot, "function"),
        (EMBEDDING, torch.nn.functional.embedding, EMBEDDING),
    ],
)  # fmt: skip
def test_the_cpu_is_asked_by_the_function_that_made_its_op_itself(
    monkeypatch: pytest.MonkeyPatch, op: Any, func: Any, replayed: Any
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(collect, "replay", lambda func, *args, **more: asked.append((func, more)))
    api = None if func is None else ApiCall(func=func)
    call = OpCall(op=op, args=(), kwargs={}, arguments={})
    failure = FailureContext(
        call=Call(api=api, op=call),
        violation=violation(is_replay_safe=False),
        entries=(),
        started=0.0,
    )
    collect.replay_of(failure)
    wanted = func if replayed == "function" else replayed
    assert asked == ([] if replayed is None else [(wanted, {"is_safe": False})])


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_nan_is_raised_also_where_its_report_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    """Its sentence has the value; the failure of ours is told to the session."""
    report: Any = SimpleNamespace()
    told: list[str] = []

    def reported(*_: object) -> tuple[str, Any]:
        if is_broken:
            raise OSError("no source")
        return "text", report

    monkeypatch.setattr(finding, "_reported", reported)
    monkeypatch.setattr(finding, "PROCESS", SimpleNamespace(internal_error=told.append))
    error: Any = finding.nonfinite_error(violation("nan"), lambda _: report)
    assert type(error) is NonFiniteError
    assert str(error) == ("index[1] is bad" if is_broken else "text")
    assert error.report is (None if is_broken else report)
    assert told == (["report unavailable: OSError: no source"] if is_broken else [])


@pytest.mark.parametrize(
    ("line", "op", "function"),
    [
        ("F.one_hot(y)", "aten::scatter_", "torch.nn.functional.one_hot"),
        ("torch.nn.functional.one_hot(y)", "aten::scatter_", "torch.nn.functional.one_hot"),
        ("F.relu(y)", "aten::scatter_", None),
        ("x.scatter_(1, y, 1)", "aten::scatter_", None),
        ("F.one_hot(y)", "aten::embedding", None),
        ("y + 1", "aten::scatter_", None),
    ],
)
def test_a_function_without_code_of_pythons_that_a_line_called(
    line: str, op: str, function: str | None
) -> None:
    with cell(line) as code:
        at = next(
            item for item in dis.get_instructions(code) if item.opname in ("CALL", "BINARY_OP")
        )
        lines = entries_of([(code, at.offset)])
        assert finding._compiled_function(op, lines) == function
    assert finding._compiled_function(op, []) is None


def test_running_statistics_that_were_written_since_are_named() -> None:
    norm = torch.nn.BatchNorm1d(2)
    lines = ((fresh(), 2),)
    past = PastCall(lines=lines, in_backward=False, calls_ago=1, buffers=(norm.running_mean,))
    said = "Written since then, from its result or others: norm.running_mean."
    assert finding._written_buffers(past) == said
    none = PastCall(lines=lines, in_backward=False, calls_ago=1)
    assert finding._written_buffers(none) == ""


@pytest.mark.parametrize("is_silent", [False, True])
@pytest.mark.parametrize("in_backward", [False, True])
def test_the_report_of_a_call_that_is_over(in_backward: bool, is_silent: bool) -> None:
    past = PastCall(lines=((OWN, 0),), in_backward=in_backward, calls_ago=1)
    report = finding._report_of_past(violation(is_silent=is_silent), past, 0.0)
    assert report.phase == ("backward" if in_backward else "forward")
    assert (report.deferred, report.prevented) == (True, not is_silent)
    assert (report.context_usable, report.op.name) == (True, "aten::embedding")
    assert report.limits == ()


def test_where_its_report_cannot_be_made_the_sentence_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What failed is a line of the report's limits, or is told to the session where it is not."""
    told: list[str] = []
    added: list[Any] = []
    process = SimpleNamespace(internal_error=told.append, add_finding=added.append)
    monkeypatch.setattr(finding, "PROCESS", process)

    def full(started: float) -> Any:
        raise OSError("no source")

    text, report = finding._reported(violation(), full, is_deferred=True)
    assert text.startswith("index[1] is bad")
    assert (report.limits, report.deferred) == (
        ("diagnosis unavailable: OSError: no source",),
        True,
    )
    assert (added, told) == ([report], [])

    def broken(report: object) -> None:
        raise OSError("no session")

    monkeypatch.setattr(process, "add_finding", broken)
    finding._reported(violation(), full)
    assert told == ["session unavailable: OSError: no session"]
