"""What it takes until cudalens is there, and how much a report weighs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.children import measured_in_child
from tests.processes import ROOT

KB = 1000


def startup(repetitions: int) -> dict[str, float]:
    """Return the milliseconds of each step on the way to a first checked cell, medians."""
    runs = [measured_in_child(__name__) for _ in range(repetitions)]
    return {name: round(median(run[name] for run in runs), 2) for name in runs[0]}


def _child() -> dict[str, float]:
    """Take each step once, in the order of a notebook."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    found: dict[str, float] = {}

    def timed(name: str, *lines: str) -> None:
        started = time.perf_counter()
        for line in lines:
            shell.run_cell(line).raise_error()
        found[name] = 1000 * (time.perf_counter() - started)

    shell.run_cell("pass")
    timed("import_ms", "import cudalens")
    timed("load_ext_ms", "%load_ext cudalens")
    if "torch" in sys.modules:
        msg = "loading the extension imported torch"
        raise RuntimeError(msg)
    timed("torch_import_ms", "import torch")
    shell.run_cell("x = torch.zeros(2) + 1")
    timed("first_check_ms", "%%cudacheck\nx + 1")
    timed("check_ms", *["%%cudacheck\nx + 1"] * 10)
    found["check_ms"] /= 10
    if not shell.user_ns["torch"].cuda.is_available():
        timed("simulate_ms", "cudalens.simulate()")
    return found


def weights() -> dict[str, float]:
    """Return the kilobytes of one typical report in each of its forms, and of the wheel."""
    report = typical_report()
    bundle = dict(report._repr_mimebundle_())
    found = {
        "report_html_kb": len(report.to_html().encode()),
        "report_bundle_kb": len(json.dumps(bundle).encode()),
        "notebook_kb": len(json.dumps(saved_notebook(report, bundle)).encode()),
        "wheel_kb": len(wheel()),
    }
    return {name: round(size / KB, 1) for name, size in found.items()}


def typical_report() -> Any:
    """Make the report of the most frequent mistake in a small transformer, with all its parts."""
    import torch
    from torch.nn import functional as F  # noqa: N812  torch's own custom

    from benchmarks.growth import timed_report
    from benchmarks.steps import SmallTransformer

    torch.manual_seed(0)
    model = SmallTransformer()
    tokens = torch.randint(0, 50, (8, 32))
    target = torch.randint(0, 50, (8, 32)) + 1
    target[3, 5] = 50

    def fail() -> Any:
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    return timed_report(lambda: fail)[0]


def saved_notebook(report: Any, bundle: dict[str, Any]) -> dict[str, Any]:
    """Return a notebook with one failing cell as a front end saves it, widget state included."""
    import ipywidgets

    view = report.widget()
    state = ipywidgets.Widget.get_manager_state(drop_defaults=False)
    shown = {"version_major": 2, "version_minor": 0, "model_id": view.model_id}
    data = {**bundle, "application/vnd.jupyter.widget-view+json": shown}
    output = {"output_type": "display_data", "data": data, "metadata": {}}
    cell = {"cell_type": "code", "source": "%%cudacheck\ntrain()", "outputs": [output]}
    widgets = {"application/vnd.jupyter.widget-state+json": state}
    return {"cells": [cell], "metadata": {"widgets": widgets}, "nbformat": 4, "nbformat_minor": 5}


def wheel() -> bytes:
    """Build the wheel as ``make package`` does.

    Raises:
        RuntimeError: it cannot be built; the message has the end of what was said.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "build", "--wheel", "--outdir", folder, str(ROOT)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            msg = f"the wheel was not built:\n{(done.stdout + done.stderr)[-2000:]}"
            raise RuntimeError(msg)
        (built,) = Path(folder).glob("*.whl")
        return built.read_bytes()


if __name__ == "__main__":
    print(json.dumps(_child()))
