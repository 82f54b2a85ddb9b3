"""Say where a failure happened: versions, device, rank.  Nothing here reads a tensor."""

from __future__ import annotations

import os
import platform
import sys

from cudalens.core.report_types import Environment
from cudalens.core.version import __version__


def is_simulated() -> bool:
    """Tell whether the simulated CUDA device is active."""
    package = sys.modules.get("cudalens.simulate")
    return package is not None and package.current() is not None


def rehearsed_fault() -> object | None:
    """Give what ended the context of the simulated device, ``None`` while it lives or is off."""
    package = sys.modules.get("cudalens.simulate")
    running = package.current() if package is not None else None
    return None if running is None else running.fault


def describe() -> Environment:
    """Describe this process; asks the driver only for what host memory already holds."""
    import torch

    return Environment(
        cudalens=__version__,
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        device=_device_name(),
        simulated=is_simulated(),
        rank=_rank(),
    )


def _device_name() -> str | None:
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    try:
        return str(torch.cuda.get_device_name())
    except RuntimeError:  # a lost context cannot tell its name
        return None


def _rank() -> int | None:
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else None
