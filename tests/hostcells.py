"""Runs code as a numbered cell under a check, and says what came of it."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import cudalens
from cudalens.core.report import Report
from cudalens.source.files import forget_cell, register_cell

_numbers = itertools.count(1)


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
