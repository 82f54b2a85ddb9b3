"""An install changes nothing that is there where notebooks are hosted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pip
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ASKED: list[str] = PROJECT["dependencies"]
HOSTED: dict[str, dict[str, str]] = json.loads(
    (ROOT / "tests" / "data" / "hosted_notebooks.json").read_text(encoding="utf-8")
)
"""By place, with where its list is published: what is installed there of what may matter."""
ON_COLAB = {
    found.name: str(found.specifier).removeprefix("==")
    for line in (ROOT / "tests" / "colab.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
    for found in [Requirement(line)]
}


def metadata(name: str, version: str, needs: Iterable[str] = ()) -> str:
    """Return what a distribution says of itself."""
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    return "\n".join([*lines, *(f"Requires-Dist: {need}" for need in needs), ""])


def add_wheel(folder: Path, name: str, version: str, needs: Iterable[str] = ()) -> None:
    """Put an empty wheel into a folder."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata(name, version, needs))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def would_install(
    folder: Path, installed: dict[str, str], asked: list[str], *, is_pinned: bool = False
) -> set[str]:
    """Return what pip would install with a package that asks for this, without a network.

    Everything can be had in a newer release.

    Args:
        is_pinned: what is installed is a constraint as well, as in NGC's images.
    """
    (wheels := folder / "wheels").mkdir()
    add_wheel(wheels, "cudalens", "1.0", asked)
    for name in {*(Requirement(one).name for one in asked), *installed}:
        add_wheel(wheels, name, "99.0")
    (there := folder / "there").mkdir()
    (there / "pip").symlink_to(Path(pip.__file__).parent)
    for name, version in installed.items():
        (info := there / f"{name}-{version}.dist-info").mkdir()
        (info / "METADATA").write_text(metadata(name, version), encoding="utf-8")
        (info / "INSTALLER").write_text("conda\n", encoding="utf-8")
        (info / "RECORD").write_text("", encoding="utf-8")
    pins = folder / "constraints.txt"
    lines = [f"{name}=={version}\n" for name, version in installed.items() if is_pinned]
    pins.write_text("".join(lines), encoding="utf-8")
    # Without site-packages pip sees what is `there`, and nothing of the tests' own environment.
    command = [sys.executable, "-S", "-m", "pip", "--isolated", "install", "--quiet", "--dry-run"]
    command += ["--no-index", "--find-links", str(wheels), "--constraint", str(pins)]
    done = subprocess.run(
        [*command, "--report", "-", "cudalens"],
        env={**os.environ, "PYTHONPATH": str(there), "PIP_CONFIG_FILE": os.devnull},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {item["metadata"]["name"] for item in json.loads(done.stdout)["install"]}


@pytest.mark.parametrize("place", HOSTED)
def test_an_install_changes_nothing_that_is_there(place: str, tmp_path: Path) -> None:
    """A kernel that runs has loaded it, and torchvision was built for this torch."""
    missing = {Requirement(one).name for one in ASKED} - {*HOSTED[place]}
    found = would_install(tmp_path, HOSTED[place], ASKED, is_pinned="NGC" in place)
    assert found == {"cudalens", *missing}


@pytest.mark.parametrize(
    ("installed", "asked", "is_replaced"),
    [
        ("2.10.0+cu128", "torch>=2.10", False),
        ("2.10.0+cu128", "torch>=2.11", True),
        ("2.10.0a0+b4e4ee81", "torch>=2.10.0a0", False),
        ("2.10.0a0+b4e4ee81", "torch>=2.10", True),
    ],
)
def test_a_floor_above_what_is_there_would_replace_it(
    installed: str, asked: str, is_replaced: bool, tmp_path: Path
) -> None:
    """What the test above would notice."""
    found = would_install(tmp_path, {"torch": installed}, [asked])
    assert found == {"cudalens", *["torch"] * is_replaced}


@pytest.mark.parametrize("asked", ASKED)
def test_what_colab_has_is_enough(asked: str) -> None:
    """IPython and ipywidgets are loaded before the first cell: another release needs a restart."""
    needed = Requirement(asked)
    assert needed.name in ON_COLAB or needed.name not in {"ipython", "ipywidgets"}
    if needed.name in ON_COLAB:
        assert needed.specifier.contains(ON_COLAB[needed.name])


@pytest.mark.parametrize("asked", ASKED)
def test_no_dependency_has_an_upper_bound(asked: str) -> None:
    """A bound here is a conflict in somebody's environment."""
    assert all(part.operator == ">=" for part in Requirement(asked).specifier)
