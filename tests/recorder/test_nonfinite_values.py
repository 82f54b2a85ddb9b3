"""Values that are not finite: found, and put in words with what the call was given."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cudalens.core.report_types import Offender
from cudalens.core.tensor_values import find_offenders
from cudalens.recorder.calls import Api
from cudalens.recorder.nonfinite_values import (
    MAX_INPUTS,
    beside_of_node,
    floats,
    is_discarded_at,
    is_finite,
    is_steep,
    is_surely_finite,
    item_of_list,
    make_violation,
    nonfinite,
    of_saved_nan,
    operands_beside,
    real,
    saved_value,
    saved_values,
    suspects,
    value_at,
    violation_of_call,
    violation_of_gradient,
    violation_of_input,
    violation_of_node,
    violation_of_step,
    violation_of_stepped_gradient,
)

INF, NAN = math.inf, math.nan
T = torch.tensor
HUGE = torch.full((20,), 3e38)
"""Finite values whose sum is not."""


@pytest.mark.parametrize("count", [1, 2, 16, 17, 40])
@pytest.mark.parametrize("bad", [NAN, INF, -INF, None])
def test_finite_by_the_sum(count: int, bad: float | None) -> None:
    x = torch.ones(count, requires_grad=True).detach()
    if bad is not None:
        x[-1] = bad
    assert is_surely_finite(x) is (bad is None)
    assert is_finite(x) is (bad is None)
    assert [len(found) for found in nonfinite([x])] == ([] if bad is None else [3])


@pytest.mark.parametrize(
    ("tensor", "sure"),
    [
        (T([1, 2]), True), (T(True), True), (T([1 + 2j]), False), (torch.ones(2, 3, 2), True),
        (T([[1.0], [NAN]]), False), (torch.ones(3).to_sparse(), False), (HUGE, False),
        (torch.empty(0), True), (torch.ones(3, device="meta"), False),
        (torch.ones(20, requires_grad=True), True),
    ],
)  # fmt: skip
def test_what_the_sum_can_say(tensor: Tensor, sure: bool) -> None:
    assert is_surely_finite(tensor) is sure
    assert suspects([None, tensor]) == ([] if sure else [tensor])


def test_values_that_are_finite_may_have_a_sum_that_is_not() -> None:
    assert list(nonfinite([HUGE])) == []
    ((tensor, values, bad),) = nonfinite([T([1]), T([1.0, NAN, -INF]), torch.ones(2)])
    assert (tensor.shape, values.isnan().tolist()) == ((3,), [False, True, False])
    assert bad.tolist() == [False, True, True]


def test_what_a_wrapper_hides_is_found_under_its_name() -> None:
    def look(x: Tensor) -> Tensor:
        ((tensor, values, _),) = nonfinite([x])
        assert tensor is x and values.shape == (1, 2)
        return x

    torch.vmap(look)(T([[1.0, NAN]]))


def test_which_tensors_are_read() -> None:
    kept = [T([1.0]), T([1j])]
    left = [T([1]), torch.empty(0), torch.ones(1, device="meta"), torch.ones(2).to_sparse(), 3, "x"]
    assert [id(item) for item in floats([*left, *kept])] == [id(item) for item in kept]
    assert real(T([3 + 4j])).tolist() == [5.0]
    assert real(T([-3.0])).tolist() == [-3.0]


# --- what a call made ----------------------------------------------------------------------------


def of_call(
    func: Any, arguments: dict[str, Any], result: Tensor, lost: tuple[Tensor, ...] = (), **more: Any
) -> Any:
    bad = ~torch.isfinite(result)
    return violation_of_call(Api(func), arguments, result, bad, [id(it) for it in lost], **more)


def test_an_elementwise_op_is_told_with_its_operands_there() -> None:
    x, y = T([1.0, 0.0, 4.0]), T([2.0, 0.0, 0.0])
    found = of_call(torch.div, {"self": x, "other": y}, x / y)
    assert found.headline == (
        "torch.div made nan at [1] from {input:self} = 0.0, {input:other} = 0.0"
    )
    assert found.explanation == (
        "2 of 3 values of the result are not finite; all values of the inputs were finite."
    )
    assert found.inputs == (("self", "0.0"), ("other", "0.0"))
    assert [it.inputs for it in found.offenders.first] == [
        (("self", 0), ("other", 0)),
        (("self", 4), ("other", 0)),
    ]
    assert (found.dtype, found.is_nonfinite, found.is_index) == ("float32", True, False)


def test_a_number_is_an_operand_and_a_setting_is_not() -> None:
    x = T([1.0, -1.0])
    found = of_call(torch.div, {"self": x, "other": 0, "alpha": 3}, x / 0)
    assert found.inputs == (("self", "1.0"), ("other", "0"))


def test_what_was_given_for_the_result_is_no_input() -> None:
    x, out = T([0.0]), T([-INF])
    found = of_call(torch.log, {"self": x, "out": out}, out)
    assert found.inputs == (("self", "0.0"),)
    assert "infinities" not in found.explanation


def test_a_sum_is_told_with_the_value_of_each_operand_furthest_from_0() -> None:
    a, b = torch.full((2, 2), -3e38), torch.full((2, 2), 2.0)
    found = of_call(torch.mm, {"self": a, "mat2": b}, a @ b)
    assert found.inputs == ()
    assert "{input:self} (down to -3e+38), {input:mat2} (up to 2.0)" in found.headline


def test_infinities_of_the_inputs_are_said_and_nothing_of_their_size() -> None:
    a, b = T([[INF, 1.0]]), T([[0.0], [1.0]])
    found = of_call(torch.mm, {"self": a, "mat2": b}, a @ b)
    assert found.inputs == ()
    assert found.explanation.endswith("the inputs contained infinities, but no NaN.")


def test_what_was_overwritten_is_no_operand() -> None:
    x, y = T([INF, 1.0]), T([0.0, 1.0])
    found = of_call(Tensor.div_, {"self": x, "other": y}, x, (x,))
    assert found.overwritten == ("self",)
    assert found.inputs == (("other", "0.0"),)
    assert found.explanation.endswith("all values of the other inputs were finite.")


@pytest.mark.parametrize(
    ("scores", "masked"),
    [
        ([[0.0, 1.0], [-INF, -INF]], True),
        ([[0.0, 1.0], [INF, -INF]], False),
        ([[-INF, -INF], [INF, 0.0]], False),
        ([[-INF, -INF], [-INF, -INF], [0.0, -INF]], True),
    ],
)
@pytest.mark.parametrize("dim", [1, -1])
def test_a_row_of_a_softmax_that_was_masked_whole(scores: Any, masked: bool, dim: int) -> None:
    x = T(scores)
    found = of_call(torch.softmax, {"self": x, "dim": dim}, x.softmax(dim))
    assert (found.is_masked_row, found.inputs) == (masked, ())
    assert not of_call(torch.softmax, {"self": x}, x.softmax(dim)).is_masked_row
    assert not of_call(torch.mm, {"self": x, "dim": dim}, x.softmax(dim)).is_masked_row


def test_one_of_a_list_is_named_with_its_number() -> None:
    xs, ys = [T([1.0]), T([3.0])], [T([1.0]), T([0.0])]
    results = torch._foreach_div(xs, ys)
    api = Api(torch._foreach_div)
    assert item_of_list(api, results, results[1]) == 1
    assert item_of_list(api, results, T([1.0])) is None
    assert item_of_list(Api(torch.div), results, results[1]) is None
    assert item_of_list(api, results[1], results[1]) is None
    found = of_call(torch._foreach_div, {"self": xs, "other": ys}, results[1], at=1)
    assert found.inputs == (("self[1]", "3.0"), ("other[1]", "0.0"))
    assert "at [0] of item 1 from {input:self[1]} = 3.0" in found.headline


# --- inputs beside the result --------------------------------------------------------------------

FOUR = {name: torch.ones(2) for name in "abcd"}


@pytest.mark.parametrize(
    ("func", "arguments", "more", "names"),
    [
        (torch.add, {"self": torch.ones(2), "other": torch.ones(1)}, {}, "self other"),
        (torch.add, {"self": torch.ones(2), "other": torch.ones(3), "alpha": 2}, {}, "self"),
        (torch.mm, {"self": torch.ones(2)}, {}, ""),
        (torch.mm, {"self": torch.ones(2)}, {"is_listed": True}, "self"),
        (torch.softmax, {"self": torch.ones(2)}, {}, "self"),
        (torch.add, FOUR, {}, "a b c"),
    ],
)
def test_inputs_beside_a_result_of_two(func: Any, arguments: Any, more: Any, names: str) -> None:
    beside = operands_beside(Api(func), arguments, [], torch.ones(2), **more)
    assert list(beside) == names.split()
    assert all(item.shape == (2,) for item in beside.values())
    assert len(beside) <= MAX_INPUTS


def test_an_input_in_the_memory_that_was_written_has_lost_its_values() -> None:
    x, other = torch.ones(4), torch.ones(2)
    arguments = {"self": x[:2], "other": x[2:], "end": other}
    beside = operands_beside(Api(torch.add), arguments, [x[1:], 3], torch.ones(2))
    assert list(beside) == ["end"]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(T([[1.0, 2.5]]), 2.5), (T([[1, 2]]), 2), (T([[1.0, 2j]]), "2j"), (T([[0.0, NAN]]), "nan")],
)
def test_value_at_a_place(value: Tensor, wanted: Any) -> None:
    assert value_at(value, Offender(position=(0, 1), value=0)) == wanted


# --- backward ------------------------------------------------------------------------------------


def test_a_node_is_told_with_its_gradient_and_what_it_saved() -> None:
    x = T([1.0, 0.0], requires_grad=True)
    node: Any = x.sqrt().grad_fn
    values, gradient = T([0.5, INF]), torch.ones(2)
    found = violation_of_node(node, values, ~values.isfinite(), [gradient])
    assert found.headline.startswith("the backward node SqrtBackward0 made inf at [1] from ")
    assert found.inputs == (("gradient", "1.0"), ("result", "0.0"))
    assert set(beside_of_node(node, "SqrtBackward0", [gradient, gradient], (2,))) == {"result"}
    assert beside_of_node(node, "MmBackward0", [gradient], (2,)) == {}
    reworded = of_saved_nan(found)
    assert reworded.headline == (
        "the backward node SqrtBackward0 computes with a nan that forward has saved"
    )
    assert reworded.explanation == (
        "1 of 2 values of the result is not finite; the gradient that it was given is."
    )


def test_what_was_changed_in_place_was_not_saved() -> None:
    y = T([1.0, 4.0], requires_grad=True).exp()
    node: Any = y.grad_fn
    assert saved_value(node, "_saved_result").tolist() == y.tolist()
    with torch.no_grad():
        y.add_(1)
    assert set(beside_of_node(node, "ExpBackward0", [torch.ones(2)], (2,))) == {"gradient"}
    assert saved_value(node, "_saved_result") is None
    assert saved_values(node) == ()


def test_one_factor_that_was_changed_in_place_hides_no_other() -> None:
    one, two = (T([1.0, 4.0], requires_grad=True) for _ in range(2))
    node: Any = (one * two).grad_fn
    both = {"gradient", "self", "other"}
    assert set(beside_of_node(node, "MulBackward0", [torch.ones(2)], (2,))) == both
    for factor, name in ((one, "self"), (two, "other")):
        node = (one * two).grad_fn
        with torch.no_grad():
            factor.add_(1)
        found = set(beside_of_node(node, "MulBackward0", [torch.ones(2)], (2,)))
        assert found == both - {name}


@pytest.mark.parametrize(
    ("name", "steep"),
    [
        ("SqrtBackward0", True), ("RsqrtBackward0", True), ("Log2Backward0", True),
        ("AcosBackward0", True), ("AcoshBackward0", True), ("DivBackward0", True),
        ("MulBackward0", False), ("SinBackward0", False), ("XSqrtBackward0", False),
    ],
)  # fmt: skip
def test_nodes_with_an_infinite_slope(name: str, steep: bool) -> None:
    assert is_steep(name) is steep


def test_saved_values_of_a_node_with_a_pole() -> None:
    x = T([-3.0, 0.5, 2.0], requires_grad=True)
    (found,) = saved_values(x.log().grad_fn)
    assert (found.min, found.max, found.nearest, found.has_nan) == (-3.0, 2.0, 0.5, False)
    (other,) = saved_values(T([NAN, 1.0], requires_grad=True).log().grad_fn)
    assert other.has_nan
    assert saved_values((x * 2).grad_fn) == ()
    assert saved_values(T([1j], requires_grad=True).log().grad_fn) == ()


@pytest.mark.parametrize(
    ("gradient", "taken", "discarded"),
    [
        ([0.0, 1.0], [False, True], True),
        ([0.0, 1.0], [True, True], False),
        ([1.0, 1.0], [False, True], False),
        ([0.0], [False, True], False),
        ([0.0, 1.0], [False], True),
        ([0.0, 1.0], [False, True, True], False),
        ([0.0, 1.0], [[False, True]], False),
    ],
)
def test_whether_where_takes_nothing_at_the_bad_places(
    gradient: Any, taken: Any, discarded: bool
) -> None:
    assert is_discarded_at(T([True, False]), T(gradient), T(taken)) is discarded


# --- what is said --------------------------------------------------------------------------------


def test_a_tensor_that_was_not_finite_when_it_came() -> None:
    x = T([[1.0, NAN]])
    found = violation_of_input(Api(torch.exp), {"self": x, "dim": 1}, x, x, x.isnan())
    assert found.headline == "{input:self}[0, 1] = nan already where torch.exp reads it"
    assert found.explanation == (
        "1 of 2 values of the tensor is not finite; no call that was seen has made them so."
    )
    assert (found.argument, found.dtype) == ("self", "float32")
    other = violation_of_input(Api(torch.exp), {"self": x}, T(NAN), T(NAN), T(True))
    assert other.headline == "{input:input} = nan already where torch.exp reads it"
    assert other.explanation.startswith("The tensor is not finite;")
    listed = violation_of_input(Api(torch.cat), {"tensors": [T([1.0]), x]}, x, x, x.isnan())
    assert listed.argument == "tensors[1]"


def test_a_gradient_that_was_not_finite_when_it_came() -> None:
    x = T([1.0, NAN])
    node = SimpleNamespace(name=lambda: "torch::autograd::CopyBackwards")
    found = violation_of_gradient(node, x, x.isnan())
    reader = "the backward node CopyBackwards"
    assert found.headline == f"{{input:gradient}}[1] = nan already where {reader} reads it"
    assert (found.op, found.argument) == ("CopyBackwards", "gradient")
    stepped = violation_of_stepped_gradient("SGD.step", x, x, x.isnan())
    assert stepped.headline == "{input:param}.grad[1] = nan already where SGD.step reads it"


@pytest.mark.parametrize(
    ("grad", "rate", "words"),
    [
        (T([1.0, 2e38]), 0.5, "its gradient is 2e+38 there, lr = 0.5"),
        (T([1.0, 2.0]), T(0.25), "its gradient is 2.0 there, lr = 0.25"),
        (None, 0.5, "lr = 0.5"),
        (T([1.0, 2.0]).to_sparse(), 0.5, "lr = 0.5"),
        (T([1.0, 2.0]), T([0.5, 0.5]), "its gradient is 2.0 there"),
    ],
)
@pytest.mark.parametrize("state", ["", "exp_avg"])
def test_a_step_that_made_a_parameter_or_a_moment_nonfinite(
    grad: Any, rate: Any, words: str, state: str
) -> None:
    first, p = nn.Parameter(T([1.0])), nn.Parameter(T([1.0, 1.0]))
    p.grad = grad
    optimizer = torch.optim.SGD([{"params": [first], "lr": 9.0}, {"params": [p]}], lr=0.1)
    optimizer.param_groups[1]["lr"] = rate
    values = T([1.0, -INF])
    found = violation_of_step(optimizer, state, p, values, ~values.isfinite(), "SGD.step")
    of = "exp_avg of " if state else ""
    assert found.headline == f"SGD.step made {of}{{input:param}}[1] = -inf: {words}"
    assert found.explanation == (
        f"1 of 2 values of {of}the parameter is not finite; "
        "the parameter was finite before the step."
    )
    assert found.overwritten == ("param",)


def test_one_result_is_no_count() -> None:
    offenders = find_offenders(T(NAN), T(True))
    found = make_violation("op", "op", offenders, inputs=(("x", "1"),), item=2)
    assert found.headline == "op made nan at its result of item 2 from {input:x} = 1"
    assert found.explanation.startswith("The result is not finite;")


@pytest.mark.parametrize(
    ("values", "options", "headline", "explanation"),
    [
        ([0.0, NAN], {}, "made nan at [1]", "1 of 2 values of the result is not finite; "),
        ([INF, NAN], {}, "made inf at [0]", "2 of 2 values of the result are not finite; "),
        ([NAN], {}, "made nan at [0]", "The result is not finite; "),
        ([0.0, NAN], {"item": 0}, "made nan at [1] of item 0", "1 of 2 values of the result is "),
        (
            [0.0, NAN],
            {"of": "the gradient", "before": "it was finite"},
            "made nan at [1]",
            "1 of 2 values of the gradient is not finite; it was finite.",
        ),
        (
            [NAN],
            {"inputs": (("x", "1"), ("y", "2")), "largest": (("z", -3.0), ("w", 4.0))},
            "made nan at [0] from {input:x} = 1, {input:y} = 2, "
            "{input:z} (down to -3.0), {input:w} (up to 4.0)",
            "The result is not finite; ",
        ),
    ],
)
def test_a_headline_counts_and_names_what_was_there(
    values: list[float], options: Any, headline: str, explanation: str
) -> None:
    found = make_violation("op", "op", find_offenders(T(values), ~T(values).isfinite()), **options)
    assert found.headline == f"op {headline}"
    assert found.explanation.startswith(explanation)
    assert (found.guard, found.is_index, found.is_nonfinite) == ("nonfinite", False, True)
    assert found.inputs == options.get("inputs", ())
