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
STEP = "make a new tensor instead of changing the one that backward needs"
PLACES = [
    pytest.param(
        "att = torch.softmax(w, -1)\natt[att < 0.1] = 0\natt.sum().backward()", 2, id="a mask"
    ),
    pytest.param("e = w.exp()\ne[0] = x[0]\ne.sum().backward()", 2, id="another tensor's row"),
    pytest.param("e = w.exp()\ne[0] -= x[0]\ne.sum().backward()", 2, id="an item taken from"),
    pytest.param("e = [w.exp()]\ne[0] += 1\ne[0].sum().backward()", 2, id="an item of a list"),
    pytest.param("e = w.exp()\ne[0] = e[1] * e[0]\ne.sum().backward()", 2, id="read again"),
    pytest.param("out = own(w.sigmoid())\nout.sum().backward()", None, id="the user's own module"),
    pytest.param(
        "h = w[0]\nhs = torch.zeros(3, 4, device='cuda')\nfor t in range(3):\n    hs[t] = h\n"
        "    h = h * hs[t]\nhs.sum().backward()",
        4,
        id="a row in a loop",
    ),
]
MODULES = [
    pytest.param("out = act(w.sigmoid())\nout.sum().backward()", "LeakyReLU", id="a module"),
    pytest.param("out = net(x)\nout.sum().backward()", "ReLU", id="a module in a sequence"),
    pytest.param("out = block(x)\nout.sum().backward()", "ELU", id="in a model's sequence"),
    pytest.param("out = plain(x)\nout.sum().backward()", "ReLU", id="a model's module"),
    pytest.param(
        "out = list(map(act, [w.sigmoid()]))[0]\nout.sum().backward()",
        "LeakyReLU",
        id="called by a library",
    ),
]


def hint_of(text: str) -> Hint:
    """The only hint about a cell whose backward finds a saved tensor modified.

    Issue 17, item 23: the headline is one sentence of at most 100 characters.
    """
    outcome = run_cell(f"{SETUP}{text}", fast=False)
    assert "modified by an inplace operation" in str(outcome.error)
    for line in (outcome.shown.headline, outcome.shown.headline_own):
        assert len(line) <= 100 and "that backward needs" in line
    (hint,) = outcome.shown.hints
    assert (hint.rule, hint.fix, hint.tried) == ("out_of_place", None, None)
    return hint


@pytest.mark.parametrize(("text", "line"), PLACES)
def test_the_changing_line_is_named(sim: simulate.Simulation, text: str, line: int | None) -> None:
    """The place of the change; another line cannot be tried, so it is advice in words."""
    said = hint_of(text).text
    assert said.endswith(f": {STEP}")
    first = len(SETUP.strip().splitlines())
    assert line is None or f"line {first + line}:" in said


@pytest.mark.parametrize(("text", "kind"), MODULES)
def test_a_module_in_place_is_named(sim: simulate.Simulation, text: str, kind: str) -> None:
    """The class that writes over its input."""
    assert hint_of(text).text.startswith(f"{kind} was made with inplace=True")


def test_a_parameter_is_not_replaced(sim: simulate.Simulation) -> None:
    """``p = p + 1`` would make a tensor of it that no optimizer knows."""
    hint = hint_of("y = (p * p).sum()\nwith torch.no_grad():\n    p += 1\ny.backward()")
    assert hint.text.startswith("a parameter is changed between forward and backward")


def test_item_23_what_a_headline_has_no_room_for_is_explained(sim: simulate.Simulation) -> None:
    """A long line is shortened; the whole of it, the tensor and its versions stand below."""
    name = "a_name_of_many_words_that_says_all_of_what_it_holds"
    change = f"{name}[torch.arange(4, device='cuda') > 2] = 0"
    outcome = run_cell(f"{SETUP}{name} = w.exp()\n{change}\n{name}.sum().backward()", fast=False)
    report = outcome.shown
    assert report.headline == f"{change[:62]}… changed a tensor that backward needs"
    assert f": {change}. " in report.explanation
    assert "float32 (4, 4), output 0 of Exp" in report.explanation
    assert "at version 1, and was saved at version 0" in report.explanation


SHARED = "y = torch.ones(3, requires_grad=True)*1; z = y.exp(); z += 1; z.sum().backward()"


@pytest.mark.parametrize(
    "code",
    [
        SHARED,
        f"if x.numel(): {SHARED}",
        SHARED.replace("; z +=", "\nz +="),
        SHARED.replace("z.sum", "'é'; z.sum"),
        SHARED.replace("; z = y.exp(); z += 1;", "; z = y.exp()\nz += 1  # one; two\n").replace(
            "\n ", "\n"
        ),
    ],
)
def test_item_23_of_several_statements_on_a_line_the_one_at_fault_is_named(
    sim: simulate.Simulation, code: str
) -> None:
    """The whole line would be cut before it; a line of one statement is shown as it is typed."""
    report = run_cell(f"{SETUP}{code}", fast=False).shown
    change = "z += 1  # one; two" if "two" in code else "z += 1"
    assert f": {change} changed a tensor that backward needs" in report.headline
    assert len(report.headline) <= 100
    saved = "z = y.exp()" if "; z = y.exp();" in code else None
    assert saved is None or f": {saved}. " in report.explanation


def test_item_23_the_headline_without_the_writing_line_is_short(sim: simulate.Simulation) -> None:
    """Guards alone do not know who wrote; of the rest, the headline holds what fits."""
    outcome = run_cell(f"{SETUP}e = w.exp()\ne += 1\ne.sum().backward()")
    start = "a tensor that backward needs was changed in place: float32 (4, 4), output 0 of Exp"
    assert outcome.shown.headline.startswith(start)
    assert len(outcome.shown.headline) <= 100


def test_item_23_a_long_name_of_a_leaf_is_shortened(sim: simulate.Simulation) -> None:
    """The name is cut, and what is wrong with it is not."""
    report = run_cell(f"{SETUP}{'w' * 60} = w\n{'w' * 60}.add_(1)").shown
    assert len(report.headline) == 100
    assert report.headline.endswith("w… is a leaf that requires grad, and add_ changes it in place")


def test_nothing_of_the_module_stays_alive(sim: simulate.Simulation) -> None:
    """The report holds names, not the modules that it asked."""
    outcome = run_cell(f"{SETUP}out = act(w.sigmoid())\nout.sum().backward()", fast=False)
    assert isinstance(outcome.shown.to_dict(), dict)
    assert "LeakyReLU" in outcome.shown.to_text()
    assert not any(isinstance(value, torch.nn.Module) for value in vars(outcome.shown).values())
