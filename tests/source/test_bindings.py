"""The assignment that gave a name its value, on every way to the running line."""

from __future__ import annotations

from types import FrameType
from typing import Any

import pytest

from cudalens.source.bindings import attribute_binding, binding_of
from cudalens.source.files import CELLS
from cudalens.source.running_node import running
from cudalens.source.stack import place_of
from tests.probes import asked, cell


def bound(text: str, name: str = "a") -> Any:
    """Return the binding of a name at the last call of ``here``."""
    found = asked(text, lambda frames: binding_of(running(place_of(frames[-1])), name), yes=True)
    return found[-1]


@pytest.mark.parametrize(
    ("text", "value", "line"),
    [
        ("a = 1\nhere(a)", "1", 1),
        ("a = 1\na = 2\nhere(a)", "2", 2),
        ("a, b = 1, 2\nhere(a)", "1", 1),
        ("b = a = 3\nhere(a)", "3", 1),
        ("a = b = 3\nhere(a)", "3", 1),
        ("a, b = a = 1, 2\nhere(a)", "1, 2", 1),
        ("a = [a] = [4]\nhere(a)", None, 1),
        ("if yes:\n    a = 1\nhere(a)", None, None),
        ("a = 1\nif yes:\n    a = 2\nhere(a)", None, None),
        ("a = 1\nhere(a)\na = 2", "1", 1),
        ("a = 1\nfor _ in [1]:\n    here(a)\n    a = 2", None, None),
        ("a = 1\nfor _ in [1]:\n    here(a)", "1", 1),
        ("for _ in [1]:\n    a = 1\n    here(a)", "1", 2),
        ("if yes:\n    a = 1\n    here(a)", "1", 2),
        ("try:\n    a = 1\nfinally:\n    pass\nhere(a)", None, None),
        ("def f():\n    a = 1\n    here(a)\nf()", "1", 2),
        ("a = 1\ndef f():\n    here(a)\nf()", None, None),
        ("def f():\n    global a\n    a = 1\n    here(a)\nf()", None, None),
        ("import math as a\nhere(a)", None, None),
        ("a = 1\ndef f():\n    a = 2\nhere(a)", "1", 1),
        # A comprehension has a variable of its own, and := binds around it.
        ("a = 1\nb = [a for a in [2]]\nhere(a)", "1", 1),
        ("a = 1\nb = {c: a for c, a in [(2, 3)] if a}\nhere(a)", "1", 1),
        ("a = 1\nb = [(a := c) for c in [2]]\nhere(a)", None, 2),
        # What other statements bind is not what was assigned before.
        ("a = 1\nimport math as a\nhere(a)", None, None),
        ("math = 1\na = 1\nimport math\nhere(a)", "1", 2),
        ("a = 1\ndef a():\n    pass\nhere(a)", None, None),
        ("a = 1\nmatch yes:\n    case a:\n        here(a)", None, None),
        ("a = 1\nmatch yes:\n    case b:\n        here(a)", "1", 1),
        ("a = 1\nmatch [2]:\n    case [*a]:\n        here(a)", None, None),
        ("a = 1\nmatch {}:\n    case {**a}:\n        here(a)", None, None),
        ("a = 1\ntry:\n    0 / 0\nexcept Exception as a:\n    here(a)", None, None),
        ("a = 1\ntry:\n    0 / 0\nexcept Exception as b:\n    here(a)", "1", 1),
        ("b = a = 1\ndel b\nhere(a)", "1", 1),
        ("a = 1\nif not yes:\n    del a\nhere(a)", None, None),
        ("a = 1\nwith torch.no_grad() as a:\n    pass\nhere(a)", None, None),
        # In the loop's else, and in what the loop runs over, it may not have run.
        ("for a in [1]:\n    pass\nelse:\n    here(a)", None, None),
        ("a = 1\nfor a in [here(a)]:\n    pass", None, None),
        ("while yes:\n    a = 1\n    break\nhere(a)", None, None),
        # A binding below comes before the next turn of the loop that holds both.
        ("for _ in [1]:\n    a = 1\n    for _ in [1]:\n        here(a)\n        a = 2", None, None),
        ("for _ in [1]:\n    a = 1\n    here(a)\n    a = 2", "1", 2),
        ("a, b = [1, 2]\nhere(a)", None, 1),
        ("a, (b, c) = 1, (2, 3)\nhere(a)", "1", 1),
        ("a: int = 1\nhere(a)", "1", 1),
        ("a = 1\na: int\nhere(a)", None, 2),
        # On the running line a later statement has not run.
        ("a = 1\nhere(a); a = 2", "1", 1),
        ("a = 1\nfor _ in [1]: here(a); a = 2", None, None),
        # A class has names of its own, and what runs in one, or in a lambda, may have others.
        ("a = 1\nclass C:\n    a = 2\nhere(a)", "1", 1),
        ("class C:\n    a = 1\n    here(a)", None, None),
        ("a = 1\nf = lambda: here(a)\nf()", None, None),
        ("a = 1\n[here(a) for _ in [1]]", None, None),
    ],
)
def test_where_a_name_was_bound(text: str, value: str | None, line: int | None) -> None:
    made = bound(text)
    assert (made and made.value, made and made.at.line) == (value, line)


def test_a_loop_and_an_augmented_assignment_bind_without_a_value() -> None:
    made = bound("for a in [1]:\n    here(a)")
    assert (made.value, made.at.line, made.at.text) == (None, 1, "for a in [1]:")
    made = bound("a = 1\na += 1\nhere(a)")
    assert (made.value, made.at.line) == (None, 2)
    assert bound("for a in [1]:\n    pass\nhere(a)") is None
    assert bound("json = 1\nimport json.decoder\nhere(json)", "json") is None


def test_the_line_of_a_binding_is_shown_as_it_was_typed() -> None:
    def ask(frames: list[FrameType]) -> Any:
        place = place_of(frames[-1])
        CELLS.typed[place.filename] = ("a = %made",)
        return binding_of(running(place), "a")

    (made,) = asked("a = dict()\nhere(a)", ask)
    assert (made.at.text, made.value) == ("a = %made", "dict()")


@pytest.mark.parametrize(
    ("text", "is_again"),
    [
        ("a = 1\nhere(a)", False),
        ("a = 1\nprint(a)\nhere(a)", True),
        ("a = 1\nif 0:\n    a.cuda()\nhere(a)", False),
        ("a = 1\nfor _ in [1]:\n    here(a)", True),
    ],
)
def test_whether_another_line_reads_it(text: str, is_again: bool) -> None:
    assert bound(text).is_read_again is is_again


@pytest.mark.parametrize(
    ("line", "text"),
    [("a.copy()", "a.copy()"), ("a.sort_()", None), ("b = a.copy()", None), ("len(a)", None)],
)
def test_a_result_that_nothing_keeps(line: str, text: str | None) -> None:
    made = bound(f"a = dict()\nif not yes:\n    pass\nelse:\n    0\nif 0:\n    {line}\nhere(a)")
    assert (made.dropped and made.dropped[0]) == text


def test_the_function_that_a_value_calls() -> None:
    made = bound("a = dict(b=1, **{})\nhere(a)")
    assert (made.called, made.keywords) == ("dict", ("b", "**"))
    made = bound("a = dict()\nhere(a)")
    assert (made.called, made.keywords) == ("dict", ())


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("self.a = 1", "1"),
        ("self.b, self.a = 1, 2", "2"),
        ("self.b = self.a = 1", "1"),
        ("self.register_buffer('a', made(3))", "made(3)"),
        ("self.a = 1\n        self.a = 2", None),
        ("self.b = 1", None),
        ("self.register_buffer('b', made(3))", None),
        ("self.a, *self.b = 1, 2, 3", None),
    ],
)
def test_where_a_method_binds_an_attribute(body: str, value: str | None) -> None:
    """In a function of this line: others of the name, above and below, are not read."""
    other = "class {}:\n    def __init__(self):\n        self.a = 0\n"
    one = f"class C:\n    def __init__(self):\n        {body}\n"
    with cell(other.format("B") + one + other.format("D")) as code:
        exec(code, space := dict[str, Any]())
        made = attribute_binding(space["C"].__init__.__code__, "a")
        assert (made and made.value) == value
        at = made and (made.at.cell, made.at.file, made.at.line, made.at.text)
        assert at == (value and (7, None, 6, body))


def test_a_function_without_an_object_binds_no_attribute() -> None:
    with cell("def f():\n    self.a = 1") as code:
        exec(code, space := dict[str, Any]())
        assert attribute_binding(space["f"].__code__, "a") is None
    assert attribute_binding(compile("f(1)", "<no such file>", "exec"), "a") is None


@pytest.mark.parametrize(
    ("text", "is_again"),
    [
        ("if 0:\n    a\na = 1\nhere(a)", False),
        ("a = 1\na.real\nhere(a)", True),
        ("a = 1\nif 0:\n    a.float()\nhere(a)", False),
        ("a = 1\nhere(a)\nprint(a)", True),
        ("a = 1\nhere(\n    0,\n    a)", False),
        ("a = 1\na = 2\nhere(a)", False),
        ("a = 1\na = a + 1\nhere(a)", False),
    ],
)
def test_which_lines_read_it(text: str, is_again: bool) -> None:
    assert bound(text).is_read_again is is_again


@pytest.mark.parametrize(
    ("text", "dropped"),
    [
        # Above the binding, in its own line and below the running line nothing is dropped of it.
        ("a = dict()\nif 0:\n    a.copy()\na = dict()\nhere(a)", None),
        ("a = dict()\nhere(a)\na.copy()", None),
        ("a = dict()\na.get(here(a))", None),
        ("a = dict(); a.copy()\nhere(a)", None),
        ("a = dict()\na.copy()\nhere(a)", 2),
        ("a = dict()\na.copy()\na.keys()\nhere(a)", 2),
        ("a = b = dict()\nb.copy()\nhere(a)", None),
    ],
)
def test_where_a_result_is_dropped(text: str, dropped: int | None) -> None:
    made = bound(text)
    assert (made.dropped and made.dropped[1].line) == dropped


@pytest.mark.parametrize(
    ("value", "layers"),
    [
        ("nn.Sequential(nn.ReLU(), nn.Tanh())", ["nn.ReLU()", "nn.Tanh()"]),
        ("nn.Sequential(nn.ReLU(), nn.Tanh()).to('cpu')", ["nn.ReLU()", "nn.Tanh()"]),
        ("nn.ModuleList([nn.ReLU()])", ["nn.ReLU()"]),
        ("ModuleList([nn.ReLU()])", ["nn.ReLU()"]),
        ("Sequential(nn.ReLU())", ["nn.ReLU()"]),
        ("nn.ModuleList((nn.ReLU(), nn.Tanh()))", ["nn.ReLU()", "nn.Tanh()"]),
        ("nn.ModuleList(nn.ReLU() for _ in [1])", []),
        ("nn.Sequential(nn.ReLU(), *[nn.Tanh()])", []),
        ("nn.Linear(1, 2)", []),
    ],
)
def test_the_layers_of_a_container(value: str, layers: list[str]) -> None:
    made = bound(f"Sequential, ModuleList = nn.Sequential, nn.ModuleList\na = {value}\nhere(a)")
    assert [item.value for item in made.items] == layers


def test_the_place_of_a_statement_of_several_lines() -> None:
    made = bound("a = dict(\n    b=1,\n)\nhere(a)")
    assert (made.at.cell, made.at.line, made.at.end_line, made.at.text) == (7, 1, 3, "a = dict(")
    # Of a loop it is the line with its name, and a body on that line does not end before it.
    assert bound("for a in [\n    1]:\n    0\n    here(a)").at.end_line == 2
    assert bound("for a in [1]: here(a)").at.end_line == 1
