"""torch's warnings are those of the program without a check: line, number, filters, registers."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import cudalens
from cudalens.recorder import Recorder
from tests.releases import release

SETUP = """
import warnings
import torch, torch.nn as nn, torch.nn.functional as F
from torch.overrides import TorchFunctionMode
class Log(TorchFunctionMode):
    def __torch_function__(self, f, types, args=(), kw=None): return f(*args, **(kw or {}))
class Net(nn.Module):
    def forward(self, x): return F.softmax(x)
"""
PROGRAMS = {
    "two lines": "a = F.softmax(torch.ones(3, 3))\nb = F.softmax(torch.ones(2, 2))",
    "a loop": "for _ in range(3):\n    F.softmax(torch.ones(3, 3))",
    "broadcast loss": "F.mse_loss(torch.ones(4, 1), torch.ones(4))\n"
    "F.mse_loss(torch.ones(4, 1), torch.ones(4))",
    "in a module": "net = Net()\nnet(torch.ones(2, 2))\nnet(torch.ones(3, 3))",
    "module of torch": "m = nn.Softmax()\nm(torch.ones(2, 2))\nm(torch.ones(2, 2))",
    "module with a hook": """
m = nn.Softmax()
m.register_forward_hook(lambda *_: None)
m(torch.ones(2, 2))
""",
    "hook of all modules": """
hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
try:
    nn.Softmax()(torch.ones(2, 2))
finally:
    hook.remove()
""",
    "of C++": "x = torch.ones(2, 3)\nx.T.T\ny = torch.ones(2, 3, 4)\ny.T\ny.T\nz = y.T",
    "in backward": """
x = torch.ones(3, requires_grad=True)
(x * 2).sum().backward(create_graph=True)
(x * 2).sum().backward(create_graph=True)
""",
    "a mode of the user's": """
with Log():
    F.softmax(torch.ones(3, 3))
    torch.ones(2, 3, 4).T
""",
    "a gradient that is none": "x = torch.ones(3, requires_grad=True) * 2\nx.grad\nx.grad",
    "a function of the user's": """
def f(x):
    warnings.warn('old', stacklevel=2)
    return x + 1
f(torch.ones(1))
f(torch.ones(1))
""",
}


@pytest.fixture(autouse=True)
def every_time() -> Any:
    """Let C++ warn more than once in a process."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


def forget_registers() -> None:
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            vars(module).pop("__warningregistry__", None)


def warned(code: Any, set_filters: Callable[[], object]) -> list[Any]:
    """Return the warnings of a program: kind, text, file and line."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(SETUP, names)
    forget_registers()
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        set_filters()
        try:
            exec(code, names)
        except Warning as error:
            shown.append(error)  # type: ignore[arg-type]
    return [
        (type(item), str(item))
        if isinstance(item, Warning)
        else (item.category, str(item.message), item.filename, item.lineno)
        for item in shown
    ]


FILTERS: dict[str, Callable[[], object]] = {
    "default": lambda: warnings.simplefilter("default"),
    "always": lambda: warnings.simplefilter("always"),
    "once": lambda: warnings.simplefilter("once"),
    "module": lambda: warnings.simplefilter("module"),
    "error": lambda: warnings.simplefilter("error"),
    "ignore": lambda: warnings.simplefilter("ignore"),
    "ignored by module": lambda: warnings.filterwarnings("ignore", module="__main__"),
    "error by module": lambda: warnings.filterwarnings("error", module="__main__"),
}


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_warnings_are_those_of_the_program_alone(
    program: str, filters: Callable[[], object]
) -> None:
    code = compile(program, "cell", "exec")
    expected = warned(code, filters)
    with cudalens.check():
        assert warned(code, filters) == expected
    with cudalens.check(), cudalens.check():
        assert warned(code, filters) == expected


def test_there_are_warnings_to_compare() -> None:
    for program in PROGRAMS.values():
        assert warned(compile(program, "cell", "exec"), FILTERS["always"])


def test_a_check_changes_no_filter_and_resets_no_register() -> None:
    names: dict[str, Any] = {"__name__": "mod"}
    exec("import warnings\ndef w(): warnings.warn('old')", names)
    with warnings.catch_warnings(record=True) as shown:
        warnings.resetwarnings()
        warnings.simplefilter("default")
        before = list(warnings.filters)
        for _ in range(3):
            with cudalens.check():
                assert warnings.filters == before
                names["w"]()
    assert len(shown) == 1


@pytest.mark.parametrize(
    "has_own_hook",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                release() < (2, 8), reason="torch 2.6 does not warn of hooks of all modules"
            ),
        ),
    ],
)
def test_a_compiled_module_warns_of_the_user_s_hooks_alone(has_own_hook: bool) -> None:
    hooks = []
    if has_own_hook:
        hooks.append(nn.modules.module.register_module_forward_pre_hook(lambda *_: None))
    try:
        with cudalens.check(), warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled = torch.compile(nn.Linear(2, 2), backend="eager")
            if has_own_hook:
                with pytest.raises(UserWarning, match="global hooks"):
                    compiled(torch.ones(1, 2))
            else:
                assert compiled(torch.ones(1, 2)).shape == (1, 2)
    finally:
        for hook in hooks:
            hook.remove()


# --- modes that the user leaves -------------------------------------------------------------------


class Log(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def depth() -> int:
    return torch._C._len_torch_function_stack()


def test_a_mode_of_before_is_left_in_a_check() -> None:
    mode, before = Log(), depth()
    mode.__enter__()
    with Recorder() as recorder:
        mode.__exit__(None, None, None)
        assert recorder.is_on()
        torch.ones(1) + 1
    assert (depth(), recorder.recorded_ops) == (before, 2)


def test_a_generator_s_mode_is_left_in_a_check() -> None:
    def generate() -> Any:
        with Log():
            yield

    before = depth()
    generator = generate()
    next(generator)
    with Recorder() as outer, Recorder() as inner:
        generator.close()
        assert outer.is_on()
        assert inner.is_on()
        with Log():
            torch.ones(1)
    assert depth() == before


def test_a_mode_that_is_left_too_often_fails_as_without() -> None:
    def leave() -> str:
        with pytest.raises(Exception) as caught:
            Log().__exit__(None, None, None)
        return str(caught.value)

    expected = leave()
    with Recorder() as recorder:
        assert leave() == expected
        assert recorder.is_on()


def test_a_check_that_another_thread_closes_leaves_nothing() -> None:
    before = depth()
    recorder = Recorder()
    recorder.__enter__()
    torch.ones(1)
    thread = threading.Thread(target=recorder.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    for _ in range(2):
        assert nn.functional.softmax(torch.zeros(1), 0).tolist() == [1.0]
    assert depth() == before
    assert sys.getprofile() is None
    assert recorder.recorded_ops == 1
