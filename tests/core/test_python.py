"""Facts of CPython that the package relies on."""

from __future__ import annotations

import ast
import ctypes
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from cudalens.core import _python
from cudalens.core._python import (
    MoreStack,
    Uninterrupted,
    add_note,
    came_from_outside,
    entries_from_traceback,
    forget,
    innermost,
    is_of_user,
    linked,
    live_instances,
    notes_of,
    own_notes,
    package_of,
    parse,
    parse_expression,
    raise_if_outside,
    replace_attribute,
    same_random_state,
    set_on,
    without_comment,
)


class Sub(torch.Tensor):
    """A subclass of a user's."""


class SubSub(Sub):
    """A subclass of that."""


def test_the_living_instances_of_a_class_and_of_its_subclasses_are_found() -> None:
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(3))
    below, lowest = torch.ones(2).as_subclass(Sub), torch.ones(2).as_subclass(SubSub)
    optimizer = torch.optim.Adam([parameter])
    found = {id(item) for item in live_instances(torch.Tensor)}
    assert {id(tensor), id(parameter), id(below), id(lowest)} <= found
    assert id(optimizer) not in found
    assert {id(item) for item in live_instances(Optimizer)} >= {id(optimizer)}
    number, count = id(optimizer), len(live_instances(Optimizer))
    del optimizer
    assert number not in {id(item) for item in live_instances(Optimizer)}
    assert len(live_instances(Optimizer)) == count - 1


@pytest.mark.thorough
def test_a_thread_that_builds_tuples_is_not_disturbed() -> None:
    """It resizes each tuple while it builds it, which CPython does for an unshared one alone."""
    errors, is_over = [], threading.Event()

    def build() -> None:
        try:
            while not is_over.is_set():
                tuple(number for number in range(400))
        except SystemError as error:
            errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        live_instances(Optimizer)
    is_over.set()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("action", ["always", "error"])
def test_a_warning_of_code_that_is_parsed_is_not_given_again(action: Any) -> None:
    """Python has warned where the code was compiled; the filters stay the user's."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter(action)
        before = list(warnings.filters)
        assert isinstance(parse(r'x = "\("').body[0], ast.Assign)
        with pytest.raises(SyntaxError):
            parse("x =")
        assert warnings.filters == before
        assert seen == []


# --- room, interrupts and attributes --------------------------------------------------------------


def test_room_for_more_frames_is_given_once_and_taken_back() -> None:
    before = sys.getrecursionlimit()
    with MoreStack():
        with MoreStack():
            assert sys.getrecursionlimit() == before + MoreStack.FRAMES
        assert sys.getrecursionlimit() == before + MoreStack.FRAMES
    assert sys.getrecursionlimit() == before
    with pytest.raises(ValueError, match="mine"), MoreStack():
        raise ValueError("mine")
    assert sys.getrecursionlimit() == before


def test_a_limit_that_somebody_else_has_set_stays() -> None:
    before = sys.getrecursionlimit()
    try:
        with MoreStack():
            sys.setrecursionlimit(before + 7)
        assert sys.getrecursionlimit() == before + 7
    finally:
        sys.setrecursionlimit(before)


def test_an_interrupt_takes_effect_behind_the_block() -> None:
    before, reached = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt), Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        reached.append("end")
    assert reached == ["end"]
    assert signal.getsignal(signal.SIGINT) is before
    with Uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_have_no_interrupts_to_hold_back() -> None:
    handlers: list[Any] = []

    def run() -> None:
        with Uninterrupted() as block:
            handlers.append((block, signal.getsignal(signal.SIGINT)))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [(None, before)]


class Owner:
    """Has an attribute of the class."""

    name = "class"


class Slotted:
    """Has no dictionary."""

    __slots__ = ("name",)
    name: str


def test_a_replaced_attribute_is_put_back_where_it_was() -> None:
    owner = Owner()
    undo = replace_attribute(owner, "name", "ours")
    assert owner.name == "ours"
    undo()
    assert (owner.name, vars(owner)) == ("class", {})
    owner.name = "own"
    undo = replace_attribute(owner, "name", "ours")
    undo()
    assert vars(owner) == {"name": "own"}
    undo = replace_attribute(owner, "name", "ours")
    owner.name = "theirs"
    undo()
    assert owner.name == "theirs"
    undo = replace_attribute(owner, "name", 1)
    owner.name = 1.0  # type: ignore[assignment]
    undo()
    assert type(owner.name) is float
    slotted = Slotted()
    slotted.name = "own"
    replace_attribute(slotted, "name", "ours")()
    assert slotted.name == "own"


def test_pythons_random_state_is_left_as_it_was() -> None:
    before = random.getstate()
    with suppress(ZeroDivisionError), same_random_state():
        random.random()
        _ = 1 / 0
    assert random.getstate() == before


# --- whose exception it is ------------------------------------------------------------------------


def caught(raises: Callable[[], Any]) -> BaseException:
    try:
        raises()
    except BaseException as error:
        return error
    raise AssertionError


def handler(number: int, frame: Any) -> None:
    raise TimeoutError("mine")


def given_in_rest(*rest: Any) -> None:
    raise TimeoutError("mine")


def ours(raises: Callable[..., Any], *given: Any) -> None:
    frame = sys._getframe()
    raises(*(frame if item == "frame" else item for item in given))


def alone() -> None:
    raise TimeoutError("mine")


def set_by_a_thread() -> None:
    """Have an exception set as another thread does: no ``raise`` stands where it comes."""
    own = threading.get_ident()
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(own), ctypes.py_object(Stop))
    for _ in range(1000):
        len("")


class Stop(Exception):  # noqa: N818
    """Set in a thread by another one."""


@pytest.mark.parametrize(
    ("raises", "outside"),
    [
        (lambda: ours(handler, 14, "frame"), True),
        (lambda: ours(given_in_rest, 1, "frame"), True),
        (lambda: ours(handler, 14, None), False),
        (lambda: ours(alone), False),
        (set_by_a_thread, True),
        (lambda: ours([].pop), False),
        (lambda: ours(next, iter(())), False),
    ],
)
def test_what_only_came_out_of_our_code(raises: Callable[[], Any], outside: bool) -> None:
    error = caught(raises)
    assert came_from_outside(error) is is_of_user(error) is outside
    if outside:
        with pytest.raises(type(error)):
            raise_if_outside(error)
    else:
        raise_if_outside(error)


class Alarm:
    """Has a method that handles a signal."""

    def rings(self) -> None:
        raise TimeoutError("mine")


@pytest.mark.parametrize("installed", [alone, Alarm().rings])
def test_a_handler_that_is_installed_is_the_users(installed: Any) -> None:
    before = signal.signal(signal.SIGTERM, installed)
    try:
        assert came_from_outside(caught(lambda: ours(installed)))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interrupt_is_the_users_and_no_traceback_tells_nothing() -> None:
    assert is_of_user(KeyboardInterrupt())
    assert not is_of_user(ValueError())


# --- notes, tracebacks, frames --------------------------------------------------------------------


class Frozen(Exception):  # noqa: N818
    """Lets nobody set an attribute."""

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError


def test_notes_on_an_exception() -> None:
    error = Frozen()
    assert notes_of(error) == own_notes(error) == []
    add_note(error, "theirs")
    add_note(error, "cudalens: ours")
    assert notes_of(error) == ["theirs", "cudalens: ours"]
    assert own_notes(error) == ["cudalens: ours"]
    set_on(error, "__notes__", "no list")
    add_note(error, "cudalens: more")
    assert notes_of(error) == own_notes(error) == []
    assert vars(error)["__notes__"] == "no list"
    set_on(error, "__notes__", [3, "cudalens: ours"])
    assert own_notes(error) == ["cudalens: ours"]


def test_a_traceback_as_its_links_and_back() -> None:
    error = caught(lambda: ours(alone))
    entries = entries_from_traceback(error.__traceback__)
    names = [entry.tb_frame.f_code.co_name for entry in entries]
    assert (names[0], names[-1]) == ("caught", "alone")
    made = linked(entries[1:])
    again = entries_from_traceback(made)
    assert [(it.tb_frame, it.tb_lineno, it.tb_lasti) for it in again] == [
        (it.tb_frame, it.tb_lineno, it.tb_lasti) for it in entries[1:]
    ]
    assert linked([]) is None
    assert entries_from_traceback(None) == ()


def test_frames_by_what_is_wanted_and_their_package() -> None:
    own = sys._getframe()
    assert innermost(lambda frame: True) is own
    assert innermost(lambda frame: frame.f_code is not own.f_code) is own.f_back
    assert innermost(lambda frame: False) is None
    assert package_of(own) == __name__.partition(".")[0]
    names: dict[str, Any] = {"sys": sys, "__name__": "torch.nn.modules"}
    exec("frame = sys._getframe()", names)
    assert package_of(names["frame"]) == "torch"
    names["__name__"] = 3
    assert package_of(names["frame"]) is None


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("  x = 1  # one", "x = 1"), ("x = '#'", "x = '#'"), ("x = 'é#'  # é", "x = 'é#'"),
        ("  x = 1", "  x = 1"), ("for x in y:  # each", "for x in y:  # each"), ("# all", "# all"),
        ("x = 1; y = 2  # two", "x = 1; y = 2"),
    ],
)  # fmt: skip
def test_a_line_without_its_comment(line: str, code: str) -> None:
    assert without_comment(line) == code


def test_an_expression_is_parsed_also_where_another_thread_disturbs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert isinstance(parse_expression("a + b").body, ast.BinOp)
    failures = iter([SystemError(), SystemError()])

    def disturbed(*args: Any, **options: Any) -> Any:
        for error in failures:
            raise error
        return compile(*args, **options)

    monkeypatch.setattr(_python, "compile", disturbed, raising=False)
    assert isinstance(parse("a").body[0], ast.Expr)
    failures = iter([SystemError() for _ in range(40)])
    with pytest.raises(SystemError):
        parse("a")
    assert len([*failures]) == 19
    with pytest.raises(SyntaxError):
        parse_expression("a = b")


def test_filters_that_another_thread_resets_meanwhile_stay_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def resetting(*args: Any, **options: Any) -> Any:
        warnings.resetwarnings()
        return compile(*args, **options)

    monkeypatch.setattr(_python, "compile", resetting, raising=False)
    with warnings.catch_warnings():
        assert isinstance(parse("a").body[0], ast.Expr)
        assert warnings.filters == []


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="it is a view of the variables there")
def test_copies_of_variables_are_emptied_unless_somebody_holds_them() -> None:
    def left(holds: bool) -> tuple[int, Any]:
        error = caught(lambda: ours(alone))
        entry = error.__traceback__
        assert entry is not None
        held = entry.tb_frame.f_locals if holds else None
        before = len(entry.tb_frame.f_locals)
        forget(error)
        return before, held

    before, held = left(holds=True)
    assert len(held) == before > 0
    names = [id(sys._getframe().f_locals)]
    forget()
    assert sys._getframe().f_locals["names"] is names
