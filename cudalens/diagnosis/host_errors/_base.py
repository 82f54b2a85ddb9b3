"""Meaning of a message of torch's: its own words with the user's names, or those of a pattern.

A pattern is a row of texts (:func:`row`), or a function (:func:`pattern`) that yields a verdict,
hints, or both.  Without a verdict torch's words stand; one that yields nothing leaves the message
to the next pattern.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from cudalens.core.report import ErrorFacts, Evidence
from cudalens.core.report_types import Certainty, Hint, Kind
from cudalens.diagnosis.host_errors._words import (
    argument_at_fault,
    first_line,
    named,
    with_user_names,
)

REFUSED = "PyTorch rejected this call before running anything on the GPU."
NO_ASSERT = "This is not a device-side assert."
_NO_DSA = "The advice about TORCH_USE_CUDA_DSA under it does not help."
_UNDER_CHECK = "{check_anew}, which waits after each op and names the one at fault."
_UNDER_SANITIZER = (
    "{rerun_as_script} under NVIDIA's compute-sanitizer, which names the kernel and the address."
)
_RAISED = "An exception of the host: it does not affect the GPU."
"""Of a message that no pattern knows: linalg.cholesky and bincount ask a kernel first."""
_OF_THE_CPU = (
    "Refused by the CPU's kernel, which replaces the GPU's on the rehearsal device. What CUDA "
    "does with it is not known here."
)
# Checks that stand in the CPU's kernels alone: of sparse products, and names of such kernels.
_CPU_CHECK = re.compile(
    r"^(?:\w+: )?index out of (?:row |column )?bound(?:\. sspmm)?: |"
    r"^\"\w*_cpu(?:_\w*)?\" not implemented for '"
)
_OF_AUTOGRAD = re.compile(
    r"^Mismatch in shape: grad_output\[|^Output \d+ of \w+ is a view and "
    r"|[Ff]unction '?[\w:]+'? returned (?:an invalid gradient|an incorrect number of grad|nan val)"
    r"|^(?:The d|One of the d)ifferentiated Tensors? |leaf Variable that requires grad is being "
    r"|^Inference tensors cannot be saved|^Inplace update to inference tensor"
    r"|^you can only change requires_grad flags of leaf"
    r"|^torch\.utils\.checkpoint: (?:A different number of|Recomputed values for)"
)
"""Messages of autograd that say what is wrong by themselves."""
_OP = re.compile(r"^\w+: (?=mat[12] )")
_RERAISED = re.compile(r"^Caught (\w+) (in .+)\.\nOriginal Traceback")
_HOST_TYPES = frozenset(
    {"RuntimeError", "ValueError", "TypeError", "IndexError", "AssertionError"}
    | {"AttributeError", "NotImplementedError"}
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The part of a report that is a conclusion rather than an observation."""

    kind: Kind
    headline: str
    explanation: str
    certainty: Certainty = "proven"
    headline_own: str = ""
    argument: str | None = None
    argument_named: str | None = None
    """At fault by torch's words, where no change of another argument succeeds."""
    pattern: str | None = None
    """The pattern that knows the message, ``None`` when torch's words are only repeated."""
    context_usable: bool | None = True
    """``None`` when there is no device whose state could be known."""
    hints: tuple[Hint, ...] = ()
    troubles: tuple[str, ...] = ()
    """One line for hints that could not be made."""


Answer = Iterator["Verdict | Hint"]
"""A verdict, and hints after it; nothing where the pattern does not know the message after all."""
Explain = Callable[[Evidence, "re.Match[str]"], Answer]


@dataclass(frozen=True, kw_only=True)
class MessagePattern:
    """One kind of message: how it is recognised and what it means."""

    name: str
    regex: re.Pattern[str]
    explain: Explain
    is_distinct: bool
    """True if only torch and the libraries on top of it raise such an error."""


_patterns: list[MessagePattern] = []


def pattern(
    regex: str, *, name: str | None = None, is_distinct: bool = True
) -> Callable[[Explain], Explain]:
    """Enter the decorated function into the table; the earlier of two that match is asked first."""
    compiled = re.compile(regex, re.DOTALL)

    def enter(explain: Explain) -> Explain:
        own = str(name or getattr(explain, "__name__", ""))
        _patterns.append(
            MessagePattern(name=own, regex=compiled, explain=explain, is_distinct=is_distinct)
        )
        return explain

    return enter


def table() -> tuple[MessagePattern, ...]:
    """Return all patterns in the order in which they are tried."""
    return tuple(_patterns)


# --- rows: patterns of texts alone ---------------------------------------------------------------


def row(
    name: str,
    regex: str,
    headline: str = "",
    explanation: str = "",
    argument: str | None = None,
    *,
    kind: Kind = "host_error",
    certainty: Certainty | None = "proven",
    hint: Hint | None = None,
) -> None:
    """Enter a pattern whose verdict needs no code: templates over the groups of its match.

    Args:
        headline, explanation: templates, where ``{match}`` is the message and ``{is_lost}`` what
            to do when the device is lost; without a headline torch's words stand.
        certainty: ``None`` for *likely* where the failing op is known, else *unknown*.
        hint: its text is a template as well.
    """

    def explain(evidence: Evidence, match: re.Match[str]) -> Answer:
        step = _UNDER_SANITIZER if evidence.synchronization.waits else _UNDER_CHECK
        step = evidence.steps.fill(step)
        fields = groups(match) | {
            "match": match[0].removeprefix("CUDA error: "),
            "is_lost": f"This process cannot use the GPU again. Next step: {step}",
        }
        if headline:
            make = cuda if kind == "cuda_error" else host
            verdict = make(headline.format_map(fields), explanation.format_map(fields), argument)
            is_op_sure = evidence.op.name and not evidence.synchronization.is_op_unwaited
            by_op: Certainty = "likely" if is_op_sure else "unknown"
            yield replace(verdict, certainty=certainty or by_op)
        if hint is not None:
            yield replace(hint, text=hint.text.format_map(fields))

    pattern(regex, name=name)(explain)


def groups(match: re.Match[str]) -> dict[str, str]:
    """Return the groups that matched; of ``got`` and ``got2``, of which one does, as ``got``."""
    texts = match.groupdict()
    return {key.rstrip("0123456789"): texts[key] for key in texts if texts[key] is not None}


# --- what a message means ------------------------------------------------------------------------


def is_known_message(text: str) -> bool:
    """Return whether a message can only come from torch, or from a library on top of it."""
    message = own_message(text)
    is_distinct = any(item.is_distinct and item.regex.search(message) for item in _patterns)
    return is_distinct or bool(_OF_AUTOGRAD.search(message))


def own_message(text: str) -> str:
    """Return the message of an error, without the traceback that a worker's error carries.

    From torch 2.15 on some begin with the op, which a report has elsewhere: ``addmm: mat1 and …``.
    """
    if not _RERAISED.match(text):
        return _OP.sub("", text)
    lines = text.rstrip().split("\n")
    for at in range(len(lines) - 1, -1, -1):
        kind, colon, message = lines[at].partition(": ")
        if colon and re.fullmatch(r"[A-Za-z_][\w.]*", kind):
            return "\n".join([_OP.sub("", message), *lines[at + 1 :]])
    return text


def explain_host_error(evidence: Evidence, error: ErrorFacts) -> Verdict:
    """Return what an exception of torch's, or of a library on top of it, means, and its hints."""
    message = own_message(error.message)
    in_torchs_words = _repeated(evidence, error, message)
    for item in _patterns:
        match = item.regex.search(message)
        answer = None if match is None else _read(item, item.explain(evidence, match))
        if answer is not None:
            verdict, hints, troubles = answer
            named = replace(verdict or in_torchs_words, pattern=item.name)
            return _placed(replace(named, hints=hints, troubles=troubles), error, evidence)
    return _placed(in_torchs_words, error, evidence)


def _read(
    pattern: MessagePattern, answer: Answer
) -> tuple[Verdict | None, tuple[Hint, ...], tuple[str, ...]] | None:
    """Return verdict and hints; hints that fail leave a line, and the verdict stands."""
    verdict, hints, troubles = None, [], []
    try:
        for item in answer:
            if isinstance(item, Verdict):
                verdict = item
            else:
                hints.append(item)
    except Exception as trouble:
        troubles.append(f"hints of {pattern.name} failed: {type(trouble).__name__}: {trouble}")
    is_empty = verdict is None and not hints and not troubles
    return None if is_empty else (verdict, tuple(hints), tuple(troubles))


def _repeated(evidence: Evidence, error: ErrorFacts, message: str) -> Verdict:
    """Return torch's sentence: as it is, and with the user's names."""
    headline = first_line(message) or error.type_name
    if _OF_AUTOGRAD.search(message):
        fact = None if evidence.phase == "backward" else named(evidence, "self")
        own = f"{headline}: {fact.expression}" if fact and fact.expression else ""
        return replace(autograd(headline, "", "self" if fact else None), headline_own=own)
    if error.type_name in _HOST_TYPES or _HOST_TYPES & set(error.bases):
        return Verdict(
            kind="host_error",
            headline=headline,
            headline_own=with_user_names(headline, evidence),
            explanation=REFUSED if is_known_message(message) else _RAISED,
            argument_named=argument_at_fault(evidence, message),
        )
    return Verdict(
        kind="python_error",
        certainty="unknown",
        headline=f"{error.type_name}: {headline}",
        explanation="Raised inside the Python code of torch or of a library on top of it.",
    )


def is_of_cpu(evidence: Evidence) -> bool:
    """Return whether no tensor of a call is on a GPU: to say that nothing ran there misleads."""
    devices = {item.device for item in evidence.tensors if item.device}
    return devices == {"cpu"}


def _placed(verdict: Verdict, error: ErrorFacts, evidence: Evidence) -> Verdict:
    """Add where a worker's error comes from, and what PyTorch's own advice is worth."""
    if is_of_cpu(evidence):
        why = verdict.explanation.replace(REFUSED, "").replace(_RAISED, "").strip()
        verdict = replace(verdict, explanation=why)
    if verdict.kind == "cuda_error" and "TORCH_USE_CUDA_DSA" in error.message:
        verdict = replace(verdict, explanation=f"{verdict.explanation} {_NO_DSA}")
    is_on_device = any((fact.device or "").startswith("cuda") for fact in evidence.tensors)
    if evidence.environment.simulated and is_on_device and _CPU_CHECK.search(error.message):
        # The first screen says that CUDA is fine, so the doubt belongs there too.
        hints = verdict.hints or (Hint(text=_OF_THE_CPU),)
        verdict = replace(verdict, explanation=_OF_THE_CPU, hints=hints)
    reraised = _RERAISED.match(error.message)
    if reraised is None:
        return verdict
    at = f", at {evidence.worker_line}" if evidence.worker_line else ""
    return replace(verdict, explanation=f"Raised {reraised[2]}{at}. {verdict.explanation}")


# --- verdicts ------------------------------------------------------------------------------------


def host(headline: str, explanation: str = "", argument: str | None = None) -> Verdict:
    """Make a verdict of kind host_error."""
    return Verdict(
        kind="host_error",
        headline=headline,
        explanation=f"{explanation} {REFUSED}".strip(),
        argument=argument,
    )


def autograd(headline: str, explanation: str, argument: str | None = None) -> Verdict:
    """Make a verdict of kind autograd_error."""
    return Verdict(
        kind="autograd_error", headline=headline, explanation=explanation, argument=argument
    )


def cuda(
    headline: str,
    explanation: str,
    argument: str | None = None,
    *,
    certainty: Certainty = "likely",
    text: str = NO_ASSERT,
) -> Verdict:
    """Make a verdict of kind cuda_error.

    Args:
        text: what comes first in the explanation.
    """
    return Verdict(
        kind="cuda_error",
        headline=headline,
        explanation=f"{text} {explanation}".strip(),
        argument=argument,
        certainty=certainty,
    )
