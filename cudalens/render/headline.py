"""The headline of a report in the user's own names."""

from __future__ import annotations

import ast
import warnings

from cudalens.core._python import parse_expression
from cudalens.core.report import Report
from cudalens.render.words import KINDS, format_bounds, format_number, one_line

_LONGEST_NAME = 40


def headline(report: Report) -> str:
    """Return the headline in the user's own names, with the bound that was broken.

    Falls back to the kind of the failure when nothing else is known.
    """
    if not report.headline.strip():
        return f"{KINDS.get(report.kind, report.kind)}: nothing more could be established"
    line = in_own_names(report)
    allowed = format_bounds(report)
    is_said = "allowed" in line or line.endswith(allowed)
    return one_line(line if is_said else f"{line}: allowed {allowed}")


def in_own_names(report: Report) -> str:
    """Put the user's expressions, where they are proven, in place of the schema's names.

    ``target[17] = 10 is outside the 10 classes of input`` becomes ``y[17] = … of logits``.
    """
    line = _with_own_position(report)
    for fact in report.tensors:
        name, expression = fact.argument, fact.expression
        if not name or not expression or len(expression) > _LONGEST_NAME:
            continue
        is_itself = name != report.argument or expression == report.expression
        if is_itself and line.startswith((f"{name}[", f"{name} = ")):
            line = _subject(expression) + line[len(name) :]
        if line.endswith(f" of {name}"):
            line = line[: -len(name)] + _subject(expression)
    return line


def _with_own_position(report: Report) -> str:
    """Name the bad value by its place in the user's tensor where the op got another shape."""
    first = report.offenders.first[0] if report.offenders and report.offenders.first else None
    if first is None or report.expression or not report.argument:
        return report.headline
    given = f"{report.argument}{list(first.position)}"
    for fact in report.tensors:
        is_short = fact.expression and len(fact.expression) <= _LONGEST_NAME
        if is_short and fact.bad_at is not None and report.headline.startswith(f"{given} = "):
            own = f"{_subject(str(fact.expression))}{list(fact.bad_at) if fact.bad_at else ''}"
            return own + report.headline[len(given) :]
    return report.headline


def _subject(expression: str) -> str:
    return expression if _binds_tightly(expression) else f"({expression})"


def _binds_tightly(expression: str) -> bool:
    """Return whether a position can follow directly: ``net(x)[0]``, but not ``y - 1[0]``."""
    try:
        with warnings.catch_warnings(action="ignore"):
            node = parse_expression(expression).body
    except (SyntaxError, ValueError):
        return False
    return isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call))


def headline_parts(report: Report) -> tuple[str, str]:
    """Split the headline into the observed value, ``y[17] = 10``, and the rest.

    The first part is empty unless the headline opens with the first bad value of the report.
    """
    line = headline(report)
    first = report.offenders.first[0] if report.offenders and report.offenders.first else None
    if first is None:
        return "", line
    spot = list(first.position)
    subjects = [
        subject
        for name in (report.expression, report.argument)
        if name
        for subject in (f"{_subject(name)}{spot}", f"{name}{spot}", name)
    ]
    subjects += [
        f"{_subject(fact.expression)}{list(fact.bad_at)}"
        for fact in report.tensors
        if fact.expression and fact.bad_at
    ]
    for subject in subjects:
        head = one_line(f"{subject} = {format_number(first.value)}")
        rest = line[len(head) :]
        if line.startswith(head) and not rest[:1].isalnum():
            return head, rest
    return "", line
