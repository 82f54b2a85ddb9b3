"""Which entry of the package may import which others."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "cudalens"
MAY_IMPORT = {
    "core": "",
    "source": "core",
    "diagnosis": "core",
    "render": "core",
    "guards": "core",
    "logs": "core diagnosis",
    "simulate": "core guards",
    "recorder": "core source",
    "evidence": "core source diagnosis guards recorder",
    "session": "core source diagnosis logs guards recorder evidence simulate",
    "notebook": "core source render session",
    "integrations": "core render session source",
    "__main__": "core source diagnosis logs render guards simulate recorder evidence session "
    "integrations",
    "__init__": "core guards simulate session notebook",
}
"""The entries of the package, and which others each may import: no two of one layer."""
