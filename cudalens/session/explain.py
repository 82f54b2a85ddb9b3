"""Explain an exception that was raised outside a check, from its traceback and live objects."""

from __future__ import annotations

import ast
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType, SimpleNamespace

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core._python import entries_from_traceback, parse
from cudalens.core.device_asserts import fold
from cudalens.core.evidence_types import FittingCall
from cudalens.core.limits import Limits
from cudalens.core.report import Report
from cudalens.core.report_types import (
    Expression,
    MarkedLine,
    Observation,
    OpName,
    TensorFact,
)
from cudalens.core.reported import report_beside
from cudalens.diagnosis.assert_meanings import meaning_of
from cudalens.diagnosis.diagnose import diagnose
from cudalens.evidence import lost_context
from cudalens.evidence.context import rehearsed_fault
from cudalens.evidence.exception import evidence_of_error, report_of_another
from cudalens.evidence.failure import error_facts
from cudalens.evidence.tensors import of_meta
from cudalens.evidence.torch_errors import is_torch_error
from cudalens.guards.process import PROCESS
from cudalens.logs.fitting_call import Objects, fitting_calls
from cudalens.source.files import is_user_file, place_of_code, source_lines
from cudalens.source.safe_eval import SafeEvaluator, value_or
from cudalens.source.stack import Place, places_of


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
    own_report = report_beside(error) or getattr(error, "report", None)
    # An exception of the user's may have another attribute of this name.
    if isinstance(own_report, Report):
        return own_report
    if error is None or not is_torch_error(error):
        return None
    if (earlier := lost_context.earlier_failure(error)) is not None:
        return earlier
    if lost_context.is_of_another(error):
        report = report_of_another(error)
    else:
        with _torch.Unseen():  # modes and subclasses of the user's must not see our calls
            # A process that prints assertions has met one fault: its context ends with the first.
            rehearsed, message = getattr(rehearsed_fault(), "text", ""), error_facts(error).message
            is_lost = lost_context.is_fatal(error)
            asserts = (fold(rehearsed) or fold(message) or fold(printed)) if is_lost else ()
            lines = "\n".join(line.text() for line in asserts)
            report = _report_of(error, namespace, lines)
        lost_context.remember(report)
    PROCESS.last = report
    return report


def _report_of(error: BaseException, namespace: Mapping[str, object], lines: str) -> Report:
    """Return the report of an exception; ``lines`` are the assertions behind it."""
    started = time.perf_counter()
    tree = Limits().attempt("cell", lambda: _tree_of_cell(error), lambda: ast.Module([], []))
    # In place of the stream of a checked block.
    evidence, trial = evidence_of_error(
        error,
        None,
        SimpleNamespace(text=lambda **_: lines),
        started=started,
        is_checked=False,
        beside=lambda: _tensors(namespace, tree),
    )
    if evidence.op.name is None:
        find = partial(_call_that_fits, tree, lines, _Namespace(namespace))
        call = Limits().attempt("call", find)
        if call is not None:
            op = OpName(name=call.op, api=call.api)
            evidence = replace(evidence, op=op, fitting_call=call)
            return _with_suspect(diagnose(evidence, trial), call, error)
    return diagnose(evidence, trial)


def _with_suspect(report: Report, call: FittingCall, error: BaseException) -> Report:
    """Mark the line of the one call that fits: the report's own line is where CUDA was asked."""
    place = _first_user_place(error)
    assert place is not None  # the call was found in its file
    cell, file = place_of_code(place.filename)
    lines = source_lines(place.filename)[call.line - 1 : call.line]
    suspect = MarkedLine(
        line=call.line,
        text="".join(lines).strip() or None,
        cell=cell,
        file=file,
        mark="likely here",
    )
    text = f"{call.text} in line {call.line} is the only call of {call.code} that fits the assert"
    found = Observation(kind="suspect", text=text, facts={"api": call.api}, sources=(suspect,))
    return replace(report, observations=(*report.observations, found))


def _first_user_place(error: BaseException) -> Place | None:
    """Return the outermost place in the user's code that an exception left."""
    places = places_of(entries_from_traceback(error.__traceback__))
    return next((place for place in places if place.is_user), None)


def _tree_of_cell(error: BaseException) -> ast.Module:
    """Return the code of the cell, or the file, which failed, up to the statement that did."""
    first = _first_user_place(error)
    if first is None:
        return ast.Module([], [])
    tree = parse("\n".join(source_lines(first.filename)))
    return ast.Module([item for item in tree.body if item.lineno <= first.lineno], [])


def _call_that_fits(tree: ast.AST, lines: str, objects: Objects) -> FittingCall | None:
    """Return the one call of a cell that can print an assertion, ``None`` of none or several."""
    first = next(iter(fold(lines)), None)
    meaning = meaning_of(first) if first is not None else None
    if meaning is None:
        return None
    calls = fitting_calls(tree, meaning, objects)
    return calls[0] if len(calls) == 1 else None


class _Namespace(Objects):
    """The objects that the user's variables name."""

    def __init__(self, namespace: Mapping[str, object]) -> None:
        self._evaluator = SafeEvaluator(dict(namespace))

    def classes(self, node: ast.expr) -> Sequence[str] | None:
        """Return the names of an object's class and its bases; ``None`` where it is unknown."""
        value = value_or(self._evaluator, node, None)
        if value is None or getattr(value, "__name__", "").startswith("torch"):
            return None
        return [kind.__name__ for kind in type(value).__mro__]

    def parts(self, node: ast.expr) -> Sequence[str]:
        """Return the names of the classes of a module and its submodules."""
        value = value_or(self._evaluator, node, None)
        return [type(item).__name__ for item in _submodules(value)]

    def definitions(self, node: ast.expr) -> Sequence[ast.AST]:
        """Return the user's functions and classes that a call of the object runs."""
        value = value_or(self._evaluator, node, None)
        functions = [getattr(type(item), "forward", None) for item in _submodules(value)]
        return list(filter(None, map(_definition, dict.fromkeys(functions or [value]))))


def _submodules(value: object) -> list[torch.nn.Module]:
    return list(value.modules()) if isinstance(value, torch.nn.Module) else []


def _definition(function: object) -> ast.AST | None:
    """Return the syntax of a function of the user's, that of its class for a method."""
    if not isinstance(function, FunctionType) or not is_user_file(function.__code__.co_filename):
        return None
    name = function.__qualname__.partition(".")[0]
    tree = parse("\n".join(source_lines(function.__code__.co_filename)))
    return next((item for item in tree.body if getattr(item, "name", None) == name), None)


def _tensors(namespace: Mapping[str, object], tree: ast.AST) -> tuple[TensorFact, ...]:
    """Describe the accelerator's tensors that a cell mentions, from host memory alone."""
    mentioned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return tuple(
        of_meta(None, _torch.meta_of(value), Expression(name, ast.Name(name, ast.Load())))
        for name, value in namespace.items()
        if name in mentioned and not name.startswith("_") and isinstance(value, Tensor)
        if _torch.is_accelerator(value.device)
    )
