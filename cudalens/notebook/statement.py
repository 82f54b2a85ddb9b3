"""Code that a line magic runs, compiled at its place in the cell: ``%cudacheck`` and ``%time``.

IPython is never imported here.
"""

from __future__ import annotations

import ast
import linecache
from contextlib import suppress
from types import CodeType
from typing import Any, NamedTuple

from cudalens.core._python import innermost
from cudalens.notebook import _ipython
from cudalens.source.cell_text import split_lines
from cudalens.source.files import CELLS, cell_number


class CellPlace(NamedTuple):
    """Place of typed code: the name of its cell, and the text above it and before it there."""

    filename: str
    lines: int = 0
    before: str = ""

    def move(self, tree: ast.AST) -> None:
        """Move the nodes of a tree to their positions in the cell."""
        columns = len(self.before.encode())  # ast counts UTF-8 bytes
        for node in ast.walk(tree):
            if isinstance(node, ast.expr | ast.stmt):
                node.lineno += self.lines
                node.end_lineno = (node.end_lineno or 0) + self.lines
                node.col_offset += columns
                node.end_col_offset = (node.end_col_offset or 0) + columns


def compiled(shell: Any, statement: str) -> list[CodeType]:
    """Compile a statement in parts, the last of which evaluates to its value, if it has one."""
    text = shell.transform_cell(statement).rstrip("\n")
    place = place_in_cell(shell, text) or _place_of_its_own(shell, text)
    tree = shell.compile.ast_parse(text, filename=place.filename)
    place.move(tree)
    body = shell.transform_ast(tree).body
    # As in IPython, a semicolon at the end suppresses the value.
    has_value = bool(body) and isinstance(body[-1], ast.Expr) and not text.endswith(";")
    if not has_value:
        return [shell.compile(ast.Module(body, []), place.filename, "exec")]
    first, last = ast.Module(body[:-1], []), ast.Expression(body[-1].value)
    return [
        shell.compile(first, place.filename, "exec"),
        shell.compile(last, place.filename, "eval"),
    ]


def run(shell: Any, parts: list[CodeType], user_locals: dict[str, Any]) -> Any:
    """Run the parts of a statement, and return its value."""
    __tracebackhide__ = True
    value = None
    for code in parts:
        # `eval` also runs code that was compiled as statements.
        value = eval(code, shell.user_global_ns, user_locals)
    return value


def raising(error: BaseException, filename: str, line: int = 1) -> CodeType:
    """Return code that raises an exception, and nothing else, in a line of a cell.

    It needs no name in the cell's namespace: the exception is a constant of the code.
    """
    code = compile("\n" * (line - 1) + "raise 'error'", filename, "exec")
    constants = (error if item == "error" else item for item in code.co_consts)
    return code.replace(co_consts=tuple(constants))


def give_line(shell: Any, error: BaseException) -> None:
    """Give a finding that is raised after its call a traceback that ends in the call's line."""
    source = getattr(getattr(error, "report", None), "source", None)
    if source is None or error.__traceback__ is not None:
        return
    names = [name for name, number in CELLS.of_shell(shell).items() if number == source.cell]
    if source.cell is not None and names:
        # The error is raised only for the traceback entry, whose line is the cell's.
        with suppress(BaseException):
            exec(raising(error, names[-1], source.line), shell.user_ns)
        trace = error.__traceback__
        error.__traceback__ = None if trace is None else trace.tb_next  # without this frame


def place_in_cell(shell: Any, text: str) -> CellPlace | None:
    """Return the place of the running line magic, and put ``text`` into its line of the cell.

    ``None`` where no cell calls the magic, or the text has several lines.
    """
    frame = _ipython.caller_of_line_magic()
    if frame is None or "\n" in text or frame.f_code.co_filename not in CELLS.of_shell(shell):
        return None
    filename, line = frame.f_code.co_filename, frame.f_lineno
    lines = [line.rstrip("\n") for line in linecache.getlines(filename)]
    # An instruction has two bytes, and its column counts those of UTF-8.
    column = list(frame.f_code.co_positions())[frame.f_lasti // 2][2] or 0
    before = lines[line - 1].encode()[:column].decode()
    lines[line - 1] = before + text
    CELLS.register(filename, cell_number(filename), lines, CELLS.typed.get(filename, ()))
    return CellPlace(filename, line - 1, before)


def _place_of_its_own(shell: Any, text: str) -> CellPlace:
    names = CELLS.of_shell(shell)
    cell = innermost(lambda frame: frame.f_code.co_filename in names)
    number = shell.execution_count if cell is None else names[cell.f_code.co_filename]
    filename = str(shell.compile.cache(text, number))
    if filename not in names:
        CELLS.numbers_of_shell[filename] = number
    CELLS.register(filename, number, split_lines(text))
    return CellPlace(filename)
