"""A saved tensor that was changed in place before backward, and the line that changes none."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from cudalens.core._python import parse
from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, ProvenanceStep
from cudalens.diagnosis.host_errors._base import Answer, autograd, pattern
from cudalens.diagnosis.host_errors._words import (
    MAX_HEADLINE,
    dtype,
    format_shape,
    in_headline,
    ints,
)

_MAX_SAVERS = 3
_CHANGED = " changed a tensor that backward needs"
_IN_PLACE = re.compile(r"[a-z]\w*[a-z]_")
_OF_GRADIENTS = {"clip_grad_norm_", "clip_grad_value_", "unscale_"}
"""Functions in place that change gradients only, and no tensor that backward needs."""
_IN_ORDER = "run backward through this graph before it, or the forward pass again after it"


@pattern(
    r"modified by an inplace operation: \[(?P<kind>[\w.]+) \[(?P<shape>[\d, ]*)\]\],?"
    r"(?: which is output (?P<at>\d+) of (?P<node>[\w:]+),)? is at version (?P<found>\d+); "
    r"expected version (?P<saved>\d+)"
)
def saved_tensor_modified(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A tensor that backward needs was changed in place after it had been saved."""
    step = evidence.modified.modified if evidence.modified else None
    found, saved = match["found"], match["saved"]
    tensor = [f"{dtype(match['kind'])} {format_shape(ints(match['shape']))}"]
    tensor += [f"output {match['at']} of {match['node']}"] if match["node"] else []
    if step is None:
        headline = _filled("a tensor that backward needs was changed in place", tensor)
    else:
        versions = f"version {found}, saved at version {saved}"
        headline = _filled(in_headline(_writer(evidence, step), _CHANGED), [versions])
    changed = f"It was changed by {_format_step(step)}. " if step else ""
    yield autograd(
        headline,
        f"The tensor, {', '.join(tensor)}, is at version {found}, and was saved at version "
        f"{saved}. {changed}{_savers(evidence)}Each in-place op adds one to a tensor's version. "
        "backward refuses a saved tensor whose version has changed, because its values may no "
        "longer be the ones that were saved.",
    )
    if (hint := _out_of_place(evidence)) is not None:
        yield hint


def _filled(headline: str, details: Sequence[str]) -> str:
    """Return a headline with as many of the details as it has room for."""
    shown = [", ".join(details[:count]) for count in range(len(details), 0, -1)]
    lines = (f"{headline}: {item}" for item in shown)
    return next((line for line in lines if len(line) <= MAX_HEADLINE), headline)


def _writer(evidence: Evidence, step: ProvenanceStep) -> str:
    """Return the line of a write for a headline, its op where the line is not known."""
    ref, here = step.source, evidence.source
    if ref is None or not ref.where:
        return step.op or "an op"
    is_near = here is not None and (ref.cell, ref.file) == (here.cell, here.file)
    place, text = f"line {ref.line}" if is_near else ref.where, ref.text
    whole = f"{place}: {text}" if text else place
    return whole if not text or len(whole) + len(_CHANGED) <= MAX_HEADLINE else text


def _savers(evidence: Evidence) -> str:
    """Say which op saved the tensor, or what is known of it besides."""
    known = evidence.modified
    if known is None:
        return ""
    savers = list(map(_format_step, known.savers))
    if len(savers) == 1:
        return f"It was saved by {savers[0]}. "
    if 1 < len(savers) <= _MAX_SAVERS:
        return f"It was saved by one of these: {'; '.join(savers)}. "
    made, read = _format_step(known.made), _format_step(known.read)
    if made and read and made != read:
        return f"It was made by {made} and last read by {read}. "
    if made or read:
        return f"It was {'made' if made else 'last read'} by {made or read}. "
    return ""


def _format_step(step: ProvenanceStep | None) -> str:
    """Return an op and its line: ``aten::add_ at In [3] line 7: w += 1``."""
    if step is None:
        return ""
    return " at ".join(filter(None, [step.op, step.source.format() if step.source else ""]))


def _out_of_place(evidence: Evidence) -> Hint | None:
    """Say where a new tensor has to be made instead."""
    known = evidence.modified
    if known is None or known.modified is None or known.modified.source is None:
        return None
    code = known.modified.source.text or ""
    text = f"{known.modified.source.where}: make a new tensor instead of changing the one that "
    text += "backward needs"
    if _only_steps(code):
        text = f"the step changes the parameters: {_IN_ORDER}"
    elif known.is_parameter:
        text = f"a parameter is changed between forward and backward: {_IN_ORDER}"
    elif known.module:
        text = f"{known.module} was made with inplace=True and writes over its input: let it make "
        text += "a new tensor"
    return Hint(rule="out_of_place", text=text)


def _only_steps(code: str) -> bool:
    """Return whether a line calls an optimizer's step and holds no other change in place."""
    try:
        nodes = list(ast.walk(parse(code.strip())))
    except SyntaxError:
        return False
    calls = [item.func for item in nodes if isinstance(item, ast.Call)]
    names = {item.attr for item in calls if isinstance(item, ast.Attribute)}
    if any(isinstance(item, ast.AugAssign) for item in nodes):
        return False
    return "step" in names and not any(map(_IN_PLACE.fullmatch, names - _OF_GRADIENTS))
