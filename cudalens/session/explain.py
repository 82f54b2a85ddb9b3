"""Explain an exception that was met without the magic: after the fact, from what is left of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from cudalens.core import _torch
from cudalens.core.report import Report
from cudalens.core.report_types import TensorFact
from cudalens.diagnosis.diagnose import diagnose, is_device_assert
from cudalens.evidence import lost_context
from cudalens.evidence.exception import concerns_torch, evidence_of_error
from cudalens.evidence.finding import error_facts, timed
from cudalens.evidence.tensors import of_meta
from cudalens.guards.process import PROCESS

MAX_TENSORS = 40
_NEXT = (
    "Without a check CUDA reports an assert late, so the line shown may be an innocent one. "
    "Next step: restart the kernel, run `%load_ext cudalens` and `%cudacheck on`, then run the "
    "cells again: the bad value is then found before its launch, or the op at fault is named."
)


def explain(namespace: Mapping[str, object], error: BaseException | None) -> Report | None:
    """Make the report of an exception that left an unchecked cell.

    Args:
        namespace: the user's variables; of tensors only metadata is looked at.
        error: the exception that was shown last.

    Returns:
        ``None`` when there is no exception, or it is none of torch's.
    """
    known = getattr(error, "__cudalens_report__", None) or getattr(error, "report", None)
    if isinstance(known, Report):
        return known
    if error is None or not concerns_torch(error):
        return None
    if lost_context.is_lost(error_facts(error)) and (earlier := lost_context.end()) is not None:
        return earlier
    started = time.perf_counter()
    evidence = evidence_of_error(error, None, None)
    facts = error_facts(error)
    if lost_context.is_lost(facts):
        named = {fact.expression for fact in evidence.tensors}
        rest = [item for item in _tensors(namespace) if item.expression not in named]
        evidence = replace(evidence, tensors=(*evidence.tensors, *rest)[:MAX_TENSORS])
    report = diagnose(timed(evidence, started))
    if is_device_assert(facts):
        report = replace(report, explanation=f"{report.explanation} {_NEXT}")
    PROCESS.last = report
    lost_context.remember(report)
    return report


def _tensors(namespace: Mapping[str, object]) -> list[TensorFact]:
    """Describe the accelerator's tensors among the user's variables, from host memory alone."""
    found = []
    for name, value in list(namespace.items()):
        if name.startswith("_") or not isinstance(value, Tensor):
            continue
        if not _torch.is_accelerator(value.device):
            continue
        found.append(of_meta(None, _torch.meta_of(value), name))
        if len(found) == MAX_TENSORS:
            break
    return found
