"""The path of the running module below the outermost one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cudalens.source.module_path import ModulePath, module_path
from cudalens.source.stack import place_of, stack_of

SEEN: list[ModulePath] = []


class Leaf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(module_path([place_of(frame) for frame in stack_of(sys._getframe())]))
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaf = Leaf()

    def forward(self, x: Tensor) -> Tensor:
        return self.leaf(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Identity(), Block())
        self.loose = [Leaf()]

    def forward(self, x: Tensor, *, is_loose: bool = False) -> Tensor:
        return self.loose[0](x) if is_loose else self.blocks(x)

    def training_step(self, x: Tensor) -> Tensor:
        return self.blocks[1].leaf(x)


class Broken(Net):
    def __getattr__(self, name: str) -> Any:
        if name in {"blocks", "loose"}:
            return super().__getattr__(name)
        raise RuntimeError(name)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        raise RuntimeError("named_modules was called")


def seen(call: Callable[[Tensor], Tensor]) -> ModulePath:
    SEEN.clear()
    call(torch.zeros(1))
    (path,) = SEEN
    return path


def test_the_innermost_module_is_named_below_the_outermost() -> None:
    assert seen(Net()) == ModulePath("blocks.1.leaf", "Leaf")
    assert seen(Net().blocks) == ModulePath("1.leaf", "Leaf")
    assert seen(Net().training_step) == ModulePath("blocks.1.leaf", "Leaf")


def test_the_outermost_module_itself_has_no_path() -> None:
    assert seen(Leaf()) == ModulePath(None, "Leaf")


def test_a_module_kept_outside_the_registry_has_no_path() -> None:
    net = Net()
    assert seen(lambda x: net(x, is_loose=True)) == ModulePath(None, "Leaf")


def test_the_names_are_those_of_named_modules_for_shared_modules() -> None:
    net = Net()
    net.again = net.blocks[1].leaf
    expected = next(name for name, module in net.named_modules() if module is net.again)
    assert seen(net).path == expected


def test_broken_getattr_and_named_modules_do_no_harm() -> None:
    assert seen(Broken()) == ModulePath("blocks.1.leaf", "Leaf")


def test_a_stack_without_modules_has_neither() -> None:
    assert module_path([place_of(sys._getframe())]) == ModulePath(None, None)
