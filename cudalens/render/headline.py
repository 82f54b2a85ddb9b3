"""The headline of a report in the user's own names."""

from __future__ import annotations

import ast
import warnings

from cudalens.model import Report
from cudalens.parsing import parse_expression
from cudalens.render.safe import one_line
from cudalens.render.words import KINDS, bounds_text, number

_LONGEST_NAME = 40


def headline(report: Report) -> str:
    """Give the headline in the user's own names, with the bound that was broken.

    Falls back to the kind of the failure when nothing else is known.
    """
    if not report.headline.strip():
        return f"{KINDS.get(report.kind, report.kind)}: nothing more could be established"
    line = in_own_names(report)
    allowed = bounds_text(report)
    is_said = "allowed" in line or line.endswith(allowed)
    return one_line(line if is_said else f"{line}: allowed {allowed}")


def in_own_names(report: Report) -> str:
    """Put the user's expressions, where they are proven, in place of the schema's names.

    ``target[17] = 10 is outside the 10 classes of input`` becomes ``y[17] = … of logits``.
    """
    line = report.headline
    for fact in report.tensors:
        name, expression = fact.argument, fact.expression
        if not name or not expression or len(expression) > _LONGEST_NAME:
            continue
        if not _binds_tightly(expression):
            expression = f"({expression})"
        if line.startswith((f"{name}[", f"{name} = ")):
            line = expression + line[len(name) :]
        if line.endswith(f" of {name}"):
            line = line[: -len(name)] + expression
    return line


def _binds_tightly(expression: str) -> bool:
    """Tell whether a position can follow directly: ``net(x)[0]``, but not ``y - 1[0]``."""
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
    spot = ", ".join(str(index) for index in first.position)
    for name in (report.expression, report.argument):
        for subject in (f"{name}[{spot}]", str(name)):
            head = one_line(f"{subject} = {number(first.value)}")
            rest = line[len(head) :]
            if name and line.startswith(head) and not rest[:1].isalnum():
                return head, rest
    return "", line
