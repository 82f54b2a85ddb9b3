"""Causes of the first NaN or infinity, by the facts alone; each with a neighbour that has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cudalens.core.report import Evidence
from cudalens.core.report_types import (
    Offender,
    Offenders,
    SourceSpan,
    TensorSummary,
    Violation,
)
from cudalens.diagnosis.hints import nonfinite
from tests.builders import fact
from tests.hint_evidence import syntax_of, with_offenders


def made_by(op: str, *tensors: Any, value: Any = "nan", **facts: Any) -> Evidence:
    """Return the evidence of an op whose inputs are told by name."""
    inputs = facts.pop("inputs", {})
    violation = {
        "dtype": facts.pop("dtype", "float32"),
        "is_masked_row": facts.pop("is_masked_row", False),
        "overwritten": facts.pop("overwritten", ()),
    }
    return Evidence(
        violation=Violation(
            headline="",
            op=op,
            offenders=Offenders(count=1, total=4, first=(Offender(position=(1,), value=value),)),
            inputs=tuple((key, str(number)) for key, number in inputs.items()),
            is_nonfinite=True,
            **violation,
        ),
        tensors=tensors,
        source=SourceSpan(cell=1, line=1, text=(text := facts.pop("line", ""))),
        call=syntax_of(facts.pop("call", text)),
        **facts,
    )


def text_of(hint: Any) -> str | None:
    return None if hint is None else hint.text


# --- domains and poles ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "outside", "inside"),
    [
        ("torch.log", 0.0, 1e-9),
        ("torch.Tensor.log_", -1.0, 1e-9),
        ("torch.log1p", -1.0, -0.999),
        ("torch.sqrt", -0.5, 0.0),
        ("torch.rsqrt", 0.0, 1e-9),
        ("torch.acosh", 0.5, 1.0),
        ("torch.atanh", 1.0, 0.999),
        ("torch.acos", 1.5, 1.0),
        ("torch.asin", -1.5, -1.0),
    ],
)
def test_a_number_outside_the_domain(op: str, outside: float, inside: float) -> None:
    text = text_of(nonfinite.outside_domain(made_by(op, inputs={"self": outside})))
    stem = op.rpartition(".")[2].strip("_")
    assert text is not None
    assert text.startswith(f"{stem}({outside:g}) is not finite: {stem} takes numbers ")
    assert nonfinite.outside_domain(made_by(op, inputs={"self": inside})) is None
    assert nonfinite.outside_domain(made_by(op)) is None
    assert nonfinite.outside_domain(made_by(op, inputs={"self": outside}, phase="backward")) is None


def test_a_number_that_rounding_took_beyond_the_end() -> None:
    def said(value: float) -> str:
        return (
            text_of(nonfinite.outside_domain(made_by("torch.acos", inputs={"self": value}))) or ""
        )

    assert said(1.000005).endswith(", and rounding may take one beyond: clamp it")
    assert said(1.00002).endswith("numbers from -1 to 1")
    assert said(-1.000005).endswith("clamp it")
    log = nonfinite.outside_domain(made_by("torch.log", inputs={"self": -1e-7}))
    assert "clamp" not in (text_of(log) or "")


def test_the_ends_of_the_input_are_said_where_it_has_a_name() -> None:
    def said(kind: str, name: str | None) -> str:
        x = fact("self", kind, name, summary=TensorSummary(min=-2.0, max=3.0))
        return text_of(nonfinite.outside_domain(made_by("log", x, inputs={"self": -2.0}))) or ""

    assert said("float32[2]", "x").endswith("numbers above 0. x runs from -2.0 to 3.0")
    assert said("float32[1]", "x").endswith("numbers above 0")
    assert said("float32[2]", None).endswith("numbers above 0")


@pytest.mark.parametrize(
    ("base", "exponent", "start"),
    [
        (-2.0, 0.5, "(-2) ** 0.5 is not real: the base of a fraction must be at least 0"),
        (0.0, -1.0, "0 ** -1 divides by 0"),
        (-2.0, 3.0, None),
        (2.0, 0.5, None),
        (0.0, 0.5, None),
        (0.0, 0.0, None),
        (-2.0, float("inf"), None),
    ],
)
def test_powers(base: float, exponent: float, start: str | None) -> None:
    found = nonfinite.outside_domain(
        made_by("torch.pow", inputs={"self": base, "exponent": exponent})
    )
    assert (text_of(found) or "").startswith(start or "") and (found is None) is (start is None)


def divided(above: Any, below: Any, *tensors: Any, value: Any = "nan", **facts: Any) -> str | None:
    inputs = {"self": above, "other": below}
    evidence = made_by("torch.Tensor.div", *tensors, inputs=inputs, value=value, **facts)
    return text_of(nonfinite.outside_domain(evidence))


def test_a_division_by_zero() -> None:
    assert divided(1.0, 0.0, value="inf") == "the divisor is 0 there: dividing by 0 gives inf"
    assert divided(0.0, 0.0) == "both are 0 there, and 0 / 0 gives nan"
    assert divided(1.0, 2.0) is None
    assert divided("nan", 0.0) == "both are 0 there, and 0 / 0 gives nan"


def test_a_number_divided_by_a_tensor() -> None:
    for op in ("torch.Tensor.rdiv", "torch.Tensor.__rtruediv__"):
        evidence = made_by(op, inputs={"self": 0.0, "other": 1.0}, value="inf")
        assert text_of(nonfinite.outside_domain(evidence)) == (
            "the divisor is 0 there: dividing by 0 gives inf"
        )


def test_what_is_divided_by_itself() -> None:
    one, two = fact("self", "float32[2]", "x"), fact("other", "float32[2]", "x")
    assert divided(0.0, 0.0, one, two) == (
        "x is 0 there, and x / x is 0 / 0, which gives nan and not 1"
    )
    other = fact("other", "float32[2]", "y")
    assert divided(0.0, 0.0, one, other) == "both are 0 there, and 0 / 0 gives nan"


def test_a_vector_divided_by_its_norm() -> None:
    text = divided(0.0, 0.0, line="v / v.norm()", call="v / v.norm()")
    assert text == "both are 0 there, and 0 / 0 gives nan: F.normalize keeps the divisor above 0"


def test_where_hides_the_value_but_not_its_gradient() -> None:
    def said(line: str, *, requires_grad: bool = True, call: str = "x.log()") -> bool:
        x = fact("self", "float32[1]", "x", requires_grad=requires_grad)
        other = fact("other", "float32[1]", "w")
        evidence = made_by("log", x, other, inputs={"self": 0.0}, line=line, call=call)
        return "where() hides the value" in (text_of(nonfinite.outside_domain(evidence)) or "")

    assert said("torch.where(x > 0, x.log(), 0)")
    assert said("y = torch.where(x > 0, 2 * x.log(), 0)")
    assert not said("torch.where(x > 0, x.log(), 0)", requires_grad=False)
    assert not said("y = x.log()")
    assert not said("torch.where(x > 0, x.sqrt(), 0) + x.log()")


# --- softmax, losses, deviations ------------------------------------------------------------------


def test_a_row_that_is_masked_everywhere() -> None:
    text = text_of(nonfinite.all_masked(made_by("softmax", is_masked_row=True)))
    assert text == (
        "every row with nan is -inf everywhere in the input, and softmax divides 0 by 0 there. "
        "Where -inf is a mask, leave at least one position of each row unmasked, or mask with "
        "torch.finfo(dtype).min"
    )
    assert nonfinite.all_masked(made_by("softmax")) is None


def test_a_row_with_an_infinity() -> None:
    def said(op: str = "torch.softmax", inf: int = 1, **facts: Any) -> str | None:
        x = fact("self", "float32[2]", "x", summary=TensorSummary(inf=inf))
        return text_of(nonfinite.row_with_infinity(made_by(op, x, **facts)))

    assert said() == "x contains inf, and softmax of a row with inf is nan"
    assert said("torch.log_softmax") is not None
    assert said("torch.exp") is None
    assert said(inf=0) is None
    assert said(is_masked_row=True) is None
    assert said(phase="backward") is None
    unnamed = fact("input", "float32[2]", summary=TensorSummary(inf=1))
    masked = made_by("softmax", unnamed, inputs={"self": "-inf"})
    assert text_of(nonfinite.row_with_infinity(masked)) == (
        "the input contains inf, and softmax of a row with inf is nan"
    )
    places = tuple(
        Offender(position=(at,), value="nan", inputs=(("self", "-inf"),)) for at in (0, 1)
    )
    for count, is_said in ((2, False), (1, True)):
        first = (*places[:count], Offender(position=(2,), value="nan"))[:2]
        of_a_mask = with_offenders(masked, first=first)
        assert (nonfinite.row_with_infinity(of_a_mask) is not None) is is_said


def test_a_target_of_kl_div_below_zero() -> None:
    def said(low: float, high: float, op: str = "torch.nn.functional.kl_div") -> str | None:
        t = fact("target", "float32[2]", "t", summary=TensorSummary(min=low, max=high))
        return text_of(nonfinite.negative_target(made_by(op, t)))

    assert said(-0.5, 1.0) == (
        "t runs from -0.5 to 1, and kl_div takes the logarithm of its target, nan below 0"
    )
    assert (said(-2.0, 0.0) or "").endswith("with log_target=True the target is log-probabilities")
    assert said(0.0, 1.0) is None
    assert said(-0.5, 1.0, "torch.mul") is None
    ends: Any
    for ends in ((-0.5, "inf"), ("-inf", 1.0), (None, None)):
        assert said(*ends) is None
    t = fact("target", "float32[2]", summary=TensorSummary(min=-0.5, max=1.0))
    kl_div = "torch.nn.functional.kl_div"
    unnamed = nonfinite.negative_target(made_by(kl_div, t))
    assert (text_of(unnamed) or "").startswith("the target runs from -0.5 to 1")
    assert nonfinite.negative_target(made_by(kl_div, t, phase="backward")) is None


def test_a_mean_of_nothing_and_a_deviation_of_one() -> None:
    def said(op: str, kind: str, value: Any = "nan") -> str | None:
        return text_of(nonfinite.of_too_few(made_by(op, fact("self", kind, "x"), value=value)))

    assert said("torch.mean", "float32[0,3]") == (
        "the shape is [0, 3]: the mean of no element is 0 / 0. Leave this case out"
    )
    assert said("torch.mean", "float32[1,3]") is None
    assert "unbiased deviation of a single value" in (said("torch.std", "float32[1,3]") or "")
    assert "unbiased deviation of a single value" in (said("torch.var", "float32[]") or "")
    assert said("torch.std", "float32[2,3]") is None
    assert said("torch.std", "float32[1,3]", "inf") is None
    assert said("torch.sum", "float32[0]") is None
    assert nonfinite.of_too_few(made_by("torch.mean")) is None
    x = fact("self", "float32[1,3]", "x", summary=TensorSummary(inf=1))
    assert nonfinite.of_too_few(made_by("torch.std", x)) is None


def test_labels_that_are_all_ignored() -> None:
    def said(low: int, high: int, op: str = "torch.nn.functional.cross_entropy") -> str | None:
        y = fact("target", "int64[2,2]", "y", summary=TensorSummary(min=low, max=high))
        return text_of(nonfinite.all_labels_ignored(made_by(op, y, scalars=scalars)))

    scalars: tuple[tuple[str, str], ...] = ()
    assert said(-100, -100) == (
        "all 4 labels are -100 (ignore_index): the mean over no labels is 0 / 0. Skip batches "
        "without labels, or use reduction='sum' divided by max(count, 1)"
    )
    assert said(-100, -100, "torch.nn.functional.nll_loss") == said(-100, -100)
    assert said(-100, 2) is None
    assert said(-100, -100, "torch.mean") is None
    scalars = (("ignore_index", "255"),)
    assert (said(255, 255) or "").startswith("all 4 labels are 255 (ignore_index)")
    assert said(-100, -100) is None


# --- slopes and overflow --------------------------------------------------------------------------


def slope(op: str, **inputs: float) -> str | None:
    evidence = made_by(op, inputs=inputs, phase="backward")
    return text_of(nonfinite.slope_at_zero(evidence))


def test_an_infinite_slope() -> None:
    assert slope("SqrtBackward0", result=0.0, gradient=1.0) == (
        "the gradient of sqrt is infinite at 0: keep its result away from it"
    )
    assert slope("AcosBackward0", self=-1.0, gradient=1.0) == (
        "the gradient of acos is infinite at -1: keep its input away from it"
    )
    assert slope("SqrtBackward0", result=0.1, gradient=1.0) is None
    assert slope("PowBackward0", self=0.0, exponent=0.5, gradient=1.0) is not None
    assert slope("PowBackward0", self=0.0, exponent=1.0, gradient=1.0) is None
    assert slope("MulBackward0", self=0.0, gradient=1.0) is None


def test_a_gradient_of_zero_times_an_infinite_slope() -> None:
    masked = slope("SqrtBackward0", result=0.0, gradient=0.0)
    assert masked == (
        "the gradient of sqrt is infinite at 0, and 0 times it is nan: a mask or where() behind it "
        "does not stop that. Replace the bad inputs before the op"
    )


def test_no_slope_in_forward() -> None:
    assert nonfinite.slope_at_zero(made_by("SqrtBackward0", inputs={"result": 0.0})) is None


def test_a_result_beyond_the_largest_number_of_its_type() -> None:
    def said(op: str, value: Any = "inf", **facts: Any) -> str | None:
        return text_of(nonfinite.overflow(made_by(op, value=value, **facts)))

    assert said("torch.matmul") == "the largest float32 is 3.4e+38: the result overflowed"
    assert said("torch.matmul", "-inf") is not None
    assert said("torch.matmul", "nan") is None
    assert (said("torch.matmul", dtype="float16") or "").endswith(
        "the result overflowed. Compute this op in float32, or autocast to bfloat16"
    )
    assert (said("torch.matmul", dtype="bfloat16") or "").endswith("the result overflowed")
    assert said("torch.matmul", dtype="complex64") is None
    assert said("torch.exp", inputs={"self": 100.0}) == (
        "exp(100) is beyond the range of float32. torch.softmax, log_softmax and logsumexp take "
        "such numbers"
    )
    assert said("torch.exp") == said("torch.matmul")  # of what is not known
    assert said("torch.log", inputs={"self": 0.0}) is None
    assert said("torch.unknown_function") is None
    assert said("torch.nn.functional.mse_loss") is not None


def test_a_division_that_overflowed_or_had_a_divisor_of_zero() -> None:
    def said(below: Any, **facts: Any) -> str | None:
        evidence = made_by(
            "torch.Tensor.div", value="inf", inputs={"self": 1e30, "other": below}, **facts
        )
        return text_of(nonfinite.overflow(evidence))

    assert said(1e-30) is not None
    assert said(0.0) is None
    assert said(1e-30, overwritten=("self",)) is None


@pytest.mark.parametrize(
    ("node", "inputs", "is_said"),
    [
        ("MmBackward0", {}, True),
        ("MseLossBackward0", {}, True),
        ("LogBackward0", {"self": 2.0}, False),
        # Of what divides, the divisor must be known, and no 0.
        ("DivBackward0", {"self": 0.0, "other": 2.0}, True),
        ("DivBackward0", {"self": 2.0, "other": 0.0}, False),
        ("DivBackward0", {"self": 2.0}, False),
        ("ReciprocalBackward0", {"self": 2.0}, True),
        ("ReciprocalBackward0", {"self": 0.0}, False),
        ("PowBackward0", {"self": 2.0, "exponent": 2.0}, True),
        ("PowBackward0", {"self": 0.0, "exponent": 2.0}, False),
    ],
)
def test_a_gradient_that_overflowed(node: str, inputs: dict[str, float], is_said: bool) -> None:
    hint = nonfinite.overflow(made_by(node, value="inf", inputs=inputs, phase="backward"))
    assert text_of(hint) == (
        "the largest float32 is 3.4e+38: the result overflowed" if is_said else None
    )


def test_the_name_of_what_made_it() -> None:
    read = made_by("torch.log")
    assert read.violation is not None
    for change in ({"argument": "self"}, {"is_nonfinite": False}):
        violation = replace(read.violation, **change)  # type: ignore[arg-type]
        assert nonfinite.made(replace(read, violation=violation)) == ""
    assert nonfinite.made(made_by("torch.Tensor.div_")) == "div"
    assert nonfinite.made(made_by("torch.true_divide")) == "div"
    assert nonfinite.made(made_by("torch.Tensor.__rtruediv__")) == "rdiv"
    assert nonfinite.made(Evidence()) == ""
    finding = made_by("torch.log")
    assert nonfinite.input_of(finding, "self") != nonfinite.input_of(finding, "self")
    complex_number = made_by("torch.log", inputs={"self": "(1+2j)"})
    assert nonfinite.input_of(complex_number, "self") != nonfinite.input_of(complex_number, "self")


def test_a_divisor_of_which_no_value_is_known() -> None:
    evidence = made_by("torch.Tensor.div", inputs={"self": 0.0})
    assert text_of(nonfinite.outside_domain(evidence)) == (
        "the divisor is 0 there: dividing by 0 gives inf"
    )
    assert nonfinite.outside_domain(made_by("torch.div", inputs={"self": 1.0})) is None
