"""Causes of the first NaN or infinity: an op made it of finite inputs, or it came from outside."""

from __future__ import annotations

import ast

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, TensorFact
from cudalens.diagnosis.hints._base import rule
from cudalens.diagnosis.hints._reading import LOST_NUMBERS
from cudalens.diagnosis.hints._roles import bad_values, fault
from cudalens.diagnosis.user_code import parsed, rewritten, spliced

_HALF = frozenset({"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"})
_DIVISIONS = frozenset({"aten::div", "aten::div_", "aten::reciprocal", "aten::reciprocal_"})
_ELEMENTWISE = frozenset({"aten::add", "aten::div", "aten::mul", "aten::pow", "aten::sub"})
_LOGS = frozenset({"aten::log", "aten::log_", "aten::log2", "aten::log10", "aten::log1p"})
_EXPONENTIALS = frozenset({"aten::exp", "aten::exp_", "aten::expm1", "aten::expm1_"})
_ROOTS = frozenset({"aten::sqrt", "aten::sqrt_", "aten::rsqrt"})
_SPREADS = frozenset({"aten::std", "aten::var", "aten::std_mean", "aten::var_mean"})


def _made(evidence: Evidence, names: frozenset[str]) -> bool:
    violation = evidence.violation
    return violation is not None and violation.is_nonfinite and violation.op in names


def _input(evidence: Evidence, name: str) -> str | None:
    """Return an input of the op at the position of the first NaN or infinity."""
    return dict(evidence.violation.inputs).get(name) if evidence.violation else None


def _smallest(evidence: Evidence, *arguments: str) -> tuple[str | None, float] | None:
    """Return the expression and the minimum of the first of the arguments that is known."""
    for name in arguments:
        fact = evidence.tensor(name)
        if fact is not None and isinstance(fact.summary.min, (int, float)):
            return fact.expression, float(fact.summary.min)
    return None


@rule(priority=10)
def division_by_zero(evidence: Evidence) -> Hint | None:
    """The divisor holds a zero."""
    if not _made(evidence, _DIVISIONS) or evidence.phase == "backward":
        return None
    key = "self" if evidence.op.name in ("aten::reciprocal", "aten::reciprocal_") else "other"
    if _input(evidence, key) not in ("0", "0.0", "-0.0"):
        return None
    return Hint(
        text="the divisor is 0 there: dividing by 0 gives inf, 0 / 0 gives nan",
        fix=_off_zero(evidence, evidence.tensor(key)),
    )


def _off_zero(evidence: Evidence, divisor: TensorFact | None) -> str | None:
    """Return the user's division with a small number added to the divisor."""
    is_half = any(fact.dtype in _HALF for fact in evidence.tensors)
    small = "1e-3" if is_half else "1e-6"
    fix = rewritten(evidence, divisor, f"{{x}} + {small}")
    if fix is not None:
        return fix
    call = evidence.call_text
    tree = parsed(call) if call and "#" not in call else None
    if call is None or not isinstance(tree, ast.BinOp) or not isinstance(tree.op, ast.Div):
        return None
    written = ast.get_source_segment(f"({call}\n)", tree.right)
    return spliced(call, tree.right, f"({written} + {small})") if written else None


@rule(priority=10)
def logarithm_of_zero(evidence: Evidence) -> Hint | None:
    """The logarithm of 0 is -inf, of a negative number nan."""
    if not _made(evidence, _LOGS):
        return None
    found = _smallest(evidence, "self")
    bound = -1.0 if evidence.op.name == "aten::log1p" else 0.0
    if found is None or found[1] > bound:
        return None
    name, low = found
    return Hint(
        text=f"the smallest input is {low:g}: the logarithm needs more than {bound:g}",
        fix=f"{name}.clamp(min=1e-8)" if name else None,
    )


@rule(priority=10)
def all_masked(evidence: Evidence) -> Hint | None:
    """A softmax over a row of -inf alone divides 0 by 0."""
    if evidence.violation is None or not evidence.violation.is_masked_row:
        return None
    return Hint(
        text="this row is -inf everywhere: all its positions are masked, and softmax divides 0 by "
        "0; leave at least one position unmasked, or mask with torch.finfo(dtype).min"
    )


@rule(priority=10)
def exponent_too_large(evidence: Evidence) -> Hint | None:
    """exp() leaves the range of the dtype."""
    value = _input(evidence, "self")
    if not _made(evidence, _EXPONENTIALS) or evidence.phase == "backward" or value is None:
        return None
    return Hint(
        text=f"exp({value}) is beyond the dtype's range: subtract the maximum first, or work with "
        "logarithms (logsumexp, log_softmax)"
    )


@rule(priority=10)
def root_of_negative(evidence: Evidence) -> Hint | None:
    """The square root of a negative number is nan, the reciprocal root of 0 inf."""
    if not _made(evidence, _ROOTS):
        return None
    found = _smallest(evidence, "self")
    is_reciprocal = evidence.op.name == "aten::rsqrt"
    if found is None or found[1] > 0 or (found[1] == 0 and not is_reciprocal):
        return None
    name, low = found
    needs = "more than 0" if is_reciprocal else "at least 0"
    return Hint(
        text=f"the smallest input is {low:g}: the root needs {needs}",
        fix=f"{name}.clamp(min=1e-8)" if name else None,
    )


@rule(priority=12)
def slope_at_zero(evidence: Evidence) -> Hint | None:
    """A root, norm or power has an infinite slope at 0; where() does not stop its gradient."""
    violation = evidence.violation
    if violation is None or not violation.is_nonfinite or evidence.phase != "backward":
        return None
    place = evidence.forward_source or evidence.source
    line = place.text if place is not None else None
    words = ("sqrt", "norm(", "pow(", "**", "log", "std(", "cdist")
    if not line or not any(word in line for word in words):
        return None
    if "where(" in line:
        return Hint(
            text="where() hides the value in forward, but in backward the branch that is not taken "
            "still multiplies its infinite gradient by 0: replace the bad inputs before the op",
            fix="safe = torch.where(ok, x, 1.0)  # then the op on safe, then where(ok, …)",
        )
    return Hint(
        text="the gradient of this op is infinite at 0: keep its input away from 0, with a small "
        "eps inside the root, norm or logarithm",
    )


@rule(priority=14)
def half_precision_overflow(evidence: Evidence) -> Hint | None:
    """The result is beyond what half precision can hold."""
    violation = evidence.violation
    if violation is None or not violation.is_nonfinite:
        return None
    halves = {fact.dtype for fact in evidence.tensors} & _HALF
    first = violation.offenders.first
    if "float16" not in halves or not first or first[0].value not in ("inf", "-inf"):
        return None
    named = [fact for fact in evidence.tensors if fact.argument and fact.dtype == "float16"]
    # A product takes one dtype; what works element by element takes the wider of two.
    takes_two = len(named) == 1 or evidence.op.name in _ELEMENTWISE
    only = named[0] if takes_two and len({fact.expression for fact in named}) == 1 else None
    return Hint(
        text="float16 holds at most 65504: the result overflowed to infinity; compute this op in "
        "float32, or autocast to bfloat16",
        fix=rewritten(evidence, only, "{x}.float()"),
    )


@rule(priority=10)
def spread_of_one_sample(evidence: Evidence) -> Hint | None:
    """The unbiased deviation of a single value is 0 / 0."""
    if not _made(evidence, _SPREADS):
        return None
    fact = evidence.tensor("self")
    if fact is None or 1 not in (*fact.shape, *([1] if not fact.shape else [])):
        return None
    return Hint(
        text=f"the unbiased deviation of a single value is 0 / 0; the shape is {list(fact.shape)}",
        fix="correction=0",
    )


@rule(priority=10)
def all_labels_ignored(evidence: Evidence) -> Hint | None:
    """Every label is ignore_index: the mean over no label is 0 / 0."""
    names = frozenset({"aten::nll_loss_forward", "aten::nll_loss2d_forward"})
    if not _made(evidence, names):
        return None
    labels, ignored = evidence.tensor("target"), evidence.scalar("ignore_index") or "-100"
    if labels is None or (str(labels.summary.min), str(labels.summary.max)) != (ignored, ignored):
        return None
    return Hint(
        text=f"all {_count(labels.shape)} labels are {ignored} (ignore_index): the mean over no "
        "labels is 0 / 0; skip batches without labels, or use reduction='sum' divided by "
        "max(count, 1)",
    )


# --- NaN that no op made -------------------------------------------------------------------------


@rule(priority=29)
def nan_came_in(evidence: Evidence) -> Hint | None:
    """All results were looked at, and the first NaN was in a tensor or in the code already."""
    first, found = evidence.nan_watch and evidence.nan_watch.arrival, fault(evidence)
    if not first or found is None or evidence.violation is None:
        return None
    if not found[1].summary.nan and not bad_values(evidence) & LOST_NUMBERS:
        return None
    op, name = first.op, first.name
    where = f" in line {first.line}" if first.line else ""
    given = f"{op}{where} was called with it"
    if name is not None:
        given = f"{op}{where} read it from {name} ({first.values})"
    elif op.startswith("aten::lift_fresh"):
        given = f"a tensor was made{where} of numbers that held it"
    return Hint(
        text=f"the first NaN in this block was not computed in it: {given}",
        fix=f"assert {name}.isfinite().all()  # where it was changed last" if name else None,
    )


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
