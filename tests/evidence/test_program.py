"""Where a number in a call was chosen, by the syntax of the user's program alone."""

from __future__ import annotations

import ast

import pytest

from cudalens.evidence.program import Program, Spot, size_argument
from tests.probes import cell

NET = (
    "class Net(nn.Module):\n    def __init__(self, hidden, classes{}):\n"
    "        self.config = hidden\n"
    "        self.head = nn.Linear(hidden, {})\n"
)
CASES = {
    "a literal in the call": ("nn.Embedding(5, 2)", "nn.Embedding(5, 2)"),
    "another literal is refuted": ("nn.Embedding(6, 2)", None),
    "a name": ("n = 5\nnn.Embedding(n, 2)", "n = 5"),
    "a name of another number": ("n = 6\nnn.Embedding(n, 2)", None),
    "names of names": ("n = 5\nm = n\nnn.Embedding(m, 2)", "n = 5"),
    "a name that is bound twice": ("n = 5\nn = 6\nnn.Embedding(n, 2)", "nn.Embedding(n, 2)"),
    "what is computed": (
        "n = len(words)\nnn.Embedding(n, 2)",
        "n = len(words)",
    ),
    "a parameter": (NET.format("", "classes") + "Net(8, 5)", "Net(8, 5)"),
    "a parameter by keyword": (
        NET.format("", "classes") + "Net(8, classes=5)",
        "Net(8, classes=5)",
    ),
    "a default": (NET.format("=5", "classes") + "Net(8)", "classes=5"),
    "one of two calls, by its number": (
        NET.format("", "classes") + "Net(8, 4), Net(8, 5)",
        "Net(8, 5)",
    ),
    "two calls with one number": (
        NET.format("", "classes") + "Net(8, 5), Net(9, 5)",
        "nn.Linear(hidden, classes)",
    ),
    "a parameter that a name is given to": (
        NET.format("", "classes") + "n = 5\nNet(8, n)",
        "n = 5",
    ),
    "a subclass": (
        NET.format("", "classes")
        + "class Small(Net):\n    def __init__(self, n):\n        super().__init__(8, n)\nSmall(5)",
        "Small(5)",
    ),
    "a loop over a list": (
        "sizes = [8, 5]\nfor n in sizes:\n    nn.Embedding(n, 2)",
        "sizes = [8, 5]",
    ),
    "a comprehension": (
        "nn.ModuleList([nn.Embedding(n, 2) for n in (5, 6)])",
        "nn.Embedding(n, 2)",
    ),
    "an item of a list": ("sizes = [8, 5]\nnn.Embedding(sizes[i], 2)", "sizes = [8, 5]"),
    "an attribute": ("cfg.n = 5\nother.n = 5\nnn.Embedding(cfg.n, 2)", "cfg.n = 5"),
    "an attribute of nobody known": (
        "other.n = 5\nnn.Embedding(cfg.n, 2)",
        "nn.Embedding(cfg.n, 2)",
    ),
    "a keyword of a configuration": (
        "cfg = Config(n=5)\nOther(n=5)\nnn.Embedding(cfg.n, 2)",
        "Config(n=5)",
    ),
    "a field of a configuration that is handed on": (
        "class Config:\n    n: int = 5\n" + NET.format("", "self.config.n") + "Net(Config(), 3)",
        "n: int = 5",
    ),
    "the sizes of a factory": ("n = 5\ntorch.zeros((n, 2))", "n = 5"),
    "a negative number": ("nn.Embedding(-5, 2)", None),
}  # fmt: skip


@pytest.mark.parametrize(("source", "wanted"), CASES.values(), ids=CASES)
def test_where_a_number_was_chosen(source: str, wanted: str | None) -> None:
    with cell(source) as code:
        program = Program([code.co_filename])
        tree = program.trees[code.co_filename]
        calls = (it for it in ast.walk(tree) if isinstance(it, ast.Call))
        call = next(it for it in calls if size_argument(it, 0) is not None)
        number = size_argument(call, 0)
        assert number is not None
        here = Spot(code.co_filename, call)
        found = program.chosen(Spot(code.co_filename, number), here, 5)
        assert (None if found is None else program.text(found)) == wanted


WRAP = "class Wrap(nn.Module):\n    def __init__(self, inner):\n        self.inner = inner\n"
LAYERS = {
    "of the size": ("net.top = Sequential(nn.Linear(8, 1), nn.Linear(8, 5))", ["nn.Linear(8, 5)"]),
    "of another class": ("net.top = nn.Embedding(5, 2)", []),
    "two alike": (
        "net.top = nn.Linear(8, 5), nn.Linear(9, 5)",
        ["nn.Linear(8, 5)", "nn.Linear(9, 5)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("source", "wanted"), LAYERS.values(), ids=LAYERS)
def test_the_layers_of_a_size_in_an_expression(source: str, wanted: list[str]) -> None:
    with cell(source) as code:
        program = Program([code.co_filename])
        (value,) = program.values_of(None, "top", target="net.top")
        assert [program.text(it) for it in program.layers(value, "Linear", 5)] == wanted


def test_a_layer_that_callers_hand_in() -> None:
    with cell(f"{WRAP}m = Wrap(Wrap(nn.Embedding(5, 2)))") as code:
        program = Program([code.co_filename])
        (value,) = program.values_of("Wrap", "inner")
        (found,) = program.layers(value, "Embedding", 5)
        assert (found.line, program.text(found)) == (4, "nn.Embedding(5, 2)")


@pytest.mark.parametrize(("lines", "is_read"), [(5000, True), (5001, False)])
def test_files_of_too_many_lines_are_not_read(lines: int, is_read: bool) -> None:
    with cell("n = 5\n" * lines) as code:
        assert bool(Program([code.co_filename]).trees) is is_read
