"""Item 35.8: a NaN is followed back to its line where the recorder knows it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.hostcells import run_cell

pytestmark = pytest.mark.usefixtures("sim")
SETUP = "import torch\nl = torch.randn(5, device='cuda')\nz = torch.zeros(5, device='cuda')\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("l[2] = float('nan')\np = l.softmax(-1)", "Line 4 wrote NaN: l[2] = float('nan')"),
        ("p = z / z", "Line 4 made them: p = z / z"),
    ],
)
def test_the_line_that_made_the_nan_is_named_and_no_other_run_proposed(
    text: str, says: str
) -> None:
    """The advice to run again with --nan is for a NaN that nobody saw begin."""
    report = run_cell(f"{SETUP}{text}\ntorch.multinomial(p, 1)", fast=False).shown
    assert report.explanation.startswith(
        "Probabilities must be finite and at least 0; this one is NaN."
    )
    said = " | ".join(hint.text for hint in report.hints)
    assert says in said
    assert "--nan" not in said
    assert "-inf alone" not in said


def test_a_nan_that_nobody_saw_begin_is_looked_for() -> None:
    """What made it is not proven through a softmax over whole rows."""
    report = run_cell(f"{SETUP}p = (z / z).softmax(-1)\ntorch.multinomial(p, 1)", fast=False).shown
    assert any("--nan" in hint.text for hint in report.hints)


@pytest.mark.parametrize(
    ("code", "is_advised"),
    [
        ("torch.multinomial(data, 1)", False),  # the guard is the first to read it
        ("p = torch.as_tensor(numbers, device='cuda') * 2\ntorch.multinomial(p + 1, 1)", False),
        ("p = (z / z).softmax(-1)\ntorch.multinomial(p, 1)", True),
        ("torch.zeros(9, device='cuda')[data.long()]", False),
        ("torch.zeros(9, device='cuda')[(l * 0 / 0 * z).long()]", False),
    ],
)
def test_the_option_is_advised_where_it_would_say_more(code: str, is_advised: bool) -> None:
    """Of a NaN that came in, or that was cast to integers, it says what the guard says."""
    numbers = np.array([0.5, np.nan])
    names = {"numbers": numbers, "data": torch.tensor(numbers).cuda()}
    report = run_cell(f"{SETUP}{code}", names, fast=False).shown
    said = " | ".join(hint.text for hint in report.hints)
    assert said
    assert ("--nan" in said) is is_advised


ROW = "A row that softmax was given is -inf everywhere"
INFINITE = "Softmax was given a row with inf"
EITHER = "Softmax gives NaN for a row with inf, and for one of -inf alone"
MASK = "m = torch.zeros(2, 5, device='cuda')\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{MASK}m[1] = -torch.inf\np = m.softmax(-1)", ROW),
        (f"{MASK}m[1] = -torch.inf\nq = torch.log_softmax(m, -1)\np = q.exp()", ROW),
        (f"{MASK}m[1, 2] = torch.inf\np = m.softmax(-1)", INFINITE),
        (f"{MASK}m[1, 2] = torch.inf\nm[0] = -torch.inf\np = m.softmax(-1)", EITHER),
        (f"{MASK}m[1] = -torch.inf\np = (m + 1).softmax(-1)", "--nan stops at the first one"),
    ],
)
def test_the_input_of_a_softmax_tells_why(text: str, says: str) -> None:
    """It lives, or its values are gone; with infinities of both kinds each may have done it."""
    report = run_cell(f"{SETUP}{text}\ntorch.multinomial(p, 1)", fast=False).shown
    said = " | ".join(hint.text for hint in report.hints)
    assert [item for item in (ROW, INFINITE, EITHER) if item in said] == (
        [] if says not in (ROW, INFINITE, EITHER) else [says]
    )
    assert says in said


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("t = 0.0\np = (l / t).softmax(-1)", 5),
        ("t = 0\np = l.div(t).softmax(-1)", 5),
        ("a = l / 0.0\np = a.softmax(-1)", 4),
        ("a = torch.zeros(5, device='cuda')\nb = (a + 1) / 0.0\np = b - b", None),
        ("t = 1e-30\np = (l / t / t).softmax(-1)", None),
        ("q = (l / 0.0).nan_to_num(0.0, 1.0, 1.0)\np = q * torch.nan", None),  # it was replaced
        ("q = l / 0.0\np = q.reshape(-1, 5).softmax(-1)[0]", 4),
    ],
)
def test_a_division_by_0_before_a_softmax_is_named(text: str, line: int | None) -> None:
    """The quotient is gone when its NaN is met; the number is in the record of the call."""
    report = run_cell(f"{SETUP}{text}\ntorch.multinomial(p, 1)", fast=False).shown
    said = " | ".join(hint.text for hint in report.hints)
    assert (f"Line {line} divides by 0" in said) == (line is not None)
    marks = [item for it in report.observations for item in it.sources if "by 0" in item.mark]
    assert [item.line for item in marks] == ([] if line is None else [line])
    assert ("--nan" in said) == (line is None and "made them" not in said)


@pytest.mark.parametrize("text", ["y = torch.log(z)", "y = l * torch.log(z)"])
def test_a_logarithm_of_0_is_kept_above_0(text: str) -> None:
    (hint,) = run_cell(f"{SETUP}{text}", fast=False, nan="strict").shown.hints
    assert hint.fix == "torch.log(z.clamp_min(1e-8))"


HIDES = "where() hides the value"
X = "x = torch.tensor([1.0, 0.0, 2.0], device='cuda', requires_grad=True)\n"
BIG = "x = torch.full((2,), 1e-30, device='cuda', requires_grad=True)\nlogits = x * 1e25\n"


@pytest.mark.parametrize(
    ("text", "piece", "is_said"),
    [
        (f"{X}y = torch.where(x > 0, torch.rsqrt(x), 0.0)", HIDES, True),
        (f"{X}y = torch.log(torch.where(x > 0, x, 0.0))", HIDES, False),
        ("y = torch.log(torch.softmax(z - l * 1e9, -1))", "log_softmax computes", True),
        ("y = torch.log(z) + torch.softmax(l, -1)", "log_softmax computes", False),
        ("y = (z[None] + 1).std(0)", "unbiased deviation", True),
        ("z[2] = float('inf')\ny = z[None].std(1)", "unbiased deviation", False),
        ("y = torch.softmax(torch.full_like(z, float('inf')), -1)", "a row with inf", True),
        ("y = torch.nn.functional.softmax(torch.full_like(z, -torch.inf))", "with inf", False),
        (f"{X}y = torch.sqrt(x).sum()\ny.backward()", "infinite at 0", True),
        (f"{BIG}(logits * 1e20).sum().backward()", "infinite at 0", False),
        ("y = (z + 1e30) * 1e30", "overflowed", True),
        ("y = torch.logit(z + 1)", "overflowed", False),
        ("y = torch.lgamma(z)", "overflowed", False),
        ("y = (z + 1) // z", "overflowed", False),
        ("y = 0.0 ** (z - 1)", "overflowed", False),
    ],
)
@pytest.mark.filterwarnings("ignore:(std.*degrees of freedom|Implicit dimension)")
def test_a_cause_of_a_first_nan_is_that_of_the_op_that_made_it(
    text: str, piece: str, is_said: bool
) -> None:
    """What the line has besides the op is no cause."""
    shown = run_cell(f"{SETUP}{text}", fast=False, nan="strict").shown
    assert any(piece in hint.text for hint in shown.hints) is is_said


LOADER = (
    "from torch.utils.data import DataLoader, TensorDataset\n"
    "xs = torch.tensor([1, 2, 99, 3])\n"
    "(b,) = next(iter(DataLoader(TensorDataset(xs), batch_size=4)))\n"
)


@pytest.mark.parametrize(
    ("text", "is_named"),
    [("b = b.sort().values", False), ("b = b.clamp(max=5) * 3", True)],
)
def test_a_line_that_moves_the_values_of_a_loader_has_not_made_them(
    text: str, is_named: bool
) -> None:
    """Only arithmetic that made the value first is where it comes from."""
    cell = f"{SETUP}{LOADER}{text}\nemb = torch.nn.Embedding(12, 4).cuda()\ny = emb(b.cuda())"
    shown = run_cell(cell, fast=False).shown
    assert any(item.kind == "came_from" for item in shown.observations) is is_named
