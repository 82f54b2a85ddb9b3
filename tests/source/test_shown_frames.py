"""Tracebacks that leave a check or that a shell shows hold no frame of ours."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import IPython.core.interactiveshell
import pytest
import torch
import torch.nn.functional as F

import cudalens
from cudalens import simulate
from cudalens.core.reported import attach
from cudalens.session import options
from cudalens.source import shown_frames
from cudalens.source.shown_frames import hide_own_frames, shown
from tests.blocks import own_op
from tests.shells import ANSI, BAD, SETUP, Notebook

OWN = str(Path(cudalens.__path__[0]))
UNRESOLVED = "failed resolving"


def fail() -> None:
    """Read row 7 of a table of 5."""
    F.embedding(torch.tensor([1, 7], device="cuda"), torch.zeros(5, 2, device="cuda"))


def test_a_failure_of_ours_alone_is_shown_whole() -> None:
    """A traceback that holds nothing but our frames tells of a defect of ours: it is kept."""
    with pytest.raises(ValueError) as caught:
        options._positive("0")
    text = "".join(traceback.format_tb(shown(caught.tb.tb_next)))
    assert "options.py" in text


@pytest.mark.parametrize(
    ("line", "file", "function", "is_it"),
    [
        (3, "cell", "<module>", True),
        (4, "cell", "<module>", False),
        (3, "other", "<module>", False),
        (3, "cell", "f", False),
    ],
)
def test_code_of_ours_that_runs_the_same_line_again(
    line: int, file: str, function: str, is_it: bool
) -> None:
    def entry(line: int, file: str, function: str) -> Any:
        code = SimpleNamespace(co_name=function, co_filename=file)
        return SimpleNamespace(tb_frame=SimpleNamespace(f_code=code), tb_lineno=line)

    again = shown_frames._is_once_more(entry(3, "cell", "<module>"), entry(line, file, function))
    assert again is is_it


class FrozenError(Exception):
    """An exception that refuses any attribute."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


def test_the_exceptions_that_led_to_it_are_shown_so_too() -> None:
    """Also where their class lets nobody write to it."""

    def refused() -> None:
        options._positive("0")

    with pytest.raises(FrozenError) as caught:
        try:
            refused()
        except ValueError as error:
            raise FrozenError from error
    assert OWN in "".join(traceback.format_exception(caught.value))
    hide_own_frames(caught.value)
    text = "".join(traceback.format_exception(caught.value))
    assert "in refused" in text and OWN not in text


def wrong_shape() -> None:
    torch.ones(3, device="cuda") + torch.ones(4, device="cuda")


def not_finite() -> None:
    torch.log(-torch.ones(3, device="cuda"))


def waits() -> None:
    torch.cuda.synchronize(7)


def called_back() -> None:
    """Fail in an op of the user's own, which torch calls in the middle of ours."""
    with own_op("hit(Tensor x) -> Tensor", user_kernel) as hit:
        hit(torch.ones(3, device="cuda"))


def user_kernel(x: torch.Tensor) -> torch.Tensor:
    msg = "of the user's own"
    raise ValueError(msg)


def functions_of(error: BaseException) -> list[str]:
    """Return the names of the functions in a traceback that is printed now."""
    frames = traceback.extract_tb(error.__traceback__)
    assert not [frame.filename for frame in frames if frame.filename.startswith(OWN)]
    names = [frame.name for frame in frames][1:]  # without the test itself
    return [name for name in names if name != "__call__"]


KEPT = {
    wrong_shape: ["wrong_shape"],
    fail: ["fail"],
    waits: ["waits"],
    called_back: ["called_back", "user_kernel"],
    not_finite: ["not_finite"],
}
OPENED: dict[str, Callable[[], Any]] = {
    "sync": partial(cudalens.check, sync=True),
    "fast": partial(cudalens.check, fast=True),
    "nan": partial(cudalens.check, nan="strict"),
}
LEAVING = [
    *product((wrong_shape, fail, waits, called_back), OPENED),
    (not_finite, "nan"),
]


@pytest.mark.parametrize(("way", "opened"), LEAVING)
def test_an_exception_that_leaves_a_check_holds_no_frame_of_ours(
    way: Callable[[], None], opened: str, sim: simulate.Simulation
) -> None:
    with pytest.raises(Exception) as caught, OPENED[opened]():
        way()
    assert functions_of(caught.value) == KEPT[way]


SHOWN = {
    "%run": "%run {script}",
    "%%capture": f"%%capture out\n{BAD}",
    "__repr__": f"class R:\n    def __repr__(self):\n        {BAD}\nR()",
    "handled": f"try:\n    {BAD}\nexcept Exception:\n    get_ipython().showtraceback()",
}


@pytest.mark.parametrize("how", ["%%cudacheck\n", "%cudacheck on"])
@pytest.mark.parametrize("code", SHOWN.values(), ids=SHOWN)
def test_what_the_shell_shows_has_the_users_frames_only(
    notebook: Notebook, code: str, how: str, tmp_path: Path
) -> None:
    """Nothing of ours and no argument that could not be resolved; then the shell is as before."""
    script = tmp_path / "script.py"
    script.write_text(f"{SETUP}\n{BAD}\n")
    notebook.run(notebook.under(how) + code.format(script=script))
    printed = ANSI.sub("", notebook.names["out"].stdout) if "capture" in code else notebook.out
    assert "is outside the 5 rows" in printed and "in embedding" not in printed
    assert OWN not in printed and UNRESOLVED not in printed


NESTED = f"""\
import torch.nn as nn
class Inner(nn.Module):
    def forward(self, x): return {BAD.replace("ids", "x")}
model = nn.Sequential(nn.Sequential(Inner()))
"""


def test_of_a_guards_error_a_notebook_shows_no_frames_of_torch(notebook: Notebook) -> None:
    """Nor beside any report; a debugger reaches those between the user's."""
    notebook.run(NESTED)
    notebook.run("%%cudacheck\nmodel(ids)")
    assert "in forward" in notebook.out or "Inner.forward" in notebook.out
    assert "module.py" not in notebook.out and "functional.py" not in notebook.out
    names = [frame.name for frame in traceback.extract_tb(sys.last_traceback)]
    assert names.count("_call_impl") == 3 and names[-1] == "forward"
    failing = "nn.Sequential(nn.Linear(3, 2, device='cuda'))(table)"
    notebook.run(failing)
    assert "module.py" in notebook.out and OWN not in notebook.out
    notebook.run(f"%%cudacheck\n{failing}")
    assert "module.py" not in notebook.out and OWN not in notebook.out


WRAPPED = """\
def look_up(x):
    try:
        return model(x)
    except IndexError as error:
        raise ValueError("boxes go from 0 to 1000") from error
"""


def test_of_a_guards_error_that_led_to_another_one_a_notebook_shows_no_more(
    notebook: Notebook,
) -> None:
    """No frames of torch, and one line of its text; a program reads all of it."""
    notebook.run(NESTED + WRAPPED)
    error = notebook.run("%%cudacheck\nlook_up(ids)").error_in_exec
    assert "boxes go from 0 to 1000" in notebook.out
    assert "module.py" not in notebook.out and "functional.py" not in notebook.out
    first, *rest = str(error.__cause__).split("\n")
    assert first in notebook.out
    assert rest and not [line for line in rest if line in notebook.out]
    entries = traceback.extract_tb(error.__cause__.__traceback__)
    assert any(entry.name == "_call_impl" for entry in entries)


class ReportedError(Exception):
    """An error with a report."""

    def __init__(self, *args: object, report: object = None) -> None:
        super().__init__(*args)
        self.report = report


def test_beside_its_report_an_exception_says_one_line_and_what_to_do() -> None:
    """A cause that the report is about too has no action of its own; afterwards all are whole."""
    report = SimpleNamespace(offenders=None)
    cause = ReportedError("cause\nmore", report=report)
    error = ReportedError("error\nmore", 7, report=report)
    error.__cause__ = cause
    error.add_note("a note of the user's")
    error.add_note("cudalens: a note of ours")
    with shown_frames.without_repeats(error, report, "restart the kernel"):
        assert error.args == ("error\nrestart the kernel", 7)
        assert cause.args == ("cause",)
        assert error.__notes__ == ["a note of the user's"]
    assert (error.args, cause.args) == (("error\nmore", 7), ("cause\nmore",))
    assert error.__notes__ == ["a note of the user's", "cudalens: a note of ours"]
    with shown_frames.without_repeats(error, report):
        assert error.args == ("error", 7)


def test_beside_another_s_report_an_exception_is_whole() -> None:
    error = ReportedError("error\nmore", report=SimpleNamespace(offenders=None))
    for other in (None, SimpleNamespace(offenders=None)):
        with shown_frames.without_repeats(error, other, "restart the kernel"):
            assert error.args == ("error\nmore",)
    offenders = object()
    error.report = SimpleNamespace(offenders=offenders)
    with shown_frames.without_repeats(error, SimpleNamespace(offenders=offenders)):
        assert error.args == ("error",)


def test_what_to_do_is_a_note_where_the_text_is_torch_s() -> None:
    error, report = RuntimeError("CUDA error"), SimpleNamespace(offenders=None)
    error.report = report  # type: ignore[attr-defined]
    error.args = ()
    error.__notes__ = ["cudalens: where it was"]
    with shown_frames.without_repeats(error, report, "restart the kernel"):
        assert error.__notes__ == ["cudalens: restart the kernel"]
    assert error.__notes__ == ["cudalens: where it was"]


SENT = f"""\
worker failed:
  File "/home/me/train.py", line 3, in step
    loss()
    ^^^^^^
  File "{torch.nn.functional.__file__}", line 9, in embedding
    return torch.embedding()
  File "{OWN}/guards/interceptor.py", line 9, in guarded
    raise
IndexError: 7 is outside
  where   train.py:3"""
CUT = """\
worker failed:
  File "/home/me/train.py", line 3, in step
    loss()
IndexError: 7 is outside"""


@pytest.mark.parametrize("is_cause", [False, True])
def test_beside_its_report_what_a_process_sent_has_the_users_frames_alone(
    is_cause: bool,
) -> None:
    """Until the block ends; the report may be kept beside the exception."""
    report: Any = SimpleNamespace(offenders=None)
    error, outer = RuntimeError(SENT, 7), ReportedError("outer\nmore", report=report)
    attach(error, report, "cudalens: a note of ours")
    outer.__cause__ = error
    with shown_frames.without_repeats(outer if is_cause else error, report, "restart"):
        assert error.args == (CUT, 7)
        assert error.__notes__ == ([] if is_cause else ["cudalens: restart"])
        assert outer.args == (("outer\nrestart",) if is_cause else ("outer\nmore",))
    assert (error.args, outer.args) == ((SENT, 7), ("outer\nmore",))
    assert error.__notes__ == ["cudalens: a note of ours"]


def test_an_exception_may_have_a_report_and_another_beside_it() -> None:
    one, other, third = (SimpleNamespace(offenders=None) for _ in range(3))
    error = ReportedError("error", report=one)
    assert not shown_frames.is_reported(error, other)
    attach(error, other, "cudalens: a note")  # type: ignore[arg-type]
    assert [shown_frames.is_reported(error, it) for it in (one, other, third, None)] == [
        True, True, False, False,
    ]  # fmt: skip


def test_exceptions_that_led_to_one_are_each_there_once() -> None:
    first, second, part = KeyError("first"), KeyError("second"), KeyError("part")
    error = ValueError("error")
    error.__cause__ = error.__context__ = first
    first.__context__ = second
    second.__cause__ = error
    group = ExceptionGroup("group", [part, error])
    both = "__cause__", "__context__"
    assert set(map(id, shown_frames.with_causes(error, *both))) == {
        *map(id, (error, first, second))
    }
    assert shown_frames.with_causes(error, "__cause__") == [error, first]
    assert shown_frames.with_causes(first, "__cause__") == [first]
    found = shown_frames.with_causes(group, *both)
    assert found[0] is group
    assert set(map(id, found)) == {*map(id, (group, error, part, first, second))}
    assert len(found) == 5


TORCH = str(Path(torch.__file__).parent)
SHELL = str(Path(IPython.core.interactiveshell.__file__))
SHOWS, HIDDEN = "def f(): then()", "def f(): __tracebackhide__ = True; then()"
# Those of ours are real: `coverage` stops at one that is not there.
FILES = {
    "cell": "<a cell>", "other cell": "<b cell>", "shell": SHELL, "own": f"{OWN}/__init__.py",
    "own unmarked": f"{OWN}/__main__.py", "op": f"{TORCH}/_ops.py",
    "torch": f"{TORCH}/nn/functional.py", "library": "/site-packages/lib.py",
}  # fmt: skip


def traced(*stack: str) -> list[str]:
    """Run functions of such files, each called by the one before, and return what is shown."""

    def stop() -> Any:
        raise ArithmeticError

    call: Callable[[], Any] = stop
    for name in reversed(stack):
        space: dict[str, Any] = {"then": call}
        is_cell = name.endswith("cell")
        code = compile(
            "then()" if is_cell else HIDDEN if name == "own" else SHOWS, FILES[name], "exec"
        )
        call = partial(exec, code, space)
        if not is_cell:
            call()
            call = space["f"]
    with pytest.raises(ArithmeticError) as caught:
        call()
    names = {file: name for name, file in FILES.items()}
    entries = shown_frames.shown_frames(caught.tb)
    return [names[it] for it in map(shown_frames.file_of, entries) if it in names]


@pytest.mark.parametrize(
    ("stack", "shown"),
    [
        (["cell", "library"], ["cell", "library"]),
        (["cell", "own", "library"], ["cell", "library"]),
        (["cell", "own", "torch", "library"], ["cell", "torch", "library"]),
        # What ours asks of torch for itself is ours.
        (["cell", "own unmarked", "torch"], ["cell"]),
        (["cell", "own unmarked", "torch", "library"], ["cell", "library"]),
        # Of several the innermost asks.
        (["cell", "own", "own unmarked", "torch"], ["cell"]),
        (["cell", "own unmarked", "own", "torch"], ["cell", "torch"]),
        # What is beside ours goes with it, and stays by itself.
        (["cell", "op", "library"], ["cell", "op", "library"]),
        (["cell", "own", "op", "library"], ["cell", "library"]),
        (["cell", "shell", "library"], ["cell", "shell", "library"]),
        (["cell", "shell", "own", "library"], ["cell", "library"]),
        # The line of a magic, whose statement is the next.
        (["cell", "own", "cell", "library"], ["cell", "library"]),
        (["cell", "own", "other cell", "library"], ["cell", "other cell", "library"]),
        (["other cell", "cell", "shell", "own", "cell"], ["other cell", "cell"]),
        (["cell", "library", "own", "cell"], ["cell", "library", "cell"]),
        # The shell's call of the magic goes with its line.
        (["cell", "shell", "cell", "library"], ["cell", "library"]),
        (["other cell", "shell", "cell"], ["other cell", "shell", "cell"]),
    ],
)
def test_what_is_beside_our_frames_is_not_shown_either(stack: list[str], shown: list[str]) -> None:
    assert traced(*stack) == shown


def hit(x: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGINT)
    return x.clone()


@pytest.mark.parametrize("how", ["%%cudacheck\n", "%cudacheck on", "%cudacheck "])
def test_an_interrupt_shows_no_frame_of_ours(notebook: Notebook, how: str) -> None:
    """It comes inside an op, which we have passed on."""
    with own_op("hit(Tensor x) -> Tensor", hit):
        notebook.run(f"{notebook.under(how)}torch.ops.mine.hit(table)")
    assert isinstance(notebook.error, KeyboardInterrupt)
    assert "KeyboardInterrupt" in notebook.out and "in hit" in notebook.out
    assert OWN not in notebook.out and UNRESOLVED not in notebook.out
