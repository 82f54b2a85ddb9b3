"""Runs code as a numbered cell under a check, says what came of it, and applies the fixes.

A fix that is shown as code stands in the place of the running call, or, an assignment, before its
line.  The cell that is changed so ends without an error.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import cudalens
from cudalens import simulate
from cudalens.core.report import Report
from cudalens.core.report_types import Hint
from cudalens.diagnosis.user_code import parsed
from cudalens.source.files import forget_cell, register_cell

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
    register_cell(filename, number, text.splitlines(keepends=True))
    space = {} if names is None else names
    caught: BaseException | None = None
    session = cudalens.check(**{"fast": True, **options})
    try:
        with session:
            exec(compile(text, filename, "exec"), space)
    except Exception as error:
        caught = error
    finally:
        forget_cell(filename)
    report = session.report
    assert session.internal_errors == [*says], session.internal_errors
    if caught is not None:
        # The frames would keep the cell's tensors alive beyond the test.
        caught = caught.with_traceback(None)
    return Outcome(error=caught, report=report, names=space)


# --- fixes applied literally ----------------------------------------------------------------------


def applied(code: str, report: Report, hint: Hint) -> str:
    """Put a fix where it belongs: behind the line that made the values, or at the failing call.

    At a loop it takes the place of what the loop runs over.
    """
    source, fix = report.source, hint.fix
    assert source is not None and source.line is not None and fix is not None
    lines = code.split("\n")
    line = lines[source.line - 1]
    if hint.at is not None or parsed(fix) is None:
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


def check_fixes(code: str, outcome: Outcome, sim: simulate.Simulation) -> None:
    """Every fix is said to be tried, and the cell succeeds with it."""
    for hint in outcome.shown.hints:
        assert (hint.fix is not None) is (hint.tried is True)
        if hint.fix is not None:
            sim.reset()
            again = run_cell(applied(code, outcome.shown, hint))
            assert again.error is None, (hint.fix, again.error)
