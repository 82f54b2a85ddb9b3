"""What is kept of the lines of a log: failures, their frames, messages and processes."""

from __future__ import annotations

import pytest

from cudalens.core.report_types import Frame
from cudalens.logs.crash_log import (
    MAX_FAILURES,
    MAX_FRAMES,
    MAX_RANKS,
    MAX_TEXT,
    CrashLog,
    Failure,
    read_log,
)

HEADER = "Traceback (most recent call last):"
DIED = "RuntimeError: CUDA error: device-side assert triggered"


def read(*lines: str) -> CrashLog:
    return read_log(lines)


def only(log: CrashLog) -> Failure:
    (failure,) = log.failures
    return failure


def frame_line(file: str, line: int, function: str = "f") -> str:
    return f'  File "{file}", line {line}, in {function}'


def traceback(error: str = DIED, *, file: str = "a.py", line: int = 3) -> tuple[str, ...]:
    return HEADER, frame_line(file, line), "    g(x)", error


# --- frames ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "frame"),
    [
        (
            ('  File "a b.py", line 7, in Net.forward', "    return f(x)"),
            Frame(file="a b.py", line=7, function="Net.forward", text="return f(x)"),
        ),
        (('  File "a.py", line 7',), Frame(file="a.py", line=7, function="<module>")),
        (
            ("│ /work/a.py:7 in train          │", "│ ❱ 7 │   loss.backward()         │"),
            Frame(file="/work/a.py", line=7, function="train", text="loss.backward()"),
        ),
        (
            ("│ /work/a.py:7 in train          │", "│   6 │   x = 1                   │"),
            Frame(file="/work/a.py", line=7, function="train"),
        ),
        (
            ("File /work/a.py:7, in Net.forward(self, x)", "----> 9 y = f(x)"),
            Frame(file="/work/a.py", line=9, function="Net.forward", text="y = f(x)"),
        ),
        (
            ("/work/a.py in forward(self, x)", "----> 9 y = f(x)"),
            Frame(file="/work/a.py", line=9, function="forward", text="y = f(x)"),
        ),
        (
            ("Cell In[5], line 3", "----> 3 step(x)"),
            Frame(file="", line=3, function="<module>", text="step(x)", cell=5),
        ),
        (
            ("Input In [5], in <cell line: 3>()", "----> 3 step(x)"),
            Frame(file="", line=3, function="<module>", text="step(x)", cell=5),
        ),
        (
            ("<ipython-input-5-0a1b2c> in <module>", "----> 3 step(x)"),
            Frame(file="", line=3, function="<module>", text="step(x)", cell=5),
        ),
    ],
)
def test_a_frame_of_each_form(lines: tuple[str, ...], frame: Frame) -> None:
    assert only(read(HEADER, *lines, DIED)).frames == (frame,)


def test_the_first_line_behind_a_frame_is_its_text() -> None:
    failure = only(read(HEADER, frame_line("a.py", 3), "    g(x)", "    ^^^^", DIED))
    assert [item.text for item in failure.frames] == ["g(x)"]


def test_a_traceback_without_its_head_begins_at_a_frame_of_pythons() -> None:
    assert len(only(read(*traceback()[1:])).frames) == 1
    rich = ("│ /work/a.py:7 in train │", "CUDA error: unknown error")
    assert only(read(*rich)).frames == ()


def test_the_lines_of_the_deepest_cell_are_kept() -> None:
    first = ("Cell In[4], line 1", "----> 1 run()")
    second = ("Cell In[5], line 2", "      1 y = x[i]", "----> 2 y.item()", "      3 done()")
    below = ("File /lib/python3/site-packages/torch/f.py:9, in f(x)", "----> 9 return x")
    failure = only(read(HEADER, *first, *second, *below, DIED))
    assert [item.cell for item in failure.frames] == [4, 5, None]
    assert failure.cell_lines == {1: "y = x[i]", 2: "y.item()", 3: "done()"}
    after = read(HEADER, *second, DIED, *traceback("ValueError: CUDA"))
    assert [dict(item.cell_lines) for item in after.failures] == [failure.cell_lines, {}]


def test_of_very_many_frames_the_middle_is_left_out() -> None:
    def frames_of(count: int) -> list[int]:
        lines = (frame_line("a.py", at) for at in range(1, count + 1))
        return [item.line for item in only(read(HEADER, *lines, DIED)).frames]

    assert frames_of(MAX_FRAMES) == list(range(1, MAX_FRAMES + 1))
    more = frames_of(MAX_FRAMES + 10)
    assert len(more) == MAX_FRAMES
    assert (more[:3], more[-1]) == ([1, 2, 3], MAX_FRAMES + 10)


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "type_name", "message"),
    [
        (DIED, "RuntimeError", "CUDA error: device-side assert triggered"),
        ("torch.cuda.OutOfMemoryError: CUDA full", "OutOfMemoryError", "CUDA full"),
        ("KeyboardInterrupt", "KeyboardInterrupt", ""),
        ("a.b.MyException:text", "MyException", "text"),
    ],
)
def test_an_exception_behind_a_traceback(line: str, type_name: str, message: str) -> None:
    failure = only(read(*traceback(line)))
    assert (failure.type_name, failure.message) == (type_name, message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("CUDA error: an illegal memory access was encountered", None),
        ("CUDA out of memory. Tried to allocate 2 GiB", None),
        ("CUDA driver error: invalid argument", None),
        (
            "  what():  CUDA error: device-side assert triggered",
            "CUDA error: device-side assert triggered",
        ),
        ("2026-01-02 ERROR - CUDA out of memory. Tried", "CUDA out of memory. Tried"),
        ("THCudaCheck FAIL file=/pytorch/a.cu line=3 error=59 : asserted", "error=59 : asserted"),
        ("cuda runtime error (59) : device-side assert triggered", None),
        ("NCCL error: unhandled system error", None),
        (
            "[E1 ProcessGroupNCCL.cpp:1] Watchdog caught collective operation timeout",
            "Watchdog caught collective operation timeout",
        ),
        ("the CUDA error: unknown was handled", ""),
        ("ValueError: CUDA is odd", ""),  # without a traceback
    ],
)
def test_an_error_that_a_process_printed(line: str, message: str | None) -> None:
    failures = read(line).failures
    assert [item.message for item in failures] == ([] if message == "" else [message or line])
    assert {item.type_name for item in failures} <= {""}


def test_a_message_goes_on_over_five_lines() -> None:
    rest = [f"  part {at}" for at in range(6)]
    message = only(read(*traceback(), *rest)).message
    assert message.split("\n")[1:] == rest[:5]
    advice = ("CUDA kernel errors might be late", "For debugging", "Compile with", "Done CUDA")
    assert only(read(*traceback(), *advice)).message.count("\n") == 3


def test_what_stands_behind_a_colon_goes_on_with_the_message() -> None:
    assert only(read(*traceback("RuntimeError: CUDA:"), "more")).message == "CUDA:\nmore"
    assert only(read(*traceback("RuntimeError: CUDA"), "more")).message == "CUDA"
    next_frame = read(*traceback("RuntimeError: CUDA:"), frame_line("a.py", 9))
    assert only(next_frame).message == "CUDA:"


def test_a_printed_error_has_no_further_lines() -> None:
    assert only(read("CUDA error: unknown error", "  more")).message == "CUDA error: unknown error"


@pytest.mark.parametrize("extra", [0, 1])
def test_a_long_line_is_cut(extra: int) -> None:
    start = "CUDA error: "
    line = start + "x" * (MAX_TEXT - len(start) + extra)
    assert only(read(line)).message == line[:MAX_TEXT]
    colours = "\x1b[0m" * (MAX_TEXT // 4 + extra)
    assert only(read(f"{colours}CUDA error: unknown error")).message == "CUDA error: unknown error"


def test_an_assertion_of_pythons_is_an_error_as_any() -> None:
    failure = only(read(*traceback("AssertionError: Assertion `x` failed on CUDA")))
    assert failure.message == "Assertion `x` failed on CUDA"


def test_a_traceback_that_breaks_off_has_no_part_in_the_next_one() -> None:
    failure = only(read(HEADER, frame_line("a.py", 1), *traceback(file="b.py")))
    assert [item.file for item in failure.frames] == ["b.py"]


# --- equal ones and many --------------------------------------------------------------------------


def test_equal_failures_are_one_with_the_ranks_and_the_last_line() -> None:
    first = [f"[rank{at}]: {line}" for at in (0, 1) for line in traceback("IndexError: CUDA at 3")]
    failure = only(read(*first, *traceback("IndexError: CUDA at 47")))
    assert failure.message == "CUDA at 3"
    assert (failure.ranks, failure.number) == ({0, 1}, 12)
    for other in (
        traceback("IndexError: CUDA so"),
        traceback("KeyError: CUDA at 3"),
        traceback("IndexError: CUDA at 3", line=4),
        traceback("IndexError: CUDA at 3", file="b.py"),
    ):
        assert len(read(*traceback("IndexError: CUDA at 3"), *other).failures) == 2


@pytest.mark.parametrize(("extra", "left_out"), [(0, []), (1, [32])])
def test_of_many_failures_the_first_and_the_last_are_kept(extra: int, left_out: list[int]) -> None:
    many = range(MAX_FAILURES + extra)
    lines = [line for at in many for line in traceback("IndexError: CUDA", line=at + 1)]
    found = [item.frames[0].line - 1 for item in read(*lines).failures]
    assert [at for at in many if at not in found] == left_out


def test_so_many_ranks_are_told_apart() -> None:
    lines = [f"[rank{at}]: CUDA error: unknown error" for at in range(MAX_RANKS + 3)]
    assert only(read(*lines)).ranks == set(range(MAX_RANKS))


@pytest.mark.parametrize(("others", "failures"), [(MAX_RANKS - 1, 2), (MAX_RANKS, 1)])
def test_so_many_processes_are_followed(others: int, failures: int) -> None:
    lines = [f"[rank{at}]: CUDA error: unknown error" for at in range(others)]
    log = read(*lines, f"[rank{MAX_RANKS}]: CUDA error: invalid argument")
    assert len(log.failures) == failures


def test_an_error_may_name_so_many_ranks() -> None:
    lines = [f"CUDA error: unknown error [rank {at}]" for at in range(MAX_RANKS + 3)]
    assert only(read(*lines)).ranks == set(range(MAX_RANKS))


# --- processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mark", "rank", "is_launched"),
    [
        ("[rank2]: ", 2, True),
        ("[default2]:", 2, True),
        ("[default1]:[rank5]: ", 5, True),
        ("(RayTrain rank=2, pid=44, ip=1.2.3.4) ", 2, False),
        ("(train pid=44) ", None, False),
        ("12: ", 12, False),
        ("12345: ", None, False),
    ],
)
def test_the_mark_of_a_process(mark: str, rank: int | None, is_launched: bool) -> None:
    log = read(f"{mark}CUDA error: unknown error")
    ranks = [item.ranks for item in log.failures]
    assert ranks == ([] if mark.startswith("12345") else [{rank} if rank is not None else set()])
    assert log.is_launched is is_launched


@pytest.mark.parametrize(
    ("line", "is_launched"),
    [
        ("torchrun --nproc-per-node 2 train.py: CUDA", True),
        ('  File "/env/torch/distributed/run.py", line 3, in main', True),
        ("torch.distributed.elastic: CUDA", True),
        ("[E1 ProcessGroupNCCL.cpp:1] [Rank 1] CUDA", True),
        ("torch.distributed.nn: CUDA", False),
        ("python train.py: CUDA", False),
    ],
)
def test_a_log_of_torchrun(line: str, is_launched: bool) -> None:
    assert read(line).is_launched is is_launched


def test_a_rank_that_an_error_names_itself() -> None:
    text = "[rank5]: CUDA error: unknown error [Rank 3]"
    assert only(read(text)).ranks == {3}
    assert only(read("[rank5]: CUDA error: unknown error Rank 3")).ranks == {5}


def test_the_number_of_a_started_process_is_that_of_the_next_traceback_alone() -> None:
    started = "-- Process 1 terminated with the following error:"
    log = read(started, *traceback(), *traceback("ValueError: CUDA"))
    assert [item.ranks for item in log.failures] == [{1}, set()]


def test_each_process_has_a_traceback_of_its_own() -> None:
    one = [f"[rank1]: {line}" for line in traceback()]
    two = [f"[rank2]: {line}" for line in traceback(file="b.py")]
    mixed = [line for pair in zip(one, two, strict=True) for line in pair]
    found = {item.frames[0].file: item.ranks for item in read(*mixed).failures}
    assert found == {"a.py": {1}, "b.py": {2}}


def test_the_prefix_of_a_logger_is_taken_off_each_line() -> None:
    prefix = "2026-01-02 10:00:0{} [ERROR] "
    header, place, *rest = traceback()
    lines = [prefix.format(at) + line for at, line in enumerate((header, place, "", *rest, "  b"))]
    failure = only(read(*map(str.rstrip, lines)))
    assert (failure.type_name, len(failure.frames)) == ("RuntimeError", 1)
    assert failure.frames[0].text == "g(x)"
    assert failure.message.endswith("triggered\n  b")


def test_a_word_before_a_traceback_is_no_prefix() -> None:
    """IPython writes the exception's name there, and on the other lines nothing."""
    lines = ("RuntimeError   Traceback (most recent call last)", *traceback()[1:])
    assert len(only(read(*lines)).frames) == 1


def test_the_last_text_is_no_blank_and_no_assertion() -> None:
    line = "A.cu:3: f: block: [0,0,0], thread: [0,0,0] Assertion `i < n` failed."
    assert read("epoch 1", "", line, "   ").last_text == 1
    assert read("epoch 1", "CUDA", "").last_text == 2
    assert read(*traceback(), "").last_text == 4
    log = read(line, "CUDA")
    assert (log.lines, log.last_text, len(log.asserts)) == (2, 2, 1)
