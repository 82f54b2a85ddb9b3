"""A second backward: what was freed, by which backward, what leads back, and a fix that works."""

from __future__ import annotations

import re

import pytest
import torch

from tests.hostcells import Outcome, run_cell

pytestmark = pytest.mark.usefixtures("sim")

SETUP = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
rnn, cell_, head = nn.LSTM(4, 8).cuda(), nn.RNNCell(4, 8).cuda(), nn.Linear(8, 2).cuda()
maker, judge = nn.Linear(4, 4).cuda(), nn.Linear(4, 1).cuda()
every = [p for m in (rnn, cell_, head, maker, judge) for p in m.parameters()]
optimizer = torch.optim.SGD(every, lr=0.1)
data = [torch.rand(5, 3, 4).cuda() for _ in range(3)]
w = torch.ones(3, device="cuda", requires_grad=True)
"""
LSTM = """
h = None
for x in data:
    out, h = rnn(x, h)
    loss = head(out[-1]).square().mean()
    loss.backward()
    optimizer.step()
    pass
"""
CELL = """
h = torch.zeros(3, 8, device="cuda")
for x in data:
    h = cell_(x[0], h)
    loss = head(h).square().mean()
    loss.backward()
    pass
"""
ATTRIBUTE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.state = nn.RNNCell(4, 8), torch.zeros(3, 8)
    def forward(self, x):
        self.state = self.cell(x, self.state)
        return self.state
model = Model().cuda()
model.state = model.state.cuda()
for x in data:
    loss = model(x[0]).square().mean()
    loss.backward()
    pass
"""
STATES = """
states = [torch.zeros(3, 8, device="cuda")] * 2
for x in data:
    states = [cell_(x[0], states[0]), cell_(x[0], states[1])]
    loss = sum(map(torch.sum, states))
    loss.backward()
    pass
"""
HELPED = """
def back(loss):
    loss.backward()
h = torch.zeros(3, 8, device="cuda")
for x in data:
    h = cell_(x[0], h)
    back(head(h).square().mean())
    pass
"""
TWO = """
cells = nn.LSTMCell(4, 8).cuda()
h, c = torch.zeros(3, 8, device="cuda"), torch.zeros(3, 8, device="cuda")
for x in data:
    h, c = cells(x[0], (h, c))
    loss = head(h).square().mean()
    loss.backward()
    pass
"""
RUNNING = """
total = 0
for x in data:
    total {assign}head(rnn(x)[0][-1]).square().mean()
    total.backward()
    pass
"""
ONCE = """
out = rnn(data[0])[0]
for row in range(2):
    pass
    loss = head(out[row]).square().mean()
    loss.backward()
"""
GAN = """
fake = maker(data[0][0])
judge(fake).mean().backward()
optimizer.step()
(-judge(fake)).mean().backward()
"""


def cell(code: str) -> Outcome:
    """Run lines after the common ones."""
    return run_cell(SETUP + code, fast=False)


def line_of(code: str, text: str) -> int:
    """Return the number of the first line with a text, as a report counts."""
    lines = (SETUP + code).strip().split("\n")
    return next(at for at, line in enumerate(lines, 1) if text in line)


Row = tuple[str, tuple[str, str], str, str, *tuple[str, ...]]


def carried(code: str, name: str, read: str, fix: str) -> Row:
    """Return the row of what is carried from step to step under a name."""
    advice = f"{name} still has the graph of the previous step: add {name} = {fix} after line "
    advice += "<.backward(>"
    said = f" of line <{read}> (", f"After that, line <{read}> used the {name} "
    return (code, ("pass", f"{name} = {fix}"), "carried_state", advice, *said)


KEEP = (
    "keep the graph in line <.backward(> (retain_graph=True), or add the losses and run backward "
    "once"
)
AGAIN = (
    "{0} of line <{0} => serves one backward: make it again, with all that it is made of, before "
    "line <{1}>, or give {0}.detach() to a pass that is not to train it"
)
EITHER = (
    "{0} of line <{0} => serves one backward: keep its graph in line <.backward(> (retain_graph="
    "True), or make it again, with all that it is made of, before line <{1}>. A pass that is not "
    "to train what made {0} takes {0}.detach()"
)
# Of each: the code, what mends it, the rule and the text of the only hint, and what else is said;
# ``<text>`` is the number of the first line with the text.
FREED: dict[str, Row] = {
    "tuple": carried(LSTM, "h", "rnn(x, h)", "tuple(item.detach() for item in h)"),
    "tensor": carried(CELL, "h", "cell_(x[0], h)", "h.detach()"),
    "list": carried(STATES, "states", "cell_(x[0], ", "[item.detach() for item in states]"),
    "sum": carried(RUNNING.format(assign="= total + "), "total", "= total + ", "total.detach()"),
    "sum in place": carried(RUNNING.format(assign="+= "), "total", "total +=", "total.detach()"),
    # Its line is in forward, whose frame is gone: it is named by its text.
    "state of a module": (ATTRIBUTE, ("pass", "model.state = model.state.detach()"),
        "carried_state",
        "self.state still has the graph of the previous step: detach it before the next step, or "
        "start anew"),
    # Where another function calls backward, no line of this one follows it.
    "pass of a function": (HELPED, ("pass", "h = h.detach()"), "carried_state",
        "h still has the graph of the previous step: detach it before the next step, or start "
        "anew"),
    "two states": (TWO, ("pass", "h, c = h.detach(), c.detach()"), "carried_state",
        "h and c still have the graph of the previous step: add h, c = h.detach(), c.detach() "
        "after line <.backward(>", "used the h, c that line <cells(> made before"),
    # Read on both sides of a backward, it is made by a line that has not run again.
    "made once": (ONCE, ("backward()", "backward(retain_graph=True)"), "made_once",
        EITHER.format("out", "loss ="),
        "line <loss => (loss = head(out[row]).square().mean()) used the out that line <out => "
        "made"),
    "made once, with steps": (f"{ONCE}    optimizer.step()\n", ("pass", "out = rnn(data[0])[0]"),
        "made_once", AGAIN.format("out", "loss =")),
    # The other way out: the first pass does not train the maker.
    "a fake and its judge": (GAN, ("\njudge(fake)", "\njudge(fake.detach())"), "made_once",
        AGAIN.format("fake", "(-judge")),
    # Nothing was computed in between that the second pass needs.
    "one loss": ("\nloss = w.exp().sum()\nloss.backward()\n(loss).backward()",
        ("\nloss.backward()", "\nloss.backward(retain_graph=True)"), "backward_twice", KEEP),
    "two losses": ("\nz = w.exp()\na, b = z.sum(), z.mean()\na.backward()\nb.backward()",
        ("a.backward()", "a.backward(retain_graph=True)"), "backward_twice", KEEP),
    "with a gradient": ("\nz = w.exp()\nz.backward(gradient=w.detach())\nz.sum().backward()",
        ("(grad", "(retain_graph=True, grad"), "made_once",
        EITHER.format("z", "z.sum()").partition(". A")[0]),
    # The parameters are others by then: a kept graph would be refused, too.
    "after a step": (
        "loss = head(torch.rand(3, 8).cuda()).sum()\nloss.backward()\noptimizer.step()\n"
        "loss.backward()", ("step()", "step()\nloss = head(torch.rand(3, 8).cuda()).sum()"),
        "backward_twice", "the optimizer has changed the parameters since the backward in line "
        "<.backward(>: run the forward pass again before this one"),
}  # fmt: skip


@pytest.mark.parametrize("row", FREED.values(), ids=FREED)
def test_what_was_freed_is_named_and_the_advice_works(row: Row) -> None:
    code, (old, new), rule, *texts = row
    outcome = cell(code)
    report = outcome.shown
    assert (report.kind, report.certainty) == ("autograd_error", "proven")
    freeing = line_of(code, ".backward(")
    assert report.headline_schema.endswith(f"line {freeing} has freed")
    advice, *said = [
        re.sub("<(.+?)>", lambda found: str(line_of(code, found[1])), text) for text in texts
    ]
    assert [(hint.rule, hint.fix, hint.text) for hint in report.hints] == [(rule, None, advice)]
    assert [text for text in said if text not in report.explanation] == []
    assert report.forward_source is not None
    assert cell(code.replace(old, new)).error is None


def test_of_several_passes_none_is_blamed() -> None:
    """Two came before: which of them freed the graph was not noted."""
    code = (
        "loss = w.exp().sum()\nloss.backward(retain_graph=True)\nloss.backward()\nloss.backward()"
    )
    report = cell(code).shown
    assert report.headline_schema == "a part of the graph of loss was freed by an earlier backward"
    assert "line" not in report.explanation


def test_a_pass_before_the_check_is_not_blamed_on_it() -> None:
    """Nothing of it was recorded: the general words stand."""
    loss = (torch.ones(3, device="cuda", requires_grad=True).exp()).sum()
    loss.backward()
    outcome = run_cell("x = (loss * 1).sum()\nx.backward()", {"loss": loss}, fast=False)
    assert (
        outcome.shown.headline_schema == "a part of the graph of x was freed by an earlier backward"
    )
