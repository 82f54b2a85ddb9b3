"""Programs that run as files of the user's under ``--nan``."""

from __future__ import annotations

import linecache
import textwrap
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import cudalens
from cudalens.core.report import Report


def checked(
    code: str, *, nan: Any = True, **variables: Any
) -> tuple[Report | None, dict[str, Any]]:
    """Run a program under the check; return the report, if it is stopped, and its variables."""
    text = textwrap.dedent(code).strip() + "\n"
    name = f"program_{abs(hash(text))}.py"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, **variables}
    session = cudalens.check(nan=nan)
    try:
        with session:
            exec(compile(text, name, "exec"), space)
    except cudalens.NonFiniteError as error:
        assert error.report is session.report
    assert session.internal_errors == []
    return session.report, space
