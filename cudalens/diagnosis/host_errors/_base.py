"""The table of message patterns: one pattern knows one message, its verdict and its hints.

A pattern is a row of texts (:func:`row`), or a function (:func:`pattern`) that yields a verdict and
then hints; a function that yields nothing leaves the message to the next pattern.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from cudalens.core.report import ErrorFacts, Evidence
from cudalens.core.report_types import Certainty, Hint, Kind
from cudalens.diagnosis.host_errors._words import (
    dtype,
    expression_of,
    format_shape,
    ints,
    its_shape,
    named,
    owner,
)
from cudalens.diagnosis.user_code import api_function

REFUSED = "Refused on the host before any kernel ran; the GPU is not involved."
NO_ASSERT = "This is not a device-side assert."
_NO_DSA = "The advice about TORCH_USE_CUDA_DSA under it does not help."
_UNDER_CHECK = "{check_anew}, which waits after each op and names the one at fault."
_UNDER_SANITIZER = (
    "{rerun_as_script} under NVIDIA's compute-sanitizer, which names the kernel and the address."
)
_RAISED = "An exception of the host, not a device-side assert: it does not affect the GPU."
"""Of a message that no pattern knows: linalg.cholesky and bincount ask a kernel first."""
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
    """Whether nobody but torch and the libraries on top of it says such a thing."""


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
    headline: str,
    explanation: str = "",
    argument: str | None = None,
    *,
    kind: Kind = "host_error",
    certainty: Certainty | None = "proven",
    tensors: tuple[str, ...] = (),
    hint: Hint | None = None,
) -> None:
    """Enter a pattern whose verdict needs no code: templates over the groups of its match.

    Args:
        headline, explanation, argument: templates, see :class:`_Fields`.
        certainty: ``None`` for *likely* where the failing op is known, else *unknown*.
        tensors: names of the argument that the texts speak of; without ``argument`` it is at fault.
        hint: templates as well.
    """

    def explain(evidence: Evidence, match: re.Match[str]) -> Answer:
        fields = _Fields(evidence, match, tensors)
        at_fault = argument.format_map(fields) if argument else fields.argument
        texts = headline.format_map(fields), explanation.format_map(fields)
        if kind == "host_error":
            verdict = host(*texts, at_fault)
        else:
            verdict = (cuda if kind == "cuda_error" else autograd)(*texts, at_fault)
        by_op: Certainty = "likely" if evidence.op.name else "unknown"
        yield replace(verdict, certainty=certainty or by_op)
        if hint is not None:
            fix = hint.fix.format_map(fields) if hint.fix else None
            yield replace(hint, text=hint.text.format_map(fields), fix=fix)

    pattern(regex, name=name)(explain)


class _Text(str):
    """A group of a match, which ``{name:shape}`` and ``{name:dtype}`` put into Python's words."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        if spec == "shape":
            return format_shape(ints(self))
        return dtype(self) if spec == "dtype" else str(self)


class _Fields(dict[str, str]):
    """What templates may name: the groups of the match, and a few words of the evidence.

    ``{tensor}`` is the user's expression for the tensor, ``{its_shape}`` its shape after a colon,
    ``{of_shape}`` the same after "of", ``{for_input}`` that of a loss's scores,
    ``{is_lost}`` what to do when the device is lost.
    """

    def __init__(self, evidence: Evidence, match: re.Match[str], tensors: tuple[str, ...]) -> None:
        super().__init__({key: _Text(value) for key, value in groups(match).items()})
        fact, scores = named(evidence, *tensors), evidence.tensor("input")
        self.argument = fact.argument if fact else None
        self["for_input"] = f" for input {format_shape(scores.shape)}" if scores else ""
        self["tensor"] = expression_of(fact) or "the tensor"
        self["its_shape"] = its_shape(fact)
        self["of_shape"] = f" of shape {format_shape(fact.shape)}" if fact else ""
        self["function"] = api_function(evidence) or "the call"
        self["owner"] = owner(evidence)
        self["match"] = match[0].removeprefix("CUDA error: ")
        step = _UNDER_SANITIZER if evidence.synchronization.waits else _UNDER_CHECK
        step = evidence.steps.fill(step)
        self["is_lost"] = f"This process cannot use the GPU again. Next step: {step}"


def groups(match: re.Match[str]) -> dict[str, str]:
    """Return the groups that matched; of ``got`` and ``got2``, of which one does, as ``got``."""
    found = match.groupdict()
    return {key.rstrip("0123456789"): found[key] for key in found if found[key] is not None}


# --- what a message means ------------------------------------------------------------------------


def is_known_message(text: str) -> bool:
    """Return whether a message can only come from torch, or from a library on top of it."""
    message = own_message(text)
    return any(item.is_distinct and item.regex.search(message) for item in _patterns)


def own_message(text: str) -> str:
    """Return the message of an error, without the traceback that a worker's error carries."""
    if not _RERAISED.match(text):
        return text
    lines = text.rstrip().split("\n")
    for at in range(len(lines) - 1, -1, -1):
        kind, colon, message = lines[at].partition(": ")
        if colon and re.fullmatch(r"[A-Za-z_][\w.]*", kind):
            return "\n".join([message, *lines[at + 1 :]])
    return text


def explain_host_error(evidence: Evidence, error: ErrorFacts) -> Verdict:
    """Return what an exception of torch's, or of a library on top of it, means, and its hints."""
    message = own_message(error.message)
    for item in _patterns:
        match = item.regex.search(message)
        verdict = None if match is None else _read(item, item.explain(evidence, match))
        if verdict is not None:
            return _placed(verdict, error, evidence)
    return _placed(_repeated(error, message), error, evidence)


def _read(known: MessagePattern, answer: Answer) -> Verdict | None:
    """Return the verdict with its hints; hints that fail leave a line, and the verdict stands."""
    verdict = next(answer, None)
    if not isinstance(verdict, Verdict):
        return None
    hints: list[Hint] = []
    troubles: list[str] = []
    try:
        hints.extend(item for item in answer if isinstance(item, Hint))
    except Exception as trouble:
        troubles.append(f"hints of {known.name} failed: {type(trouble).__name__}: {trouble}")
    return replace(verdict, pattern=known.name, hints=tuple(hints), troubles=tuple(troubles))


def _repeated(error: ErrorFacts, message: str) -> Verdict:
    headline = message.strip().split("\n", 1)[0] or error.type_name
    if error.type_name in _HOST_TYPES or _HOST_TYPES & set(error.bases):
        return Verdict(kind="host_error", headline=headline, explanation=_RAISED)
    return Verdict(
        kind="python_error",
        certainty="unknown",
        headline=f"{error.type_name}: {headline}",
        explanation="Raised inside the Python code of torch or of a library on top of it.",
    )


def _placed(verdict: Verdict, error: ErrorFacts, evidence: Evidence) -> Verdict:
    """Add where a worker's error comes from, and what PyTorch's own advice is worth."""
    if verdict.kind == "cuda_error" and "TORCH_USE_CUDA_DSA" in error.message:
        verdict = replace(verdict, explanation=f"{verdict.explanation} {_NO_DSA}")
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
