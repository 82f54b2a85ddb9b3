"""Errors of CPU kernels about a value: the report says where it is, as for an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cudalens.core.call import ApiCall
from cudalens.evidence import host_value
from tests.hostcells import Outcome, run_cell

SETUP = """
import torch
from torch import nn, tensor
from torch.nn import functional as F
ids, first, number = tensor([0, 9]), tensor([0, 1]), 9
column = tensor([[5]])
table = torch.zeros(3, 2)
weights = tensor([2.0, -1.0])
scores = torch.zeros(3, 2)
wide = torch.zeros(2, 4, 5)
"""


def cell(line: str, **options: Any) -> Outcome:
    """Run a line of its own, with the names of the first lines."""
    exec(SETUP, names := dict[str, Any]())
    return run_cell(line, names, **{"fast": False, **options})


@pytest.mark.parametrize(
    ("line", "argument", "position", "value", "allowed"),
    [
        ("F.embedding(ids, table)", "indices", (1,), 9, "0 … 2"),
        ("nn.Embedding(4, 2)(ids)", "indices", (1,), 9, "0 … 3"),
        ("F.embedding_bag(ids, table, tensor([0]))", "indices", (1,), 9, "0 … 2"),
        ("F.cross_entropy(scores, tensor([0, 1, 2]))", "target", (2,), 2, "ignore_index"),
        ("F.binary_cross_entropy(weights, weights)", "self", (0,), 2.0, "0 … 1"),
        ("F.binary_cross_entropy(weights / 4 + .5, weights)", "target", (0,), 2.0, "0 … 1"),
        ("torch.multinomial(weights, 1)", "self", (1,), -1.0, "finite and at least 0"),
        ("torch.bernoulli(weights)", "self", (0,), 2.0, "0 … 1"),
        ("torch.poisson(weights)", "self", (1,), -1.0, "at least 0"),
        ("table.gather(1, column)", "index", (0, 0), 5, "0 … 1"),
        ("table.index_select(0, ids)", "index", (1,), 9, "0 … 2"),
        ("torch.zeros(3, 2).scatter_(0, column, 1.0)", "index", (0, 0), 5, "0 … 2"),
        ("table.index_add_(0, ids, torch.ones(2, 2))", "index", (1,), 9, "0 … 2"),
        ("table[ids]", "indices", (1,), 9, "-3 … 2"),
        ("table[ids] = torch.ones(2, 2)", "indices", (1,), 9, "-3 … 2"),
    ],
)
def test_value_and_position(
    line: str, argument: str, position: Any, value: Any, allowed: str
) -> None:
    found = cell(line).shown
    assert (found.kind, found.prevented, found.argument) == ("host_error", False, argument)
    assert "GPU" not in found.explanation  # all of it is on the CPU
    assert (found.offenders.first[0].position, found.offenders.first[0].value) == (position, value)
    assert allowed in str(found.bounds.text)


def test_the_users_exception_is_his_own() -> None:
    """Type and text of torch's exception are untouched; a note says what was found."""
    outcome = cell("labels = tensor([0, 255])\nF.cross_entropy(torch.zeros(2, 3), labels)")
    assert isinstance(outcome.error, IndexError)
    assert str(outcome.error) == "Target 255 is out of bounds."
    assert "labels[1] = 255 is outside the 3 classes of " in outcome.error.__notes__[0]
    assert outcome.fixes


@pytest.mark.parametrize(
    "line",
    [
        "F.cross_entropy(torch.zeros(3, 2), tensor([0, 5]))",  # shapes do not fit
        "F.embedding(tensor([9.0]), torch.zeros(3, 2))",  # a dtype that is no index's
        "torch.zeros(3)[7]",
    ],
)
def test_other_errors_keep_their_words(line: str) -> None:
    """Errors about shapes, dtypes and plain numbers get no value."""
    found = cell(line).shown
    assert (found.kind, found.prevented, found.offenders) == ("host_error", False, None)
    # No tensor is on the GPU, where something could have run.
    assert "GPU" not in found.explanation


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize(
    "line",
    [
        "F.cross_entropy(torch.zeros(3, 2).cuda(), tensor([0, 5]).cuda())",
        "F.embedding(tensor([9.0]).cuda(), torch.zeros(3, 2).cuda())",
        "torch.zeros(3).cuda()[7]",
    ],
)
def test_nothing_has_run_on_the_device(line: str) -> None:
    """Said of the same errors where a tensor is on one."""
    found = cell(line).shown
    assert (found.kind, found.prevented, found.offenders) == ("host_error", False, None)
    assert found.explanation.endswith("before running anything on the GPU.")


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("torch.zeros(3)[tensor([9])]", 9),
        ("torch.zeros(3, 2).take(tensor([[5]]) + 1)", 6),
        ("torch.zeros(3, 2)[:, [0, 7]]", 7),
        ("with torch.no_grad(): nn.Parameter(scores).index_add_(0, ids, table[:2])", 9),
    ],
)
def test_a_value_that_no_variable_holds_is_found(line: str, value: int) -> None:
    """The refused call is at hand with its live arguments."""
    found = cell(line).shown
    assert found.offenders is not None
    assert [item.value for item in found.offenders.first] == [value]


def test_the_second_run_of_a_refused_call_changes_nothing() -> None:
    """It ends before what writes, and before what draws random numbers."""
    code = (
        "torch.manual_seed(0)\nbefore = torch.get_rng_state()\nsums = torch.zeros(3)\n"
        "try: sums.index_add_(0, tensor([0, 9]), torch.ones(2))\nfinally: kept = sums.clone()"
    )
    outcome = cell(code)
    assert outcome.shown.offenders is not None
    # The first run has written a part.
    assert outcome.names["sums"].tolist() == outcome.names["kept"].tolist()
    assert torch.equal(torch.get_rng_state(), outcome.names["before"])


def test_without_a_recorder_nothing_is_known_of_the_op() -> None:
    found = cell("F.embedding(ids, torch.zeros(3, 2))", fast=True).shown
    assert found.headline == "index out of range in self"


def test_alike_tensors_are_not_confused() -> None:
    """Which of two alike tensors the op was given is told by the name, or not at all."""
    made = "good, bad = tensor([0.5, 0.5]), tensor([0.5, 2.0])\n"
    for given, argument in (("good, bad", "target"), ("bad, good", "self")):
        found = cell(f"{made}F.binary_cross_entropy({given})").shown
        assert (found.argument, found.expression) == (argument, "bad")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("scores[:, ids]", "ids[1] = 9 is outside dimension 1 (size 2) of scores"),
        ("wide[..., ids] = 1.0", "ids[1] = 9 is outside dimension 2 (size 5) of wide"),
        ("wide[1, :, ids]", "ids[1] = 9 is outside dimension 1 (size 5)"),
        # Neither is a dimension of what is named.
        ("wide[first, None, ids]", "ids[1] = 9 is outside its dimension (size 4)\n"),
        ("wide[1, first, ids]", "ids[1] = 9 is outside dimension 1 (size 5)"),
    ],
)
def test_an_index_keeps_its_place_between_the_brackets(line: str, said: str) -> None:
    """The dimension is that of the tensor the op was given; the CPU counts indexed ones only."""
    assert cell(line).shown.to_text().startswith(f"✗ {said}")
    assert cell(line.replace("ids", "ids % 2")).report is None


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("line", "dimension"),
    [
        ("wide[..., number]", "a dimension of size 5"),
        ("wide[:, :, number]", "dimension 2 with size 5"),
        ("wide[1, 9]", "dimension 1 with size 4"),
    ],
)
def test_a_dimension_is_numbered_only_where_torch_counts_right(
    line: str, dimension: str, fast: bool
) -> None:
    """Lists, and ``...`` before a number, make torch name another dimension than the one meant."""
    headline = cell(line, fast=fast).shown.headline_schema
    assert headline.startswith(f"index 9 is out of bounds for {dimension}")


PACK = "nn.utils.rnn.pack_padded_sequence(wide, {lengths}, enforce_sorted={is_sorted})"


@pytest.mark.parametrize(
    ("lengths", "is_sorted", "said"),
    [
        ("steps", False, "steps[1] = 0"),
        ("steps.cpu()", False, "steps[1] = 0"),
        ("steps.to(torch.int32)", False, "lengths[1] = 0"),
        ("[1, 0, 2, 2]", False, "lengths[1] = 0"),
        ("steps.sort(descending=True).values", True, "lengths[3] = 0"),
    ],
)
def test_a_length_of_0_stands_where_the_user_has_it(
    lengths: str, is_sorted: bool, said: str
) -> None:
    """Torch has sorted the lengths before its kernel refuses one."""
    line = PACK.format(lengths=lengths, is_sorted=is_sorted)
    found = cell(f"steps = tensor([1, 0, 2, 2])\n{line}").shown
    assert found.headline == f"{said} is no length: a sequence has at least one step"
    assert found.explanation.startswith("Each length is the number of steps of one sequence")
    assert found.bounds is not None
    assert (found.bounds.min, found.bounds.max, found.bounds.text) == (1, 2, "from 1 on")


def test_without_any_length_the_bounds_are_still_in_order() -> None:
    found = cell("steps = tensor([0, -1])\n" + PACK.format(lengths="steps", is_sorted=False)).shown
    assert found.bounds is not None and found.offenders is not None
    assert (found.bounds.min, found.bounds.max, found.offenders.count) == (1, 1, 2)


@pytest.mark.parametrize(
    ("others", "is_found"),
    [
        ([[1, 0]], True),
        ([[1, 0], [1, 2], 3], True),
        ([], False),
        ([[1, 2]], False),
        ([[1.0, 0.0]], False),
        ([[1, 0], [1, 0]], False),  # which of the two was given is not told
    ],
)
def test_the_operand_that_has_the_lengths(others: list[Any], is_found: bool) -> None:
    lengths = torch.tensor([1, 0])
    values = [torch.tensor(it) if isinstance(it, list) else it for it in others]
    operands: Any = [SimpleNamespace(value=it) for it in values]
    found = host_value._operand_of_equal_values(lengths, [*operands, *operands])
    assert found is (values[0] if is_found else lengths)


def test_sorted_lengths_in_the_order_in_which_they_were_given() -> None:
    lengths, order = torch.tensor([1, 0, 5]).sort(descending=True)
    assert host_value._as_given(lengths, order).tolist() == [1, 0, 5]
    assert host_value._as_given(lengths, None) is lengths


@pytest.mark.parametrize(
    ("given", "local", "is_found"),
    [
        ("lengths", "lengths", True),
        ("lengths", "other", False),
        ("floats", "floats", False),
        ("two", "two", False),
        ("lengths lengths", "lengths", False),
        ("good", "good", False),
    ],
)
def test_the_lengths_are_those_of_the_frame_that_raised(
    given: str, local: str, is_found: bool
) -> None:
    values = {
        "lengths": torch.tensor([1, 0]),
        "other": torch.tensor([1, 0]),
        "floats": torch.tensor([1.0, 0.0]),
        "two": torch.tensor([[1, 0]]),
        "good": torch.tensor([1, 2]),
    }
    given_values = tuple(values[it] for it in given.split())
    entries: Any = [SimpleNamespace(tb_frame=SimpleNamespace(f_locals={"lengths": values[local]}))]
    for call in (
        ApiCall(func=torch.mm, args=given_values),
        ApiCall(func=torch.mm, kwargs=dict(enumerate(given_values))),  # type: ignore[arg-type]
    ):
        assert (host_value._empty_sequence(call, entries, []) is not None) is is_found
        assert host_value._empty_sequence(call, [], []) is None


MINE = """
from torch.distributions import Distribution, LogNormal, Normal, constraints

class Mine(Distribution):
    arg_constraints = {"scale": constraints.positive}

    def __init__(self, loc, scale):
        self.loc, self.scale = loc, scale
        super().__init__(scale.shape)
"""


@pytest.mark.parametrize(
    ("kind", "api"),
    [
        ("Normal", "torch.distributions.Normal"),
        # It is made of a Normal, which refuses its scale.
        ("LogNormal", "torch.distributions.LogNormal"),
        ("Mine", None),
    ],
)
def test_only_a_distribution_of_torch_s_is_named_as_one(kind: str, api: str | None) -> None:
    found = cell(f"{MINE}\n{kind}(weights, weights)").shown
    assert (found.argument, found.offenders.first[0].value) == ("scale", -1.0)
    assert found.explanation.startswith(f"{kind} checks its parameters")
    assert found.op.api == api


def matrix(values: str) -> Outcome:
    made = "from torch.distributions import MultivariateNormal\nnan = float('nan')\n"
    return cell(f"{made}m = tensor({values})\nMultivariateNormal(torch.zeros(2), m)")


def test_of_a_condition_on_matrices_only_nan_has_a_place() -> None:
    found = matrix("[[1.0, 0.0], [nan, 1.0]]").shown
    assert found.headline == "m[1, 0] = nan is not a number; 1 of 4 values is NaN"
    assert matrix("[[1.0, 2.0], [2.0, 1.0]]").shown.offenders is None
    assert matrix("[[2.0, 1.0], [1.0, 2.0]]").report is None


def refused_by(*ops: Callable[[Tensor], object]) -> tuple[Any, Tensor]:
    """Return the answer on a call that runs some ops, and the tensor that they are given."""
    x = torch.zeros(3)
    call = ApiCall(func=lambda: [op(x) for op in ops])
    answer = host_value._ask_again(call)
    return answer and answer[0].offenders.first[0].value, x


def outside(x: Tensor) -> Tensor:
    return x[torch.tensor([9])]


@pytest.mark.parametrize(
    ("first", "is_found"),
    [
        (lambda x: x + 1, True),
        (lambda x: x.add_(1), False),  # it writes
        (torch.bernoulli, False),  # it draws
    ],
    ids=["computes", "writes", "draws"],
)
def test_a_call_is_run_again_up_to_what_leaves_a_trace(
    first: Callable[[Tensor], object], is_found: bool
) -> None:
    state = torch.get_rng_state()
    value, x = refused_by(first, outside)
    assert value == (9 if is_found else None)
    assert not x.any() and torch.equal(torch.get_rng_state(), state)
