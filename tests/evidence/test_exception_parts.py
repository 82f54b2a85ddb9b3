"""What is read of an exception: the call behind it, its op and phase, and whether CUDA lives on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cudalens.core.call import ApiCall, NodeMark
from cudalens.evidence import exception
from cudalens.evidence.exception import failed_call
from cudalens.recorder.sites import Site

MARK = NodeMark("MulBackward0", 7)
RAISED, FATAL = ApiCall(func=torch.mm), ApiCall(func=torch.exp)
NOTED = ApiCall(func=None, node=MARK)
"""Noted on autograd's own thread, before torch raised it."""


@pytest.mark.parametrize(
    ("fatal", "is_over", "raised", "is_lost", "wanted"),
    [
        (None, False, RAISED, True, (RAISED, False)),
        (FATAL, True, RAISED, True, (FATAL, True)),
        (FATAL, True, RAISED, False, (RAISED, False)),
        (FATAL, False, RAISED, True, (RAISED, False)),
        (FATAL, True, FATAL, True, (FATAL, False)),
        (None, True, RAISED, True, (None, False)),
        (FATAL, True, None, True, (FATAL, True)),
        (NOTED, True, ApiCall(func=torch.mm, node=MARK), True, None),
        (NOTED, True, RAISED, True, (NOTED, True)),
    ],
)
def test_the_call_that_failed_or_had_ended_the_context_before(
    fatal: Any, is_over: bool, raised: Any, is_lost: bool, wanted: Any
) -> None:
    recorder = SimpleNamespace(fatal=fatal, is_over=is_over)
    found = failed_call(recorder, raised, is_lost=is_lost)
    assert found == ((raised, False) if wanted is None else wanted)
    assert failed_call(None, raised, is_lost=is_lost) == (None, False)


@pytest.mark.parametrize(
    ("call", "name", "overload", "phase"),
    [
        (ApiCall(func=torch.ops.aten.add.Tensor), "aten::add", "Tensor", "forward"),
        (ApiCall(func=torch.mm), "torch.mm", "", "forward"),
        (ApiCall(func=None, node=MARK), "MulBackward0", "", "backward"),
        (ApiCall(func=torch.Tensor.backward, node=MARK), "MulBackward0", "", "backward"),
        (ApiCall(func=torch.mm, node=MARK), "torch.mm", "", "backward"),
        (ApiCall(func=torch.Tensor.backward), "torch.Tensor.backward", "", "backward"),
        (ApiCall(func=torch.mm, site=Site("optimizer", None)), "torch.mm", "", "optimizer"),
    ],
)
def test_the_op_and_the_phase_of_a_call(
    call: ApiCall, name: str, overload: str, phase: str
) -> None:
    op = exception._op_of(call)
    assert (op.name, op.overload or "", exception._phase_of(call)) == (name, overload, phase)


def error(code: int, before: BaseException | None = None) -> BaseException:
    made = (
        torch.AcceleratorError("CUDA error: it ended")
        if hasattr(torch, "AcceleratorError")
        else RuntimeError("CUDA error: it ended")
    )
    made.error_code = code  # type: ignore[attr-defined]
    made.__context__ = before
    return made


def test_what_ended_a_capture_is_the_cause_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    first = RuntimeError("CUDA error: not permitted")
    of_device = [True]
    monkeypatch.setattr(exception.lost_context, "is_of_device", lambda error: of_device[-1])
    end = error(901, first)
    assert exception._cause_in_capture(end) is first
    for other in (error(900, first), error(901), ValueError()):
        assert exception._cause_in_capture(other) is other
    of_device.append(False)
    assert exception._cause_in_capture(end) is end


@pytest.mark.parametrize(
    ("initialized", "of_device", "unanswered", "lives"),
    [
        (False, True, True, None), (True, True, True, None), (True, True, False, True),
        (True, False, True, True),
    ],
)  # fmt: skip
def test_whether_the_device_lives_on(
    monkeypatch: pytest.MonkeyPatch, initialized: bool, of_device: bool, unanswered: bool,
    lives: bool | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(exception.lost_context, "is_of_device", lambda error: of_device)
    monkeypatch.setattr(exception.lost_context, "is_unanswered", lambda: unanswered)
    assert exception._lives_on(ValueError()) is lives


class Printed:
    """What CUDA has printed, and whether it was waited for."""

    def __init__(self) -> None:
        self.asked = list[bool]()

    def text(self, *, is_expected: bool) -> str:
        self.asked.append(is_expected)
        return "Assertion failed"


@pytest.mark.parametrize(
    ("message", "was_lost", "is_expected"),
    [
        ("CUDA error: device-side assert triggered", False, True),
        ("CUDA error: device-side assert triggered", True, False),
        ("CUDA error: misaligned address", False, False),
    ],
)
def test_the_text_of_an_assert_is_waited_for_where_it_is_to_come(
    message: str, was_lost: bool, is_expected: bool
) -> None:
    text = Printed()
    evidence, _ = exception.evidence_of_error(
        RuntimeError(message), None, text, started=0.0, was_lost=was_lost
    )
    assert text.asked == [is_expected]
    assert evidence.device_text == "Assertion failed"


@pytest.mark.parametrize(
    ("is_checked", "was_lost", "waits"),
    [(True, False, False), (True, True, None), (False, False, None)],
)
def test_whether_the_check_waited(is_checked: bool, was_lost: bool, waits: bool | None) -> None:
    evidence, trial = exception.evidence_of_error(
        RuntimeError("CUDA error: x"), None, None, started=0.0, is_checked=is_checked,
        was_lost=was_lost,
    )  # fmt: skip
    assert evidence.synchronization.waits is waits
    assert evidence.is_checked is is_checked
    assert not evidence.device_fault.was_before  # the device lives
    assert (evidence.device_text, trial) == (None, None)


def test_an_exception_of_another_process_is_said_to_be_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for text in ("CUDA error: it ended\nmore", "\n\n CUDA error: it ended", ""):
        report = exception.report_of_another(RuntimeError(text))
        first = "CUDA error: it ended" if text else ""
        assert report.headline == (
            f"no device of this process has failed, but the exception reads: {first}"
        )
    error = RuntimeError("CUDA error: it ended")
    assert (report.kind, report.certainty, report.prevented) == ("cuda_error", "unknown", False)
    assert "look for the failure there." in report.explanation
    for lives, words in (
        (True, "The CUDA devices of this process still work after this exception."),
        (None, "torch has not used CUDA in this process."),
    ):
        monkeypatch.setattr(exception, "_lives_on", lambda error, lives=lives: lives)
        report = exception.report_of_another(error)
        assert report.explanation.startswith(words)
        assert report.context_usable is lives
