"""The report of an error runs nothing of the user's: no torch function, no property, no class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import cudalens

pytestmark = pytest.mark.usefixtures("sim")


def product(x: Any) -> None:
    x @ x


def backward(x: Any) -> None:
    y = x.clone().requires_grad_().exp()
    y += 1
    y.sum().backward()


def freed(x: Any) -> None:
    y = x.clone().requires_grad_().exp().sum()
    y.backward()
    y.backward()


def layer(x: Any) -> None:
    nn.Linear(7, 2)(x)


def index(x: Any) -> None:
    x[torch.tensor([9])]


ERRORS = [product, backward, freed, layer, index]


@pytest.mark.parametrize("error", ERRORS)
def test_a_torch_function_is_called_as_without(error: Callable[[Any], None]) -> None:
    seen: list[str] = []

    class Own(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(getattr(func, "__name__", "?"))
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(2, 3).as_subclass(Own)
    with pytest.raises((RuntimeError, IndexError)):
        error(x)
    expected = seen.copy()
    seen.clear()
    with pytest.raises((RuntimeError, IndexError)), cudalens.check() as session:
        error(x)
    assert session.report is not None
    assert seen == expected


@pytest.mark.parametrize("claim", [Tensor, nn.Module, list, object])
@pytest.mark.parametrize("error", ERRORS)
def test_a_variable_is_not_asked_for_its_class(error: Callable[[Any], None], claim: Any) -> None:
    asked: list[str] = []

    class Lazy:
        @property
        def __class__(self) -> Any:  # type: ignore[override]
            asked.append("__class__")
            return claim

        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            raise AttributeError(name)

    def run() -> None:
        proxy = Lazy()  # noqa: F841
        held = [Lazy()]  # noqa: F841
        error(torch.ones(2, 3))

    with pytest.raises((RuntimeError, IndexError)), cudalens.check() as session:
        run()
    assert session.report is not None
    assert asked == []


class Renamed(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Passing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Wrong(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] @ args[0]


def headline(run: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError), cudalens.check() as session:
        run()
    assert session.report is not None
    return session.report.headline


def test_a_headline_has_the_names_of_the_call_and_not_of_a_hook_that_hands_it_on() -> None:
    width = torch.ones(2, 3)
    inner = width.as_subclass(Renamed)

    def by_mode() -> None:
        with Passing(), Passing():
            width @ width

    assert headline(lambda: inner @ inner).startswith("inner and inner shapes cannot be multiplied")
    assert headline(by_mode).startswith("width and width shapes cannot be multiplied")


def test_a_mistake_that_a_hook_makes_itself_is_told_in_its_own_names() -> None:
    width = torch.ones(2, 3)

    def by_mode() -> None:
        with Wrong():
            width.exp()

    assert headline(by_mode).endswith("args[0] is [2, 3]")
