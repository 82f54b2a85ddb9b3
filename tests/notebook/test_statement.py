"""Code behind a line magic: its places in the cell, its value, and what is raised there."""

from __future__ import annotations

import ast
import linecache
import sys
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from cudalens.core.report import SourceSpan
from cudalens.notebook import statement
from cudalens.notebook.statement import CellPlace, compiled, give_line, place_in_cell, raising, run
from cudalens.source.files import CELLS, CellRegistry
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


def test_a_statement_of_a_cell_that_calls_no_magic_has_the_number_of_the_cell(shell: Any) -> None:
    names = CELLS.of_shell(shell)
    found: list[Any] = []
    with patch.dict(names, {"its cell": shell.execution_count + 7}):
        call = compile("found.extend(compiled(shell, 'x = 7'))", "its cell", "exec")
        exec(call, {"found": found, "compiled": compiled, "shell": shell})
        assert names[found[0].co_filename] == shell.execution_count + 7


def test_the_place_of_a_statement_is_known_to_a_shell_without_a_map(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(statement, "CELLS", CellRegistry())
    compiler = SimpleNamespace(cache=lambda text, number: f"<cell {number}>")
    bare = SimpleNamespace(compile=compiler, execution_count=8)
    assert statement._place_of_its_own(bare, "x = 1\ny = 2") == CellPlace("<cell 8>")
    assert statement.CELLS.numbers_of_shell == statement.CELLS.numbers == {"<cell 8>": 8}
    assert linecache.getlines("<cell 8>") == ["x = 1\n", "y = 2\n"]
    statement.CELLS.forget("<cell 8>")


@pytest.mark.parametrize(("text", "is_known"), [("t[i]", True), ("t[\ni]", False)])
@pytest.mark.parametrize("of_cell", [True, False])
def test_a_line_of_code_has_a_place_in_a_cell_that_the_shell_knows(
    text: str, is_known: bool, of_cell: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = CellRegistry()
    monkeypatch.setattr(statement, "CELLS", registry)
    registry.register("the cell", 4, ["a = 1", "b = call()", "c = 2"], ["%a"])
    registry.numbers_of_shell = {"the cell": 4} if of_cell else {}
    frames: list[Any] = []
    given = {"call": lambda: frames.append(sys._getframe().f_back) or place_in_cell(bare, text)}
    monkeypatch.setattr(statement._ipython, "caller_of_line_magic", lambda: frames[0])
    bare = SimpleNamespace(compile=None)
    exec(compile("a = 1\nb = call()\nc = 2", "the cell", "exec"), given)
    place = CellPlace("the cell", 1, "b = ") if is_known and of_cell else None
    assert given["b"] == place
    if place is not None:
        lines = ["a = 1\n", f"b = {text}\n", "c = 2\n"]
        assert linecache.getlines("the cell") == lines
        assert registry.typed == {"the cell": ("%a",)}
    registry.forget("the cell")


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
    assert isinstance(first, ast.Expr) and isinstance(first.value, ast.BinOp)
    assert (first.value.right.lineno, first.value.right.col_offset) == (4, 9)
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
