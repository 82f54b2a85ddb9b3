"""The notebooks on real hardware: the same cells fail and run as on the rehearsal device."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

__all__ = ["NAMES", "run_notebook"]

ROOT = Path(__file__).parent.parent.parent
NAMES = tuple(sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")))
RAISES = "raises-exception"
_NEEDED = ("nbformat", "nbclient", "ipykernel", "rich")


def run_notebook(name: str) -> dict[str, Any]:
    """Execute a notebook in a kernel of its own and compare which cells failed with their tags."""
    sys.path.insert(0, str(ROOT / "tests"))
    text = (ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8")
    needed = (*_NEEDED, *(["transformers"] if "import transformers" in text else []))
    missing = [item for item in needed if importlib.util.find_spec(item) is None]
    if missing:
        return {"unavailable": f"not installed: {', '.join(missing)}"}
    import nbformat

    from tests.notebook_outputs import executed

    return told(executed(nbformat.reads(text, as_version=4)))


def told(notebook: Any) -> dict[str, Any]:
    """Return the cells that failed or ran against their tags, and whether the GPU was rehearsed."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = [output for cell in cells for output in cell.outputs]
    texts = [item.get("text", "") + item.get("data", {}).get("text/plain", "") for item in shown]
    wrong = [
        cell.source
        for cell in cells
        if any(item.output_type == "error" for item in cell.outputs)
        != (RAISES in cell.metadata.get("tags", []))
    ]
    return {
        "cells": len(cells),
        "wrong": wrong,
        "rehearsed": any("Rehearsal device" in text for text in texts),
    }
