"""Edits of one step for a NaN or infinity, each followed as text: the program then runs on."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Any

import pytest
import torch

from cudalens.core.report import Evidence, Report
from cudalens.core.report_types import CodeLine, SourceSpan, TensorFact, Violation
from cudalens.diagnosis.candidates import Trial
from cudalens.diagnosis.nonfinite_edits import _is_count, _log_softmax, finite_edit
from cudalens.diagnosis.user_code import Fix
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
    hints = list(_log_softmax(evidence))
    assert [hint.fix for hint in hints] == ([] if fix is None else [fix])
    text = "the softmax is 0 there, and log_softmax computes its logarithm without the 0"
    assert {hint.text for hint in hints} <= {text}
    for edit in (hint.fix for hint in hints):
        assert isinstance(edit, Fix) and edit.rearrange is not None
        assert edit.changes[0][:2] == (inner, fix)
        assert edit.rearrange("torch.log", [1], {}) == ("positive", [1], {})  # what is given stays


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
    "a cosine of infinity": (
        'c = torch.tensor([torch.inf, 0.5], device="cuda", requires_grad=True)',
        "loss = c.acos().sum()",
    ),
    "a row that is masked everywhere": (
        SCORES + 's = scores.masked_fill(mask, float("-inf"))',
        "loss = s.softmax(-1).sum()",
    ),
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


# --- what is written, by evidence alone -----------------------------------------------------------


class Finite(Trial):
    """A trial in which the edits with these texts, or all, are finite."""

    def __init__(self, *fixes: str) -> None:
        self.fixes, self.tried = fixes, list[str]()

    def makes_finite(self, fix: Fix) -> bool:
        self.tried.append(str(fix))
        return not self.fixes or fix in self.fixes


def forward(call: str, op: str, *facts: TensorFact, **facts_of_finding: Any) -> Evidence:
    """The evidence of a call that made the first NaN or infinity."""
    found = {"headline": "", "op": f"torch.{op}", "is_nonfinite": True, **facts_of_finding}
    return Evidence(violation=Violation(**found), tensors=facts, call=syntax_of(call))


def edited(evidence: Evidence, trial: Finite | None = None) -> str | None:
    hint = finite_edit(evidence, trial or Finite())
    assert hint is None or hint.tried
    return None if hint is None else hint.fix


def test_only_a_first_nan_whose_inputs_are_still_there_is_edited() -> None:
    x = tensor("self", "x", [0.0, 4.0])
    log = forward("torch.log(x)", "log", x)
    assert edited(log) == "torch.log(x.clamp_min(1e-8))"
    violation = log.violation
    assert violation is not None
    assert edited(replace(log, violation=replace(violation, overwritten=("self",)))) is None
    assert edited(replace(log, violation=replace(violation, is_nonfinite=False))) is None
    assert edited(replace(log, violation=None)) is None
    assert edited(log, Finite("other")) is None
    # A module around the call is no place for it.
    assert edited(replace(log, call=syntax_of("net(x)"))) is None


@pytest.mark.parametrize(
    ("function", "values", "dtype", "fixes"),
    [
        ("log", [0.0, 1.0], "float32", ["x.clamp_min(1e-8)"]),
        ("log2", [0.0, 1.0], "float16", ["x.clamp_min(1e-7)"]),
        ("log", [-1e-9, 1.0], "float32", []),
        ("log", [0.5, 1.0], "float32", []),
        ("acos", [-1.0, 1.0000001], "float32", ["x.clamp(-1, 1)", "x.clamp(-0.999999, 0.999999)"]),
        ("asin", [-1.000005, 0.0], "float64", ["x.clamp(-1, 1)", "x.clamp(-0.999999, 0.999999)"]),
        ("acos", [0.0, 1.5], "float32", []),
        ("acos", [-1.5, 0.0], "float32", []),
        ("sqrt", [-1e-8, 1.0], "float32", ["x.clamp_min(0)", "x.clamp_min(1e-8)"]),
        ("sqrt", [-1e-8, 1.0], "float16", ["x.clamp_min(0)", "x.clamp_min(1e-7)"]),
        ("sqrt", [-1e-8, 0.0], "float32", []),
        ("sqrt", [-0.5, 1.0], "float32", []),
        ("sqrt", [0.0, 1.0], "float32", []),
        ("exp", [0.0, 1.0], "float32", []),
    ],
)
def test_numbers_that_rounding_took_out_of_a_domain(
    function: str, values: list[float], dtype: str, fixes: list[str]
) -> None:
    fact = tensor("self", "x", values, dtype=dtype)
    trial = Finite("none")
    assert edited(forward(f"torch.{function}(x)", function, fact), trial) is None
    assert trial.tried == [f"torch.{function}({it})" for it in fixes]


@pytest.mark.parametrize(
    ("call", "values", "inputs", "fix"),
    [
        ("s / n", [0, 3], (("self", "0"),), "s / n.clamp(min=1)"),
        ("s / n", [0, 3], (("self", "2"),), None),
        ("s / n", [0, 3], (), None),
        ("s / n", [-1, 3], (("self", "0"),), None),
        ("s / n", [0.0, 3.0], (("self", "0"),), None),
        ("s / len(y)", None, (("self", "0"),), "s / max(len(y), 1)"),
        ("s / y.numel()", None, (("self", "0"),), "s / max(y.numel(), 1)"),
        ("s / y.shape[0]", None, (("self", "0"),), "s / max(y.shape[0], 1)"),
        ("s / k", None, (("self", "0"),), None),
        ("s / y.size(0)", None, (("self", "0"),), None),
        ("s // len(y)", None, (("self", "0"),), None),
    ],
)
def test_a_count_of_none_is_at_least_1(
    call: str, values: list[float] | None, inputs: Any, fix: str | None
) -> None:
    facts = [] if values is None else [tensor("other", "n", values)]
    assert edited(forward(call, "div", *facts, inputs=inputs)) == fix


def test_what_a_count_of_none_does_to_the_call() -> None:
    hint = finite_edit(forward("s / len(y)", "div", inputs=(("self", "0"),)), Finite())
    assert hint is not None and isinstance(hint.fix, Fix) and hint.fix.rearrange is not None
    assert hint.fix.rearrange("f", [0.0, 0], {}) == ("f", [0.0, 1], {})
    assert hint.fix.rearrange("f", [0.0, 3, "x"], {"k": 1}) == ("f", [0.0, 3, "x"], {"k": 1})


def test_a_constant_that_vanishes_is_taken_larger_step_by_step() -> None:
    x = tensor("self", "s + 1e-8", [0.0, 1.0], dtype="float16")
    log = forward("torch.log(s + 1e-8)", "log", x)
    trial = Finite("torch.log(s + 1e-5)")
    assert edited(log, trial) == "torch.log(s + 1e-5)"
    assert trial.tried == [f"torch.log(s + {it})" for it in ("1e-7", "1e-6", "1e-5")]
    twice = tensor("self", "s * 0.5 + 1e-8", [0.0, 1.0], dtype="float16")
    hint = finite_edit(forward("torch.log(s * 0.5 + 1e-8)", "log", twice), Finite())
    assert hint is not None and isinstance(hint.fix, Fix)
    assert hint.fix.changes[0].template == "s * 0.5 + 1e-7"
    wide = replace(log, tensors=(replace(x, dtype="bfloat16"),))
    trial = Finite("none")
    edited(wide, trial)
    assert not any("1e-7" in it for it in trial.tried)


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        ("1e-08 + s", "x.div(1e-7 + s)"),
        ("s + 3e-08", "x.div(s + 1e-7)"),
        ("s + 4e-08", None),
        ("s + 0.0", None),
        ("s.clamp(1e-08)", "x.div(s.clamp(1e-7))"),
        ("s.clamp(min=1e-08)", "x.div(s.clamp(min=1e-7))"),
        ("s.clamp(max=1e-08)", None),
        ("s * 1e-08", None),
    ],
)
def test_a_constant_that_keeps_a_divisor_above_0(code: str, fix: str | None) -> None:
    divisor = tensor("other", code, [0.0, 1.0], dtype="float16")
    assert edited(forward(f"x.div({code})", "div", divisor)) == fix


def backward(line: str, node: str, **facts: Any) -> Evidence:
    """The evidence of the node of a forward line that made an infinite gradient."""
    at = SourceSpan(
        cell=1, line=3, end_line=3, text=line, context=(CodeLine(line=3, text=f"    {line}"),)
    )
    found = {"headline": "", "op": f"{node}Backward0", "is_nonfinite": True, **facts}
    return Evidence(violation=Violation(**found), phase="backward", forward_source=at)


@pytest.mark.parametrize(
    ("line", "node", "fix"),
    [
        ("y = torch.where(m > 0, x.sqrt(), 0)", "Sqrt",
         "torch.where(m > 0, torch.where(m > 0, x, 1).sqrt(), 0)"),
        ("y = torch.where(m, 0, torch.log(x))", "Log",
         "torch.where(m, 0, torch.log(torch.where(m, 1, x)))"),
        ("y = torch.where(m, x.exp(), 0)", "Exp",
         "torch.where(m, torch.where(m, x, 0).exp(), 0)"),
        ("y = torch.where(m, x.acosh(), 0)", "Acosh",
         "torch.where(m, torch.where(m, x, 2).acosh(), 0)"),
        ("y = torch.where(m, a / x, 0)", "Div", "torch.where(m, a / torch.where(m, x, 1), 0)"),
        ("y = torch.where(m, 1 / x, 0)", "Reciprocal",
         "torch.where(m, 1 / torch.where(m, x, 1), 0)"),
        ("y = torch.where(m, x ** 0.5, 0)", "Pow",
         "torch.where(m, torch.where(m, x, 1) ** 0.5, 0)"),
        ("y = torch.where(m, x.pow(0.5), 0)", "Pow",
         "torch.where(m, torch.where(m, x, 1).pow(0.5), 0)"),
        # Both branches, another function, two wheres, no number of three arguments, other calls.
        ("y = torch.where(m, x.sqrt(), y.sqrt())", "Sqrt", None),
        ("y = torch.where(m, x.sqrt(), 0)", "Log", None),
        ("y = torch.where(m, torch.where(k, x.sqrt(), 0), 0)", "Sqrt", None),
        ("y = torch.where(m, x.sqrt(), other=0)", "Sqrt", None),
        ("y = torch.where(torch.rand(2) > 0, x.sqrt(), 0)", "Sqrt", None),
        ("y = torch.where(m, x.sqrt(", "Sqrt", None),
        ("y = 1; z = torch.where(m, x.sqrt(), 0)", "Sqrt", None),
        ("y = torch.where(m, x.sqrt(), 0); z = 1", "Sqrt", None),
    ],
)  # fmt: skip
def test_a_branch_that_where_discards_is_made_safe(line: str, node: str, fix: str | None) -> None:
    hint = finite_edit(backward(line, node), Finite())
    assert (hint and hint.fix) == fix
    if hint is not None and hint.at is not None:
        where = hint.at.column or 0
        assert (hint.at.line, where) == (3, len("    y = "))
        assert hint.at.end_column == 4 + len(line)


def test_a_safe_branch_comes_before_a_number_beneath_the_root() -> None:
    """The second changes values that are not discarded."""
    line = "y = torch.where(m, x.sqrt(), 0)"
    hint = finite_edit(backward(line, "Sqrt", inputs=(("result", "0"),)), Finite())
    assert hint is not None and hint.rule == "safe_branch"


def test_a_place_that_stands_twice_in_its_line_is_not_edited() -> None:
    line = "y = torch.where(m, x.sqrt(), 0)"
    evidence = backward(line, "Sqrt")
    at = evidence.forward_source
    assert at is not None
    twice = (CodeLine(line=3, text=f"{line}; {line}"),)
    assert edited(replace(evidence, forward_source=replace(at, context=twice))) is None
    assert edited(replace(evidence, forward_source=replace(at, context=()))) is None
    assert edited(replace(evidence, forward_source=None)) is None
    assert edited(replace(evidence, forward_source=replace(at, text=f"{line}\n"))) is None


@pytest.mark.parametrize(
    ("line", "node", "facts", "fix"),
    [
        ("y = x.sqrt()", "Sqrt", {"result": 0}, "(x + 1e-12).sqrt()"),
        ("y = torch.sqrt(x)", "Sqrt", {"result": 0}, "torch.sqrt(x + 1e-12)"),
        ("y = x.sqrt()", "Sqrt", {"result": 1}, None),
        ("y = x.sqrt()", "Sqrt", {}, None),
        ("y = x ** 0.5", "Pow", {"self": 0, "exponent": 0.5}, "(x + 1e-12) ** 0.5"),
        ("y = x.pow(0.5)", "Pow", {"self": 0, "exponent": 0.5}, "(x + 1e-12).pow(0.5)"),
        ("y = x ** 0.5", "Pow", {"self": 1, "exponent": 0.5}, None),
        ("y = x ** -1", "Pow", {"self": 0, "exponent": -1}, None),
        ("y = x ** k", "Pow", {"self": 0, "exponent": 0.5}, None),
        ("y = x.sqrt() + z.sqrt()", "Sqrt", {"result": 0}, None),
        ("y = x.log()", "Log", {"result": 0}, None),
    ],
)
def test_a_small_number_beneath_a_root(
    line: str, node: str, facts: dict[str, float], fix: str | None
) -> None:
    evidence = backward(line, node, inputs=tuple((name, str(it)) for name, it in facts.items()))
    assert edited(evidence) == fix
    violation = evidence.violation
    assert violation is not None
    half = replace(evidence, violation=replace(violation, dtype="float16"))
    assert edited(half) == (fix and fix.replace("1e-12", "1e-7"))
