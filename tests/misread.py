"""Cells of which a report once said what is not so: each with what it says, and what it must not.

A block of a file ``tests/data/misread_*.txt`` is a name, a cell, and patterns: ``says`` is in the
report, ``not`` is not.  A cell that is right has ``silent: yes``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from cudalens import simulate
from cudalens.core.report import Report
from cudalens.render import screen
from tests.hostcells import check_fixes, run_cell

FOLDER = Path(__file__).parent / "data"
FACT = re.compile(r"  (says|not|silent): (.+)")

Cell = tuple[str, str, list[tuple[str, str]]]


def cells(topic: str) -> Iterator[Cell]:
    """Yield the name, the code, and the patterns with their kinds, of each cell of a file."""
    text = (FOLDER / f"misread_{topic}.txt").read_text(encoding="utf-8")
    for block in re.split(r"\n(?=\S)", text.rstrip("\n")):
        name, *lines = block.split("\n")
        facts = [FACT.fullmatch(line) for line in lines]
        code = [line[2:] for line, fact in zip(lines, facts, strict=True) if not fact]
        yield name, "\n".join(code), [(fact[1], fact[2]) for fact in facts if fact]


def text_of(report: Report) -> str:
    """Return what a report says, a line each: without the code of the cell."""
    lines = [report.headline, report.explanation]
    lines += [item.text for item in report.observations]
    lines += [item.text + (f" try {item.fix}" if item.fix else "") for item in report.hints]
    action = screen.action_of(report)
    lines += [action.line] if action is not None else []
    lines += [report.replay.message or ""] if report.replay is not None else []
    return "\n".join(lines)


def check(cell: Cell, sim: simulate.Simulation) -> None:
    """The fact that explains the failure is there, nothing that is not so, and edits work."""
    _, code, facts = cell
    torch.manual_seed(0)
    names = {"torch": torch, "nn": nn, "F": functional, "DataLoader": DataLoader}
    outcome = run_cell(code, {**names}, fast=False)
    if ("silent", "yes") in facts:
        assert outcome.error is None and outcome.report is None
        return
    text = text_of(outcome.shown) if outcome.report is not None else repr(outcome.error)
    for kind, pattern in facts:
        assert bool(re.search(pattern, text, re.MULTILINE)) is (kind == "says"), (pattern, text)
    if outcome.report is not None:
        assert outcome.report.limits == ()
        check_fixes(code, outcome, sim, names)
