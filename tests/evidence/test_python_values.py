"""The statement that computed what ``torch.tensor`` was given, by the program's syntax alone."""

from __future__ import annotations

import ast

import pytest

from cudalens.evidence.program import Program, Spot
from cudalens.evidence.python_values import computing_line
from tests.probes import cell

LINES: dict[str, tuple[str, str | None]] = {
    "an array that was computed on": (
        "a = np.array([1])\na = a + 1\ntorch.from_numpy(a)",
        "a = a + 1",
    ),
    "numbers that are typed": ("a = np.array([1, 2])\ntorch.from_numpy(a)", None),
    "a sum in the call itself": ("a = [1]\ntorch.tensor(a + b)", None),
    "through copies and items": (
        "a = b * 2\nc = a.copy()[0]\ntorch.tensor(list(c).tolist())",
        "a = b * 2",
    ),
    "a change in place": ("a = b\na += 1\ntorch.tensor(a)", "a += 1"),
    "an item written since": ("a = b * 2\na[0] = 7\ntorch.tensor(a)", None),
    "sorted in place since": ("a = b * 2\na.sort()\ntorch.tensor(a)", None),
    "what a method is called on": (
        "a = b.resize((2, 2))\ntorch.as_tensor(a)",
        "a = b.resize((2, 2))",
    ),
    "a function of the user's": (
        "def f(x):\n    y = x + 1\n    return y\ntorch.tensor(f(3))",
        "y = x + 1",
    ),
    "a function that returns in two places": (
        "def f(x):\n    if x:\n        return x + 1\n    return x\ntorch.tensor(f(3))",
        None,
    ),
    "the argument of a function": (
        "a = b * 2\ndef f(x):\n    return torch.tensor(x)\nf(a)",
        "a = b * 2",
    ),
    "the argument of two calls": (
        "a = b * 2\ndef f(x):\n    return torch.tensor(x)\nf(a)\nf(b)",
        None,
    ),
    "what a list was filled with": (
        "out = []\nfor x in y:\n    z = x - 1\n    out.append(z)\ntorch.tensor(out)",
        "z = x - 1",
    ),
    "a list that is filled in two lines": (
        "out = []\nout.append(x + 1)\nout.append(x)\ntorch.tensor(out)",
        None,
    ),
    "one of two branches": (
        "if b:\n    a = x + 1\nelse:\n    a = x + 2\ntorch.tensor(a)",
        None,
    ),
    "a branch that goes on with the old one": (
        "a = x * 2\nif b:\n    a = a / 255\ntorch.tensor(a)",
        "a = x * 2",
    ),
    "an earlier turn of a loop": (
        "a = x * 2\nfor i in y:\n    torch.tensor(a)\n    a = x + i",
        None,
    ),
    "a comprehension": ("torch.tensor([i for i in x])\nx = 1", None),
    "numbers of a comprehension": (
        "def f(x):\n    a = [i + 1 for i in x]\n    return torch.tensor(a)",
        "a = [i + 1 for i in x]",
    ),
    "an attribute": (
        "class A:\n    def f(self, x):\n        self.y = x + 1\n"
        "    def g(self):\n        return torch.tensor(self.y)",
        "self.y = x + 1",
    ),
    "one of a tuple": ("a, b = x + 1, x\ntorch.tensor(b)", None),
    "the other one of a tuple": ("a, b = x + 1, x\ntorch.tensor(a)", "a, b = (x + 1, x)"),
    "a part of what a call returned": ("a, b = f(x)\ntorch.tensor(b)", None),
}


@pytest.mark.parametrize(("source", "wanted"), LINES.values(), ids=LINES)
def test_the_line_that_computed_what_a_tensor_is_made_of(source: str, wanted: str | None) -> None:
    with cell(source) as code:
        program = Program([code.co_filename])
        calls = (it for it in ast.walk(program.trees[code.co_filename]) if isinstance(it, ast.Call))
        made = [it for it in calls if ast.unparse(it.func).startswith("torch.")]
        found = computing_line(program, Spot(code.co_filename, made[-1]))
        assert (None if found is None else ast.unparse(found.node)) == wanted
