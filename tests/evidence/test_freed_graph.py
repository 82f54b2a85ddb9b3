"""A second backward: what was freed, by which backward, what leads back, and a fix that works."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cudalens.evidence.freed_graph import is_freed
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
    {fix}
"""
CELL = """
h = torch.zeros(3, 8, device="cuda")
for x in data:
    h = cell_(x[0], h)
    loss = head(h).square().mean()
    loss.backward()
    {fix}
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
    {fix}
"""
STATES = """
states = [torch.zeros(3, 8, device="cuda")] * 2
for x in data:
    states = [cell_(x[0], states[0]), cell_(x[0], states[1])]
    loss = sum(map(torch.sum, states))
    loss.backward()
    {fix}
"""
RUNNING = """
total = 0
for x in data:
    total {assign}head(rnn(x)[0][-1]).square().mean()
    total.backward()
    {fix}
"""
ONCE = """
out = rnn(data[0])[0]
for row in range(2):
    {fix}
    loss = head(out[row]).square().mean()
    loss.backward()
"""
GAN = """
fake = maker(data[0][0])
judge(fake{fix}).mean().backward()
optimizer.step()
(-judge(fake)).mean().backward()
"""


def cell(code: str) -> Outcome:
    """Run lines after the common ones."""
    return run_cell(SETUP + code, fast=False)


def line_of(code: str, text: str) -> int:
    """Return the number of the only line with a text, as a report counts."""
    lines = (SETUP + code).strip().split("\n")
    (found,) = [at for at, line in enumerate(lines, 1) if text in line]
    return found


@pytest.mark.parametrize(
    ("code", "read", "fix"),
    [
        (LSTM, "rnn(x, h)", "h = tuple(item.detach() for item in h)"),
        (CELL, "cell_(x[0], h)", "h = h.detach()"),
        (STATES, "cell_(x[0], states[0])", "states = [item.detach() for item in states]"),
        (RUNNING.replace("{assign}", "= total + "), "= total + ", "total = total.detach()"),
        (RUNNING.replace("{assign}", "+= "), "total +=", "total = total.detach()"),
    ],
    ids=["tuple", "tensor", "list", "sum", "sum in place"],
)
def test_what_is_carried_from_step_to_step_is_named(code: str, read: str, fix: str) -> None:
    failing = code.replace("{fix}", "pass")
    outcome = cell(failing)
    reading, freeing = line_of(failing, read), line_of(failing, ".backward()")
    report = outcome.shown
    assert report.kind == "autograd_error" and report.certainty == "proven"
    assert report.headline.endswith(f"which backward in line {freeing} has freed")
    assert f" of line {reading} (" in report.explanation
    assert f"After that, line {reading} read " in report.explanation
    (hint,) = [item for item in report.hints if item.rule == "carried_state"]
    assert hint.text.endswith(f"detach it after the backward in line {freeing}")
    assert report.forward_source is not None
    assert cell(code.replace("{fix}", fix)).error is None


def test_a_state_of_a_module_is_carried_too() -> None:
    """Its line stands in forward, whose frame is gone: the lines are told, and no name."""
    failing = ATTRIBUTE.replace("{fix}", "pass")
    outcome = cell(failing)
    reading = line_of(failing, "self.cell(x, self.state)")
    (hint,) = [item for item in outcome.shown.hints if item.rule == "carried_state"]
    assert hint.fix is None
    assert hint.text.startswith(f"line {reading} reads what line {reading} made in an earlier step")
    fixed = ATTRIBUTE.replace("{fix}", "model.state = model.state.detach()")
    assert cell(fixed).error is None


def test_what_is_made_once_is_to_be_made_again() -> None:
    """Read on both sides of a backward, it is made by a line that has not run again."""
    failing = ONCE.replace("{fix}", "pass")
    outcome = cell(failing)
    made, reading = line_of(failing, "out = rnn"), line_of(failing, "loss = head")
    reads = f"line {reading} (loss = head(out[row]).square().mean()) read out"
    assert f"{reads} as line {made} had" in outcome.shown.explanation
    (hint,) = [item for item in outcome.shown.hints if item.rule == "made_once"]
    assert "(retain_graph=True), or make it again" in hint.text
    assert (
        cell(failing.replace("loss.backward()", "loss.backward(retain_graph=True)")).error is None
    )
    stepping = ONCE + "    optimizer.step()\n"
    (hint,) = cell(stepping.replace("{fix}", "pass")).shown.hints
    assert "make it again before line" in hint.text and "retain_graph" not in hint.text
    assert cell(stepping.replace("{fix}", "out = rnn(data[0])[0]")).error is None


def test_a_fake_goes_to_its_judge_detached() -> None:
    """The other way out: the first pass does not train the maker."""
    outcome = cell(GAN.replace("{fix}", ""))
    (hint,) = [item for item in outcome.shown.hints if item.rule == "made_once"]
    assert "or give fake.detach() to the pass that does not train it" in hint.text
    assert cell(GAN.replace("{fix}", ".detach()")).error is None


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        ("loss = w.exp().sum()\n{}\n(loss).backward()", "loss.backward(retain_graph=True)"),
        (
            "y = w.exp()\na, b = y.sum(), y.mean()\n{}\nb.backward()",
            "a.backward(retain_graph=True)",
        ),
        (
            "y = w.exp()\n{}\ny.sum().backward()",
            "y.backward(retain_graph=True, gradient=torch.ones(3, device='cuda'))",
        ),
    ],
    ids=["one loss", "two losses", "with a gradient"],
)
def test_one_graph_for_two_passes_is_kept(code: str, fix: str) -> None:
    """Nothing was computed in between that the second pass needs."""
    first = fix.replace("retain_graph=True, ", "").replace("retain_graph=True", "")
    failing = "\n" + code.format(first)
    outcome = cell(failing)
    (hint,) = outcome.shown.hints
    assert f" graph in line {line_of(failing, first)} (retain_graph=True)" in hint.text
    assert f"which backward in line {line_of(failing, first)} has freed" in outcome.shown.headline
    assert cell("\n" + code.format(fix)).error is None


def test_after_a_step_no_graph_is_to_be_kept() -> None:
    """The parameters are others by then: a kept graph would be refused, too."""
    code = "loss = head(torch.rand(3, 8).cuda()).sum()\nloss.backward()\n{}loss.backward()"
    stepped = cell(code.format("optimizer.step()\n"))
    assert stepped.fixes == [None]
    assert any("run the forward pass again" in hint.text for hint in stepped.shown.hints)
    assert "retain_graph=True" in cell(code.format("")).shown.hints[0].text


def test_of_several_passes_none_is_blamed() -> None:
    """Two came before: which of them freed the graph was not noted."""
    code = (
        "loss = w.exp().sum()\nloss.backward(retain_graph=True)\nloss.backward()\nloss.backward()"
    )
    report = cell(code).shown
    assert report.headline == "a part of the graph of loss was freed by an earlier backward"
    assert "line" not in report.explanation


def test_a_pass_before_the_check_is_not_blamed_on_it() -> None:
    """Nothing of it was recorded: the general words stand."""
    loss = (torch.ones(3, device="cuda", requires_grad=True).exp()).sum()
    loss.backward()
    outcome = run_cell("x = (loss * 1).sum()\nx.backward()", {"loss": loss}, fast=False)
    assert outcome.shown.headline == "a part of the graph of x was freed by an earlier backward"


# --- a node that says whether it is freed ---------------------------------------------------------


class Doubled(torch.autograd.Function):
    """Saves its input."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * 2 + x * 0


@pytest.fixture
def leaf() -> Tensor:
    return torch.ones(3, requires_grad=True)


MAKERS = {
    "its result": lambda x: x.exp(),
    "one of two": lambda x: x * torch.ones(3),
    "a list": lambda x: x[torch.tensor([0, 1])],
    "a Function": Doubled.apply,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_node_tells_whether_it_is_freed(make: object, leaf: Tensor) -> None:
    result = make(leaf)  # type: ignore[operator]
    assert not is_freed(result.grad_fn)
    result.sum().backward(retain_graph=True)
    assert not is_freed(result.grad_fn)
    result.sum().backward()
    assert is_freed(result.grad_fn)


def test_a_node_that_saves_nothing_is_never_freed(leaf: Tensor) -> None:
    result = leaf + 1
    result.sum().backward()
    assert not is_freed(result.grad_fn)


def test_what_hooks_have_packed_is_not_unpacked(leaf: Tensor) -> None:
    """To unpack could compute the forward pass again, or read a file."""
    calls: list[str] = []

    def unpack(number: int) -> Tensor:
        calls.append("unpacked")
        return torch.ones(3)

    with torch.autograd.graph.saved_tensors_hooks(lambda _: 3, unpack):
        result = leaf.exp()
    assert not is_freed(result.grad_fn)
    assert calls == []
    result.sum().backward()
    assert is_freed(result.grad_fn)
    assert calls == ["unpacked"]
