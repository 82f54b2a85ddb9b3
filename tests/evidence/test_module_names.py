"""A module is called by the variable that holds the model, where that is proven."""

from __future__ import annotations

import pytest

from cudalens.core.report import Report
from cudalens.render.html import history_entries
from cudalens.render.words import module_types, with_module_names
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
