"""Cells of public threads that were written down before anything was tuned to them.

A block of a file is a thread's address, a cell, and what is known of it: the true ``cause``, the
``repair`` that the thread confirmed (pairs of text), and the facts of the report.
``says``, ``not`` and ``fix`` are for who judges the advice: what it has to hold, what would lead
astray, and the code that is right.  Of these the tests read ``not``, for code that is shown.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cudalens import simulate
from cudalens.core.report import Report
from cudalens.core.report_types import Hint
from tests.amount import AMOUNT
from tests.hostcells import SETUP, Outcome, applied, check_with_another_batch, run_cell

pytestmark = pytest.mark.usefixtures("sim")
DATA = Path(__file__).parents[1] / "data"
FILES = ("unseen_cells.txt", "fresh_cells.txt")
NAN = "# --nan\n"
"""The first line of a cell that is run until its first NaN."""
FACT = re.compile(r"  (cause|repair|kind|op|argument|value|line|older|says|not|fix): (.+)")

Cell = tuple[str, dict[str, str]]


def cells() -> Iterator[tuple[str, Cell]]:
    """The address of the thread; its cell and what is known of it."""
    texts = [(DATA / name).read_text(encoding="utf-8").rstrip("\n") for name in FILES]
    for block in re.split(r"\n(?=\S)", "\n".join(texts)):
        name, *lines = block.split("\n")
        facts = [FACT.fullmatch(line) for line in lines]
        code = [line[2:] for line, fact in zip(lines, facts, strict=True) if not fact]
        yield name, ("\n".join(code), {fact[1]: fact[2] for fact in facts if fact})


def run(code: str) -> Outcome:
    """Run a cell under the full check."""
    if "transformers" in code:
        pytest.importorskip("transformers")
    random.seed(0)
    np.random.seed(0)
    return run_cell(SETUP + code.removeprefix(NAN), fast=False, nan=code.startswith(NAN))


def parameters(outcome: Outcome) -> dict[str, Any]:
    """The numbers of each parameter that a cell has left, and whether it has a gradient."""
    return {
        f"{name}.{path}": (item.grad is not None, item.detach().cpu())
        for name, module in outcome.names.items()
        if isinstance(module, nn.Module)
        for path, item in module.named_parameters()
    }


def changed(code: str, repair: str) -> str:
    """Apply a repair: texts and what takes their place, in turn."""
    texts = repair.replace("\\n", "\n").split(" => ")
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        assert old in code
        code = code.replace(old, new)
    return code


FAILING = {name: cell for name, cell in cells() if cell[1]["kind"] != "none"}
SILENT = {name: code for name, (code, facts) in cells() if facts["kind"] == "none"}


def short(address: str) -> str:
    """The repository and the number of a thread."""
    return address.removeprefix("https://github.com/")


@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
@pytest.mark.parametrize("thread", [*FAILING][:: AMOUNT.cell_step], ids=short)
def test_a_failing_cell_of_a_thread(thread: str, sim: simulate.Simulation) -> None:
    """Its facts are right, its repair is silent, and code that is shown does what the repair does.

    The cell is run once for all three, and so is the repaired one.
    """
    code, facts = FAILING[thread]
    outcome = run(code)
    check_facts(outcome.shown, facts)
    sim.reset()
    mended = run(changed(code, facts["repair"]))
    assert (mended.error, mended.report) == (None, None)
    for hint in outcome.shown.hints:
        if hint.fix is not None:
            check_shown_code(code, outcome, hint, parameters(mended), facts.get("not"), sim)


def check_facts(report: Report, facts: dict[str, str]) -> None:
    """Kind, op, argument, first bad value and line are those that the thread found."""
    assert report.kind == facts["kind"]
    assert report.source is not None
    # The forward call of an older torch refuses what the backward pass of a newer one does.
    assert report.source.text in (facts["line"], facts.get("older"))
    if report.kind == "device_assert":
        op = report.op
        assert op is not None
        named = op.name if op.overload in ("default", None) else f"{op.name}.{op.overload}"
        assert named == facts["op"]
        assert facts.get("argument", report.argument) == report.argument
        assert report.offenders is not None
        values = [offender.value for offender in report.offenders.first]
        if "value" in facts:
            # Processors sum in orders of their own, so the last digits of a float32 may differ.
            exact = float(facts["value"])
            near = pytest.approx(exact, rel=1e-5)
            is_near = any(isinstance(value, float) and value == near for value in values)
            assert exact in values or is_near
    assert report.limits == ()


def check_shown_code(
    code: str,
    outcome: Outcome,
    hint: Hint,
    right: dict[str, Any],
    misleading: str | None,
    sim: simulate.Simulation,
) -> None:
    """The cell ends with the code of a hint, and trains what the thread's own repair trains.

    A change may run and cut the graph, or compute with other numbers.  Where one line has the
    mistake twice, the next report has the code for the second.

    Args:
        right: the parameters of the repaired cell.
        misleading: what the code must not be.
    """
    repaired, again = code, outcome
    for _ in range(3):
        at = next(item for item in again.shown.hints if item.fix is not None)
        at = hint if again is outcome else at
        mark = NAN if code.startswith(NAN) else ""
        text = SETUP + repaired.removeprefix(mark)
        repaired = mark + applied(text, again.shown, at).removeprefix(SETUP)
        sim.reset()
        first, again = again, run(repaired)
        if again.error is None:
            break
    assert again.error is None, hint.fix
    assert misleading is None or not re.search(misleading, hint.fix or ""), hint.fix
    torch.testing.assert_close(parameters(again), right, equal_nan=True)
    if first is outcome:
        check_with_another_batch(SETUP + code.removeprefix(NAN), outcome, sim, fast=False)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("thread", SILENT, ids=short)
def test_a_valid_cell_is_silent(thread: str) -> None:
    """Programs close to those that fail, which nothing is wrong with."""
    outcome = run(SILENT[thread])
    assert (outcome.error, outcome.report) == (None, None)
