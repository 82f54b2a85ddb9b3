"""Turn evidence into a report: pure functions of strings and numbers, no torch, no I/O."""

from __future__ import annotations

import ast
import re
from dataclasses import fields, replace
from typing import Any

from cudalens.core.device_asserts import ASSERT_CODE
from cudalens.core.limits import Limits
from cudalens.core.report import ErrorFacts, Evidence, Facts, Report
from cudalens.core.report_types import (
    Bounds,
    Hint,
    Kind,
    Offenders,
    OpName,
    RaisedException,
    Replay,
    Violation,
    format_count,
    syntax,
)
from cudalens.diagnosis.assert_verdict import explain_assert
from cudalens.diagnosis.candidates import Trial, search, verify_fixes
from cudalens.diagnosis.hints import find_hints
from cudalens.diagnosis.host_errors import REFUSED, Verdict, explain_host_error, is_of_cpu
from cudalens.diagnosis.nonfinite_edits import finite_edit
from cudalens.diagnosis.observations import observe
from cudalens.diagnosis.origins import (
    at_origin,
    batch_second,
    features_of_images,
    lost_dimension,
    true_division,
)
from cudalens.diagnosis.user_code import (
    LONGEST_NAME,
    Fix,
    call_node,
    list_items,
    statement_of,
    written,
)

_ASSERT_SENTENCE = "device-side assert triggered"
_CAUSES = ("table_of_positions", "input_beyond_positions", "problem_type")
"""Explanations of an exception that say more than a successful edit of the call."""


def diagnose(evidence: Evidence, trial: Trial | None = None) -> Report:
    """Return the report of a failure.

    Args:
        evidence: what was collected about the failure.
        trial: runs the failing call with a fix.  Without it, no fix is shown as code.
    """
    verdict = _verdict(evidence)
    limits = Limits()
    limits.lines.extend(verdict.troubles)
    causes = limits.attempt("hints", lambda: find_hints(evidence, limits), tuple)
    trial = trial or Trial()
    hints = limits.attempt(
        "fixes",
        lambda: _hints(evidence, verdict, causes, trial),
        lambda: verify_fixes(causes, Trial()),
    )
    argument = verdict.argument or _argument_changed(evidence, hints) or verdict.argument_named
    headline = verdict.headline_own or verdict.headline
    observations = tuple(
        item
        for item in limits.attempt("observations", lambda: observe(evidence, trial, limits), tuple)
        if item.text not in headline  # the headline may contain it already
    )
    # A report keeps only the text of a fix, without its syntax.
    hints = tuple(replace(item, fix=item.fix and str(item.fix)) for item in hints)
    offenders = _offenders(evidence)
    bounds = bounds_of(evidence.violation) if evidence.violation else None
    facts = {item.name: getattr(evidence, item.name) for item in fields(Facts)}
    facts |= {
        "context_usable": verdict.context_usable,
        "replay": _replay(evidence),
        "graph": replace(evidence.graph, module_names=evidence.module_names),
        "limits": (*evidence.limits, *limits.lines),
    }
    return Report(
        **facts,
        kind=verdict.kind,
        certainty=verdict.certainty,
        headline=headline,
        headline_schema=verdict.headline,
        explanation=verdict.explanation,
        observations=observations,
        argument=argument,
        expression=_expression(evidence, argument),
        offenders=offenders,
        bounds=bounds,
        hints=hints,
        exception=_exception(evidence, _sentence(headline, bounds, offenders)),
    )


def _exception(evidence: Evidence, sentence: str) -> RaisedException | None:
    """Return the failure's exception: the one that was caught, or the one that a guard raises."""
    error, violation = evidence.error, evidence.violation
    if error is not None:
        message = error.message.strip().partition("\n")[0]
        return RaisedException(type=error.type_name, message=message)
    if violation is None:
        return None
    kind = "DeviceIndexError" if violation.is_index else "DeviceValueError"
    if violation.is_nonfinite:
        kind = "NonFiniteError"
    elif violation.is_silent:
        kind = "SilentFindingWarning"
    return RaisedException(type=kind, message=sentence)


def _hints(
    evidence: Evidence, verdict: Verdict, causes: tuple[Hint, ...], trial: Trial
) -> tuple[Hint, ...]:
    """Return at most one hint: an explanation, or an edit that was tried."""
    readings = verify_fixes((*verdict.hints, *causes), trial)
    if verdict.kind == "nonfinite":
        edit = finite_edit(evidence, trial)
        return readings if edit is None else (edit,)
    # A value that a distribution rejected may pass in another shape by chance.
    is_hosts = verdict.kind in ("host_error", "python_error") and not evidence.has_run_kernels
    if is_hosts and evidence.lost_dimension is not None:
        # The lost dimension was lost on another line, so an edit of this one is not the fix.
        return (lost_dimension(evidence, evidence.lost_dimension),)
    second = batch_second(evidence, trial) if is_hosts else None
    if second is not None:
        return (second,)  # any other change of the shapes would mix samples
    has_cause = any(item.fix or item.rule in _CAUSES for item in readings)
    edits = search(evidence, trial) if is_hosts and not has_cause else ()
    if not edits and any(item.rule == "size_of_layer" for item in readings):
        sized = features_of_images(evidence, trial)
        edits = () if sized is None else (sized,)
    hints = at_origin((*edits, *readings), evidence, trial)
    if is_hosts and not hints:
        hints = tuple(true_division(evidence, trial))
    # The sort is stable, so of several edits the first one stays.
    return tuple(sorted(hints, key=lambda item: item.fix is None)[:1])


def _argument_changed(evidence: Evidence, hints: tuple[Hint, ...]) -> str | None:
    """Return the argument that the successful edits change, ``None`` if they change several."""
    fixes = [item.fix for item in hints if isinstance(item.fix, Fix) and item.tried]
    if evidence.violation is not None and evidence.violation.is_nonfinite:
        return None  # the result is bad, not the argument that an edit changes
    firsts = [item.changes[0] for item in fixes if len({c.template for c in item.changes}) == 1]
    texts = {item.text for item in firsts}
    if len(firsts) < len(fixes) or len(texts) != 1:
        return None
    text = texts.pop()
    arguments = [item.argument for item in evidence.tensors if item.expression == text]
    return next(filter(None, arguments), None) if text else "self"


def _offenders(evidence: Evidence) -> Offenders | None:
    """Return the bad elements, with the user's names for the inputs of a NaN or infinity."""
    offenders = offenders_of(evidence.violation) if evidence.violation else None
    if offenders is None or not any(item.inputs for item in offenders.first):
        return offenders
    own = _input_names(evidence)
    first = (
        replace(item, inputs=tuple((own.get(name, name), value) for name, value in item.inputs))
        for item in offenders.first
    )
    return replace(offenders, first=tuple(first))


def _input_names(evidence: Evidence) -> dict[str, str]:
    """Return the user's expressions for arguments of the op."""
    return {
        item.argument: item.expression
        for item in evidence.tensors
        if item.argument and item.expression
    }


def _verdict(evidence: Evidence) -> Verdict:
    if evidence.violation is not None:
        return _of_violation(evidence, evidence.violation)
    if evidence.error is None:
        return Verdict(kind="python_error", certainty="unknown", headline="", explanation="")
    if is_device_assert(evidence.error):
        verdict = explain_assert(evidence)
    else:
        verdict = _with_fault(
            evidence, evidence.error, explain_host_error(evidence, evidence.error)
        )
    if verdict.context_usable is None:
        return verdict
    return replace(verdict, context_usable=evidence.context_usable)


def _expression(evidence: Evidence, argument: str | None) -> str | None:
    if argument is None:
        return None
    if _is_one_hot(evidence):
        return _labels_of_one_hot(evidence)
    position = evidence.violation.list_position if evidence.violation else None
    names = [argument] if position is None else [f"{argument}[{position}]", argument]
    for name in names:
        if (fact := evidence.tensor(name)) is not None and fact.expression:
            return fact.expression
    name, bracket, place = argument.partition("[")
    if name == "tensors" and bracket:
        # An item of a list display, which no variable holds.
        return dict(enumerate(list_items(evidence))).get(int(place.rstrip("]")))
    return None


def _is_one_hot(evidence: Evidence) -> bool:
    """Return whether ``F.one_hot`` failed in its ``scatter_``, whose index is labels[..., None]."""
    is_scatter = evidence.violation is not None and evidence.op.name == "aten::scatter_"
    return is_scatter and evidence.op.api == "torch.nn.functional.one_hot"


def _replay(evidence: Evidence) -> Replay:
    """Return the result of the CPU's kernel; for ``F.one_hot``, that of its own value check."""
    replay = evidence.replay
    if not _is_one_hot(evidence) or replay.outcome != "raised":
        return replay
    listed = evidence.violation.offenders.first if evidence.violation else ()
    is_negative = any(isinstance(it.value, int) and it.value < 0 for it in listed)
    sign = "non-negative" if is_negative else "smaller than num_classes"
    return replace(replay, exception="RuntimeError", message=f"Class values must be {sign}.")


def _labels_of_one_hot(evidence: Evidence) -> str | None:
    """Return the expression of the first argument of ``F.one_hot``."""
    node = call_node(evidence)
    if not isinstance(node, ast.Call) or not node.args or isinstance(node.args[0], ast.Starred):
        return None
    # If a library calls it, the user's line has other arguments.
    is_users = not evidence.frames or evidence.frames[-1].is_user
    return written(evidence, node.args[0]) if is_users else None


# --- a guard's finding ---------------------------------------------------------------------------


_DISCARD = "so discard everything computed from its result."


def _of_violation(evidence: Evidence, violation: Violation) -> Verdict:
    is_host = evidence.error is not None  # the CPU has rejected the value, not a guard
    parts = violation.explanation.strip(), _what_became_of_it(evidence, violation)
    return Verdict(
        kind="host_error" if is_host else _kind_of(violation),
        certainty="proven",
        headline=violation.sentence(related=_name_in_manual(evidence, violation.related)),
        headline_own=_in_own_names(evidence, violation),
        explanation=" ".join(filter(None, parts)),
        argument=violation.argument or None,
    )


def _what_became_of_it(evidence: Evidence, violation: Violation) -> str:
    """Return what CUDA does with such values, and what was done here."""
    if evidence.error is not None:
        return "" if evidence.has_run_kernels or is_of_cpu(evidence) else REFUSED
    if violation.is_nonfinite:
        return ""
    if violation.is_silent:
        return "No assert fires for this on CUDA: the op runs, and its result is wrong."
    if violation.device_text is None:
        if evidence.deferred:
            return f"The op ran with the bad values replaced by valid ones, {_DISCARD}"
        return f"The guard {violation.guard} stopped the op before its launch."
    done = "the value was found before the launch."
    if evidence.deferred:
        done = f"the op was given values in bounds in its place, {_DISCARD}"
    return (
        "On CUDA this stops the kernel with a device-side assert, and every tensor on the device "
        f"is lost; {done}"
    )


def _name_in_manual(evidence: Evidence, related: str | None) -> str | None:
    """Return the documented name, in the called function, for the op's ``self``."""
    functional = (evidence.op.api or "").startswith("torch.nn.functional.")
    return "input" if related == "self" and functional else related


def _in_own_names(evidence: Evidence, violation: Violation) -> str:
    """Return the headline with the user's expressions for tensors, if proven."""
    related = _name_in_manual(evidence, violation.related)
    facts = [evidence.tensor(name) for name in (violation.related, related) if name]
    names = [_own_name(fact.expression) for fact in facts if fact is not None]
    owner = next((item for item in evidence.owners if item.argument == violation.related), None)
    template = None
    if _is_one_hot(evidence):
        joined = ", which is" if evidence.deferred else " is"
        template = f"{violation.element}{joined} outside num_classes = {violation.size}"
    if owner is not None:
        names.append(f"{owner.text}.{owner.attribute}")
    if owner is not None and violation.unit and violation.element and not any(names[:-1]):
        has = format_count(violation.size or 0, violation.unit)
        allowed = f" ({violation.bounds.text})" if violation.bounds.text else ""
        template = f"{violation.element}, but {{related}} has {has}{allowed}"
        names = [f"{owner.text} ({owner.kind})"]
    name = next(filter(None, names), None)
    if name is None and template is None and (evidence.op.name or "").startswith("aten::"):
        # Without the user's expression: `input`, `self` and `weight` would say nothing to them.
        template = violation.headline.replace(" of {related}", "")
    if _is_of_a_part(evidence):
        template = (template or violation.headline).replace(" of {related}", "")
        template = re.sub(r"dimension \d+ \(", "its dimension (", template)
    return violation.sentence(
        template=template,
        related=name or related,
        inputs=_input_names(evidence),
        **_own_element(evidence, violation),
    )


def _is_of_a_part(evidence: Evidence) -> bool:
    """Return whether the op of a subscript got fewer or other dimensions than the user's tensor.

    For ``x[0, i]`` and ``x[:, None, i]`` the op gets a view of x.
    """
    node: ast.AST | None = call_node(evidence)
    fact = evidence.tensor("self")
    if node is None and evidence.source is not None:
        match statement_of(evidence.source.text):
            case ast.Assign(targets=[ast.Subscript() as target]):
                node = target
            case ast.AugAssign(ast.Subscript() as target):
                node = target
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Tuple):
        return False
    if fact is not None and fact.expression is not None:
        return False
    tensors = {it.expression for it in evidence.tensors}
    parts = [it for it in node.slice.elts if not isinstance(it, ast.Slice)]
    unknown = [it for it in parts if ast.unparse(it) not in tensors]
    # Slices keep the dimensions.  A single index beside them is the one at fault.
    return bool(unknown) and (len(parts) > 1 or isinstance(parts[0], ast.Constant))


def _own_element(evidence: Evidence, violation: Violation) -> dict[str, Any]:
    """Return the user's name for the tensor at fault, and the bad position in it.

    The op may have got the tensor in another shape.
    """
    expression = _expression(evidence, violation.argument or None)
    if expression is not None and _is_one_hot(evidence) and violation.offenders.first:
        position = violation.offenders.first[0].position[:-1]
        return {"argument": _own_name(expression), "position": position}
    if name := _own_name(expression):
        return {"argument": name}
    own = [fact for fact in evidence.tensors if violation.argument and fact.bad_at is not None]
    for fact in own:
        if name := _own_name(fact.expression):
            return {"argument": name, "position": fact.bad_at}
    if own:
        return {"argument": violation.argument, "position": own[0].bad_at}
    # `self` is the op's name. torch's documentation says `input`.
    name = "input" if violation.argument == "self" else violation.argument
    item = "" if violation.list_position is None else f"[{violation.list_position}]"
    if name == "indices" and item:
        name, item = "index", ""  # the dimension says which index it is
    if re.search(rf"(?<![\w.]){re.escape(name)}\b(?!=)", evidence.call_text or ""):
        # The user may have a variable with this name.
        return {"argument": f"argument {name}{item}"}
    return {"argument": f"{name}{item}"} if name else {}


def _own_name(expression: str | None) -> str | None:
    """Return an expression to which a position can be appended, ``None`` if it is too long.

    A long call is shortened to its function: ``torch.tanh(…)``.
    """
    node = syntax(expression)
    if expression and len(expression) > LONGEST_NAME and isinstance(node, ast.Call):
        expression = f"{ast.unparse(node.func)}(…)"
    if not expression or len(expression) > LONGEST_NAME:
        return None
    binds = isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Call)
    # The text of a `:=` expression has its own parentheses.
    return expression if binds or isinstance(node, ast.NamedExpr) else f"({expression})"


def format_sentence(report: Report) -> str:
    """Return the one-sentence summary: the headline with bounds and count."""
    return _sentence(report.headline, report.bounds, report.offenders)


def _sentence(headline: str, bounds: Bounds | None, offenders: Offenders | None) -> str:
    text = headline
    if bounds is not None and bounds.text and bounds.text not in text:
        text += f" (allowed {bounds.text})"
    if offenders is not None and offenders.total > 1:
        verb = "is" if offenders.count == 1 else "are"
        text += f"; {offenders.count} of {offenders.total} {verb} bad"
    return text


# --- an exception --------------------------------------------------------------------------------


def is_device_assert(error: ErrorFacts) -> bool:
    """Return whether an exception is CUDA's own report of a device-side assert."""
    return error.error_code == ASSERT_CODE or _ASSERT_SENTENCE in error.message


def _with_fault(evidence: Evidence, error: ErrorFacts, verdict: Verdict) -> Verdict:
    """Add what the device itself says to an exception that does not speak of it."""
    fault = evidence.device_fault
    if fault.hidden_error is None:
        return verdict
    message = error.message.strip().split("\n", 1)[0]
    if verdict.kind == "cuda_error" and fault.is_assert:
        real = explain_assert(evidence)
        hidden = f"{error.type_name} ({message}) is not the cause: it hides an assert."
        return replace(real, explanation=f"{hidden} {real.explanation}", hints=verdict.hints)
    rest = (
        f"The device had also failed before ({fault.hidden_error}): "
        f"{evidence.steps.restart} to use it."
    )
    return replace(verdict, explanation=f"{verdict.explanation} {rest}")


# --- the sentence of the exception ---------------------------------------------------------------


def format_message(report: Report) -> str:
    """Return the text of a guard's exception: complete without the report.

    Order: observed and allowed, op and argument, place in the user's code, what to do, CUDA.
    """
    lines = [format_sentence(report)]
    called = " → ".join(dict.fromkeys(filter(None, (report.op.api, report.op.name))))
    if called:
        names = [name for name in (report.expression, report.argument) if name]
        named = f", argument {' ('.join(names)}{')' * (len(names) - 1)}" if names else ""
        path = dict(report.graph.module_names).get(report.module_path or "", report.module_path)
        module = f" in module {path}" if path else ""
        lines.append(f"  op     {called}{named}{module}")
    if place := format_place(report):
        lines.append(f"  where  {place}")
    if forward := format_place(report, forward=True):
        lines.append(f"  from   forward call at {forward}")
    if report.prevented:
        done = "the op ran with values in bounds" if report.deferred else "nothing was launched"
        lines.append(f"  CUDA   is fine: {done}")
    # What to do comes last, where a traceback is read first.
    hint = _first_hint(report)
    if hint is not None:
        lines.append(f"  try    {hint.fix}  {hint.text}" if hint.fix else f"  hint   {hint.text}")
    return "\n".join(lines)


def _first_hint(report: Report) -> Hint | None:
    """Return the edit, if there is one, before a reading."""
    return next((it for it in report.hints if it.fix), next(iter(report.hints), None))


def format_place(report: Report, *, forward: bool = False) -> str | None:
    """Return the user's line as ``In [7] line 12: loss = …`` or ``train.py:12: …``."""
    source = report.forward_source if forward else report.source
    return None if source is None else source.ref.format() or None


def format_note(report: Report) -> str:
    """Return the line that is added as a note to an exception of torch's."""
    place = format_place(report)
    hint = _first_hint(report)
    advice = None if hint is None else f"try {hint.fix}" if hint.fix else hint.text
    parts = [report.headline, f"at {place}" if place else None, advice]
    return " · ".join(["cudalens: " + (parts[0] or "see the report"), *filter(None, parts[1:])])


# --- reports without a diagnosis ------------------------------------------------------------------


def offenders_of(violation: Violation) -> Offenders | None:
    """Return the bad elements, ``None`` if the guard did not count them."""
    return None if violation.offenders == Offenders() else violation.offenders


def bounds_of(violation: Violation) -> Bounds | None:
    """Return the allowed values, ``None`` if the guard has none."""
    return None if violation.bounds == Bounds() else violation.bounds


def bare_report_of_violation(
    violation: Violation, *, is_deferred: bool, limits: tuple[str, ...]
) -> Report:
    """Return a report from the violation alone, when collecting evidence has failed."""
    is_noticed = violation.is_silent or violation.is_nonfinite
    return Report(
        kind=_kind_of(violation),
        certainty="proven",
        prevented=not is_noticed,
        context_usable=True,
        headline=violation.sentence(),
        explanation=violation.explanation,
        op=OpName(name=violation.op, overload=violation.overload),
        argument=violation.argument,
        offenders=offenders_of(violation),
        bounds=bounds_of(violation),
        device_text=violation.device_text,
        deferred=is_deferred,
        limits=limits,
    )


def _kind_of(violation: Violation) -> Kind:
    if violation.is_nonfinite:
        return "nonfinite"
    return "silent" if violation.is_silent else "device_assert"


def bare_report_of_error(error: ErrorFacts, limits: tuple[str, ...]) -> Report:
    """Return a report from an exception's message alone, when collecting evidence has failed."""
    first = error.message.strip().split("\n", 1)[0]
    return Report(kind="python_error", headline=first or error.type_name, limits=limits)
