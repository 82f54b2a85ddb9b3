"""A module is called by the variable that holds the model, where that is proven."""

from __future__ import annotations

import ast
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cudalens.core.report import Report
from cudalens.evidence import module_names
from cudalens.render.html import history_entries
from cudalens.render.words import module_types, with_module_names
from cudalens.source.locate import CallSite
from tests.hostcells import run_cell

pytestmark = pytest.mark.usefixtures("sim")
SETUP = """
import torch
from torch import nn
net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(5, 2)).cuda()
x = torch.ones(2, 3, device="cuda")
"""


def reported(code: str) -> Report:
    return run_cell(SETUP + code, nan="strict", fast=False).shown


def test_the_variable_stands_before_the_path_everywhere() -> None:
    report = reported("net(x)")
    assert report.module_path == "2"
    assert dict(report.graph.module_names) == {"0": "net.0", "1": "net.1", "2": "net.2"}
    assert Report.from_dict(report.to_dict()) == report
    shown = with_module_names(report)
    assert shown.module_path == "net.2"
    assert {ops.entry.module_path for ops in history_entries(shown)} >= {"net.0", "net.1", "net.2"}
    assert {"net.0": "Linear", "net.1": "ReLU"}.items() <= module_types(shown).items()
    assert "net.2" in report.to_text() and "net.0" in report.to_html()


@pytest.mark.parametrize(
    ("code", "path", "names"),
    [
        # The failing call is a function of the user's cell, the graph has the model's modules.
        ("net = net[:2]\ntorch.log(net(x) * 0 - 1)", None, {"0": "net.0", "1": "net.1"}),
        # Two variables name none.
        ("other = net\nother(x)", "2", {}),
        # A variable of a function proves it, too.
        ("def train(held):\n    held(x)\nmade = [net]\ndel net\ntrain(made.pop())", "2",
         {"0": "held.0", "1": "held.1", "2": "held.2"}),
        # Both nets have a module 0; only one has a module 2.
        ("critic = nn.Sequential(nn.Linear(3, 3)).cuda()\nnet(critic(x))", "2",
         {"1": "net.1", "2": "net.2"}),
        # As of the failing call and a recorded one.
        ("first = nn.Sequential(nn.Linear(3, 5), nn.ReLU()).cuda()\n"
         "second = nn.Sequential(nn.Linear(3, 3)).cuda()\nsecond(first(x))", "0", {"1": "first.1"}),
        # The failing node is of a recorded call.
        ("act = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()).cuda()\nh = act(x)\nh += 1\n"
         "h.sum().backward()", "1", {"0": "act.0", "1": "act.1"}),
    ],
)  # fmt: skip
def test_a_module_has_a_name_where_one_variable_proves_it(
    code: str, path: str | None, names: dict[str, str]
) -> None:
    report = reported(code)
    assert (report.module_path, dict(report.graph.module_names)) == (path, names)
    shown = [name for name in ("net.0", "held.0", "act.0") if name in report.to_html()]
    assert shown == [name for key, name in names.items() if key == "0"]


# --- the parts ------------------------------------------------------------------------------------


class Holder(nn.Module):
    """Two tables, one below the other module."""

    def __init__(self, rows: int = 5) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(rows, 2))
        self.register_buffer("mean", torch.zeros(2))
        self.inner = nn.ModuleList([nn.Linear(2, 2)])


def owners(
    values: dict[str, torch.Tensor], stack: list[Any], **facts: Any
) -> list[tuple[str, ...]]:
    """Return argument, text and attribute of each owner, seen from the caller's variables."""
    found = module_names.owner_modules(
        values, [sys._getframe(1)], stack, facts.get("site", CallSite()), facts.get("line")
    )
    return [(item.argument, item.text, item.kind, item.attribute) for item in found]


def test_the_owner_of_an_argument_is_the_innermost_module_that_has_it() -> None:
    net = Holder()
    inner = net.inner[0]
    kind = f"{__name__}.Holder"
    assert owners({"weight": net.table}, [net])[0][:2] == ("weight", "net")
    assert owners({"weight": net.table}, [net])[0][3] == "table"
    assert kind.endswith(owners({"weight": net.table}, [net])[0][2])
    assert owners({"m": net.mean}, [net, inner])[0][3] == "mean"
    del inner
    net.tied = net.inner[0].weight
    assert owners({"w": net.inner[0].weight}, [net, net.inner[0]]) == [
        ("w", "net.inner[0]", "nn.Linear", "weight")
    ]


@pytest.mark.parametrize(("is_it", "text"), [(True, "f.head"), (False, "net")])
def test_the_owner_that_the_line_calls_has_its_name_there(is_it: bool, text: str) -> None:
    net = Holder()
    node = ast.parse("f.head(x)", mode="eval").body
    line = SimpleNamespace(node=node, value=lambda function: net if is_it else None)
    assert owners({"weight": net.table}, [net], line=line)[0][1] == text


def test_nothing_owns_what_the_line_names_or_no_module_has() -> None:
    net = Holder()
    site = CallSite(names=(SimpleNamespace(key="weight"),))
    assert owners({"weight": net.table}, [net], site=site) == []
    assert len(owners({"other": net.table}, [net], site=site)) == 1
    assert owners({"x": torch.zeros(5, 2)}, [net]) == []
    assert owners({"weight": net.table}, []) == []


def test_a_module_of_two_names_has_none() -> None:
    net = other = Holder()
    assert owners({"weight": net.table}, [net]) == []
    del other
    assert len(owners({"weight": net.table}, [net])) == 1

    def run(self: Holder, _last: Holder, held: Holder) -> list[tuple[str, ...]]:
        return owners({"weight": self.table}, [self])

    assert run(net, net, net)[0][1] == "held"


def others(seen: list[Any], held: Any, size: int, dim: int = 0) -> list[tuple[Any, ...]]:
    found = module_names.other_modules(
        [(module, 3, 0, 9) for module in seen], [held], held.table, size, dim, [sys._getframe(1)]
    )
    return [(item.module, item.calls, item.min, item.max, item.size) for item in found]


def test_other_modules_that_ran_the_line_with_another_bound() -> None:
    net, longer, same = Holder(5), Holder(9), Holder(5)
    layer = nn.Linear(2, 2)
    assert others([longer, same, layer], net, 5) == [("longer", 3, 0, 9, 9)]
    assert others([longer], net, 5, dim=1) == [("longer", 3, 0, 9, 2)]
    assert others([longer], net, 5, dim=2) == []
    assert others([longer], net, 9) == []
    of_another_class = type("Other", (Holder,), {})(9)
    assert others([of_another_class], net, 5) == []
    layers = [longer, same]
    del longer
    assert others(layers, net, 5) == [("layers.0", 3, 0, 9, 9)]
    pair = (layers.pop(0),)
    found = others([*pair], net, 5)
    assert found == [("pair.0", 3, 0, 9, 9)]


@pytest.mark.parametrize("name", ["mean", "plain"])
def test_a_buffer_or_another_tensor_of_a_module_may_set_the_bound(name: str) -> None:
    net, longer = Holder(), Holder()
    for module, size in ((net, 2), (longer, 3)):
        setattr(module, name, torch.zeros(size))
    found = module_names.other_modules(
        [(longer, 3, 0, 9)], [net], getattr(net, name), 2, 0, [sys._getframe()]
    )
    assert [(item.module, item.size) for item in found] == [("longer", 3)]


def test_of_two_modules_that_hold_a_tensor_the_inner_one_is_compared() -> None:
    net, long_net, long_inner = Holder(), Holder(9), nn.Linear(2, 7)
    inner = nn.Linear(2, 5)
    net.tied = inner.weight
    long_net.tied = nn.Parameter(torch.zeros(9, 2))
    seen = [(long_net, 3, 0, 9), (long_inner, 3, 0, 9)]
    frames = [sys._getframe()]
    found = module_names.other_modules(seen, [net, inner], inner.weight, 5, 0, frames)
    assert [item.module for item in found] == ["long_inner"]


def test_a_tensor_that_no_running_module_has_bounds_nothing() -> None:
    net, longer = Holder(5), Holder(9)
    frames = [sys._getframe()]
    seen = [(longer, 3, 0, 9)]
    assert module_names.other_modules(seen, [net], torch.zeros(5, 2), 5, 0, frames) == ()


def test_a_path_below_a_variable_is_that_of_the_module() -> None:
    net = Holder()
    inner = net.inner[0]
    frames = [sys._getframe()]
    assert module_names._path_of(inner, frames) == "net.inner.0"
    _hidden = nn.Linear(1, 1)
    assert module_names._path_of(_hidden, frames) is None

    def method(self: nn.Module) -> str | None:
        return module_names._path_of(self, [sys._getframe()])

    assert method(inner) is None
