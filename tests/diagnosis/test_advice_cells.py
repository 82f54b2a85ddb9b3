"""Cells of common mistakes, each with what is said of it, and every fix applied literally."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cudalens import simulate
from tests.amount import AMOUNT
from tests.diagnosis.test_outside_cells import SETUP, check_fixes
from tests.hostcells import run_cell
from tests.releases import release

pytestmark = pytest.mark.no_cover  # some 370 whole cells; the tests of the rules are traced
DATA = Path(__file__).parents[1] / "data"
FILES = ("advice_cells.txt", "host_cells.txt", "value_cells.txt")
OTHERWISE = {
    ("types: layer size from a float division", (2, 11)): "empty() received an invalid combination",
}
"""What a release says in place of ``says``, since its own message does not name the kind."""
NAN = "# --nan"
"""The first line of a cell that is run until its first NaN."""


def advice_cells() -> Iterator[tuple[str, str, str | None, str, str | None]]:
    """The mistake, the cell, its first fix, and pieces of the headline and of the first hint.

    Two assignments of one fix stand on one line, with `` ; `` between them.
    """
    texts = [(DATA / name).read_text(encoding="utf-8").rstrip("\n") for name in FILES]
    for block in re.split(r"\n(?=\S)", "\n".join(texts)):
        name, *lines = block.split("\n")
        *code, fix, says, hint = (line[2:] for line in lines)
        found = [fix.removeprefix("fix: "), says.removeprefix("says: "), hint]
        assert (fix, says) == (f"fix: {found[0]}", f"says: {found[1]}")
        told = hint.removeprefix("hint: ")
        yield (
            name,
            "\n".join(code),
            None if found[0] == "-" else found[0].replace(" ; ", "\n"),
            found[1],
            None if told == "-" else told,
        )


@pytest.mark.parametrize(
    ("mistake", "code", "fix", "says", "hint"), [*advice_cells()][:: AMOUNT.cell_step]
)
def test_a_mistake_is_answered(
    mistake: str, code: str, fix: str | None, says: str, hint: str | None, sim: simulate.Simulation
) -> None:
    """The observed fact, the advice, and no fix with which the cell fails."""
    if "transformers" in code:
        pytest.importorskip("transformers")
    is_watched = code.startswith(NAN)
    code = SETUP + code.removeprefix(f"{NAN}\n")
    outcome = run_cell(code, fast=False, nan=is_watched)
    report = outcome.shown
    assert OTHERWISE.get((mistake, release()), says) in report.headline_own, mistake
    assert next((item.fix for item in report.hints if item.fix), None) == fix
    assert bool(report.hints) is (hint is not None)
    assert hint is None or hint in report.hints[0].text
    assert report.limits == ()
    check_fixes(code, outcome, sim)
