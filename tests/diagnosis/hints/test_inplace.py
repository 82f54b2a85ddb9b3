"""A saved tensor that was changed in place: the fix of each kind is pasted, and backward works."""

from __future__ import annotations

import pytest
import torch

from cudalens import simulate
from cudalens.core.report_types import Hint
from tests.hostcells import run_cell

SETUP = """
import torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(4, 4, device="cuda")
w = torch.randn(4, 4, device="cuda", requires_grad=True)
p = torch.ones(5, device="cuda", requires_grad=True)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Sigmoid(), nn.ELU(inplace=True)))
        self.act = nn.ReLU(inplace=True)
    def forward(self, x):
        return self.net(x)
class Plain(Block):
    def forward(self, x):
        return self.act(torch.sigmoid(x * w))
class Rectifier(nn.ReLU):
    pass
class Own(nn.Module):
    inplace = True
    def forward(self, x):
        return x.relu_()
act, own = nn.LeakyReLU(inplace=True), Own().cuda()
net = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.ReLU(inplace=True)).cuda()
block, plain = Block().cuda(), Plain().cuda()
"""
PASTED = [
    pytest.param(
        "att = torch.softmax(w, -1)\natt[att < 0.1] = 0\natt.sum().backward()",
        "att = att.masked_fill(att < 0.1, 0)",
        id="a mask",
    ),
    pytest.param(
        "e = w.exp()\ne[e > 1] = -1.5\ne.sum().backward()",
        "e = e.masked_fill(e > 1, -1.5)",
        id="a negative number",
    ),
    pytest.param(
        "e = w.exp()\ne[w > 1] = 0\ne.sum().backward()",
        "e = e.clone(); e[w > 1] = 0",
        id="a mask of another tensor",
    ),
    pytest.param(
        "e = w.exp()\ne[0] = x[0]\ne.sum().backward()",
        "e = e.clone(); e[0] = x[0]",
        id="another tensor's row",
    ),
    pytest.param(
        "e = w.exp()\ne[0] -= x[0]\ne.sum().backward()",
        "e = e.clone(); e[0] -= x[0]",
        id="an item that is taken from",
    ),
    pytest.param(
        "e = w.exp()\ne[e is not None] = 0\ne.sum().backward()",
        "e = e.clone(); e[e is not None] = 0",
        id="no mask",
    ),
    pytest.param(
        "e = w.exp()\ne[0] += 1\ne.sum().backward()",
        "e = e.clone(); e[0] += 1",
        id="an item that is added to",
    ),
    pytest.param(
        "h = w[0]\nhs = torch.zeros(3, 4, device='cuda')\nfor t in range(3):\n    hs[t] = h\n"
        "    h = h * hs[t]\nhs.sum().backward()",
        "hs = hs.clone(); hs[t] = h",
        id="a row in a loop",
    ),
    pytest.param(
        "out = act(w.sigmoid())\nout.sum().backward()",
        "act.inplace = False",
        id="a module",
    ),
    pytest.param(
        "out = net(x)\nout.sum().backward()",
        "net[2].inplace = False",
        id="a module in a sequence",
    ),
    pytest.param(
        "out = block(x)\nout.sum().backward()",
        "self.net[1][1].inplace = False",
        id="a module in a model's sequence",
    ),
    pytest.param(
        "out = plain(x)\nout.sum().backward()",
        "self.act.inplace = False",
        id="a model's module",
    ),
]


def hint_of(text: str) -> Hint:
    """The first hint about a cell whose backward finds a saved tensor modified."""
    outcome = run_cell(f"{SETUP}{text}", fast=False)
    assert "modified by an inplace operation" in str(outcome.error)
    hint = outcome.shown.hints[0]
    assert hint.rule == "out_of_place"
    return hint


def pasted(text: str, fix: str) -> str:
    """Put a fix in the place that it is meant for: its line's, or before the module's call."""
    if fix.startswith("self."):
        fix = fix.replace("self.", "block." if "block" in text else "plain.")
    if fix.endswith(".inplace = False"):
        return f"{fix}\n{text}"
    name = fix.partition(" ")[0]
    (line,) = [item for item in text.splitlines() if item.strip().startswith(f"{name}[")]
    indent = line[: len(line) - len(line.lstrip())]
    return text.replace(line, f"{indent}{fix}")


@pytest.mark.parametrize(("text", "fix"), PASTED)
def test_the_fix_works_where_it_is_pasted(sim: simulate.Simulation, text: str, fix: str) -> None:
    """The same cell with the suggested line trains; without it, it does not."""
    assert hint_of(text).fix == fix
    sim.reset()
    exec(f"{SETUP}{pasted(text, fix)}", {})


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("e = [w.exp()]\ne[0] += 1\ne[0].sum().backward()", id="an item of a list"),
        pytest.param("e = w.exp()\ne[0] = e[1] * e[0]\ne.sum().backward()", id="read again"),
        pytest.param("e = w.exp()\ne[0] *= w[1]\ne.sum().backward()", id="a product"),
        pytest.param("out = own(w.sigmoid())\nout.sum().backward()", id="the user's own module"),
    ],
)
def test_no_line_is_made_up(sim: simulate.Simulation, text: str) -> None:
    """What a copy would not mend, and what is no tensor's item, gets words only."""
    hint = hint_of(text)
    assert hint.fix is None
    assert hint.text == "make a new tensor instead of changing the one that backward needs"


def test_a_module_that_a_library_calls_is_named_without_a_line(sim: simulate.Simulation) -> None:
    """Where the call on the user's line is not the module's own, its name there is not known."""
    text = "out = list(map(act, [w.sigmoid()]))[0]\nout.sum().backward()"
    hint = hint_of(text)
    assert hint.text.startswith("LeakyReLU was made with inplace=True")
    assert hint.fix is None


def test_a_parameter_is_not_replaced(sim: simulate.Simulation) -> None:
    """``p = p + 1`` would make a tensor of it that no optimizer knows."""
    hint = hint_of("y = (p * p).sum()\nwith torch.no_grad():\n    p += 1\ny.backward()")
    assert hint.text.startswith("a parameter is changed between forward and backward")
    assert hint.fix is None
    plain = hint_of("m = 2 * p.detach()\ny = (p * m).sum()\nm += 1\ny.backward()")
    assert plain.fix == "m = m + 1"


def test_nothing_of_the_module_stays_alive(sim: simulate.Simulation) -> None:
    """The report holds names, not the modules that it asked."""
    outcome = run_cell(f"{SETUP}out = act(w.sigmoid())\nout.sum().backward()", fast=False)
    assert isinstance(outcome.shown.to_dict(), dict)
    assert "LeakyReLU" in outcome.shown.to_text()
    assert not any(isinstance(value, torch.nn.Module) for value in vars(outcome.shown).values())
