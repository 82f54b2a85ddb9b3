"""Explain an exception that was met without the magic: after the fact, from what is left of it."""

from __future__ import annotations

import ast
import time
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

from torch import Tensor

from cudalens.core import _torch
from cudalens.core._python import entries_from_traceback, parse
from cudalens.core.api_names import BACKWARD, api_names
from cudalens.core.device_asserts import fold
from cudalens.core.limits import Limits
from cudalens.core.report import Report
from cudalens.core.report_types import OpName, TensorFact
from cudalens.diagnosis.assert_meanings import meaning_of
from cudalens.diagnosis.diagnose import diagnose
from cudalens.evidence import lost_context
from cudalens.evidence.collect import error_facts
from cudalens.evidence.context import rehearsed_fault
from cudalens.evidence.exception import evidence_of_error, report_of_another
from cudalens.evidence.tensors import of_meta
from cudalens.evidence.torch_errors import is_torch_error, visible_entries
from cudalens.evidence.trial import trial_of_error
from cudalens.guards.process import PROCESS
from cudalens.source.files import is_user_file, source_lines
from cudalens.source.stack import places_of


def explain(
    namespace: Mapping[str, object], error: BaseException | None, printed: str = ""
) -> Report | None:
    """Make the report of an exception that left an unchecked cell.

    Args:
        namespace: the user's variables; of tensors only metadata is looked at.
        error: the exception that was shown last.
        printed: the assertions that CUDA printed in this process, where the shell has kept them.

    Returns:
        ``None`` when there is no exception, or it is none of torch's.
    """
    own_report = getattr(error, "__cudalens_report__", None) or getattr(error, "report", None)
    if isinstance(own_report, Report):
        return own_report
    if error is None or not is_torch_error(error):
        return None
    facts = error_facts(error)
    is_lost = lost_context.is_lost(facts)
    if is_lost and (earlier := lost_context.end()) is not None:
        return earlier
    if lost_context.is_of_another(error):
        PROCESS.last = report_of_another(error)
        return PROCESS.last
    started = time.perf_counter()
    lines = _assertions(facts.message, printed) if is_lost else ""
    tree = Limits().attempt("cell", lambda: _tree_of_cell(error), lambda: ast.Module([], []))
    trial = Limits().attempt("call", lambda: trial_of_error(error, visible_entries(error)))
    # In place of the stream of a checked block.
    evidence = evidence_of_error(
        error,
        None,
        SimpleNamespace(text=lambda **_: lines),
        started=started,
        trial=trial,
        is_checked=False,
        beside=lambda: _tensors(namespace, tree),
    )
    called = ""
    if evidence.op.name is None and (fits := _call_that_fits(tree, lines)) is not None:
        evidence = replace(evidence, op=fits[0])
        called = f" {fits[0].api} is called once in this cell, in line {fits[1]}."
    report = diagnose(evidence, None if is_lost else trial)
    PROCESS.last = report = replace(report, explanation=f"{report.explanation}{called}")
    lost_context.remember(report)
    return report


def _assertions(message: str, printed: str) -> str:
    """Return the assertions behind a failure: the rehearsal's own, the message's, or the printed.

    A process that prints some has met one fault: its context ends with the first.
    """
    rehearsed = getattr(rehearsed_fault(), "text", "")
    lines = fold(rehearsed) or fold(message) or fold(printed)
    return "\n".join(line.text() for line in lines)


def _tree_of_cell(error: BaseException) -> ast.AST:
    """Return the code of the cell, or the file, which failed."""
    places = places_of(entries_from_traceback(error.__traceback__))
    users = (place for place in places if is_user_file(place.filename))
    first = next(users, None)
    return parse("\n".join(source_lines(first.filename)) if first is not None else "")


def _call_that_fits(tree: ast.AST, lines: str) -> tuple[OpName, int] | None:
    """Return the op, as the cell names it, and the line of the one call that can print this.

    ``None`` where no call of the cell does, or more than one.
    """
    first = next(iter(fold(lines)), None)
    meaning = meaning_of(first) if first is not None else None
    if meaning is None:
        return None
    ops = {
        name.rpartition(".")[2]: OpName(name=op, api=name)
        for op in reversed(meaning.ops)
        for name in api_names(op)
        if not name.startswith(BACKWARD)
    }
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    named = ((ast.unparse(node.func).rpartition(".")[2], node.lineno) for node in calls)
    fitting = [(ops[name], line) for name, line in named if name in ops]
    return fitting[0] if len(fitting) == 1 else None


def _tensors(namespace: Mapping[str, object], tree: ast.AST) -> tuple[TensorFact, ...]:
    """Describe the accelerator's tensors that a cell mentions, from host memory alone."""
    mentioned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return tuple(
        of_meta(None, _torch.meta_of(value), name)
        for name, value in namespace.items()
        if name in mentioned and not name.startswith("_") and isinstance(value, Tensor)
        if _torch.is_accelerator(value.device)
    )
