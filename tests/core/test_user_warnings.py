"""A warning that arises below a function of ours points at the user's line."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cudalens
from cudalens import simulate
from cudalens.core import user_warnings

HERE = Path(__file__)
# A file that exists: coverage reads the source of whatever ran.
OURS = str(HERE.parents[2] / "cudalens" / "__init__.py")
TORCHS = str(Path(torch.__file__).parent / "_ops.py")


def function(filename: str, module: str, text: str, **names: Any) -> Any:
    """Return the function ``f`` of a module that is not there."""
    names["__name__"] = module
    exec(compile(text, filename, "exec"), names)
    return names["f"]


warn = function(OURS, "cudalens.fake", "import warnings\ndef f(): warnings.warn('w')")
redispatch = function(TORCHS, "torch._ops", "import warnings\ndef f(): warnings.warn('w')")
of_ours = function(OURS, "cudalens.fake", "def f(): call()", call=redispatch)


@pytest.fixture
def installed() -> Iterator[None]:
    user_warnings.install()
    yield
    user_warnings.remove()


def place(call: Any) -> tuple[str, int]:
    """Return where the warning of a call is shown."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        call()
    (message,) = shown
    return message.filename, message.lineno


@pytest.mark.parametrize("call", [warn, of_ours])
def test_it_points_at_the_line_that_called_us(call: Any, installed: None) -> None:
    def user() -> None:
        call()

    assert place(user) == (str(HERE), user.__code__.co_firstlineno + 1)


@pytest.mark.parametrize("call", [lambda: warnings.warn("w", stacklevel=1), redispatch])
def test_another_warning_stays_where_it_is(call: Any, installed: None) -> None:
    user_warnings.remove()
    expected = place(call)
    user_warnings.install()
    assert place(call) == expected


@pytest.mark.parametrize("action", ["default", "module", "once"])
def test_only_the_module_that_it_is_shown_in_remembers_it(action: Any, installed: None) -> None:
    """Each kind of filter has an entry of its own in the register of a module."""
    ours = function(OURS, "cudalens.fake", "import warnings\ndef f(): warnings.warn('w')")
    user = function(str(HERE), "users", "def f(): call()", call=ours)
    warnings.onceregistry.clear()  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter(action)
        user()
        user()
    assert {(item.filename, item.lineno) for item in shown} == {(str(HERE), 1)}
    left = ours.__globals__["__warningregistry__"]
    assert [key for key in left if key != "version"] == []
    assert ("w", UserWarning, 1) in user.__globals__["__warningregistry__"] or action != "default"


def test_a_module_without_a_name_is_shown_a_warning_too(installed: None) -> None:
    user = function(str(HERE), "users", "def f(): call()", call=warn)
    user.__globals__["__name__"] = None
    assert place(user) == (str(HERE), 1)


def test_what_a_warning_is_about_stays_with_it(installed: None) -> None:
    text = "import warnings\ndef f(): warnings.warn('w', source=held)"
    call, held = function(OURS, "cudalens.fake", text), object()
    call.__globals__["held"] = held
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        call()
    assert (shown[0].source, shown[0].filename) == (held, str(HERE))


def test_nothing_stays_installed() -> None:
    before = sys.modules["warnings"]._showwarnmsg
    with cudalens.check(), cudalens.check():
        assert sys.modules["warnings"]._showwarnmsg is not before
    assert sys.modules["warnings"]._showwarnmsg is before


def test_a_warning_of_an_op_points_at_its_line(sim: simulate.Simulation) -> None:
    """From torch 2.15 on C++ warns at the innermost Python frame."""
    data, index = torch.zeros(3, device="cuda"), torch.tensor([1, 2, 0], device="cuda")
    torch.set_warn_always(True)
    try:
        with cudalens.check(), warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            data.index_reduce(0, index, data, "prod")
    finally:
        torch.set_warn_always(False)
    assert {message.filename for message in shown} == {str(HERE)}


class Old(nn.Module):
    """A library's module that warns of a call, as decorators of its ``forward`` do."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.level = level

    def forward(self, values: Tensor) -> Tensor:
        warnings.warn("old", FutureWarning, stacklevel=self.level)
        return values


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("has_hook", [False, True], ids=["no hook", "a hook of the user's"])
def test_a_warning_in_a_forward_is_shown_where_it_is_without_the_check(
    level: int, *, has_hook: bool
) -> None:
    module = Old(level)
    if has_hook:
        module.register_forward_hook(lambda *_: None)
    values = torch.ones(1)
    places = []
    for options in (None, {}, {"nan": True}):
        with cudalens.check(**options) if options is not None else nullcontext():
            places.append(place(lambda: module(values)))
    assert places[1:] == places[:1] * 2


def test_a_warning_in_a_forward_is_shown_once_with_and_without_the_check() -> None:
    module = Old(2)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        module(torch.ones(1))
        with cudalens.check():
            module(torch.ones(1))
    assert len(shown) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda: nn.functional.softmax(torch.ones(2)),  # type: ignore[call-arg]
        lambda: nn.functional.tanh(torch.ones(2)),
        lambda: nn.functional.upsample(torch.ones(1, 1, 2), scale_factor=2),
        lambda: nn.Softmax()(torch.ones(2)),
    ],
)
def test_a_warning_of_a_function_of_torchs_in_python_is_shown_where_it_is(call: Any) -> None:
    """It asks the modes first, and is then called by ours."""
    places = []
    for options in (None, {}, {"nan": True}):
        with cudalens.check(**options) if options is not None else nullcontext():
            with warnings.catch_warnings(record=True) as shown:
                warnings.simplefilter("always")
                call()
            places.append([(item.filename, item.lineno) for item in shown])
    assert places[1:] == places[:1] * 2


def test_installing_and_removing_twice_is_as_once() -> None:
    before = sys.modules["warnings"]._showwarnmsg
    user_warnings.install()
    user_warnings.install()
    user_warnings.remove()
    assert sys.modules["warnings"]._showwarnmsg is before
    user_warnings.remove()
    assert sys.modules["warnings"]._showwarnmsg is before
