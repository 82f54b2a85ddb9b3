"""The syntax that a stack entry is running: its expression, its statement, their text.

Since Python 3.11 each instruction has the columns of its source, so the expression is found by
position.  It is accepted only when its kind fits the running instruction and its names are names of
the running code: a file that changed since it was imported has no running expression.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TypeAlias

from cudalens.core._python import parse
from cudalens.core.evidence_types import CallSyntax
from cudalens.source.files import (
    MAX_SOURCES,
    Source,
    cell_number,
    is_top,
    source,
    typed_line,
)
from cudalens.source.safe_eval import SafeEvaluator, evaluator_for
from cudalens.source.stack import Place, Position

Span: TypeAlias = tuple[int, int, int]
"""Line, first column and end column, in characters."""

_INLINED = (ast.ListComp, ast.SetComp, ast.DictComp)
_SCOPES = (ast.Lambda, ast.GeneratorExp, *_INLINED)
_ELSEWHERE = (ast.stmt, ast.ExceptHandler, ast.match_case, *_SCOPES)
_SUBSCRIPTS = ("BINARY_SUBSCR", "BINARY_SLICE", "STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
"""Syntax whose body runs later."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """Running statement and expression of a stack entry; ``None`` where the source has none."""

    place: Place
    lines: Sequence[str] = ()
    node: ast.AST | None = None
    """The running expression: a call, a subscript, an operation."""
    parents: tuple[ast.AST, ...] = ()
    """From the module down to the parent of ``node``."""
    statement: ast.stmt | None = None

    @property
    def scope(self) -> ast.AST | None:
        """The largest syntax around ``node`` whose names are those of this frame."""
        inner = self.node
        for parent in reversed(self.parents):
            if isinstance(parent, _SCOPES):
                return inner
            if isinstance(parent, ast.stmt):
                return parent
            inner = parent
        return self.statement

    @functools.cached_property
    def evaluator(self) -> SafeEvaluator | None:
        """Evaluator with the names of the running code, ``None`` where the frame is gone."""
        frame = self.place.frame
        return None if frame is None else evaluator_for(frame, self._ended_names(frame))

    def _ended_names(self, frame: FrameType) -> set[str]:
        """Return the variables of comprehensions that the frame has left since.

        Since Python 3.12 they are variables of the function, and end when an exception passes.
        """
        names: set[str] = set()
        # The frame has not moved on, or it is that of a comprehension, as before Python 3.12.
        if frame.f_lasti == self.place.lasti or frame.f_code.co_name.endswith("comp>"):
            return names
        path = (*self.parents, self.node)
        for parent in path:
            if isinstance(parent, ast.FunctionDef | ast.Lambda | ast.GeneratorExp):
                names.clear()
            # The iterable of the first loop is evaluated outside.
            elif isinstance(parent, _INLINED) and parent.generators[0].iter not in path:
                targets = (node for loop in parent.generators for node in ast.walk(loop.target))
                names |= {node.id for node in targets if isinstance(node, ast.Name)}
        return names

    @property
    def text(self) -> str | None:
        """The first line of the running statement, stripped."""
        line = self.place.lineno
        if self.statement is not None:  # its line is below its decorators
            line = min(line, self.statement.lineno)
        text = line_text(self.lines, line)
        return text and typed_line(self.place.filename, self.lines, line).strip()

    @property
    def statement_text(self) -> str | None:
        """Text of the running statement alone, where others share its line."""
        node, line = self.statement, self.text
        if node is None or line is None or node.lineno != node.end_lineno:
            return line
        number, whole = node.lineno, self.lines[node.lineno - 1]
        start = column_of(whole, node.col_offset)
        end = column_of(whole, node.end_col_offset or 0)
        others = whole[:start].rstrip().endswith(";") or whole[end:].lstrip().startswith(";")
        is_as_typed = typed_line(self.place.filename, self.lines, number) == whole
        return whole[start:end] if others and is_as_typed else line

    @property
    def call(self) -> CallSyntax | None:
        """The running expression; the whole assignment when it is the target."""
        node = self.node
        if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            node = self.statement
        if node is None:
            return None
        text = _written(node, self.lines)
        is_written_so = text is not None
        return CallSyntax(node=node, text=text or ast.unparse(node), is_written_so=is_written_so)


def running(place: Place) -> Running:
    """Return the statement and expression that a stack entry is running."""
    text = source(place.filename)
    if not text.lines:
        return Running(place=place)
    path: tuple[ast.AST, ...] = ()
    if place.position is not None:
        trees = _trees_around(text, place)
        path = next(filter(None, (_path_to(tree, place.position, place) for tree in trees)), ())
    if not path:
        tree = _whole(text)
        statement = None if tree is None else _statement_at(tree, place.lineno)
        return Running(place=place, lines=text.lines, statement=statement)
    statement = next((item for item in reversed(path) if isinstance(item, ast.stmt)), None)
    return Running(
        place=place, lines=text.lines, node=path[-1], parents=path[:-1], statement=statement
    )


# --- as much of a file as is needed, parsed once --------------------------------------------------


_IN_FSTRING = "is_in_fstring"
"""Attribute of the nodes inside f-strings, whose columns are wrong before Python 3.12."""
_SHORT = 400
"""A source of at most this many lines is parsed as a whole."""
_STARTS = 20
_TOP = re.compile(r"(?!(?:elif|else|except|finally|case)\b)[@\w]")
"""Start of a line that may begin a statement of the module."""


def _trees_around(text: Source, place: Place) -> Iterator[ast.Module]:
    """Yield trees with the running code: of a long source, top-level statements first, then all."""
    if len(text.lines) > _SHORT:
        for first, last in _blocks_around(text.lines, place):
            if (tree := _block(text, first, last)) is not None:
                yield tree
    if (tree := _whole(text)) is not None:
        yield tree


def _blocks_around(lines: Sequence[str], place: Place) -> Iterator[tuple[int, int]]:
    """Yield first and last line of possible statements around a place, nearest first.

    A line inside a string may look like a statement.  Its block does not parse, or does not have
    the position.
    """
    assert place.position is not None
    inside, end = place.position.line, place.position.end_line
    if place.code.co_flags & inspect.CO_OPTIMIZED:  # a function is within one statement
        inside = min(inside, place.code.co_firstlineno)
    # A decorator and the next line belong to one statement.
    after = (n for n in range(end, len(lines)) if _TOP.match(lines[n]) and lines[n - 1][:1] != "@")
    last = next(after, len(lines))
    starts = (n for n in range(min(inside, len(lines)), 0, -1) if _TOP.match(lines[n - 1]))
    for first in itertools.islice(starts, _STARTS):
        yield first, last


def _parsed_lines(text: Source, first: int, last: int) -> ast.Module | None:
    """Parse some lines, with their numbers in the file."""
    try:
        tree = parse("\n".join(text.lines[first - 1 : last]))
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree) if sys.version_info < (3, 12) else ():
        for part in ast.iter_child_nodes(node) if isinstance(node, ast.JoinedStr) else ():
            for inner in ast.walk(part):
                setattr(inner, _IN_FSTRING, True)
    return ast.increment_lineno(tree, first - 1)


_block = functools.lru_cache(maxsize=32)(_parsed_lines)


# A report reads all cells of a notebook several times: a smaller cache would evict each cell just
# before its next use.
@functools.lru_cache(maxsize=MAX_SOURCES)
def _whole(text: Source) -> ast.Module | None:
    """Parse a file or cell once."""
    return _parsed_lines(text, 1, len(text.lines))


def parsed_source(filename: str) -> ast.Module | None:
    """Return the syntax tree of a whole file or cell, ``None`` where it cannot be read."""
    return _whole(source(filename))


def function_of(code: CodeType) -> ast.FunctionDef | None:
    """Return the syntax of the function that a code object was compiled from."""
    tree = parsed_source(code.co_filename)
    functions = (it for it in ast.walk(tree or ast.Pass()) if isinstance(it, ast.FunctionDef))
    key = code.co_firstlineno, code.co_name
    return next((it for it in functions if (it.lineno, it.name) == key), None)


def has_line(node: ast.stmt | ast.expr, line: int) -> bool:
    """Return whether a statement or expression covers a line."""
    return node.lineno <= line <= (node.end_lineno or 0)


def expressions_in(root: ast.AST) -> Iterator[ast.expr]:
    """Walk the expressions below ``root`` that are evaluated where ``root`` is.

    Bodies of compound statements, lambdas and comprehensions run at other times.
    """
    if isinstance(root, ast.expr):
        yield root
    if isinstance(root, _SCOPES):
        return
    for child in ast.iter_child_nodes(root):
        if not isinstance(child, _ELSEWHERE):
            yield from expressions_in(child)


def mentioned(frame: FrameType) -> dict[str, object]:
    """Return the variables that the code of a frame mentions, ``None`` for a missing one.

    A shell compiles each statement of a cell separately, so a cell has the names of all of them.
    """
    code, variables = frame.f_code, frame.f_locals
    names = [*code.co_names, *code.co_varnames, *code.co_freevars]
    if is_top(code.co_name) and cell_number(code.co_filename) is not None:
        tree = parsed_source(code.co_filename)
        nodes = () if tree is None else ast.walk(tree)
        names += [node.id for node in nodes if isinstance(node, ast.Name)]
    return {name: variables.get(name, frame.f_globals.get(name)) for name in names}


def kind_sources(node: ast.expr) -> tuple[ast.expr, ...]:
    """Return the parts of an expression that determine the kind of its value."""
    if isinstance(node, ast.IfExp):
        return node.body, node.orelse
    if isinstance(node, ast.BinOp):
        return (node.left,)
    return (node.value,) if isinstance(node, ast.Subscript | ast.Attribute) else ()


def text_of(node: ast.AST, lines: Sequence[str]) -> str:
    """Return the source of an expression or statement on one line, as written where it is short."""
    written = _written(node, lines)
    return ast.unparse(node) if written is None else written


def span_of(node: ast.AST, lines: Sequence[str]) -> Span | None:
    """Return line and columns of an expression that is written on one line."""
    if _written(node, lines) is None or not isinstance(node, ast.expr | ast.stmt):
        return None
    line = lines[node.lineno - 1]
    return node.lineno, column_of(line, node.col_offset), column_of(line, node.end_col_offset or 0)


def column_of(line: str, offset: int) -> int:
    """Turn a column in UTF-8 bytes, which is what Python counts, into one in characters."""
    return len(line.encode()[:offset].decode(errors="replace"))


def line_text(lines: Sequence[str], line: int) -> str | None:
    """Return one line of a source stripped, ``None`` when there is no such line."""
    return lines[line - 1].strip() if 0 < line <= len(lines) else None


def _written(node: ast.AST, lines: Sequence[str]) -> str | None:
    """Return the text of a node that is written on one line, ``None`` for any other."""
    if not isinstance(node, ast.expr | ast.stmt) or node.lineno != node.end_lineno:
        return None
    if not 0 < node.lineno <= len(lines) or getattr(node, _IN_FSTRING, False):
        return None
    line = lines[node.lineno - 1].encode()
    text = line[node.col_offset : node.end_col_offset].decode(errors="replace")
    # An unparenthesized ``:=`` is no expression on its own.
    return f"({text})" if isinstance(node, ast.NamedExpr) else text


def _path_to(tree: ast.AST, position: Position, place: Place) -> tuple[ast.AST, ...]:
    """Return the nodes from the root down to the one at ``position``; empty when there is none."""
    for child in ast.iter_child_nodes(tree):
        if not _covers(child, position):
            continue
        if path := _path_to(child, position, place):
            return (tree, *path)
        if _matches(child, position, place) and _fits(child, place):
            return (tree, child)
    return ()


def _covers(node: ast.AST, position: Position) -> bool:
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    if first is None or last is None:
        return True  # nodes such as ``arguments`` have no position, but their children do
    first = min([first, *(item.lineno for item in getattr(node, "decorator_list", ()))])
    return bool(first <= position.line and position.end_line <= last)


def _matches(node: ast.AST, position: Position, place: Place) -> bool:
    if not isinstance(node, ast.expr | ast.stmt):
        return False
    ends = (node.end_lineno, node.end_col_offset) == (position.end_line, position.end_column)
    # A method call over several lines starts at the method's name; no two calls end together.
    same_start = (node.lineno, node.col_offset) == (position.line, position.column)
    # `CALL_INTRINSIC` is unary plus and others, since Python 3.12, and no call of the source.
    if not isinstance(node, ast.Call) or place.operation.startswith("CALL_INTRINSIC"):
        return ends and same_start
    return ends and (same_start or place.operation.startswith(("CALL", "PRECALL")))


def _fits(node: ast.AST, place: Place) -> bool:
    """Return whether a node fits the running instruction, by kind and by names."""
    if isinstance(node, ast.stmt):
        # The expression of an ``Expr`` has the same position, and did not fit.
        return not isinstance(node, ast.Expr)
    if place.operation in _SUBSCRIPTS and not isinstance(node, ast.Subscript):
        return False
    code = place.code
    names = {*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars}
    target = node.func if isinstance(node, ast.Call) else node
    while isinstance(target, ast.Attribute | ast.Subscript):
        if isinstance(target, ast.Attribute) and not _knows(names, target.attr):
            return False
        target = target.value
    return not isinstance(target, ast.Name) or _knows(names, target.id)


def _knows(names: set[str], name: str) -> bool:
    # Name mangling: in the code, a private name begins with the name of its class.
    return name in names or (name.startswith("__") and any(k.endswith(name) for k in names))


def _statement_at(tree: ast.AST, line: int) -> ast.stmt | None:
    """Return the innermost statement that covers a line."""
    for child in ast.iter_child_nodes(tree):
        if _covers(child, Position(line, line, 0, 0)):
            statement = _statement_at(child, line) or child
            if isinstance(statement, ast.stmt):
                return statement
    return None
