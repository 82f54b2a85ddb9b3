"""What the package asks for is there already where notebooks are hosted."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
ASKED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ON_COLAB = {
    found.name: str(found.specifier).removeprefix("==")
    for line in (ROOT / "tests" / "colab.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
    for found in [Requirement(line)]
}


@pytest.mark.parametrize("asked", ASKED["dependencies"])
def test_an_install_replaces_nothing_that_colab_has(asked: str) -> None:
    """IPython and ipywidgets are loaded before the first cell: another release needs a restart."""
    needed = Requirement(asked)
    assert needed.name in ON_COLAB or needed.name not in {"ipython", "ipywidgets"}
    if needed.name in ON_COLAB:
        assert needed.specifier.contains(ON_COLAB[needed.name])


@pytest.mark.parametrize("asked", ASKED["dependencies"])
def test_no_dependency_has_an_upper_bound(asked: str) -> None:
    """A bound here is a conflict in somebody's environment."""
    assert all(part.operator == ">=" for part in Requirement(asked).specifier)
