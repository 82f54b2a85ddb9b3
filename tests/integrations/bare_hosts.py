"""A framework's callback without the framework, of which it needs one base class."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from cudalens.integrations import training  # here, since what is imported below is forgotten


def callback_of(file: str, host: str, base: str) -> Any:
    """Return the callback's class.

    Args:
        file: the module's name below ``cudalens.integrations``.
        host: the package that the base class is imported from.
        base: its name there.
    """
    path = Path(training.__file__).with_name(f"{file}.py")
    spec = spec_from_file_location(f"bare_{file}", path)
    assert spec is not None and spec.loader is not None
    module, package = module_from_spec(spec), ModuleType(host)
    setattr(package, base, type(base, (), {}))
    names = {host.partition(".")[0]: package, host: package}
    with patch.dict(sys.modules, names):
        spec.loader.exec_module(module)
    return module.CudaCheckCallback


def look_up(row: int) -> None:
    """Look up a row of a table with three."""
    table = torch.ones(3, 2, device="cuda")
    torch.nn.functional.embedding(torch.tensor([row], device="cuda"), table)
