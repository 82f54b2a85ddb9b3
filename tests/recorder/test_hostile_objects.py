"""A good program never raises because it is looked at, and its objects are asked nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.overrides import handle_torch_function

import cudalens
from tests.blocks import cuda

pytestmark = pytest.mark.usefixtures("sim")


class Tagged(Tensor):
    """Takes part in torch functions, with plain tensors inside."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*[item.as_subclass(Tensor) for item in args if isinstance(item, Tensor)])


def tagged(*values: float) -> Tensor:
    return torch.tensor(values).as_subclass(Tagged)


@dataclasses.dataclass
class Scale:
    """A function object without a hash, as every data class with ``__call__``."""

    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        if type(x) is Tagged:
            return handle_torch_function(self, (x,), x)
        return x * self.factor


@dataclasses.dataclass(frozen=True)
class NamedScale:
    """A function object that counts what it is asked."""

    asked: list[str] = dataclasses.field(default_factory=list, hash=False)

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        raise AttributeError(name)

    def __call__(self, x: Tensor) -> Tensor:
        return handle_torch_function(self, (x,), x) if type(x) is Tagged else x + 1


def test_a_function_object_without_a_hash_is_called() -> None:
    with cudalens.check() as session:
        result = Scale(3.0)(tagged(1.0, 2.0))
    assert (result.tolist(), session.report) == ([3.0, 6.0], None)


def test_a_function_object_is_not_asked_for_its_name() -> None:
    function = NamedScale()
    with cudalens.check():
        assert function(tagged(1.0)).tolist() == [2.0]
    assert function.asked == []


ATTRIBUTES = ("is_cpu", "_version", "_base", "shape", "dtype", "device", "grad_fn", "layout")
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + 1,
    "add_": lambda x: x.add_(1),
    "view": lambda x: x.view(1, -1),
    "stack": lambda x: torch.stack([x, x]),
    "split": lambda x: x.split(1),
    "as_subclass": lambda x: x.as_subclass(type(x)),
}


@pytest.mark.parametrize("has_torch_function", [True, False])
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("kind", [RuntimeError, AttributeError, NotImplementedError])
def test_the_properties_of_a_subclass_are_not_read(
    kind: type[Exception], operation: Any, has_torch_function: bool
) -> None:
    """Torch's own properties under those names are read below Python."""
    asked = []

    def refuse(name: str) -> Any:
        def get(self: Any) -> Any:
            asked.append(name)
            raise kind("no")

        return property(get)

    own = {name: refuse(name) for name in ATTRIBUTES}
    if not has_torch_function:
        own["__torch_function__"] = torch._C._disabled_torch_function_impl
    subclass = type("Own", (Tensor,), own)
    x = torch.ones(3).as_subclass(subclass)
    with cudalens.check() as session:
        operation(x)
    assert (asked, session.internal_errors, session.report) == ([], [], None)


@pytest.mark.parametrize("claim", [True, RuntimeError("no")])
def test_a_property_does_not_lead_the_guards_astray(claim: Any) -> None:
    class Own(Tensor):
        @property
        def is_cpu(self) -> Any:  # type: ignore[override]
            if claim is True:
                return True
            raise claim

        def numel(self) -> int:
            return 0

    table, index = torch.ones(3, device="cuda").as_subclass(Own), cuda(9).as_subclass(Own)
    with pytest.raises(cudalens.DeviceIndexError), cudalens.check():
        table[index]


@pytest.mark.parametrize("base", [list, tuple])
def test_the_iterator_of_a_list_is_not_used(base: type[Any]) -> None:
    def refuse(self: Any) -> Any:
        msg = "iter"
        raise RuntimeError(msg)

    own = type("Own", (base,), {"__iter__": refuse})
    with cudalens.check() as session:
        assert torch.stack(own([torch.ones(1)])).tolist() == [[1.0]]
    assert session.internal_errors == []


class Lazy:
    """Has a class that it tells when it is asked, or does not."""

    def __init__(self, claim: Any) -> None:
        self.claim = claim

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        if isinstance(self.claim, Exception):
            raise self.claim
        return self.claim


@pytest.mark.parametrize("claim", [Tensor, list, dict, RuntimeError("asked")])
def test_the_class_that_an_object_claims_is_not_believed(claim: Any) -> None:
    def function(x: Any, other: Any) -> Any:
        return handle_torch_function(function, (x,), x, other) if type(x) is Tagged else "handled"

    class Handled(Tagged):
        @classmethod
        def __torch_function__(cls, *_: Any) -> Any:
            return "handled"

    def call() -> Any:
        x = torch.ones(1).as_subclass(Handled)
        return handle_torch_function(function, (x,), x, Lazy(claim))

    assert call() == "handled"
    with cudalens.check() as session:
        assert call() == "handled"
    assert (session.internal_errors, session.report) == ([], None)


def test_a_mock_of_a_tensor_is_not_asked() -> None:
    mock = MagicMock(spec=Tensor)
    with cudalens.check():
        handle_torch_function(lambda x, other: None, (tagged(1.0),), tagged(1.0), mock)
    assert mock.mock_calls == []
