"""What a signal handler raises leaves the block, at whatever instant it comes.

The recorder, the guards and the rehearsal device run between any two steps of the user's, and
swallow the failures of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import cudalens
from cudalens import simulate
from cudalens.core._python import came_from_outside
from tests.amount import AMOUNT

# What a handler raises inside coverage's own tracer leaves its lock held for ever.
pytestmark = [pytest.mark.no_cover, pytest.mark.usefixtures("no_callback_of_the_collector")]

ROOT = Path(cudalens.__file__).parent


class TimeOutError(Exception):
    """What most handlers raise."""


class Stop(BaseException):
    """What handlers raise that know their Python."""


class FitsAllError(RuntimeError, TypeError, OSError, KeyError):
    """What any except clause for a failure of torch's or Python's would take."""


RAISED = [TimeOutError, Stop, FitsAllError]


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """Handle an error of torch's, and no other."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, FitsAllError):
            raise


def work(*, is_guarded: bool) -> None:
    """Call what is noted in different ways: plain, in place, several results, views, failures."""
    layer, x = nn.Linear(2, 2).to("cuda"), torch.ones(2, 2, device="cuda")
    layer(x).add_(1).split(1)
    torch.stack([x, x])
    x[torch.tensor([0, 1], device="cuda")].sum().item()
    with failing():
        torch.add(x, torch.ones(3, device="cuda"))
    if is_guarded:
        with failing():
            x[torch.tensor([5], device="cuda")]
    layer(x).sum().mul(2).backward()


def is_lost(instant: int, kind: type[BaseException], part: str, options: Any) -> bool | None:
    """Call a signal handler at one step of a part of the package while ``work`` runs.

    Python runs handlers where a function begins, where a call comes back and where a loop begins
    again: there only, so that a ``with`` of a lock is never cut in two, but by Python 3.14 (see
    python/cpython#148874), which this leaves out.  At a loop this shows nothing;
    :func:`test_no_loop_leaves_a_block_without_its_end` looks at those.

    Returns:
        whether its exception did not arrive; ``None`` when there are fewer steps.
    """
    count = 0

    def handler(number: int, frame: Any) -> None:
        raise kind("of the user")

    def watch(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        is_step = event == "call" or (event == "c_return" and arg.__name__ != "__enter__")
        if frame.f_locals.get("func") is torch._C._set_grad_enabled:
            return  # torch's own no_grad is cut in two like this as well
        if is_step and frame.f_code.co_filename.startswith(str(ROOT / part)):
            count += 1
            if count == instant:
                handler(signal.SIGALRM, frame)

    before = sys.getprofile()
    try:
        with contextlib.nullcontext() if options is None else cudalens.check(**options):
            sys.setprofile(watch)
            try:
                work(is_guarded=part == "guards")
            finally:
                sys.setprofile(before)
    except kind:
        return False
    return True if count >= instant else None


PARTS = {
    "full check": ("recorder", {}, 11),
    "nan": ("recorder", {"nan": True}, 13),
    "fast": ("guards", {"fast": True}, 3),
    "guards of the full check": ("guards", {}, 3),
    "rehearsal": ("simulate", None, 11),
}
# Each part with one kind of exception, with two in CI, and with all where all is tried.
INSTANTS = [
    pytest.param(
        *values,
        kind,
        id=f"{name}-{kind.__name__}",
        marks=[[], pytest.mark.thorough, pytest.mark.all][(row + column) % len(RAISED)],
    )
    for row, (name, values) in enumerate(PARTS.items())
    for column, kind in enumerate(RAISED)
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on the simulated device")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("part", "options", "step", "kind"), INSTANTS)
def test_no_instant_loses_what_a_handler_raises(
    sim: simulate.Simulation, part: str, options: Any, step: int, kind: type[BaseException]
) -> None:
    """At every instant the exception arrives, and nothing stays installed."""
    lost, tried = [], 0
    instant = 1 + RAISED.index(kind)
    while (found := is_lost(instant, kind, part, options)) is not None:
        lost += [instant] if found else []
        assert not _get_current_dispatch_mode_stack(), instant
        assert torch._C._len_torch_function_stack() == 0, instant
        instant, tried = instant + step * AMOUNT.instant_step, tried + 1
    assert lost == []
    assert tried > 25


@pytest.mark.skipif(torch.cuda.is_available(), reason="on the simulated device")
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"nan": True}, marks=pytest.mark.thorough),
        pytest.param({"fast": True}, marks=pytest.mark.thorough),
        pytest.param(None, marks=pytest.mark.thorough),
    ],
)
def test_a_timer_stops_a_loop_of_small_ops(sim: simulate.Simulation, options: Any) -> None:
    """With real signals: each of a hundred timers ends the loop that would run on."""

    def handler(number: int, frame: Any) -> None:
        raise TimeOutError

    before = signal.signal(signal.SIGALRM, handler)
    x = torch.ones(4, device="cuda")
    try:
        for number in range(100):
            with (
                pytest.raises(TimeOutError),
                contextlib.nullcontext() if options is None else cudalens.check(**options),
            ):
                signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.00007 * number)
                for _ in range(100_000):
                    (x + 1).mul(2)[0:2].sum()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- loops inside blocks --------------------------------------------------------------------------


def lost_ends(code: CodeType) -> list[str]:
    """Return where loops jump back outside of the ``with`` or ``finally`` that they stand in.

    From 3.13 on Python runs handlers before such a jump, and where the jump has a condition, of a
    ``while`` or of an ``if`` that ends a turn, the compiler leaves it out of the block: what a
    handler raises there passes by ``__exit__`` and ``finally``, so that a lock stays held.
    """
    steps = {step.offset: step for step in dis.get_instructions(code)}
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]

    def ends(offset: int) -> set[int]:
        found: set[int] = set()
        while targets := [item.target for item in entries if item.start <= offset < item.end]:
            offset = targets[0]
            following = [step.opname for at, step in steps.items() if at >= offset][:8]
            if following[0] == "PUSH_EXC_INFO" and "CHECK_EXC_MATCH" not in following:
                found.add(offset)
        return found

    found = [
        f"{code.co_filename}, line {code.co_firstlineno}: {code.co_qualname}"
        for offset, step in steps.items()
        if step.opname == "JUMP_BACKWARD" and ends(step.argval) - ends(offset)
    ]
    inner = [item for item in code.co_consts if isinstance(item, CodeType)]
    return found + [line for item in inner for line in lost_ends(item)]


FORMS = {
    "while": "while x:\n   f()",
    "if": "for y in x:\n   if y:\n    f()",
    "continue": "for y in x:\n   if y:\n    continue\n   f()",
    "comprehension": "z = [y for y in x if y]",
    "plain": "for y in x:\n   f()",
    "call": "f()",
}
IN_PLACE = {
    "with": "def g(x, f):\n with f:\n  {}",
    "finally": "def g(x, f):\n try:\n  {}\n finally:\n  f()",
}


@pytest.mark.skipif(sys.version_info[:2] != (3, 13), reason="it reads the bytecode of Python 3.13")
@pytest.mark.parametrize("place", IN_PLACE)
@pytest.mark.parametrize("form", FORMS)
def test_such_a_loop_is_found(form: str, place: str) -> None:
    code = compile(IN_PLACE[place].format(FORMS[form]), "<text>", "exec")
    assert bool(lost_ends(code)) is (form in ("while", "if", "comprehension"))


@pytest.mark.skipif(sys.version_info[:2] != (3, 13), reason="it reads the bytecode of Python 3.13")
def test_no_loop_leaves_a_block_without_its_end() -> None:
    """Such a loop stands in a function of its own, which the block calls."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        found += lost_ends(compile(path.read_bytes(), str(path.relative_to(ROOT)), "exec"))
    assert found == []


# --- how they are told from failures of our own --------------------------------------------------


def caught(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError


def ours(step: Callable[..., object]) -> object:
    """Stand for a function that takes notes."""
    return step()


def interrupted(handler: Callable[..., object], *, is_installed: bool = False) -> bool:
    """Let a handler interrupt ``ours``, and return whether it is recognised."""
    before = signal.getsignal(signal.SIGALRM)
    try:
        if is_installed:
            signal.signal(signal.SIGALRM, handler)
        return came_from_outside(caught(lambda: ours(lambda: handler(14, sys._getframe()))))
    finally:
        signal.signal(signal.SIGALRM, before)


def _raising(*given: object) -> None:
    raise TimeOutError("now")


def _forgetting(number: int, frame: object) -> None:
    del number, frame
    _raising()


class Handler:
    def method(self, number: int, frame: object) -> None:
        _raising()

    def __call__(self, number: int, frame: object) -> None:
        _raising()


HANDLERS: dict[str, bool] = {
    "any arguments": interrupted(_raising),
    "raised in a function of its own": interrupted(lambda number, frame: _raising()),
    "a method": interrupted(Handler().method),
    "an object": interrupted(Handler()),
    "a partial": interrupted(functools.partial(Handler().method)),
    "arguments deleted": interrupted(_forgetting, is_installed=True),
}


def test_what_another_thread_sets_is_recognised() -> None:
    """Libraries for time-outs set an exception from a thread of their own."""

    def spin() -> None:
        identity = ctypes.c_ulong(threading.get_ident())
        ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(TimeOutError))
        for _ in range(1000):
            ours(int)

    error = caught(spin)
    assert isinstance(error, TimeOutError)
    assert came_from_outside(error)


def _asserting() -> None:
    assert not ROOT


def _raises_bare() -> None:
    raise LookupError


OWN: dict[str, BaseException] = {
    "with a text": caught(lambda: ours(_raising)),
    "without one": caught(lambda: ours(_raises_bare)),
    "an assert": caught(lambda: ours(_asserting)),
    "of C": caught(lambda: ours(lambda: next(iter([])))),
    "of torch": caught(lambda: torch.ones(2) + torch.ones(3)),
    "a frame from elsewhere": caught(
        functools.partial(lambda frame: ours(lambda: frame.nothing), sys._getframe())
    ),
}


@pytest.mark.parametrize("name", [*HANDLERS, *OWN])
def test_a_handler_is_told_from_a_failure_of_our_own(name: str) -> None:
    """By the frame that it was given, or because it is installed; what our code, or torch below
    it, raises is noted and goes no further.
    """
    is_outside = HANDLERS[name] if name in HANDLERS else came_from_outside(OWN[name])
    assert is_outside is (name in HANDLERS)
