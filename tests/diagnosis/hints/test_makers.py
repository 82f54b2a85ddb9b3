"""Which of the recorded steps made the bad values, and which only handed them on."""

from __future__ import annotations

from typing import Any

import pytest

from cudalens.core.graph_types import (
    DIVIDES,
    FIRST_BAD,
    WRITES,
    AutogradNeighbourhood,
    GraphNode,
    ProvenanceStep,
)
from cudalens.core.report import Evidence
from cudalens.diagnosis.hints._makers import (
    calls_on_line,
    is_made,
    is_numbered,
    maker_steps,
    makes_value,
    way_of,
)
from tests.hint_evidence import behind, labels, step


def makers(*steps: ProvenanceStep | str) -> list[str | None]:
    return [it.op for it in maker_steps(behind(Evidence(), *steps))]


# --- the makers -----------------------------------------------------------------------------------


def test_the_newest_step_that_did_more_than_hand_values_on() -> None:
    assert makers("aten::view", "aten::mul", "aten::add") == ["aten::mul"]
    assert makers("aten::index_select", "aten::add") == ["aten::add"]
    assert makers("aten::view", "aten::clone") == []
    assert makers() == []


def test_every_step_that_is_proven_to_have_made_or_written_them() -> None:
    written = step("aten::fill_", note=f"{WRITES} 9")
    first = step("aten::exp", note=FIRST_BAD)
    assert makers("aten::mul", written, "aten::add", first) == ["aten::fill_", "aten::exp"]


def test_a_step_without_a_line_made_nothing_that_can_be_shown() -> None:
    assert makers(step("aten::mul", None), "aten::add") == ["aten::add"]
    assert makers(step(None), "aten::add") == ["aten::add"]


def test_a_remainder_is_another_number_than_what_was_divided() -> None:
    written = step("aten::fill_", note=f"{WRITES} 9")
    assert makers("aten::remainder", written) == ["aten::remainder"]
    assert makers("aten::fmod", "aten::add") == ["aten::fmod"]
    assert makers(step("aten::fill_", note=f"{WRITES} 9"), "aten::remainder") == ["aten::fill_"]


def test_what_a_loader_gave_was_made_by_no_call() -> None:
    assert makers("aten::view", "torch.stack", step(None)) == []
    assert makers("aten::add", step(None)) == ["aten::add"]


def test_a_choice_among_values_that_another_line_made() -> None:
    assert makers("torch.where", "aten::add") == ["aten::add"]
    assert makers("torch.where") == ["torch.where"]
    assert makers("torch.where", "aten::view") == ["torch.where"]


def test_lists_of_python_where_nothing_else_made_values() -> None:
    assert makers("aten::view", "torch.tensor") == ["torch.tensor"]
    assert makers("aten::add", "torch.tensor") == ["aten::add"]


def test_what_came_in_before_arithmetic_is_another_value() -> None:
    came_in = step("torch.tensor", note=FIRST_BAD)
    assert makers("aten::mul", came_in) == ["aten::mul"]
    assert makers("aten::view", "aten::mul", "aten::clone", came_in) == ["aten::mul"]
    assert makers("aten::view", came_in) == ["torch.tensor"]
    written = step("torch.Tensor.__setitem__", note=f"{WRITES} 9")
    assert makers(written, came_in) == ["torch.Tensor.__setitem__", "torch.tensor"]


@pytest.mark.parametrize(
    ("bad", "made"),
    [((9, 9), "torch.tensor"), ((9, 8), "aten::clamp"), ((8, 8), "aten::clamp")],
)
def test_a_clamp_hands_on_what_python_listed(bad: tuple[int, ...], made: str) -> None:
    """All of the bad values: one that is not in the list is a bound of the clamp."""
    came_in = step("torch.tensor", "y = torch.tensor([3, 9])", FIRST_BAD)
    found = labels([0, *bad], 5, provenance=(step("aten::clamp"), came_in))
    assert [it.op for it in maker_steps(found)] == [made]


def test_a_division_is_named_beside_the_maker() -> None:
    divided = step("aten::div", "b = a // 2", DIVIDES)
    assert makers("aten::add", divided) == ["aten::add", "aten::div"]
    assert makers(divided, "aten::add") == ["aten::div"]


# --- making or handing on -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "text", "note", "value", "makes"),
    [
        ("aten::fill_", "y.fill_(v)", f"{WRITES} 9", 9, True),
        ("torch.tensor", "y = torch.tensor([3, 9])", None, 9, True),
        ("torch.tensor", "y = torch.tensor([[3], [-9]])", None, -9, True),
        ("torch.tensor", "y = torch.tensor([3, 8])", None, 9, False),
        ("torch.tensor", "y = torch.tensor(labels)", None, 9, False),
        ("torch.tensor", "y = torch.tensor([x[9]])", None, 9, False),
        ("torch.exp", "y = x.exp()", FIRST_BAD, "inf", True),
        ("torch.Tensor.view", "y = x.view(-1)", FIRST_BAD, 9, False),
        ("torch.Tensor.half", "y = x.half()", FIRST_BAD, "inf", True),
        ("torch.randint", "y = torch.randint(0, 10, (3,))", None, 9, True),
        ("torch.argmax", "y = x.argmax(1)", None, 9, True),
        ("torch.argmax", "y = x.argmax(1)", None, None, True),
        ("torch.rand", "y = torch.rand(3)", None, "nan", False),
        ("torch.Tensor.add", "y = x + 1", None, 9, True),
        ("torch.Tensor.sub", "y = x - 1", None, -1, True),
        ("torch.Tensor.add_", "x += 1", None, 9, True),
        ("torch.Tensor.add", "y = x + 0", None, 9, False),
        ("torch.Tensor.add", "y = x + b", None, 9, False),
        ("torch.Tensor.add", "y = (x + 1) - b", None, 9, False),
        ("torch.Tensor.mul", "y = x * 2", None, 9, False),
    ],
)
def test_whether_a_step_makes_a_value(
    op: str, text: str, note: str | None, value: Any, makes: bool
) -> None:
    assert makes_value(step(op, text, note), value) is makes


# --- the way --------------------------------------------------------------------------------------


def test_the_ops_on_the_way_without_those_that_copy() -> None:
    found = way_of(
        behind(Evidence(), "aten::mul", "aten::clone", step("aten::exp", None), step(None))
    )
    assert list(found) == [("mul", " in line 4"), ("exp", "")]


def test_the_last_op_of_autograd_where_nothing_was_recorded() -> None:
    nodes = (
        GraphNode(id="1", name="MulBackward0", op="aten::mul", role="bad_input"),
        GraphNode(id="2", name="ExpBackward0", op="aten::exp", role="upstream"),
    )
    graph = AutogradNeighbourhood(nodes=nodes)
    assert list(way_of(Evidence(graph=graph))) == [("mul", "")]
    recorded = Evidence(graph=graph, provenance=(step("aten::add"),))
    assert [name for name, _ in way_of(recorded)] == ["add"]
    assert not is_made(Evidence(graph=graph))


def test_whether_arithmetic_made_the_values() -> None:
    assert is_made(behind(Evidence(), "aten::view", "aten::add"))
    assert not is_made(behind(Evidence(), "aten::view", "torch.randint"))
    assert not is_made(behind(Evidence(), "aten::view"))


@pytest.mark.parametrize(
    ("op", "text", "is_one"),
    [
        ("torch.argsort", "y = x.argsort()", True),
        ("torch.bucketize", "y = torch.bucketize(x, b)", True),
        ("torch.Tensor.floor_divide", "y = x // 2", True),
        ("torch.Tensor.add", "y = x.argmax(1) + 1", True),
        ("torch.Tensor.add", "y = x + 1", False),
        ("torch.Tensor.add", "y = x.argmax", False),
    ],
)
def test_values_that_number_things(op: str, text: str, is_one: bool) -> None:
    assert is_numbered(behind(Evidence(), step(op, text))) is is_one
    assert is_numbered(behind(Evidence(), "aten::view", step(op, text))) is is_one


def test_the_calls_of_a_line_that_is_whole() -> None:
    assert len(calls_on_line(step("aten::add", "  y = f(g(x))"))) == 2
    assert calls_on_line(step("aten::add", "y = f(g(x),")) == []
    assert calls_on_line(step("aten::add", None)) == []


@pytest.mark.parametrize(("value", "is_made"), [(3, True), (-5, True), (5, False), (-4, False)])
def test_a_number_that_a_list_shows_has_its_sign(value: int, is_made: bool) -> None:
    listed = step("torch.tensor", "y = torch.tensor([3, (-5, ~4), n[5]])")
    assert makes_value(listed, value) is is_made
