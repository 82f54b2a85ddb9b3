"""The session of a mutation run; the mutants themselves come from cosmic-ray."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.mutants import pytest_collection_modifyitems, take_out


def test_what_nothing_can_notice_is_taken_out(tmp_path: Path) -> None:
    """What mostly changes an annotation goes, and a changed sum or bound stays."""
    operators = [
        f"core/Replace{name}"
        for name in (
            "BinaryOperator_BitOr_Add",
            "BinaryOperator_Add_BitOr",
            "ComparisonOperator_Eq_Is",
            "ComparisonOperator_Eq_IsNot",
        )
    ]
    file = str(tmp_path / "session.sqlite")
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("CREATE TABLE work_items (job_id)")
        database.execute("CREATE TABLE mutation_specs (job_id, operator_name)")
        for number, operator in enumerate(operators):
            database.execute("INSERT INTO work_items VALUES (?)", [number])
            database.execute("INSERT INTO mutation_specs VALUES (?, ?)", [number, operator])
    assert take_out(file) == 2
    with closing(sqlite3.connect(file)) as database:
        left = database.execute("SELECT operator_name FROM mutation_specs").fetchall()
    assert [name for (name,) in left] == operators[1::2]


@pytest.mark.parametrize("last", ["losses", "_dims"])
def test_the_tests_of_the_mutated_file_come_first(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cudalens/guards"
    folder.mkdir(parents=True)
    for name in ("losses", "_dims"):
        (folder / f"{name}.py").touch()
        os.utime(folder / f"{name}.py", (0, name == last))
    tests: list[Any] = [
        SimpleNamespace(path=Path(f"test_{name}.py")) for name in ("calls", "dims", "losses")
    ]
    pytest_collection_modifyitems(tests)
    assert tests[0].path.stem == f"test_{last.strip('_')}"
