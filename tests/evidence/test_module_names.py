"""Item 27 of issue 17: a module is called by the variable that holds the model, where proven."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cudalens.core.report import Report
from cudalens.render.calls import module_types, with_calls, with_module_names
from cudalens.render.graph import graph_svg
from cudalens.render.html import history_entries
from tests.blocks import report_of

pytestmark = pytest.mark.usefixtures("sim")


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(5, 2)).cuda()


def test_the_variable_stands_before_the_path_everywhere() -> None:
    net, x = layers(), torch.ones(2, 3, device="cuda")
    report = report_of(lambda: net(x), RuntimeError, nan=True)
    assert report.module_path == "2"
    assert dict(report.graph.module_names) == {"0": "net.0", "1": "net.1", "2": "net.2"}
    assert Report.from_dict(report.to_dict()) == report
    shown = with_calls(with_module_names(report))
    assert shown.module_path == "net.2"
    assert {ops.entry.module_path for ops in history_entries(shown)} >= {"net.0", "net.1", "net.2"}
    drawn = graph_svg(shown.graph, types=module_types(shown))
    assert "Linear net.0" in drawn and "ReLU net.1" in drawn
    assert "net.2" in report.to_text() and "Linear net.0" in report.to_html()


def test_a_finding_names_the_module_of_each_node() -> None:
    """The failing call is a function of the user's cell, the graph has the model's modules."""
    net, x = layers()[:2], torch.ones(2, 3, device="cuda")
    report = report_of(lambda: torch.log(net(x) * 0 - 1), RuntimeError, nan=True)
    assert dict(report.graph.module_names) == {"0": "net.0", "1": "net.1"}
    assert "net.0" in report.to_html()


def test_two_variables_name_none() -> None:
    net, x = layers(), torch.ones(2, 3, device="cuda")
    other = net
    report = report_of(lambda: other(x) if net is other else None, RuntimeError, nan=True)
    assert (report.module_path, report.graph.module_names) == ("2", ())


def test_a_path_of_two_models_names_none() -> None:
    """Both nets have a module 0; only one has a module 2."""
    net, critic = layers(), nn.Sequential(nn.Linear(3, 3)).cuda()
    x = torch.ones(2, 3, device="cuda")
    report = report_of(lambda: net(critic(x)), RuntimeError, nan=True)
    assert dict(report.graph.module_names) == {"1": "net.1", "2": "net.2"}
