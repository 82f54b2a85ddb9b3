"""Who changed what backward needs: its line in the code, its node in the graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cudalens import Report
from cudalens.render.words import page_link
from tests.hostcells import run_cell

PAGES = Path(__file__).parents[2] / "docs" / "errors"


NEAR = "y = x.exp()\ny += 1\ny.sum().backward()"
FAR = "y = x.exp()\nz = y * 2\ny += 1\n" + "count = 0\n" * 12 + "z.sum().backward()"
TWICE = "y = x.exp().sum()\ny.backward()\ny.backward()"
NO_GRADIENT = "x.detach().sum().backward()"
NO_MEMORY = """raise RuntimeError(
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
)"""


def reported(code: str) -> Report:
    """Return the report of a cell that torch refuses."""
    return run_cell(code, {"x": torch.ones(3, requires_grad=True)}, fast=False).shown


@pytest.mark.parametrize(("code", "line"), [(NEAR, 2), (FAR, 3)])
def test_the_line_at_fault_stands_in_the_code(code: str, line: int) -> None:
    """Both lines are drawn, when far apart with a sign that some are left out."""
    report = reported(code)
    assert report.kind == "autograd_error"
    assert report.headline_schema == f"y += 1 in line {line} changed y, which backward needs"
    assert "y = x.exp()" in report.explanation
    assert f"y += 1 in line {line} changed y" in report.to_html()
    (hint,) = report.hints
    assert hint.text == f"line {line}: y = y + 1 makes a new tensor"
    for text, mark in ((report.to_text(), "◂"), (report.to_html(), "◂</span>")):
        assert "y += 1" in text
        assert f"{mark} changes it" in text
        assert "sum().backward()" in text


def test_the_node_at_fault_is_marked() -> None:
    """Where backward leads over the write; a graph that does not has no mark."""
    marked = [node for node in reported(NEAR).graph.nodes if node.role == "bad_input"]
    assert [(node.op, node.source and node.source.text) for node in marked] == [
        ("torch.Tensor.add_", "y += 1")
    ]
    assert not [node for node in reported(FAR).graph.nodes if node.role == "bad_input"]


@pytest.mark.parametrize(
    ("code", "page"),
    [
        (NEAR, "modified-by-an-inplace-operation"),
        (FAR, "modified-by-an-inplace-operation"),
        (TWICE, "backward-a-second-time"),
        (NO_MEMORY, "cublas-alloc-failed"),
        (NO_GRADIENT, ""),
    ],
)
def test_a_report_links_the_page_on_its_error(code: str, page: str) -> None:
    """Of the pages of ``docs/errors``; an error without a page has no link."""
    report = reported(code)
    link = page_link(report)
    address = link.address if link else ""
    assert address.rpartition("/")[2] == (page and f"{page}.html")
    assert not page or (PAGES / f"{page}.md").is_file()
    assert not page or f'href="{address}"' in report.to_html()


LOOP = """
import torch
from torch import nn
rnn, head = nn.GRUCell(4, 6), nn.Linear(6, 1)
opt = torch.optim.SGD([*rnn.parameters(), *head.parameters()], lr=0.1)
hidden = torch.zeros(2, 6)
for step in range(3):
    hidden = rnn(torch.randn(2, 4), hidden)
    loss = head(hidden).mean()
    {before}
    loss.backward(retain_graph=True)
    opt.step(){after}
"""
TWO_OPTIMIZERS = """
import torch
from torch import nn
actor, critic = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
of_critic = torch.optim.SGD(critic.parameters(), 0.1)
value = critic(actor(torch.randn(3, 4)))
value.pow(2).mean().backward(retain_graph=True)
of_critic.step()
value = {value}
(-value.mean()).backward()
"""


def test_a_state_that_is_carried_over_a_step_is_named() -> None:
    """Keeping the graph does not help: the parameters are others."""
    (hint,) = run_cell(LOOP.format(before="", after=""), fast=False).shown.hints
    assert hint.rule == "carried_state"
    assert hint.text.startswith("hidden still has the graph of the previous step, and line 11 ")
    assert "add hidden = hidden.detach() after line 10" in hint.text
    assert "retain_graph=True does not help" in hint.text
    detached = LOOP.format(before="", after="\n    hidden = hidden.detach()")
    assert run_cell(detached, fast=False).error is None


def test_a_step_before_the_backward_carries_nothing() -> None:
    (hint,) = run_cell(LOOP.format(before="opt.step()", after=""), fast=False).shown.hints
    assert hint.rule == "out_of_place"
    assert "with which line 8 made loss: run lines 7 and 8 again" in hint.text


def test_what_another_optimizer_has_stepped_over_is_named() -> None:
    (hint,) = run_cell(TWO_OPTIMIZERS.format(value="value * 1"), fast=False).shown.hints
    assert "with which line 5 made value: run line 5 again" in hint.text
    again = "critic(actor(torch.randn(3, 4)))"
    assert run_cell(TWO_OPTIMIZERS.format(value=again), fast=False).error is None


GAN = """\
import torch
from torch import nn
G, D = nn.Linear(2, 3), nn.Linear(3, 1)
opt = torch.optim.SGD(D.parameters(), lr=0.1)
for step in range(3):
    fake = D(G(torch.randn(4, 2)))
    d_loss = -fake.mean()
    g_loss = (-fake).mean()
    d_loss.backward(retain_graph=True)
    opt.step(){again}
    g_loss.backward()
"""


def test_the_lines_to_run_again_after_a_step_are_enough() -> None:
    """One of them alone leads to the same error, which the advice must not."""
    (hint,) = run_cell(GAN.format(again=""), fast=False).shown.hints
    assert "run lines 6 and 8 again after it" in hint.text
    lines = GAN.splitlines()
    for numbers, fails in (((6, 8), False), ((6,), True)):
        again = "".join(f"\n{lines[number - 1]}" for number in numbers)
        assert (run_cell(GAN.format(again=again), fast=False).error is not None) is fails
