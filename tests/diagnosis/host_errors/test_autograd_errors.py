"""What is said of a missing graph, and of a gradient that became NaN, by the collected facts."""

from __future__ import annotations

from typing import Any

import pytest

from cudalens.core.evidence_types import GraphCut, OddArgument, RefusedArguments, SavedValues
from cudalens.core.report import ErrorFacts, Evidence
from cudalens.core.report_types import HistoryEntry, LineRef, SourceSpan
from cudalens.diagnosis.host_errors import explain_host_error
from cudalens.diagnosis.host_errors._base import Verdict
from tests.builders import fact

NO_GRAPH = "element 0 of tensors does not require grad and does not have a grad_fn"
HERE = SourceSpan(cell=1, line=9, text="loss.backward()")
LOSS = (fact("self", "float32[]", "loss"),)


def explained(message: str, **facts: Any) -> Verdict:
    error = ErrorFacts(type_name="RuntimeError", message=message)
    verdict = explain_host_error(Evidence(error=error, **{"source": HERE, **facts}), error)
    assert verdict.troubles == ()
    return verdict


def hints(message: str, **facts: Any) -> list[tuple[str | None, str]]:
    return [(it.rule, it.text) for it in explained(message, **facts).hints]


def line(number: int, text: str, cell: int = 1) -> LineRef:
    return LineRef(cell=cell, line=number, text=text)


# --- no graph -------------------------------------------------------------------------------------


def test_a_loss_without_a_graph() -> None:
    verdict = explained(NO_GRAPH, tensors=LOSS)
    assert verdict.kind == "autograd_error"
    assert verdict.headline == (
        "loss has no grad_fn: nothing leads from it to a tensor that requires grad"
    )
    assert verdict.argument == "self"
    assert verdict.hints == ()
    unknown = explained(NO_GRAPH)
    assert unknown.headline.startswith("the tensor has no grad_fn")
    assert unknown.argument is None
    two = (fact("tensors[0]", "float32[]", "a"), fact("tensors[1]", "float32[]", "b"))
    assert explained(NO_GRAPH, tensors=two).headline.startswith("a has no grad_fn")
    assert explained(NO_GRAPH.replace("0", "1"), tensors=two).headline.startswith("b has no")


@pytest.mark.parametrize(
    ("frozen", "text"),
    [
        (("w",), "the only parameter behind loss requires no grad: w"),
        (("w", "b"), "none of the parameters behind loss requires grad: w, b"),
        (tuple("abcd"), "none of the parameters behind loss requires grad: a, b, c, d"),
        (tuple("abcde"), "none of the parameters behind loss requires grad: a, b, c, d and 1 more"),
    ],
)
def test_parameters_that_are_frozen(frozen: tuple[str, ...], text: str) -> None:
    assert hints(NO_GRAPH, tensors=LOSS, frozen=frozen) == [("all_frozen", text)]
    at = line(3, "net.requires_grad_(False)")
    by = ", which line 3 froze: net.requires_grad_(False)"
    assert hints(NO_GRAPH, tensors=LOSS, frozen=frozen, frozen_at=at) == [("all_frozen", text + by)]


@pytest.mark.parametrize(
    ("op", "text"),
    [
        ("detach", "detach() cuts the tensor off its graph: to train through it, leave detach()"),
        ("detach_", "detach() cuts the tensor off its graph: to train through it, leave detach()"),
        ("argmax", "argmax gives indices, which have no gradient: to train through it, compute"),
        ("no_grad", "its inputs have a graph and its result has none, as under torch.no_grad()"),
        ("no_grad block", "what is computed in this block has no graph: to train through it, take"),
        ("round", "round() gives numbers without a gradient: to train through it, compute the"),
        ("__gt__", "gt() gives numbers without a gradient: to train through it, compute the"),
    ],
)
def test_the_call_that_cut_the_graph(op: str, text: str) -> None:
    cut = GraphCut(op=op, line=line(5, "y = f(x)"))
    ((rule, said),) = hints(NO_GRAPH, tensors=LOSS, graph_cut=cut)
    assert rule == "detached_loss"
    assert said.startswith(f"line 5: y = f(x); {text}")


def test_every_line_that_cut_the_graph_is_said_oldest_first() -> None:
    others = (line(3, "a = b.detach()", cell=2), line(4, "c = d.detach()"))
    cut = GraphCut(op="detach", line=line(5, "y = x.detach()"), others=others)
    ((_, said),) = hints(NO_GRAPH, graph_cut=cut)
    assert said.startswith(
        "In [2] line 3: a = b.detach(); line 4: c = d.detach(); line 5: y = x.detach(); detach()"
    )


def test_a_loss_that_is_a_number() -> None:
    message = "'float' object has no attribute 'backward'"
    assert explained(message).headline == (
        "the loss is of type float: it has no graph, and no backward"
    )
    number = explained("'int' object has no attribute 'backward'").headline
    assert number.startswith("the loss is of type int: ")
    odd = (
        OddArgument(name="total", type_name="float", words="the float 2.5"),
        OddArgument(name="n", type_name="int", words="the int 3"),
    )
    cut = GraphCut(op="item", line=line(5, "total += loss.item()"))
    verdict = explained(
        message, refused_arguments=RefusedArguments(odd_arguments=odd), graph_cut=cut
    )
    assert verdict.headline == "total is the float 2.5: it has no graph, and no backward"
    assert [it.rule for it in verdict.hints] == ["detached_loss"]
    assert explained("'str' object has no attribute 'backward'").pattern is None


def test_a_loss_of_several_numbers() -> None:
    message = "grad can be implicitly created only for scalar outputs"
    tensors = (fact("self", "float32[8,2]", "out"),)
    verdict = explained(message, tensors=tensors)
    assert verdict.headline == (
        "out has shape [8, 2]: backward() without a gradient takes one number"
    )
    assert verdict.argument == "self"
    for name in ("tensors[0]", "outputs[0]"):
        listed = explained(message, tensors=(fact(name, "float32[8,2]", "out"),))
        assert listed.headline.startswith("out has shape [8, 2]") and listed.argument == name
    assert explained(message).headline.startswith("the tensor has several elements: backward()")
    assert hints(message) == [("reduce_loss", "reduce it to one number: mean() or sum()")]


def test_a_leaf_that_is_changed_in_place() -> None:
    message = "a leaf Variable that requires grad is being used in an in-place operation."

    def said(code: str) -> str:
        ((rule, text),) = hints(message, source=SourceSpan(cell=1, line=9, text=code))
        assert rule == "change_without_graph"
        return text

    assert said("w -= lr * g").startswith("w = w - … makes a new tensor with a graph")
    assert said("w *= 2").startswith("w = w * … makes a new tensor with a graph")
    assert said("w /= 2").startswith("w = w / … makes a new tensor with a graph")
    assert said("self.w -= 2").startswith("change a parameter under torch.no_grad()")
    assert said("w[0] = 2") == (
        "change a parameter under torch.no_grad(), where autograd does not record it. A tensor "
        "that collects results is made without requires_grad"
    )
    assert said("w.mul_(2)").startswith("change a parameter under torch.no_grad()")
    assert hints(message, source=None)[0][1].startswith("change a parameter under torch.no_grad()")


def test_a_checkpoint_that_runs_another_way_the_second_time() -> None:
    message = "torch.utils.checkpoint: Recomputed values for the following tensors have different"
    ((rule, text),) = hints(message)
    assert rule == "checkpoint_state" and "must not affect the second run" in text


# --- a gradient that is NaN -----------------------------------------------------------------------


def nan_of(function: str, **facts: Any) -> list[str]:
    message = f"Function '{function}' returned nan values in its 0th output."
    found = hints(message, **facts)
    assert {rule for rule, _ in found} <= {"steep_gradient"}
    return [text for _, text in found]


def saved(name: str, low: float, high: float, nearest: float, *, has_nan: bool = False) -> Any:
    return {"node_saved": (SavedValues(name, low, high, nearest, has_nan),)}


def test_functions_without_a_slope_at_a_pole() -> None:
    (text,) = nan_of("SqrtBackward0")
    assert text.startswith("the slope of a root is infinite at 0, and 0 * inf is NaN: if its input")
    assert nan_of("MulBackward0") == []


@pytest.mark.parametrize(
    ("function", "at_pole", "beside"),
    [
        ("SqrtBackward0", saved("result", 0, 2, 0), saved("result", 0.1, 2, 0.1)),
        ("PowBackward0", saved("self", 0, 2, 0), saved("self", 0.1, 2, 0.1)),
        ("DivBackward0", saved("other", 0, 2, 0), saved("other", 0.1, 2, 0.1)),
        ("AcosBackward0", saved("self", 0, 1, 0), saved("self", -0.9, 0.9, 0)),
        ("AsinBackward0", saved("self", -1, 0, 0), saved("self", -0.9, 0.9, 0)),
    ],
)
def test_a_pole_that_the_saved_values_reach(function: str, at_pole: Any, beside: Any) -> None:
    assert len(nan_of(function, **at_pole)) == 1
    assert nan_of(function, **beside) == []


def test_values_that_were_nan_in_forward_already() -> None:
    (text,) = nan_of("LogBackward0", **saved("self", 1, 2, 1, has_nan=True))
    assert text.startswith("the input of log is NaN in forward already: ")
    (text,) = nan_of("SqrtBackward0", **saved("result", 1, 2, 1, has_nan=True))
    assert text.startswith("the result of sqrt is NaN in forward already: ")


def test_the_logarithm_of_a_negative_number() -> None:
    assert nan_of("LogBackward0", **saved("self", -0.25, 2, 0.1)) == [
        "the input of log goes down to -0.25, where log is NaN in forward already"
    ]
    (text,) = nan_of("LogBackward0", **saved("self", 0, 2, 0))
    assert text.startswith("the slope of the logarithm is infinite at 0")
    (text,) = nan_of("PowBackward0", **saved("self", -0.25, 2, 0))
    assert text.startswith("the slope of a power below 1 is infinite at 0")


def test_the_line_is_named_where_it_is_the_only_one() -> None:
    def history(*lines: int) -> tuple[HistoryEntry, ...]:
        return tuple(
            HistoryEntry(seq=at, op="aten::sqrt", source=line(at, "y = x.sqrt()")) for at in lines
        )

    (text,) = nan_of("SqrtBackward0", history=history(4, 4))
    assert "NaN (the backward of In [1] line 4: y = x.sqrt()): if its input" in text
    (text,) = nan_of("SqrtBackward0", history=history(4, 5))
    assert "the backward of" not in text
    (text,) = nan_of("PowBackward0", history=history(4))
    assert "the backward of" not in text
