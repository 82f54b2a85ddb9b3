"""The path of the running module below the outermost one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cudalens.source.module_path import (
    ModulePath,
    container_of,
    module_at,
    module_path,
    modules_below,
    paths_below,
    running_modules,
    spelled,
    tensors_below,
)
from cudalens.source.stack import Place, place_of, stack_of

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


NET = Net()


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (NET, "blocks.1.leaf"),
        (NET.blocks, "1.leaf"),
        (NET.training_step, "blocks.1.leaf"),
        (lambda x: Broken()(x), "blocks.1.leaf"),
        # The outermost module itself has no path, nor has one that is kept outside the registry.
        (Leaf(), None),
        (lambda x: NET(x, is_loose=True), None),
    ],
)
def test_the_innermost_module_is_named_below_the_outermost(
    call: Callable[[Tensor], Tensor], path: str | None
) -> None:
    assert seen(call) == ModulePath(path, "Leaf")


def test_the_names_are_those_of_named_modules_for_shared_modules() -> None:
    net = Net()
    net.again = net.blocks[1].leaf
    expected = next(name for name, module in net.named_modules() if module is net.again)
    assert seen(net).path == expected


def test_a_stack_without_modules_has_neither() -> None:
    assert module_path([place_of(sys._getframe())]) == ModulePath(None, None)


def test_the_paths_below_a_module() -> None:
    net = Net()
    net.again = net.blocks
    net.register_module("none", None)
    every = {id(module): name for name, module in net.named_modules()}
    assert list(paths_below(net).items()) == list(every.items())
    leaf = net.blocks[1].leaf
    assert paths_below(net, {id(leaf), id(net)}) == {id(net): "", id(leaf): "blocks.1.leaf"}
    assert paths_below(net, {0}) == {}


def test_the_running_modules_are_told_once_in_a_row() -> None:
    def place(owner: object, argument: str = "self") -> Place:
        code = compile(f"def f({argument}): pass", "<f>", "exec").co_consts[0]
        frame: Any = SimpleNamespace(f_locals={"self": owner})
        return Place(code, 1, 0, frame)

    net, leaf = Net(), Leaf()
    places = [place(net), place(net), place(leaf), place(net), place("text"), place(leaf, "it")]
    places += [place(leaf, ""), place(leaf, "it, self"), place(net)._replace(frame=None)]
    assert running_modules(places) == [net, leaf, net]


def test_a_net_of_too_many_modules_is_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    names = [name for name, _ in net.named_modules()]
    for most in (3, len(names), len(names) + 1):
        monkeypatch.setattr("cudalens.source.module_path._MAX_MODULES", most)
        assert [*paths_below(net).values()] == names[:most]
        found = paths_below(net, {id(net.blocks[1].leaf)})
        assert [*found.values()] == ["blocks.1.leaf"] * ("blocks.1.leaf" in names[:most])


def test_modules_by_their_paths() -> None:
    net = Net()
    paths = [path for path, _ in modules_below(net)]
    assert paths == ["", "blocks", "blocks.0", "blocks.1", "blocks.1.leaf"]
    assert all(module_at(net, path) is module for path, module in modules_below(net))
    assert module_at(net, "blocks.2") is module_at(net, "loose.0") is None
    shared = nn.Sequential(net.blocks, net.blocks, nn.ReLU())
    assert [path for path, _ in modules_below(shared)][-1] == "2"
    assert sum(module is net.blocks for _, module in modules_below(shared)) == 1


def test_tensors_by_their_paths() -> None:
    net = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Sequential(nn.BatchNorm1d(2)))
    net.register_parameter("scale", nn.Parameter(torch.ones(1)))
    of_norm = [f"1.0.{it}" for it in ("weight", "bias", "running_mean", "running_var")]
    parameters = ["scale", "0.weight", *of_norm[:2]]
    assert [path for path, _ in tensors_below(net, ["_parameters"])] == parameters
    every = dict(tensors_below(net))
    assert [*every] == ["scale", "0.weight", *of_norm, "1.0.num_batches_tracked"]
    assert every["0.weight"] is net[0].weight
    assert [*tensors_below(torch.ones(1))] == []


@pytest.mark.parametrize(
    ("path", "code", "container"),
    [
        ("", "net", ("", [])), ("0", "net[0]", ("", [0])), ("head", "net.head", ("head", [])),
        ("parts.0.1", "net.parts[0][1]", ("parts", [0, 1])),
        ("parts.0.fc1", "net.parts[0].fc1", ("parts.0.fc1", [])),
    ],
)  # fmt: skip
def test_a_path_as_code_and_by_its_container(
    path: str, code: str, container: tuple[str, list[int]]
) -> None:
    assert spelled("net", path) == code
    assert container_of(path) == container
