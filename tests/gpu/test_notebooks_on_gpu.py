"""The notebooks on real hardware: the same cells fail and run as on the rehearsal device."""

from __future__ import annotations

import copy
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("rich")

from notebook_outputs import NOTEBOOKS, executed  # noqa: E402

RAISES = "raises-exception"
NEEDS_TRANSFORMERS = ("03_layoutlmv3", "05_seq2seq_summarization")

pytestmark = pytest.mark.gpu


def texts(notebook: Any) -> str:
    """Give all text that the cells show."""
    shown = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            shown.append(output.get("text", ""))
            shown.append(output.get("data", {}).get("text/plain", ""))
    return "\n".join(shown)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_on_the_gpu(path: Any) -> None:
    """Cells fail where they are tagged, and train on behind that, in one process with one GPU."""
    if path.stem in NEEDS_TRANSFORMERS:
        pytest.importorskip("transformers")
    stored = nbformat.read(path, as_version=4)
    notebook = executed(copy.deepcopy(stored))
    assert "Rehearsal device" not in texts(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            failed = any(output.output_type == "error" for output in cell.outputs)
            assert failed == (RAISES in cell.metadata.get("tags", [])), cell.source
