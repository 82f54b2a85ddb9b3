"""Observations behind an exception of torch's: each with the facts that it needs, and without."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from cudalens.core.evidence_types import (
    Binding,
    BoundOrigin,
    EarlierShape,
    FreedGraph,
    InPlaceChange,
    OddArgument,
    RefusedArguments,
    Regrouped,
)
from cudalens.core.graph_types import ProvenanceStep
from cudalens.core.report import ErrorFacts, Evidence
from cudalens.core.report_types import (
    Expression,
    LineRef,
    Observation,
    SourceSpan,
    TensorSummary,
)
from cudalens.diagnosis.candidates import Trial
from cudalens.diagnosis.moves import Called
from cudalens.diagnosis.observed_errors import marked, observe_error
from tests.builders import fact
from tests.hint_evidence import syntax_of

HERE = SourceSpan(cell=1, line=9, text="f(x, y)")


def line(number: int | None, text: str = "", cell: int | None = 1) -> LineRef:
    return LineRef(cell=cell, line=number, text=text)


def step(number: int | None, text: str) -> ProvenanceStep:
    return ProvenanceStep(op="aten::add_", source=line(number, text))


def made(number: int, value: str | None, **facts: Any) -> Binding:
    return Binding(at=SourceSpan(cell=1, line=number, text=value), value=value, **facts)


class Known(Trial):
    """A trial that knows where names were bound."""

    def __init__(self, operands: tuple[Any, ...] = (), **bindings: Binding) -> None:
        self.operands, self.bindings = operands, bindings

    def binding(self, expression: str, *, of_shape: bool = False) -> Binding | None:
        return self.bindings.get(expression)

    def layer(self, path: str) -> Binding | None:
        return self.bindings.get(path)


def observed(message: str, trial: Trial | None = None, **facts: Any) -> list[Observation]:
    error = ErrorFacts(type_name="RuntimeError", message=message)
    evidence = Evidence(error=error, **{"source": HERE, **facts})
    return list(observe_error(evidence, trial or Known()))


def texts(message: str, trial: Trial | None = None, **facts: Any) -> list[str]:
    return [it.text for it in observed(message, trial, **facts)]


def marks(message: str, trial: Trial | None = None, **facts: Any) -> list[str]:
    return [at.mark for it in observed(message, trial, **facts) for at in it.sources]


def on(device: str, kind: str, name: str | None, **facts: Any) -> Any:
    return fact("self", kind, name, device=device, **facts)


def test_nothing_without_an_error() -> None:
    assert list(observe_error(Evidence(source=HERE), Known())) == []


# --- operands -------------------------------------------------------------------------------------

X, Y = on("cuda:0", "float32[2,3]", "x"), on("cuda:0", "float32[4,5]", "y")
BOUND = {"x": made(3, "torch.rand(2, 3)"), "y": made(4, "torch.rand(4, 5)")}


def test_where_each_operand_was_made_with_its_shape() -> None:
    message = "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"
    trial = Known((X, Y), **BOUND)
    assert texts(message, trial) == [
        "x is [2, 3], made in line 3: torch.rand(2, 3)",
        "y is [4, 5], made in line 4: torch.rand(4, 5)",
    ]
    assert marks(message, trial) == ["[2, 3] is made here", "[4, 5] is made here"]


def test_an_operand_of_the_failing_line_or_without_a_name_is_left_out() -> None:
    message = "shapes cannot be multiplied (2x3 and 4x5)"
    here = {**BOUND, "x": made(9, "torch.rand(2, 3)")}
    assert len(texts(message, Known((X, Y), **here))) == 1
    assert texts(message, Known((on("cuda:0", "float32[2,3]", None),), **BOUND)) == []
    assert texts(message, Known((X,), x=made(3, None))) == []


def test_those_operands_whose_sizes_the_message_has() -> None:
    message = "The size of tensor a (3) must match the size of tensor b (7) at dimension 1"
    assert len(texts(message, Known((X, Y), **BOUND))) == 1
    row = on("cuda:0", "float32[1,3]", "x")
    assert len(texts("sizes must match, 0 or 1", Known((row, Y), **BOUND))) == 2
    assert texts("it failed\nfor sizes of 3", Known((X, Y), **BOUND)) == []


def test_the_other_shape_that_a_variable_had_before() -> None:
    earlier = tuple(
        EarlierShape(name, (3, 2), (4, 2), calls) for calls, name in enumerate("xyz", 1)
    )
    said = texts("sizes must match", earlier_shapes=earlier)
    assert said == [
        "x is [3, 2], and was [4, 2] in 1 earlier call",
        "y is [3, 2], and was [4, 2] in 2 earlier calls",
    ]
    assert texts("it is not implemented", earlier_shapes=earlier) == []
    half = Known((X, on("cuda:0", "float16[4,5]", "y")))
    assert texts("expected scalar type Half", half, earlier_shapes=earlier) == []


def test_one_name_is_said_once() -> None:
    assert len(texts("sizes must match", Known((X, X), **BOUND))) == 1


def test_the_one_operand_of_another_dtype() -> None:
    half = on("cuda:0", "float16[4,5]", "y")
    z = on("cuda:0", "float32[2]", "z")
    bound = {**BOUND, "z": made(5, "torch.rand(2)")}
    message = "expected scalar type Half but found Float"
    assert texts(message, Known((X, half, z), **bound)) == [
        "y is float16, made in line 4: torch.rand(4, 5)"
    ]
    assert len(texts(message, Known((X, half), **bound))) == 2
    assert texts(message, Known((X, z), **bound)) == []
    w = on("cuda:0", "float16[2]", "w")
    pairs = Known((X, half, z, w), **bound, w=made(6, "f()"))
    assert len(texts(message, pairs)) == 4


def test_a_factory_without_a_device_on_the_cpu() -> None:
    message = "Expected all tensors to be on the same device"

    def said(device: str = "cpu", **facts: Any) -> str:
        cpu = on(device, "float32[2,3]", "x")
        other = on("cuda:0" if device == "cpu" else "cpu", "float32[4,5]", "y")
        bound = {"x": made(3, "torch.rand(2, 3)", **facts), "y": made(4, "f()")}
        return texts(message, Known((cpu, other), **bound))[0]

    plain = "x is on cpu, made in line 3: torch.rand(2, 3)"
    assert said(called="torch.rand") == f"{plain} (without device=)"
    assert said(called="torch.rand", keywords=("device",)) == plain
    assert said(called="torch.rand", keywords=("**",)) == plain
    assert said(called="numpy.rand") == plain
    assert said(called="torch.cat") == plain
    assert "without" not in said("cuda:0", called="torch.rand")


def test_the_mark_of_a_device_names_the_tensor() -> None:
    message = "Expected all tensors to be on the same device"
    operands = on("cpu", "float32[2,3]", "x"), on("cuda:0", "float32[4,5]", "y")
    known = Known(operands, x=made(3, "torch.rand(2, 3)"), y=made(4, "f()"))
    assert marks(message, known)[0] == "x is made here, on cpu"


@pytest.mark.parametrize(
    ("value", "verb"),
    [
        ("torch.rand(2, 3)", "made"),
        ("a + b", "made"),
        ("torch.rand(2, 3).half().cuda()", "made"),
        ("cached(a).cuda()", "set"),
        ("Net(3)", "made"),
        ("linear(a)", "made"),
        ("torch.zeros(2, 3).bool()", "made"),
        ("torch.from_numpy(a).cuda()", "made"),
        ("cached(a).cuda()", "set"),
        ("a.view(3, 2).to('cpu')", "set"),
        ("drop(a)", "set"),  # in eval it returns what it is given
        ("F.dropout(a, training=False)", "set"),
        ("cached(a)", "set"),
        ("given(a)", "set"),
        ("torch.flatten(a, 1)", "set"),
        ("a.to('cpu')", "set"),
        ("kept", "set"),
        ("batch['x']", "set"),
        ("a if b else c", "set"),
    ],
)
def test_what_may_be_handed_on_is_not_made_there(value: str, verb: str) -> None:
    call = ast.parse(value, mode="eval").body
    called = {"called": ast.unparse(call.func)} if isinstance(call, ast.Call) else {}
    layers = {
        "linear": made(1, "nn.Linear(3, 3)", called="nn.Linear"),
        "drop": made(1, "nn.Dropout()", called="nn.Dropout"),
        "given": made(1, "module"),
    }
    known = Known((X,), x=made(3, Expression(value, call), **called), **layers)
    assert texts("sizes must match", known) == [f"x is [2, 3], {verb} in line 3: {value}"]
    mark = "[2, 3] is made here" if verb == "made" else "x is set here, [2, 3]"
    assert marks("sizes must match", known) == [mark]


def test_one_device_is_no_misfit_of_devices() -> None:
    known = Known((X, Y), **BOUND)
    assert texts("something about a device", known, tensors=(X, Y)) == []
    known.called = Called(device="cpu")  # the parameters are elsewhere
    assert texts("something about a device", known)[0].startswith("x is on cuda:0, made")


def test_what_an_expression_begins_with() -> None:
    message = "sizes must match"
    part = on("cuda:0", "float32[3]", "x[0]")
    assert texts(message, Known((part,), **BOUND)) == ["x is made in line 3: torch.rand(2, 3)"]
    assert marks(message, Known((part,), **BOUND)) == ["x is made here"]
    for code in ("x > 3", "x.sum(0)", "x[1:].abs()[0]"):
        found = texts(message, Known((on("cuda:0", "float32[3]", code),), **BOUND))
        assert found == ["x is made in line 3: torch.rand(2, 3)"], code
    result = on("cuda:0", "float32[3]", "net(x)")
    trial = Known((result,), net=made(2, "nn.Linear(3, 3)"), **BOUND)
    assert texts(message, trial) == ["net is made in line 2: nn.Linear(3, 3)"]
    assert texts(message, Known((on("cuda:0", "float32[3]", "x + 1"),), **BOUND)) == []


def test_the_layer_that_refused_its_input() -> None:
    layer = made(2, "nn.Linear(4, 2)", name="net.head")
    message = "sizes must match"
    trial = Known((X,), head=layer, **BOUND)
    assert texts(message, trial, module_path="head")[-1] == (
        "net.head is made in line 2: nn.Linear(4, 2)"
    )
    assert len(texts(message, trial)) == 1
    here = made(9, "nn.Linear(4, 2)", name="net.head")
    assert len(texts(message, Known((X,), head=here, **BOUND), module_path="head")) == 1


def test_a_view_that_regrouped_the_rows_comes_before_the_operands() -> None:
    change = Regrouped(line=line(5, "x = x.view(-1, 4)"), before=(2, 6), after=(3, 4))
    assert texts("sizes must match", Known((X, Y), **BOUND), regrouped=change) == [
        "line 5 makes [3, 4] of [2, 6]: x = x.view(-1, 4)"
    ]
    assert marks("sizes must match", regrouped=change) == ["[2, 6] becomes [3, 4] here"]


# --- values, arguments and lists ------------------------------------------------------------------


def test_nan_behind_a_message_that_is_not_torchs_own() -> None:
    def said(message: str, nan: int | None, kind: str = "float32[2,3]") -> list[str]:
        bad = on("cuda:0", kind, "x", summary=TensorSummary(nan=nan))
        return texts(message, tensors=(bad,))

    assert said("The algorithm did not converge", 2) == ["2 of 6 values of x are NaN"]
    assert said("The algorithm did not converge", 1) == ["1 of 6 values of x is NaN"]
    assert said("The algorithm did not converge", 1, "float32[]") == ["1 of 1 value of x is NaN"]
    assert said("The algorithm did not converge", 0) == []
    assert said("The algorithm did not converge", None) == []
    assert said("Trying to backward through the graph a second time", 2) == []


def test_an_argument_whose_type_the_message_names() -> None:
    def said(message: str, type_name: str = "numpy.ndarray", name: str = "scores") -> list[str]:
        odd = OddArgument(name=name, type_name=type_name, words="an array of float64 (2, 8)")
        return texts(message, refused_arguments=RefusedArguments(odd_arguments=(odd,)))

    assert said("must be Tensor, not numpy.ndarray") == ["scores is an array of float64 (2, 8)"]
    assert said("must be Tensor, not list") == []
    assert said("must be Tensor, not int", "int") == []
    assert said("must be Tensor, not numpy.ndarrays") == []
    assert said("must be Tensor, not a_numpy.ndarray") == []
    assert said("scores must be Tensor, not numpy.ndarray") == []  # it is named there
    for text in ("[1, 2]", "(1, 2)", "{1: 2}"):  # the line shows what it is
        assert said("must be Tensor, not dict", "dict", text) == []
    assert said("must be Tensor, not dict", "dict") != []
    refused = "empty() received an invalid combination of arguments - got (tuple)"
    assert said(refused, "method") != []
    assert said("empty(): a size is missing", "method") == []
    assert said(refused, "list") == []


def test_the_line_that_set_a_number() -> None:
    def said(number: int, *, is_set: bool = True) -> list[str]:
        at = SourceSpan(cell=1, line=number)
        bound = BoundOrigin(at=at, expression="k = 9", holder="k", is_set=is_set)
        return texts("k is too large", bound=bound)

    assert said(3) == ["k is set in line 3: k = 9"]
    assert said(9) == []
    assert said(3, is_set=False) == []


WEIGHTS = "weight tensor should be defined either for all 3 classes or no classes but got "
WEIGHTS += "weight tensor of shape: [2]"


def test_labels_of_which_there_are_as_many_as_weights() -> None:
    def said(*values: int, name: str | None = "y", at: int = 3) -> list[str]:
        labels = fact("target", "int64[4]", name, summary=TensorSummary(unique=values))
        trial = Known(w=made(at, "torch.ones(2)"))
        call = syntax_of("F.cross_entropy(z, y, weight=w)")
        return texts(WEIGHTS, trial, tensors=(labels,), call=call)

    weights = "w is made in line 3: torch.ones(2)"
    assert said(0, 2) == ["y has 2 different values: 0, 2", weights]
    assert said(0, 1, 2) == [weights]
    assert said(0, 2, name=None) == [weights]
    assert said(0, 2, at=9) == ["y has 2 different values: 0, 2"]


def test_the_item_of_a_list_that_has_another_length() -> None:
    def said(items: list[Any], message: str) -> list[str]:
        trial = Known()
        trial.lists = (("rows", items),)
        return texts(message, trial)

    text = "expected sequence of length {} at dim {} (got 3)"
    assert said([[1, 2], [1, 2], [3, 4, 5]], text.format(2, 1)) == [
        "rows[2] has 3 items, rows[0] has 2"
    ]
    deep = [[[1, 2]], [[3, 4]], [[5, 6, 7]]]
    assert said(deep, text.format(2, 2)) == ["rows[2][0] has 3 items, rows[0][0] has 2"]
    assert said([[1, 2], [3, 4]], text.format(2, 1)) == []
    assert said([1, 2], text.format(2, 1)) == []


def test_the_list_that_a_message_shows_and_where_it_was_made() -> None:
    def said(items: list[int], name: str = "sizes", **bound: Binding) -> list[str]:
        trial = Known(**bound)
        trial.lists = ((name, items),)
        return texts(f"cannot make it of {items}", trial)

    assert said([4, 7]) == ["sizes is [4, 7]"]
    assert said([4, 7], sizes=made(3, "(4, 7)")) == [
        "sizes is [4, 7], sizes is made in line 3: (4, 7)"
    ]
    assert said([4, 7], sizes=made(9, "(4, 7)")) == ["sizes is [4, 7]"]
    assert said([4, 7], "a.tolist()", a=made(3, "f()")) == [
        "a.tolist() is [4, 7], a is made in line 3: f()"
    ]
    assert said([4, 7], "[4, 7]") == []
    assert said([]) == []
    assert len(said([1] * 20)) == 1
    assert said([1] * 21) == []


# --- checkpoints ----------------------------------------------------------------------------------


def test_parameters_of_a_checkpoint_that_do_not_fit() -> None:
    def said(count: int) -> list[str]:
        each = [
            f"\tsize mismatch for l{at}.weight: copying a param with shape torch.Size([2, {at}]) "
            f"from checkpoint, the shape in current model is torch.Size([3, {at}])."
            for at in range(4, 4 + count)
        ]
        return texts("\n".join(["Error(s) in loading state_dict for Net:", *each]))

    two = "2 parameters do not fit: l4.weight is [2, 4] there, [3, 4] here; "
    assert said(2) == [f"{two}l5.weight is [2, 5] there, [3, 5] here"]
    assert said(1) == []
    assert said(3)[0].endswith("l6.weight is [2, 6] there, [3, 6] here")
    assert said(5)[0].endswith("[3, 6] here; and 2 more")


# --- autograd -------------------------------------------------------------------------------------


def test_what_saved_a_tensor_and_each_write_to_it() -> None:
    change = InPlaceChange(
        name="h",
        savers=(step(3, "y = h.exp()"), step(None, "hidden")),
        writes=(step(None, "hidden"), step(4, "h += 1"), step(5, "h *= 2")),
    )
    assert texts("modified by an inplace operation", modified=change) == [
        "line 3 needs h in backward: y = h.exp()",
        "line 4 changes h: h += 1",
        "line 5 changes h again: h *= 2",
    ]
    assert marks("modified by an inplace operation", modified=change) == [
        "needs h in backward",
        "changes h",
        "changes h again",
    ]
    unnamed = InPlaceChange(modified=step(4, "f(h)"), savers=(step(3, "y = g(h)"),))
    assert texts("modified by an inplace operation", modified=unnamed) == [
        "line 3 needs it in backward: y = g(h)",
        "line 4 changes it: f(h)",
    ]


def test_what_made_freed_and_used_a_graph() -> None:
    def said(**facts: Any) -> list[str]:
        freed = FreedGraph(node="T", **facts)
        return texts("Trying to backward through the graph a second time", freed=freed)

    both = {"made": line(3, "y = f(x)"), "freed": line(4, "y.backward()")}
    assert said(**both) == [
        "line 3 made this part of the graph: y = f(x)",
        "line 4 freed it: y.backward()",
    ]
    assert said(**both, read=line(9, "(y * 2).backward()"), name="y")[-1] == (
        "line 9 used y after that: (y * 2).backward()"
    )
    again = {**both, "freed": line(9, "y.backward()")}
    assert said(**again)[-1] == "line 9 freed it in an earlier pass: y.backward()"
    assert said(freed=line(4, "y.backward()")) == []


def test_a_line_without_a_cell_stands_in_that_of_the_failing_line() -> None:
    freed = FreedGraph(node="T", made=line(3, "y = f(x)", cell=None))
    (found,) = observed("backward through the graph a second time", freed=freed)
    assert found.text == "line 3 made this part of the graph: y = f(x)"
    assert found.sources[0].cell == 1
    other = FreedGraph(node="T", made=line(3, "y = f(x)", cell=2))
    assert texts("a second time", freed=other) == [
        "In [2] line 3 made this part of the graph: y = f(x)"
    ]
    file = FreedGraph(node="T", made=LineRef(file="net.py", line=3, text="y = f(x)"))
    assert texts("a second time", freed=file) == ["net.py:3 made this part of the graph: y = f(x)"]
    script = SourceSpan(file="train.py", line=9, text="f(x, y)")
    (found,) = observed("a second time", freed=freed, source=script)
    assert (found.text[:7], found.sources[0].file) == ("line 3 ", "train.py")


@pytest.mark.parametrize("span", [True, False])
def test_a_line_with_its_mark(span: bool) -> None:
    at = SourceSpan(cell=2, line=3, text="y = 1") if span else line(3, "y = 1", cell=2)
    found = marked(at, "1 is made here")
    assert (found.cell, found.line, found.text, found.mark) == (2, 3, "y = 1", "1 is made here")
    assert isinstance(ast.parse(found.text or ""), ast.Module)


# --- sizes that were given by name ----------------------------------------------------------------


INVALID = "shape '[3, 11, {}]' is invalid for input of size 2244"
SIZES = {
    "batch": made(4, None),
    "steps": made(4, None),
    "width": made(4, None),
    "three": made(5, "3"),
    "here": made(9, None),
}


@pytest.mark.parametrize(
    ("call", "shape", "wanted"),
    [
        ("v.reshape(batch, steps, width)", "3,11,4,17",
         ["v has 68 elements for each of [3, 11], and width is 13",
          "batch = 3, steps = 11, width = 13, set in line 4: None"]),
        ("torch.reshape(v, (batch, 11, width))", "3,11,4,17",
         ["v has 68 elements for each of [3, 11], and width is 13",
          "batch = 3, width = 13, set in line 4: None"]),
        # The sizes before the last are others than its own.
        ("v.reshape(3, 11, width)", "11,3,4,17", ["width = 13, set in line 4: None"]),
        ("v.reshape(*sizes)", "3,11,4,17", []),
        ("v.reshape(3, 11, other)", "3,11,4,17",
         ["v has 68 elements for each of [3, 11], and other is 13"]),
        ("v.reshape([batch, 11, width])", "3,11,4,17",
         ["v has 68 elements for each of [3, 11], and width is 13",
          "batch = 3, width = 13, set in line 4: None"]),
        # The lines of the first show the size, or failed.
        ("v.reshape(three, here, width)", "11,3,4,17", ["width = 13, set in line 4: None"]),
        ("v.reshape(*first, steps, *width)", "3,11,4,17", []),
        ("torch.reshape(v, (*first, steps, width))", "3,11,4,17", []),
    ],
)  # fmt: skip
def test_what_a_reshape_was_given(call: str, shape: str, wanted: list[str]) -> None:
    trial = Known((fact("input", f"float32[{shape}]", "v"),), **SIZES)
    found = observed(INVALID.format(13), trial, call=syntax_of(call))
    own = [it.text for it in found if " elements for " in it.text or " set in " in it.text]
    assert own == wanted


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        ("torch.reshape(v, sizes)", []),
        ("torch.reshape(v, [3, width])", ["width = 13, set in line 4: None"]),
        ("v.reshape(3, width)", ["width = 13, set in line 4: None"]),
        ("v.reshape(*(), *width)", []),
    ],
)
def test_a_sequence_of_sizes_is_not_its_last(call: str, wanted: list[str]) -> None:
    """Of two sizes, one argument that is a sequence, and the tensor before it."""
    names = {name: made(4, None) for name in ("v", "sizes", "width")}
    trial = Known((fact("input", "float32[3,11,4,17]", "v"),), **names)
    found = observed(
        "shape '[3, 13]' is invalid for input of size 2244", trial, call=syntax_of(call)
    )
    assert [it.text for it in found if " set in " in it.text] == wanted
    told = [it.text for it in found if " elements for " in it.text]
    assert told == ["v has 748 elements for each of [3], and width is 13"] * bool(wanted)


def test_one_argument_may_be_a_sequence() -> None:
    trial = Known((fact("input", "float32[3,11,4,17]", "v"),), n=made(4, None))
    message = "shape '[13]' is invalid for input of size 2244"
    assert not any("n = 13" in it for it in texts(message, trial, call=syntax_of("v.reshape(n)")))
    assert any("n = 13" in it for it in texts(message, trial, call=syntax_of("v.reshape([n])")))


def test_a_size_to_be_inferred_is_no_number_of_elements() -> None:
    trial = Known((fact("input", "float32[3,11,4,17]", "v"),))
    found = observed(INVALID.format(-1), trial, call=syntax_of("v.reshape(3, 11, -1)"))
    assert not any(" elements for " in it.text for it in found)
