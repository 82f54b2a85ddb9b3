"""Lines that recorded calls prove to be the cause: a cut graph, a batch dimension that is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from cudalens.evidence import recorded_way
from cudalens.recorder import Recorder
from tests.hostcells import SETUP, run_cell
from tests.probes import cell

pytestmark = pytest.mark.usefixtures("sim")
LOSS = """
net, x, y = nn.Linear(4, 3).cuda(), torch.rand(2, 4).cuda(), torch.rand(2, 3).cuda()
out = {out}
aim = {target}
loss = F.mse_loss(out, aim).mean()
loss.backward()
"""
GRADIENT = "torch.autograd.grad(net(x.requires_grad_()).sum(), x"
BATCHES = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)
    def forward(self, x):
        x = F.adaptive_avg_pool2d(x, 1)
        x = {squeeze}
        return self.fc(x)
net = Net().cuda()
for n in {sizes}:
    out = net(torch.rand(n, 6, 4, 4).cuda())
    loss = F.cross_entropy(out, torch.zeros(n, dtype=torch.long).cuda())
    loss.backward()
"""


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize(
    ("out", "target", "says"),
    [
        ("net(x).relu().detach()", "y * 2", "line 7: out = net(x).relu().detach(); detach()"),
        ("net(x).relu().data", "torch.full_like(y, 1.0)", ".data is the tensor without its graph"),
        ("(net(x) > 0).float() * x.new_ones(3)", "y * 2", "line 7: out = (net(x) > 0).float()"),
        ("torch.no_grad()(net)(x)", "y * 2", "out = torch.no_grad()(net)(x); its inputs have a"),
        (
            "torch.tensor([*net(x)[0]]).cuda()",
            "y[0]",
            "torch.tensor copies values without their graph",
        ),
        (
            f"{GRADIENT})[0][:, :3]",
            "y * 2",
            "no graph of its own: to train through it, pass create",
        ),
        ("net(x).detach()", "net(x).detach()", None),
        ("torch.no_grad()(net)(x)", "torch.no_grad()(net)(x)", None),
        ("torch.no_grad()(nn.Linear(4, 3).requires_grad_(False).cuda())(x)", "y * 2", None),
        ("torch.rand_like(net(x))", "y * 2", None),
        ("nn.Linear(4, 3).requires_grad_(False).cuda()(x)", "net(x).detach()", None),
        ("torch.full_like(net(x), 0.5)", "y * 2", None),
        ("x[:, :3].detach()", "y * 2", None),
    ],
    ids=[
        *(
            "detach",
            "data",
            "compared",
            "no grad",
            "tensor",
            "gradient",
            "two lines",
            "no grad in two lines",
        ),
        *("frozen under no grad", "random", "frozen", "size alone", "data alone"),
    ],
)
def test_the_call_that_cut_a_loss_off_its_graph(out: str, target: str, says: str | None) -> None:
    """It is named where it is the only one; a frozen layer may be the reason as well."""
    report = run_cell(SETUP + LOSS.format(out=out, target=target), fast=False).shown
    assert report.kind == "autograd_error"
    assert report.limits == ()
    text = " ".join(item.text for item in report.hints)
    assert says in text if says else "detach" not in text and "gradient" not in text
    assert says or "no_grad" not in text


BLOCK = """
net, x, y = nn.Linear(4, 3).cuda(), torch.rand(2, 4).cuda(), torch.rand(2, 3).cuda()
class Called(nn.Module):
    def forward(self, x):
        return F.linear(x, net.weight)
called = Called()
with {manager}:
    def defined(x): return torch.no_grad()(net)(x)
    out = {inside}
out = {behind}
loss = F.mse_loss(out, y)
loss.backward()
"""


@pytest.mark.parametrize(
    ("manager", "inside", "behind", "says"),
    [
        ("torch.no_grad()", "called(x)", "out", "line 11: with torch.no_grad(); what is compu"),
        ("torch.inference_mode()", "called(x)", "out * 2", "line 11: with torch.inference_mode();"),
        (
            "torch.enable_grad()",
            "0",
            "torch.no_grad()(called)(x)",
            "line 9: return F.linear(x, net.weight); its",
        ),
        ("torch.no_grad()", "0", "defined(x)", "line 12: def defined(x): return torch.no_grad()"),
    ],
    ids=["called in it", "inference", "another block", "defined in it"],
)
def test_the_block_that_a_call_without_a_graph_ran_in(
    manager: str, inside: str, behind: str, says: str
) -> None:
    code = SETUP + BLOCK.format(manager=manager, inside=inside, behind=behind)
    report = run_cell(code, fast=False).shown
    assert report.limits == ()
    (hint,) = report.hints
    assert hint.text.startswith(says)


@pytest.mark.parametrize(
    ("line", "is_said"),
    [
        ("loss = F.mse_loss(net(x), y).item()", True),
        ("loss += F.mse_loss(net(x), y).item()", True),
        ("shown = F.mse_loss(net(x), y).item()", False),
        ("loss = y.mean().item()  # and not detach()", False),
    ],
    ids=["assigned", "added", "another name", "of data"],
)
def test_the_call_that_made_a_number_of_a_loss(line: str, is_said: bool) -> None:
    """It has given the variable its value, that of a tensor with a graph."""
    cell = "net, loss = nn.Linear(4, 3).cuda(), 0.0\nx, y = torch.rand(2, 4).cuda(), "
    cell += f"torch.rand(2, 3).cuda()\n{line}\nloss.backward()\n"
    report = run_cell(SETUP + cell, fast=False).shown
    assert report.headline_schema == "loss is a float: it has no graph, and no backward"
    assert ["to train through it" in item.text for item in report.hints] == [True] * is_said


@pytest.mark.parametrize(
    ("squeeze", "sizes", "says"),
    [
        ("x.squeeze()", (3, 1), "(6,) of (1, 6, 1, 1), and (3, 6) of (3, 6, 1, 1) before: give"),
        ("torch.squeeze(x)", (3, 1), "line 12 took the batch dimension away: x = torch.squeeze(x)"),
        ("x.flatten(1).squeeze(0)", (3, 1), "(6,) of (1, 6), and (3, 6) of (3, 6) before"),
        ("x.squeeze()", (1,), None),
        ("x.squeeze()", (1, 1), None),
        ("x.flatten(1)[0]", (3, 1), None),
    ],
    ids=["method", "function", "dimension 0", "first batch", "always one", "index"],
)
def test_the_squeeze_that_took_a_batch_of_one(
    squeeze: str, sizes: tuple[int, ...], says: str | None
) -> None:
    """An earlier call of the line has to have kept the dimension of a larger batch."""
    report = run_cell(SETUP + BATCHES.format(squeeze=squeeze, sizes=sizes), fast=False).shown
    assert report.limits == ()
    text = " ".join(item.text for item in report.hints)
    assert says in text if says else "took the batch dimension" not in text


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            "net.requires_grad_(False)\nloss = F.mse_loss(net(x), y)",
            "none of the parameters behind loss ",
        ),
        (
            "net.requires_grad_(False)\nloss = (x @ net.weight.T).sum()",
            "the only parameter behind loss ",
        ),
        # The neighbours: one is not frozen, a cut is the reason, there is none behind the loss.
        ("net.bias.requires_grad_(False)\nloss = F.mse_loss(net(x).detach(), y)", None),
        ("loss = F.mse_loss(net(x).detach(), y)", None),
        ("net.requires_grad_(False)\nloss = F.mse_loss(x, x)", None),
    ],
)
def test_frozen_parameters_behind_a_loss_are_named(lines: str, says: str | None) -> None:
    cell = "net, x, y = nn.Linear(4, 3).cuda(), torch.rand(2, 4).cuda(), torch.rand(2, 3).cuda()\n"
    report = run_cell(f"{SETUP}{cell}{lines}\nloss.backward()\n", fast=False).shown
    assert report.headline_schema.startswith("loss has no grad_fn")
    text = " ".join(item.text for item in report.hints)
    assert says in text if says else "parameter" not in text
    assert report.limits == ()


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((32, 32, 4), ["x is [4, 3], and was [32, 3] in 2 earlier calls"]),
        ((32, 4), ["x is [4, 3], and was [32, 3] in 1 earlier call"]),
        # Batches of several sizes, one that is no other, and one that is the first.
        ((32, 16, 4), []),
        ((4,), []),
    ],
)
def test_the_last_batch_is_smaller(sizes: tuple[int, ...], says: list[str]) -> None:
    """A state, or weights, made for the size of the others do not fit it."""
    code = f"""\
for n in {sizes}:
    x = torch.zeros(n, 3).cuda()
    out = x + torch.ones({{fits}}, 3).cuda()
"""
    fits = "n if n > 4 else 32"
    report = run_cell(SETUP + code.format(fits=fits), fast=False).shown
    assert report.limits == ()
    assert [it.text for it in report.observations if it.kind == "earlier"] == says


def earlier(code: str) -> list[str]:
    report = run_cell(SETUP + code, fast=False).shown
    assert report.kind == "host_error"
    assert report.limits == ()
    assert "ust match" in report.headline_schema or "may differ" in report.headline_schema
    return [it.text for it in report.observations if it.kind == "earlier"]


TAGGER = """\
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.lstm = nn.Embedding(9, 16), nn.LSTM(16, 8, batch_first=True)
        self.rows, self.state = torch.zeros(32, 20, 16).cuda(), torch.zeros(1, 32, 8).cuda()
    def forward(self, ids):
        x = self.table(ids)
        {lines}
net = Tagger().cuda()
for n in (32, 32, 32, 4):
    net(torch.zeros(n, 20, dtype=torch.long).cuda())
"""


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            "x + self.rows",
            ["x is [4, 20, 16], and was [32, 20, 16] in 3 earlier calls"],
        ),
        # Of what the layer returns, each variable has the shapes of its own part.
        (
            "out, (h, c) = self.lstm(x); h + self.state",
            ["h is [1, 4, 8], and was [1, 32, 8] in 3 earlier calls"],
        ),
        # What made it is the line of another function, or none that names it.
        ("f = lambda t: t.relu(); y = f(x); y + self.rows", []),
        ("self.y = x.relu(); self.y + self.rows", []),
        (
            "for m in (3, 3, 4): y = self.table(ids[:m]); y + self.rows[:3]",
            ["y is [4, 20, 16], and was [3, 20, 16] in 2 earlier calls"],
        ),
    ],
    ids=["layer", "second part", "another function", "attribute", "one layer in a loop"],
)
def test_the_last_batch_in_a_forward(lines: str, says: list[str]) -> None:
    assert earlier(TAGGER.format(lines=lines)) == says


@pytest.mark.parametrize(
    "code",
    [
        "a, b = torch.zeros(4, 5, 2), torch.zeros(4, 7, 2)\n"
        "torch.hstack([a.transpose(1, 2), b.transpose(1, 2)])",
        "convs = [nn.Conv1d(4, 2, k) for k in (3, 3, 5)]\nx = torch.zeros(2, 4, 10)\n"
        "outs = [c(x) for c in convs]\ntorch.cat(outs, 1)",
        "def pad(v, n):\n    out = v.new_zeros(n)\n    return out\n"
        "q = pad(torch.ones(2), 4) * 2\nout = pad(torch.ones(2), 6)\nq + out",
        "class Net(nn.Module):\n    def __init__(self, out):\n        super().__init__()\n"
        "        self.fc = nn.Linear(4, out)\n    def forward(self, x):\n"
        "        y = self.fc(x)\n        return y + torch.ones(8)\n"
        "x = torch.ones(3, 4)\nfor net in (Net(8), Net(6)):\n    q = net(x)",
        "ws = [torch.ones(n) for n in (3, 3, 4)]\nw = ws[0]\nw + ws[2]",
        "w = [torch.ones(n) for n in (3, 3, 4)][2]\nw + torch.ones(3)",
        "for i, n in ((1, 3), (0, 4)):\n    w = [torch.ones(n), torch.ones(9)][i]\n"
        "    w + torch.ones(9)",
        "kept = []\nfor n in (3, 3, 4):\n    w = torch.ones(n)\n    kept.append(w)\n"
        "    w + torch.ones(3)",
        "relu = nn.ReLU()\nnet = nn.Sequential(relu, nn.MaxPool1d(2), relu)\n"
        "for x in [torch.zeros(4, 20, 16)]:\n    y = net(x)\n    y + x",
    ],
    ids=[
        "arguments",
        "layers",
        "helper",
        "instances",
        "items",
        "item",
        "chosen",
        "kept",
        "one layer twice",
    ],
)
def test_what_other_variables_were_is_not_said(code: str) -> None:
    """A call gave several of them, each its own, or gave the same to what is still there."""
    assert earlier(code) == []


def test_the_view_that_made_other_rows_of_so_many() -> None:
    with Recorder() as recorder:
        whole = torch.ones(2, 6)
        made = whole.reshape(4, 3)
        later = made * 2
        same = whole.view(2, 2, 3)
        snapshot = recorder.snapshot()
        for tensor in (made, later):
            found = recorded_way.regrouped(tensor, 2, snapshot)
            assert found is not None
            assert (found.before, found.after) == ((2, 6), (4, 3))
            assert "reshape(4, 3)" in (found.line.text or "")
        assert recorded_way.regrouped(made, 3, snapshot) is None
        assert recorded_way.regrouped(made[:3], 2, snapshot) is None
        assert recorded_way.regrouped(same, 2, snapshot) is None
        assert recorded_way.regrouped(whole, 2, snapshot) is None


def test_the_call_before_that_flattened_images() -> None:
    def found(make: Callable[[Tensor], object], *sizes: int) -> tuple[Any, Any] | None:
        with Recorder() as recorder:
            kept = make(torch.ones(sizes))
            item = recorded_way.flattened(recorder.snapshot())
        assert kept is not None
        return None if item is None else (item.before, item.after)

    image = (2, 3, 4, 4)
    assert found(lambda x: x.flatten(1), *image) == (image, (2, 48))
    assert found(lambda x: x.view(2, -1), *image) == (image, (2, 48))
    assert found(lambda x: x.reshape(2, 48), *image) == (image, (2, 48))
    assert found(lambda x: x.reshape(4, 24), *image) is None
    assert found(lambda x: x.flatten(2), *image) is None
    assert found(lambda x: x.flatten(1), 2, 3, 4) is None
    assert found(lambda x: (x.flatten(1), x * 2), *image) is None
    with Recorder() as recorder:
        assert recorded_way.flattened(recorder.snapshot()) is None


def test_what_has_led_to_a_tensor_nearest_first() -> None:
    with Recorder() as recorder:
        first, other = torch.ones(2), torch.ones(2)
        second = first + other
        third = (second * 2).exp()
        snapshot = recorder.snapshot()
        sources = recorded_way.sources_of(third, snapshot)
        assert [any(it is one for it in sources) for one in (third, second, first, other)] == [
            True, True, True, True,
        ]  # fmt: skip
        assert sources[0] is third
        assert len(sources) == 4  # the product is gone
        assert len(recorded_way.refs_of(third, snapshot)) == 5
        assert [it is first for it in recorded_way.sources_of(first, snapshot)] == [True]


def test_what_was_written_to_has_led_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def sources(names: dict[str, Any], snapshot: Any) -> list[str]:
        found = recorded_way.sources_of(names["x"], snapshot)
        return [name for name in "xab" if any(it is names[name] for it in found)]

    code = "a, b = torch.ones(2), torch.ones(2)\nx = a * 1\nx.mul_(b)"
    assert after(code, sources) == ["x", "a", "b"]
    monkeypatch.setattr(recorded_way, "_MAX_CALLS", 2)
    assert after(code, sources) != ["x", "a", "b"]


def test_a_tensor_is_of_a_graph_as_it_was_when_it_was_read() -> None:
    def graphs(names: dict[str, Any], snapshot: Any) -> list[bool]:
        read, top = (snapshot.maker(ref(names[name])) for name in ("y", "top"))
        dead = next(it for it in snapshot.calls if it.api.stem == "topk").outputs
        x = ref(names["x"])
        pairs = [(x, read.seq), (x, top.seq), *((it, top.seq) for it in dead)]
        return [recorded_way._is_of_graph(it, seq, snapshot) for it, seq in pairs]

    code = "x = torch.ones(2)\ny = x * 2\nx.add_(w)\nw.topk(1)\ntop = x * 2"
    assert after(code, graphs) == [False, True, True, False]


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_frozen_parameter_beside_a_cut_may_be_the_reason(is_alone: bool) -> None:
    code = "f = torch.nn.Parameter(torch.ones(2), requires_grad=False)\nout = w.exp().detach()"
    code += "" if is_alone else " * f"
    cut = after(code, lambda names, snapshot: recorded_way.graph_cut(names["out"], snapshot))
    assert (cut is not None) is is_alone


def test_the_last_line_that_made_a_number_of_a_variable() -> None:
    names = {"torch": torch, "x": torch.ones(2, requires_grad=True)}

    def cut(code: str) -> str | None:
        with Recorder() as recorder, cell(code) as compiled:
            exec(compiled, dict(names))
            found = recorded_way.number_cut("loss", recorder.snapshot())
            return None if found is None else found.line.text

    one, two = "loss = x.sum().item()", "loss = (x * 2).sum().item()"
    assert cut(one) == one
    assert cut(f"{one}\n{two}") == two
    assert cut(f"{two}\nother = x.sum().item()\nprint(x.sum().item())") == two
    assert cut("loss = 0\nloss += x.sum().item()") == "loss += x.sum().item()"
    assert cut("loss = x.detach().sum().item()") is None
    assert cut(f"{one}\nloss = x.detach().sum().item()") is None


def after(code: str, find: Callable[[dict[str, Any], Any], Any]) -> Any:
    """Return what is found behind the variables of a recorded cell; ``w`` is a parameter."""
    names: dict[str, Any] = {"torch": torch, "w": torch.nn.Parameter(torch.ones(2))}
    with Recorder() as recorder, cell(code) as compiled:
        exec(compiled, names)
        return find(names, recorder.snapshot())


@pytest.mark.parametrize("count", [1, 3, 4])
def test_three_lines_that_cut_a_graph_are_named_at_most(count: int) -> None:
    lines = [f"p{at} = (w > {at}).float()" for at in range(count)]
    code = "\n".join([*lines, "out = " + " * ".join(f"p{at}" for at in range(count))])
    cut = after(code, lambda names, snapshot: recorded_way.graph_cut(names["out"], snapshot))
    if count > 3:
        assert cut is None
    else:
        assert (cut.op, cut.line.text) == ("gt", lines[-1])
        assert [it.text for it in cut.others] == lines[:-1]


@pytest.mark.parametrize("manager", ["torch.no_grad", "torch.enable_grad"])
def test_of_blocks_without_a_graph_the_innermost(manager: str) -> None:
    code = f"with torch.no_grad():\n    with {manager}():\n        out = torch.no_grad()(w.exp)()"
    cut = after(code, lambda names, snapshot: recorded_way.graph_cut(names["out"], snapshot))
    assert (cut.op, cut.line.line) == ("no_grad block", 2 if manager == "torch.no_grad" else 1)


@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_parameter_is_not_why_where_another_tensor_has_a_graph(is_leaf: bool) -> None:
    code = f"x = torch.ones(2, requires_grad={is_leaf})\nw.requires_grad_(False)\n"
    code += "with torch.no_grad():\n    out = x * w"

    def find(names: dict[str, Any], snapshot: Any) -> bool:
        found = recorded_way.frozen_parameters(names["out"], snapshot)
        return [it is names["w"] for it in found] == [True]

    assert after(code, find) is not is_leaf


@pytest.mark.parametrize(("sizes", "is_lost"), [((3, 1), True), ((1, 3), False)])
def test_only_an_earlier_batch_tells_what_was_squeezed(
    sizes: tuple[int, int], is_lost: bool
) -> None:
    code = f"out = {{}}\nfor n in {sizes}:\n    out[n] = torch.ones(n, 6, 1).squeeze()"

    def find(names: dict[str, Any], snapshot: Any) -> object:
        return recorded_way.lost_dimension([names["out"][1]], snapshot)

    found = after(code, find)
    assert (found is not None) is is_lost
    assert found is None or found.earlier == ((3, 6, 1), (3, 6))
