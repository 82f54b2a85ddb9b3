"""Where a number in a call was chosen, by the syntax of the user's program alone."""

from __future__ import annotations

import ast
import contextlib
from itertools import pairwise

import pytest

from cudalens.evidence.program import (
    Program,
    Spot,
    is_empty_container,
    shape_argument,
    size_argument,
    takes_sizes,
)
from cudalens.source.files import place_of_code
from cudalens.source.scopes import parameters_of
from tests.probes import cell

NET = (
    "class Net(nn.Module):\n    def __init__(self, hidden, classes{}):\n"
    "        self.config = hidden\n"
    "        self.head = nn.Linear(hidden, {})\n"
)
NAMES = "a = 5\n" + "".join(f"{new} = {old}\n" for old, new in pairwise("abcdefghi"))
OWN_CFG = "class {}:\n    def __init__(self):\n        self.cfg = Config(n=5)\n        {}\n"
SUB = (
    "class Base:\n    def __init__(self, n):\n        self.e = nn.Embedding(n, 2)\n"
    "class A({}):\n    def __init__(self):\n        super().__init__(5)\n        {}\n"
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
    "an option with this default": (
        "p.add_argument('--n', default=5)\nargs = p.parse_args([])\nnn.Embedding(args.n, 2)",
        "p.add_argument('--n', default=5)",
    ),
    "an option with this default that was set since": (
        "p.add_argument('--n', default=5)\nargs.n = 5\nnn.Embedding(args.n, 2)",
        "args.n = 5",
    ),
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
    "a list without the number": ("nn.Embedding([8, 6], 2)", None),
    "a list with more than numbers": ("nn.Embedding([8, n], 2)", "nn.Embedding([8, n], 2)"),
    "a conversion": ("n = 5\nnn.Embedding(int(n), 2)", "n = 5"),
    "a conversion of another number": ("nn.Embedding(int(6), 2)", None),
    "a true number is no 5": ("nn.Embedding(True, 2)", None),
    "an entry of a display": (
        "cfg = {'a': 8, 'n': 5}\nnn.Embedding(cfg['n'], 2)",
        "cfg = {'a': 8, 'n': 5}",
    ),
    "an entry of another number": ("cfg = {'n': 6}\nnn.Embedding(cfg['n'], 2)", None),
    "an entry that a function is given": (
        "cfg = {'n': 5}\ndef make(c):\n    return nn.Embedding(c['n'], 2)\nmake(cfg)",
        "cfg = {'n': 5}",
    ),
    "an entry that two calls give": (
        "a = {'n': 5}\ndef make(c):\n    return nn.Embedding(c['n'], 2)\nmake(a), make(b)",
        "nn.Embedding(c['n'], 2)",
    ),
    "an entry of a name that is bound twice": (
        "cfg = {'n': 5}\ncfg = {'n': 6}\nnn.Embedding(cfg['n'], 2)",
        "nn.Embedding(cfg['n'], 2)",
    ),
    "an item of a call": ("nn.Embedding(sizes()[0], 2)", "nn.Embedding(sizes()[0], 2)"),
    "several at once": ("m, n = 8, 5\nnn.Embedding(n, 2)", "m, n = (8, 5)"),
    "several at once, of another number": ("m, n = 5, 6\nnn.Embedding(n, 2)", None),
    "an item that a function returns": (
        "def sizes():\n    return 8, n\nn = 5\nnn.Embedding(sizes()[1], 2)",
        "n = 5",
    ),
    "an item that a function returns, of another number": (
        "def sizes():\n    return 5, 6\nnn.Embedding(sizes()[1], 2)",
        None,
    ),
    "an item of what a method returns, handed on": (
        "class Data:\n    def __init__(self):\n        self.n = count() + 1\n"
        "    def shape(self):\n        return self.n, 4\n"
        "def make(sizes):\n    return nn.Embedding(sizes[0], 2)\nmake(Data().shape())",
        "self.n = count() + 1",
    ),
    "what a function returns, unpacked": (
        "def load():\n    return 8, len(words)\nm, n = load()\nnn.Embedding(n, 2)",
        "return (8, len(words))",
    ),
    "what a function computes": (
        "def rows():\n    return len(words) + 1\nnn.Embedding(rows(), 2)",
        "return len(words) + 1",
    ),
    "a function that returns in two places": (
        "def rows(big):\n    if big:\n        return 5\n    return 6\nnn.Embedding(rows(1), 2)",
        "nn.Embedding(rows(1), 2)",
    ),
    "a method that dictionaries have too": (
        "class A:\n    def get(self, name):\n        return count()\n"
        "nn.Embedding(cfg.get('n'), 2)",
        "nn.Embedding(cfg.get('n'), 2)",
    ),
    "what a function gives": ("m, n = load()\nnn.Embedding(n, 2)", "m, n = load()"),
    "a name inside a function": (
        "n = 6\ndef make():\n    n = 5\n    return nn.Embedding(n, 2)",
        "n = 5",
    ),
    "a name outside a function": ("n = 5\ndef make():\n    return nn.Embedding(n, 2)", "n = 5"),
    "a keyword-only default": (
        "def make(*, n=5, m=6):\n    return nn.Embedding(n, 2)\nmake()",
        "n=5",
    ),
    "arguments that are unpacked": (
        "def make(n):\n    return nn.Embedding(n, 2)\nmake(*sizes)",
        "nn.Embedding(n, 2)",
    ),
    "a default hidden by what is unpacked": (
        "def make(n=5):\n    return nn.Embedding(n, 2)\nmake(**sizes)",
        "nn.Embedding(n, 2)",
    ),
    "an attribute of the object itself": (
        "class A:\n    def __init__(self):\n        self.n = 5\n"
        "        self.e = nn.Embedding(self.n, 2)",
        "self.n = 5",
    ),
    "an attribute of another class": (
        "class B:\n    def __init__(self):\n        self.n = 5\n"
        "class A:\n    def __init__(self):\n        self.e = nn.Embedding(self.n, 2)",
        "nn.Embedding(self.n, 2)",
    ),
    "a parameter of a method": (
        "class A:\n    def make(self, n):\n        return nn.Embedding(n, 2)\nA().make(5)",
        "A().make(5)",
    ),
    "an attribute of a part that the object has too": (
        "class A:\n    def __init__(self):\n        self.cfg = load()\n        self.n = 5\n"
        "        self.e = nn.Embedding(self.cfg.n, 2)",
        "nn.Embedding(self.cfg.n, 2)",
    ),
    "an attribute of a part that is set": (
        "class A:\n    def __init__(self):\n        self.cfg = load()\n        self.cfg.n = 5\n"
        "        self.e = nn.Embedding(self.cfg.n, 2)",
        "self.cfg.n = 5",
    ),
    "an option of the name of an own attribute": (
        "p.add_argument('--n', default=5)\nclass A:\n    def __init__(self):\n"
        "        self.e = nn.Embedding(self.n, 2)",
        "nn.Embedding(self.n, 2)",
    ),
    "a field of another configuration": (
        "class Other:\n    n: int = 5\nclass Config:\n    n: int = 6\n"
        "cfg = Config()\nnn.Embedding(cfg.n, 2)",
        "nn.Embedding(cfg.n, 2)",
    ),
    "the variable of a loop around another": (
        "sizes = [8, 5]\nfor n in sizes:\n    for m in (1, 2):\n        nn.Embedding(n, 2)",
        "sizes = [8, 5]",
    ),
    "a name that a function inside has too": (
        "n = 5\ndef f():\n    n = 6\nnn.Embedding(n, 2)",
        "n = 5",
    ),
    "a name in a branch": ("if fast:\n    n = 5\nnn.Embedding(n, 2)", "n = 5"),
    "a name in two branches": (
        "if fast:\n    n = 5\nelse:\n    n = 6\nnn.Embedding(n, 2)",
        "nn.Embedding(n, 2)",
    ),
    "an item at a place that is not known": (
        "sizes = 6, 5\nnn.Embedding(sizes[i], 2)",
        "sizes = (6, 5)",
    ),
    "names of nine names": (NAMES + "nn.Embedding(i, 2)", "b = a"),
    "names of eight names": (NAMES + "nn.Embedding(h, 2)", "a = 5"),
    "an entry of nobody known": ("nn.Embedding(cfg['n'], 2)", "nn.Embedding(cfg['n'], 2)"),
    "a pair of nobody known": ("m, n = pair\nnn.Embedding(n, 2)", "m, n = pair"),
    "an object that is made of itself": (
        "cfg = cfg\nnn.Embedding(cfg.n, 2)",
        "nn.Embedding(cfg.n, 2)",
    ),
    "an object of the same name in another class": (
        OWN_CFG.format("B", "") + OWN_CFG.format("A", "nn.Embedding(self.cfg.n, 2)"),
        "Config(n=5)",
    ),
    "a subclass that calls more": (SUB.format("T, Base", "self.reset(5)"), "super().__init__(5)"),
    "a subclass that names its base": (
        SUB.format("Base", "").replace("super().__init__(5)", "Base.__init__(self, 5)"),
        "Base.__init__(self, 5)",
    ),
    "a subclass of another": (SUB.format("T", ""), "nn.Embedding(n, 2)"),
    "the second of two defaults": (
        "def make(m=6, n=5):\n    return nn.Embedding(n, 2)\nmake()",
        "n=5",
    ),
    "a default of a function inside": (
        "def f():\n    def make(n=5):\n        return nn.Embedding(n, 2)\n    make()",
        "n=5",
    ),
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


def chosen(source: str, size: int = 5, *others: str) -> Spot | None:
    """Return where the number was chosen in the first call of a cell, beside files before it."""
    with contextlib.ExitStack() as stack:
        names = [stack.enter_context(cell(it)).co_filename for it in (source, *others)]
        program = Program(names)
        call = next(it for it in ast.walk(program.trees[names[0]]) if size_argument(it, 0))
        number = size_argument(call, 0)
        assert number is not None
        return program.chosen(Spot(names[0], number), Spot(names[0], call), size)


@pytest.mark.parametrize(
    ("source", "is_read"),
    [
        ("n = x.shape[0]", True), ("n = x.size(0)", True), ("n, m = x.shape", True),
        ("n, m = x.size()", True), ("n, m = x.shape[:2]", True),
        ("n, m = x.size()[1:]", True), ("n, m = f(x)", False), ("n = 5", False),
    ],
)  # fmt: skip
def test_a_size_of_a_tensor_is_only_read_where_it_is_taken_off(source: str, is_read: bool) -> None:
    found = chosen(f"{source}\nnn.Embedding(n, 2)")
    assert found is not None and found.is_read is is_read


def test_a_flag_is_no_number() -> None:
    assert chosen("nn.Embedding(1, 2)", 1) is not None
    assert chosen("nn.Embedding(True, 2)", 1) is None


def test_of_two_cells_the_later_one_gives_a_name_its_number() -> None:
    """The running one comes first, the others in their order."""
    use = "nn.Embedding(n, 2)"
    assert chosen(use, 5, "n = 6", "n = 5") is not None
    assert chosen(use, 5, "n = 5", "n = 6") is None
    assert chosen(f"n = 5\n{use}", 5, "n = 6") is not None


WRAP = "class Wrap(nn.Module):\n    def __init__(self, inner):\n        self.inner = inner\n"
LAYERS = {
    "of the size": ("net.top = Sequential(nn.Linear(8, 1), nn.Linear(8, 5))", ["nn.Linear(8, 5)"]),
    "of another class": ("net.top = nn.Embedding(5, 2)", []),
    "of a name": ("inner = nn.Linear(8, 5)\nnet.top = inner", []),
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


def expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def words(node: ast.AST | None) -> str | None:
    return None if node is None else ast.unparse(node)


@pytest.mark.parametrize(
    ("text", "dim", "wanted"),
    [
        ("nn.Linear(4, 5)", 0, "5"), ("nn.Linear(4, out_features=5)", 0, "5"),
        ("nn.ReLU()", 0, None),
        ("nn.Linear(4)", 0, None), ("nn.Linear(*sizes)", 0, None), ("x", 0, None),
        ("torch.zeros(3, 4)", 1, "4"), ("torch.zeros((3, 4))", -2, "3"),
        ("torch.zeros([3, 4])", 2, None),
        ("torch.zeros(3, 4)", -3, None), ("torch.zeros(3, 4)", None, None),
        ("x.view(3, -1)", 0, "3"), ("x.view(3, -1)", 1, None), ("view(x, 3)", 0, None),
        ("torch.reshape(x, (3, 4))", 0, None), ("torch.randint(9, (3, 4))", 1, "4"),
        ("torch.randint(0, 9, (3, 4))", -1, "4"), ("torch.randint(9, (3, 4))", 2, None),
        ("torch.randint(9, size)", 0, None), ("torch.arange(7)", 0, "7"),
        ("F.one_hot(y, num_classes=7)", 1, "7"), ("torch.topk(x, 3)", 0, "3"),
    ],
)  # fmt: skip
def test_the_argument_that_is_the_size(text: str, dim: int | None, wanted: str | None) -> None:
    assert words(size_argument(expression(text), dim)) == wanted


@pytest.mark.parametrize(
    ("text", "takes", "empty"),
    [
        ("torch.zeros(3)", True, False), ("x.view(3)", True, False),
        ("torch.zeros()", False, False),
        ("x.sum(3)", False, False), ("zeros", False, False), ("[]", False, True),
        ("[1]", False, False), ("nn.ModuleList()", False, True), ("list()", False, True),
        ("nn.ModuleList([x])", False, False), ("dict()", False, False),
    ],
)  # fmt: skip
def test_calls_with_sizes_and_empty_containers(text: str, takes: bool, empty: bool) -> None:
    assert (takes_sizes(expression(text)), is_empty_container(expression(text))) == (takes, empty)


MADE = (
    "items = []\nitems.append(4)\nother.items.append(5)\nitems.extend([6])\n"
    "class A:\n    def f(self, x, /, y, *rest, z=1):\n        self.items.append(7)\n"
    "        self.items = [8]\ncfg.items = [9]\n"
)


def test_what_is_assigned_and_appended_by_name_and_owner() -> None:
    with cell(MADE) as code:
        program = Program([code.co_filename])
        values = {
            owner: [words(it.node) for it in program.values_of(owner, "items")]
            for owner in (None, "A", "B")
        }
        assert values == {None: ["[]"], "A": ["[8]"], "B": []}
        found = program.values_of(None, "items", target="cfg.items")
        assert [words(it.node) for it in found] == ["[9]"]
        appended = {
            owner: [words(it.node) for it in program.appended(owner, "items")]
            for owner in (None, "A", "B")
        }
        assert appended == {None: ["4"], "A": ["7"], "B": []}


def test_a_piece_is_found_again_by_its_place() -> None:
    with cell(MADE) as code:
        program, file = Program([code.co_filename]), code.co_filename
        part = ast.parse("items = []\nitems.append(4)").body[1]
        spot = program.find(file, part)
        assert spot is not None
        assert program.find(file, ast.parse("items = [1]").body[0]) is None
        assert program.find(file, ast.Load()) is None
        assert program.line(Spot(file, ast.Pass(lineno=99))).text == ""
        assert program.line(Spot(file, ast.Load())).text == ""
        place = program.line(spot)
        assert (place.line, place.text) == (2, "items.append(4)")
        assert (place.cell, place.file) == place_of_code(file)
        assert (place.file is None) is (place.cell is not None)
        (value,) = program.values_of("A", "items")
        method = program.function_around(value)
        assert method is not None
        assert parameters_of(method) == ["self", "x", "y", "z"]
        around = program.class_around(value)
        assert around is not None
        assert around.name == "A"
        assert program.function_around(spot) is program.class_around(spot) is None


@pytest.mark.parametrize(
    ("call", "name", "wanted"),
    [
        ("a.f(1, 2)", "x", ["1"]), ("a.f(1, 2)", "y", ["2"]), ("f(0, 1, 2)", "x", []),
        ("a.f(1, y=3)", "y", ["3"]), ("a.f(*rest)", "y", []), ("a.f(1)", "z", ["1"]),
        ("a.f(1, z=2)", "z", ["2"]), ("A.f(a, 1, 2)", "x", ["1"]), ("A.f(a, 1)", "y", []),
        ("a.f(1), a.f(2)", "x", ["1", "2"]), ("A(1)", "x", []),
    ],
)  # fmt: skip
def test_what_calls_give_a_parameter(call: str, name: str, wanted: list[str]) -> None:
    with cell(MADE + call) as code:
        program = Program([code.co_filename])
        (function,) = program.functions("f")
        assert [words(given) for _, given in program.given(function, name)] == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("def f(): return 1", "1"), ("def f(): return", None), ("def f(): pass", None),
        ("def f():\n    if x: return 1\n    return 2", None),
        ("def f():\n    yield 1\n    return 2", None),
    ],
)  # fmt: skip
def test_what_a_function_returns(text: str, wanted: str | None) -> None:
    with cell(text) as code:
        program = Program([code.co_filename])
        (function,) = program.functions("f")
        value = program.returned(function)
        assert (value and words(value.node)) == wanted


def test_functions_and_classes_by_their_names() -> None:
    with cell("class f: pass\nasync def g(): pass\nh = f\nclass A:\n    def f(self): pass") as code:
        program = Program([code.co_filename])
        found = {name: sorted(it.line for it in program.functions(name)) for name in "fgh"}
        assert found == {"f": [1, 5], "g": [2], "h": []}


@pytest.mark.parametrize(
    ("text", "key", "wanted"),
    [
        ("shape = (4, 5)\ntorch.zeros(shape)", 1, "shape = (4, 5)"),
        ("shape = (4, 5)\ntorch.zeros(shape)", 0, None),
        ("shape = [5, 4]\ntorch.zeros(shape)", -2, "shape = [5, 4]"),
        ("shape = f()\ntorch.zeros(shape)", 1, "shape = f()"),
        ("shape = x.shape\ntorch.zeros(shape)", 1, "shape = x.shape"),
        ("shape = (4,)\nshape = (5,)\ntorch.zeros(shape)", 0, "torch.zeros(shape)"),
        ("shape = (4,)\ndef f():\n    shape = (5,)\n    torch.zeros(shape)", 0, "shape = (5,)"),
        ("def f(shape):\n    torch.zeros(shape)\nf((4, 5))", 1, "f((4, 5))"),
    ],
)  # fmt: skip
def test_the_size_in_a_tuple_that_a_name_is_bound_to(
    text: str, key: int, wanted: str | None
) -> None:
    with cell(text) as code:
        program, file = Program([code.co_filename]), code.co_filename
        calls = (it for it in ast.walk(program.trees[file]) if shape_argument(it) is not None)
        (made,) = calls
        shape = shape_argument(made)
        assert shape is not None
        found = program.chosen(Spot(file, shape), Spot(file, made), 5, key=key)
        assert (found and program.text(found)) == wanted


def test_only_a_factory_takes_all_its_sizes_from_one_variable() -> None:
    assert shape_argument(expression("x.view(shape)")) is None
    assert shape_argument(expression("torch.zeros((4, 5))")) is None
    assert shape_argument(expression("torch.zeros(shape, 2)")) is None
