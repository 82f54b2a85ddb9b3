"""What ended a job, from failures that are given as they are read from a log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cudalens.core.device_asserts import fold
from cudalens.core.report import Report
from cudalens.core.report_types import Frame
from cudalens.logs import log_verdict
from cudalens.logs.crash_log import CrashLog, Failure
from cudalens.logs.log_verdict import explain_log, last_exception

ASSERT = "Loss.cu:245: f: block: [0,0,0], thread: [0,0,0] Assertion `t >= 0 && t < n_classes`"
UNKNOWN = "Own.cu:9: f: block: [0,0,0], thread: [0,0,0] Assertion `own < 7`"
DIED = "CUDA error: device-side assert triggered"
HOST = "host_error"
FAULT = "CUDA error: an illegal memory access was encountered"
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
        *(
            ([failure(name, "CUDA error: unknown", number=9)], None)
            for name in (
                "ChildFailedError",
                "CalledProcessError",
                "ProcessRaisedException",
                "ProcessExitedException",
                "KeyboardInterrupt",
                "SystemExit",
                "BrokenPipeError",
                "ConnectionResetError",
                "EOFError",
                "RayTaskError",
            )
        ),
        (
            [failure("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)")],
            HOST,
        ),
        ([failure("RuntimeError", "cuDNN error: CUDNN_STATUS_BAD_PARAM")], "cuda_error"),
        ([failure("RuntimeError", "CUBLAS_STATUS_NOT_SUPPORTED")], "cuda_error"),
        ([failure("DistBackendError", "other")], None),  # the message counts
        ([failure("RuntimeError", "Socket Timeout")], "cuda_error"),
        ([failure("RuntimeError", "Broken pipe")], "cuda_error"),
        ([failure("RuntimeError", f"{TIMED_OUT}: {DIED}")], "device_assert"),
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


def test_of_several_causes_the_first_counts() -> None:
    waits = [failure("", TIMED_OUT, at, frames=(frame(f"{at}.py", 1, "f()"),)) for at in (0, 1)]
    found = explained(*waits)
    assert (found.source and found.source.file, found.environment.rank) == ("0.py", 0)
    own = [failure("DeviceIndexError", f"y[{at}] = 9", number=9 - at) for at in (0, 1)]
    assert explained(*own).headline == "y[0] = 9"
    fault = failure(message="CUDA error: CUBLAS_STATUS_EXECUTION_FAILED", frames=(SCRIPT,))
    found = explained(LOST, fault, FULL, printed=[ASSERT])
    assert found.source is not None and found.source.line == 9


@pytest.mark.parametrize(
    ("file", "is_user"),
    [
        ("/work/train.py", True),
        ("train.py", True),
        ("/env/lib/python3.11/site-packages/torch/nn/functional.py", False),
        ("/usr/lib/dist-packages/x/a.py", False),
        ("/usr/lib64/python3/runpy.py", False),
        ("/opt/lib/runpy.py", False),
        ("/opt/lib/mine/runpy.py", True),
        ("<frozen runpy>", False),
        ("a<b>.py", True),
        (r"C:\Python311\Lib\runpy.py", False),
        ("/src/torch/optim/adam.py", False),
        ("/src/torch/_dynamo/a.py", False),
        ("/src/torch/mine/a.py", True),
        ("/usr/local/bin/torchrun", False),
        ("/opt/conda/bin/torchrun", False),
        ("/home/me/bin/train.py", True),
        ("/src/cudalens/simulate/state.py", False),
        ("/src/cudalens/recorder/a.py", False),
        ("/src/cudalens/benchmarks/a.py", True),
    ],
)
def test_a_file_of_the_users(file: str, *, is_user: bool) -> None:
    found = explained(failure(frames=(frame(file, 7, "f()"),)))
    assert [item.is_user for item in found.frames] == [is_user]
    assert (found.source is not None) is is_user


def test_a_line_without_a_number_or_a_text() -> None:
    assert explained(failure(frames=(frame("a.py", 0, "f()"),))).source is None
    found = explained(failure(frames=(frame("a.py", 3, ""),)))
    assert found.source is not None and found.source.text is None


@pytest.mark.parametrize(
    ("type_name", "kind", "prevented"),
    [
        ("DeviceIndexError", "device_assert", True),
        ("DeviceValueError", "device_assert", True),
        ("DeviceAssertError", "device_assert", True),
        ("NonFiniteError", "nonfinite", False),
    ],
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


@pytest.mark.parametrize("messages", [(DIED, FAULT), (FAULT, DIED), (FAULT, FAULT)])
def test_ranks_with_another_error_are_not_named_beside_it(messages: tuple[str, str]) -> None:
    found = explained(*(failure("RuntimeError", text, at) for at, text in enumerate(messages)))
    assert found.environment.rank == 0
    assert "report it" not in found.explanation


def test_of_many_ranks_the_first_eight_are_named() -> None:
    nine = "Ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more report it."
    assert explained(failure("RuntimeError", DIED, *range(9))).explanation.endswith(nine)
    eight = "Ranks 0, 1, 2, 3, 4, 5, 6 and 7 report it."
    assert explained(failure("RuntimeError", DIED, *range(8))).explanation.endswith(eight)


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


def test_the_ranks_of_all_that_waited_are_named() -> None:
    again = failure("", f"{TIMED_OUT} again", 2)
    found = explained(failure("", TIMED_OUT, 0), again)
    assert "ranks 0 and 2 waited for another rank" in found.headline


def test_an_assert_whose_line_is_not_in_the_log() -> None:
    found = explained(failure(frames=(SCRIPT, LINE)))
    assert found.headline.endswith("and this log does not show which op asserted")
    assert "The traceback ends in F.cross_entropy, which can assert." in found.explanation
    assert found.certainty == "unknown"
    backward = frame("train.py", 3, "F.cross_entropy(out, y).backward()", "train")
    added = frame("train.py", 3, "y = torch.add(x, 1)", "train")
    for other in (TORCH, backward, added):
        assert "which can assert" not in explained(failure(frames=(SCRIPT, other))).explanation
    assert explained(failure(frames=(SCRIPT, backward))).phase == "backward"


def test_an_assert_of_the_op_in_which_the_traceback_ends() -> None:
    found = explained(failure(frames=(SCRIPT, LINE)), printed=[ASSERT])
    assert found.headline.startswith("F.cross_entropy asserted on the device: target: ")
    assert (found.op.api, found.argument) == ("F.cross_entropy", "target")
    assert "so its line is likely the one" in found.explanation
    alone = explained(failure(frames=(LINE,)), printed=[ASSERT])
    assert "so its line is likely the one" in alone.explanation
    inside = frame(TORCH.file, 7, "return f(x)", "functional.cross_entropy")
    below = explained(failure(frames=(SCRIPT, inside)), printed=[ASSERT])
    assert below.op.api == "F.cross_entropy"
    assert "CUDA printed `t >= 0 && t < n_classes`." in below.explanation
    other = frame("train.py", 3, "loss = F.nll_loss(out, y)", "train")
    named = explained(failure(frames=(SCRIPT, other)), printed=[ASSERT])
    assert named.headline.startswith("F.nll_loss asserted on the device: target: ")
    assert named.op.api == "F.nll_loss"
    elsewhere = explained(failure(frames=(LINE, SCRIPT)), printed=[ASSERT])
    assert "so its line is likely the one" not in elsewhere.explanation


CELL_LINES = {2: "rows = table[0]", 5: "F.cross_entropy(out, y)", 9: "out.item()"}


@pytest.mark.parametrize(
    ("lines", "line", "text", "fits"),
    [
        (CELL_LINES, 9, "out.item()", "F.cross_entropy(out, y) in line 5 is the only call of the"),
        ({}, 9, "out.item()", None),
        (CELL_LINES | {6: "F.nll_loss(out, y)"}, 9, "out.item()", None),
        ({2: "  F.nll_loss(out, y)", 9: "  out.item()"}, 9, "out.item()", "F.nll_loss(out, y)"),
    ],
)
def test_the_one_call_of_a_cell_that_fits(
    lines: dict[int, str], line: int, text: str, fits: str | None
) -> None:
    cell = Frame(cell=3, file="", line=line, function="<module>", text=text)
    found = explained(failure(frames=(cell,), cell_lines=lines), printed=[ASSERT])
    start = fits or "F.cross_entropy or F.nll_loss asserted on the device"
    assert found.headline.startswith(start)
    assert found.op.name == ("aten::nll_loss_forward" if fits else None)
    assert "may be an earlier line" in found.explanation


def from_files(files: dict[str, list[str]], *frames: Frame) -> Report:
    """Return what is said of an assert where these files are at hand."""
    log = CrashLog(failures=(failure(frames=frames),), asserts=tuple(fold(f"{ASSERT} failed.")))
    found = explain_log(log, lambda name: files.get(name, ()))
    assert found is not None
    return found


def test_code_that_ran_after_the_failing_line_does_not_fit() -> None:
    """Of a file that is imported all of it may have run before."""
    files = {"a.py": ["F.nll_loss(out, y)", "train()", "F.cross_entropy(out, y)"]}
    assert from_files(files, frame("a.py", 2, "train()")).op.api == "F.nll_loss"
    found = from_files(files, frame("a.py", 2, "train()", "f"))
    assert found.op.api is None
    assert found.headline.startswith("F.cross_entropy or F.nll_loss asserted")


FITS, OTHER = ["F.nll_loss(out, y)", "train()"], ["out = net(x)", "out.item()"]
IN_TRAIN = frame("/job/b.py", 2, "out.item()", "train")


@pytest.mark.parametrize(
    ("name", "files", "where"),
    [
        ("/job/a.py", {"/job/a.py": FITS, "/job/b.py": OTHER}, "a.py"),
        (r"C:\job\a.py", {r"C:\job\a.py": FITS, "/job/b.py": OTHER}, "a.py"),
        ("/job/a.py", {"/job/a.py": OTHER, "/job/b.py": [*OTHER, *FITS]}, "b.py"),
        # Two calls, a file that was edited since, and one that holds no Python.
        ("/job/a.py", {"/job/a.py": FITS, "/job/b.py": [*OTHER, *FITS]}, None),
        ("/job/a.py", {"/job/a.py": FITS[:1], "/job/b.py": OTHER}, None),
        ("/job/a.txt", {"/job/a.txt": FITS, "/job/b.py": OTHER}, None),
        ("/job/a.py", {}, None),
    ],
)
def test_the_one_call_of_all_files_that_fits(
    name: str, files: dict[str, list[str]], where: str | None
) -> None:
    headline = from_files(files, frame(name, 2, "train()"), IN_TRAIN).headline
    assert (where is None) is ("the only call" not in headline)
    assert where is None or f"is the only call of {where} that fits" in headline


def test_several_asserts_and_one_of_no_kernel_of_torchs() -> None:
    both = explained(failure(), printed=[ASSERT, UNKNOWN])
    assert "The first of 2 different assertions" in both.explanation
    assert (both.certainty, both.hints[-1].rule) == ("likely", "next_run")
    assert [text in (both.device_text or "") for text in (ASSERT, UNKNOWN)] == [True, True]
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
    went_on = explained(printed=[ASSERT], last_text=3)
    assert went_on.limits
    assert "no line of your code" not in went_on.explanation
    alone = explained(printed=[ASSERT])
    assert not alone.limits
    assert "no line of your code" in alone.explanation
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
    for frames in ((cell,), (cell, LINE)):
        assert "%%cudacheck over this one" in next_run(explained(failure(frames=frames)))
    library = frame("/usr/lib/python3.11/runpy.py", 1, "run()", "<module>")
    assert "-m cudalens train.py" in next_run(explained(failure(frames=(library, SCRIPT))))
    before = failure("ValueError", "x", frames=(frame("eval.py", 1, "f()", "<module>"),))
    assert "-m cudalens train.py" in next_run(explained(before, failure(frames=(SCRIPT,))))
    hiding = failure("RuntimeError", "CUBLAS_STATUS_NOT_INITIALIZED")
    assert next_run(explained(hiding, printed=[ASSERT])).endswith("value before its launch")


@pytest.mark.parametrize("text", ["a(", "a\0"])
def test_code_that_cannot_be_parsed_has_no_calls(text: str) -> None:
    assert log_verdict._parsed(text).body == []


def test_the_last_exception_is_that_of_the_last_line() -> None:
    first = failure("KeyError", "'x'\nmore", number=8, frames=(SCRIPT, LINE, TORCH))
    second = failure("ValueError", "", number=4)
    printed = failure("", "CUDA error", number=9)
    assert last_exception(CrashLog(failures=(first, second, printed))) == (
        "KeyError: 'x' at train.py:3"
    )
    assert last_exception(CrashLog(failures=(second,))) == "ValueError"
    deep = failure("TypeError", "t", number=7, frames=(SCRIPT, LINE, TORCH, TORCH))
    assert str(last_exception(CrashLog(failures=(deep, first)))).startswith("KeyError")
    cell = Frame(cell=3, file="", line=1, function="<module>", text="f()")
    in_cell = failure("KeyError", "'x'", frames=(cell,))
    assert last_exception(CrashLog(failures=(in_cell,))) == "KeyError: 'x'"
    assert last_exception(CrashLog(failures=(printed,))) is None
