"""Parse Python text, also while other threads do.

CPython before 3.11.8 and 3.12.2 keeps one counter for all threads that turn a syntax tree into
objects, and raises ``SystemError`` when two of them interleave.
"""

from __future__ import annotations

import ast
import threading

__all__ = ["parse", "parse_expression"]

_TRIES = 20
_alone = threading.Lock()


def parse(text: str) -> ast.Module:
    """Parse statements.

    Raises:
        SyntaxError, ValueError: as :func:`ast.parse`.
    """
    tree = _parsed(text, "exec")
    assert isinstance(tree, ast.Module)
    return tree


def parse_expression(text: str) -> ast.Expression:
    """Parse one expression; raises as :func:`parse`."""
    tree = _parsed(text, "eval")
    assert isinstance(tree, ast.Expression)
    return tree


def _parsed(text: str, mode: str) -> ast.AST:
    for _ in range(_TRIES):
        try:
            # The lock keeps our own threads apart; code of the user's may still be parsing.
            with _alone:
                return compile(text, "<text>", mode, ast.PyCF_ONLY_AST, dont_inherit=True)
        except SystemError:
            continue
    return compile(text, "<text>", mode, ast.PyCF_ONLY_AST, dont_inherit=True)
