"""The pages of ``docs/errors``: every code block runs, and the reports on them are real.

A ``python`` block that is followed by a ``text`` block fails with exactly that report; every other
``python`` block runs to its end without one.  The blocks of a page share their names.  With
``CUDALENS_UPDATE_PAGES=1`` the reports are written into the pages instead of being compared.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import cudalens
from cudalens import simulate
from cudalens.core.device_asserts import READ_RELEASE, assert_table
from cudalens.source.files import CELLS

FOLDER = Path(__file__).parent.parent / "docs" / "errors"
INDEX = FOLDER / "README.md"
PAGES = sorted(set(FOLDER.glob("*.md")) - {INDEX})
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
KERNEL_LINE = re.compile(r"\b([\w-]+\.cuh?):\d+:")
"""A line of a kernel's file, which is known of one release of torch."""
PRINTED = re.compile(
    r"^(\w+\.cu:\d+): (\w+)(?:\(\))?: block.* Assertion `(.+)` failed\.$", re.MULTILINE
)
"""An assertion as CUDA prints it: place, function, expression."""
ABOUT_THE_DEVICE = "  note    Rehearsal device"
WIDTH = 84
"""Columns of a report on a page: as many as a code block of the site has."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page, and where its body lies in the page."""

    language: str
    body: str
    start: int
    end: int


def blocks_of(page: str) -> list[Block]:
    """Return the fenced blocks of a page in their order."""
    return [
        Block(found["language"], found["body"], found.start("body"), found.end("body"))
        for found in BLOCK.finditer(page)
    ]


def steps_of(page: str) -> pairwise[tuple[Block, Block]]:
    """Return each block of a page with the one behind it, an empty one behind the last."""
    return pairwise([*blocks_of(page), Block("", "", 0, 0)])


def with_bodies(page: str, bodies: dict[Block, str]) -> str:
    """Return the page with other bodies in these blocks of it."""
    for block, body in reversed(bodies.items()):
        page = f"{page[: block.start]}{body}\n{page[block.end :]}"
    return page


DRIVER = compile(
    "session = check()\n"
    "try:\n"
    "    with session:\n"
    "        exec(block, names)\n"
    "except Exception as error:\n"
    "    failure = error\n",
    "<driver>",
    "exec",
)


def report_of(code: str, names: dict[str, object], *, cell: int) -> str | None:
    """Run a block as a cell under ``cudalens.check`` and give the text of its report.

    It runs in a thread of its own, so that no frame of this file is among the callers.
    """
    file = f"<page cell {cell}>"
    CELLS.register(file, cell, code.splitlines())
    block = compile(code, file, "exec")
    scope: dict[str, Any] = {"check": cudalens.check, "block": block, "names": names}
    with ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(exec, DRIVER, scope).result()
    report = scope["session"].report
    if report is None:
        if "failure" in scope:
            raise scope["failure"]  # not a finding: the page is wrong
        return None
    lines = report.to_text(width=WIDTH, color=False).splitlines()
    return "\n".join(line for line in lines if not line.startswith(ABOUT_THE_DEVICE)).strip("\n")


def words(page: str) -> list[str]:
    """Return the words of a page, with autograd's nodes and kernels as on every torch."""
    return KERNEL_LINE.sub(r"\1:", page.replace("Backward0", "")).split()


def rerun(page: str) -> str:
    """Return the page with the reports that its blocks make now."""
    torch.manual_seed(0)
    names: dict[str, object] = {}
    fresh = {}
    python = [step for step in steps_of(page) if step[0].language == "python"]
    for cell, (block, follower) in enumerate(python, start=1):
        report = report_of(block.body, names, cell=cell)
        if follower.language != "text":
            assert report is None, f"this block is said to run:\n{block.body}\n{report}"
        else:
            assert report is not None, f"this block is said to fail:\n{block.body}"
            fresh[follower] = report
    return with_bodies(page, fresh)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_blocks_of_a_page_do_what_it_says(path: Path, sim: simulate.Simulation) -> None:
    page = path.read_text(encoding="utf-8")
    fresh = rerun(page)
    if os.environ.get("CUDALENS_UPDATE_PAGES"):
        path.write_text(fresh, encoding="utf-8")
    else:
        assert words(fresh) == words(page)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_has_its_parts_in_the_order_of_a_reader(path: Path) -> None:
    """The mistake in plain words, the message, and the fix before reproduction and report."""
    page = path.read_text(encoding="utf-8")
    title, *headings = re.findall(r"^#+ (.+)$", re.sub(BLOCK, "", page), re.MULTILINE)
    assert headings == ["Cause", "Fix", "Reproduce it", "What cudalens says"]
    assert "`" not in title
    assert blocks_of(page)[0].language == "console"
    assert f"[{title}]({path.name})" in INDEX.read_text(encoding="utf-8")


def test_the_assertions_at_the_heads_of_the_pages_are_those_of_one_release() -> None:
    """The index names the release whose files and lines the pages quote."""
    assert f"The assertion lines are those of torch {READ_RELEASE}." in INDEX.read_text("utf-8")
    sites = [site for row in assert_table() for site in row.get("sites", {}).values()]
    known = {(place, function.removesuffix("()"), text) for place, function, text in sites}
    quoted = {
        found
        for path in PAGES
        for block in blocks_of(path.read_text(encoding="utf-8"))
        if block.language == "console"
        for found in PRINTED.findall(block.body)
    }
    assert len(quoted) == 7
    assert quoted <= known


def test_an_assertion_is_compared_without_its_line() -> None:
    """A report has it on one release only; another file is seen."""
    rest = "nll_loss_forward_reduce_cuda_kernel_2d: Assertion `t >= 0 && t < n_classes` failed."
    assert words(f"Loss.cu:245: {rest}") == words(f"Loss.cu: {rest}")
    assert words(f"Loss.cu:245: {rest}") != words(f"NLLLoss2d.cu:245: {rest}")


def test_a_wrong_report_is_seen(sim: simulate.Simulation) -> None:
    """The comparison can fail: another value than the block has, and a block that runs."""
    code = "import torch\ntable = torch.zeros(3, device='cuda')\ntable[torch.tensor(3).cuda()]\n"
    page = f"```python\n{code}```\n```text\nsomething else\n```\n"
    assert words(rerun(page)) != words(page)
    assert rerun(rerun(page)) == rerun(page)
    with pytest.raises(AssertionError, match="said to fail"):
        rerun("```python\nnumber = 1\n```\n```text\n…\n```\n")
    with pytest.raises(AssertionError, match="said to run"):
        rerun(f"```python\n{code}```\n")
    with pytest.raises(ZeroDivisionError):
        rerun("```python\n1 / 0\n```\n```text\n…\n```\n")
