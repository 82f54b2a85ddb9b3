"""The lines of a call that is over: which are kept, and whose thread they are of."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from cudalens.guards.past_calls import StackLine, running_call, traced_line

USERS = "<a cell>"


def is_users(file: str) -> bool:
    return file.startswith(USERS)


def defined(name: str, body: str, file: str, **names: object) -> Callable[[], object]:
    """Define a function in a file of that name."""
    exec(compile(f"def {name}():\n    return {body}", file, "exec"), names)
    return names[name]  # type: ignore[return-value]


def named(lines: tuple[StackLine, ...]) -> list[str]:
    return [code.co_name for code, _ in lines]


def test_two_lines_of_the_user_s_and_all_that_are_below_them() -> None:
    asked = lambda: running_call(is_users)
    library = defined("library", "asked()", "<a library>", asked=asked)
    inner = defined("inner", "library()", USERS, library=library)
    between = defined("between", "inner()", "<a library>", inner=inner)
    outer = defined("outer", "between()", USERS, between=between)
    outermost = defined("outermost", "outer()", USERS, outer=outer)
    thread, lines = outermost()  # type: ignore[misc]
    assert thread == threading.get_ident()
    assert named(lines) == ["outer", "between", "inner", "library", "<lambda>"]


def test_a_line_is_the_one_that_ran() -> None:
    body = "(" + "\n" * 41 + "1,\nasked(),\n)"
    there = defined("there", body, USERS, asked=lambda: running_call(is_users))
    _, lines = there()[1]  # type: ignore[index]
    code, instruction = next(line for line in lines if line[0].co_name == "there")
    assert list(code.co_positions())[instruction // 2][0] == 44


def test_a_deep_stack_is_cut_at_60_lines() -> None:
    def deep(rest: int) -> tuple[int, tuple[StackLine, ...]]:
        return deep(rest - 1) if rest else running_call(is_users)

    assert named(deep(80)[1]) == ["deep"] * 60


def test_a_thread_of_autograd_s_is_that_which_called_backward() -> None:
    """No line of the stack is the user's, and another thread waits in the engine."""
    seen: list[tuple[int, tuple[StackLine, ...]]] = []
    over = threading.Lock()
    over.acquire()
    caller = threading.get_ident()

    def look() -> None:
        try:
            while sys._current_frames()[caller].f_code.co_name != "_engine_run_backward":
                pass  # until it waits: Python has started this thread before it goes on
            seen.append(running_call(is_users))
        finally:
            over.release()

    # As in torch: the frame of that name waits in C until the threads of the engine are done.
    wait = defined("_engine_run_backward", "start() or over.acquire()", "<torch>",
                   start=threading.Thread(target=look).start, over=over)  # fmt: skip
    step = defined("step", "backward()", USERS, backward=wait)
    step()
    ((number, lines),) = seen
    assert number == threading.get_ident()
    assert named(lines)[-2:] == ["step", "_engine_run_backward"]


def test_a_traced_line_has_file_number_and_function() -> None:
    code, instruction = traced_line("/home/me/train.py", 7, "forward")
    assert (code.co_filename, code.co_name) == ("/home/me/train.py", "forward")
    assert list(code.co_positions())[instruction // 2][0] == 7
