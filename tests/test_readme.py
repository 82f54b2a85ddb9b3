"""The README says what the benchmark says, and its code runs.

``CUDALENS_UPDATE_README=1`` rewrites the table of costs instead of comparing it.  The code of the
README and of the pages under ``docs`` runs as pasted.
"""

from __future__ import annotations

import json
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cudalens
from benchmarks import pages
from cudalens import simulate
from tests.shells import run, shell_with_cudalens
from tests.test_error_pages import WIDTH, blocks_of, steps_of

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
INSTALL = "%pip install git+https://github.com/cudalens/cudalens"


RESULTS = json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8"))


def test_the_costs_are_those_of_the_last_benchmark() -> None:
    current = pages.with_costs(README.read_text(encoding="utf-8"), RESULTS)
    if os.environ.get("CUDALENS_UPDATE_README") == "1":
        README.write_text(current, encoding="utf-8")
    assert README.read_text(encoding="utf-8") == current
    page = ROOT / "docs" / "performance.md"
    assert page.read_text(encoding="utf-8") == pages.performance_page(RESULTS)


def test_the_first_screen_is_short() -> None:
    """What it is, both messages, install and use fit into the first 25 lines."""
    lines = README.read_text(encoding="utf-8").splitlines()
    first = "\n".join(lines[:25])
    assert INSTALL in first
    assert "%%cudacheck" in first
    assert "device-side assert triggered" in first


@pytest.mark.parametrize(
    ("old", "new"),
    [("`%%cudacheck --nan` | ", "`%%cudacheck --nan` | 1"), ("| × plain |", "| times |")],
)
def test_the_comparison_can_fail(old: str, new: str) -> None:
    """A change is seen, and taken back by what writes the section."""
    whole = README.read_text(encoding="utf-8")
    changed = whole.replace(old, new)
    assert changed != whole
    assert pages.with_costs(changed, RESULTS) == whole


# --- code blocks, as pasted ----------------------------------------------------------------------


DOCUMENTS = [README, *sorted((ROOT / "docs").rglob("*.md"))]
CODE = {"python", "ipython"}
WITH_CODE = [
    path
    for path in DOCUMENTS
    if path.parent.name != "errors"  # tests/test_error_pages.py runs those
    and CODE & {block.language for block in blocks_of(path.read_text(encoding="utf-8"))}
]
NO_CODE = {"text": "output of cudalens", "console": "output of CUDA", "sh": "commands of a shell"}
# What a block needs that a test cannot have, and why; the rest of the block runs.
LEFT_OUT = {INSTALL: "needs the network"}
# What a document takes as the reader's own.
GIVEN = {
    README: """
import torch
import torch.nn.functional as F

model = torch.nn.Linear(4, 10).cuda()
x = torch.randn(32, 4, device="cuda")
y = torch.arange(32, device="cuda") % 9 + 1
y[[9, 20, 30]] = 10

def train_one_epoch():
    model(x).sum().backward()
""",
}


@pytest.fixture
def shell(sim: simulate.Simulation) -> Iterator[Any]:
    """A shell on the rehearsal device as a reader's is: the extension is not loaded yet."""
    with shell_with_cudalens() as shell:
        shell.run_line_magic("unload_ext", "cudalens")
        yield shell
    cudalens.uninstall()


def paste(shell: Any, code: str) -> BaseException | None:
    """Run a block as a cell, without the lines that a test cannot have."""
    kept = [line for line in code.splitlines() if line not in LEFT_OUT]
    error, _ = run(shell, "\n".join(kept))
    return error


def is_said(quoted: str, error: BaseException) -> bool:
    """Return whether the report and the exception have these lines in this order, maybe others."""
    report = cudalens.last_report()
    said = report.to_text(width=WIDTH, color=False).splitlines() if report else []
    lines = iter([*said, *"".join(traceback.format_exception_only(error)).splitlines()])
    return all(line in lines for line in quoted.splitlines())


@pytest.mark.parametrize("path", WITH_CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_code_block_runs_as_pasted(
    path: Path, shell: Any, sim: simulate.Simulation, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 17, item 18: one after the other; only what is followed by a report fails."""
    if path != README:
        shell.run_line_magic("load_ext", "cudalens")
        shell.run_line_magic("cudacheck", "on")
    assert paste(shell, GIVEN.get(path, "")) is None
    for block, follower in steps_of(path.read_text(encoding="utf-8")):
        if block.language in CODE:
            error = paste(shell, block.body)
            assert (error is None) == (follower.language != "text"), f"{block.body}\n{error!r}"
            if error is not None:
                assert is_said(follower.body, error), follower.body
            assert "UsageError" not in (said := capsys.readouterr().err), said
            assert "ModuleNotFoundError" not in said, said
            sim.reset()  # what CUDA cannot do: the next block would need a new kernel


def test_a_block_that_fails_is_seen(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Issue 17, item 18: the block that once stood first, whose comment became a module's name."""
    assert paste(shell, f"{INSTALL}\n%load_ext cudalens") is None
    assert "cudalens" in shell.extension_manager.loaded
    error = paste(shell, "%load_ext cudalens  # once a notebook")
    assert isinstance(error, ModuleNotFoundError)
    assert isinstance(paste(shell, "session.report"), NameError)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_fence_says_what_is_in_it(path: Path) -> None:
    """Issue 17, item 18: code, output and shell commands are told apart by the fence's language."""
    fences = re.findall(r"^ *```(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(fences[::2]) <= CODE | set(NO_CODE)
    assert set(fences[1::2]) <= {""}


def test_what_cannot_run_is_in_the_documents() -> None:
    """Issue 17, item 18: no entry of the tables has outlived its block."""
    everything = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    assert [line for line in LEFT_OUT if f"\n{line}\n" not in everything] == []
    assert set(GIVEN) <= set(WITH_CODE)
    assert README in WITH_CODE and len(WITH_CODE) > 2


def test_the_first_table_is_what_the_first_block_shows(
    shell: Any, sim: simulate.Simulation
) -> None:
    """Issue 17, item 18: the message, the line with the magic counted, and the advice."""
    text = README.read_text(encoding="utf-8")
    (told,) = re.findall(r"In \[7\] line \d+: [^`]*", text)
    code = blocks_of(text)[0].body
    assert paste(shell, GIVEN[README]) is None
    assert paste(shell, code) is None
    with pytest.raises(RuntimeError, match="device-side assert triggered") as raised:
        torch.cuda.synchronize()
    assert str(raised.value).splitlines()[0] in text.replace("RuntimeError: ", "")
    sim.reset()
    assert paste(shell, GIVEN[README]) is None
    shell.run_line_magic("load_ext", "cudalens")
    shell.execution_count = 7
    error = paste(shell, f"%%cudacheck\n{code}")
    headline, *details = str(error).splitlines()
    assert f"`{type(error).__name__}: {headline}`" in text
    where = next(line for line in details if line.startswith("  where"))
    assert re.sub(r" +#.*", "", where).split(maxsplit=1)[1] == told
    attempt = next(line for line in details if line.startswith("  try"))
    assert f"try `{attempt.split(maxsplit=1)[1].split('  ')[0]}`" in text
    assert torch.ones(1, device="cuda").item() == 1.0
