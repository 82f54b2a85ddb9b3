"""Readings of numbers that are no probabilities, and of weights to draw from."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from cudalens.core.evidence_types import Marks, NanCause, NanHolder
from cudalens.core.graph_types import DIVIDES, FIRST_NAN, WRITES
from cudalens.core.report_types import LineRef, Offender, Offenders, SeenBefore
from cudalens.diagnosis.hints.probabilities import (
    bad_weights,
    image_not_divided,
    labels_as_binary_target,
    nan_before,
    not_probabilities,
    rounded_out_of_interval,
    scores_as_probabilities,
)
from tests.hint_evidence import (
    EXP,
    LINEAR,
    MASKED,
    SOFTMAX,
    Cause,
    bce,
    check_cause,
    drawn,
    empty_rows,
    numbers,
    step,
    tensor,
    with_offenders,
)

NAN = math.nan
CAUSES: dict[str, Cause] = {
    "bce_logits": Cause(
        bce([-2.5, 0.5, 3.0], provenance=(step("torch.nn.functional.linear", "p = f(x)"),)),
        rule="not_probabilities",
        fix="F.binary_cross_entropy_with_logits(p, t)",
        says=(
            "-2.5 to 3",
            "the scores of a layer in line 4",
        ),
    ),
    "bce_convolution": Cause(
        bce(
            [-0.5, 0.5],
            call="crit(p, t)",
            module_type="BCELoss",
            provenance=(step("torch.conv2d", "p = f(x)"),),
        ),
        rule="not_probabilities",
        fix="crit(torch.sigmoid(p), t)",
        says=(
            "the scores of a layer in line 4",
            "BCEWithLogitsLoss instead of BCELoss",
        ),
    ),
    "bce_unknown": Cause(
        bce([-2.5, 0.5, 3.0]),
        rule="not_probabilities",
        says=(
            "-2.5 to 3",
            "If they are scores",
        ),
    ),
    "bce_rounding": Cause(
        bce([0.25, 1.0000001]),
        rule="rounded_out_of_interval",
        fix="F.binary_cross_entropy(p.clamp(0, 1), t)",
        says=("1.0000001",),
    ),
    "bce_mask_255": Cause(
        bce([0.0, 255.0], "target"),
        rule="image_not_divided",
        fix="F.binary_cross_entropy(p, t / 255)",
        says=("t runs from 0 to 255, like the bytes of an image",),
    ),
    "bce_labels": Cause(
        bce([-1.0, 1.0], "target"),
        rule="labels_as_binary_target",
        fix="F.binary_cross_entropy(p, (t + 1) / 2)",
        says=("-1 to 1",),
    ),
    "bce_nan": Cause(bce([0.5, math.nan]), rule="nan_before", says=("1 of 2",)),
    "bce_nan_made": Cause(
        bce([0.5, math.nan], provenance=(step("torch.log", "p = x.log()", FIRST_NAN),)),
        rule="nan_before",
        says=("Line 4 made them: p = x.log()",),
    ),
    "drawn_logits": Cause(
        drawn([-2.5, 0.5, 3.0]),
        rule="bad_weights",
        says=(
            "-2.5 to 3",
            "none may be below 0",
        ),
    ),
    "distribution_of_scores": Cause(
        numbers(
            "",
            "probs",
            [-2.5, 0.5, 3.5],
            high=None,
            call="Categorical(p)",
            api="torch.distributions.Categorical",
            provenance=(LINEAR,),
        ),
        rule="scores_as_probabilities",
        says=(
            "logits=p in place of probs",
            "-2.5 to 3.5",
            "the scores of a layer in line 3",
        ),
    ),
    "distribution_of_numbers": Cause(
        numbers(
            "",
            "probs",
            [-2.5, 0.5, 3.5],
            high=None,
            call="Categorical(p)",
            api="torch.distributions.Categorical",
        ),
        rule="scores_as_probabilities",
        says=("If these are scores, Categorical takes them as logits",),
    ),
    "drawn_nan": Cause(
        drawn([math.nan, 0.5], provenance=(SOFTMAX, MASKED)),
        rule="nan_before",
        says=("1 of 2 values is NaN already",),
    ),
    "drawn_inf": Cause(
        drawn([math.inf, 0.5], dtype="float16", provenance=(EXP,)),
        rule="bad_weights",
        says=("made by exp in line 3 in float16",),
    ),
    "drawn_nothing": Cause(
        replace(empty_rows(), provenance=(SOFTMAX, MASKED)),
        rule="bad_weights",
        says=(
            "1 of 4",
            "masked_fill in line 3",
        ),
    ),
}
NEIGHBOURS: dict[str, Cause] = {
    "convolution before a pool": Cause(
        bce(
            [-0.5, 0.5],
            provenance=(step("torch.max_pool2d", "p = g(h)"), step("torch.conv2d", "h = f(x)")),
        ),
        rule="not_probabilities",
        says=("probability is at least 0",),
    ),
    "2 % above 1": Cause(bce([0.5, 1.02]), rule="not_probabilities"),
    "beyond bytes": Cause(bce([0.0, 300.0]), rule="not_probabilities"),
    "both": Cause(drawn([0.5, math.inf, math.nan]), rule="nan_before"),
}
"""One step away from another cause."""


@pytest.mark.parametrize("cause", (rows := {**CAUSES, **NEIGHBOURS}).values(), ids=rows)
def test_the_cause_and_no_other_is_said(cause: Cause) -> None:
    check_cause(cause)


@pytest.mark.parametrize(("last", "is_told"), [(0.5, True), (math.nan, False)])
def test_an_infinite_weight_beside_a_nan_is_not_the_whole_story(last: float, is_told: bool) -> None:
    hint = bad_weights(drawn([math.inf, last], dtype="float16", provenance=(EXP,)))
    assert (hint is not None) is is_told


@pytest.mark.parametrize(
    ("op", "has_watch", "is_named"),
    [("torch.sqrt", False, True), ("torch.sqrt", True, False), ("torch.from_numpy", False, False)],
)
def test_the_watch_for_nan_is_named_where_it_could_find_more(
    op: str, has_watch: bool, is_named: bool
) -> None:
    made = step(op, "p = g(x)")
    hint = nan_before(bce([0.5, NAN], provenance=(made,), has_nan_watch=has_watch))
    assert hint is not None
    assert ("--nan stops at the first one" in hint.text) is is_named


def test_a_line_that_only_gives_the_numbers_of_python_has_not_made_a_nan() -> None:
    for op, is_made in (("torch.log", True), ("torch.tensor", False)):
        made = step(op, "p = g(x)", FIRST_NAN)
        hint = nan_before(bce([0.5, math.nan], provenance=(made,)))
        assert hint is not None
        assert ("made them" in hint.text) is is_made


@pytest.mark.parametrize(
    ("values", "name", "is_told"),
    [
        ([-2.5, 0.5, 3.5], "p", True),
        ([-0.02, 0.5, 3.5], "p", True),
        ([-0.01, 0.5, 3.5], "p", False),  # as far as rounding goes
        ([-2.0, 0.5, 3.5], "p", False),  # a mark, as -1 is
        ([-2.0, -2.5, 3.5], "p", True),
        ([-2.5, *8 * [0.5]], "p", True),
        ([-2.5, *9 * [0.5]], "p", False),  # a stray value
        ([-0.5, 0.75, 0.8], "p", True),
        ([-0.5, 0.75, 0.75], "p", False),  # of a row that sums to 1
        ([-2.5, 0.5, 3.5], "p + q", True),
        ([-2.5, 0.5, 3.5], "p - q", False),  # errors have both signs
        ([-2.5, 0.5, math.nan], "p", False),
        ([-2.5, 0.5, math.inf], "p", False),
    ],
)
def test_which_numbers_of_a_distribution_may_be_scores(
    values: list[float], name: str, is_told: bool
) -> None:
    api = "torch.distributions.Categorical"
    given = numbers("", "probs", values, name=name, high=None, api=api)
    assert (scores_as_probabilities(given) is not None) is is_told


@pytest.mark.parametrize(("shape", "is_told"), [((3, 2), False), ((2, 3), True)])
def test_rows_that_sum_to_1_are_no_scores(shape: tuple[int, int], is_told: bool) -> None:
    values, api = [-0.5, 1.5, 0.5, 0.5, 0.5, 0.5], "torch.distributions.Categorical"
    given = numbers("", "probs", values, name=None, shape=shape, high=None, api=api)
    assert (scores_as_probabilities(given) is not None) is is_told
    made = scores_as_probabilities(replace(given, provenance=(LINEAR,)))
    assert made is None or made.text.endswith("pass logits=them in place of probs")


def test_only_the_probabilities_of_a_distribution_may_be_scores() -> None:
    values, api = [-2.5, 0.5, 3.5], "torch.distributions.Categorical"
    assert scores_as_probabilities(numbers("", "loc", values, high=None, api=api)) is None
    drawn_from = numbers("aten::multinomial", "probs", values, high=None, api="torch.multinomial")
    assert scores_as_probabilities(drawn_from) is None


def test_the_line_that_numbers_come_from_is_the_oldest() -> None:
    """The way begins with the newest step."""
    way = (step("torch.Tensor.to", "p = q.to(device)"), step("torch.tensor", "q = f(x)", line=2))
    hint = nan_before(bce([0.5, math.nan], provenance=way))
    assert hint is not None
    assert hint.text.endswith(". Line 2 made it from numbers that contained them")


def test_what_read_a_nan_is_the_oldest_step() -> None:
    bad = Offenders(count=1, total=4, first=(Offender(position=(3,), value="nan"),))
    way = (step("torch.Tensor.mul", "p = q * 2"), step("torch.relu", "q = relu(w)", line=2))
    evidence = replace(
        bce([0.5, math.nan], provenance=way), nan_holder=NanHolder(name="w", nan=bad)
    )
    hint = nan_before(evidence)
    assert hint is not None
    assert hint.text.endswith("relu in line 2 read them from w (1 of 4 values, the first at [3])")


@pytest.mark.parametrize(("last", "is_told"), [(2.0, True), (math.inf, False), (-math.inf, False)])
def test_an_infinity_among_the_numbers_is_no_score(last: float, is_told: bool) -> None:
    """What made it is the question, and the ends of the others are not those of the argument."""
    hint = not_probabilities(bce([3.0, -2.0, last]))
    assert (hint is not None) is is_told


@pytest.mark.parametrize(("last", "is_told"), [(255.0, True), (math.inf, False)])
def test_an_infinity_among_the_numbers_is_no_byte(last: float, is_told: bool) -> None:
    hint = image_not_divided(bce([0.0, 255.0, last], "target"))
    assert (hint is not None) is is_told


def test_bytes_are_whole_and_may_be_drawn_from() -> None:
    assert image_not_divided(bce([0.0, 1.5, 255.0], "target")) is None
    hint = image_not_divided(numbers("aten::bernoulli", "self", [0, 255], call="p.bernoulli()"))
    assert hint is not None and hint.fix == "(p / 255).bernoulli()"


@pytest.mark.parametrize(("high", "is_said"), [(2.0, False), (2.5, True), (100.5, False)])
def test_percentages_go_to_100(high: float, is_said: bool) -> None:
    hint = not_probabilities(bce([0.5, high]))
    assert hint is not None
    assert hint.text.endswith(". Divide percentages by 100") is is_said


@pytest.mark.parametrize(
    ("high", "end"),
    [
        (100.0, "runs from 0 to 100. If these are percentages, divide by 100"),
        (101.0, "runs from 0 to 101, like the bytes of an image: divide by 255"),
        (255.0, "runs from 0 to 255, like the bytes of an image: divide by 255"),
        (99.0, None),
        (256.0, None),
        (200.5, None),
    ],
)
def test_whole_numbers_that_are_to_be_divided(high: float, end: str | None) -> None:
    hint = image_not_divided(bce([0.0, high], "target"))
    assert (hint.text.removeprefix("t ") if hint else None) == end
    assert (hint.fix if hint else None) == (
        "F.binary_cross_entropy(p, t / 255)" if end and "image" in end else None
    )


def holder(*written: int, is_read: bool = False, total: int = 4) -> NanHolder:
    bad = Offenders(count=1, total=total, first=(Offender(position=(3,), value="nan"),))
    lines = tuple(LineRef(line=at, text="w[0] = nan") for at in written)
    return NanHolder(name="w", nan=bad, written=lines, is_read=is_read)


@pytest.mark.parametrize(
    ("held", "end"),
    [
        (holder(), ". w contains NaN (1 of 4 values, the first at [3]). {nan}"),
        (holder(total=1), ". w contains NaN (1 of 1 values). {nan}"),
        (holder(7), ". w contains NaN (1 of 4 values, the first at [3])"),
        (holder(9, 7), ". Lines 7, 9 wrote NaN to w"),
    ],
)
def test_a_parameter_that_holds_nan(held: NanHolder, end: str) -> None:
    """Where a line wrote it as a number, ``--nan`` would find none."""
    way = (step("torch.nn.functional.linear", "p = f(x)"),)
    hint = nan_before(replace(bce([0.5, math.nan], provenance=way), nan_holder=held))
    assert hint is not None
    assert hint.text.endswith(end.format(nan="%%cudacheck --nan stops at the first one"))


def test_an_error_that_rounding_made_has_a_size() -> None:
    hint = rounded_out_of_interval(bce([0.5, 1.0000001, -0.001]))
    assert hint is not None
    assert "outside 0 … 1 by only 1.0e-03 (-0.001), as rounding in float32" in hint.text
    half = rounded_out_of_interval(bce([0.5, 1.001], dtype="float16"))
    assert half is not None and half.text.endswith(
        "outside 0 … 1 by only 1.0e-03 (1.001), as rounding in float16 can make it"
    )
    evidence = bce([0.5, 1.0000001])
    assert rounded_out_of_interval(with_offenders(evidence, first=())) is None


@pytest.mark.parametrize(
    ("dtype", "is_said"), [("float16", True), ("bfloat16", True), ("float32", False)]
)
def test_weights_that_may_have_become_zero(dtype: str, is_said: bool) -> None:
    evidence = empty_rows()
    weights = replace(evidence.tensors[0], dtype=dtype)
    hint = bad_weights(replace(evidence, tensors=(weights,)))
    assert hint is not None
    assert (f"The weights may be too small for {dtype}." in hint.text) is is_said
    assert "may have left no candidate" not in hint.text  # no mask is known
    (zero,) = evidence.violation.offenders.first if evidence.violation else ()
    other = with_offenders(evidence, first=(zero, Offender(position=(1,), value="nan")))
    assert bad_weights(other) is None


def test_the_last_mask_may_have_left_no_weight() -> None:
    way = (step("torch.Tensor.masked_fill_", "p.masked_fill_(far, 0)", line=5), MASKED)
    hint = bad_weights(replace(empty_rows(), provenance=way))
    assert hint is not None
    assert "sum to 0. masked_fill_ in line 5 may have left no candidate. Keep" in hint.text


def test_what_a_weight_leaves_out_is_no_label() -> None:
    evidence = bce([-1.0, 1.0], "target")
    assert labels_as_binary_target(evidence) is not None
    assert labels_as_binary_target(replace(evidence, marks=Marks(zero_at="w"))) is None


@pytest.mark.parametrize(
    ("ends", "is_told"), [((None, None), False), ((0.0, 1.0), False), ((0.5, 0.5), True)]
)
def test_where_earlier_calls_had_numbers_of_all_kinds_the_scale_is_right(
    ends: tuple[float | None, float | None], is_told: bool
) -> None:
    seen = SeenBefore(calls=1, min=ends[0], max=ends[1])
    hint = not_probabilities(bce([-2.5, 0.5, 3.0], seen_before=seen))
    assert (hint is not None) is is_told


@pytest.mark.parametrize(("op", "is_told"), [("exp", True), ("expm1", True), ("div", False)])
def test_an_exponential_makes_infinite_weights(op: str, is_told: bool) -> None:
    way = (step(f"torch.Tensor.{op}", f"p = z.{op}()"),)
    hint = bad_weights(drawn([math.inf, 0.5], provenance=way))
    assert (hint is not None) is is_told


@pytest.mark.parametrize(
    ("values", "start"),
    [([0.5, NAN], "1 of 2 values is NaN already"), ([NAN, NAN], "2 of 2 values are NaN already")],
)
def test_values_that_were_nan_before(values: list[float], start: str) -> None:
    hint = nan_before(bce(values))
    assert hint is not None and hint.text.startswith(start)


@pytest.mark.parametrize(
    ("op", "name", "end"),
    [
        ("torch.relu", "p", "made by relu in line 4: probabilities end with a sigmoid"),
        ("torch.Tensor.sub_", "p", "as sub_ in line 4 gives it. It has to be 0 … 1"),
        ("torch.sub", "p", "as sub in line 4 gives it. It has to be 0 … 1"),
        (None, "p - q", "as a difference gives it. It has to be 0 … 1"),
        (None, "p + q", "which no sigmoid gives. If they are scores, "
         "binary_cross_entropy_with_logits takes them as they are"),
    ],
)  # fmt: skip
def test_where_numbers_that_are_no_probabilities_come_from(
    op: str | None, name: str, end: str
) -> None:
    way = () if op is None else (step(op, "p = f(x)"),)
    hint = not_probabilities(bce([-2.5, 0.5, 3.0], name=name, provenance=way))
    assert hint is not None and hint.text.endswith(f" runs from -2.5 to 3, {end}")


def test_scores_that_are_drawn_from_need_a_sigmoid() -> None:
    way = (step("torch.nn.functional.linear", "p = f(x)"),)
    given = numbers("aten::bernoulli", "self", [-2.5, 0.5], call="p.bernoulli()", provenance=way)
    hint = not_probabilities(given)
    assert hint is not None and hint.fix == "torch.sigmoid(p).bernoulli()"
    assert hint.text.endswith("of a layer in line 4. torch.sigmoid makes probabilities of them")


@pytest.mark.parametrize(
    ("values", "start"),
    [
        ([-1.0, 1.0, 1.0], "t goes from -1 to 1: this loss takes 0 and 1"),
        ([-1.0, 0.0, 1.0], None),
        ([-1.0, -1.0], None),
        ([1.0, 2.0], "t goes from 1 to 2: this loss takes 0 and 1"),
        ([1.0, 1.5, 2.0], None),
        ([1.0, 3.0], None),
    ],
)
def test_labels_of_a_binary_loss(values: list[float], start: str | None) -> None:
    hint = labels_as_binary_target(bce(values, "target"))
    assert (hint and hint.text.startswith(start or "")) == (start and True)


@pytest.mark.parametrize(
    ("way", "cause", "end"),
    [
        (step("torch.div", "p = a / b", DIVIDES), None, ". Line 4 divides by 0: p = a / b"),
        (SOFTMAX, None, ". Softmax gives NaN for a row with inf, and for one of -inf alone"),
        (SOFTMAX, "infinity", "p = z.softmax(-1). Softmax was given a row with inf"),
        (SOFTMAX, "masked row", "is -inf everywhere: all its places are masked"),
        (step("torch.sqrt", "p = g(x)", FIRST_NAN), None, ". Line 4 made them: p = g(x)"),
        (
            step("torch.Tensor.__setitem__", "p[0] = NAN", f"{WRITES} nan"),
            None,
            ". Line 4 wrote NaN: p[0] = NAN",
        ),
        (step("torch.add", "p = g(x)"), None, "stops at the first one"),
    ],
)
def test_how_far_back_a_nan_is_known(way: Any, cause: NanCause | None, end: str) -> None:
    hint = nan_before(bce([0.5, NAN], provenance=(way,), nan_cause=cause))
    assert hint is not None and hint.text.endswith(end)
    assert ("--nan" in hint.text) is end.startswith("stops")


@pytest.mark.parametrize(
    ("name", "values", "is_said"),
    [("q", [NAN, 1.0, NAN], True), ("q", [1.0], False), (None, [NAN], False)],
)
def test_another_tensor_of_the_line_with_nan(
    name: str | None, values: list[float], is_said: bool
) -> None:
    evidence = bce([0.5, NAN], others=(tensor("other", name, values),))
    hint = nan_before(evidence)
    assert hint is not None
    end = "in the input of this op. q contains NaN too (2 of 3 values)"
    assert (end in hint.text) is ("contains" in hint.text) is is_said
    assert nan_before(bce([0.5, 1.5])) is None


@pytest.mark.parametrize(
    ("op", "end"),
    [
        ("torch.nn.functional.linear", ": the scores of a layer in line 4, of which softmax makes "
         "weights"),
        ("torch.log_softmax", ": logarithms of probabilities in line 4, of which exp makes "
         "weights"),
        ("torch.add", ": softmax makes weights of scores, abs() of errors"),
    ],
)  # fmt: skip
def test_weights_below_zero_by_what_made_them(op: str, end: str) -> None:
    evidence = drawn([-2.5, 0.5, 3.0], provenance=(step(op, "p = f(x)"),))
    hint = bad_weights(evidence)
    assert hint is not None
    assert hint.text == f"the weights run from -2.5 to 3, and none may be below 0{end}"
    assert evidence.violation is not None
    silent = replace(evidence.violation, is_silent=True)
    assert bad_weights(replace(evidence, violation=silent)) is None


@pytest.mark.parametrize(("least", "is_said"), [(-0.01, False), (-0.011, True)])
def test_weights_that_rounding_took_below_zero(least: float, is_said: bool) -> None:
    assert (bad_weights(drawn([least, 0.5])) is not None) is is_said
