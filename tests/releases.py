"""What differs between the releases of torch that the tests run on."""

from __future__ import annotations

import re

import torch

from cudalens.core.device_asserts import READ_RELEASE

_PLACE = re.compile(r"^([\w.-]+):\d+")


def here(quoted: str) -> str:
    """Return an assertion's line, or its beginning, as it is quoted here: its line is known of one
    release.
    """
    is_read = torch.__version__.partition("+")[0] == READ_RELEASE
    return quoted if is_read else _PLACE.sub(r"\1", quoted)


def release() -> tuple[int, int]:
    """Return the installed release, as ``(2, 13)``."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
