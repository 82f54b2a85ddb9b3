"""Trainings by frameworks on real hardware: a good one runs to its end, a bad label is stopped."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["FRAMEWORKS", "run_framework"]

ROOT = Path(__file__).parent.parent.parent
FRAMEWORKS = ("transformers", "lightning")
GOOD, BAD = 2, 7
"""Labels: there are three classes."""
ALIVE = "\nassert torch.ones(3, device='cuda').sum().item() == 3\nprint('ALIVE')\n"


def run_framework(name: str) -> dict[str, Any]:
    """Train with good labels and with a bad one, each in a fresh process, and tell what it said."""
    if importlib.util.find_spec(name) is None:
        return {"unavailable": f"not installed: {name}"}
    sys.path.insert(0, str(ROOT))
    from tests.integrations.test_callbacks import gpu_program

    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    said = {}
    for label in (GOOD, BAD):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-c", gpu_program(name, bad=label) + ALIVE],
                env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
                cwd=folder, capture_output=True, text=True, timeout=100, check=False,
            )  # fmt: skip
        if done.returncode:
            return {"unavailable": done.stderr[-500:] or "no word", "is_broken": True}
        said[str(label)] = done.stdout.splitlines()
    return {"good": said[str(GOOD)], "bad": said[str(BAD)]}
