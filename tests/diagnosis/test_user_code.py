"""Fixes written as the user's call with one expression replaced, found by its place."""

from __future__ import annotations

from typing import Any

import pytest

from cudalens.core._python import parse_expression
from cudalens.core.evidence_types import CallSyntax
from cudalens.core.report import Evidence
from cudalens.core.report_types import Frame, LineRef, OpName, SourceSpan, TensorFact
from cudalens.diagnosis import user_code
from cudalens.diagnosis.user_code import (
    Change,
    Fix,
    called_name,
    chooses,
    in_transformers,
    is_failing_line,
    is_name,
    list_items,
    list_of,
    parsed,
    place,
    renamed,
    rewritten,
    shortened,
    spliced,
    statement_of,
    statements_of,
    with_changes,
    with_keyword,
    written,
)
from tests.builders import spelled
from tests.hint_evidence import syntax_of


def evidence(call: str, **more: Any) -> Evidence:
    return Evidence(call=syntax_of(call), **more)


def fact(text: str, span: tuple[int, int, int] | None = None) -> TensorFact:
    return TensorFact(argument=None, expression=spelled(text), span=span)


@pytest.mark.parametrize(
    ("call", "text", "template", "wanted"),
    [
        ("f(x, y)", "y", "{x} - 1", "f(x, y - 1)"),
        ("f(x, xx)", "x", "{x}.T", "f(x.T, xx)"),
        ("f(2 * x)", "2 * x", "{x} - 1", "f((2 * x) - 1)"),
        ("x + y", "y", "{x} - 1", "x + (y - 1)"),
        ("x + y", "y", "{x}.T", "x + y.T"),
        ("f(é, x)", "x", "{x}.T", "f(é, x.T)"),
        ("x[i]", "i", "{x} - 1", "x[i - 1]"),
        ("x[i]", "x", "{x} - 1", "(x - 1)[i]"),
        ("f(x=y)", "y", "{x} - 1", "f(x=y - 1)"),
        ("f(**b)", 'b["y"]', "{x} - 1", 'b["y"] = b["y"] - 1'),
        ("f(**b)", "g()", "{x} - 1", None),
        ("f(x(y), y)", "y", "{x} - 1", "f(x(y), y - 1)"),
    ],
)
def test_an_expression_is_replaced_by_its_place(
    call: str, text: str, template: str, wanted: str | None
) -> None:
    fix = rewritten(evidence(call), fact(text), template)
    assert fix == wanted
    assert fix is None or fix.changes == (Change(text, template),)


def test_of_two_alike_the_span_tells_which() -> None:
    both = evidence("f(g(x), h(x))")
    assert with_changes(both, [(fact("x"), "{x}.T")]) is None
    assert with_changes(both, [(fact("x", (1, 4, 5)), "{x}.T")]) == "f(g(x.T), h(x))"
    second = fact("x", (1, 10, 11))
    assert with_changes(both, [(second, "{x}.T")]) == "f(g(x), h(x.T))"
    fix = rewritten(both, second, "{x}.T")
    assert fix is not None and fix.changes == (Change("x", "{x}.T", (1, 10, 11)),)


def test_two_expressions_are_replaced_at_once() -> None:
    changes = [(fact("x"), "{x}.float()"), (fact("y"), "{x}.T")]
    assert with_changes(evidence("f(x, y)"), changes) == "f(x.float(), y.T)"
    assert with_changes(evidence("f(x)"), changes) is None


def test_an_assignment_within_an_expression_has_parentheses_of_its_own() -> None:
    node = parse_expression("(y := f(x))").body
    call = Evidence(call=CallSyntax(node=node, text="(y := f(x))", is_written_so=True))
    assert with_changes(call, [(fact("x"), "{x}.T")]) == "(y := f(x.T))"
    assert written(call, node.value) == "f(x)"  # type: ignore[attr-defined]


def test_without_an_expression_there_is_no_fix() -> None:
    assert rewritten(evidence("f(x)"), None, "{x}") is None
    assert rewritten(evidence("f(x)"), TensorFact(argument="x", expression=None), "{x}") is None


def test_parts_are_said_as_they_were_typed() -> None:
    call = evidence("f( 'é',  1e9 )")
    node = user_code.call_node(call)
    assert written(call, node.args[1]) == "1e9"  # type: ignore[union-attr]
    assert syntax_of("f(") is None


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        ("F.loss(z, y)", "F.loss(z, y, index=-1)"),
        ("F.loss(z, y,)", "F.loss(z, y, index=-1)"),
        ("loss()", "loss(index=-1)"),
        ("loss(z, index=3)", "loss(z, index=-1)"),
        ("loss(z, **more)", None),
        ("other(z)", None),
    ],
)
def test_a_keyword_is_added_or_replaced(call: str, wanted: str | None) -> None:
    assert with_keyword(evidence(call), ["loss"], "index", "-1") == wanted


def test_what_a_keyword_does_to_the_call() -> None:
    fix = with_keyword(evidence("loss(z, index=7)"), ["loss"], "index", "-1")
    assert fix is not None
    assert fix.rearrange is not None
    assert fix.rearrange("f", ["z"], {"index": 7}) == ("f", ["z"], {"index": -1})
    assert fix.rearrange("f", ["z"], {}) == ("f", ["z"], {"index": -1})
    inner = with_keyword(evidence("Loss()(z, y)"), ["Loss"], "index", "-1")
    assert (inner, inner and inner.rearrange is not None) == ("Loss(index=-1)(z, y)", True)
    of_operand = with_keyword(evidence("f(Loss(z), y)"), ["Loss"], "index", "-1")
    assert of_operand is not None
    assert of_operand.changes == (Change("Loss(z)", "Loss(z, index=-1)"),)


def test_another_function_with_the_same_arguments() -> None:
    fix = renamed(evidence("x.view(6)"), "view", "reshape")
    assert (fix, fix and fix.rearrange and fix.rearrange(0, [1], {"k": 2})) == (
        "x.reshape(6)",
        ("reshape", [1], {"k": 2}),
    )
    assert renamed(evidence("x.view(6)"), "reshape", "view") is None
    made = renamed(evidence("BCELoss()(p, t)"), "BCELoss", "Other", "other")
    assert (made, made and made.rearrange and made.rearrange(0, [1], {})) == (
        "Other()(p, t)",
        ("other", [1], {}),
    )


@pytest.mark.parametrize(
    ("fix", "wanted"),
    [
        (Fix("", [Change("x", "{x}.T")]), ("x", "x.T")),
        (Fix("", [Change("self.x", "{x} - 1")]), ("self.x", "self.x - 1")),
        (Fix("", [Change("x[0]", "{x}.T")]), None),
        (Fix("", [Change("x", "y")]), None),
        (Fix("", [Change("x", "{x}"), Change("y", "{x}")]), None),
        (Fix("", [Change("x", "{x}.T")], device="cpu"), None),
        (Fix("", [Change("x", "{x}.T")], user_code.function_named("f")), None),
    ],
)
def test_the_one_name_that_a_fix_changes(fix: Fix, wanted: object) -> None:
    assert fix.of_name() == wanted


@pytest.mark.parametrize(
    ("values", "first", "wanted"),
    [
        ([3, 1, 2], (), "1, 2, 3"),
        ([4, 3, 2, 1], (), "1, 2, 3, 4"),
        ([5, 4, 3, 2, 1], (), "1, 2, 3, 4 and 1 more"),
        ([5, 4, 3, 2, 1], (5,), "5, 1, 2, 3 and 1 more"),
    ],
)
def test_a_few_numbers_for_reading(values: list[int], first: tuple[int, ...], wanted: str) -> None:
    assert list_of(values, first=first) == wanted


def test_names_and_calls() -> None:
    texts = ("x", "a.b[0]", "x" * 40, "x" * 41, "f(x)", "x + 1", None)
    assert [is_name(spelled(it)) for it in texts] == [True, True, True, False, False, False, False]
    assert called_name(evidence("self.net(x)")) == "self.net"
    assert called_name(evidence("nets[0](x)")) is None
    assert called_name(evidence("x + 1")) is None


def test_the_list_of_tensors_that_a_call_joins() -> None:
    here = (Frame(file="a.py", line=1, function="f", is_user=True),)
    below = (*here, Frame(file="torch/f.py", line=1, function="f"))
    op = OpName(api="torch.cat")

    def items(call: str, frames: Any = here) -> tuple[str, ...]:
        return list_items(evidence(call, frames=frames, op=op))

    assert items("torch.cat([x, y + 1], 1)") == ("x", "y + 1")
    assert items("torch.cat(tensors=(x, y))") == ("x", "y")
    assert items("torch.cat([x, *rest])") == ()
    assert items("torch.cat(parts)") == ()
    assert items("torch.stack([x])") == ()
    assert items("torch.cat([x])", below) == ()


def test_through_a_library_below_the_users_line() -> None:
    user = Frame(file="/site-packages/transformers/x.py", line=1, function="f", is_user=True)
    below = Frame(file="C:\\site-packages\\transformers\\y.py", line=1, function="g")
    assert not in_transformers(Evidence(frames=(user,)))
    assert in_transformers(Evidence(frames=(user, below)))
    assert not in_transformers(Evidence(frames=(below, user)))
    assert in_transformers(Evidence(frames=(below,)))


def test_places_are_said_from_the_failing_line() -> None:
    here = Evidence(source=SourceSpan(cell=3, line=4, end_line=6))
    assert place(LineRef(line=2, cell=3), here) == "line 2"
    assert "3" not in place(LineRef(line=2, cell=5), here)
    assert "5" in place(LineRef(line=2, cell=5), here)
    in_file = Evidence(source=SourceSpan(file="/a/train.py", line=4))
    assert place(LineRef(line=2, file="/a/train.py"), in_file) == "line 2"
    assert place(LineRef(line=2, file="/a/model.py"), in_file) == "/a/model.py:2"
    lines = [is_failing_line(LineRef(line=at, cell=3), here) for at in (3, 4, 6, 7)]
    assert lines == [False, True, True, False]
    assert not is_failing_line(LineRef(line=4, cell=5), here)
    assert not is_failing_line(LineRef(line=4), Evidence())


def test_a_call_that_is_not_as_typed_is_written_anew() -> None:
    """The columns of a call in several lines are not those of its text."""
    over = evidence("f(x +\n  y, z)")
    assert over.call is not None and not over.call.is_written_so
    assert written(over, over.call.node.args[0]) == "x + y"
    assert with_changes(over, [(fact("z"), "{x}.T")]) == "f(x + y, z.T)"
    assert spliced(over, {over.call.node.args[1]: "z +"}) is None
    flat = evidence("f(x+y, z)")
    assert written(flat, flat.call.node.args[0]) == "x+y"
    assert written(evidence("="), over.call.node.args[1]) == "z"


@pytest.mark.parametrize(
    ("code", "is_chosen"),
    [
        ("x[n]", True), ("x[n + 1]", True), ("x[0][n]", True), ("f(n)", True), ("f(k=n)", True),
        ("f(x)[n]", True), ("n[0]", False), ("n", False), ("n(x)", False), ("n.f(x)", False),
        ("x[m]", False), ("n + 1", False),
    ],
)  # fmt: skip
def test_what_an_index_or_an_argument_chooses(code: str, is_chosen: bool) -> None:
    tree = parsed(code)
    assert tree is not None
    assert chooses(tree, {"n"}) is is_chosen


def test_a_line_that_is_not_whole_is_no_statement() -> None:
    codes = ("x = 1", "x = 1; y", "  x = 1", "f(x,", "", None)
    assert [len(statements_of(it)) for it in codes] == [1, 2, 1, 0, 0, 0]
    kinds = [type(statement_of(it)).__name__ for it in ("x = 1", "x = 1; y", "f(x,", None)]
    assert kinds == ["Assign", "Pass", "Pass", "Pass"]
    assert parsed("f(x)  # of it") is not None


def test_a_change_that_is_no_expression_is_none() -> None:
    call = evidence("f(x)")
    node = user_code.call_node(call)
    assert spliced(call, {node.args[0]: "x +"}) is None  # type: ignore[union-attr]
    assert spliced(call, {node.args[0]: "x + 1"}) == "f(x + 1)"  # type: ignore[union-attr]
    assert spliced(Evidence(), {}) is None


def test_long_code_is_cut_and_a_place_without_a_failing_line_is_a_number() -> None:
    assert (shortened("x" * 80), shortened("x" * 81)) == ("x" * 80, f"{'x' * 80}…")
    assert shortened("x" * 79 + " y") == "x" * 79 + "…"
    assert place(LineRef(line=2, cell=3), Evidence()) == "line 2"
