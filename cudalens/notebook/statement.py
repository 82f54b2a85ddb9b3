"""The statement behind ``%cudacheck``, run at its place in the cell.

The shell is only talked to, never imported.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from types import CodeType
from typing import Any

from cudalens.core._python import innermost
from cudalens.session.options import OptionsError, split_line
from cudalens.source.cell_text import split_lines
from cudalens.source.files import cell_number, cells_of, note_cell, register_cell, typed_of
from cudalens.source.timed_cells import CellPosition, cell_position_of

_TEXT = r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_CALL = re.compile(rf"(?<!await )get_ipython\(\)\.run_line_magic\('cudacheck', {_TEXT}\)")


def awaited(lines: list[str]) -> list[str]:
    """Await the calls of the magic whose statements do: a function cannot for its caller."""

    def replaced(call: re.Match[str]) -> str:
        try:
            statement = split_line(ast.literal_eval(call[1]))[1]
        except OptionsError:
            return call[0]
        return f"await {call[0]}" if does_await(statement) else call[0]

    return [_CALL.sub(replaced, line) for line in lines]


def does_await(statement: str) -> bool:
    """Return whether a statement awaits."""
    try:
        code = compile(statement, "<statement>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except (SyntaxError, ValueError):
        return False
    return bool(code.co_flags & inspect.CO_COROUTINE)


def compiled(shell: Any, statement: str) -> list[CodeType]:
    """Compile a statement, in parts: the last gives its value.

    It gets the line and the columns that it has in the cell which calls the magic.
    """
    text = shell.transform_cell(statement).rstrip("\n")
    filename, line, before = _place(shell, text)
    tree = shell.compile.ast_parse("\n" * (line - 1) + text, filename=filename)
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt):
            node.col_offset += len(before.encode())
            node.end_col_offset = (node.end_col_offset or 0) + len(before.encode())
    body = shell.transform_ast(tree).body
    has_value = bool(body) and isinstance(body[-1], ast.Expr) and not text.endswith(";")
    with shell.compile.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if shell.autoawait else 0):
        if not has_value:
            return [shell.compile(ast.Module(body, []), filename, "exec")]
        first, last = ast.Module(body[:-1], []), ast.Expression(body[-1].value)
        return [shell.compile(first, filename, "exec"), shell.compile(last, filename, "eval")]


def run(shell: Any, parts: list[CodeType], user_locals: dict[str, Any]) -> Any:
    """Run the parts of a statement, and return its value."""
    __tracebackhide__ = True
    value = None
    for code in parts:
        value = eval(code, shell.user_global_ns, user_locals)
    return value


async def run_async(shell: Any, parts: list[CodeType], user_locals: dict[str, Any]) -> Any:
    """Run the parts of a statement that awaits, and return its value."""
    __tracebackhide__ = True
    value = None
    for code in parts:
        value = eval(code, shell.user_global_ns, user_locals)
        if code.co_flags & inspect.CO_COROUTINE:
            value = await value
    return value


def _place(shell: Any, text: str) -> tuple[str, int, str]:
    """Return file name, line and what is before the statement on it; the file has it there then."""
    names = cells_of(shell)
    magic = innermost(lambda frame: frame.f_code.co_name == "run_line_magic")
    frame = None if magic is None else magic.f_back
    position = None if frame is None else cell_position_of(frame.f_code)
    if (
        frame is None
        or "\n" in text
        or (position is None and frame.f_code.co_filename not in names)
    ):
        cell = innermost(lambda frame: frame.f_code.co_filename in names)
        number = shell.execution_count if cell is None else names[cell.f_code.co_filename]
        filename = str(shell.compile.cache(text, number))
        if filename not in names:
            note_cell(filename, number)
        register_cell(filename, number, split_lines(text))
        return filename, 1, ""
    position = position or CellPosition(frame.f_code.co_filename)
    filename, line = position.filename, frame.f_lineno + position.lines
    lines = [line.rstrip("\n") for line in linecache.getlines(filename)]
    column = list(frame.f_code.co_positions())[frame.f_lasti // 2][2] or 0
    before = lines[line - 1].encode()[: column + (position.columns or 0)].decode()
    before = before.removesuffix("await ")
    typed = list(typed_of(filename))
    lines[line - 1] = before + text
    if "get_ipython()" not in text:
        typed[line - 1 : line] = [before + text] if typed else []
    # The shell's own number first: a kernel names a cell by its text, also when it runs again.
    number = names.get(filename) or cell_number(filename)
    register_cell(filename, number, lines, typed)
    return filename, line, before
