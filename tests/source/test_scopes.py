"""Which statements bind a name, and with which value, by their syntax alone."""

from __future__ import annotations

import ast

import pytest

from cudalens.source.scopes import (
    bindings_of,
    default_of,
    item_of,
    loop_names,
    methods_called,
    pairs_of,
    parameters_of,
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


@pytest.mark.parametrize(
    ("text", "key", "wanted"),
    [
        ("(3, 4)", 1, "4"), ("[3, 4]", -2, "3"), ("(3, 4)", 2, None), ("(3, 4)", -3, None),
        ("(3, 4)", None, None), ("(3, 4)", "n", None), ("(*x, 4)", 1, None), ("x", 0, None),
        ("{'n': 3, 'm': 4}", "m", "4"), ("{'n': 3}", "m", None), ("{'n': 3, 'n': 4}", "n", None),
        ("{0: 3}", 0, "3"), ("{'n': 3, **more}", "n", None), ("{n: 3}", None, None),
    ],
)  # fmt: skip
def test_the_item_of_a_display(text: str, key: int | str | None, wanted: str | None) -> None:
    item = item_of(ast.parse(text, mode="eval").body, key)
    assert (item and ast.unparse(item)) == wanted


def test_parameters_and_their_defaults() -> None:
    (function,) = ast.parse("def f(a, /, b, c=1, *rest, d, e=2, **more): pass").body
    assert isinstance(function, ast.FunctionDef)
    assert parameters_of(function) == ["a", "b", "c", "d", "e"]
    defaults = {name: default_of(function, name) for name in "abcde"}
    texts = {name: value and ast.unparse(value) for name, value in defaults.items()}
    assert texts == {"a": None, "b": None, "c": "1", "d": None, "e": "2"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("for a in x: here", {"a"}), ("for a, b in x: here", {"a", "b"}), ("while a: here", set()),
        ("[here for a in x]", {"a"}), ("for a in x:\n    for b in a: here", {"a", "b"}),
        ("for a in x:\n    def f(): here", set()), ("for a in x:\n    f = lambda: here", set()),
        ("def f():\n    for a in x: here", {"a"}), ("for a in x: pass\nhere", set()),
    ],
)  # fmt: skip
def test_the_variables_of_the_loops_around_a_place(text: str, names: set[str]) -> None:
    assert loop_names(_parents_of_here(ast.parse(text))) == names


def _parents_of_here(node: ast.AST) -> list[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Name) and child.id == "here":
            return [node]
        if parents := _parents_of_here(child):
            return [node, *parents]
    return []
