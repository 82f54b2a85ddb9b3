"""The report of an error runs nothing of the user's: no torch function, no property, no class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
