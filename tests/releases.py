"""What the kernels of torch 2.13.0 print, in the words of the release that the tests run on."""

from __future__ import annotations

import torch

from cudalens.core.device_asserts import as_printed_by
from tests.wheel_asserts import known_sites


def here(quoted: str) -> str:
    """Return a line of 2.13.0, or only its place or what follows it, as it is printed here."""
    if quoted.endswith("` failed."):
        return as_printed_by(torch.__version__, quoted) or ""
    place, colon, rest = quoted.partition(": ")
    words = next((site.expression for site in known_sites() if site.place == place), "")
    line = as_printed_by(torch.__version__, f"{place}: kernel: Assertion `{words}` failed.")
    return f"{(line or '').partition(': ')[0]}{colon}{rest}"


def release() -> tuple[int, int]:
    """Return the installed release, as ``(2, 13)``."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
