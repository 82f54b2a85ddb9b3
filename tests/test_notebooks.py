"""What a reader on GitHub sees: the outputs that are stored in the notebooks.

That a fresh run gives the same text is compared by nbval (``make notebooks``).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.doc_pages import INSTALL
from tests.notebook_outputs import NOTEBOOKS, STORED, cleaner

NAMES = (
    "quickstart",
    "01_conv1d_classifier",
    "02_loss_functions",
    "03_layoutlmv3",
    "04_backward_failures",
    "05_seq2seq_summarization",
    "06_write_your_own_guard",
    "07_always_on",
    "08_many_gpus",
)
MAX_CELLS = 32
MAX_REPORT_BYTES = 300_000
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:tmp|work|root|home|Users|usr|opt|var|mnt)/|C:\\\\")
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
RAISES = "raises-exception"


def read(name: str) -> Any:
    """Read one notebook of the project."""
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def reports(notebook: Any) -> list[Any]:
    """Return the stored display bundles of the notebook's reports."""
    return [
        output.data
        for cell in code_cells(notebook)
        for output in cell.outputs
        if output.output_type == "display_data"
    ]


def strings(value: Any) -> list[str]:
    """Return every string inside lists and mappings."""
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for item in items for text in strings(item)]


def faults(notebook: Any) -> list[str]:
    """Say everything that is wrong with the stored outputs of a notebook."""
    found = []
    for at, cell in enumerate(code_cells(notebook), start=1):
        here = f"code cell {at}"
        kinds = [output.output_type for output in cell.outputs]
        if cell.execution_count != at:
            found.append(f"{here}: not stored by one run from top to bottom")
        if ("error" in kinds) != (RAISES in cell.metadata.get("tags", [])):
            found.append(f"{here}: fails, or does not, against its tag")
        is_checked = cell.source.startswith("%%cudacheck")
        if "error" in kinds and is_checked and "display_data" not in kinds:
            found.append(f"{here}: fails without a report")
        for text in strings(cell.outputs):
            found += [f"{here}: machine path {path!r}" for path in MACHINE_PATH.findall(text)]
            found += [f"{here}: address {address}" for address in ADDRESS.findall(text)]
    for number, bundle in enumerate(reports(notebook), start=1):
        if set(bundle) != {"text/plain", "text/html"}:
            found.append(f"report {number}: not static, or not whole: {sorted(bundle)}")
        if sum(len(text.encode()) for text in strings(bundle)) > MAX_REPORT_BYTES:
            found.append(f"report {number}: larger than {MAX_REPORT_BYTES} bytes")
    if len(notebook.cells) >= MAX_CELLS:
        found.append(f"{len(notebook.cells)} cells")
    if nbformat.from_dict(notebook.metadata).get("widgets"):
        found.append("stores the state of widgets")
    return found


def test_the_notebooks_are_these() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs_are_whole_and_of_no_machine(name: str) -> None:
    """Every cell has run in order, failures have reports, and nothing of the machine is left."""
    assert faults(read(name)) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_fails_and_trains_on(name: str) -> None:
    cells = code_cells(read(name))
    failing = [at for at, cell in enumerate(cells) if RAISES in cell.metadata.get("tags", [])]
    assert failing
    assert failing[-1] < len(cells) - 1
    assert ".backward()" in "".join(cell.source for cell in cells[failing[0] + 1 :])
    said = "".join(text for cell in cells for text in strings(cell.outputs))
    assert said.count("CUDA code runs on the CPU") == 1


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs_are_already_clean(name: str) -> None:
    """What the update takes out is not there, so a fresh run is compared with what readers see."""
    clean = cleaner(prefix=STORED)
    for text in strings([cell.outputs for cell in code_cells(read(name))]):
        assert clean(text) == text


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_downloaded(name: str) -> None:
    """But for cudalens itself, where it is missing."""
    source = "".join(cell.source for cell in code_cells(read(name))).replace(INSTALL, "")
    assert not re.search(r"from_pretrained|load_dataset|https?://|urlopen|requests\.", source)


def test_the_cleaner_takes_out_what_differs_between_machines() -> None:
    """Paths go, in both kinds of slashes' surroundings; the text around them stays."""
    clean = cleaner(prefix=STORED)
    path = "/home/me/v/lib/python3.11/site-packages/torch/nn/functional.py:3555"
    assert clean(f"File {path}, in f") == "File site-packages/torch/nn/functional.py:3555, in f"
    assert clean("/tmp/ipykernel_1/23.py:2: UserWarning: y") == "<cell>:2: UserWarning: y"
    assert clean("y[9] = 10 is outside the 10 classes") == "y[9] = 10 is outside the 10 classes"


def test_the_comparison_keeps_the_finding() -> None:
    """Decimals and versions may differ; values, lines and names may not."""
    clean = cleaner()
    assert clean("mean -0.0613, torch 2.13.0+cpu") == clean("mean -0.0614, torch 2.13.0+cu130")
    assert clean("In [5] line 3") == clean("In [1] line 3")
    for one, other in (("y[9] = 10", "y[8] = 10"), ("line 3", "line 4"), ("f32[2]", "f32[3]")):
        assert clean(one) != clean(other)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("pass", []),
        ("del failing.outputs[0]", ["fails without a report"]),
        ("failing.outputs.clear()", ["fails, or does not, against its tag"]),
        ("cells[0].execution_count = None", ["not stored by one run from top to bottom"]),
        ("shown['text/plain'] += '/home/me/train.py'", ["machine path '/home/'"]),
        ("shown['text/html'] = 'x' * 300_001", ["larger than 300000 bytes"]),
        ("shown['widget-view'] = {}", ["not static, or not whole: ['text/html', "]),
        ("notebook.cells += notebook.cells[:1] * 32", [" cells"]),
    ],
)
def test_damage_is_seen(damage: str, said: list[str]) -> None:
    """In the quickstart one thing is wrong, and that alone is told."""
    notebook = read("quickstart")
    cells = code_cells(notebook)
    failing = next(cell for cell in cells if RAISES in cell.metadata.get("tags", []))
    shown = failing.outputs[0].data
    exec(damage, locals())
    found = faults(notebook)
    assert len(found) == len(said)
    assert all(words in text for words, text in zip(said, found, strict=True))


def test_the_quickstart_is_the_first_step() -> None:
    text = "".join(cell.source for cell in read("quickstart").cells)
    assert "mybinder.org" in text
    assert "colab.research.google.com" in text
    assert set(re.findall(r"\]\((\d\d_\w+)\.ipynb\)", text)) == set(NAMES) - {"quickstart"}
    for target in re.findall(r"\]\((?!http)([\w./]+)\)", text):
        assert (NOTEBOOKS / Path(target)).exists()
