"""Where the size was set that a value was outside of, of cells that fail."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from cudalens.core.evidence_types import BoundOrigin
from cudalens.evidence import value_facts
from tests.hostcells import SETUP, run_cell
from tests.probes import cell

pytestmark = pytest.mark.usefixtures("sim")
NET = """\
class Net(nn.Module):
    def __init__(self, rows, classes):
        super().__init__()
        self.items = nn.Embedding(rows, 8)
        self.head = nn.Linear(8, classes)
        self.register_buffer("table", torch.zeros(rows, 2))
    def forward(self, ids):
        return self.head(self.items(ids))
"""
NESTED = """\
class Nested(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.parts = nn.ModuleList([nn.ModuleList([nn.Embedding(n, 8)])])
"""
WRAP = """\
class Wrap(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, ids):
        return self.inner(ids)
"""
TWICE = WRAP.replace("self.inner = inner", "self.inner = self.inner = inner")
WIDE = """\
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.top = nn.Linear(8, 1)
    def widen(self, n):
        self.top = nn.Linear(8, n).cuda()
m = Wide().cuda()
m.widen(5)
"""
STORE = """\
class Store(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.k = torch.zeros(n, 2).cuda()
    def forward(self, at):
        self.k.index_copy_(0, at, torch.ones(1, 2).cuda())
"""
SIX = "y = torch.tensor([0, 5]).cuda()\n"
BAD = "y = torch.tensor([5]).cuda()\n"
UNSEEN = "with torch._C.DisableTorchFunction():\n"
CELLS = {
    "a layer": (f"t = nn.Embedding(5, 2).cuda()\n{BAD}t(y)", (1, "nn.Embedding(5, 2)", None)),
    "a layer of a model, by what the model was given": (
        f"{NET}net = Net(5, 3).cuda()\n{BAD}net(y)",
        (9, "Net(5, 3)", "nn.Embedding(rows, 8)"),
    ),
    "the last layer before a loss": (
        f"{NET}net = Net(9, 5).cuda()\n{SIX}F.cross_entropy(net(y), y)",
        (9, "Net(9, 5)", "nn.Linear(8, classes)"),
    ),
    "a buffer": (
        f"{NET}net = Net(5, 3).cuda()\n{BAD}net.table[y]",
        (9, "Net(5, 3)", "torch.zeros(rows, 2)"),
    ),
    "a layer inside wrappers": (
        f"{WRAP}m = Wrap(Wrap(nn.Embedding(5, 2))).cuda()\n{BAD}m(y)",
        (7, "nn.Embedding(5, 2)", None),
    ),
    "a layer that was replaced": (
        f"{WIDE}{SIX}F.cross_entropy(m.top(torch.randn(2, 8).cuda()), y)",
        (8, "m.widen(5)", "nn.Linear(8, n)"),
    ),
    "one of two objects of a class": (
        f"{STORE}a, b = Store(8), Store(5)\n{BAD}for it in (a, b): it(y)",
        (7, "Store(5)", "torch.zeros(n, 2)"),
    ),
    "a layer of a Sequential over several lines": (
        f"net = nn.Sequential(nn.Linear(8, 9),\n    nn.Linear(9, 5)).cuda()\n{SIX}"
        "F.cross_entropy(net(torch.randn(2, 8).cuda()), y)",
        (2, "nn.Linear(9, 5)", None),
    ),
    "a half": (
        f"left, right = torch.randn(10, 2).cuda().split(5)\n{BAD}left[y]",
        (1, "torch.randn(10, 2).cuda().split(5)", None),
    ),
    "a slice": (f"lut = torch.arange(9).cuda()[:5]\n{BAD}lut[y]",
                (1, "torch.arange(9).cuda()[:5]", None)),
    "a function's result": (
        f"def look(n):\n    return torch.zeros(n, 2).cuda()\nx = torch.zeros(3, 5)\n{BAD}"
        "look(x.size(1))[y]",
        (2, "torch.zeros(n, 2)", None),
    ),
    "a default that reads an attribute, which a method sets": (
        "class Words:\n    def __init__(self):\n        self.n = 5\nwords = Words()\n"
        "class M(nn.Module):\n    def __init__(self, n=words.n):\n        super().__init__()\n"
        f"        self.t = nn.Embedding(n, 2)\nm = M().cuda()\n{BAD}m.t(y)",
        (3, "self.n = 5", "nn.Embedding(n, 2)"),
    ),
    "an entry of a dict": (
        f"cfg = {{'n': 5, 'm': 6}}\nx = torch.randn(2, 10).cuda().view(4, cfg['n'])\n"
        f"{BAD}x.gather(1, y[None])",
        (1, "cfg = {'n': 5, 'm': 6}", "torch.randn(2, 10).view(4, cfg['n'])"),
    ),
    "two layers of one assignment": (
        "class M(nn.Module):\n    def __init__(self, n, k):\n        super().__init__()\n"
        "        self.a, self.b = nn.Embedding(n, 2), nn.Embedding(k, 2)\n"
        f"m = M(len('abcde'), 7).cuda()\n{BAD}m.a(y)",
        (5, "M(len('abcde'), 7)", "nn.Embedding(n, 2)"),
    ),
    "a number of steps": (
        f"n = 5\nx = torch.linspace(0, 1, n).cuda()\n{BAD}x[y]",
        (1, "n = 5", "torch.linspace(0, 1, n)"),
    ),
    "a number of classes": (f"n = 5\n{BAD}F.one_hot(y, n)", (1, "n = 5", None)),
    "a tensor that gives another its type alone": (
        f"x = torch.ones(5).cuda()\nz = x.new_ones(5, 2)\n{BAD}z[y]",
        (2, "x.new_ones(5, 2)", None),
    ),
    "a tensor that a call returned as it was": (
        f"n = 5\nx = torch.zeros(n, 2).cuda()\nx = x.contiguous()\n{BAD}x[y]",
        (1, "n = 5", "torch.zeros(n, 2)"),
    ),
    "the columns of a table of tensors": (
        "n = 5\nw = torch.randn(9, n, device='cuda')\n"
        f"x = F.embedding(torch.tensor([[1]]).cuda(), w)\n{BAD}x.index_select(2, y)",
        (1, "n = 5", "torch.randn(9, n, device='cuda')"),
    ),
    "a square": (
        f"n = 5\nx = torch.randn(n, 5).cuda().exp()\n{BAD}x[y]",
        (1, "n = 5", "torch.randn(n, 5)"),
    ),
    "a view of all of it that nothing recorded": (
        f"n = 5\nt = torch.zeros(n, 2).cuda()\n{UNSEEN}    v = t[:]\n{BAD}v[y]",
        (1, "n = 5", "torch.zeros(n, 2)"),
    ),
    "a view of a part that nothing recorded": (
        f"n = 6\nt = torch.zeros(n, 2).cuda()\n{UNSEEN}    v = t[:5]\n{BAD}v[y]",
        (4, "t[:5]", None),
    ),
    "a view that turns a square": (
        f"m, n = 5, 5\nt = torch.zeros(m, n).cuda()\n{UNSEEN}    v = t.t()\n{BAD}v[y]",
        (4, "t.t()", None),
    ),
    "a number that the call computes": (f"{BAD}F.one_hot(y, len('abcde'))", None),
    "a number that the call has": (f"{BAD}F.one_hot(y, 5)", None),
    "of two inputs that have the size none is named": (
        f"x, w = torch.randn(5, 5).cuda(), torch.randn(5, 5).cuda()\n{BAD}(x @ w)[y]",
        None,
    ),
    "the channels of a convolution, whose input has as many steps": (
        f"conv = nn.Conv1d(3, 5, 1).cuda()\nx = conv(torch.randn(1, 3, 5).cuda())\n{BAD}"
        "x.index_select(1, y)",
        (1, "nn.Conv1d(3, 5, 1)", None),
    ),
    "the steps of a convolution": (
        f"conv = nn.Conv1d(3, 4, 1).cuda()\nx = conv(torch.randn(1, 3, 5).cuda())\n{BAD}"
        "x.index_select(2, y)",
        (2, "torch.randn(1, 3, 5)", None),
    ),
    "the columns of a table, whose line has another number first": (
        f"t = nn.Embedding(9, 5).cuda()\nx = t(torch.tensor([[1]]).cuda())\n{BAD}"
        "x.index_select(2, y)",
        None,
    ),
    "a table that was cut since": (
        f"t = nn.Embedding(9, 2).cuda()\nt.weight.data = t.weight.data[:5]\n{BAD}t(y)", None,
    ),
    "a layer whose line has another size by a number that is computed": (
        f"words = list('abcde')\nt = nn.Embedding(len(words), 2).cuda()\n{BAD}t(y)",
        (2, "nn.Embedding(len(words), 2)", None),
    ),
}  # fmt: skip


def origin_of(source: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> BoundOrigin | None:
    found: list[BoundOrigin | None] = [None]
    inner = value_facts.bound_origin

    def watched(*args: Any, **kwargs: Any) -> BoundOrigin | None:
        found.append(inner(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(value_facts, "bound_origin", watched)
    report = run_cell(source, fast=False, **more).shown
    is_set = found[-1] is not None and found[-1].is_set
    assert report.bound_source == (found[-1].at if found[-1] is not None and is_set else None)
    assert not report.limits
    return found[-1]


@pytest.mark.parametrize(("source", "wanted"), CELLS.values(), ids=CELLS)
def test_the_line_that_chose_the_size(
    source: str, wanted: tuple[int, str, str | None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = origin_of(SETUP + textwrap.dedent(source), monkeypatch)
    said = origin and ((origin.at.line or 0) - 4, origin.expression)
    assert said == (wanted and wanted[:2])
    made = origin and origin.made_by
    assert (made or "").replace(".cuda()", "") == ((wanted and wanted[2]) or "")
    assert bool(origin and origin.made) is bool(made)


@pytest.mark.parametrize("names", ["_3 = t", "t = _3"])
def test_the_names_that_a_shell_keeps_are_not_the_users(
    names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = origin_of(f"{SETUP}{names} = nn.Embedding(5, 2).cuda()\n{BAD}t(y)", monkeypatch)
    assert origin is not None and origin.holder == "t"


@pytest.mark.parametrize("read", ["n = x.size(1)", "m, n = x.shape"])
def test_a_size_of_another_tensor_is_only_read(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = f"{SETUP}x = torch.randn(4, 5)\n{read}\n{BAD}F.one_hot(y, n)"
    origin = origin_of(source, monkeypatch)
    assert origin is not None
    assert (origin.expression, origin.is_set) == (read, False)


def sized(cell: str, monkeypatch: pytest.MonkeyPatch) -> BoundOrigin | None:
    """Run a cell with another function of this name, as a launcher may."""
    start = 'def sized(options):\n    return torch.zeros(options["rows"], 2).cuda()\n'
    return origin_of(f"{SETUP}{start}{cell}\n{BAD}F.embedding(y, t)", monkeypatch)


@pytest.mark.parametrize(
    ("more", "is_set"),
    [
        ("", True),
        ("\nothers = {'rows': 6}\nsized(others)", True),
        ("\nothers = {'rows': 5}\nsized(others)", False),
    ],
)
def test_what_runs_a_cell_calls_no_function_of_it(
    more: str, is_set: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"cell": f"options = {{'rows': 5}}\nt = sized(options){more}"}
    origin = sized(job["cell"], monkeypatch)
    assert origin is not None
    assert origin.is_set is (origin.expression == "options = {'rows': 5}") is is_set


SHARDS = """\
class Shards(nn.Module):
    def __init__(self, w, n):
        super().__init__()
        self.parts = nn.ParameterList()
        for at in range(2):
            self.parts.append(nn.Parameter(w[at * n:at * n + n].clone(), False))
    def forward(self, ids):
        return F.embedding(ids, self.parts[0])
"""


@pytest.mark.parametrize(
    ("made", "use", "wanted", "is_set"),
    [
        ("t = nn.Embedding(5, 2).cuda()", "t(y)", "nn.Embedding(5, 2)", True),
        ("t = nn.Embedding(args.n, 2).cuda()", "t(y)", "nn.Embedding(args.n, 2)", False),
        ("args.n = 5\nt = nn.Embedding(args.n, 2).cuda()", "t(y)", "args.n = 5", True),
        ("t = nn.Sequential(build(args)).cuda()", "t(y)", None, False),
        (f"{SHARDS}t = Shards(torch.randn(10, 2), 5).cuda()", "t(y)",
         "w[at * n:at * n + n]", True),
        # A second line adds to the list, and which of them has made it, the source does not tell.
        (f"{SHARDS[:-1]}\n    def more(self, w):\n        self.parts.append(nn.Parameter(w))\n"
         "t = Shards(torch.randn(10, 2), 5).cuda()", "t(y)", None, False),
        ("def grow(x):\n    return torch.ones(5, 2).cuda()\nt = grow(torch.ones(3)[:3])", "t[y]",
         "grow(torch.ones(3)[:3])", False),
        ("ws = [torch.zeros(5, 2)]\nt = nn.Parameter(ws[0].cuda())", "t[y]",
         "nn.Parameter(ws[0].cuda())", False),
    ],
)  # fmt: skip
def test_a_line_that_only_reads_the_number_has_not_set_it(
    made: str, use: str, wanted: str | None, is_set: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, Any] = {"args": SimpleNamespace(n=5)}
    names["build"] = lambda it: nn.Embedding(it.n, 2)
    with cell(SETUP + made) as code:
        exec(code, names)
        origin = origin_of(BAD + use, monkeypatch, names=names)
    assert (origin and origin.expression) == wanted
    assert (origin is not None and origin.is_set) == is_set


@pytest.mark.parametrize(
    ("made", "use", "wanted"),
    [
        ("t = nn.Embedding(5, 2).cuda()", "t(y)", "nn.Embedding(5, 2)"),
        (f"{NET}t = Net(5, 3).cuda()", "t(y)", "Net(5, 3)"),
        (f"{NET}t = Net(9, 5).cuda()", "F.cross_entropy(t(y), y)", "Net(9, 5)"),
        ("n = 5\nt = torch.zeros(n, 2).cuda()", "t[y]", "n = 5"),
        (f"{NESTED}t = Nested(5).cuda()", "t.parts[0][0](y)", "Nested(5)"),
        # Which of the two made it, the source does not tell.
        ("t = nn.Embedding(5, 2).cuda()\nt = nn.Embedding(5, 3).cuda()", "t(y)", None),
        # Two assignments keep the layer that one call made.
        (f"{TWICE}t = Wrap(nn.Embedding(5, 2)).cuda()", "t(y)", "nn.Embedding(5, 2)"),
        ("t = torch.zeros(5, 2).cuda() + 1", "t[y]", None),
    ],
)
def test_what_is_older_than_the_record_is_found_by_its_source(
    made: str, use: str, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, Any] = {}
    with cell(SETUP + made) as code:
        exec(code, names)
        origin = origin_of(BAD + use, monkeypatch, names=names)
    assert (origin and origin.expression) == wanted


LAYER, TABLE = "t = nn.Embedding(5, 2).cuda()", "t = nn.Parameter(torch.zeros(5, 2).cuda())"


@pytest.mark.parametrize(
    ("made", "write", "wanted"),
    [
        (
            LAYER,
            "opt = torch.optim.SGD(t.parameters(), lr=0.1)\nt(y * 0).sum().backward()\nopt.step()",
            "nn.Embedding(5, 2)",
        ),
        (LAYER, "nn.init.normal_(t.weight)", "nn.Embedding(5, 2)"),
        (LAYER, "t.load_state_dict(t.state_dict())", "nn.Embedding(5, 2)"),
        (TABLE, "nn.init.normal_(t)", "torch.zeros(5, 2)"),
    ],
    ids=["a step", "an initialiser", "a load", "the first write of all"],
)
def test_what_writes_to_an_older_layer_has_not_set_its_size(
    made: str, write: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, Any] = {}
    with cell(SETUP + made) as code:
        exec(code, names)
        use = "t(y)" if made is LAYER else "t[y]"
        origin = origin_of(f"{BAD}{write}\n{use}", monkeypatch, names=names)
    assert origin is not None and origin.expression == wanted


@pytest.mark.parametrize("lines", [1, 2])
def test_the_line_that_chose_the_size_is_shown_whole(
    lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = "t = torch.zeros(" + "\n" * (lines - 1) + "5, 2)"
    origin = origin_of(f"{SETUP}{made}\nt = t.cuda()\n{BAD}t[y]", monkeypatch)
    assert origin is not None and (origin.at.line, origin.at.end_line) == (5, 4 + lines)
