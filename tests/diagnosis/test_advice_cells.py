"""Cells of common mistakes, each with what is said of it, and every fix applied literally.

Those of ``outside_cells.txt`` are made of public questions, each with its thread's address.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cudalens import simulate
from tests.amount import AMOUNT
from tests.hostcells import SETUP, check_fixes, check_with_another_batch, run_cell
from tests.releases import in_words_of_here, release

pytestmark = [
    pytest.mark.usefixtures("sim"),
    pytest.mark.filterwarnings("ignore:std.*degrees of freedom"),
]
DATA = Path(__file__).parents[1] / "data"
ALWAYS = ("chosen_cells.txt",)
"""Where a fix stands, what is meant, and where nothing is offered: answered in every run."""
GUARDED = ("outside_cells.txt",)
RECORDED = ("advice_cells.txt", "host_cells.txt", "value_cells.txt")
"""The files of cells under guards alone, and of those with the recorder."""
OTHERWISE = {
    "types: layer size from a float division": ((2, 12), "empty() received an invalid combination"),
    "types: dim as a string of an argument": ((2, 11), "Invalid name: a valid identifier"),
    "invalid combination: method not called": ((2, 10), "must be tuple of ints"),
    "types: cat of two tensors without a list": ((2, 12), "cat() received an invalid combination"),
}
"""What releases before another say in place of ``says``: their message does not name the kind."""
NAN = "# --nan"
"""The first line of a cell that is run until its first NaN."""


Cell = tuple[str, str, str | None, str, list[str], list[str]]


def cells(*files: str) -> Iterator[Cell]:
    """The mistake, the cell, its fix, and pieces of the headline, of the hint and of facts.

    Two assignments of one fix stand on one line, with `` ; `` between them.
    """
    texts = [(DATA / name).read_text(encoding="utf-8").rstrip("\n") for name in files]
    for block in re.split(r"\n(?=\S)", "\n".join(texts)):
        name, _, rest = block.partition("\n")
        code, fix, says, hints, facts = re.fullmatch(
            r"(.+)\n  fix: (.+)\n  says: ([^\n]+)((?:\n  hint: [^\n]+)+)((?:\n  fact: [^\n]+)*)",
            rest,
            re.DOTALL,
        ).groups()  # type: ignore[union-attr]
        told = hints.split("\n  hint: ")[1:]
        yield (
            name,
            re.sub(r"^  ", "", code, flags=re.MULTILINE),
            None if fix == "-" else fix.replace(" ; ", "\n"),
            says,
            [] if told == ["-"] else told,
            facts.split("\n  fact: ")[1:],
        )


@pytest.mark.no_cover  # some 400 whole cells; the tests of the rules are traced
@pytest.mark.parametrize(
    ("cell", "fast"),
    [
        *((cell, True) for cell in cells(*ALWAYS)),
        *((cell, True) for cell in [*cells(*GUARDED)][:: AMOUNT.cell_step]),
        *((cell, False) for cell in [*cells(*RECORDED)][:: AMOUNT.cell_step]),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_a_mistake_is_answered(cell: Cell, fast: bool, sim: simulate.Simulation) -> None:
    """The observed fact, each piece of advice, and no fix with which the cell fails."""
    mistake, code, fix, says, hints, facts = cell
    if "transformers" in code:
        pytest.importorskip("transformers")
    is_watched = code.startswith(NAN)
    code = SETUP + code.removeprefix(f"{NAN}\n")
    outcome = run_cell(code, fast=fast, nan="strict" if is_watched else False)
    report = outcome.shown
    since, before = OTHERWISE.get(mistake, ((0, 0), ""))
    told = in_words_of_here(says) if release() >= since else [before]
    assert all(text in report.headline for text in told), mistake
    assert next((item.fix for item in report.hints if item.fix), None) == fix
    assert len(report.hints) == len(hints)
    assert all(text in item.text for text, item in zip(hints, report.hints, strict=True))
    seen = [item.text for item in report.observations]
    assert all(any(text in item for item in seen) for text in facts), seen
    assert report.limits == ()
    check_fixes(code, outcome, sim)
    if not is_watched:
        check_with_another_batch(code, outcome, sim, fast=fast)


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("step(data)", "made in line 8: torch.randn(3, 4)"),
        ("step(data * 1)", None),
        ("for data in (data, data): step(data)", None),
    ],
)
def test_the_caller_that_made_an_argument_is_named(given: str, origin: str | None) -> None:
    """By the same object, bound once: of an expression, or a loop's value, nothing is said."""
    code = "model = nn.Linear(4, 2).cuda()\ndef step(x):\n    return model(x)\n"
    outcome = run_cell(f"{SETUP}{code}data = torch.randn(3, 4)\n{given}")
    text = "; ".join(item.text for item in outcome.shown.observations)
    assert outcome.fixes == ['model(x.to("cuda:0"))']
    assert origin in text if origin else "x is" not in text


def test_a_trial_leaves_nothing_behind() -> None:
    """Neither the user's tensors nor the random numbers nor a module's statistics change."""
    setup = "m, x = nn.BatchNorm2d(3), torch.randn(3, 16, 16)\nbefore = torch.get_rng_state()\n"
    outcome = run_cell(f"{SETUP}{setup}m(x)")
    assert outcome.fixes == ["m(x.unsqueeze(0))"]
    names = outcome.names
    assert names["m"].num_batches_tracked == 0
    assert bool((names["m"].running_mean == 0).all())
    assert names["before"].equal(names["torch"].get_rng_state())
    assert tuple(names["x"].shape) == (3, 16, 16)


def test_large_tensors_are_tried_without_their_values() -> None:
    """Shapes on the meta device; a cast, whose values count there, is not promised."""
    setup = "x = torch.empty(1, 1, 1).expand(4000, 28, 2000)\nw = torch.empty(1, 1).expand(28, 5)\n"
    assert run_cell(f"{SETUP}{setup}x @ w").fixes[:1] == ["x.transpose(1, 2) @ w"]
    setup = "m, x = nn.Linear(8, 2), torch.empty(1, 1).double().expand(1000000, 8)\n"
    assert not any(run_cell(f"{SETUP}{setup}m(x)").fixes)


def test_the_users_own_code_is_not_run_again() -> None:
    """What a call of theirs gave is not known, and is not computed a second time."""
    setup = "n = []\ndef f(x):\n    n.append(1)\n    return x\nx = torch.randn(2, 3)\n"
    outcome = run_cell(f"{SETUP}{setup}torch.mm(f(x), x)")
    assert len(outcome.names["n"]) == 1


BATCH = "fc, x, y = nn.Linear(8, 3), torch.randn(16, 8), torch.randint(0, 3, (16, 1))\n"


@pytest.mark.parametrize(
    ("fix", "count"),
    [
        ("F.cross_entropy(fc(x), y.squeeze(1))", 1),
        ("F.cross_entropy(fc(x), y.view(4, 4).flatten())", None),
        ("F.cross_entropy(fc(x), y.view(16))", 1),
    ],
)
def test_a_fix_of_one_batch_size_is_seen(
    fix: str, count: int | None, sim: simulate.Simulation
) -> None:
    """Of the two sizes with which each fix is run, the second one refuses it."""
    code = f"{SETUP}{BATCH}F.cross_entropy(fc(x), y)"
    outcome = run_cell(code)
    hints = (replace(outcome.shown.hints[0], fix=fix),)
    given = replace(outcome, report=replace(outcome.shown, hints=hints))
    if count is not None:
        assert check_with_another_batch(code, given, sim) == count
        return
    with pytest.raises(AssertionError, match="view"):
        check_with_another_batch(code, given, sim)
