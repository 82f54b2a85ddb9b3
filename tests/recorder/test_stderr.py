"""File descriptor 2 during a checked block: read, folded, and still shown where it was meant to."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from weakref import ref

import pytest

import cudalens
from cudalens.recorder import stderr
from cudalens.recorder.stderr import DeviceText
from tests.processes import environment, python

LINE = (
    "../aten/src/ATen/native/cuda/Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d: "
    "block: [{block},0,0], thread: [{thread},0,0] Assertion `t >= 0 && t < n_classes` failed."
)
PRELUDE = f"""
import os, sys, subprocess
from cudalens.recorder.stderr import DeviceText
LINE = {LINE!r}
def say(text): os.write(2, text.encode())
"""


def alone(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, its output captured.

    Python does not clear its modules there at the end: torch's take longer than all the rest.
    """
    end = "\nsys.stdout.flush()\nos._exit(0)\n"
    return python("-c", PRELUDE + textwrap.dedent(code) + end, timeout=60)


def one(block: int = 0, thread: int = 0) -> str:
    return LINE.format(block=block, thread=thread)


def say(text: str) -> None:
    """Write as a driver does: past sys.stderr."""
    os.write(2, text.encode())


def stop(pid: int) -> None:
    """Stop a process, and return once it reads no more."""
    os.kill(pid, signal.SIGSTOP)
    while (
        Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "T"
    ):
        os.sched_yield()


# --- a plain process ------------------------------------------------------------------------------


def test_what_is_printed_is_shown_and_read(capfd: pytest.CaptureFixture[str]) -> None:
    with DeviceText() as text:
        print("from Python", file=sys.__stderr__)
        say(f"other\n{one()}\n")
        assert text.text() == one()
        say("later\n")
    assert capfd.readouterr().err == f"from Python\nother\n{one()}\nlater\n"
    say(f"{one()}\n")
    assert text.text() == one()  # what comes after the block is not counted
    assert capfd.readouterr().err == f"{one()}\n"


def test_without_assertions_there_is_no_text() -> None:
    with DeviceText() as text:
        say("a warning that says assert\n")
        assert text.text() is None


def test_buffered_text_counts_where_it_was_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(2, "w", closefd=False) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        stream.write(f"{one(1)}\n")
        with DeviceText() as text:
            assert text.text() is None
            stream.write(f"{one(2)}\n")
        assert text.text() == one(2)


def test_bytes_that_are_no_text_are_passed_over() -> None:
    with DeviceText() as text:
        os.write(2, b"\xff" + f"\n{one()}\n".encode())
        assert text.text() == one()


def test_ten_thousand_lines_become_one(capfd: pytest.CaptureFixture[str]) -> None:
    lines = "".join(f"{one(n // 256, n % 256)}\n" for n in range(10_000))
    with DeviceText() as text:
        say(lines)
        folded = text.text()
    assert capfd.readouterr().err == lines
    assert folded == text.text() == f"{one()} (10000 times, 40 blocks, 10000 threads)"


@pytest.mark.parametrize("is_inside", [True, False])
def test_what_tee_has_not_read_yet_is_waited_for(is_inside: bool) -> None:
    """In the block and at its end, of a tee that gets no turn for a while."""
    with DeviceText() as text:
        stop(text.pid)
        say(f"{one()}\n")
        later = threading.Timer(0.05, os.kill, (text.pid, signal.SIGCONT))
        later.start()
        if is_inside:
            assert text.text(is_expected=True) == one()
    later.join()
    assert text.text() == one()


def test_a_forked_process_has_one_of_its_own() -> None:
    done = alone(
        """
        with DeviceText() as text:
            if (child := os.fork()) == 0:
                with DeviceText() as inner:
                    say(LINE.format(block=1, thread=0) + "\\n")
                say(f"{inner.text().count('Assertion')} in the child\\n")
                os._exit(0)
            os.waitpid(child, 0)
        print(text.text().count("Assertion"))
        """
    )
    assert (done.stdout, done.stderr) == ("1\n", f"{one(1)}\n1 in the child\n")


def test_a_program_that_waits_for_its_children_does_not_wait_for_tee() -> None:
    done = alone(
        """
        with DeviceText():
            say("printed\\n")
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.wait()[0] == child
        try:
            os.wait()
        except ChildProcessError:
            print("no child is left")
        """
    )
    assert (done.stdout, done.stderr) == ("no child is left\n", "printed\n")


@pytest.mark.parametrize("has_other", [False, True])
def test_a_handler_is_told_of_the_programs_own_children_alone(has_other: bool) -> None:
    """Of one that ends while the block is being opened, too."""
    done = alone(
        f"""
        import signal, time
        told = []
        signal.signal(signal.SIGCHLD, lambda *call: told.append(call[0]))
        handler = signal.getsignal(signal.SIGCHLD)
        if {has_other}:
            import cudalens.recorder.stderr as stderr
            spawn = os.posix_spawn
            def with_other(*args, **kwargs):
                if os.fork() == 0:
                    os._exit(0)
                time.sleep(0.1)
                return spawn(*args, **kwargs)
            stderr.os.posix_spawn = with_other
        with DeviceText():
            pass
        print(len(told), signal.getsignal(signal.SIGCHLD) is handler)
        """
    )
    assert (done.stdout, done.stderr) == (f"{int(has_other)} True\n", "")


@pytest.mark.parametrize(
    ("handler", "run"),
    [
        ("signal.SIG_IGN", "run()"),  # which collects all children
        ("lambda *_: None", "it = threading.Thread(target=run); it.start(); it.join()"),
    ],
)
def test_tee_starts_whatever_becomes_of_children(handler: str, run: str) -> None:
    done = alone(
        f"""
        import signal, threading
        signal.signal(signal.SIGCHLD, {handler})
        def run():
            with DeviceText() as text:
                say(LINE.format(block=0, thread=0) + "\\n")
            print(text.text().count("Assertion"))
        {run}
        """
    )
    assert (done.stdout, done.stderr) == ("1\n", f"{one()}\n")


def test_no_object_with_a_finalizer_is_left_to_the_blocks() -> None:
    """What a signal handler raises while Python code of a finalizer runs is lost."""
    gc.collect()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError) as caught, cudalens.check() as session:
            1 / 0
        session.again = [caught, session]
    del session, caught
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        left = {type(item) for item in gc.garbage if hasattr(type(item), "__del__")}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert left == set()


def test_an_interrupt_of_the_wait_puts_the_descriptor_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.fstat(2).st_ino
    monkeypatch.setattr(stderr.time, "sleep", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), DeviceText() as text:
        stop(text.pid)
        say("on its way\n")
    os.kill(text.pid, signal.SIGCONT)
    assert os.fstat(2).st_ino == before


def test_blocks_inside_each_other_both_read(capfd: pytest.CaptureFixture[str]) -> None:
    """The inner block gives the descriptor back to the outer one."""
    with DeviceText() as outer:
        say("1\n")
        with DeviceText() as inner:
            say(f"{one()}\n")
        say("3\n")
        assert outer.text() == one()
    assert inner.text() == one()
    assert capfd.readouterr().err == f"1\n{one()}\n3\n"


CHANGES = {
    "led elsewhere": ("pass", "os.dup2(file.fileno(), 2)"),
    "led back": ("os.dup2(file.fileno(), 2)", "os.dup2(saved, 2)"),
    "led elsewhere and back": (
        "pass",
        "own = os.dup(2); os.dup2(file.fileno(), 2); os.dup2(own, 2)",
    ),
    "closed": ("pass", "os.close(2)"),
}
CHANGING = """
import contextlib, tempfile
saved, file = os.dup(2), tempfile.TemporaryFile()
{before}
with {block}:
    {inside}
try:
    say("after")
except OSError as error:
    print(error.errno)
print(os.pread(file.fileno(), 9, 0))
"""


@pytest.mark.parametrize("what", CHANGES)
def test_what_the_program_does_to_the_descriptor_inside_stays(what: str) -> None:
    """The same is left without a block."""
    before, inside = CHANGES[what]
    results = []
    for block in ("DeviceText()", "contextlib.nullcontext()"):
        done = alone(CHANGING.format(before=before, inside=inside, block=block))
        assert done.returncode == 0, done.stderr
        results.append((done.stdout, done.stderr))
    assert results[0] == results[1]
    assert ("after" in results[0][0] + results[0][1]) is (what != "closed")


def test_blocks_that_are_not_closed_in_reverse_order_leave_the_descriptor(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = os.fstat(2).st_ino
    first, second = DeviceText().__enter__(), DeviceText().__enter__()
    first.__exit__()
    say(f"{one()}\n")
    assert second.text() == one()
    second.__exit__()
    assert os.fstat(2).st_ino == before
    assert capfd.readouterr().err == f"{one()}\n"


@pytest.mark.parametrize("is_expected", [False, True])
def test_an_assertion_that_is_known_of_is_waited_for(
    is_expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver may print a moment after the call has failed; nobody waits where none failed."""
    rest: list[float] = []

    def sleep(seconds: float) -> None:
        rest.append(seconds)
        if len(rest) == 10:
            say(f"{one()}\n")
        os.sched_yield()

    with DeviceText() as text:
        assert text.text() is None  # tee has started and waits
        monkeypatch.setattr(stderr.time, "sleep", sleep)
        monkeypatch.setattr(stderr, "_PATIENCE_S", 10)
        assert text.text(is_expected=is_expected) == (one() if is_expected else None)


def descriptors() -> set[str]:
    return {item.name for item in Path("/proc/self/fd").iterdir()}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are listed on Linux")
def test_no_descriptor_and_no_file_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stderr.tempfile, "tempdir", str(tmp_path))
    before = descriptors()
    for _ in range(3):
        with DeviceText() as text:
            say("x")
    gone = ref(text)
    del text
    assert gone() is None
    assert len(descriptors()) == len(before)

    with monkeypatch.context() as patched:
        patched.setattr(stderr, "_start", lambda *_: None)  # the shell could not
        with pytest.raises(OSError, match="tee could not be started"), DeviceText():
            pass
    assert len(descriptors()) == len(before)

    def refuse(*args: Any, **options: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(stderr.os, "posix_spawn", refuse)
    with pytest.raises(OSError, match="no more processes"), DeviceText():
        pass
    assert len(descriptors()) == len(before)
    assert list(tmp_path.iterdir()) == []
    say("still works\n")


def test_without_tee_a_session_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block runs without device text, and the descriptor is left alone."""
    monkeypatch.setattr(stderr.shutil, "which", lambda name: None)
    before = os.fstat(2).st_ino
    with cudalens.check() as session:
        assert os.fstat(2).st_ino == before
    assert any("no tee program" in line for line in session.internal_errors)


def test_only_full_sessions_touch_the_descriptor() -> None:
    before = os.fstat(2).st_ino
    with cudalens.check(fast=True):
        assert os.fstat(2).st_ino == before
    with cudalens.check():
        assert os.fstat(2).st_ino != before
    assert os.fstat(2).st_ino == before


# --- processes of their own -----------------------------------------------------------------------


def test_a_process_that_aborts_has_written_everything() -> None:
    done = alone(
        """
        with DeviceText():
            say(LINE.format(block=0, thread=0) + "\\n")
            sys.stderr.write("buffered")
            sys.stderr.flush()
            say("half a li")
            os.abort()
        """
    )
    assert done.returncode < 0
    assert done.stderr == f"{one()}\nbufferedhalf a li"


def test_a_program_that_holds_the_descriptor_does_not_hang_the_block() -> None:
    done = alone(
        """
        with DeviceText() as text:
            code = "import os, sys; sys.stdin.read(); os.write(2, b'from the child')"
            child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
            say("parent ")
        print("left", child.poll(), flush=True)
        child.communicate()
        """
    )
    assert done.stdout == "left None\n"
    assert done.stderr == "parent from the child"


@pytest.mark.parametrize("closed", [False, True], ids=["/dev/null", "closed"])
def test_without_a_place_to_show_it(closed: bool) -> None:
    """Written to nowhere the text is read all the same; a closed descriptor is a trouble line."""
    unshown = "os.close(2)" if closed else "os.dup2(os.open(os.devnull, os.O_WRONLY), 2)"
    done = alone(
        f"""
        {unshown}
        import cudalens
        with cudalens.check() as session:
            if not {closed}:
                say(LINE.format(block=0, thread=0) + "\\n")
                print(session.device_text.text())
        print([line.split(" unav")[0] for line in session.internal_errors])
        """
    )
    assert done.returncode == 0
    assert done.stdout == ("['device text']\n" if closed else f"{one()}\n[]\n")


def test_under_a_terminal() -> None:
    """Programs that ask whether they write to a terminal are told yes, and its size is the same."""
    done = alone(
        """
        import pty, termios
        child, master = pty.fork()
        if child == 0:
            sys.stdin.read(1)
            with DeviceText() as text:
                print(os.isatty(2), os.get_terminal_size(2), flush=True)
                say(LINE.format(block=0, thread=0) + "\\n")
                assert text.text(is_expected=True) == LINE.format(block=0, thread=0)
            os._exit(0)
        termios.tcsetwinsize(master, (33, 77))
        os.write(master, b"a\\n")
        shown = b""
        try:
            while part := os.read(master, 4096):
                shown += part
        except OSError:  # the last program that held the terminal has gone
            pass
        print(os.waitpid(child, 0)[1], shown)
        """
    )
    status, _, shown = done.stdout.partition(" ")
    assert status == "0", done
    assert "True os.terminal_size(columns=77, lines=33)" in shown
    assert f"{one()}\\r\\n" in shown


@pytest.mark.thorough
def test_under_a_real_kernel() -> None:
    """ipykernel owns the descriptor: others' text still reaches the cell, asserts are folded."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    env = environment()
    env.pop("PYTEST_CURRENT_TEST", None)  # under a test ipykernel leaves the descriptor alone
    cell = nbformat.v4.new_code_cell(PRELUDE + KERNEL_CELL)
    notebook = nbformat.v4.new_notebook(cells=[cell])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute(env=env)
    said = {"stdout": "", "stderr": ""}
    for output in notebook.cells[0].outputs:
        said[output.name] += output.text
    assert "other text" in said["stderr"]
    assert said["stderr"].count("Assertion") == 5
    assert said["stdout"] == f"{one()} (5 times, 1 block, 5 threads)\n"


KERNEL_CELL = """
import time
with DeviceText() as text:
    say("other text\\n")
    for n in range(5):
        say(LINE.format(block=0, thread=n) + "\\n")
    folded = text.text()
time.sleep(0.5)
print(folded)
"""
