"""What becomes of a session after a kernel has asserted: later calls, cells, frees and replays.

The kernel is one of our own, so that no guard prevents it.  Cells run in a shell that has loaded
cudalens; what each one raised and showed is printed at once, too, since the process may abort.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import BAD_ROWS, KERNEL, name_a_toolkit

__all__ = ["EXTRAS", "STICKY", "Extra", "run_extra"]

STICKY = "calls after an assert"
"""The one extra that is no list of cells."""
SETUP = f"""{KERNEL}{BAD_ROWS}
pick = torch.ops.gpu_suite.pick
def spoil(at):
    at.fill_(9)
"""
MAX_TEXT = 4000
LATER = ("1/0", "no_such_name", "1 + 1")
"""What is formatted, or freed, in later cells."""
LOOP = """from torch.utils.data import DataLoader, TensorDataset
batches = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8, pin_memory=True)
for i, (a,) in enumerate(batches):
    a = a.to("cuda", non_blocking=True)
    out = pick(table, rows if i == 2 else rows * 0)
    out.sum().item()
"""
REPLAY = """%%cudacheck
at = torch.zeros(3, dtype=torch.int64, device="cuda")
pick(table, at)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = pick(table, at)
spoil(at)
graph.replay()
out.sum().item()
"""
FREED = """%%cudacheck
def step():
    x = torch.ones(3, device="cuda")
    x.record_stream(torch.cuda.Stream())
    pick(table, rows)
try:
    step()
except RuntimeError:
    pass
"""


@dataclass(frozen=True)
class Extra:
    """Cells of one session, and what the report of the first failure has to say."""

    name: str
    cells: tuple[str, ...]
    op: str | None = "gpu_suite::pick"
    source: str = "pick(table, rows"
    raises: tuple[str | None, ...] = ()
    """What each cell raises, by the name of its class."""
    hears: bool = True
    """Whether a recorder listens, so that the report tells what CUDA printed."""
    may_abort: bool = False
    """Whether ``docs/limits.md`` says that nothing of ours sees it in time."""


_LOST, _AFTER = "AcceleratorError", ("ZeroDivisionError", "NameError", None)
EXTRAS = (
    Extra(
        "pinned loop, checked",
        (f"%%cudacheck\n{LOOP}", *LATER, "%%cudacheck\ntable + 1"),
        raises=(_LOST, *_AFTER, _LOST),
    ),
    Extra(
        "pinned loop, deferred",
        (f"%%cudacheck --deferred\n{LOOP}", *LATER),
        op=None,
        source="out.sum().item()",
        hears=False,
        raises=(_LOST, *_AFTER),
    ),
    Extra(
        "pinned loop, fast",
        (f"%%cudacheck --fast\n{LOOP}", *LATER),
        op=None,
        source="out.sum().item()",
        hears=False,
        raises=(_LOST, *_AFTER),
        may_abort=True,
    ),
    Extra("freed where another stream used it", (FREED, *LATER), raises=(None, *_AFTER)),
    Extra(
        "unchecked, then explain",
        ("out = pick(table, rows)\nout.sum().item()", "%cudacheck explain", "1 + 1"),
        op=None,
        source="",
        hears=False,
        raises=(_LOST, None, None),
    ),
    Extra(
        "on over six cells",
        (
            "%cudacheck on",
            "table + 1",
            "out = pick(table, rows)",
            "table + 1",
            "%cudacheck status",
            "%cudacheck off",
        ),
        raises=(None, None, _LOST, _LOST, None, None),
    ),
    Extra(
        "replay of a graph",
        (REPLAY, "1 + 1"),
        op="torch.cuda.CUDAGraph.replay",
        source="graph.replay()",
        raises=(_LOST, None),
    ),
)


def default_setup() -> str:
    """Return what makes the kernel: in a rehearsal without a GPU that of the stand-in."""
    file = os.environ.get("HOUR_SETUP")
    return Path(file).read_text(encoding="utf-8") if file else SETUP


def run_extra(name: str, setup: str | None = None) -> dict[str, Any]:
    """Run one of them and tell what was seen.

    Args:
        setup: defines ``table``, ``rows``, ``pick`` and ``spoil``; the stand-in has other ones.
    """
    setup = default_setup() if setup is None else setup
    if name == STICKY:
        return after_an_assert(setup)
    extra = next(item for item in EXTRAS if item.name == name)
    name_a_toolkit()
    import torch

    import cudalens
    from tests.shells import new_shell, run

    seen = []
    with new_shell() as shell:
        shell.run_line_magic("load_ext", "cudalens")
        error, _ = run(shell, setup)
        if error is not None:
            why = f"{type(error).__name__}: {error}"[:500]
            return {"unavailable": why, "is_broken": hasattr(torch.cuda, "_compile_kernel")}
        for text in extra.cells:
            error, shown = run(shell, text)
            seen.append(
                {
                    "error": type(error).__name__ if error is not None else None,
                    "notes": list(getattr(error, "__notes__", ())),
                    "shown": [str(item.get("text/plain", ""))[:MAX_TEXT] for item in shown],
                }
            )
            print("CELL", json.dumps(seen[-1], ensure_ascii=False), file=sys.stderr, flush=True)
        report = cudalens.last_report()
    return {"cells": seen, "report": report.to_dict() if report is not None else None}


def after_an_assert(setup: str) -> dict[str, Any]:
    """Tell which calls of torch raise once a kernel has asserted, beside the rehearsal's table."""
    from tests.sticky_calls import TEXT, expected, texts_after

    names: dict[str, Any] = {}
    name_a_toolkit()
    exec(compile(setup, "<setup>", "exec"), names)
    found = texts_after(lambda: names["pick"](names["table"], names["rows"]))
    wanted = expected(TEXT)
    differ = {
        name: found.get(name) or "raises nothing"
        for name, text in wanted.items()
        if (found.get(name) is None) != (text is None)
    }
    own_words = {
        name: text.split("\n", 1)[0]
        for name, text in found.items()
        if text is not None and text.split("\n", 1)[0] != TEXT.split("\n", 1)[0]
    }
    return {
        "calls": len(wanted),
        "differ": differ,
        "first": found.get("first"),
        "own words": own_words,
    }
