"""Which statements bind a name, and with which value, by their syntax alone."""

from __future__ import annotations

import ast

import pytest

from cudalens.source.scopes import (
    bindings_of,
    methods_called,
    pairs_of,
    reaching,
    value_bound,
)

BINDINGS = {
    "a = 1": 1, "b = a": 0, "a.b = 1": 0, "a[0] = 1": 0, "a += 1": 1, "a: int": 1, "del a": 1,
    "for a in x: pass": 1, "for b in x: a = 1": 1, "while (a := f()): pass": 1,
    "with x as a: a = 1": 2, "try: a = 1\nexcept E as a: pass": 2, "try: pass\nexcept E: a = 1": 1,
    "import a.b": 1, "import b.a": 0, "import b as a": 1, "from b import *": 1,
    "match x:\n case [a, *b]: a = 1": 2, "match x:\n case {'k': 1, **a}: pass": 1,
    "def a(): pass": 1, "class a: pass": 1, "def f(a): a = 1": 0, "class C: a = 1": 0,
    "[a for a in x]": 0, "[(a := b) for b in x]": 1,
}  # fmt: skip


@pytest.mark.parametrize(("code", "count"), BINDINGS.items(), ids=BINDINGS)
def test_the_statements_that_bind_a_name(code: str, count: int) -> None:
    assert len(bindings_of(ast.parse(code), "a")) == count


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a = 1\nb = 2\na", 1), ("a = 1\na = 2\na", 2), ("b = 1\na", None),
        ("with f():\n    a = 1\na", 2), ("with f():\n    with g():\n        a = 1\na", 3),
        # The manager may swallow an error of the block, and then the earlier value is left.
        ("a = 1\nwith f():\n    a = 2\na", None), ("with f():\n    a = 1\n    a", 2),
        ("a = 1\nwith f():\n    a = 2\n    a", 3),
        ("global a\na = 1\na", None), ("global b\na = 1\na", 2), ("from m import *\na", 1),
    ],
)  # fmt: skip
def test_the_binding_that_the_last_statement_reads(text: str, line: int | None) -> None:
    scope = ast.parse(text)
    path = [scope.body[-1]]
    if isinstance(path[0], ast.With):
        path.append(path[0].body[-1])
    made = reaching(scope, path, "a")
    assert (made and made.lineno) == line


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a = 1", "1"), ("b = a = 1", "1"), ("a, b = 1, 2", "1"), ("b, a = a = 1, 2", "(1, 2)"),
        ("a, b = f()", None), ("a, a = 1, 2", None), ("[a] = [1]", None), ("a, (b, c) = 1, x", "1"),
        ("(a, b), c = x, 1", None), ("a: int = 1", "1"), ("a: int", None), ("a += 1", None),
        ("for a in x: pass", "x"), ("for a, b in x: pass", None), ("import a", None),
    ],
)  # fmt: skip
def test_the_value_that_a_statement_binds(text: str, wanted: str | None) -> None:
    value = value_bound(ast.parse(text).body[0], "a")
    assert (value and ast.unparse(value)) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a = 1", ["a 1"]), ("a = b = 1", ["a 1", "b 1"]), ("a, b = 1, 2", ["a 1", "b 2"]),
        ("a, b = f()", ["(a, b) f()"]), ("a, b = 1, 2, 3", ["(a, b) (1, 2, 3)"]),
    ],
)  # fmt: skip
def test_targets_with_their_values(text: str, wanted: list[str]) -> None:
    (made,) = ast.parse(text).body
    assert isinstance(made, ast.Assign)
    pairs = pairs_of(made.targets, made.value)
    assert [f"{ast.unparse(one)} {ast.unparse(other)}" for one, other in pairs] == wanted


def test_the_methods_of_a_variable_that_are_called_for_their_effect() -> None:
    scope = ast.parse("a.f()\nb.g()\nc = a.h()\nif c:\n    a.i(1)\ndef k():\n    a.j()\na.b.l()")
    assert [(it.lineno, name) for it, name in methods_called(scope, "a")] == [(1, "f"), (5, "i")]
    assert [name for _, name in methods_called(scope, "a", 1, 6)] == ["i"]
    assert [name for _, name in methods_called(scope, "a", 0, 5)] == ["f"]
