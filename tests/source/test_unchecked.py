"""Statements between two checked blocks: which of them can write to a tensor unseen."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from cudalens.source.unchecked import is_next_checked, statements_after

BLOCK = "\nwith cudalens.check():\n    x.add_(1)"


@pytest.mark.parametrize(
    ("code", "is_checked"),
    [
        ("", True),
        ("import torch", True),
        ("a = 1", True),
        ("print(x.max(), len(x))", True),
        ("def f(x):\n    x.add_(1)", True),
        ("f = lambda x: x.add_(1)", True),
        ("def f(x=x.add_(1)): pass", False),
        ("x.add_(1)", False),
        ("x += 1", False),
        ("x[0] = 1", False),
        ("x.data", False),
        ("x.T", True),
        ("y = x.T", False),
        ("x[0]", True),
        ("y = x[0]", False),
        ("y = d['a']", True),
        ("f(x)", False),
        ("print(x, out=y)", False),
        ("(y := x)", False),
        ("for i in x:\n    pass", False),
        ("with open(f):\n    pass", False),
        ("with cudalens.check(f()):\n    pass", False),
        ("with cudalens.check(fast=f()):\n    pass", False),
        ("with cudalens.check(fast=True):\n    f(x)", True),
        ("print(x, **y)", False),
        ("d['f'](x)", False),
        ("del x.y", False),
        ("x.y = 1", False),
        ("y: int = x[0]", False),
        ("y = x.grad", False),
        ("y = x.shape", True),
        ("[0 for i in x]", False),
        ("async with x:\n    pass", False),
        ("@f(x)\ndef g():\n    pass", False),
        ("f = lambda y=x.add_(1): y", False),
    ],
)
def test_which_statements_only_read(code: str, is_checked: bool) -> None:
    assert is_next_checked(ast.parse(code + BLOCK).body) is is_checked


def test_without_a_block_nothing_is_said_of_reading_alone() -> None:
    assert is_next_checked(ast.parse("a = 1").body) is None
    assert is_next_checked(ast.parse("x.add_(1)").body) is False


@pytest.mark.parametrize(
    ("block", "after"),
    [
        ("with cudalens.check():", "x = 1"),
        ("with cudalens.check(), suppress(E):", None),
        ("with suppress(E), cudalens.check():", None),
        ("with suppress(E):", None),
    ],
)
def test_what_follows_a_block_that_nothing_else_ends_with(
    block: str, after: str | None, tmp_path: Path
) -> None:
    """Another manager of the statement runs after the block, and may hide an error."""
    file = tmp_path / "program.py"
    file.write_text(f"import cudalens\n{block}\n    pass\nx = 1\n", encoding="utf-8")
    found = statements_after(str(file), 2)
    assert (found and ([ast.unparse(item) for item in found[0]], found[1])) == (
        after and ([after], True)
    )


@pytest.mark.parametrize(
    ("text", "line", "after"),
    [
        ("{block}\nx = 1\ny = 2", 1, ("x = 1; y = 2", True)),
        ("x = 1\n{block}", 2, ("", True)),
        ("def f():\n    {block}\n    x = 1\ny = 2", 2, ("x = 1", False)),
        ("for i in y:\n    0\nelse:\n    {block}\n    x = 1", 4, ("x = 1", False)),
        ("try:\n    0\nfinally:\n    {block}\n    x = 1", 4, ("x = 1", False)),
        ("{block}\n{block}", 1, ("with cudalens.check():\n    pass", True)),
        # On another line, of another kind, or in no file at all.
        ("x = 1\n{block}", 1, None),
        ("{block}\nx = 1", 2, None),
        ("x = 1", 1, None),
        (None, 1, None),
    ],
)
def test_the_statements_behind_a_block_wherever_it_stands(
    text: str | None, line: int, after: tuple[str, bool] | None, tmp_path: Path
) -> None:
    file = tmp_path / "program.py"
    if text is not None:
        file.write_text(text.format(block="with cudalens.check(): pass"), encoding="utf-8")
    found = statements_after(str(file), line)
    said = found and ("; ".join(ast.unparse(item) for item in found[0]), found[1])
    assert said == after
