"""Trainings by frameworks on real hardware: a good one runs to its end, a bad label is stopped."""

from __future__ import annotations

import importlib.util
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
    from tests.integrations.test_callbacks import train_on_cuda

    said = {}
    for label in (GOOD, BAD):
        with tempfile.TemporaryDirectory() as folder:
            done = train_on_cuda(Path(folder), name, bad=label, end=ALIVE)
        if done.returncode:
            return {"unavailable": done.stderr[-500:] or "no word", "is_broken": True}
        said[str(label)] = done.stdout.splitlines()
    return {"good": said[str(GOOD)], "bad": said[str(BAD)]}
