"""Measurements that need a fresh process each: run one, and take the JSON that it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 300


def measured_in_child(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run ``python -m module`` from the checkout, and give the JSON of its last line.

    Args:
        environment: variables that this process alone gets.

    Raises:
        RuntimeError: it failed; the message has the end of what it said.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        msg = f"{module} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}"
        raise RuntimeError(msg)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
