"""Whether a context has ended is asked of the device, not read off an exception's words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import cudalens
from cudalens import Report, simulate
from cudalens.core.evidence_types import DeviceFault
from cudalens.core.report import ErrorFacts
from cudalens.evidence import lost_context
from cudalens.guards.process import PROCESS
from cudalens.session.explain import explain
from tests.builders import make_report

TEXT = "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported late"


def reported(error: BaseException) -> Report:
    """The report of a checked block that raises ``error``."""
    with pytest.raises(type(error)), cudalens.check() as session:
        raise error
    return session.report


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(TEXT),
        getattr(torch, "AcceleratorError", RuntimeError)(TEXT),  # new in torch 2.8
        RuntimeError("CUDA error: an illegal memory access was encountered"),
    ],
)
def test_words_alone_end_no_context(error: BaseException, sim: simulate.Simulation) -> None:
    """Raised by hand, or relayed: the device answers, and is said to; nothing is remembered."""
    assert torch.ones(2, device="cuda").sum().item() == 2
    report = reported(error)
    assert (report.kind, report.context_usable) == ("cuda_error", True)
    text = report.to_text()
    assert "is gone" not in text and "Restart the kernel" not in text
    assert reported(RuntimeError(TEXT)).headline == reported(RuntimeError(TEXT)).headline
    assert "no device of this process has failed" in report.headline_schema


def test_without_cuda_nothing_is_said_of_it() -> None:
    """A process that has not used CUDA has no context to lose."""
    if torch.cuda.is_initialized():
        pytest.skip("this process has used a GPU")
    report = reported(RuntimeError(TEXT))
    assert report.context_usable is None
    assert "torch has not used CUDA in this process" in report.explanation
    assert "  CUDA " not in report.to_text()
    assert explain({}, RuntimeError(TEXT)).context_usable is None


# --- what is remembered ---------------------------------------------------------------------------


@pytest.fixture
def nothing_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PROCESS, "lost", None)


def ended(**more: Any) -> Report:
    return make_report(context_usable=False, **more)


@pytest.mark.usefixtures("nothing_lost")
def test_the_first_failure_that_ended_the_device_is_remembered() -> None:
    lost_context.remember(make_report(context_usable=True))
    lost_context.remember(make_report(context_usable=None))
    assert lost_context.end() is None
    first = ended()
    lost_context.remember(first)
    lost_context.remember(ended(headline="the second"))
    assert lost_context.end() is first


@pytest.mark.usefixtures("nothing_lost")
def test_the_device_is_asked_about_an_error_only_where_a_failure_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probe = Mock(return_value=None)
    monkeypatch.setattr(lost_context, "probe", probe)
    error = RuntimeError(TEXT)
    assert lost_context.earlier_failure(error) is None
    probe.assert_not_called()
    first = ended()
    lost_context.remember(first)
    assert lost_context.earlier_failure(error) is None
    probe.return_value = error
    assert lost_context.earlier_failure(error) is first
    assert lost_context.earlier_failure(RuntimeError("mine")) is None


@pytest.mark.usefixtures("nothing_lost")
def test_a_rehearsal_device_lives_again_and_a_gpu_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault = object()
    for is_simulated in (True, False):
        monkeypatch.setattr(lost_context.context, "rehearsed_fault", lambda: fault)
        place = replace(make_report().environment, simulated=is_simulated)
        report = ended(environment=place)
        lost_context.remember(report)
        assert lost_context.end() is report
        monkeypatch.setattr(lost_context.context, "rehearsed_fault", object)
        assert (lost_context.end() is None) is is_simulated
        monkeypatch.setattr(lost_context.context, "rehearsed_fault", lambda: fault)
        assert (lost_context.end() is None) is is_simulated


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"kind": "device_assert", "certainty": "proven"}, "a device-side assert in aten::"),
        ({"kind": "cuda_error", "certainty": "proven"}, "a CUDA error in aten::"),
        ({"kind": "cuda_error", "certainty": "unknown"}, " that was reported at "),
    ],
)
def test_the_line_for_a_cell_that_fails_for_an_earlier_one(
    facts: dict[str, Any], words: str
) -> None:
    line = lost_context.reminder(ended(**facts))
    assert line.startswith("the CUDA context was lost to ")
    assert words in line
    assert line.endswith("restart the kernel to use the GPU")
    if facts["certainty"] == "proven":
        assert "reported" not in line


class Asked:
    """A device that gives an error, or none, where its work is waited for."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.waits: list[bool] = []

    def __call__(self, *, wait: bool) -> None:
        self.waits.append(wait)
        if self.error is not None:
            raise self.error


ASSERT = "CUDA error: device-side assert triggered"


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (None, False),
        (RuntimeError(ASSERT), True),
        (RuntimeError("CUDA error: invalid argument"), False),
        (RuntimeError("CUDA out of memory"), False),
    ],
)
def test_only_a_sticky_error_ends_the_device(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, is_lost: bool
) -> None:
    device = Asked(error)
    monkeypatch.setattr(lost_context._torch, "raise_pending_cuda_error", device)
    assert (lost_context.probe() is not None) is is_lost
    assert device.waits == [False]


STATUS = "CUBLAS_STATUS_EXECUTION_FAILED"


@pytest.mark.parametrize(
    ("error", "pending", "is_capturing", "is_it"),
    [
        (RuntimeError(ASSERT), None, False, True),
        (RuntimeError(ASSERT), RuntimeError(ASSERT), None, False),
        (RuntimeError(ASSERT), None, True, False),
        (RuntimeError(STATUS), None, False, False),
        (KeyboardInterrupt(ASSERT), None, False, False),
    ],
)
def test_an_error_that_tells_of_another_process(
    error: BaseException,
    pending: Exception | None,
    is_capturing: bool | None,
    is_it: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def capturing() -> bool:
        assert is_capturing is not None, "on a lost context the question raises"
        return is_capturing

    monkeypatch.setattr(lost_context._torch, "raise_pending_cuda_error", Asked(pending))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", capturing)
    assert lost_context.is_of_another(error) is is_it


@pytest.mark.parametrize(("file", "is_it"), [("<cell>", True), (torch.cuda.__file__, False)])
def test_an_error_of_the_start_of_cuda_is_this_processs(
    file: str, is_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError) as caught:
        exec(compile(f"raise RuntimeError({ASSERT!r})", file, "exec"))
    assert lost_context.is_of_another(caught.value) is is_it


class AcceleratorError(RuntimeError):
    """Stands for torch's, without a code."""


@pytest.mark.parametrize(
    ("error", "code", "is_it"),
    [
        (AcceleratorError("it ended"), None, True),
        (RuntimeError("it ended"), 2, True),
        (RuntimeError("XPU error: it ended"), None, True),
        (RuntimeError(STATUS), None, True),
        (RuntimeError("it ended"), None, False),
    ],
)
def test_an_error_that_a_device_reported(
    error: Any, code: int | None, is_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Asked(RuntimeError(ASSERT))
    monkeypatch.setattr(lost_context._torch, "raise_pending_cuda_error", lost)
    error.error_code = code
    assert lost_context.is_of_device(error) is is_it


def test_the_devices_own_error_behind_a_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = Asked(RuntimeError(f"{ASSERT}\nmore"))
    monkeypatch.setattr(lost_context._torch, "raise_pending_cuda_error", pending)
    status = ErrorFacts(type_name="RuntimeError", message=STATUS)
    is_lost, fault = lost_context.ask(status)
    assert (is_lost, fault.hidden_error, fault.is_assert) == (True, ASSERT, True)
    is_lost, fault = lost_context.ask(replace(status, message="no status"))
    assert (is_lost, fault.hidden_error) == (False, ASSERT)
    own = ErrorFacts(type_name="RuntimeError", message=ASSERT)
    assert lost_context.ask(own) == (True, DeviceFault())
    pending.error = None
    assert lost_context.ask(status) == lost_context.ask(own) == (False, DeviceFault())
    # Each time once, and without a wait where nothing speaks of a lost device.
    assert pending.waits == [True, False, True, True, True]


@pytest.mark.parametrize("status", ["CUBLAS_STATUS_NOT_INITIALIZED", "cuDNN error: CUDNN_STATUS_X"])
def test_a_librarys_status_is_of_a_lost_device_where_the_device_says_so(
    monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    device = Asked(RuntimeError(ASSERT))
    monkeypatch.setattr(lost_context._torch, "raise_pending_cuda_error", device)
    facts = ErrorFacts(type_name="RuntimeError", message=status)
    assert lost_context.is_lost(facts)
    assert not lost_context.is_lost(ErrorFacts(type_name="RuntimeError", message="no status"))
    device.error = None
    assert not lost_context.is_lost(facts)


@pytest.mark.usefixtures("nothing_lost")
def test_a_status_after_a_lost_device_points_to_the_first_report(sim: simulate.Simulation) -> None:
    sim.reset()
    x, rows = torch.ones(3, 3, device="cuda"), torch.tensor([0, 9], device="cuda")
    x[rows]
    with pytest.raises(torch.AcceleratorError) as first:
        torch.cuda.synchronize()
    report = explain({}, first.value)
    assert report is not None and report.context_usable is False
    with pytest.raises(RuntimeError, match="NOT_INITIALIZED") as caught:
        with cudalens.check(fast=True) as later:  # a recorder meets the loss before the op does
            x @ x
    assert later.report.headline == report.headline
    assert explain({}, RuntimeError(str(caught.value)).with_traceback(caught.tb)) is report
    assert "the CUDA context was lost to a device-side assert" in caught.value.__notes__[0]


@pytest.mark.usefixtures("nothing_lost")
def test_an_assert_is_found_behind_the_status_that_came_first(sim: simulate.Simulation) -> None:
    sim.reset()
    x, rows = torch.ones(3, 3, device="cuda"), torch.tensor([0, 9], device="cuda")
    x[rows]
    with pytest.raises(RuntimeError, match="NOT_INITIALIZED") as caught:
        x @ x
    report = explain({}, caught.value)
    assert report is not None
    assert (report.kind, report.context_usable) == ("device_assert", False)
    assert "x[i]" in report.headline


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (None, False),
        (RuntimeError("CUDA error: invalid argument"), True),
        (RuntimeError(STATUS), True),
        (RuntimeError(ASSERT), False),
    ],
)
def test_an_answer_that_proves_neither_life_nor_end(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, is_it: bool
) -> None:
    def asked(*, wait: bool) -> None:
        assert wait
        if error is not None:
            raise error

    monkeypatch.setattr(lost_context._torch, "raise_pending_cuda_error", asked)
    assert lost_context.is_unanswered() is is_it
