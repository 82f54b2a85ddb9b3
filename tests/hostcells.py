"""Runs code as a numbered cell under a check, says what came of it, and applies the fixes.

A fix that is shown as code stands in the place of the running call, or, an assignment, before its
line.  The cell that is changed so ends without an error.
"""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cudalens
from cudalens import simulate
from cudalens.core.report import Report
from cudalens.core.report_types import Hint
from cudalens.diagnosis.user_code import parsed
from cudalens.source.files import CELLS
from tests.releases import unexpected

_numbers = itertools.count(1)
SETUP = """\
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
"""
"""The first lines of cells that say nothing else."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A cell that has run: its exception, its report, its names."""

    error: BaseException | None
    report: Report | None
    names: dict[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> Report:
        """The report, which must be there."""
        assert self.report is not None, f"no report for {self.error!r}"
        return self.report

    @property
    def fixes(self) -> list[str | None]:
        """The code of each hint."""
        return [hint.fix for hint in self.shown.hints]

    @property
    def rules(self) -> list[str]:
        """The rule of each hint."""
        return [hint.rule for hint in self.shown.hints]


def run_cell(
    code: str, names: dict[str, Any] | None = None, says: Sequence[str] = (), **options: Any
) -> Outcome:
    """Run code in the given namespace as a cell; guards only, unless options say otherwise.

    Nothing of the check itself may fail.

    Args:
        says: the lines that the check has to say of itself.
    """
    text = textwrap.dedent(code).strip() + "\n"
    number = next(_numbers)
    filename = f"<cell {number}>"
    CELLS.register(filename, number, text.splitlines(keepends=True))
    space = {} if names is None else names
    caught: BaseException | None = None
    session = cudalens.check(**{"fast": True, **options})
    try:
        with session:
            for statement in ast.parse(text).body:  # as a shell compiles a cell
                exec(compile(ast.Module([statement], []), filename, "exec"), space)
    except Exception as error:
        caught = error
    finally:
        CELLS.forget(filename)
    report = session.report
    assert unexpected(session.internal_errors) == [*says], session.internal_errors
    if caught is not None:
        # The frames would keep the cell's tensors alive beyond the test.
        caught = caught.with_traceback(None)
    return Outcome(error=caught, report=report, names=space)


# --- fixes applied literally ----------------------------------------------------------------------


_IN_PLACE = ("features_of_images", "safe_branch", "slope_at_zero")
"""Rules whose code takes the place of another line's."""


def applied(code: str, report: Report, hint: Hint) -> str:
    """Put a fix where it belongs: behind the line that made the values, or at the failing call.

    At a loop it takes the place of what the loop runs over, and a change in place gives way to it.
    """
    source, fix = report.source, hint.fix
    assert source is not None and source.line is not None and fix is not None
    lines = code.split("\n")
    line = lines[source.line - 1]
    if hint.rule in _IN_PLACE and hint.at is not None and hint.at.line is not None:
        old = lines[hint.at.line - 1]
        lines[hint.at.line - 1] = old[: hint.at.column] + fix + old[hint.at.end_column :]
    elif hint.at is not None or parsed(fix) is None:
        at = source.line - 1 if hint.at is None else hint.at.end_line
        assert at is not None
        is_behind = hint.at is not None and not lines[at - 1].rstrip().endswith(":")
        beside = lines[at - is_behind]
        room = beside[: len(beside) - len(beside.lstrip())]
        lines[at:at] = [room + item for item in fix.split("\n")]
    elif line.startswith("for "):
        lines[source.line - 1] = f"{line.partition(' in ')[0]} in {fix}:"
    else:
        assert source.line == source.end_line
        lines[source.line - 1] = line[: source.column] + fix + line[source.end_column :]
    return "\n".join(lines)


def check_fixes(
    code: str,
    outcome: Outcome,
    sim: simulate.Simulation,
    names: dict[str, Any] | None = None,
) -> None:
    """Every fix is said to be tried, and the cell succeeds with it.

    Args:
        names: the namespace in which the cell is run.
    """
    for hint in outcome.shown.hints:
        assert (hint.fix is not None) is (hint.tried is True)
        if hint.fix is not None:
            sim.reset()
            again = run_cell(applied(code, outcome.shown, hint), {**(names or {})})
            assert again.error is None, (hint.fix, again.error)


# --- another batch --------------------------------------------------------------------------------


_FACTORIES = ("empty", "ones", "rand", "randn", "zeros")
_NUMBER = re.compile(r"\d+")


def with_another_batch(code: str) -> Iterator[tuple[str, re.Pattern[str], str]]:
    """Yield the code with another batch size, and how to change that number in a fix.

    Of each size that is only ever a first dimension, or the batch size of a loader.  A size that is
    written elsewhere too, or that a list has, may be one of features.
    """
    tree = ast.parse(code)
    leading: dict[int, list[ast.Constant]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        sizes = node.args[-1:] if name == "randint" else node.args if name in _FACTORIES else []
        shape = sizes[0].elts if sizes and isinstance(sizes[0], ast.Tuple | ast.List) else sizes
        found = [*shape[:1], *(item.value for item in node.keywords if item.arg == "batch_size")]
        for size in found:
            if isinstance(size, ast.Constant) and type(size.value) is int and size.value > 1:
                leading.setdefault(size.value, []).append(size)
    others = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    others += [len(node.elts) for node in ast.walk(tree) if isinstance(node, ast.List)]
    lines = code.split("\n")
    for value, places in leading.items():
        if others.count(value) == len(places):
            changed = lines.copy()
            for at in sorted(places, key=lambda item: (item.lineno, -item.col_offset)):
                line = changed[at.lineno - 1]
                line = line[: at.col_offset] + str(value + 3) + line[at.end_col_offset :]
                changed[at.lineno - 1] = line
            yield "\n".join(changed), re.compile(rf"\b{value}\b"), str(value + 3)


def check_with_another_batch(
    code: str, outcome: Outcome, sim: simulate.Simulation, **options: Any
) -> int:
    """Every fix mends the cell with another batch size, too; return how many were tried.

    Where another size makes another mistake of the cell, nothing is tried.
    """
    count = 0
    for other, number, new in with_another_batch(code):
        sim.reset()
        again = run_cell(other, **options)
        texts = {_NUMBER.sub("#", str(item.error).split("\n")[0]) for item in (outcome, again)}
        for hint in outcome.shown.hints if len(texts) == 1 and again.error is not None else ():
            fix, errors = hint.fix, []
            # The number may be one of a dimension as well.
            for text in {fix, number.sub(new, fix)} if fix is not None else ():
                sim.reset()
                errors.append(
                    run_cell(applied(other, outcome.shown, replace(hint, fix=text))).error
                )
            assert fix is None or None in errors, (fix, errors)
            count += fix is not None
    return count
