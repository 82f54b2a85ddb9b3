"""Forward, backward, optimizer, or none of them: from the frames that were running."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cudalens import DeviceAssertError
from cudalens.core._python import entries_from_traceback
from cudalens.evidence import call_stack
from cudalens.evidence.call_stack import (
    buffer_names,
    calling_frames,
    entries_of,
    held_name,
    locate,
    parameter_names,
    parameters_of,
    phase_of,
    tensors_and_modules,
    trim,
    visible_parameters,
    with_callers,
    without_detours,
    worker_line,
)
from cudalens.recorder import PASSING_FILES
from cudalens.source.locate import CallSite
from cudalens.source.stack import StackEntry
from tests.blocks import report_of
from tests.probes import Untouchable, asked, cell

WEIGHT = nn.Parameter(torch.ones(3))


def step() -> None:
    WEIGHT.grad = torch.ones(3)
    optimizer = torch.optim.SGD([WEIGHT], lr=1.0)
    optimizer.param_groups[0]["lr"] = "fast"
    optimizer.step()


class Sam(torch.optim.SGD):
    """An optimizer of the user's, with a method of its own beside the closure."""

    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        self.climb(closure() if closure is not None else None)

    def climb(self, loss: Any) -> None:
        torch.ones(2) + torch.ones(3)


def adds() -> object:
    return WEIGHT.sum() + torch.ones(4) + torch.ones(5)


def runs_module() -> object:
    return nn.Linear(3, 3)(torch.ones(2, 4))


class Closure:
    def __call__(self) -> object:
        return adds()


def ids() -> torch.Tensor:
    return torch.tensor([1, 3], device="cuda")


@pytest.mark.parametrize(
    ("call", "phase"),
    [
        (lambda: nn.Linear(3, 3)(torch.ones(2, 4)), "forward"),
        (lambda: torch.ones(2, 3) @ torch.ones(2, 3), "forward"),
        (lambda: (WEIGHT * 2).backward(), "backward"),
        (lambda: torch.autograd.grad(WEIGHT.sum(), torch.ones(2)), "backward"),
        (step, "optimizer"),
        (lambda: torch.optim.LBFGS([WEIGHT]).step(adds), "forward"),
        (lambda: torch.optim.Adam([WEIGHT]).step(partial(adds)), "forward"),
        (lambda: torch.optim.Adam([WEIGHT]).step(Closure()), "forward"),
        (lambda: torch.optim.Adam([WEIGHT]).step(runs_module), "forward"),
        (lambda: torch.optim.Adam([WEIGHT]).step(lambda: adds().backward()), "forward"),
        (lambda: torch.optim.Adam([WEIGHT]).step((WEIGHT * 2).backward), "backward"),
        (lambda: Sam([WEIGHT]).step(adds), "forward"),
        (lambda: Sam([WEIGHT]).step(closure=WEIGHT.sum), "optimizer"),
        (lambda: torch.optim.SGD([], lr=1.0), "unknown"),
        (lambda: nn.MultiheadAttention(10, 3), "unknown"),
        (lambda: nn.Linear(3, 3).load_state_dict({}), "unknown"),
    ],
)
def test_the_phase_is_what_was_running(call: Callable[[], object], phase: str) -> None:
    assert report_of(call, Exception).phase == phase


@pytest.mark.parametrize(
    ("kind", "closure", "phase"),
    [
        (torch.optim.Adam, lambda: torch.ones(3, device="cuda")[ids()], "forward"),
        (torch.optim.Adam, lambda: F.one_hot(ids(), 3), "forward"),
        (Sam, lambda: torch.ones(3, device="cuda")[ids()], "forward"),
    ],
)
@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("fast", [False, True])
def test_a_finding_in_what_a_step_calls_is_of_the_forward_pass(
    kind: Any, closure: Callable[[], object], phase: str, *, fast: bool
) -> None:
    parameter = nn.Parameter(torch.ones(3, device="cuda"))
    for step in (
        lambda: kind([parameter]).step(closure),
        lambda: kind([parameter]).step(closure=closure),
    ):
        assert report_of(step, DeviceAssertError, fast=fast).phase == phase


# --- entries of a stack ---------------------------------------------------------------------------


TORCH = Path(torch.__file__).parent
PASSING = sorted(PASSING_FILES)[0]


def entry(name: str, file: str = "<cell 1>") -> StackEntry:
    """Return an entry of a stack: a function of the user's, or of a file below torch's folder."""
    path = str(TORCH / file) if file.endswith(".py") and not Path(file).is_absolute() else file
    code = compile("0", path, "exec").replace(co_name=name)
    return StackEntry(code, 1, 0)


USER, RELU = entry("train"), entry("relu", "nn/functional.py")
STEP, ADAM = entry("wrapper", "optim/optimizer.py"), entry("step", "optim/adam.py")


@pytest.mark.parametrize(
    ("entries", "phase"),
    [
        ([], "forward"),
        ([USER], "forward"),
        ([USER, entry("_call_impl", "nn/modules/module.py")], "forward"),
        ([USER, entry("backward", "autograd/__init__.py")], "backward"),
        ([USER, STEP, ADAM], "optimizer"),
        # The innermost counts.
        ([USER, STEP, ADAM, entry("backward", "autograd/__init__.py")], "backward"),
        ([entry("backward", "autograd/__init__.py"), USER, STEP, ADAM], "optimizer"),
        ([USER, STEP, ADAM, entry("_call_impl", "nn/modules/module.py")], "forward"),
        ([USER, STEP, ADAM, entry("to", "nn/modules/module.py")], "optimizer"),
        # What a step of torch's calls outside torch is its closure, apart from what is ours.
        ([USER, ADAM, USER], "forward"),
        ([USER, ADAM, USER, RELU], "forward"),
        ([USER, ADAM, entry("passes", PASSING)], "optimizer"),
        ([USER, STEP, USER], "optimizer"),
        ([USER, entry("__init__", "nn/modules/linear.py")], "unknown"),
        ([USER, entry("load_state_dict", "nn/modules/module.py")], "unknown"),
        ([USER, entry("fetch", "utils/data/_utils/fetch.py")], "unknown"),
        ([entry("__init__")], "forward"),
    ],
)
def test_the_phase_of_entries(entries: list[StackEntry], phase: str) -> None:
    assert phase_of(entries, in_backward=False) == phase
    assert phase_of(entries, in_backward=True) == "backward"


OVERRIDES, PASS = entry("handle_torch_function", "overrides.py"), entry("passes", PASSING)


@pytest.mark.parametrize(
    ("entries", "rest"),
    [
        ([USER, RELU], [USER, RELU]),
        ([USER, PASS, RELU], [USER, RELU]),
        ([USER, RELU, OVERRIDES, PASS, RELU], [USER, RELU]),
        ([USER, RELU, OVERRIDES, PASS, PASS, RELU], [USER, RELU]),
        # Another function is not the same one twice.
        ([USER, RELU, OVERRIDES, PASS, ADAM], [USER, RELU, ADAM]),
        ([USER, RELU, OVERRIDES, RELU], [USER, RELU, OVERRIDES, RELU]),
        ([OVERRIDES, PASS, RELU], [RELU]),
        ([USER, PASS], [USER]),
        ([USER, PASS, OVERRIDES, RELU], [USER, OVERRIDES, RELU]),
    ],
)
def test_frames_that_hand_a_call_on_are_left_out(
    entries: list[StackEntry], rest: list[StackEntry]
) -> None:
    assert [item.code.co_name for item in without_detours(entries)] == [
        item.code.co_name for item in rest
    ]


def test_lines_of_a_call_that_is_over() -> None:
    code: CodeType = compile("a = 1\nb = 2\n", "<cell 1>", "exec")
    last = list(code.co_positions())
    at = next(place for place, (line, *_) in enumerate(last) if line == 2) * 2
    assert entries_of([(code, at)]) == [StackEntry(code, 2, at)]


def test_a_traceback_ends_at_the_users_last_frame() -> None:
    with cell("def f():\n    torch.nn.Linear(2, 2)(torch.ones(3))\nf()") as code:
        with pytest.raises(RuntimeError) as caught:
            exec(code, {"torch": torch})
        before = entries_from_traceback(caught.value.__traceback__)
        trim(caught.value)
        after = entries_from_traceback(caught.value.__traceback__)
    assert after[-1].tb_frame.f_code.co_name == "f"
    assert len(after) < len(before)


# --- names that the user's code can see -----------------------------------------------------------


def test_names_of_parameters_and_buffers() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    alone = nn.Parameter(torch.ones(1))
    made, plain, hidden = alone * 2, torch.ones(1), torch.ones(1)
    text = "def f(net, alone, made, plain):\n    here(net, alone, made, plain)\nf(n, a, m, p)"
    names = {"n": net, "a": alone, "m": made, "p": plain, "_h": hidden}

    def ask(frames: Any) -> Any:
        mean: Any = net[1].running_mean
        loose = torch.zeros(1)
        return (
            parameter_names(frames),
            list(visible_parameters(frames)),
            [held_name(item, frames) for item in (net[0].weight, mean, plain, loose)],
            held_name(hidden, frames),
            [buffer_names(frames, them) for them in ([mean], [mean, loose], [loose, loose], [])],
            list(parameters_of(frames[-1])),
        )

    (found,) = asked(text, ask, **names)
    named, seen, held, unheld, buffers, parameters = found
    paths = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert named == {**dict(zip(map(id, net.parameters()), paths, strict=True)), id(alone): "alone"}
    assert [name for name, _ in seen] == paths
    assert held == ["net.0.weight", "net.1.running_mean", "plain", None]
    assert unheld is None
    one, two = ["net.1.running_mean"], ["net.1.running_mean", "1 other buffer"]
    assert buffers == [one, two, ["2 other buffers"], []]
    assert parameters == ["net", "alone", "made", "plain"]


def test_parameters_of_a_caller_are_visible() -> None:
    text = "def f():\n    here()\ndef g(net):\n    f(), net\ng(n)"
    ask = lambda frames: [name for name, _ in visible_parameters(frames)]
    assert asked(text, ask, n=nn.Linear(1, 1)) == [["weight", "bias"]]


@pytest.mark.parametrize(
    ("file", "text", "name"),
    [
        ("step.py", "def f(v):\n    return ask(v)\nfound = f(w)", "v"),
        (torch.overrides.__file__, "def f(v):\n    return ask(v)\nfound = f(w)", None),
        ("step.py", "def f(v):\n    return ask()\nfound = f(1)", None),  # a variable of a module
    ],
)
def test_names_are_those_of_the_users_functions_that_run(
    file: str, text: str, name: str | None
) -> None:
    names = {"w": WEIGHT, "ask": lambda *_: parameter_names([sys._getframe(1)])}
    exec(compile(text, file, "exec"), names)
    assert names["found"] == ({id(WEIGHT): name} if name else {})


def test_tensors_and_modules_among_variables_are_found_by_their_types() -> None:
    net, x = nn.Linear(1, 1), torch.ones(1)
    inner = {"w": WEIGHT, "kind": torch.Tensor, "odd": Untouchable()}
    outer = {"n": 1, "net": net, "x": x, "of_nets": [net]}
    found = list(tensors_and_modules([inner, outer]))
    assert [name for name, _ in found] == ["w", "net", "x"]
    assert all(item is given for (_, item), given in zip(found, (WEIGHT, net, x), strict=True))


@pytest.mark.parametrize(("line", "a"), [("c = 3", 1), ("del a", None)])
def test_the_parameters_of_a_function_leave_out_what_is_left_over(line: str, a: object) -> None:
    text = f"def f(a, *rest, b, **more):\n    {line}\n    here()\nf(1, 2, b=4, d=5)"
    assert asked(text, lambda frames: parameters_of(frames[-1])) == [{"a": a, "b": 4}]


@pytest.mark.parametrize("is_edited", [True, False])
def test_what_the_frames_of_a_line_do_not_tell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_edited: bool
) -> None:
    given = CallSite(limits=("no column",))
    monkeypatch.setattr(call_stack, "locate_call", lambda *_: given)
    monkeypatch.setattr(call_stack, "source", lambda file: SimpleNamespace(is_edited=is_edited))
    monkeypatch.setattr(call_stack.eager, "limit_of", lambda codes: ("compiled",))
    code = entry("f", str(tmp_path / "step.py"))
    found = locate([code, code, entry("relu", "nn/functional.py")], {}).limits
    said = "step.py has changed since it was imported: its lines are not shown"
    assert found == ("no column", *([said] * is_edited), "compiled")


def test_the_running_frames_end_before_our_own() -> None:
    text = "def a():\n    return calling_frames()\ndef b():\n    return a()"
    names: dict[str, Any] = {"calling_frames": calling_frames}
    exec(compile(text, call_stack.__file__, "exec"), names)
    here = "test_the_running_frames_end_before_our_own"
    assert names["b"]()[-1].f_code.co_name == here


SENT = "Caught IndexError.\nOriginal Traceback (most recent call last):\n"


@pytest.mark.parametrize("is_sent", [True, False])
def test_the_users_deepest_line_in_what_a_worker_sent(tmp_path: Path, *, is_sent: bool) -> None:
    path = tmp_path / "data.py"
    path.write_text("def get(rows, at):\n    return rows[at]\n")
    lines = (
        f'  File "{tmp_path / "outer.py"}", line 1, in outer\n    …\n'
        f'  File "{path}", line 2, in get\n    …\n'
        f'  File "{torch.__file__}", line 7, in stack\n    …\n'
    )
    found = worker_line((SENT if is_sent else "") + lines)
    assert found == (f"{path}:2: return rows[at]" if is_sent else "")
    assert worker_line(SENT) == ""


def test_a_traceback_begins_in_the_users_outermost_frame() -> None:
    """Of an exception that is still inside the user's call."""

    def raised() -> Any:
        try:
            raise ValueError
        except ValueError as error:
            return with_callers(error.__traceback__)

    def frames(trace: Any) -> list[str]:
        names = []
        while trace is not None:
            names.append(trace.tb_frame.f_code.co_name)
            trace = trace.tb_next
        return names

    with cell("def outer():\n    found.append(raised())\nouter()") as code:
        found: list[Any] = []
        # What runs the user's program is none of it: here that is Python's own module.
        thread = threading.Thread(target=exec, args=(code, {"found": found, "raised": raised}))
        thread.start()
        thread.join()
    assert frames(found[0]) == ["<module>", "outer", "raised"]
    here = "test_a_traceback_begins_in_the_users_outermost_frame"
    assert frames(with_callers(None))[-1] == here


# No code of the user's runs in this thread: the one that called ``backward`` is asked for.
ASKS = """\
asked.acquire()
for in_backward in (True, False):
    frames = calling_frames(in_backward=in_backward)
    seen.append([it.f_code.co_name for it in frames])
done.release()
"""


@pytest.mark.parametrize(
    ("depth", "last"),
    [
        (None, "look"),
        (3, "look"),  # a thread that has called backward too, and runs other code now
        (0, "<module>"),  # one of two, and nobody knows which
    ],
)
def test_in_a_thread_of_autograds_the_caller_of_backward_stands_in(
    depth: int | None, last: str
) -> None:
    seen: list[list[str]] = []
    ready, over, asked, done = (threading.Lock() for _ in range(4))

    def _engine_run_backward() -> None:
        deeper(depth or 0)

    def deeper(left: int) -> None:
        if left:
            deeper(left - 1)
        else:
            ready.release()
            over.acquire()

    def look(gradient: torch.Tensor) -> None:
        code = compile(ASKS, torch.overrides.__file__, "exec")
        names = {"calling_frames": calling_frames, "seen": seen, "asked": asked, "done": done}
        threading.Thread(target=exec, args=(code, names)).start()
        asked.release()
        done.acquire()

    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(look)
    other = threading.Thread(target=_engine_run_backward)
    with ready, over, asked, done:
        if depth is not None:
            other.start()
            ready.acquire()
        leaf.sum().backward()
    assert [it[-1] for it in seen] == [last, "<module>"]
