"""The notebooks on torch's CUDA build: the same cells fail, with the rehearsal's verdicts."""

from __future__ import annotations

import re
import sys
from typing import Any

import nbformat
import pytest

from tests.processes import ROOT

sys.path.insert(0, str(ROOT / "tests" / "gpu"))

from notebook_runs import NAMES, told

from tests.notebook_outputs import executed

SEVERAL_GPUS = "08_many_gpus"
RANDOM = re.compile(r"-?\d+\.\d+(e-?\d+)?|0x\w+")
"""What another generator of random numbers changes."""


def verdicts(notebook: Any) -> list[list[str]]:
    """Return for each cell the headlines of the reports that it shows."""
    found = []
    for cell in notebook.cells:
        outputs = cell.get("outputs", ())
        shown = [out.get("text", "") + out.get("data", {}).get("text/plain", "") for out in outputs]
        lines = "\n".join(shown).splitlines()
        found.append([RANDOM.sub("…", line) for line in lines if line.startswith("✗")])
    return found


@pytest.mark.parametrize("name", [name for name in NAMES if name != SEVERAL_GPUS])
def test_a_notebook_gives_the_rehearsal_s_verdicts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8")
    on_cuda = executed(nbformat.reads(text, as_version=4))
    found = told(on_cuda)
    assert (found["rehearsed"], found["wrong"]) == (False, [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    rehearsed = executed(nbformat.reads(text, as_version=4))
    assert told(rehearsed)["rehearsed"]
    assert verdicts(on_cuda) == verdicts(rehearsed)
    assert any(verdicts(on_cuda))
