"""Where a hint begins and ends in cells that run: the step before a bound and the step beyond."""

from __future__ import annotations

import pytest

from tests.hint_evidence import spoken
from tests.hostcells import SETUP, Outcome, run_cell

pytestmark = pytest.mark.usefixtures("sim")


def cell(text: str, **options: bool) -> Outcome:
    """Run a cell on the rehearsal device ``d``."""
    return run_cell(f"{SETUP}d = torch.device('cuda')\n{text}", **options)


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
        ("(x - 1).log()", "log(-1) is not finite: log takes numbers above 0"),
        ("x.rsqrt()", "rsqrt(0) is not finite: rsqrt takes numbers above 0"),
        ("(x - 1).sqrt()", "sqrt(-1) is not finite: sqrt takes numbers from 0 on"),
        ("x.clamp(min=0).sqrt()", None),
        ("(x - 1).exp()", None),
        # On a CPU nothing overflows, so that no fix can be tried.
        (f"{HALF}x * x", "largest float16 is 65504"),
        (f"{HALF}torch.square(x)", "largest float16 is 65504"),
        (f"{HALF}x @ x", "largest float16 is 65504"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_bound(line: str, text: str | None) -> None:
    """The input and what the op needs, in words; one step inside, nothing is found."""
    report = cell(f"x = torch.tensor([0.0, 2.0], device=d)\n{line}", nan="strict").report
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
        ("loss = x.sqrt().sum()", "the slope of a root is infinite at 0"),
        ("loss = (x ** 0.5).sum()", "the slope of a root is infinite at 0"),
        ("m = x > 0; loss = torch.where(m, x.sqrt(), x).sum()", "and 0 times it is nan"),
        ("loss = torch.where(x < 0, -x, x).sqrt().sum()", "the slope of a root is infinite at 0"),
        ("m = x > 0; loss = (x.sqrt() * m).sum()", "and 0 times it is nan: a mask or where()"),
        ("loss = (1 + x).acos().sum()", "the gradient of acos is infinite at 1"),
        ("logits = x * 1e20; loss = (logits * 1e30).sum()", None),
        ("loss = ((x + 1e-12) ** 0.5).sum() * 1e38", None),
    ],
)
def test_an_infinite_slope_is_named_where_the_saved_value_shows_it(
    line: str, text: str | None
) -> None:
    """In backward, by the value that the node saved; what overflows elsewhere is no such slope."""
    made = "x = torch.zeros(2, device=d, requires_grad=True)"
    report = cell(f"{made}\n{line}\nloss.backward()", nan=True).shown
    assert report.phase == "backward"
    found = [item.text for item in report.hints if item.rule == "slope_at_zero"]
    assert (found == []) if text is None else (len(found) == 1 and text in found[0])
    assert text is not None or "the result overflowed" in report.hints[0].text


def test_an_overflow_in_backward_is_named_with_the_type_of_the_gradient() -> None:
    """The loss is float32, and the gradient that overflows float16."""
    made = "x = torch.full((2,), 200.0, device=d, dtype=torch.half, requires_grad=True)"
    code = f"{made}\nloss = (x ** 2).float().sum() * 60000\nloss.backward()"
    report = cell(code, nan="strict").shown
    assert "from gradient = 60000.0, self = 200.0, exponent = 2" in report.headline_schema
    assert "the largest float16 is 65504" in report.hints[0].text


# --- the step beside -----------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "name"), [("half", "float16"), ("double", "float64")])
@pytest.mark.parametrize("bias", ["", ", torch.zeros(4, device=d)"])
def test_both_spellings_of_a_dtype_are_read(dtype: str, name: str, bias: str) -> None:
    """With a bias and without, torch's words differ: ``Half`` and ``c10::Half``."""
    text = f"x = torch.zeros(2, 3, dtype=torch.{dtype}, device=d)\nw = torch.zeros(4, 3, device=d)"
    report = cell(f"{text}\nF.linear(x, w{bias})\n", fast=False).shown
    assert name in report.headline_schema and "float32" in report.headline_schema


@pytest.mark.parametrize(("rows", "columns", "says"), [(4, 2, True), (5, 2, False), (4, 1, False)])
def test_another_dimension_is_named_where_it_has_just_so_many_places(
    rows: int, columns: int, says: bool
) -> None:
    """With one number a row, as many rows as numbers are chance."""
    text = f"x = torch.zeros({rows}, 3, device=d)\ni = torch.full(({rows}, {columns}), 3, device=d)"
    report = cell(f"{text}\ni[0, 0] = 0\nx.gather(1, i)").shown
    assert ("dimension 0 has 4" in spoken(report).text) is says


# --- numbers that a line computed ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "says", "is_counted"),
    [
        ("torch.bucketize(x, edges, right=True)", "line 8", False),
        ("torch.searchsorted(edges, x + 1)", "line 8", False),
        ("torch.bucketize(x, edges[:8]) + 1", "line 8", False),
        ("torch.tensor([*range(1, 10)] * 4, device=d)", "run from 1 to 9", True),
    ],
    ids=["right", "left", "shifted", "data"],
)
def test_numbers_of_intervals_are_not_counted_from_1(
    numbers: str, says: str, is_counted: bool
) -> None:
    """What a search returned says nothing of how the data counts; what was given does."""
    code = "edges = torch.arange(9.0, device=d)\nx = torch.linspace(0, 8, 40, device=d)\n"
    report = cell(f"{code}at = {numbers}\nedges.gather(0, at)", fast=False).shown
    text = spoken(report).text
    assert says in text
    assert ("run from 1" in text) is is_counted
