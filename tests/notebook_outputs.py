"""Execute the notebooks and store their outputs: ``python -m tests.notebook_outputs [name …]``.

The outputs are what a reader on GitHub sees, so nothing of the machine may be left in them.  What
is taken out is listed once, in ``nbval_sanitize.cfg``: sections named ``stored …`` are applied when
the outputs are stored and when they are compared, the others when they are compared only.
"""

from __future__ import annotations

import configparser
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbclient
import nbformat

from tests.processes import ROOT, environment

NOTEBOOKS = ROOT / "notebooks"
SANITIZE = Path(__file__).with_name("nbval_sanitize.cfg")
STORED = "stored "
TIMEOUT_S = 300


def replacements(*, prefix: str = "") -> list[tuple[str, str]]:
    """Read the regular expressions of the sections whose name starts with ``prefix``."""
    parser = configparser.RawConfigParser()
    parser.read(SANITIZE, encoding="utf-8")
    return [
        (parser[name]["regex"], parser[name]["replace"])
        for name in parser.sections()
        if name.startswith(prefix)
    ]


def cleaner(*, prefix: str = "") -> Callable[[str], str]:
    """Return the function that applies the replacements of some sections to a text."""
    patterns = replacements(prefix=prefix)

    def clean(text: str) -> str:
        for regex, replacement in patterns:
            text = re.sub(regex, replacement, text)
        return text

    return clean


def deep_map(value: Any, change: Callable[[str], str]) -> Any:
    """Apply ``change`` to every string inside lists and mappings."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [deep_map(item, change) for item in value]
    if isinstance(value, dict):
        return nbformat.from_dict({key: deep_map(item, change) for key, item in value.items()})
    return value


def executed(notebook: nbformat.NotebookNode, *, folder: Path = NOTEBOOKS) -> Any:
    """Run every cell in a fresh kernel; a cell without ``raises-exception`` must not fail."""
    with tempfile.TemporaryDirectory() as scratch:
        client = nbclient.NotebookClient(
            notebook,
            timeout=TIMEOUT_S,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
            record_timing=False,
            # How a stream is cut into messages depends on how busy the machine is.
            coalesce_streams=True,
        )
        client.execute(
            env=environment(IPYTHONDIR=scratch, CUDALENS_WIDGETS="0", HF_HUB_OFFLINE="1")
        )
    return notebook


def stored(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return the notebook as it is kept: text without machine paths, no data of the kernel."""
    clean = cleaner(prefix=STORED)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [deep_map(output, clean) for output in cell.outputs]
            cell.metadata.pop("execution", None)
    notebook.metadata.language_info = {"name": "python", "pygments_lexer": "ipython3"}
    notebook.metadata.pop("widgets", None)
    return notebook


def main(names: list[str]) -> None:
    """Execute and store the notebooks of these names, or all of them."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        start = time.perf_counter()
        notebook = stored(executed(nbformat.read(path, as_version=4)))
        nbformat.write(notebook, path)
        size = path.stat().st_size / 1000
        print(f"{path.name}: {time.perf_counter() - start:.1f} s, {size:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
