"""Measurements that need a fresh process each: run one, and take the JSON that it prints."""

from __future__ import annotations

import json
from typing import Any

from tests.processes import python

TIMEOUT_S = 300


def measured_in_child(module: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """Run ``python -m module`` from the checkout, and give the JSON of its last line.

    Args:
        environment: variables that this process alone gets.

    Raises:
        RuntimeError: it failed; the message has the end of what it said.
    """
    done = python("-m", module, *arguments, timeout=TIMEOUT_S, fresh=True, **environment)
    if done.returncode:
        msg = f"{module} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}"
        raise RuntimeError(msg)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
