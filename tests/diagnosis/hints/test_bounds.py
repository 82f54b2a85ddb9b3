"""Where a hint begins and ends: each bound of a rule with the step before and the step beyond."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cudalens.core.report import Report
from cudalens.simulate import Simulation
from tests import hint_evidence as given
from tests.hostcells import run_cell

GRAY = [0, 60, 120, 200] * 8


def of_cell(text: str, **options: bool) -> Report:
    """The report of a cell that fails on the rehearsal device."""
    return run_cell(text, {"torch": torch, "F": F, "d": torch.device("cuda")}, **options).shown


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("classes", "is_gray"), [(3, True), (4, False)])
def test_gray_levels_are_more_than_classes(classes: int, is_gray: bool) -> None:
    """Four levels are gray in a model of three classes; of four, they may be badly numbered."""
    evidence = given.labels(GRAY, classes, shape=(1, 1, len(GRAY)), name="mask")
    assert ("gray_mask" in given.rules_of(evidence)) is is_gray


@pytest.mark.parametrize(
    ("values", "fires"),
    [([-2.5, 0.5], True), ([-0.1, 1.0], True), ([-1e-7, 1.5], True), ([-1e-7, 1.0], False)],
)
def test_a_rounding_error_below_zero_is_no_logit(values: list[float], fires: bool) -> None:
    """Weights are called logits when one end is further from [0, 1] than rounding goes."""
    assert ("bad_weights" in given.rules_of(given.drawn(values))) is fires


@pytest.mark.parametrize(
    ("values", "op", "is_code"),
    [
        ([-0.5, 0.5], "aten::mul", False),
        ([-0.5, 0.5], "aten::addmm", True),
        ([-0.5, 1.1], "aten::mul", True),
        ([-1.1, 0.5], "aten::mul", True),
    ],
)
def test_small_weights_are_scores_where_a_layer_made_them(
    values: list[float], op: str, is_code: bool
) -> None:
    """Differences around 0 may be anything: softmax is named, and no code is shown."""
    (found,) = given.hints_of(given.drawn(values, provenance=(given.step(op, "p = f(x)"),)))
    assert (found.rule, bool(found.fix)) == ("bad_weights", is_code)


@pytest.mark.parametrize(
    ("values", "argument", "text"),
    [
        ([0.0, 255.0], "self", "the input runs from 0 to 255, like the bytes of an image"),
        ([0.0, 255.0], "target", "the target runs from 0 to 255, like the bytes of an image"),
        ([-2.0, 1.0], "target", "the target goes down to -2: this loss takes 0 … 1"),
        ([0.0, 3.0], "target", "the target has labels up to 3: more than two classes"),
    ],
)
def test_a_binary_loss_names_which_of_its_tensors_is_meant(
    values: list[float], argument: str, text: str
) -> None:
    """Bytes are named in input or target; marks below 0 and classes above 1 are told apart."""
    assert text in given.hints_of(given.bce(values, argument))[0].text


@pytest.mark.parametrize(("bad", "fires"), [([255], True), ([255, 156], True), ([255, 90], False)])
def test_both_marks_may_have_wrapped(bad: list[int], fires: bool) -> None:
    """-1 and -100 wrap to 255 and 156 in uint8, together too; another value is no mark."""
    evidence = given.labels([1, 2, *bad], 10, dtype="uint8")
    assert ("wrapped_in_uint8" in given.rules_of(evidence)) is fires


# --- numbers that are not finite -----------------------------------------------------------------


HALF = "x = torch.full((2,), 260.0, device=d, dtype=torch.float16); z = "


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("x.reciprocal()", "the divisor is 0 there"),
        ("1 / x", "the divisor is 0 there"),
        ("torch.div(x, x)", "x is 0 there, and x / x is 0 / 0, which gives nan and not 1"),
        ("torch.div(x, x * 1)", "both are 0 there, and 0 / 0 gives nan"),
        ("x.exp() / x.min()", "the divisor is 0 there"),
        ("(x - 1).log1p()", "log1p(-1) is not finite: log1p takes numbers above -1"),
        ("(x - 0.999).log1p()", None),
        ("x.log()", "log(0) is not finite: log takes numbers above 0"),
        ("x.rsqrt()", "rsqrt(0) is not finite: rsqrt takes numbers above 0"),
        ("(x - 1).sqrt()", "sqrt(-1) is not finite: sqrt takes numbers from 0 on"),
        ("x.clamp(min=0).sqrt()", None),
        ("(x - 1).exp()", None),
        # On a CPU nothing overflows, so that no fix can be tried.
        (f"{HALF}x * x", "at most 65504"),
        (f"{HALF}torch.square(x)", "at most 65504"),
        (f"{HALF}x @ x", "at most 65504"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_bound(
    sim: Simulation, line: str, text: str | None
) -> None:
    """The input and what the op needs, in words; one step inside, nothing is found."""
    code = f"x = torch.tensor([0.0, 2.0], device=d)\n{line}"
    report = run_cell(code, {"torch": torch, "d": torch.device("cuda")}, nan=True).report
    if text is None:
        assert report is None
        return
    assert report is not None
    (found,) = report.hints
    assert text in found.text
    assert found.fix is None


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("loss = x.sqrt().sum()", "the gradient of this op is infinite at 0"),
        ("loss = (x ** 0.5).sum()", "the gradient of this op is infinite at 0"),
        ("loss = torch.where(x > 0, x.sqrt(), x).sum()", "where() hides the value in forward"),
        ("loss = torch.hypot(x, x).sum()", None),
    ],
)
def test_an_infinite_slope_is_named_where_the_line_shows_it(
    sim: Simulation, line: str, text: str | None
) -> None:
    """A root or power on the forward line has its hint in backward, another op has none."""
    report = of_cell(
        f"x = torch.zeros(2, device=d, requires_grad=True)\n{line}\nloss.backward()", nan=True
    )
    assert report.phase == "backward"
    found = [item.text for item in report.hints if item.rule == "slope_at_zero"]
    assert (found == []) if text is None else (len(found) == 1 and text in found[0])


# --- the step beside -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("high", "low", "is_pair"),
    [
        ((1 << 24) - 1, 7, True),
        (1 << 24, 7, False),
        (1 << 20, (1 << 24) - 1, True),
        (1 << 20, 1 << 24, False),
        (-(1 << 20), 7, False),
    ],
)
def test_two_small_numbers_in_one_are_told(high: int, low: int, is_pair: bool) -> None:
    """Ids of half the width that were read as whole ones; large halves are mere bits."""
    value = (high << 32) + low
    (found, *_) = given.hints_of(given.labels([0, value], 10))
    assert found.rule == "garbage_ids"
    assert (f"as two int32 numbers it is {low} and {high}" in found.text) is is_pair


@pytest.mark.parametrize(("dtype", "name"), [("half", "float16"), ("double", "float64")])
@pytest.mark.parametrize("bias", ["", ", torch.zeros(4, device=d)"])
def test_both_spellings_of_a_dtype_are_read(
    sim: Simulation, dtype: str, name: str, bias: str
) -> None:
    """With a bias and without, torch's words differ: ``Half`` and ``c10::Half``."""
    text = f"x = torch.zeros(2, 3, dtype=torch.{dtype}, device=d)\nw = torch.zeros(4, 3, device=d)"
    report = of_cell(f"{text}\nF.linear(x, w{bias})\n", fast=False)
    assert report.headline == f"input is {name}, the weight is float32"


@pytest.mark.parametrize(("rows", "columns", "says"), [(4, 2, True), (5, 2, False), (4, 1, False)])
def test_another_dimension_is_named_where_it_has_just_so_many_places(
    sim: Simulation, rows: int, columns: int, says: bool
) -> None:
    """With one number a row, as many rows as numbers are chance."""
    text = f"x = torch.zeros({rows}, 3, device=d)\ni = torch.full(({rows}, {columns}), 3, device=d)"
    (found,) = of_cell(f"{text}\ni[0, 0] = 0\nx.gather(1, i)").hints
    assert ("dimension 0, which has 4, would hold them" in found.text) is says
