"""A saved tensor that was changed in place: what changed it, and what to do instead."""

from __future__ import annotations

import re

import pytest
import torch

from cudalens.core.report_types import Hint
from tests.hostcells import run_cell

pytestmark = pytest.mark.usefixtures("sim")
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
PLAIN = "{} was made with inplace=True"
CHANGES = [
    # The place of the change; what no statement alone replaces is advice in words.
    ("a mask", "e = torch.softmax(w, -1)\ne[e < 0.1] = 0", 2, STEP),
    ("another tensor's row", "e = w.exp()\ne[0] = x[0]", 2, STEP),
    ("an item taken from", "e = w.exp()\ne[0] -= x[0]", 2, STEP),
    ("an item of a list", "es = [w.exp()]\nes[0] += 1\ne = es[0]", 2, STEP),
    ("read again", "e = w.exp()\ne[0] = e[1] * e[0]", 2, STEP),
    ("a row in a loop", "h = w[0]\ne = torch.zeros(3, 4, device='cuda')\nfor t in range(3):\n"
     "    e[t] = h\n    h = h * e[t]", 4, STEP),
    ("the user's own module", "e = own(w.sigmoid())", None, STEP),
    # The class that writes over its input.
    ("a module", "e = act(w.sigmoid())", None, PLAIN.format("LeakyReLU")),
    ("a module in a sequence", "e = net(x)", None, PLAIN.format("ReLU")),
    ("in a model's sequence", "e = block(x)", None, PLAIN.format("ELU")),
    ("a model's module", "e = plain(x)", None, PLAIN.format("ReLU")),
    ("called by a library", "e = list(map(act, [w.sigmoid()]))[0]", None,
     PLAIN.format("LeakyReLU")),
    # ``p = p + 1`` would make a tensor of it that no optimizer knows.
    ("a parameter", "e = p * p\nwith torch.no_grad():\n    p += 1", None,
     "a parameter is changed between forward and backward"),
]  # fmt: skip


def hint_of(text: str) -> Hint:
    """The only hint about a cell whose backward finds a saved tensor modified.

    The headline is one sentence of at most 100 characters.
    """
    outcome = run_cell(f"{SETUP}{text}", fast=False)
    assert "modified by an inplace operation" in str(outcome.error)
    for line in (outcome.shown.headline_schema, outcome.shown.headline):
        assert len(line) <= 100 and "backward needs" in line
    (hint,) = outcome.shown.hints
    assert (hint.rule, hint.fix, hint.tried) == ("out_of_place", None, None)
    return hint


@pytest.mark.parametrize(("name", "text", "line", "says"), CHANGES, ids=lambda value: str(value))
def test_what_changed_the_tensor_is_named(
    name: str, text: str, line: int | None, says: str
) -> None:
    """The line, the module or the parameter, and what to do in its place."""
    said = hint_of(f"{text}\ne.sum().backward()").text
    assert says == STEP or says in said
    assert line is None or f"line {len(SETUP.strip().splitlines()) + line}" in said


IN_A_CALLER = "def shift(e):\n    e += 1\ne = w.sigmoid()\nshift(e)"


@pytest.mark.parametrize(
    ("code", "new"),
    [
        ("e = w.sigmoid()\ne += 1.0  # harmless", "line 27: e = e + 1.0 makes a new tensor"),
        (
            "e = w.sigmoid()\ne.clamp_(0.1, max=1 - 0.1)",
            "line 27: e = e.clamp(0.1, max=1 - 0.1) makes a new tensor",
        ),
        ("e = w.sigmoid()\ne[0] = x[0]", "before line 27: e = e.clone(), so that"),
        (
            "e = w.sigmoid()\nother = w.exp()\nother += 1\ne += 1\ne = e * other",
            "makes a new tensor",
        ),
        (
            "e = w.sigmoid()\ne *= 2\ne += 1",
            "line 27: e = e * 2 makes a new tensor (line 28 changes it too)",
        ),
        ("e = w.sigmoid()\ne += x.double()", "line 27: e = e + x.double() makes a new tensor"),
        ("e = w.sigmoid()\ne += len('ab')", "line 27: e = e + len('ab') makes a new tensor"),
        (
            "e = w.sigmoid()\nrow = e[0]\nrow += 1",
            "changes row, which another name has too: change a copy of it",
        ),
        (IN_A_CALLER, "changes e, which another name has too: change a copy of it"),
    ],
    ids=[
        "an operator",
        "a method",
        "a part",
        "two tensors",
        "two lines",
        "another dtype",
        "no literal",
        "a view",
        "a caller's tensor",
    ],
)
def test_the_first_write_is_to_make_a_new_tensor(code: str, new: str) -> None:
    """Not where that would leave the tensor that others have as it was."""
    words = hint_of(f"{code}\n(e * e).sum().backward()").text
    assert new in words


@pytest.mark.parametrize("change", ["es[0] += 1", "es[0].zero_()", "e.zero_()", "e.fill_(2)"])
def test_no_statement_is_given_where_none_is_certain(change: str) -> None:
    """What is subscripted may be a list, and some methods have no other form."""
    code = f"e = w.sigmoid()\nes = [e]\n{change}\n(e * e).sum().backward()"
    text = hint_of(code).text
    assert text.startswith("make a new tensor in line ")
    assert text.endswith(" instead of changing the one that backward needs")


def test_what_a_headline_has_no_room_for_is_explained() -> None:
    """A long line is shortened; the whole of it, the tensor and its versions stand below."""
    name = "a_name_of_many_words_that_says_all_of_what_it_holds"
    change = f"{name}[torch.arange(4, device='cuda') > 2] = 0"
    outcome = run_cell(f"{SETUP}{name} = w.exp()\n{change}\n{name}.sum().backward()", fast=False)
    report = outcome.shown
    where = f"in line {len(SETUP.strip().splitlines()) + 2} changed a tensor, which backward needs"
    assert re.fullmatch(rf"(.+)… {where}", report.headline_schema)
    assert change.startswith(report.headline_schema.partition("…")[0])
    assert f"`{change}` at " in report.explanation
    assert "float32 [4, 4], output 0 of Exp" in report.explanation
    assert "at version 0, and is at version 1 now: changed in place by" in report.explanation


SHARED = "y = torch.ones(3, requires_grad=True)*1; z = y.exp(); z += 1; z.sum().backward()"


@pytest.mark.parametrize(
    "code",
    [
        SHARED,
        f"if x.numel(): {SHARED}",
        SHARED.replace("; z +=", "\nz +="),
        SHARED.replace("z.sum", "'é'; z.sum"),
        SHARED.replace("; z = y.exp(); z += 1; ", "; z = y.exp()\nz += 1  # one; two\n"),
    ],
)
def test_of_several_statements_on_a_line_the_one_at_fault_is_named(code: str) -> None:
    """The whole line would be cut before it; a line of one statement is shown as it is typed."""
    report = run_cell(f"{SETUP}{code}", fast=False).shown
    assert report.headline_schema.startswith("z += 1 in line ")
    assert report.headline_schema.endswith(" changed z, which backward needs")
    assert len(report.headline_schema) <= 100
    saved = "z = y.exp()" if "; z = y.exp();" in code else None
    assert saved is None or f"`{saved}` at " in report.explanation


def test_the_headline_without_the_writing_line_is_short() -> None:
    """Guards alone do not know who wrote; of the rest, the headline holds what fits."""
    outcome = run_cell(f"{SETUP}e = w.exp()\ne += 1\ne.sum().backward()")
    start = "a tensor that backward needs was changed in place: float32 [4, 4], output 0 of Exp"
    assert outcome.shown.headline_schema.startswith(start)
    assert len(outcome.shown.headline_schema) <= 100


def test_nothing_of_the_module_stays_alive() -> None:
    """The report holds names, not the modules that it asked."""
    outcome = run_cell(f"{SETUP}out = act(w.sigmoid())\nout.sum().backward()", fast=False)
    assert isinstance(outcome.shown.to_dict(), dict)
    assert "LeakyReLU" in outcome.shown.to_text()
    assert not any(isinstance(value, torch.nn.Module) for value in vars(outcome.shown).values())
