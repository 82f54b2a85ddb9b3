"""What else may have changed a variable, by the syntax of the program alone."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cudalens.evidence.changes import (
    is_rebound,
    may_change,
    names_in,
    reads_of,
    shown,
    stores_of_attribute,
)
from cudalens.evidence.program import MAX_FILES, Program
from tests.probes import cell


def asked_of(source: str, ask: Callable[[Program, str], object]) -> object:
    """Return what is asked of a program of one cell."""
    with cell(source) as code:
        return ask(Program([code.co_filename]), code.co_filename)


SHARED = {
    "a": {"a"},
    "a[0]": {"a"},
    "a.b": {"a", "b"},
    "[a, b]": {"a", "b"},
    "a if c else b": {"a", "b", "c"},
    "a.view(2)": {"a"},
    "f(a, key=b)": {"a", "b"},
    "np.asarray(a)": {"a"},
    "torch.as_tensor(a)": {"a"},
    "a + b": set(),
    "-a": set(),
    "a == b": set(),
    "a.copy()": set(),
    "a.tolist()": set(),
    "np.stack([a, b])": set(),
    "len(a)": set(),
    "f(a.copy(), b)": {"b"},
}


@pytest.mark.parametrize(("code", "names"), SHARED.items(), ids=SHARED)
def test_names_that_share_the_memory_of_a_value(code: str, names: set[str]) -> None:
    assert {*shown(ast.parse(code, mode="eval").body)} == names


def test_names_of_an_expression_without_self() -> None:
    assert sorted(names_in(ast.parse("self.rows[at].start", mode="eval"))) == [
        "at",
        "rows",
        "start",
    ]


CHANGES = {
    "nothing else": ("a = x + 1", False),
    "an item by its own name": ("a = x + 1\na[0] = 9", True),
    "an item of another list": ("a = x + 1\nc[0] = 9", False),
    "an item that is deleted": ("a = x + 1\ndel a[0]", True),
    "an item by a second name": ("a = x + 1\nb = a\nb[0] = 9", True),
    "an item by a third name": ("a = x + 1\nc = b\nb = a\nc[0] = 9", True),
    "an item of a copy": ("a = x + 1\nb = a.copy()\nb[0] = 9", False),
    "an item of a view": ("a = x + 1\nb = a.reshape(-1)\nb[0] = 9", True),
    "an item of a sum": ("a = x + 1\nb = a + 0\nb[0] = 9", False),
    "an annotated second name": ("a = x + 1\nb: list = a\nb[0] = 9", True),
    "a second name in a test": ("a = x + 1\nif (b := a):\n    b[0] = 9", True),
    "a second name in a loop": ("a = x + 1\nfor row in a:\n    row[0] = 9", True),
    "another list in a loop": ("a = x + 1\nfor row in c:\n    row[0] = 9", False),
    "a second name in a comprehension": ("a = x + 1\n[row.sort() for row in a]", True),
    "a second name in a with": ("a = x + 1\nwith a as b:\n    b[0] = 9", True),
    "an addition by its own name": ("a = x + 1\na += 1", False),
    "an addition by a second name": ("a = x + 1\nb = a\nb += 1", True),
    "an addition to an item": ("a = x + 1\na[0] += 1", True),
    "a method of Python's": ("a = x + 1\na.sort()", True),
    "a method of torch's": ("a = x + 1\na.add_(1)", True),
    "a method that changes nothing": ("a = x + 1\na.mean()", False),
    "a method that keeps a result": ("a = x + 1\nb = a.add(1)", False),
    "an item added by its own name": ("a = x + 1\na.append(9)", False),
    "an item added by a second name": ("a = x + 1\nb = a\nb.append(9)", True),
    "a result that is written to it": ("a = x + 1\ntorch.add(c, d, out=a)", True),
    "a result that is written elsewhere": ("a = x + 1\ntorch.add(a, d, out=c)", False),
    "given to an unknown function": ("a = x + 1\nshuffle(a)", True),
    "given by keyword": ("a = x + 1\nshuffle(data=a)", True),
    "a copy given to an unknown function": ("a = x + 1\nshuffle(a.copy())", False),
    "given to a function that prints it": ("a = x + 1\nprint(a)", False),
    "given to a function of torch's": ("a = x + 1\ntorch.save(a, f)", False),
    "copied from": ("a = x + 1\nc.copy_(a)", False),
    "copied to": ("a = x + 1\na.copy_(c)", True),
    "given to a function that writes": ("a = x + 1\ndef f(v):\n    v[0] = 9\nf(a)", True),
    "given to a function that reads": ("a = x + 1\ndef f(v):\n    w = v[0]\nf(a)", False),
    "another given to one that writes": ("a = x + 1\ndef f(v):\n    v[0] = 9\nf(c)", False),
    "given to a class that writes": (
        "a = x + 1\nclass A:\n    def __init__(self, v):\n        v[0] = 9\nA(a)",
        True,
    ),
    "a variable of the module": ("a = x + 1\ndef f():\n    global a\n    a = 9", True),
    "another variable of the module": ("a = x + 1\ndef f():\n    global c\n    c = 9", False),
    "a variable of the function around": (
        "def g():\n    a = x + 1\n    def f():\n        nonlocal a\n        a = 9",
        True,
    ),
    "text that is run": ("a = x + 1\nexec(text)", True),
    "variables by their names": ("a = x + 1\nglobals()['c'] = 9", True),
    "an attribute by its name": ("a = x + 1\nsetattr(o, 'c', 9)", True),
    "a script": ("a = x + 1\nget_ipython().run_line_magic('run', 's.py')", True),
    "a variable that is stored": ("a = x + 1\nget_ipython().run_line_magic('store', '-r a')", True),
    "a harmless magic": ("a = x + 1\nget_ipython().run_line_magic('pwd', '')", False),
}


@pytest.mark.parametrize(("source", "wanted"), CHANGES.values(), ids=CHANGES)
def test_what_changes_a_variable_beside_its_assignment(source: str, wanted: bool) -> None:
    def ask(program: Program, file: str) -> bool:
        found = next(it for it in ast.walk(program.trees[file]) if _computes(it))
        return may_change(program, {"a"}, found, {file})

    assert asked_of(source, ask) is wanted


def _computes(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node) == "a = x + 1"


def test_the_statement_that_computed_the_values_is_no_change() -> None:
    def ask(program: Program, file: str) -> bool:
        return may_change(program, {"a"}, program.trees[file].body[-1], {file})

    assert asked_of("a[0] = x + 1", ask) is False
    assert asked_of("a[1] = 9\na[0] = x + 1", ask) is True


def test_only_what_another_cell_defines_counts_within_one_cell() -> None:
    """What the other cell does by itself, it has done before."""

    def asked(other: str, files: int = 1) -> bool:
        with cell("a = x + 1\nf(a)") as code, cell(other) as before:
            names = [code.co_filename, before.co_filename]
            program = Program(names)
            found = program.trees[names[0]].body[0]
            return may_change(program, {"a"}, found, {*names[:files]})

    assert not asked("def f(v):\n    return v[0]\na[0] = 9")
    assert asked("def f(v):\n    return v[0]\na[0] = 9", files=2)
    assert asked("def f(v):\n    v[0] = 9")
    assert asked("def g(v):\n    v[0] = 9\ndef f(v):\n    w = g(v)")
    assert not asked("def g(v):\n    v[0] = 9\ndef f(v):\n    return v[0]")
    assert not asked("async def f(v):\n    return v[0]")
    assert not asked("class f:\n    def __init__(self, v):\n        self.w = v[0]")
    assert asked("class A:\n    def g(self, v):\n        v[0] = 9\ndef f(v):\n    w = it.g(v)")


@pytest.mark.parametrize(("files", "may"), [(MAX_FILES - 1, False), (MAX_FILES, True)])
def test_a_program_that_was_not_read_whole_may_change_anything(files: int, may: bool) -> None:
    trees = {f"{at}.py": ast.parse("a = x + 1" if at == 0 else "pass") for at in range(files)}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    program: Any = SimpleNamespace(trees=trees, nodes=nodes)
    assert may_change(program, {"a"}, trees["0.py"].body[0], {"0.py", "1.py"}) is may
    assert not may_change(program, {"a"}, trees["0.py"].body[0], {"0.py"})


STORES = {
    "none": ("o.z = 1\nprint(o.y)", 0),
    "of an object": ("o.y = 1", 1),
    "of two objects": ("o.y = 1\np.y = 2", 2),
    "one of a tuple": ("o.z, o.y = 1, 2", 1),
    "added to": ("o.y += 1", 1),
    "deleted": ("del o.y", 0),
    "of a class": ("class A:\n    y = 1", 1),
    "of a class, annotated": ("class A:\n    y: int = 1", 1),
    "of a class, one of two names": ("class A:\n    z = y = 1", 1),
    "another one of a class": ("class A:\n    z = y", 0),
    "a method": ("class A:\n    def y(self):\n        pass", 1),
    "a variable of a method": ("class A:\n    def z(self):\n        y = 1", 0),
    "a variable": ("y = 1", 0),
    "of a class, and of an object": ("class A:\n    y = 1\nA().y = 2", 2),
}


@pytest.mark.parametrize(("source", "count"), STORES.values(), ids=STORES)
def test_how_often_an_attribute_is_given_a_value(source: str, count: int) -> None:
    assert asked_of(source, lambda program, _: stores_of_attribute(program, "y")) == count


def test_how_often_a_function_is_mentioned() -> None:
    def ask(program: Program, file: str) -> int:
        return reads_of(program, "f")

    assert asked_of("def f():\n    pass", ask) == 0
    assert asked_of("def f():\n    pass\nf()", ask) == 1
    assert asked_of("def f():\n    pass\nf()\ng = o.f", ask) == 2


REBOUND = {
    "only defined and called": ("def f():\n    pass\nf()", False),
    "assigned": ("f = g", True),
    "assigned to an attribute": ("o.f = g", True),
    "imported": ("from m import f", True),
    "imported by that name": ("from m import g as f", True),
    "imported by another name": ("from m import f as g", False),
}


@pytest.mark.parametrize(("source", "wanted"), REBOUND.values(), ids=REBOUND)
def test_whether_a_function_may_be_another_one(source: str, wanted: bool) -> None:
    assert asked_of(source, lambda program, _: is_rebound(program, "f")) is wanted
