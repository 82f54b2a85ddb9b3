"""What ``make quick`` runs: every file of the package has tests that are not a whole folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick import OTHERS, ROOT, selected

FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("cudalens/**/*.py"))


@pytest.mark.parametrize("file", FILES)
def test_each_file_has_a_few_test_files(file: str) -> None:
    found = selected(file)
    assert 0 < len(found) < 8
    assert all((ROOT / item).is_file() for item in found)


def test_a_row_comes_after_the_tests_of_a_files_own() -> None:
    for file, others in OTHERS.items():
        found, row = selected(f"cudalens/{file}"), [f"tests/{item}" for item in others.split()]
        assert found[len(found) - len(row) :] == row, file
        assert len(set(found)) == len(found), file
        assert (ROOT / "cudalens" / file).is_file(), file


def test_own_tests_go_by_the_name_of_the_file() -> None:
    assert selected("cudalens/__main__.py") == ["tests/test_main.py"]
    assert selected("cudalens/core/limits.py") == ["tests/core/test_limits.py"]
    assert selected("tests/core/test_call.py") == ["tests/core/test_call.py"]


def test_a_file_without_tests_is_said() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.quick", "cudalens/none.py"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, "none.py has no tests" in ran.stderr) == (1, True)
    assert Path(ROOT / "Makefile").read_text().count("python -m tests.quick $(FILE)") == 1
