"""Edits of one step for a NaN or infinity, each followed as text: the program then runs on."""

from __future__ import annotations

import textwrap

import pytest
import torch

from cudalens.core.report import Evidence, Report
from cudalens.core.report_types import Violation
from cudalens.diagnosis.nonfinite_edits import _is_count, _log_softmax
from tests.hint_evidence import syntax_of, tensor
from tests.nan_programs import checked

pytestmark = pytest.mark.usefixtures("sim")


def followed(code: str, report: Report) -> str:
    """Return the program with the edit in its place, as a reader of the report would make it."""
    (edit,) = report.hints
    place = edit.at or report.source
    assert edit.fix is not None and edit.tried and place is not None and place.line is not None
    lines = code.splitlines()
    line = lines[place.line - 1]
    if edit.fix.partition(" = ")[0].isidentifier():
        line = line[: len(line) - len(line.lstrip())] + edit.fix
    else:
        assert (place.end_line, place.column is None) == (place.line, False)
        line = line[: place.column] + edit.fix + line[place.end_column :]
    lines[place.line - 1] = line
    return "\n".join(lines)


X = 'x = torch.tensor([0., 4.], device="cuda", requires_grad=True)'
GAP = 'a = torch.zeros(2, 3, device="cuda", requires_grad=True)\nb = torch.zeros_like(a).detach()'
SCORES = """
scores = torch.zeros(2, 3, device="cuda", requires_grad=True)
mask = torch.tensor([[True, True, True], [False, False, True]], device="cuda")
"""
CELLS = {
    "where() over a root": ("safe_branch", X, "loss = torch.where(x > 0, x.sqrt(), x).sum()"),
    "where() over a logarithm that stands last": (
        "safe_branch",
        X,
        "loss = torch.where(x <= 0, 0.0, torch.log(x)).sum()",
    ),
    "where() over a quotient": (
        "safe_branch",
        X,
        "loss = torch.where(x != 0, (x + 1) / x, 0).sum()",
    ),
    "where() over a power": ("safe_branch", X, "loss = torch.where(x > 0, x ** 0.5, 0).sum()"),
    "where() over what has no value in forward": (
        "safe_branch",
        X,
        "loss = torch.where(x > 2, (x - 1).sqrt(), 0).sum()",
    ),
    "where() over the slope of acos": (
        "safe_branch",
        X,
        "loss = torch.where(x < 1, torch.acos((x + 1) / 5), 0).sum()",
    ),
    "a distance": ("slope_at_zero", GAP, "loss = ((a - b) ** 2).sum(-1).sqrt().mean()"),
    "a distance by a function": (
        "slope_at_zero",
        GAP,
        "loss = torch.sqrt(torch.sum((a - b) ** 2, -1)).mean()",
    ),
    "a distance by a power": ("slope_at_zero", GAP, "loss = ((a - b) ** 2).sum().pow(0.5)"),
    "a distance in float16": (
        "slope_at_zero",
        GAP,
        "loss = ((a - b).half() ** 2).sum(-1).sqrt().mean()",
    ),
    "a number that is 0 in float16": (
        "vanished_constant",
        's = torch.full((3,), 0.5, dtype=torch.float16, device="cuda", requires_grad=True)',
        "loss = ((s - s.min()) / (s.max() - s.min() + 1e-8)).sum()",
    ),
    "a logarithm in float16": (
        "vanished_constant",
        's = torch.zeros(3, dtype=torch.float16, device="cuda", requires_grad=True)',
        "loss = torch.log(s + 1e-8).sum()",
    ),
    "the mean of a selection": (
        "count_of_none",
        f"{X}\nkeep = x > 5",
        "loss = x[keep].sum() / keep.sum()",
    ),
    "a weighted mean": (
        "count_of_none",
        f"{X}\ny = x.detach()",
        "loss = (x * (y > 5)).sum() / (y > 5).float().sum()",
    ),
    "a mean by the length": (
        "count_of_none",
        f"{X}\npicked = x[x > 5]",
        "loss = picked.sum() / len(picked)",
    ),
    "a logarithm of 0": ("log_of_zero", X, "loss = x.log().sum()"),
    "an entropy": ("log_of_zero", X, "loss = -(x * torch.log(x)).sum()"),
    "a logarithm of 0 that an expression makes": (
        "log_of_zero",
        X,
        "loss = (4 - x).log().mean()",
    ),
    "a logarithm of softmax": (
        "log_of_softmax",
        X,
        "loss = -torch.log(torch.softmax(x * 100, -1)).mean()",
    ),
    "another logarithm of softmax": (
        "log_of_zero",
        X,
        "loss = -torch.log2(torch.softmax(x * 100, -1)).mean()",
    ),
    "a row that is masked": (
        "masked_row",
        SCORES + 's = scores.masked_fill(mask, float("-inf"))',
        "loss = s.softmax(-1).square().sum()",
    ),
    "a row that is masked, by its own name": (
        "masked_row",
        SCORES + "x = scores\nx = x.masked_fill(mask, -torch.inf)",
        "loss = torch.softmax(x, dim=-1).square().sum()",
    ),
    "a row that is masked on the line": (
        "masked_row",
        SCORES,
        'loss = scores.masked_fill(mask, -float("inf")).softmax(-1).square().sum()',
    ),
    "a cosine beyond 1 by rounding": (
        "rounded_out_of_domain",
        'c = torch.tensor([1.0000001, 0.5], device="cuda", requires_grad=True)',
        "loss = torch.acos(c).sum()",
    ),
    "a cosine at 1 and beyond": (
        "rounded_out_of_domain",
        'c = torch.tensor([1.0000001, 1.0], device="cuda", requires_grad=True)',
        "loss = c.acos().sum()",
    ),
    "a variance below 0 by rounding": (
        "rounded_out_of_domain",
        'v = torch.tensor([1.0, -1e-8], device="cuda", requires_grad=True)',
        "loss = v.sqrt().sum()",
    ),
}


@pytest.mark.parametrize("name", CELLS)
def test_an_edit_that_is_followed_ends_the_failure(name: str) -> None:
    rule, *lines = CELLS[name]
    code = "\n".join([*lines, "loss.backward()"]).strip()
    report, _ = checked(code)
    assert report is not None
    assert [item.rule for item in report.hints] == [rule]
    changed = followed(code, report)
    again, space = checked(changed)
    assert again is None, changed
    tensors = [item for item in space.values() if isinstance(item, torch.Tensor)]
    grads = [item.grad for item in tensors if item.is_leaf and item.grad is not None]
    assert grads and all(bool(torch.isfinite(item).all()) for item in grads)


@pytest.mark.parametrize(
    ("between", "rules"), [("other = ~mask", ["masked_row"]), ("mask = torch.ones_like(mask)", [])]
)
def test_a_mask_that_is_another_one_by_now_is_not_used_again(
    between: str, rules: list[str]
) -> None:
    lines = 's = scores.masked_fill(mask, float("-inf"))', between, "loss = s.softmax(-1).sum()"
    report, _ = checked("\n".join([SCORES.strip(), *lines, "loss.backward()"]))
    assert report is not None
    assert [item.rule for item in report.hints if item.fix] == rules


def test_an_edit_is_followed_inside_a_module() -> None:
    code = textwrap.dedent("""
        class Distance(nn.Module):
            def forward(self, a, b):
                gap = (a - b).pow(2).sum(-1)
                return gap.sqrt()
        a = torch.zeros(2, 3, device="cuda", requires_grad=True)
        loss = Distance()(a, torch.zeros(2, 3, device="cuda")).mean()
        loss.backward()
    """).strip()
    report, _ = checked(code)
    assert report is not None
    changed = followed(code, report)
    assert "return (gap + 1e-12).sqrt()" in changed
    assert checked(changed)[0] is None


@pytest.mark.parametrize(
    ("function", "inner", "fix"),
    [
        ("log", "torch.softmax(x, -1)", "torch.log_softmax(x, -1)"),
        ("log", "x.softmax(-1)", "x.log_softmax(-1)"),
        ("log2", "torch.softmax(x, -1)", None),
        ("log", "torch.relu(x)", None),
        ("log", "x", None),
    ],
)
def test_the_logarithm_of_softmax_alone_has_a_function_of_its_own(
    function: str, inner: str, fix: str | None
) -> None:
    evidence = Evidence(
        violation=Violation(headline="", op=f"torch.{function}", is_nonfinite=True),
        tensors=(tensor("self", inner, [0.0, 1.0]),),
        call=syntax_of(f"torch.{function}({inner})"),
    )
    assert [str(hint.fix) for hint in _log_softmax(evidence)] == ([] if fix is None else [fix])


def test_strict_has_the_same_edit() -> None:
    code = f"{X}\nloss = torch.where(x > 0, x.sqrt(), x).sum()\nloss.backward()"
    report, _ = checked(code, nan="strict")
    assert report is not None
    assert report.hints[0].fix == "torch.where(x > 0, torch.where(x > 0, x, 1).sqrt(), x)"


WITHOUT = {
    "a root of a number below 0": (X, "loss = (x - 1).sqrt().sum()"),
    "a logarithm of a number below 0": (X, "loss = (x - 1).log().sum()"),
    "a quotient whose divisor is 0": (X, "loss = (1 / x).sum()"),
    "0 / 0 of no count": (X, "loss = (x / x).sum()"),
    "weights whose sum is 0": (f"{X}\nw = x.detach() * 0", "loss = (x * w).sum() / w.sum()"),
    "a mean of no element": (X, "loss = x[x > 5].mean()"),
    "a cosine that is no rounding": (X, "loss = (x / 3).acos().sum()"),
    "a mask that is added": (
        SCORES + "mask = torch.zeros(2, 3).cuda().masked_fill(mask, -torch.inf)",
        "loss = (scores + mask).softmax(-1).sum()",
    ),
    "a condition that draws": (
        X,
        "loss = torch.where(torch.rand_like(x) > 2, x.sqrt(), 1).sum()",
    ),
    "a condition that does not cover all": (X, "loss = torch.where(x < 9, x.sqrt() * 0, 1).sum()"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_what_depends_on_the_intention_has_no_code(name: str) -> None:
    report, _ = checked("\n".join([*WITHOUT[name], "loss.backward()"]).strip())
    assert report is not None
    assert [item.rule for item in report.hints if item.fix] in ([], ["slope_at_zero"])


def test_a_mask_that_was_changed_since_has_no_code() -> None:
    code = f"""{SCORES.strip()}
s = scores.masked_fill(mask, -torch.inf)
mask = ~mask
loss = s.softmax(-1).sum()
loss.backward()"""
    report, _ = checked(code)
    assert report is not None
    assert [(item.rule, item.fix) for item in report.hints] == [("all_masked", None)]


def test_no_condition_is_kept_alive() -> None:
    """Nor do the user's hooks for saved tensors see what is tried."""
    packed = []
    code = f"{X}\nloss = torch.where(x > 0, x.sqrt(), x).sum()\nloss.backward()"

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tuple(tensor.shape))
        return tensor

    counts = []
    for nan in (False, True):
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            checked(code, nan=nan)
        counts.append(list(packed))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("code", "values", "dtype", "is_it"),
    [
        ("n", [0, 3], "int64", True),
        ("n", [-1, 3], "int64", False),
        ("n", [0.0, 3.0], "float32", False),
        ("(y > 0).float()", [0.0, 1.0], "float32", True),
        ("(y > 0).float().sum()", [3.0], "float32", True),
        ("y.float()", [0.0, 1.0], "float32", False),
        ("sum(y > 0)", [3.0], "float32", False),  # Python's own sum has no tensor before it
        ("(y > 0).exp()", [1.0], "float32", False),
    ],
)
def test_a_tensor_that_counts(code: str, values: list[float], dtype: str, is_it: bool) -> None:
    assert _is_count(tensor("other", code, values, dtype=dtype)) is is_it
