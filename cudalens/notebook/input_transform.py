"""What has to be decided about a checked cell before the shell runs it.

A magic is an ordinary function: it cannot await for its caller, it is not called at all over an
empty body, and a syntax error that it raises is shown below its own stack.  So three kinds of
cell are adjusted after the shell has turned the magic into a call: the call is awaited, it gets a
body of one blank line, or the body stands for itself and the shell reports its syntax error.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from cudalens.notebook.run_cell import needs_await, unfit
from cudalens.session.options import OptionsError, split_line, subcommand
from cudalens.source.cell_text import comment_out, transformed

MAGIC = "cudacheck"


def rewritten(shell: Any, text: str) -> str:
    """Return the Python text of a cell, its calls of the magic adjusted where they have to be."""
    if f"_magic('{MAGIC}'" not in text:
        return text
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text  # the shell will say so
    calls = list(_calls(tree))
    if len(calls) == 1 and isinstance(tree.body[0], ast.Expr) and tree.body[0].value is calls[0]:
        return _whole_cell(shell, text, calls[0])
    lines = text.split("\n")
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset), reverse=True):
        code = _code_to_run(_words(call))
        if code is not None and unfit(shell, code := shell.transform_cell(code)) is None:
            if not needs_await(shell, shell.compile.ast_parse(code)):
                continue
            line = lines[call.lineno - 1].encode()
            before, after = line[: call.col_offset], line[call.col_offset :]
            lines[call.lineno - 1] = (before + b"await " + after).decode()
    return "\n".join(lines)


def _whole_cell(shell: Any, text: str, call: ast.Call) -> str:
    """Adjust a cell that is nothing but one call of the magic."""
    words = _words(call)
    code = _code_to_run(words)
    if code is None:
        if words[2:] == [""]:
            return f"get_ipython().run_cell_magic({MAGIC!r}, {words[1]!r}, '\\n')\n"
        return text
    code = transformed(shell, code)
    wrong = unfit(shell, code)
    if wrong is not None:
        return comment_out([f"%%{MAGIC} {words[1]}"] if len(words) == 3 else []) + wrong
    return f"await {text}" if needs_await(shell, shell.compile.ast_parse(code)) else text


def _code_to_run(words: list[str]) -> str | None:
    """Return the code that the magic would run, ``None`` when it would only print or refuse."""
    try:
        options, rest = split_line(words[1])
    except OptionsError:
        return None
    if options.help:
        return None
    if len(words) == 3:
        return words[2] if words[2].strip() and not rest else None
    return rest if rest and subcommand(rest) is None else None


def _calls(tree: ast.Module) -> Iterator[ast.Call]:
    awaited = {node.value for node in ast.walk(tree) if isinstance(node, ast.Await)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node not in awaited and len(_words(node)) in {2, 3}:
            yield node


def _words(call: ast.Call) -> list[str]:
    """Return the texts that the magic is called with, its name first; empty for another call."""
    expected = {"run_line_magic": 2, "run_cell_magic": 3}
    words = [
        argument.value
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
    is_magic = isinstance(call.func, ast.Attribute) and expected.get(call.func.attr) == len(words)
    return words if is_magic and words[0] == MAGIC else []
