"""The cases of ``tests/data/host_errors.txt``: exceptions of torch, put into words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudalens import simulate
from cudalens.core.report import ErrorFacts, Evidence
from cudalens.diagnosis import host_errors
from tests.hostcells import check_fixes, run_cell
from tests.releases import in_words_of_here

SETUP = """
import torch, numpy as np
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A failing line, what must be said of it, and a line like it where nothing is wrong."""

    family: str
    setup: str = ""
    bad: str
    good: str
    says: str
    argument: str | None = None
    expression: str | None = None
    fix: str | None = None
    rule: str | None = None
    kind: str = "host_error"


CASE_FILE = Path(__file__).parent / "data" / "host_errors.txt"


def cases() -> Iterator[Case]:
    """Yield the cases of the file: a family, its kind if it is another one, and indented fields.

    A line that begins with ``|`` continues the field above; ``names`` holds the argument and the
    expression, ``-`` for none, ``rule`` that of a hint of the pattern's.
    """
    for block in re.split(r"\n(?=\S)", CASE_FILE.read_text(encoding="utf-8").rstrip("\n")):
        head, *lines = block.replace("\n  |", "\x00").split("\n")
        family, _, kind = head.rstrip(")").partition(" (")
        found: dict[str, Any] = {"kind": kind} if kind else {}
        for line in lines:
            key, _, value = line.strip().partition(": ")
            if key == "names":
                names = [None if name == "-" else name for name in value.split(" = ")]
                found |= {"argument": names[0], "expression": names[1]}
            else:
                found[key] = value.replace("\x00", "\n")
        yield Case(family=family, **found)


CASES = list(cases())


def ident(case: Case) -> str:
    """Return the name of a case in a list of tests."""
    return f"{case.family}: {case.bad}"


def check(case: Case, sim: simulate.Simulation) -> None:
    """The family, the headline with the observed values, the argument, the fix; never an assert."""
    code = f"{SETUP}{case.setup}\n{case.bad}".strip()
    outcome = run_cell(code, fast=case.fix is None)  # the recorder has what no variable contains
    report = outcome.shown
    assert (report.kind, report.certainty) == (case.kind, "proven")
    assert all(text in report.headline for text in in_words_of_here(case.says))
    # Some releases of torch put a single tensor into a tuple before they look at it.
    argument = (report.argument or "").removesuffix("[0]") or None
    assert (argument, report.expression) == (case.argument, case.expression)
    assert case.fix is None or case.fix in outcome.fixes
    assert case.rule is None or case.rule in outcome.rules
    assert len(report.hints) <= 1 or all("one of several" in hint.text for hint in report.hints)
    assert report.source is not None and report.source.text == case.bad.split("\n")[-1]
    assert report.limits == ()
    assert "assert" not in report.headline_schema
    if case.kind != "cuda_error":
        assert "assert" not in report.to_text()
    assert family_of(str(outcome.error), type(outcome.error)) in (case.family, "repeated")
    check_fixes(code, outcome, sim)


def family_of(message: str, kind: type = RuntimeError) -> str:
    """Return the family that knows a message, by the message alone."""
    facts = ErrorFacts(type_name=kind.__name__, message=message)
    verdict = host_errors.explain_host_error(Evidence(error=facts), facts)
    return verdict.pattern or "repeated"
