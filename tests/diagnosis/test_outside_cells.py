"""Cells made of public questions, each with its thread's address, and every fix applied literally.

A fix that is shown as code stands in the place of the running call, or, an assignment, before its
line.  The cell that is changed so ends without an error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cudalens import simulate
from cudalens.core.report import Report
from cudalens.core.report_types import Hint
from tests.amount import AMOUNT
from tests.diagnosis.host_errors.test_host_errors import CASES
from tests.diagnosis.host_errors.test_host_errors import SETUP as HOST_SETUP
from tests.hostcells import Outcome, run_cell

SETUP = """\
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
"""
CELLS = Path(__file__).parents[1] / "data" / "outside_cells.txt"


def outside_cells() -> Iterator[tuple[str, str, str | None, str]]:
    """The address, the cell, its first fix (``-`` for none) and a piece of the headline."""
    for block in re.split(r"\n(?=\S)", CELLS.read_text(encoding="utf-8").rstrip("\n")):
        address, *lines = block.split("\n")
        *code, fix, says = (line[2:] for line in lines)
        assert fix.startswith("fix: ") and says.startswith("says: ")
        found = fix.removeprefix("fix: ")
        yield address, "\n".join(code), None if found == "-" else found, says.removeprefix("says: ")


def applied(code: str, report: Report, hint: Hint) -> str:
    """Put a fix where it belongs: behind the line that made the values, or at the failing call.

    At a loop it takes the place of what the loop runs over.
    """
    source, fix = report.source, hint.fix
    assert source is not None and source.line is not None and fix is not None
    lines = code.split("\n")
    if hint.at is not None:
        at = hint.at.end_line
        assert at is not None
        is_loop = lines[at - 1].rstrip().endswith(":")
        beside = lines[at if is_loop else at - 1]
        lines.insert(at, beside[: len(beside) - len(beside.lstrip())] + fix)
        return "\n".join(lines)
    try:
        ast.parse(fix, mode="eval")
    except SyntaxError:
        beside = lines[source.line - 1]
        room = beside[: len(beside) - len(beside.lstrip())]
        lines[source.line - 1 : source.line - 1] = [room + line for line in fix.split("\n")]
        return "\n".join(lines)
    if lines[source.line - 1].startswith("for "):
        head, _, _ = lines[source.line - 1].partition(" in ")
        lines[source.line - 1] = f"{head} in {fix}:"
        return "\n".join(lines)
    assert source.line == source.end_line
    line = lines[source.line - 1]
    lines[source.line - 1] = line[: source.column] + fix + line[source.end_column :]
    return "\n".join(lines)


def check_fixes(code: str, outcome: Outcome, sim: simulate.Simulation) -> None:
    """Every fix is said to be tried, and the cell succeeds with it."""
    for hint in outcome.shown.hints:
        assert (hint.fix is not None) is (hint.tried is True)
        if hint.fix is not None:
            sim.reset()
            again = run_cell(applied(code, outcome.shown, hint))
            assert again.error is None, (hint.fix, again.error)


@pytest.mark.parametrize(
    ("address", "code", "fix", "says"), [*outside_cells()][:: AMOUNT.cell_step]
)
def test_a_question_is_answered(
    address: str, code: str, fix: str | None, says: str, sim: simulate.Simulation
) -> None:
    """The observed fact, the fix that was tried or none, and no fix that fails."""
    outcome = run_cell(SETUP + code)
    assert says in outcome.shown.headline_own, address
    assert next((hint.fix for hint in outcome.shown.hints if hint.fix), None) == fix
    assert outcome.shown.limits == ()
    check_fixes(SETUP + code, outcome, sim)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.bad)
def test_every_fix_of_the_catalogue_is_applied(case: object, sim: simulate.Simulation) -> None:
    """The cells of the message patterns."""
    code = f"{HOST_SETUP}{case.setup}\n{case.bad}".strip()  # type: ignore[attr-defined]
    check_fixes(code, run_cell(code), sim)


VALUES = [
    ("z, y = torch.zeros(10, 10).cuda(), torch.arange(1, 11).cuda()", "F.cross_entropy(z, y)"),
    ("z, y = torch.zeros(3, 4).cuda(), torch.tensor([1, -1, 2]).cuda()", "F.cross_entropy(z, y)"),
    ("p, y = torch.tensor([-1.5, 2.0]).cuda(), torch.ones(2).cuda()", "nn.BCELoss()(p, y)"),
    ("p, y = torch.rand(2).cuda(), torch.tensor([0.0, 255.0]).cuda()", "nn.BCELoss()(p, y)"),
    ("p, y = torch.rand(2).cuda(), torch.tensor([-1.0, 1.0]).cuda()", "nn.BCELoss()(p, y)"),
    ("w = torch.tensor([-1.5, 2.0]).cuda()", "torch.multinomial(w, 1)"),
    ("m, i = nn.Embedding(5, 2).cuda(), torch.arange(1, 6).cuda()", "m(i)"),
    ("m = torch.eye(4)[None].cuda().long() * 255; z = torch.zeros(1, 2, 4, 4).cuda()",
     "F.cross_entropy(z, m)"),
]  # fmt: skip


@pytest.mark.parametrize(("setup", "line"), VALUES)
def test_a_fix_of_values_passes_the_guard(setup: str, line: str, sim: simulate.Simulation) -> None:
    """The guard's own predicate finds nothing more in the cell that is changed so."""
    code = f"{SETUP}{setup}\n{line}"
    outcome = run_cell(code)
    assert any(hint.fix for hint in outcome.shown.hints), outcome.shown.hints
    check_fixes(code, outcome, sim)


@pytest.mark.parametrize(
    ("setup", "line"),
    [
        # A cast would round: these are no class numbers.
        ("z, y = torch.randn(3, 4), torch.tensor([0.5, 1.0, 2.0])", "F.nll_loss(z, y)"),
        # Rows that are no one-hot code have no argmax that says the same.
        ("z, y = torch.randn(2, 3), torch.tensor([[1, 1, 0], [0, 1, 0]])", "F.nll_loss(z, y)"),
        # Ten rows of scores and seven others: a table of all with all is not meant.
        ("a, b = torch.randn(10), torch.randn(7)", "a + b"),
        # The batch would be read as features.
        ("fc, x = nn.Linear(8, 2), torch.randn(8, 3)", "fc(x)"),
        # The samples of the batch would be read as the channels of one image.
        ("conv, x = nn.Conv2d(3, 8, 3), torch.randn(3, 1, 16, 16)", "conv(x)"),
        # Samples would be mixed by a view of other rows.
        ("x = torch.randn(4, 6)", "x.view(3, 4)"),
        # What is written to a copy is lost.
        ("a = torch.ones(3).long()", "a.div_(2)"),
        # A mask is no list of rows.
        ("a, m = torch.randn(4, 3), torch.tensor([True, False])", "a[m]"),
        # The classes would be read as the samples: three labels are three samples.
        ("z, y = torch.randn(4, 3), torch.tensor([0, 1, 2])", "F.cross_entropy(z, y)"),
        # Another element stands there after a transposition.
        ("x = torch.randn(4, 3)", "x[:, 3]"),
        # Shares of several classes are no one-hot code.
        ("z, y = torch.randn(2, 2), torch.tensor([[0.5, 0.5], [1, 0]])", "F.nll_loss(z, y)"),
        # Numbers beyond 0 and 1 are no mask, and would be added as one of floats.
        ("q = torch.randn(1, 5, 8); m = torch.full((5, 5), 2)",
         "F.scaled_dot_product_attention(q, q, q, attn_mask=m)"),
        # Two entries fit, and only the user knows which one is meant.
        ("d = {'a': torch.tensor([1]), 'b': torch.tensor([0])}; m = nn.Embedding(2, 4)", "m(d)"),
        # Two tensors fit the module that was not called.
        ("x, h, fc = torch.randn(2, 3), torch.randn(2, 3), nn.Linear(3, 2)", "torch.relu(fc)"),
        # A gray image is not one of three channels without a choice of its colours.
        ("ds = [torch.zeros(3, 8, 8), torch.zeros(1, 8, 8)]",
         "next(iter(torch.utils.data.DataLoader(ds, 2)))"),
        # What would be padded is of different devices: no way to join it succeeds.
        ("ds = [torch.zeros(3), torch.zeros(4).cuda()]",
         "next(iter(torch.utils.data.DataLoader(ds, 2)))"),
        # Records of different fields are no batch of one kind.
        ("ds = [{'x': torch.zeros(3)}, {'y': torch.zeros(3)}]",
         "next(iter(torch.utils.data.DataLoader(ds, 2)))"),
        # Which of two segments a third one is nobody knows.
        ("m, s = nn.Embedding(2, 4).cuda(), torch.tensor([0, 1, 2]).cuda()", "m(s)"),
    ],
)  # fmt: skip
def test_where_the_meaning_would_change_nothing_is_offered(
    setup: str, line: str, sim: simulate.Simulation
) -> None:
    """The call would run with some change, and mean something else."""
    outcome = run_cell(f"{SETUP}{setup}\n{line}")
    assert [hint.fix for hint in outcome.shown.hints if hint.fix] == []


@pytest.mark.parametrize(
    ("setup", "line", "fix"),
    [
        # As many flags as rows are a mask; of other numbers they are a list.
        ("x, m = torch.randn(4, 2), torch.tensor([0.0, 1, 1, 0])", "x[m]", "x[m.bool()]"),
        ("x, m = torch.randn(4, 2), torch.tensor([0.0, 3, 1, 2])", "x[m]", "x[m.long()]"),
        # One row for each sample: the other place of the dimension would pick from one sample.
        ("q, a = torch.randn(5, 4), torch.zeros(5).long()", "q.gather(1, a)",
         "q.gather(1, a.unsqueeze(1))"),
        # The layer takes the length first, or the batch.
        ("m = nn.TransformerEncoderLayer(8, 2); x, p = torch.randn(3, 5, 8), torch.zeros(3, 5) > 0",
         "m(x, src_key_padding_mask=p)", "m(x.transpose(0, 1), src_key_padding_mask=p)"),
        ("m = nn.TransformerEncoderLayer(8, 2, batch_first=True)\n"
         "x, p = torch.randn(3, 5, 8), torch.zeros(5, 3) > 0",
         "m(x, src_key_padding_mask=p)", "m(x, src_key_padding_mask=p.T)"),
        # Boxes of four numbers are left a list, steps of a sequence are padded.
        ("ds = [torch.zeros(1, 4), torch.zeros(2, 4)]",
         "next(iter(torch.utils.data.DataLoader(ds, 2)))",
         "next(iter(torch.utils.data.DataLoader(ds, 2, collate_fn=lambda batch: batch)))"),
        ("ds = [torch.zeros(1, 5), torch.zeros(2, 5)]",
         "next(iter(torch.utils.data.DataLoader(ds, 2)))",
         "next(iter(torch.utils.data.DataLoader(ds, 2, collate_fn=lambda batch: "
         "torch.nn.utils.rnn.pad_sequence(batch, batch_first=True))))"),
    ],
)  # fmt: skip
def test_what_is_meant_follows_from_the_values_and_sizes(
    setup: str, line: str, fix: str, sim: simulate.Simulation
) -> None:
    """Calls that look alike, each with the one change that keeps its meaning."""
    code = f"{SETUP}{setup}\n{line}"
    outcome = run_cell(code)
    assert [item for item in outcome.fixes if item] == [fix]
    check_fixes(code, outcome, sim)


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("step(data)", "; it is data, made on the CPU in line 8: torch.randn(3, 4)"),
        ("step(data * 1)", None),
        ("for data in (data, data): step(data)", None),
    ],
)
def test_the_caller_that_made_an_argument_is_named(
    given: str, origin: str | None, sim: simulate.Simulation
) -> None:
    """By the same object, bound once: of an expression, or a loop's value, nothing is said."""
    code = "model = nn.Linear(4, 2).cuda()\ndef step(x):\n    return model(x)\n"
    outcome = run_cell(f"{SETUP}{code}data = torch.randn(3, 4)\n{given}")
    text = outcome.shown.hints[0].text
    assert outcome.fixes == ['model(x.to("cuda:0"))']
    assert origin in text if origin else "made" not in text


def test_a_trial_leaves_nothing_behind(sim: simulate.Simulation) -> None:
    """Neither the user's tensors nor the random numbers nor a module's statistics change."""
    setup = "m, x = nn.BatchNorm2d(3), torch.randn(3, 16, 16)\nbefore = torch.get_rng_state()\n"
    outcome = run_cell(f"{SETUP}{setup}m(x)")
    assert outcome.fixes == ["m(x.unsqueeze(0))"]
    names = outcome.names
    assert int(names["m"].num_batches_tracked) == 0
    assert bool((names["m"].running_mean == 0).all())
    assert names["before"].equal(names["torch"].get_rng_state())
    assert tuple(names["x"].shape) == (3, 16, 16)


def test_large_tensors_are_tried_without_their_values(sim: simulate.Simulation) -> None:
    """Shapes on the meta device; a cast, whose values count there, is not promised."""
    setup = "x = torch.empty(1, 1, 1).expand(4000, 28, 2000)\nw = torch.empty(1, 1).expand(28, 5)\n"
    assert run_cell(f"{SETUP}{setup}x @ w").fixes[:1] == ["x.transpose(1, 2) @ w"]
    setup = "m, x = nn.Linear(8, 2), torch.empty(1, 1).double().expand(1000000, 8)\n"
    assert not any(run_cell(f"{SETUP}{setup}m(x)").fixes)


def test_the_users_own_code_is_not_run_again(sim: simulate.Simulation) -> None:
    """What a call of theirs gave is not known, and is not computed a second time."""
    setup = "n = []\ndef f(x):\n    n.append(1)\n    return x\nx = torch.randn(2, 3)\n"
    outcome = run_cell(f"{SETUP}{setup}torch.mm(f(x), x)")
    assert len(outcome.names["n"]) == 1


def test_a_kernel_that_checks_nothing_is_not_run(sim: simulate.Simulation) -> None:
    """A negative repeat would write beyond its result on a CPU: the guard is asked before."""
    setup = "x, n = torch.ones(3).cuda(), torch.tensor([1, -5, 2]).cuda()\n"
    outcome = run_cell(f"{SETUP}{setup}x.repeat_interleave(n)")
    assert [hint.fix for hint in outcome.shown.hints if hint.fix] == []
