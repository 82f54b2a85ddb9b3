"""What ended a job, from failures that are given as they are read from a log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cudalens.core.device_asserts import fold
from cudalens.core.report import Report
from cudalens.core.report_types import Frame
from cudalens.logs.crash_log import CrashLog, Failure
from cudalens.logs.log_verdict import explain_log, last_exception

ASSERT = "Loss.cu:245: f: block: [0,0,0], thread: [0,0,0] Assertion `t >= 0 && t < n_classes`"
UNKNOWN = "Own.cu:9: f: block: [0,0,0], thread: [0,0,0] Assertion `own < 7`"
DIED = "CUDA error: device-side assert triggered"
TIMED_OUT = "Watchdog caught collective operation timeout"


def frame(file: str, line: int, text: str, function: str = "<module>") -> Frame:
    return Frame(file=file, line=line, function=function, text=text)


SCRIPT = frame("train.py", 9, "train()")
LINE = frame("train.py", 3, "loss = F.cross_entropy(out, y)", "train")
TORCH = frame("/usr/lib/python3/site-packages/torch/nn/functional.py", 7, "return f(x)", "relu")


def failure(type_name: str = "RuntimeError", message: str = DIED, *ranks: int, **parts: Any) -> Any:
    return Failure(type_name=type_name, message=message, ranks=frozenset(ranks), **parts)


def explained(*failures: Failure, printed: Sequence[str] = (), **parts: Any) -> Report:
    asserts = tuple(fold("\n".join(f"{line} failed." for line in printed)))
    found = explain_log(CrashLog(failures=failures, asserts=asserts, **parts))
    assert found is not None
    return found


def next_run(report: Report) -> str:
    (hint,) = [item.text for item in report.hints if item.rule == "next_run"]
    return hint


FULL = failure("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", number=5)
LOST = failure("KeyError", "'x'", number=6)
WAITED = failure("", TIMED_OUT, 0, number=7)


@pytest.mark.parametrize(
    ("failures", "kind"),
    [
        ([], None),
        ([LOST], None),
        ([FULL], "cuda_error"),
        ([FULL, LOST], None),
        ([LOST, FULL], None),  # the order of their last lines counts
        ([WAITED], "cuda_error"),
        ([WAITED, LOST], None),
        ([FULL, failure(number=1)], "device_assert"),
        ([failure(number=1), failure("NonFiniteError", "nan", number=2)], "nonfinite"),
        ([failure("ChildFailedError", "CUDA error: unknown", number=9)], None),
    ],
)
def test_which_failure_ended_the_job(failures: list[Failure], kind: str | None) -> None:
    found = explain_log(CrashLog(failures=tuple(failures)))
    assert (found and found.kind) == kind


def test_of_equal_failures_the_one_with_frames_has_the_line() -> None:
    found = explained(failure(), failure(frames=(SCRIPT, LINE, TORCH)))
    assert found.source is not None
    assert (found.source.file, found.source.line) == ("train.py", 3)
    assert [item.is_user for item in found.frames] == [True, True, False]
    launch = failure(message="CUDA error: an illegal memory access", frames=(SCRIPT,))
    assert explained(failure(), launch).source is None


@pytest.mark.parametrize(
    ("type_name", "kind", "prevented"),
    [("DeviceIndexError", "device_assert", True), ("NonFiniteError", "nonfinite", False)],
)
def test_a_guards_exception_is_the_finding(type_name: str, kind: str, *, prevented: bool) -> None:
    found = explained(failure(type_name, "y[1] = 9\nmore", 2), printed=[ASSERT])
    assert (found.kind, found.headline, found.prevented) == (kind, "y[1] = 9", prevented)
    assert (found.certainty, found.hints) == ("proven", ())


@pytest.mark.parametrize(
    ("ranks", "rank", "says"),
    [
        ([[1]], 1, None),
        ([[1], [0]], 1, "Ranks 0 and 1 report it."),
        ([[0, 1]], None, "Ranks 0 and 1 report it."),
        ([[]], None, None),
    ],
)
def test_the_ranks_that_report_an_assert(
    ranks: list[list[int]], rank: int | None, says: str | None
) -> None:
    found = explained(*(failure("RuntimeError", DIED, *each) for each in ranks))
    assert found.environment.rank == rank
    assert ("Ranks" in found.explanation) is (says is not None)
    assert says is None or found.explanation.endswith(says)


@pytest.mark.parametrize(
    ("ranks", "message", "what"),
    [
        ([0], TIMED_OUT, "a rank waited for another rank until NCCL's time-out"),
        ([0, 2], TIMED_OUT, "ranks 0 and 2 waited for another rank until NCCL's time-out"),
        ([0], "NCCL error: unhandled system error", "NCCL gave up"),
    ],
)
def test_a_rank_that_waited(ranks: list[int], message: str, what: str) -> None:
    found = explained(failure("", message, *ranks))
    assert found.headline == f"this log does not show what failed: {what}"
    assert "report it" not in found.explanation


def test_an_assert_whose_line_is_not_in_the_log() -> None:
    found = explained(failure(frames=(SCRIPT, LINE)))
    assert found.headline.endswith("and this log does not show which op asserted")
    assert "The traceback ends in F.cross_entropy, which can assert." in found.explanation
    assert found.certainty == "unknown"
    backward = frame("train.py", 3, "F.cross_entropy(out, y).backward()", "train")
    for other in (TORCH, backward):
        assert "which can assert" not in explained(failure(frames=(SCRIPT, other))).explanation


def test_an_assert_of_the_op_in_which_the_traceback_ends() -> None:
    found = explained(failure(frames=(SCRIPT, LINE)), printed=[ASSERT])
    assert found.headline.startswith("F.cross_entropy asserted on the device: target: ")
    assert (found.op.api, found.argument) == ("F.cross_entropy", "target")
    assert "so its line is likely the one" in found.explanation
    alone = explained(failure(frames=(LINE,)), printed=[ASSERT])
    assert "so its line is likely the one" in alone.explanation
    elsewhere = explained(failure(frames=(LINE, SCRIPT)), printed=[ASSERT])
    assert "so its line is likely the one" not in elsewhere.explanation


def test_several_asserts_and_one_of_no_kernel_of_torchs() -> None:
    both = explained(failure(), printed=[ASSERT, UNKNOWN])
    assert "The first of 2 different assertions" in both.explanation
    assert (both.certainty, both.hints[-1].rule) == ("likely", "next_run")
    one = explained(failure(), printed=[UNKNOWN])
    assert one.headline.startswith("CUDA asserted `own < 7`")
    assert "different assertions" not in one.explanation
    assert one.certainty == "unknown"


def test_an_error_of_a_library_that_hides_an_assert() -> None:
    hidden = "RuntimeError (CUDA error: CUBLAS_STATUS_EXECUTION_FAILED) is not the cause"
    message = "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED\nmore"
    assert hidden in explained(failure("RuntimeError", message), printed=[ASSERT]).explanation
    assert "is not the cause" not in explained(failure(), printed=[ASSERT]).explanation


def test_a_job_without_a_failure_went_on_where_it_printed_more() -> None:
    assert explained(printed=[ASSERT], last_text=3).limits
    assert not explained(printed=[ASSERT]).limits
    assert not explained(failure(), printed=[ASSERT], last_text=3).limits


@pytest.mark.parametrize(("last", "is_handled"), [(13, False), (14, True)])
def test_a_job_that_prints_on_after_an_error_may_have_handled_it(
    last: int, *, is_handled: bool
) -> None:
    error = failure("OutOfMemoryError", "CUDA out of memory. Tried", number=5, frames=(SCRIPT,))
    assert ("if the job handled it" in str(explained(error, last_text=last).limits)) is is_handled
    lost = failure(message="CUDA error: an illegal memory access", number=5, frames=(SCRIPT,))
    assert "if the job handled it" not in str(explained(lost, last_text=last).limits)


def test_the_command_that_runs_the_same_job_checked() -> None:
    own = failure(frames=(frame("run.py", 2, "f()", "run"), SCRIPT, LINE))
    assert next_run(explained(own)) == (
        "next time: python -m cudalens train.py finds the value before its launch"
    )
    assert "torchrun --nproc-per-node N -m cudalens train.py" in next_run(
        explained(own, is_launched=True)
    )
    full = explained(failure("OutOfMemoryError", "CUDA out of memory. Tried", frames=(TORCH,)))
    assert next_run(full) == ("next time: python -m cudalens SCRIPT names the op and its tensors")
    other = failure("ValueError", "x", frames=(SCRIPT,))
    assert "-m cudalens train.py" in next_run(explained(failure(), other))
    started = failure("ChildFailedError", "x", frames=(SCRIPT,))
    assert "-m cudalens SCRIPT" in next_run(explained(failure(), started))
    cell = Frame(cell=3, file="", line=1, function="<module>", text="f()")
    assert "%%cudacheck over this one" in next_run(explained(failure(frames=(cell,))))


def test_the_last_exception_is_that_of_the_last_line() -> None:
    first = failure("KeyError", "'x'\nmore", number=8, frames=(SCRIPT, LINE, TORCH))
    second = failure("ValueError", "", number=4)
    printed = failure("", "CUDA error", number=9)
    assert last_exception(CrashLog(failures=(first, second, printed))) == (
        "KeyError: 'x' at train.py:3"
    )
    assert last_exception(CrashLog(failures=(second,))) == "ValueError"
    assert last_exception(CrashLog(failures=(printed,))) is None
