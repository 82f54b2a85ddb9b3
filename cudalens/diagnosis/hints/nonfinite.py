"""Causes of the first NaN or infinity: an op made it of finite inputs, or it came from outside."""

from __future__ import annotations

import ast
import math
import re

from cudalens.core.api_names import stem_of
from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, format_shape
from cudalens.core.torch_functions import Trait, functions
from cudalens.diagnosis.hints._reading import numel
from cudalens.diagnosis.hints._roles import name_of
from cudalens.diagnosis.user_code import call_node, last_name, parsed

_Domain = tuple[float, float, bool, str]
_UNIT: _Domain = (-1, 1, True, "numbers from -1 to 1")
_POSITIVE: _Domain = (0, math.inf, False, "numbers above 0")
_DOMAINS: dict[str, _Domain] = {
    "log1p": (-1, math.inf, False, "numbers above -1"),
    "sqrt": (0, math.inf, True, "numbers from 0 on"),
    "rsqrt": _POSITIVE,
    "acosh": (1, math.inf, True, "numbers from 1 on"),
    "atanh": (-1, 1, False, "numbers between -1 and 1"),
    "acos": _UNIT,
    "asin": _UNIT,
    "log": _POSITIVE,
    "log2": _POSITIVE,
    "log10": _POSITIVE,
}
"""Between which numbers a function has a finite result, at these as well or not, and in words."""
ROUNDING = 1e-5
"""So far beyond the end of a domain rounding takes a number, as a rule."""
_LARGEST = {
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
    "float16": 65504.0,
    "bfloat16": 3.39e38,
    "float32": 3.4e38,
    "float64": 1.8e308,
}
"""The largest number of each type."""
_WITH_POLE = ("div", "rdiv", "reciprocal", "pow")
_OTHER_NAMES = {"rtruediv": "rdiv", "true_divide": "div"}
_SPREADS = functions(Trait.SPREAD)
_EXPONENTIALS = functions(Trait.EXPONENTIAL)
_STEEP = {
    **dict.fromkeys(("sqrt", "hypot"), ("result", (0,))),
    **dict.fromkeys(functions(Trait.LOGARITHM), ("self", (0,))),
    **dict.fromkeys(functions(Trait.ARC) | {"atanh"}, ("self", (-1, 1))),
    "log1p": ("self", (-1,)),
    "acosh": ("self", (1,)),
}
"""Functions with an infinite slope: what their nodes save, and at which values of that it is."""
_OF_NODE = re.compile(r"Backward\d*$")
_WITHOUT_POLE = frozenset(
    # A node of autograd's has the name without any underscore.
    name.replace("_", "")
    for name in functions(Trait.FINITE) | functions(Trait.CAST)
)
"""Functions that give no infinity for finite numbers but by overflow, divisions by 0 aside."""
_HIDDEN = (
    "where() hides the value in forward, but in backward the branch that is not taken still "
    "multiplies its infinite gradient by 0: replace the bad inputs before the op"
)


def made(evidence: Evidence) -> str:
    """Return the last part of the name of what made the first NaN or infinity."""
    violation = evidence.violation
    if violation is None or not violation.is_nonfinite or violation.argument:  # it was read there
        return ""
    stem = stem_of(violation.op).strip("_")
    return _OTHER_NAMES.get(stem, stem)


def input_of(evidence: Evidence, name: str) -> float:
    """Return an input of the op at the position of the first NaN or infinity, NaN if not known."""
    text = dict(evidence.violation.inputs).get(name) if evidence.violation else None
    try:
        return float(text or "nan")
    except ValueError:  # a complex number
        return math.nan


def _line(evidence: Evidence) -> str:
    return (evidence.source.text if evidence.source is not None else None) or ""


def outside_domain(evidence: Evidence) -> Hint | None:
    """A function was given a number for which it has no finite result."""
    op, value = made(evidence), input_of(evidence, "self")
    if evidence.phase == "backward" or op not in (*_DOMAINS, *_WITH_POLE):
        return None
    text = None
    if op in _DOMAINS:
        text = _of_domain(evidence, op, value)
    elif op == "pow":
        text = _of_power(value, input_of(evidence, "exponent"))
    elif op == "rdiv":  # of a number by a tensor
        text = _of_division(evidence, input_of(evidence, "other"), value)
    else:
        text = _of_division(evidence, value, input_of(evidence, "other"))
    if text is None:
        return None
    is_hidden = _is_in_where(evidence) and any(item.requires_grad for item in evidence.tensors)
    return Hint(text=f"{text}. {_HIDDEN}" if is_hidden else text)


def _is_in_where(evidence: Evidence) -> bool:
    """Return whether the running call is written in the parentheses of a ``where``."""
    node, line = call_node(evidence), parsed(_line(evidence).partition(" = ")[2] or _line(evidence))
    if node is None or line is None:
        return False
    calls = (it for it in ast.walk(line) if isinstance(it, ast.Call))
    args = (arg for it in calls if last_name(it.func) == "where" for arg in it.args)
    return any(ast.dump(part) == ast.dump(node) for arg in args for part in ast.walk(arg))


def _of_domain(evidence: Evidence, op: str, value: float) -> str | None:
    low, high, is_closed, needs = _DOMAINS[op]
    is_inside = low < value < high or (is_closed and value in (low, high))
    if math.isnan(value) or is_inside:
        return None
    text = f"{op}({value:g}) is not finite: {op} takes {needs}"
    fact = evidence.tensor("self")
    if is_closed and max(low - value, value - high) <= ROUNDING:
        return f"{text}, and rounding may take one beyond: clamp it"
    if fact is None or not fact.expression or numel(fact) < 2:
        return text
    return f"{text}. {fact.expression} runs from {fact.summary.min} to {fact.summary.max}"


def _of_power(base: float, exponent: float) -> str | None:
    if base < 0 and not exponent.is_integer() and math.isfinite(exponent):
        return f"({base:g}) ** {exponent:g} is not real: the base of a fraction must be at least 0"
    return f"0 ** {exponent:g} divides by 0" if base == 0 and exponent < 0 else None


def _of_division(evidence: Evidence, above: float, below: float) -> str | None:
    if math.isnan(below):
        return "the divisor is 0 there: dividing by 0 gives inf" if above == 0 else None
    if below != 0:
        return None
    offenders = evidence.violation.offenders.first if evidence.violation else ()
    is_nan = bool(offenders) and offenders[0].value == "nan"  # what was divided may be overwritten
    if above != 0 and not is_nan:
        return "the divisor is 0 there: dividing by 0 gives inf"
    one, two = evidence.tensor("self"), evidence.tensor("other")
    name = one.expression if one and two and one.expression == two.expression else None
    if name:
        return f"{name} is 0 there, and {name} / {name} is 0 / 0, which gives nan and not 1"
    cure = ": F.normalize keeps the divisor above 0" if "norm(" in _line(evidence) else ""
    return f"both are 0 there, and 0 / 0 gives nan{cure}"


def all_masked(evidence: Evidence) -> Hint | None:
    """A softmax over a row of -inf alone divides 0 by 0."""
    if evidence.violation is None or not evidence.violation.is_masked_row:
        return None
    return Hint(
        text="every row with nan is -inf everywhere in the input, and softmax divides 0 by 0 "
        "there. Where -inf is a mask, leave at least one position of each row unmasked, or mask "
        "with torch.finfo(dtype).min"
    )


def negative_target(evidence: Evidence) -> Hint | None:
    """The target of kl_div is below 0, where it has no logarithm."""
    target = evidence.tensor("target")
    if target is None or made(evidence) != "kl_div" or evidence.phase == "backward":
        return None
    low, high = target.summary.min, target.summary.max
    if isinstance(low, str) or isinstance(high, str) or low is None or high is None or low >= 0:
        return None
    text = f"{name_of(target)} runs from {low:.4g} to {high:.4g}, and kl_div takes the logarithm "
    text += "of its target, nan below 0"
    text += ": with log_target=True the target is log-probabilities" if high <= 0 else ""
    return Hint(text=text)


def slope_at_zero(evidence: Evidence) -> Hint | None:
    """A root, power or logarithm has an infinite slope at 0; where() does not stop its gradient."""
    if not made(evidence) or evidence.phase != "backward":
        return None
    op = made(evidence).partition("Backward")[0].lower()
    saved, poles = _STEEP.get(op, ("self", ()))
    if op == "pow" and input_of(evidence, "exponent") < 1:
        poles = (0,)
    value = input_of(evidence, saved)
    if value not in poles:
        return None
    text = f"the gradient of {op} is infinite at {value:g}"
    if input_of(evidence, "gradient") == 0:
        return Hint(
            text=f"{text}, and 0 times it is nan: a mask or where() behind it does not stop that. "
            "Replace the bad inputs before the op"
        )
    return Hint(text=f"{text}: keep its {'input' if saved == 'self' else saved} away from it")


def overflow(evidence: Evidence) -> Hint | None:
    """The result is beyond the largest number of its type."""
    op, violation = made(evidence), evidence.violation
    first = violation.offenders.first if violation is not None else ()
    if not op or not first or first[0].value not in ("inf", "-inf"):
        return None
    if outside_domain(evidence) or slope_at_zero(evidence):
        return None
    is_backward = evidence.phase == "backward"
    name = _OF_NODE.sub("", op).lower() if is_backward else op
    if name.replace("_", "") not in _WITHOUT_POLE:
        return None
    if name in _WITH_POLE and (is_backward or (violation and violation.overwritten)):
        divisor = input_of(evidence, "other" if name == "div" else "self")
        if not is_backward or divisor == 0 or math.isnan(divisor):
            return None  # what was divided by is 0, or not known
    kind = violation.dtype if violation is not None else ""
    if kind not in _LARGEST:
        return None
    if op in _EXPONENTIALS and not math.isnan(power := input_of(evidence, "self")):
        return Hint(
            text=f"{op}({power:g}) is beyond the range of {kind}. torch.softmax, log_softmax and "
            "logsumexp take such numbers"
        )
    cure = ". Compute this op in float32, or autocast to bfloat16" if kind == "float16" else ""
    return Hint(text=f"the largest {kind} is {_LARGEST[kind]:.6g}: the result overflowed{cure}")


def row_with_infinity(evidence: Evidence) -> Hint | None:
    """A softmax over a row with +inf divides inf by inf."""
    violation, op = evidence.violation, made(evidence)
    if violation is None or op not in ("softmax", "log_softmax") or violation.is_masked_row:
        return None
    fact = evidence.tensor("self") or evidence.tensor("input")
    if fact is None or not fact.summary.inf or evidence.phase == "backward":
        return None
    if all(("-inf" in dict(item.inputs).values()) for item in violation.offenders.first):
        return None  # a masked row may do as much
    text = f"{fact.expression or 'the input'} contains inf, and {op} of a row with inf is nan"
    return Hint(text=text)


def of_too_few(evidence: Evidence) -> Hint | None:
    """A mean of no number, or an unbiased deviation of a single one, is 0 / 0."""
    fact, op = evidence.tensor("self"), made(evidence)
    if fact is None or op not in (*_SPREADS, "mean"):
        return None
    shape = format_shape(fact.shape)
    if numel(fact) == 0:
        return Hint(
            text=f"the shape is {shape}: the {op} of no element is 0 / 0. Leave this case out"
        )
    if op == "mean" or 1 not in (fact.shape or (1,)) or fact.summary.inf:
        return None
    first = evidence.violation.offenders.first if evidence.violation else ()
    if any(item.value != "nan" for item in first):
        return None
    return Hint(
        text=f"the shape is {shape}, and the unbiased deviation of a single value is 0 / 0. "
        "With correction=0 it is 0"
    )


def all_labels_ignored(evidence: Evidence) -> Hint | None:
    """Every label is ignore_index: the mean over no label is 0 / 0."""
    labels, ignored = evidence.tensor("target"), evidence.scalar("ignore_index") or "-100"
    if made(evidence) not in ("cross_entropy", "nll_loss") or labels is None:
        return None
    if (str(labels.summary.min), str(labels.summary.max)) != (ignored, ignored):
        return None
    return Hint(
        text=f"all {numel(labels)} labels are {ignored} (ignore_index): the mean over no "
        "labels is 0 / 0. Skip batches without labels, or use reduction='sum' divided by "
        "max(count, 1)"
    )
