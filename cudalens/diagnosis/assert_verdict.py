"""Explain a device-side assert: the op, the argument, and how certain that is.

The evidence is the op that the recorder had in flight, and the text that CUDA printed.  Each is
checked against the other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cudalens.core.api_names import api_names_of_all, stem_of
from cudalens.core.device_asserts import AssertLine, fold
from cudalens.core.evidence_types import FittingCall
from cudalens.core.report import Evidence
from cudalens.core.report_types import Certainty
from cudalens.diagnosis.assert_meanings import Meaning, meaning_of
from cudalens.diagnosis.host_errors import Verdict

_GONE = (
    "The assert has ended the CUDA context of this process: no tensor on the device can be "
    "read and no kernel launched any more. Next step: {restart} to use the GPU."
)
_COMPILED = (
    "Code that torch.compile generated printed it, and which of its ops failed is not known. The "
    "line shown is where CUDA reported it. Next step: run the {code} without --no-force-eager: "
    "the functions then run eagerly and the op is named."
)
_EARLIER = (
    "It happened before this {block} ran. Next step: {check_all}: the op at fault is then named if "
    "torch called it."
)
_UNWAITED = (
    "The check did not wait for each op, so the real cause may be an earlier line. Next step: "
    "{rerun} under a full check, without options that leave out the waits: the op at fault is "
    "then named if torch called it."
)
_NOT_TORCH_S = "No known torch kernel prints it."
_NO_TEXT = "CUDA's text of the assertion was not seen."
_PAST_THE_OPS = (
    "A kernel that is launched past torch's ops, by Triton, CuPy or the replay of a CUDA graph, "
    "may have run at the same time."
)
_ELSEWHERE = (
    "Each op that the {block} called in its own thread was waited for, and none of them raised it: "
    "another thread did, or a kernel that was launched past torch's ops, as Triton and CuPy do."
)
_WAIT = "Next step: {rerun} without --no-sync: the op at fault is then named if torch called it."
_CHECK_NEXT = (
    "Next step: restart the kernel, run `%load_ext cudalens` and `%cudacheck on`, then run the "
    "cells again: the bad value is then found before its launch, or the op at fault is named."
)
_LATE = "CUDA reports asserts late, so the real cause may be an earlier line."
_BLOCKING = (
    "CUDA_LAUNCH_BLOCKING=1 is set. If that was so before Python started, the line shown is the "
    "one that launched the kernel. Otherwise the real cause may be an earlier line."
)
_REPORTED_LATE = "might be asynchronously reported"
"""torch appends this to each CUDA error, unless it knows that launches block."""
_OWN_NAMESPACES = ("aten", "prims", "prim", "quantized", "mkldnn", "c10d", "_c10d_functional")
_HANDLED_INSIDE = "The op's own error did not leave the block: code there handled or replaced it."
_OF_TORCH = re.compile(r"aten::|torch\.|\w+Backward\d+$")
"""Ops, functions and graph nodes of torch itself: the node of a custom Function has no number."""
_MAX_OPS = 3


def explain_assert(evidence: Evidence) -> Verdict:
    """Return the verdict on a device-side assert, from its text and the recorded op."""
    lines = fold(evidence.device_text or "")
    line = lines[0] if lines else None
    meaning = meaning_of(line, evidence.environment.torch) if line is not None else None
    certainty, headline = _conclusion(evidence, line, meaning)
    argument = meaning.argument_of(evidence.op.name) if meaning is not None else None
    say = evidence.steps.fill
    parts = [
        say(_EARLIER) if evidence.device_fault.was_before else "",
        _HANDLED_INSIDE if evidence.device_fault.was_handled_inside else "",
        _of_text(line, meaning) if meaning is not None else "",
        _not_waited(evidence),
        _unnamed(evidence, meaning),
        _who_else(evidence, line) if meaning is None else "",
        say(_COMPILED) if meaning is not None and meaning.is_compiled else "",
        f"It printed {len(lines)} different assertions, the first comes first." * (len(lines) > 1),
        say(_GONE) if evidence.is_checked else _GONE.partition(" Next step:")[0],
        "" if evidence.is_checked else _unchecked(evidence),
    ]
    return Verdict(
        kind="device_assert",
        certainty=certainty,
        headline=headline,
        explanation=" ".join(filter(None, parts)),
        argument=argument,
    )


def _unchecked(evidence: Evidence) -> str:
    message = evidence.error.message if evidence.error is not None else ""
    is_blocking = message.startswith("CUDA error") and _REPORTED_LATE not in message
    return f"{_BLOCKING if is_blocking else _LATE} {_CHECK_NEXT}"


def _conclusion(
    evidence: Evidence, line: AssertLine | None, meaning: Meaning | None
) -> tuple[Certainty, str]:
    if evidence.fitting_call is not None and meaning is not None:
        return "likely", headline_of(evidence.fitting_call, meaning)
    if evidence.op.name is None:
        return _without_op(evidence, line, meaning)
    name = evidence.op.name
    where = evidence.op.api or name
    if evidence.phase == "backward":
        is_node = name.rstrip("0123456789").endswith("Backward")
        where = f"{name if is_node else where} in the backward pass"
    if evidence.synchronization.is_op_unwaited and (
        meaning is None or not meaning.argument_of(name)
    ):
        detail = f": {meaning.sentence}" if meaning is not None else ""
        return "unknown", f"CUDA reported a device-side assert while {where} was called{detail}"
    if meaning is None:
        # If no torch kernel prints this text, a torch op is not the likely cause.
        # Nor is it without a text: a kernel launched outside torch's ops may have asserted.
        certainty: Certainty = "unknown" if _OF_TORCH.match(name) else "likely"
        if line is None:
            return certainty, f"{where} is the op after which CUDA reported a device-side assert"
        if certainty == "unknown":
            return certainty, f"CUDA asserted `{line.expression}` by the end of {where}"
        return certainty, f"{where} asserted on the device: `{line.expression}` failed"
    if meaning.is_compiled:
        return "likely", f"compiled code asserted on the device: {meaning.sentence}"
    if argument := meaning.argument_of(name):
        return "likely", f"{where} asserted on the device: {argument}: {meaning.sentence}"
    if not _OF_TORCH.match(name):
        return "likely", f"{where} asserted on the device: {meaning.sentence}"
    return (
        "unknown",
        f"CUDA printed the assert of {format_ops(meaning)}, but {evidence.op.api or name} was the "
        f"op that reported it: {meaning.sentence}",
    )


def _who_else(evidence: Evidence, line: AssertLine | None) -> str:
    """Return what else may have asserted, if a torch op met the error and no text names an op."""
    if not _OF_TORCH.match(evidence.op.name or ""):
        return ""
    if line is None:
        return "" if evidence.synchronization.is_op_unwaited else f"{_NO_TEXT} {_PAST_THE_OPS}"
    names = dict.fromkeys(item.op.partition(".")[0] for item in evidence.history if "::" in item.op)
    others = [name for name in names if name.partition("::")[0] not in _OWN_NAMESPACES]
    if not evidence.synchronization.is_op_unwaited or not others:
        return f"{_NOT_TORCH_S} {_PAST_THE_OPS}"
    listed = ", ".join(others[:_MAX_OPS])
    return f"{_NOT_TORCH_S} Ops called before that are not torch's: {listed}."


def _unnamed(evidence: Evidence, meaning: Meaning | None) -> str:
    """Return why no op is named: nothing waited for it, or waiting has cleared all recorded ops."""
    if evidence.op.name is not None or (meaning is not None and meaning.is_compiled):
        return ""
    if evidence.synchronization.waits is False:
        return evidence.steps.fill(_UNWAITED)
    is_cleared = evidence.synchronization.waits and not evidence.device_fault.was_before
    return evidence.steps.fill(_ELSEWHERE) if is_cleared else ""


def _without_op(
    evidence: Evidence, line: AssertLine | None, meaning: Meaning | None
) -> tuple[Certainty, str]:
    if meaning is not None:
        where = "compiled code" if meaning.is_compiled else format_ops(meaning)
        return "likely", f"{where} asserted on the device: {meaning.sentence}"
    if evidence.device_fault.was_before:
        block = evidence.steps.block
        return "unknown", f"CUDA reported a device-side assert that came before this {block}"
    sentence = (
        f"CUDA asserted `{line.expression}`" if line else "CUDA reported a device-side assert"
    )
    if not evidence.is_checked:
        return "unknown", f"{sentence}, and this {evidence.steps.block} was not checked"
    return "unknown", f"{sentence}, and no recorded op can be blamed for it"


def headline_of(call: FittingCall, meaning: Meaning) -> str:
    """Return the headline for the only call in some code that fits an assertion."""
    argument = meaning.argument_of(call.op)
    of = f"{argument}: " if argument else ""
    fits = f"{call.text} in line {call.line} is the only call of {call.code} that fits the assert"
    return f"{fits}: {of}{meaning.sentence}"


def format_ops(meaning: Meaning) -> str:
    """Return the functions behind a text, most common first: ``nn.Embedding, x[i] or another``."""
    return joined(api_names_of_all(meaning.ops))


def joined(names: Sequence[str]) -> str:
    """Return the first few names: ``gather, scatter, scatter_add or another``.

    Of a function and its module, ``F.embedding`` and ``nn.Embedding``, only the first is named.
    """
    each: dict[str, str] = {}
    for name in names:
        each.setdefault(stem_of(name).replace("_", "").lower().removesuffix("loss"), name)
    names = tuple(each.values())
    if len(names) > _MAX_OPS:
        return f"{', '.join(names[:_MAX_OPS])} or another"
    *first, last = names or ["a kernel"]
    return f"{', '.join(first)} or {last}" if first else last


def _not_waited(evidence: Evidence) -> str:
    if not evidence.synchronization.is_op_unwaited:
        return ""
    wait = evidence.steps.fill(_WAIT)
    return f"Ops were not waited for, so an earlier one can be at fault. {wait}"


def _of_text(line: AssertLine | None, meaning: Meaning) -> str:
    if line is None or not line.expression or meaning.is_compiled:
        return ""
    return f"CUDA printed `{line.expression}`, the check of {format_ops(meaning)}."
