"""What a type checker says about a file of the user's under ``mypy --strict``."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.processes import ROOT, python

SETTINGS = """\
[mypy]
strict = true
follow_imports = silent

[mypy-torch.*,IPython.*,ipywidgets.*,networkx.*,matplotlib.*]
follow_imports = skip
ignore_missing_imports = true
"""
"""The types of torch and others take minutes to read, and none of ours depends on them."""
GOOD = """\
from pathlib import Path

import torch

import cudalens
from cudalens.simulate import Simulation


def rows_exist(table: torch.Tensor, rows: torch.Tensor) -> str | None:
    return "a row is missing" if int(rows.max()) >= table.size(0) else None


with cudalens.check(fast=True, nan=False, html=Path("r.html"), max_ops=10) as session:
    pass
report: cudalens.Report | None = session.report
if report is not None:
    text: str = report.to_text(width=80)
with cudalens.guard(), cudalens.simulate.start(announce=False):
    device: torch.device = cudalens.ensure_cuda()
sim: Simulation = cudalens.simulate(lag=2)
sim.stop()
undo = cudalens.register_guard("mylib::lookup", rows_exist, name="rows")
undo()
try:
    cudalens.install()
except cudalens.DeviceIndexError as error:
    found: cudalens.Report | None = error.report
names: list[str] = [guard.name for guards in cudalens.GUARDS.values() for guard in guards]
"""
WRONG = {
    "cudalens.check(fats=True)": 'Unexpected keyword argument "fats" for "check"',
    'cudalens.check(max_ops="many")': 'Argument "max_ops" to "check" has incompatible type',
    'cudalens.simulate(lag="late")': 'Argument "lag" to "__call__"',
    'cudalens.register_guard("mylib::lookup", lambda rows: 3)': 'Argument 2 to "register_guard"',
    "cudalens.chek()": 'has no attribute "chek"; maybe "check"',
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first run of mypy has read."""
    return tmp_path_factory.mktemp("mypy")


def mypy(folder: Path, cache: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "user.py").write_text(text, encoding="utf-8")
    (folder / "mypy.ini").write_text(SETTINGS, encoding="utf-8")
    words = ("-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", str(cache), "user.py")
    return python(*words, cwd=folder, timeout=300, fresh=True, MYPYPATH=str(ROOT))


def test_a_strict_file_of_the_users_passes(tmp_path: Path, cache: Path) -> None:
    done = mypy(tmp_path, cache, GOOD)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough
def test_what_is_misspelt_is_told(tmp_path: Path, cache: Path) -> None:
    done = mypy(tmp_path, cache, "import cudalens\n\n" + "\n".join(WRONG) + "\n")
    lines = [line for line in done.stdout.splitlines() if "error:" in line]
    for number, said in enumerate(WRONG.values(), start=3):
        assert any(f":{number}: " in line and said in line for line in lines), done.stdout
