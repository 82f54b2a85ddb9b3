"""What cut a tensor off its graph, as far as the lines around the failing one show it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from cudalens.core.report import Evidence
from cudalens.core.report_types import CodeLine, TensorFact

_DETACHES = (
    ("item", r"\.item\(\)", "item() gives a Python number, which has no graph"),
    ("tolist", r"\.tolist\(\)", "tolist() gives Python numbers, which have no graph"),
    ("detach", r"\.detach(?:_)?\(\)", "detach() cuts the tensor off its graph"),
    ("data", r"\.data\b", ".data is the tensor without its graph"),
    ("numpy", r"\.numpy\(\)|torch\.from_numpy\(", "autograd cannot follow through NumPy"),
    ("argmax", r"\bargmax\(", "argmax gives indices, which have no gradient"),
    ("tensor", r"\btorch\.(?:as_)?tensor\(", "torch.tensor copies values without their graph"),
)
_NAME = re.compile(r"(?<![\w.\"'])[A-Za-z_]\w*(?!\w*[\(=\"'])")
"""A variable that an expression reads: no attribute, no keyword, no function that it calls."""
_LIBRARIES = {"F", "nn", "torch"}
_NO_GRAD = re.compile(r"^\s*with\b.*\b(?:no_grad|inference_mode|set_grad_enabled\(False\))")


def detaching(evidence: Evidence, fact: TensorFact | None) -> tuple[str, str, int, str] | None:
    """Find, in the lines around the failing one, what cut a tensor off its graph.

    Returns:
        a sentence, the cause's name, the line's number and its text; ``None`` when the lines do
        not show it.
    """
    source = evidence.source
    if source is None or source.line is None or fact is None or not fact.expression:
        return None
    before = [item for item in source.context if item.line < source.line]
    return _cut(fact.expression, before, "it")


def _cut(name: str, before: Sequence[CodeLine], called: str) -> tuple[str, str, int, str] | None:
    """Find what cut ``name`` off: in the line that made it, or in that of the one it is made of.

    Of several variables any may have been without a graph, as a target is.
    """
    target = re.compile(rf"^\s*{re.escape(name)}\s*(?::[^=]+)?=(?!=)\s*(?P<value>.*)")
    for at in range(len(before) - 1, -1, -1):
        assigned = target.match(before[at].text)
        if assigned is None:
            continue
        number, text = before[at].line, before[at].text.strip()
        for cause, pattern, words in _DETACHES:
            if re.search(pattern, assigned["value"]):
                return f"Line {number} detached {called}: {words}.", cause, number, text
        found = _under_no_grad([item.text for item in before[: at + 1]], number, text)
        if found is not None:
            return found
        parts = list(set(_NAME.findall(assigned["value"])) - _LIBRARIES)
        return _cut(parts[0], before[:at], parts[0]) if len(parts) == 1 else None
    return None


def _under_no_grad(lines: list[str], number: int, text: str) -> tuple[str, str, int, str] | None:
    depth = _depth(lines[-1])
    for line in reversed(lines[:-1]):
        if line.strip() and _depth(line) < depth:
            if _NO_GRAD.match(line):
                words = (
                    f"Line {number} ran under {line.strip().removesuffix(':')}: no graph is made."
                )
                return words, "no_grad", number, text
            depth = _depth(line)
    return None


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())
