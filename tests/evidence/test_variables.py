"""The user's variables around a call: operands, kinds, loops, modules, where they were made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from cudalens.evidence.failing_call import call_of
from cudalens.evidence.variables import Variables, line_of
from tests.probes import asked, cell_frames, run_cell

X = torch.ones(2, 3)


def variables(text: str, of: Any, **names: Any) -> Any:
    """Return what ``of`` says of the variables around the last call of ``here``."""

    def ask(frames: Any) -> Any:
        line = line_of(frames)
        assert line is not None
        return of(Variables(call_of(frames, line), line))

    return asked(text, ask, **{"x": X, "y": X, **names})[-1]


def test_no_line_without_a_frame_of_the_users() -> None:
    assert line_of([]) is None


def test_operands_are_the_tensors_of_the_call_by_their_texts() -> None:
    fake = FakeTensorMode().from_tensor(X)
    found = variables("here(x, 3, y[0], None, fake)", lambda it: it.operands, fake=fake)
    assert [(item.expression, item.shape) for item in found] == [("x", (2, 3)), ("y[0]", (3,))]
    assert found[0].span == (1, 5, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.extra = [nn.Linear(3, 2)]
        self.scale = torch.ones(3)
        self.rows, self._rows = [torch.ones(1)], [torch.ones(2)]
        self.table = {"a": torch.ones(2)}
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(
    ("argument", "kind"),
    [
        ("[1, 2]", "list"),
        ("[]", None),
        ("items", "tensors"),
        ("mixed", "list"),
        ("array", "numpy.ndarray"),
        ("x.sum", "method"),
        ("len", None),
        ("pair", None),
        ("table", None),
        ("net", None),
    ],
)
def test_the_kind_of_an_argument_that_is_no_tensor(argument: str, kind: str | None) -> None:
    names: dict[str, Any] = {
        "items": [X, X],
        "mixed": [X, 1],
        "array": X.numpy(),
        "pair": (1, X),
        "table": {"a": X, "b": 1, 2: X},
        "net": Net(),
    }
    found = variables(f"here({argument})", lambda it: it.others, **names)
    assert [it for it in found if it[0] == argument] == ([(argument, kind)] if kind else [])


LAYERS = "layer = nn.Module()\nlayer.forward = layer.add = here\nfor f in [layer]:\n    "


@pytest.mark.parametrize(
    ("text", "names", "is_of_loop"),
    [
        ("here(x)", set(), False),
        ("for i in [1]:\n    here(x)", {"i"}, False),
        ("for f in [here]:\n    f(x)", {"f"}, True),
        (LAYERS + "f.forward(x)", {"f"}, True),
        (LAYERS + "f.add(x)", {"f"}, False),
        ("for i, (a, b) in [(1, (2, 3))]:\n    here(a)", {"i", "a", "b"}, False),
        ("[here(i) for i in [1]]", {"i"}, False),
        ("for i in [1]:\n    def g():\n        here(i)\n    g()", set(), False),
        ("for i in [1]:\n    (lambda: here(i))()", set(), False),
        ("for i in [1]:\n    pass\nhere(i)", set(), False),
    ],
)
def test_the_loops_around_a_call(text: str, names: set[str], is_of_loop: bool) -> None:
    found = variables(text, lambda it: (it.loop_names, it.is_of_loop))
    assert found == (names, is_of_loop)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("f = lambda a, b: here(a)\n[f(x, y[n]) for n in [1]]", {"b"}),
        ("f = lambda a, b: here(a)\nfor n in [1]:\n    f(x, b=str(n))", {"b"}),
        ("f = lambda a, b: here(a)\nfor n in [x]:\n    f(n, n[0])", set()),
        ("f = lambda a, b: here(a)\nn = 1\nf(x, y[n])", set()),
        ("class C:\n    def f(self, a, b): here(a)\nc = C()\n[c.f(x, y[n]) for n in [1]]", {"b"}),
        ("class C:\n    def f(self, a, b): here(a)\n[C.f(0, x, y[n]) for n in [1]]", {"b"}),
        ("[here(y[n]) for n in [1]]", set()),
    ],
)
def test_the_arguments_that_a_loop_of_the_caller_chooses(text: str, names: set[str]) -> None:
    assert variables(text, lambda it: it.loop_arguments) == names


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("n = 3\nhere(n)", "n", "3"),
        ("z = x + 1\nhere(z)", "z", "x + 1"),
        ("z = x + 1\nz.add_(1)\nhere(z)", "z", None),
        ("with torch.inference_mode():\n    z = x + 1\nhere(z)", "z", None),
        ("s = 'a'\nhere(s)", "s", None),
        ("def f(a):\n    here(a)\nz = x * 2\nf(z)", "a", "x * 2"),
        ("def f(a):\n    here(a)\nz = x * 2\nf(z + 0)", "a", None),
        ("def f(a):\n    here(a)\nz = x * 2\nf(a=z)", "a", "x * 2"),
        ("def f(a, b):\n    here(a)\nz = x * 2\nf(z, z)", "a", None),
        ("def f(a):\n    here(a)\ndef g(b):\n    f(b)\nz = x * 2\ng(z)", "a", "x * 2"),
        ("def f(a):\n    here(t)\nt = x * 2\nf(t)", "t", None),
    ],
)
def test_where_a_name_got_its_value(text: str, name: str, value: str | None) -> None:
    made = variables(text, lambda it: it.binding(name))
    assert (made and made.value) == value
    assert made is None or made.name == ("z" if name == "a" else "")


def test_a_write_leaves_the_shape_as_it_was() -> None:
    text = "z = x + 1\nz.add_(1)\nhere(z)"
    made = variables(text, lambda it: it.binding("z", of_shape=True))
    assert (made.value, made.at.line) == ("x + 1", 1)


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("self.scale", ("self.scale", "attribute")),
        ("self.mean", ("Net", "module")),
        ("self.rows[0]", ("self.rows", "list")),
        ("self.rows", ("self.rows", "list")),
        ("self._rows[0]", None),
        ("self.table['a']", ("self.table", "dict")),
        ("self.head.weight", None),
        ("x", None),
    ],
)
def test_what_of_a_module_holds_a_tensor(text: str, held: tuple[str, str] | None) -> None:
    code = f"def forward(self):\n    here({text})\nforward(net)"
    assert variables(code, lambda it: it.held_in(text), net=Net()) == held


@pytest.mark.parametrize(
    ("group", "wanted"),
    [
        ("[layer]", ("group", "list")),
        ("{'a': layer}", ("group", "dict")),
        ("nn.ModuleList([layer])", None),
        ("[x]", None),
    ],
)
def test_a_list_that_registers_no_module(group: str, wanted: tuple[str, str] | None) -> None:
    code = f"group = {group}\ndef run(self):\n    here(x)\nrun(layer)"
    assert variables(code, lambda it: it.unregistered, layer=nn.Linear(3, 2)) == wanted


class Held(nn.Module):
    """A module with one that a list holds, which may be registered, and a name of its own."""

    def __init__(self, name: str, *, is_registered: bool) -> None:
        super().__init__()
        part = nn.Linear(3, 2)
        setattr(self, name, [part])
        if is_registered:
            self.part = part


@pytest.mark.parametrize(
    ("name", "is_registered", "wanted"),
    [
        ("layers", False, ("self.layers", "list")),
        ("layers", True, None),
        ("_layers", False, None),
    ],
)
def test_a_list_of_a_running_module(
    name: str, is_registered: bool, wanted: tuple[str, str] | None
) -> None:
    inner = "def inner(self):\n    here(x)\n"
    code = f"{inner}def outer(self):\n    inner(self.{name}[0])\nouter(held)"
    held = Held(name, is_registered=is_registered)
    assert variables(code, lambda it: it.unregistered, held=held) == wanted


def called(layer: nn.Module) -> Any:
    """Return the facts on a module that the line calls, from inside it."""
    found: list[Any] = []

    def ask(*_: object) -> None:
        frames = cell_frames()
        line = line_of(frames)
        assert line is not None
        found.append(Variables(call_of(frames, line), line).called)

    layer.register_forward_pre_hook(ask)
    run_cell("layer(x)", {"layer": layer, "x": torch.ones(2, 4, 3)})
    return found[0]


@pytest.mark.parametrize(("batch_first", "is_second"), [(False, True), (True, False)])
def test_facts_on_the_called_module(batch_first: bool, is_second: bool) -> None:
    facts = called(nn.LSTM(3, 2, batch_first=batch_first))
    assert (facts.device, facts.is_model, facts.is_batch_second) == ("cpu", False, is_second)


def test_layers_that_do_not_agree_on_the_batch_say_nothing() -> None:
    net = Net()
    net.one = nn.LSTM(3, 2)
    assert called(net).is_batch_second
    net.two = nn.LSTM(3, 2, batch_first=True)
    assert not called(net).is_batch_second


def test_a_module_of_the_users_is_a_model() -> None:
    assert called(Net()).is_model
    assert not called(nn.Linear(3, 2)).is_model


def test_a_layer_by_its_path() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    found = variables("here(x)", lambda it: (it.layer("1"), it.layer("2")), net=net)
    assert (found[0].name, found[1]) == ("net[1]", None)
    # Two modules with such a part: nobody knows which is meant.
    assert (
        variables("here(x)", lambda it: it.layer("1"), net=net, other=nn.Sequential(*net)) is None
    )
    shapes = ((3, 2), (2, 3))
    found = variables("here(x)", lambda it: [it.layer("1", shape) for shape in shapes], net=net)
    assert [item and item.name for item in found] == ["net[1]", None]


@pytest.mark.parametrize(
    ("parts", "beside"),
    [
        ("nn.Embedding(5, 3), nn.Linear(3, 5)", "net.1"),
        ("nn.Embedding(5, 3), nn.Linear(3, 4)", None),
        ("nn.Embedding(5, 3), nn.Embedding(5, 3)", None),
        ("nn.Embedding(5, 3), nn.Linear(3, 5), nn.Linear(3, 5)", None),
        ("nn.Linear(3, 5), nn.Linear(3, 5)", None),
    ],
)
def test_the_output_head_that_has_the_shape_of_a_table(parts: str, beside: str | None) -> None:
    code = f"net = nn.Sequential({parts})\n"
    made = variables(f"{code}here(x)", lambda it: it.layer("0"))
    assert (made.tied, made.beside) == (None, beside)
    code += "net[1].weight = net[0].weight\n"
    assert variables(f"{code}here(x)", lambda it: it.layer("0")).tied == "net.1"


WRITTEN = """\
net = nn.Sequential(
    nn.Linear(3, 2),
    nn.Sequential(
        nn.ReLU(), nn.Linear(2, 3)),
).to("cpu")
{then}
here(x)"""


@pytest.mark.parametrize(
    ("then", "path", "line"),
    [
        ("", "0", 2),
        ("", "1.1", 4),
        ("net[0] = nn.Linear(4, 2)", "0", 1),
        ("net[0] = nn.Embedding(3, 2)", "0", 1),
    ],
)
def test_a_layer_is_made_where_its_container_is_written_out(
    then: str, path: str, line: int
) -> None:
    """Of one that took another's place only the container's own line is known."""
    made = variables(WRITTEN.format(then=then), lambda it: it.layer(path))
    assert (made.name.count("["), made.at.line) == (path.count(".") + 1, line)


def test_a_container_that_unpacks_a_list_is_made_as_a_whole() -> None:
    made = variables(
        "net = nn.Sequential(\n    *[nn.ReLU()],\n    nn.Linear(2, 3))\nhere(x)",
        lambda it: it.layer("1"),
    )
    assert made.at.line == 1


def test_the_other_readers_from_the_running_line_on() -> None:
    code = "def f(x):\n    x.sum()\n    here(x), x + 1\n    return x\nf(x)"
    assert variables(code, lambda it: it.other_readers("x"))[0] == [3, 4]
    bound_anew = "def f(x):\n    x = here(x), x + 1\n    return x\nf(x)"
    assert variables(bound_anew, lambda it: it.other_readers("x")) == ([], [])


@pytest.mark.parametrize(
    ("part", "is_known"),
    [
        ("nn.ParameterList([nn.Parameter(x)])", False),
        ("nn.ParameterDict({'a': nn.Parameter(x)})", False),
        ("nn.Linear(3, 2)", True),
    ],
)
def test_a_container_of_parameters_is_no_layer(part: str, is_known: bool) -> None:
    code = f"net = nn.Module()\nnet.part = {part}\nhere(x)"
    assert (variables(code, lambda it: it.layer("part")) is not None) is is_known
    assert variables(code, lambda it: it.layer("other")) is None


def test_a_layer_of_two_models_is_not_known_but_by_its_shape() -> None:
    code = "a = nn.Sequential(nn.Linear(3, 2))\nb = nn.Sequential(nn.Linear(4, 2))\nhere(x)"
    assert variables(code, lambda it: it.layer("0")) is None
    assert variables(code, lambda it: it.layer("0", (2, 4))).at.line == 2
    assert variables(code, lambda it: it.layer("0", (5, 4))) is None
