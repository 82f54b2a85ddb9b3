"""The framework of the families: the message of an exception and the evidence in, a verdict out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cudalens.core.report import ErrorFacts, Evidence
from cudalens.core.report_types import Certainty, Kind
from cudalens.diagnosis.host_errors._sentences import is_sentence_of_torch

REFUSED = "Refused on the host before any kernel ran; the GPU is not involved."
_RAISED = "An exception of the host, and no device-side assert: it ends nothing on the GPU."
"""Of a message that no family knows: linalg.cholesky and bincount ask a kernel first."""
_RERAISED = re.compile(r"^Caught (\w+) (in .+)\.\nOriginal Traceback")
_HOST_TYPES = frozenset(
    {
        "RuntimeError",
        "ValueError",
        "TypeError",
        "IndexError",
        "AssertionError",
        "AttributeError",
        "NotImplementedError",
    }
)


@dataclass(frozen=True, kw_only=True)
class HostVerdict:
    """What is concluded from an exception that was raised on the host."""

    kind: Kind
    headline: str
    explanation: str
    certainty: Certainty = "proven"
    argument: str | None = None
    family: str | None = None
    """The family that knows the message, ``None`` when torch's words are only repeated."""
    has_device: bool = True
    """False when there is no device whose state could be told."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What was read from the message and the tensors; the hint rules of the family use it."""


Explain = Callable[[Evidence, "re.Match[str]"], HostVerdict | None]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of message: how it is recognised and what it means."""

    name: str
    pattern: re.Pattern[str]
    explain: Explain
    is_distinct: bool
    """Whether nobody but torch and the libraries on top of it says such a thing."""


_families: list[Family] = []


def family(pattern: str, *, is_distinct: bool = True) -> Callable[[Explain], Explain]:
    """Enter the decorated function into the table; the earlier of two that match is asked first."""

    def enter(explain: Explain) -> Explain:
        name = getattr(explain, "__name__", repr(explain))
        compiled = re.compile(pattern, re.DOTALL)
        _families.append(
            Family(name=name, pattern=compiled, explain=explain, is_distinct=is_distinct)
        )
        return explain

    return enter


def table() -> tuple[Family, ...]:
    """Return all families in the order in which they are tried."""
    return tuple(_families)


def is_known_message(text: str) -> bool:
    """Return whether a message can only come from torch, or from a library on top of it."""
    said = own_message(text)
    by_family = any(item.is_distinct and item.pattern.search(said) for item in _families)
    return by_family or is_sentence_of_torch(said)


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


def explain_host_error(evidence: Evidence, error: ErrorFacts) -> HostVerdict:
    """Say what an exception of torch's, or of a library on top of it, means."""
    message = own_message(error.message)
    for item in _families:
        match = item.pattern.search(message)
        verdict = None if match is None else item.explain(evidence, match)
        if verdict is not None:
            return _placed(replace(verdict, family=item.name), error, evidence)
    return _placed(_repeated(error, message), error, evidence)


def verdict_of(evidence: Evidence, *families: str) -> HostVerdict | None:
    """Return the verdict on the exception of the evidence when it is of one of these families."""
    error = evidence.error
    if error is None or evidence.violation is not None:
        return None
    message = own_message(error.message)
    if not any(item.name in families and item.pattern.search(message) for item in _families):
        return None
    verdict = explain_host_error(evidence, error)
    return verdict if verdict.family in families else None


def _repeated(error: ErrorFacts, message: str) -> HostVerdict:
    headline = message.strip().split("\n", 1)[0] or error.type_name
    if error.type_name in _HOST_TYPES or _HOST_TYPES & set(error.bases):
        return HostVerdict(kind="host_error", headline=headline, explanation=_RAISED)
    return HostVerdict(
        kind="python_error",
        certainty="unknown",
        headline=f"{error.type_name}: {headline}",
        explanation="Raised inside the Python code of torch or of a library on top of it.",
    )


def _placed(verdict: HostVerdict, error: ErrorFacts, evidence: Evidence) -> HostVerdict:
    """Add where a worker's error comes from."""
    reraised = _RERAISED.match(error.message)
    if reraised is None:
        return verdict
    at = f", at {evidence.worker_line}" if evidence.worker_line else ""
    return replace(verdict, explanation=f"Raised {reraised[2]}{at}. {verdict.explanation}")


# --- verdicts ------------------------------------------------------------------------------------


def host(
    headline: str, explanation: str, argument: str | None = None, **values: Any
) -> HostVerdict:
    """Make a verdict of kind host_error."""
    return HostVerdict(
        kind="host_error",
        headline=headline,
        explanation=f"{explanation} {REFUSED}".strip(),
        argument=argument,
        values=values,
    )


def autograd(
    headline: str, explanation: str, argument: str | None = None, **values: Any
) -> HostVerdict:
    """Make a verdict of kind autograd_error."""
    return HostVerdict(
        kind="autograd_error",
        headline=headline,
        explanation=explanation,
        argument=argument,
        values=values,
    )


def cuda(
    headline: str, explanation: str, certainty: Certainty = "likely", **values: Any
) -> HostVerdict:
    """Make a verdict of kind cuda_error."""
    return HostVerdict(
        kind="cuda_error",
        headline=headline,
        explanation=explanation,
        certainty=certainty,
        values=values,
    )
