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
START = ROOT / "docs" / "start.md"
INSTALL = "%pip install git+https://github.com/cudalens/cudalens"


RESULTS = json.loads((ROOT / "benchmarks" / "results.json").read_text(encoding="utf-8"))


def test_the_costs_are_those_of_the_last_benchmark() -> None:
    current = pages.with_costs(README.read_text(encoding="utf-8"), RESULTS)
    if os.environ.get("CUDALENS_UPDATE_README") == "1":
        README.write_text(current, encoding="utf-8")
    assert README.read_text(encoding="utf-8") == current
    page = ROOT / "docs" / "performance.md"
    assert page.read_text(encoding="utf-8") == pages.performance_page(RESULTS)


def test_the_first_screen_has_the_sentence_the_cell_and_its_output() -> None:
    """What it is and for whom, a whole failing cell and its report, within 40 lines of 125."""
    lines = README.read_text(encoding="utf-8").splitlines()
    first = "\n".join(lines[:40])
    assert "a Jupyter extension for PyTorch" in first
    assert "device-side assert triggered" in first
    assert "```ipython\n%%cudacheck\n" in first and "```text\n✗ " in first
    assert len(lines) <= 125


@pytest.mark.parametrize(("old", "new"), [("A checked cell runs", "A cell runs"), ("([what", "(")])
def test_the_comparison_of_costs_can_fail(old: str, new: str) -> None:
    """A change is seen, and undone by the writer of the section."""
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

def train_one_epoch():
    torch.ones(2, device="cuda").sum()
""",
    ROOT / "docs" / "training.md": """
import tempfile, torch
from transformers import TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x, labels):
        logits = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

model = Model()
data = [{"x": torch.randn(4), "labels": torch.tensor(label)} for label in (0, 1, 2)]
args = TrainingArguments(
    tempfile.mkdtemp(), save_strategy="no", report_to=[], num_train_epochs=1, disable_tqdm=True
)
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
    shown = [*said, *"".join(traceback.format_exception_only(error)).splitlines()]

    def without_cell(line: str) -> str:
        # The number of the cell is that of the reader's notebook.
        return re.sub(r"In \[\d+\]", "In [2]", line)

    lines = iter(map(without_cell, shown))
    return all(without_cell(line) in lines for line in quoted.splitlines())


@pytest.mark.parametrize("path", WITH_CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_code_block_runs_as_pasted(
    path: Path, shell: Any, sim: simulate.Simulation, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other; only what is followed by a report fails."""
    shell.run_line_magic("load_ext", "cudalens")
    if path not in (README, START):  # these say themselves what is checked
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
    """The block that once stood first, whose comment became a module's name."""
    assert paste(shell, f"{INSTALL}\n%load_ext cudalens") is None
    assert "cudalens" in shell.extension_manager.loaded
    error = paste(shell, "%load_ext cudalens  # once a notebook")
    assert isinstance(error, ModuleNotFoundError)
    assert isinstance(paste(shell, "session.report"), NameError)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_fence_says_what_is_in_it(path: Path) -> None:
    """Code, output and shell commands are told apart by the fence's language."""
    fences = re.findall(r"^ *```(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(fences[::2]) <= CODE | set(NO_CODE)
    assert set(fences[1::2]) <= {""}


def test_what_cannot_run_is_in_the_documents() -> None:
    """No entry of the tables has outlived its block."""
    everything = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    assert [line for line in LEFT_OUT if f"\n{line}\n" not in everything] == []
    assert set(GIVEN) <= set(WITH_CODE)
    assert README in WITH_CODE and len(WITH_CODE) > 2


def test_the_first_table_is_what_the_first_cell_shows(shell: Any, sim: simulate.Simulation) -> None:
    """Both messages and the count are what PyTorch and cudalens say of the README's cell."""
    text = README.read_text(encoding="utf-8")
    table = text.partition("| --- | --- |")[2].partition("\n\n")[0]
    cell = next(block.body for block in blocks_of(text) if block.language == "ipython")
    assert paste(shell, cell.removeprefix("%%cudacheck\n")) is None
    with pytest.raises(RuntimeError, match="device-side assert triggered") as raised:
        torch.cuda.synchronize()
    assert f"`{str(raised.value).splitlines()[0]}`" in table
    sim.reset()
    shell.run_line_magic("load_ext", "cudalens")
    error = paste(shell, cell)
    headline = str(error).partition(" (allowed")[0]
    assert f"`{headline}`, 3 of 32 values" in table
    assert "; 3 of 32 are bad" in str(error)
    assert torch.ones(1, device="cuda").item() == 1.0


def test_the_picture_fits_a_screen() -> None:
    """In a column of 880 pixels it is at most 500 high; one that is taller would be seen."""
    header = (ROOT / "docs" / "lens_small.png").read_bytes()[16:24]
    width, height = int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")
    assert height * 880 / width <= 500
