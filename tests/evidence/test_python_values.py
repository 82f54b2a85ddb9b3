"""The statement that computed what ``torch.tensor`` was given, by the program's syntax alone."""

from __future__ import annotations

import ast

import pytest

import cudalens
from cudalens.evidence.program import Program, Spot
from cudalens.evidence.python_values import _made_by, computed_lines, computing_line
from tests.probes import asked, cell
from tests.shells import shell_with_cudalens

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
    "the array of a data frame": (
        "a = (b / b.max()).values.astype('f4')\ntorch.from_numpy(a[:2])",
        "a = (b / b.max()).values.astype('f4')",
    ),
    "another attribute": ("a = (b / b.max()).shape\ntorch.tensor(a)", None),
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
        None,
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
    "an item written by another name": ("a = x + 1\nb = a\nb[0] = 9\ntorch.tensor(a)", None),
    "an item written by the older name": ("b = x + 1\na = b\nb[0] = 9\ntorch.tensor(a)", None),
    "an item written in a view": ("a = x + 1\nv = a[1:]\nv[0] = 9\ntorch.tensor(a)", None),
    "an item written by its container": (
        "a = x + 1\nd = {'a': a}\nd['a'][0] = 9\ntorch.tensor(a)",
        None,
    ),
    "items written in a loop": (
        "a = x + 1\nfor row in a:\n    row[0] = 9\ntorch.tensor(a)",
        None,
    ),
    "an item written by a function": (
        "def fix(v):\n    v[0] = 9\na = x + 1\nfix(a)\ntorch.tensor(a)",
        None,
    ),
    "an item written by a function of NumPy": ("a = x + 1\nnp.put(a, 0, 9)\ntorch.tensor(a)", None),
    "a tensor over the same memory, written in place": (
        "a = x + 1\nt = torch.from_numpy(a)\nt.add_(9)\ntorch.tensor(a)",
        None,
    ),
    "an array that was written after it was copied from": (
        "b = np.where(x, 9, y)\ny[0] = 7\ntorch.tensor(b)",
        "b = np.where(x, 9, y)",
    ),
    "a view of an array that was written later": (
        "b = np.broadcast_to(y, 3)\ny[0] = 7\ntorch.tensor(b)",
        None,
    ),
    "a tensor that is read by one that is written": (
        "a = x + 1\nt = torch.zeros(2)\nt.copy_(a)\ntorch.tensor(a)",
        "a = x + 1",
    ),
    "the result of a method that changes a list": (
        "a = x * 2\nb = a.insert(0, 9)\ntorch.tensor(a)",
        None,
    ),
    "a list that another function fills too": (
        "out = []\ndef f():\n    out.append(9)\nf()\nout.append(x + 1)\ntorch.tensor(out)",
        None,
    ),
    "two lists side by side": (
        "a = x * 0\nb = list(zip(a, y))\ntorch.tensor(b)",
        "b = list(zip(a, y))",
    ),
    "numbers beside a list": (
        "a = x * 0\nb = list(enumerate(a))\ntorch.tensor(b)",
        "b = list(enumerate(a))",
    ),
    "a function of NumPy beside an own one": (
        "def clip(v):\n    return v + 1\na = np.clip(x, 0, 9)\ntorch.tensor(a)",
        "a = np.clip(x, 0, 9)",
    ),
    "an own function of the name of one that copies": (
        "def copy(v):\n    return [9]\nb = x + 1\na = copy(b)\ntorch.tensor(a)",
        None,
    ),
    "a decorated function": (
        "@nine\ndef f(v):\n    return v + 1\na = f(x)\ntorch.tensor(a)",
        "a = f(x)",
    ),
    "a function of another name since": (
        "def f(v):\n    return v + 1\nf = g\na = f(x)\ntorch.tensor(a)",
        "a = f(x)",
    ),
    "an attribute that is changed in place": (
        "class A:\n    def f(self, x):\n        self.y = x + 1\n        self.y += 7\n"
        "    def g(self):\n        return torch.tensor(self.y)",
        None,
    ),
    "an attribute that is set from outside": (
        "class A:\n    def f(self, x):\n        self.y = x + 1\n"
        "    def g(self):\n        return torch.tensor(self.y)\na.y = [9]",
        None,
    ),
    "an item of an attribute": (
        "class A:\n    def f(self, x):\n        self.y = x + 1\n        self.y[0] = 9\n"
        "    def g(self):\n        return torch.tensor(self.y)",
        None,
    ),
    "after a try": (
        "a = x + 1\ntry:\n    a = [9]\nfinally:\n    torch.tensor(a)",
        None,
    ),
    "in a handler": (
        "a = x + 1\ntry:\n    a = [9]\nexcept E:\n    torch.tensor(a)",
        None,
    ),
    "in a with statement that binds it": (
        "a = x + 1\nwith f() as a:\n    torch.tensor(a)",
        None,
    ),
    "in a with statement before": (
        "with open(f) as k:\n    a = x + 1\ntorch.tensor(a)",
        "a = x + 1",
    ),
    "before a with statement that leaves it": (
        "a = x + 1\nwith open(f) as k:\n    b = 9\ntorch.tensor(a)",
        "a = x + 1",
    ),
    "in a with statement that changes it in a branch": (
        "a = x + 1\nwith open(f) as k:\n    if k:\n        a = [9]\ntorch.tensor(a)",
        None,
    ),
    "with a type": ("a: list = x + 1\ntorch.tensor(a)", "a: list = x + 1"),
    "a name that only has a type": ("a: list\ntorch.tensor(a)", None),
    "a shuffled list": ("a = x + 1\nrandom.shuffle(a)\ntorch.tensor(a)", None),
    "another list shuffled": ("a = x + 1\nrandom.shuffle(b)\ntorch.tensor(a)", "a = x + 1"),
    "what is written by out=": ("a = x + 1\nnp.add(b, b, out=a)\ntorch.tensor(a)", None),
    "a negative number": ("a = -1\ntorch.tensor(a)", None),
    "a number that is negated": ("a = -b\ntorch.tensor(a)", "a = -b"),
    "an item of the only item": ("a = [x + 1]\ntorch.tensor([a[0]])", "a = [x + 1]"),
    "one of two items": ("a = x + 1\ntorch.tensor([a, b])", None),
    "a function of the user's with the name of a copy": (
        "def copy(v):\n    return v + 1\na = copy(x)\ntorch.tensor(a)",
        None,
    ),
    "a lambda around it": ("a = x + 1\nf = lambda: torch.tensor(a)", None),
    "a function in an async function": (
        "a = x + 1\nasync def f():\n    return torch.tensor(a)",
        None,
    ),
    "the argument of a decorated function": (
        "a = b * 2\n@wrap\ndef f(v):\n    return torch.tensor(v)\nf(a)",
        None,
    ),
    "a local variable of a function that the cell has too": (
        "a = x + 1\ndef f():\n    torch.tensor(a)\n    a = 3",
        None,
    ),
    "a second value of the cell's": ("a = x + 1\na = x + 2\ndef f():\n    torch.tensor(a)", None),
    "a value of the cell's": ("a = x + 1\ndef f():\n    torch.tensor(a)", "a = x + 1"),
    "without an argument": ("a = x + 1\ntorch.tensor()", None),
    "after a with statement that binds it": (
        "a = x + 1\nwith f() as a:\n    pass\ntorch.tensor(a)",
        None,
    ),
    "a global of a function": (
        "def f():\n    global a\n    a = [9]\na = x + 1\nf()\ntorch.tensor(a)",
        None,
    ),
    "a variable that is set after a function": (
        "a = x + 1\ndef f():\n    return torch.tensor(a)\na = [9]",
        None,
    ),
    "the parameter of all arguments": (
        "a = x + 1\ndef f(*a):\n    return torch.tensor(a)",
        None,
    ),
    "a test that binds it": ("a = x + 1\nif (a := [9]):\n    pass\ntorch.tensor(a)", None),
    "two names swapped in a branch": (
        "a = x + 1\nif c:\n    a, b = b, a\ntorch.tensor(a)",
        None,
    ),
    "a branch that adds to the old one": (
        "a = x + 1\nif c:\n    a = a + 5\ntorch.tensor(a)",
        None,
    ),
    "a variable set by its name": ("a = x + 1\nexec('a = [9]')\ntorch.tensor(a)", None),
    "a function that has another name": (
        "a = x + 1\ndef f(v):\n    return torch.tensor(v)\ng = f\nf(a)\ng([9])",
        None,
    ),
    "a generator": (
        "def f(n):\n    yield 9\n    return n + 1\na = list(f(1))\ntorch.tensor(a)",
        None,
    ),
    "a name that is imported since": ("a = x + 1\nfrom m import a\ntorch.tensor(a)", None),
    "an attribute of a class too": (
        "class A:\n    y = [9]\n    def f(self, x):\n        self.y = x + 1\n"
        "    def g(self):\n        return torch.tensor(self.y)",
        None,
    ),
    "a method that is called on its class": (
        "class A:\n    def f(self, u, v):\n        return torch.tensor(v)\n"
        "p = x + 1\nA.f(A(), p, [9])",
        None,
    ),
    "numbers that count others": (
        "a = x + 1\nfor i in y:\n    n[a[i]] += 1\ntorch.tensor(a)",
        "a = x + 1",
    ),
    "an item that is added to": ("a = x + 1\na[n[0]] += 1\ntorch.tensor(a)", None),
    "an item of a row that is added to": ("a = x + 1\na[0][n] += 1\ntorch.tensor(a)", None),
    "a list that another function is given": (
        "def g(out):\n    out.append(9)\ndef f(x):\n    out = []\n    g(out)\n"
        "    out.append(x + 1)\n    return torch.tensor(out)",
        None,
    ),
    "an earlier turn of a while loop": (
        "a = x * 2\nwhile y:\n    torch.tensor(a)\n    a = x + 1",
        None,
    ),
    "what may be imported since": ("a = x + 1\nfrom m import *\ntorch.tensor(a)", None),
    "a name twice in a tuple": ("a, a = x + 1, [9]\ntorch.tensor(a)", None),
    "an item of a loop": (
        "for a in x + 1:\n    torch.tensor(a)",
        "for a in x + 1:\n    torch.tensor(a)",
    ),
    "a part of an item of a loop": ("for a, b in x + 1:\n    torch.tensor(a)", None),
    "a class of the name of a copy": (
        "class list(tuple):\n    pass\na = x + 1\ntorch.tensor(list(a))",
        None,
    ),
    "a variable of the name of a copy": ("list = h\na = x + 1\ntorch.tensor(list(a))", None),
    "a function inside another": (
        "a = x + 1\ndef g():\n    a = [9]\n    def f():\n        return torch.tensor(a)",
        None,
    ),
    "a method of a part of the object": (
        "class A:\n    def f(self, x):\n        y = x + 1\n        return y\n"
        "    def g(self):\n        return torch.tensor(self.h.f(3))",
        "y = x + 1",
    ),
    "a script": ("a = x + 1\nget_ipython().run_line_magic('run', 's.py')\ntorch.tensor(a)", None),
}


MADE = "a = x + 1\nt = torch.tensor(a)\n"
NUMPY = "import numpy as np\na = np.zeros(1)\nt = torch.from_numpy(a)\n"
TWO = ["t = torch.tensor(a)", "a = x + 1"]


@pytest.mark.parametrize(("source", "wanted"), LINES.values(), ids=LINES)
def test_the_line_that_computed_what_a_tensor_is_made_of(source: str, wanted: str | None) -> None:
    with cell(source) as code:
        program = Program([code.co_filename])
        calls = (it for it in ast.walk(program.trees[code.co_filename]) if isinstance(it, ast.Call))
        made = [it for it in calls if ast.unparse(it.func).startswith("torch.")]
        found = computing_line(program, Spot(code.co_filename, made[-1]))
        assert (None if found is None else ast.unparse(found.node)) == wanted


CALLED = "a = x + 1\ndef f(v):\n    return torch.tensor(v)\ndef g(u):\n    return f(u)\n"
METHOD = "a = x + 1\nclass A:\n    def f(self, v):\n        return torch.tensor(v)\n"
INIT = "a = x + 1\nclass A:\n    def __init__(self, v, w):\n        self.t = torch.tensor(v)\n"


@pytest.mark.parametrize(
    ("source", "callers", "wanted"),
    [
        (f"{CALLED}f(a)\nf([9])", ["f(a)"], "a = x + 1"),
        (f"{CALLED}f(a)\nf([9])", ["f([9])"], None),
        (f"{CALLED}g(a)\ng([9])", ["g(a)", "f(u)"], "a = x + 1"),
        (f"{CALLED}g(a)\ng([9])", ["g([9])", "f(u)"], None),
        (f"{METHOD}A().f(a)\nA().f([9])", ["A().f(a)"], "a = x + 1"),
        (f"{METHOD}A.f(a, [9])\nA().f([9])", ["A.f(a, [9])"], None),  # self is a
        (f"{METHOD}A.f([9], a)\nA().f([9])", ["A.f([9], a)"], "a = x + 1"),
        (f"{METHOD}m = A()\nm.f(a)\nm.f([9])", ["m.f(a)"], "a = x + 1"),
        (f"{INIT}A(a, [9])\nA([9], a)", ["A(a, [9])"], "a = x + 1"),
        (f"{INIT}A(a, [9])\nA([9], a)", ["A([9], a)"], None),
    ],
)
def test_of_several_calls_the_one_that_was_running(
    source: str, callers: list[str], wanted: str | None
) -> None:
    with cell(source) as code:
        program, file = Program([code.co_filename]), code.co_filename
        calls = [it for it in ast.walk(program.trees[file]) if isinstance(it, ast.Call)]
        spots = {ast.unparse(it): Spot(file, it) for it in calls}
        found = computing_line(program, spots["torch.tensor(v)"], [spots[it] for it in callers])
        assert (None if found is None else ast.unparse(found.node)) == wanted


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (f"{MADE}here()", TWO),
        (f"{MADE}u = t\nhere()", []),  # which of two names it is read by is not known
        (f"{MADE}def f():\n    here()\nf()", TWO),
        (f"{MADE}def f(v):\n    here()\nf(t)", []),  # the innermost name is that of a parameter
        (f"{MADE}u = torch.tensor(a)\nhere()", TWO),
        ("a = [1]\nt = torch.tensor(a)\nhere()", TWO[:1]),
        (f"{NUMPY}here()", ["t = torch.from_numpy(a)", "a = np.zeros(1)"]),
        (f"{NUMPY}a[0] = 9\nhere()", []),
        (f"{MADE}t.zero_()\nhere()", []),
        (f"{MADE.strip()}.clone()\nhere()", [f"{TWO[0]}.clone()", TWO[1]]),
        pytest.param("\n" * 5000 + f"{MADE}here()", [], id="too many lines"),
    ],
)
def test_the_lines_of_a_tensor_that_no_call_made(source: str, wanted: list[str]) -> None:
    """The frames hold it by one name."""
    ask = lambda frames: computed_lines(None, frames[0].f_locals["t"], frames)
    (found,) = asked(source, ask, x=1)
    assert [line.text for line in found] == wanted


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("torch.tensor(a)", "torch.tensor(a)"), ("tensor(a)", "tensor(a)"),
        ("torch.from_numpy(a).float()", "torch.from_numpy(a)"),
        ("t = torch.from_numpy(a)\nt.float()", "torch.from_numpy(a)"),
        ("torch.ones(3).float()", None), ("t = torch.ones(3)\nt.float()", None),
        ("f.from_numpy(a).float()", None), ("len(a)", None),
    ],
)  # fmt: skip
def test_the_call_that_made_a_tensor_of_what_python_has(source: str, wanted: str | None) -> None:
    with cell(source) as code:
        program = Program([code.co_filename])
        last = program.trees[code.co_filename].body[-1]
        assert isinstance(last, ast.Expr)
        found = _made_by(program, Spot(code.co_filename, last.value))
        assert (None if found is None else ast.unparse(found.node)) == wanted


def test_an_array_that_is_written_in_the_cell_that_fails() -> None:
    """What ``from_numpy`` made shares its memory."""
    with cell("a = x + 1\nt = torch.from_numpy(a)") as code, cell("b = a\nb[0] = 9") as later:
        program = Program([code.co_filename, later.co_filename])
        calls = (it for it in ast.walk(program.trees[code.co_filename]) if isinstance(it, ast.Call))
        spot = Spot(code.co_filename, next(calls))
        assert computing_line(program, spot) is not None
        assert computing_line(program, spot, running=[later.co_filename]) is None


@pytest.mark.usefixtures("sim")
def test_what_runs_the_first_cell_is_no_part_of_the_program() -> None:
    """A driver may run what it likes: this function is on the stack, below the cells."""
    with shell_with_cudalens() as shell:
        exec("a = [9]", {})
        shell.run_cell("import numpy as np, torch", store_history=True)
        shell.run_cell(
            "%%cudacheck --no-widgets\na = np.array([0, 4])\na = a + 1\n"
            "y = torch.tensor(a).cuda()\ntorch.zeros(5, 2).cuda()[y]",
            store_history=True,
        )
        report = cudalens.last_report()
    assert report is not None
    assert "line 3: a = a + 1" in [item.text for item in report.observations]
