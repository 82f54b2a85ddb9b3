"""Take the mutants that nothing can notice out of a session: ``python -m tests.mutants FILE``.

The session is cosmic-ray's, whose own filters would count them as killed.  As a plugin of pytest
this module runs the tests of the mutated file first, which mostly end a mutant at once.
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

UNNOTICED = (
    # `|` stands nearly always in annotations, which nothing evaluates: the few unions go too.
    "core/ReplaceBinaryOperator_BitOr_%",
    # The same for the small numbers, names and None that are compared.
    "core/ReplaceComparisonOperator_Eq_Is",
    "core/ReplaceComparisonOperator_NotEq_IsNot",
    "core/ReplaceComparisonOperator_Is_Eq",
    "core/ReplaceComparisonOperator_IsNot_NotEq",
)


def take_out(session: str) -> int:
    """Take them out; return how many are left."""
    with closing(sqlite3.connect(session)) as database, database:
        for operator in UNNOTICED:
            database.execute("DELETE FROM mutation_specs WHERE operator_name LIKE ?", [operator])
        left = "SELECT job_id FROM mutation_specs"
        database.execute(f"DELETE FROM work_items WHERE job_id NOT IN ({left})")
        return int(database.execute("SELECT count(*) FROM work_items").fetchone()[0])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests first that are named after the file which was written last."""
    files = Path("cudalens").rglob("*.py")
    name = max(files, key=lambda file: file.stat().st_mtime).stem.strip("_")
    items.sort(key=lambda item: name not in item.path.stem)


if __name__ == "__main__":
    print(f"{sys.argv[1]}: {take_out(sys.argv[1])} mutants")
