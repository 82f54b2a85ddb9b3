"""Compiles and runs the body of a checked cell as the shell would have done without the magic.

The body keeps the file name and the line numbers of the cell that it was typed in: the text that
Python compiles is the cell with its magic lines as comments, and ``linecache`` gets the same text,
so tracebacks, debuggers and ``executing`` all read the lines that the user sees.

The shell is only talked to, never imported.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from cudalens.core._python import innermost
from cudalens.source.cell_text import (
    comment_out,
    ends_in_semicolon,
    lines_above,
    split_lines,
    transformed,
    typed_lines,
)
from cudalens.source.files import cell_number, cells_of, note_cell, register_cell, typed_of
from cudalens.source.timed_cells import Home, home_of


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Code that is ready to run in the user's namespace."""

    shell: Any
    tree: ast.Module
    filename: str
    text: str
    user_locals: dict[str, Any]

    @property
    def is_async(self) -> bool:
        """Whether it awaits at top level, so that :meth:`run_async` has to run it."""
        return needs_await(self.shell, self.tree, self.filename)

    def run(self) -> Any:
        """Run it and return the value that the shell has to display."""
        # IPython hides every frame above the one that carries this name.
        __tracebackhide__ = "__ipython_bottom__"
        value = None
        for code in self._steps():
            value = eval(code, self.shell.user_global_ns, self.user_locals)
        return value

    async def run_async(self) -> Any:
        """Run it in the event loop that is running, as :meth:`run` does."""
        __tracebackhide__ = "__ipython_bottom__"
        value = None
        for code in self._steps():
            value = eval(code, self.shell.user_global_ns, self.user_locals)
            if _is_coroutine(code):
                value = await value
        return value

    def _steps(self) -> Iterator[CodeType]:
        # One statement at a time, as the shell does: what an earlier statement changed (a future
        # import) counts for the next one, and what ran before a failure did run.
        tree = self.shell.transform_ast(self.tree)
        # A semicolon at the end silences the whole cell, whatever the shell would display.
        is_silenced = ends_in_semicolon(self.text)
        interactivity = "none" if is_silenced else self.shell.ast_node_interactivity
        for node, mode in _modes(tree.body, interactivity):
            yield _compile(self.shell, node, self.filename, mode)


def cell_unit(shell: Any, raw: str | None, line: str, body: str) -> Unit:
    """Prepare the body of a cell magic; ``raw`` is the cell as typed, if that is known."""
    above = lines_above(raw, body)
    frame = _cell_frame(shell)
    text = transformed(shell, body)
    typed = typed_lines(body, text)
    if above is None or frame is None:
        above = [f"%%cudacheck {line}".rstrip()]
        text = comment_out(above) + text
        filename = _new_name(shell, text, frame)
    else:
        text = comment_out(above) + text
        filename = frame.f_code.co_filename
    _remember(shell, filename, text, [*above, *typed])
    return _parsed(shell, filename, text, shell.user_ns)


def statement_unit(shell: Any, statement: str, user_locals: dict[str, Any]) -> Unit:
    """Prepare the statement behind a line magic, at the line of the cell that it stands on."""
    text = shell.transform_cell(statement).rstrip("\n")
    frame = _caller_of_magic(shell)
    if frame is None or "\n" in text:
        filename = _new_name(shell, text, _cell_frame(shell))
        _remember(shell, filename, text)
        return _parsed(shell, filename, text, user_locals)
    home = home_of(frame.f_code) or Home(frame.f_code.co_filename)
    filename, number = home.filename, frame.f_lineno + home.lines
    lines = [line.rstrip("\n") for line in linecache.getlines(filename)]
    column = list(frame.f_code.co_positions())[frame.f_lasti // 2][2] or 0
    before = lines[number - 1].encode()[: column + (home.columns or 0)].decode()
    before = before.removesuffix("await ")
    lines[number - 1] = before + text
    typed = list(typed_of(filename)) if home.filename != frame.f_code.co_filename else []
    typed[number - 1 : number] = lines[number - 1 : number] if typed else []
    _remember(shell, filename, "\n".join(lines), typed)
    unit = _parsed(shell, filename, "\n" * (number - 1) + text, user_locals)
    for node in ast.walk(unit.tree):
        if isinstance(node, ast.expr | ast.stmt):
            node.col_offset += len(before.encode())
            node.end_col_offset = (node.end_col_offset or 0) + len(before.encode())
    return unit


def needs_await(shell: Any, tree: ast.Module, filename: str = "<cell>") -> bool:
    """Return whether the code awaits at top level and the shell allows it.

    Raises:
        SyntaxError: a statement parses but does not compile.
    """
    return any(
        _is_coroutine(_compile(shell, node, filename, mode))
        for node, mode in _modes(tree.body, "none")
    )


def unfit(shell: Any, text: str) -> str | None:
    """Return the part of ``text`` that Python refuses to compile, at its lines; else ``None``."""
    try:
        tree = shell.compile.ast_parse(text)
    except (SyntaxError, ValueError, OverflowError, MemoryError):
        return text
    for node in tree.body:
        try:
            _compile(shell, node, "<cell>", "exec")
        except (SyntaxError, ValueError, OverflowError):
            kept = _lines_of(node)
            lines = enumerate(text.split("\n"), start=1)
            return "\n".join(line if number in kept else "" for number, line in lines)
    return None


def _parsed(shell: Any, filename: str, text: str, user_locals: dict[str, Any]) -> Unit:
    tree = shell.compile.ast_parse(text, filename=filename)
    return Unit(shell=shell, tree=tree, filename=filename, text=text, user_locals=user_locals)


def _remember(shell: Any, filename: str, text: str, typed: Sequence[str] = ()) -> None:
    # The shell's own number first: a kernel names a cell by its text, also when it runs again.
    number = cells_of(shell).get(filename) or cell_number(filename)
    assert number is not None
    register_cell(filename, number, split_lines(text), typed)


def _new_name(shell: Any, text: str, frame: FrameType | None) -> str:
    """Have the shell name a text of its own, in the cell that ``frame`` runs."""
    names = cells_of(shell)
    number = shell.execution_count if frame is None else names[frame.f_code.co_filename]
    filename = str(shell.compile.cache(text, number))
    if filename not in names:
        note_cell(filename, number)
    return filename


def _cell_frame(shell: Any) -> FrameType | None:
    """Find the innermost frame that runs the text of a cell."""
    names = cells_of(shell)
    return innermost(lambda frame: frame.f_code.co_filename in names)


def _caller_of_magic(shell: Any) -> FrameType | None:
    """Find the frame that called the line magic, when it is a line of a cell."""
    frame = innermost(lambda frame: frame.f_code.co_name == "run_line_magic")
    caller = frame.f_back if frame is not None else None
    if caller is None:
        return None
    home = home_of(caller.f_code)
    is_placed = home is not None and home.columns is not None
    return caller if is_placed or caller.f_code.co_filename in cells_of(shell) else None


def _is_coroutine(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_COROUTINE)


def _compile(shell: Any, node: ast.stmt, filename: str, mode: str) -> CodeType:
    tree: ast.mod = ast.Module([node], [])
    if mode == "single":
        tree = ast.Interactive([node])
    elif mode == "eval":
        assert isinstance(node, ast.Expr)
        tree = ast.Expression(node.value)
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if shell.autoawait else 0
    with shell.compile.extra_flags(flags):
        code: CodeType = shell.compile(tree, filename, mode)
    return code


def _modes(body: list[ast.stmt], interactivity: str) -> Iterator[tuple[ast.stmt, str]]:
    """Pair each statement with its compile mode, by the shell's ``ast_node_interactivity``.

    The last expression is evaluated, not displayed: its value is what the magic returns.
    """
    if not body:
        return
    nodes = list(body)
    if interactivity == "last_expr_or_assign":
        nodes += _assigned_name(nodes[-1])
    shown = "single" if interactivity == "all" else "exec"
    for node in nodes[:-1]:
        yield node, shown
    last = nodes[-1]
    if interactivity == "none":
        yield last, "exec"
    elif isinstance(last, ast.Expr):
        yield last, "eval"
    else:
        yield last, "single" if interactivity in {"all", "last"} else "exec"


def _assigned_name(node: ast.stmt) -> list[ast.stmt]:
    """Return an expression that shows the name which ``node`` assigns, when it is a single one."""
    target: ast.expr | None = None
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        target = node.target
    if not isinstance(target, ast.Name):
        return []
    shown = ast.copy_location(ast.Expr(ast.Name(target.id, ast.Load())), node)
    return [ast.fix_missing_locations(shown)]


def _lines_of(node: ast.stmt) -> range:
    numbered = [part for part in ast.walk(node) if isinstance(part, ast.expr | ast.stmt)]
    first = min(part.lineno for part in numbered)
    return range(first, (node.end_lineno or node.lineno) + 1)
