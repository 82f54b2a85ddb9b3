"""Where a hint begins and ends: each bound of a rule with the step before and the step beyond."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cudalens.core.report import Evidence, Report
from cudalens.simulate import Simulation
from tests import hint_evidence as given
from tests.hostcells import run_cell

GRAY = [0, 60, 120, 200] * 8


def rules(evidence: Evidence) -> tuple[str, ...]:
    return tuple(item.rule for item in given.hints_of(evidence))


def of_cell(text: str, **options: bool) -> Report:
    """The report of a cell that fails on the rehearsal device."""
    return run_cell(text, {"torch": torch, "F": F, "d": torch.device("cuda")}, **options).shown


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("classes", "is_gray"), [(3, True), (4, False)])
def test_gray_levels_are_more_than_classes(classes: int, is_gray: bool) -> None:
    """Four levels are gray in a model of three classes; of four, they may be badly numbered."""
    evidence = given.labels(GRAY, classes, shape=(1, 1, len(GRAY)), name="mask")
    assert ("gray_mask" in rules(evidence)) is is_gray


@pytest.mark.parametrize(
    ("values", "fires"),
    [
        ([-2.5, 0.5], True),
        ([-0.1, 1.0], True),
        ([-1e-7, 1.5], True),
        ([-1e-7, 1.0], False),
    ],
)
def test_a_rounding_error_below_zero_is_no_logit(values: list[float], fires: bool) -> None:
    """Weights are called logits when one end is further from [0, 1] than rounding goes."""
    assert ("logits_as_weights" in rules(given.drawn(values))) is fires


@pytest.mark.parametrize(
    ("values", "argument", "text"),
    [
        ([0.0, 255.0], "self", "the input runs from 0 to 255, like the bytes of an image"),
        ([0.0, 255.0], "target", "the target runs from 0 to 255, like the bytes of an image"),
        ([-2.0, 1.0], "target", "the target goes down to -2: if that marks values"),
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
    assert ("wrapped_in_uint8" in rules(evidence)) is fires


def test_both_remedies_for_an_offset_carry_it() -> None:
    """Either the table grows by the offset or the text shrinks by it."""
    found = given.hints_of(given.CAUSES["position_offset"]())[0]
    assert found.fix == "max_position_embeddings=34  # or max_length=30"


# --- numbers that are not finite -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "text", "fix"),
    [
        ("x.reciprocal()", "the divisor is 0 there", "(x + 1e-6).reciprocal()"),
        ("1 / x", "the divisor is 0 there", "1 / (x + 1e-6)"),
        ("torch.div(x, x)", "the divisor is 0 there", None),
        ("x.exp() / x.min()", "the divisor is 0 there", "x.exp() / (x.min() + 1e-6)"),
        ("(x - 1).log1p()", "the smallest input is -1: the logarithm needs more than -1", None),
        ("(x - 1).log1p()", "clamp", None),
        ("x.log()", "the smallest input is 0: the logarithm needs more than 0", None),
        ("x.rsqrt()", "the smallest input is 0: the root needs more than 0", None),
        ("(x - 1).sqrt()", "the smallest input is -1: the root needs at least 0", None),
    ],
)
def test_a_value_out_of_range_is_named_with_its_bound(
    sim: Simulation, line: str, text: str, fix: str | None
) -> None:
    """The hint holds the smallest input and what the op needs; the fix the user's own name."""
    report = of_cell(f"x = torch.tensor([0.0, 2.0], device=d)\nz = {line}", nan=True)
    (found,) = report.hints
    assert text in f"{found.text} {found.fix}"
    assert fix is None or found.fix == fix


@pytest.mark.parametrize("line", ["1 / x", "x.reciprocal()", "x.exp() / x.min()", "x / (x * 2)"])
def test_a_division_off_zero_runs_as_it_is_written(sim: Simulation, line: str) -> None:
    """The fix pasted in the place of the division ends without a report."""
    start = "x = torch.tensor([0.0, 2.0], device=d)\nz = "
    (found,) = of_cell(start + line, nan=True).hints
    names = {"torch": torch, "d": torch.device("cuda")}
    assert run_cell(f"{start}{found.fix}", names, nan=True).report is None


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("h * h", "h.float() * h"),
        ("torch.square(h)", "torch.square(h.float())"),
        ("h @ h", None),
    ],
)
def test_what_half_precision_cannot_hold_is_computed_in_float32(
    sim: Simulation, line: str, fix: str | None
) -> None:
    """The fix runs when it is pasted; a product of two tensors of one dtype has none."""
    start = "h = torch.full((2,), 260.0, device=d, dtype=torch.float16)\nz = "
    (found,) = of_cell(start + line, nan=True).hints
    assert "at most 65504" in found.text
    assert found.fix == fix
    if fix is not None:
        names = {"torch": torch, "d": torch.device("cuda")}
        assert run_cell(start + fix, names, nan=True).report is None


def test_half_precision_is_kept_off_zero_by_more(sim: Simulation) -> None:
    """A millionth would make every quotient above 0.06 infinite."""
    start = "h = torch.full((2,), 3.0, device=d, dtype=torch.float16)\nz = "
    found = of_cell(f"{start}h / (h - h).min()", nan=True).hints[0]
    assert found.fix == "h / ((h - h).min() + 1e-3)"
    names = {"torch": torch, "d": torch.device("cuda")}
    assert run_cell(start + found.fix, names, nan=True).report is None


@pytest.mark.parametrize("line", ["(x - 0.999).log1p()", "(x - 1).exp()", "x.clamp(min=0).sqrt()"])
def test_inside_the_bound_nothing_is_found(sim: Simulation, line: str) -> None:
    """One step inside, the same lines run through."""
    text = f"x = torch.tensor([0.0, 2.0], device=d)\nz = {line}"
    assert run_cell(text, {"torch": torch, "d": torch.device("cuda")}, nan=True).report is None


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


# --- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "rule", "fix"),
    [
        (
            "p = torch.ones(4, device=d)\nt = torch.ones(4, 1, device=d)\n"
            "loss = F.binary_cross_entropy(p, t)",
            "loss_dimension",
            "F.binary_cross_entropy(p, t.squeeze(1))",
        ),
        (
            "p = torch.ones(4, 1, device=d)\nt = torch.ones(4, device=d)\n"
            "loss = F.binary_cross_entropy(p, t)",
            "loss_dimension",
            "F.binary_cross_entropy(p.squeeze(1), t)",
        ),
        (
            "p = torch.ones(4, 2, 1, device=d)\nt = torch.ones(4, 2, device=d)\n"
            "loss = F.binary_cross_entropy(p, t)",
            "loss_dimension",
            "F.binary_cross_entropy(p.squeeze(2), t)",
        ),
        (
            "p = torch.ones(4, 1, 2, device=d)\nt = torch.ones(4, 2, device=d)\n"
            "loss = F.binary_cross_entropy(p, t)",
            "loss_dimension",
            "F.binary_cross_entropy(p.squeeze(1), t)",
        ),
        (
            "p = torch.ones(4, 2, device=d)\nt = torch.ones(4, device=d)\n"
            "loss = F.binary_cross_entropy(p, t)",
            None,
            None,
        ),
        (
            "z = torch.ones(4, 3, device=d)\ny = torch.tensor([[0], [1], [2], [0]], device=d)\n"
            "loss = F.nll_loss(z, y)",
            "label_class_dimension",
            "F.nll_loss(z, y.squeeze(1))",
        ),
        (
            "a = torch.ones(3, 5, device=d)\nb = torch.ones(4, 5, device=d)\nc = torch.mm(a, b)",
            "transposed_operand",
            "torch.mm(a, b.T)",
        ),
        (
            "a = torch.ones(5, 3, device=d)\nb = torch.ones(5, 4, device=d)\nc = torch.mm(a, b)",
            "transposed_operand",
            "torch.mm(a.T, b)",
        ),
        (
            "a = torch.ones(3, 5, device=d)\nb = torch.ones(4, 6, device=d)\nc = torch.mm(a, b)",
            None,
            None,
        ),
    ],
)
def test_a_shape_has_its_hint_and_a_stranger_none(
    sim: Simulation, lines: str, rule: str | None, fix: str | None
) -> None:
    """What one squeeze or one transpose mends is mended in the user's words, the rest is left."""
    report = of_cell(lines)
    assert [(item.rule, item.fix) for item in report.hints] == (
        [] if rule is None else [(rule, fix)]
    )


def test_a_transposed_operand_is_shown_with_its_new_shape(sim: Simulation) -> None:
    """The last two sizes change places, the batch stays in front."""
    report = of_cell(
        "a = torch.ones(2, 3, 5, device=d)\nb = torch.ones(2, 4, 5, device=d)\nc = torch.bmm(a, b)"
    )
    (found,) = report.hints
    assert found.text == "the right operand fits transposed: (2, 5, 4)"
    assert found.fix == "torch.bmm(a, b.transpose(1, 2))"


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


GRADIENTS = """\
class Three(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, z):
        return x * y
    @staticmethod
    def backward(ctx, grad):
        return {given}
Three.apply(torch.ones(2, device=d, requires_grad=True), 2, 3).sum().backward()
"""


@pytest.mark.parametrize(
    ("answer", "fix"),
    [("grad", "return grad, None, None"), ("(grad, None)", None)],
)
def test_missing_gradients_are_added_where_there_is_one(
    sim: Simulation, answer: str, fix: str | None
) -> None:
    """Which of two gradients belongs to which input nobody knows."""
    report = of_cell(GRADIENTS.format(given=answer))
    (hint,) = (item for item in report.hints if item.rule == "count_of_gradients")
    assert hint.fix == fix


@pytest.mark.parametrize(
    ("shape", "fix"),
    [
        ("(1, 4, 3)", "y.squeeze(0)"),
        ("(4, 1, 3)", "y.squeeze(1)"),
        ("(4, 3, 1)", "y.squeeze(2)"),
        ("(2, 4, 3)", None),
    ],
)
def test_the_dimension_too_many_is_found_wherever_it_is(
    sim: Simulation, shape: str, fix: str | None
) -> None:
    """The first, the last or between; a dimension of size 2 is none too many."""
    text = f"x = torch.zeros(4, 3, device=d)\ny = torch.zeros{shape}.to(d)\n"
    call = "F.binary_cross_entropy_with_logits(x, {})"
    report = of_cell(text + call.format("y"))
    found = [item.fix for item in report.hints if item.rule == "loss_dimension"]
    assert found == ([] if fix is None else [call.format(fix)])


@pytest.mark.parametrize(("classes", "fires"), [(2, True), (3, False)])
def test_one_hot_labels_have_a_place_for_each_class(
    sim: Simulation, classes: int, fires: bool
) -> None:
    """Zeros and ones of another width are something else."""
    text = f"x = torch.zeros(4, {classes}, device=d)\ny = torch.tensor([[0, 1]] * 4, device=d)\n"
    report = of_cell(text + "F.nll_loss(x, y)\n")
    hints = [item for item in report.hints if item.rule == "label_class_dimension"]
    assert [item.fix for item in hints] == ["F.nll_loss(x, y.argmax(1))"] * fires


@pytest.mark.parametrize(
    ("dtype", "fix"),
    [("float32", "x"), ("float64", "x.half().float()")],
)
def test_a_cast_is_left_out_where_that_is_enough(sim: Simulation, dtype: str, fix: str) -> None:
    """The tensor before the user's own cast is taken as it is when it has the wanted dtype."""
    text = f"x = torch.zeros(2, 3, dtype=torch.{dtype}, device=d)\n"
    report = of_cell(text + "net = torch.nn.Linear(3, 4).to(d)\nnet(x.half())\n", fast=False)
    assert [item.fix for item in report.hints] == [f"net({fix})"]


@pytest.mark.parametrize(("dtype", "name"), [("half", "float16"), ("double", "float64")])
@pytest.mark.parametrize("bias", ["", ", torch.zeros(4, device=d)"])
def test_both_spellings_of_a_dtype_are_read(
    sim: Simulation, dtype: str, name: str, bias: str
) -> None:
    """With a bias and without, torch's words differ: ``Half`` and ``c10::Half``."""
    text = f"x = torch.zeros(2, 3, dtype=torch.{dtype}, device=d)\nw = torch.zeros(4, 3, device=d)"
    report = of_cell(f"{text}\nF.linear(x, w{bias})\n", fast=False)
    assert report.headline == f"input is {name}, the weight is float32"
