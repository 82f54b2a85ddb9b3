"""Code behind a line magic: its places in the cell, its value, and what is raised there."""

from __future__ import annotations

import ast
import linecache
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cudalens.core.report import SourceSpan
from cudalens.notebook import statement
from cudalens.notebook.statement import CellPlace, compiled, give_line, place_in_cell, raising, run
from cudalens.source.files import CELLS
from tests.shells import new_shell, shell_with_cudalens
from tests.shells import run as run_cell


@pytest.fixture(scope="module")
def shell() -> Iterator[Any]:
    with new_shell() as shell:
        yield shell
        CELLS.numbers_of_shell.clear()


def value(shell: Any, text: str, **names: Any) -> Any:
    """Return the value of a statement, run with these variables."""
    shell.user_ns.update(names)
    return run(shell, compiled(shell, text), shell.user_ns)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1 + 1", 2),
        ("a = 3; a + 1", 4),
        ("a = 3", None),
        ("1 + 1;", None),
        ("pass", None),
        ("", None),
        ("(a := 5)", 5),
        ("if True:\n    7", None),
    ],
)
def test_the_value_of_a_statement_is_that_of_its_last_expression(
    shell: Any, text: str, wanted: object
) -> None:
    assert value(shell, text) == wanted


def test_each_part_runs_once_and_in_order(shell: Any) -> None:
    calls: list[int] = []
    assert value(shell, "put(1); put(2); put(3)", put=lambda at: calls.append(at) or at) == 3
    assert calls == [1, 2, 3]


def test_a_statement_writes_to_the_variables_that_it_is_run_with(shell: Any) -> None:
    own: dict[str, Any] = {}
    run(shell, compiled(shell, "made_here = 1"), own)
    assert own == {"made_here": 1}
    assert "made_here" not in shell.user_ns


def test_a_statement_of_no_cell_has_a_place_of_its_own(shell: Any) -> None:
    (code,) = compiled(shell, "x = 1")
    assert CELLS.of_shell(shell)[code.co_filename] == shell.execution_count
    assert code.co_firstlineno == 1
    assert place_in_cell(shell, "x = 1") is None


@pytest.mark.parametrize("name", ["size", "größe", "大きさ"])
def test_code_behind_a_magic_begins_where_the_magic_stands(name: str) -> None:
    """Python counts its columns in bytes, the typed line is in characters."""
    found: list[CellPlace | None] = []
    with shell_with_cudalens() as shell:
        shell.register_magic_function(
            lambda text: found.append(place_in_cell(shell, text)), "line", "place"
        )
        error, _ = run_cell(shell, f"a = 1\n{name} = %place t[i]")
        (place,) = found
        assert error is None and place is not None
        assert (place.lines, place.before) == (1, f"{name} = ")
        assert linecache.getline(place.filename, 2) == f"{name} = t[i]\n"


def test_nodes_move_to_their_place_in_the_cell() -> None:
    """Columns count bytes, as Python's do."""
    tree = ast.parse("a + b\nc")
    CellPlace("cell", 3, "é = ").move(tree)
    first, second = tree.body
    assert (first.lineno, first.col_offset, first.end_lineno, first.end_col_offset) == (4, 5, 4, 10)
    assert (second.lineno, second.col_offset, second.end_lineno) == (5, 5, 5)
    still = ast.parse("a")
    CellPlace("cell").move(still)
    assert (still.body[0].lineno, still.body[0].col_offset) == (1, 0)


@pytest.mark.parametrize("line", [1, 3])
def test_an_exception_is_raised_in_a_line_of_a_cell(line: int) -> None:
    error = ValueError("mine")
    names: dict[str, Any] = {}
    with pytest.raises(ValueError, match="mine") as caught:
        exec(raising(error, "<the cell>", line), names)
    assert caught.value is error
    last = traceback.extract_tb(error.__traceback__)[-1]
    assert (last.filename, last.lineno) == ("<the cell>", line)
    assert set(names) <= {"__builtins__"}


class FoundError(Exception):
    """A finding of a call that is over, with the place of that call."""

    def __init__(self, source: SourceSpan | None) -> None:
        super().__init__("found")
        self.report = SimpleNamespace(source=source)


@pytest.fixture
def known(shell: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the shell, of which cell 4 was run twice, and cell 5."""
    names = {"first": 4, "again": 4, "other": 5}
    cells = SimpleNamespace(of_shell=lambda shell: names)
    monkeypatch.setattr(statement, "CELLS", cells)
    return shell


def places(error: BaseException) -> list[tuple[str, int | None]]:
    return [(item.filename, item.lineno) for item in traceback.extract_tb(error.__traceback__)]


def test_a_late_finding_ends_in_the_line_of_its_call(known: Any) -> None:
    error = FoundError(SourceSpan(cell=4, line=2))
    give_line(known, error)
    assert places(error) == [("again", 2)]


@pytest.mark.parametrize(
    "source", [None, SourceSpan(cell=9, line=2), SourceSpan(file="a.py", line=2)]
)
def test_a_finding_of_no_cell_gets_no_line(known: Any, source: SourceSpan | None) -> None:
    error = FoundError(source)
    give_line(known, error)
    assert error.__traceback__ is None
    give_line(known, ValueError("no report"))


def test_a_finding_that_has_a_traceback_keeps_it(known: Any) -> None:
    error = FoundError(SourceSpan(cell=4, line=2))
    with pytest.raises(FoundError):
        raise error
    before = error.__traceback__
    give_line(known, error)
    assert error.__traceback__ is before
