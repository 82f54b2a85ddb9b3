"""Errors of the autograd graph: missing graphs, misshapen gradients, leaves changed in place.

Not here: saved tensors that were changed in place or freed (saved_tensors).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from cudalens.core.api_names import stem_of
from cudalens.core.evidence_types import GraphCut
from cudalens.core.report import Evidence
from cudalens.core.report_types import CodeLine, Hint, TensorFact
from cudalens.diagnosis.host_errors._base import Answer, Verdict, autograd, pattern
from cudalens.diagnosis.host_errors._words import expression_of, format_shape, named
from cudalens.diagnosis.user_code import place, rewritten


@pattern(r"element (?P<at>\d+) of tensors does not require grad and does not have a grad_fn")
def no_graph(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Backward was asked of a tensor without a graph."""
    fact = named(evidence, "self", f"tensors[{match['at']}]", f"outputs[{match['at']}]")
    headline = f"{expression_of(fact) or 'the tensor'} has no grad_fn: nothing leads from it to a "
    headline += "tensor that requires grad"
    follows = "Autograd follows grad_fn from the loss to the parameters."
    verdict = autograd(headline, follows, fact.argument if fact else None)
    yield from _detached(evidence, fact, verdict)


@pattern(r"^'(?P<kind>float|int)' object has no attribute 'backward'", is_distinct=False)
def number_for_loss(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Backward was asked of a Python number that the loss had become."""
    odd = next((item for item in evidence.refused_call.odd_arguments), None)
    name = odd.name if odd else "the loss"
    kind = odd.words if odd else f"of type {match['kind']}"
    verdict = autograd(
        f"{name} is {kind}: it has no graph, and no backward",
        "Autograd follows the graph of a tensor.",
    )
    yield from _detached(evidence, TensorFact(argument="self", expression=name), verdict)


@pattern(r"grad can be implicitly created only for scalar outputs")
def not_a_scalar(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Backward without a gradient was asked of a tensor of several elements."""
    fact = named(evidence, "self", "tensors[0]", "outputs[0]")
    shape = f"has shape {format_shape(fact.shape)}" if fact else "has several elements"
    yield autograd(
        f"{expression_of(fact) or 'the tensor'} {shape}: backward() without a gradient takes one "
        "number",
        "A loss of reduction='none', or a model's whole output, is reduced by mean() or sum() "
        "first.",
        fact.argument if fact else None,
    )
    yield Hint(
        rule="reduce_loss",
        text="reduce it to one number: mean() or sum()",
        fix=rewritten(evidence, fact, "{x}.mean()"),
    )


@pattern(r"leaf Variable that requires grad is being used in an in-place operation")
def leaf_modified(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A leaf that requires grad was changed in place."""
    yield Hint(
        rule="change_without_graph",
        text="change a parameter under torch.no_grad(): autograd then does not record the change",
    )


@pattern(r"torch\.utils\.checkpoint: (?:A different number of tensors was|Recomputed values for )")
def checkpoint_differs(evidence: Evidence, match: re.Match[str]) -> Answer:
    """The checkpointed function computed something else when backward ran it again."""
    yield Hint(
        rule="checkpoint_state",
        text="backward runs the function again: state that the first run changes (a counter, a "
        "cache, a flag of the module) must not affect the second run: change it outside of the "
        "checkpointed function",
    )


@pattern(r"Function '(?P<f>\w+)' returned nan values in its (?P<at>\d+)th output")
def anomalous_gradient(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Anomaly detection stopped at the first NaN of a backward pass."""
    stem = match["f"].removesuffix("0").removesuffix("Backward").lower()
    places = {
        item.source.format()
        for item in evidence.history
        if item.source and stem_of(item.op).replace("_", "") == stem
    }
    place = f" (the backward of {places.pop()})" if len(places) == 1 else ""
    text = f"{match['f']}{place} had an input at the edge of its domain"
    text = f"{_STEEP[stem]}{place}" if stem in _STEEP else text
    yield Hint(
        rule="steep_gradient",
        text=f"{text}: keep its input away from there before the op, not after it",
    )


_STEEP = {
    "sqrt": "the slope of a root is infinite at 0, and 0 * inf is NaN",
    "pow": "the slope of a power below 1 is infinite at 0, and 0 * inf is NaN",
    "log": "the slope of the logarithm is infinite at 0, and 0 * inf is NaN",
    "linalgvectornorm": "a norm has no slope at 0",
    "norm": "a norm has no slope at 0",
    "acos": "the slope of acos is infinite at -1 and 1",
    "asin": "the slope of asin is infinite at -1 and 1",
    "div": "a quotient has no slope where its divisor is 0",
}


# --- what cut a tensor off its graph, as far as the lines before the failing one show it ---------

_REMEDIES = {
    "item": "keep the tensor and take item() for printing only",
    "tolist": "keep the tensor and take tolist() for printing only",
    "detach": "leave detach() out of the loss",
    "data": "leave .data out of the loss",
    "numpy": "compute the loss with torch",
    "argmax": "compute the loss from the scores, which have a gradient",
    "tensor": "combine the tensors themselves, with torch.stack or +",
    "no_grad": "compute the loss outside of no_grad",
}
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


_Cause = tuple[str, str, int]
"""A sentence, the cause's name and the line's number."""


def _detached(evidence: Evidence, fact: TensorFact | None, verdict: Verdict) -> Answer:
    """Add to a verdict what cut its tensor off the graph, where the lines before show it."""
    source, name = evidence.source, fact.expression if fact else None
    end = source.line or 0 if source else 0
    before = [item for item in source.context if item.line < end] if source else []
    cause = _cut(name, before, "it") if name else None
    if cause is None and evidence.graph_cut is not None:
        yield verdict
        yield _cut_by_call(evidence, evidence.graph_cut)
        return
    if cause is None:
        yield verdict
        return
    words, key, line = cause
    yield replace(verdict, explanation=f"{verdict.explanation} {words}")
    yield Hint(rule="detached_loss", text=f"line {line}: {_REMEDIES[key]}")


def _cut_by_call(evidence: Evidence, cut: GraphCut) -> Hint:
    """Name the recorded call that made a tensor without a graph of one that had it."""
    op, at = cut.op.strip("_"), cut.line
    text = f"{place(at, evidence)}: {at.text}; "
    remedies = (_REMEDIES.get(key) for key in (op, "argmax"))
    gives = f"{op}() gives numbers without a gradient" if op not in ("detach", "data") else ""
    words = {key: why for key, _, why in _DETACHES}.get(op) or gives
    return Hint(rule="detached_loss", text=f"{text}{words}: {next(filter(None, remedies))}")


def _cut(name: str, before: Sequence[CodeLine], called: str) -> _Cause | None:
    """Find what cut ``name`` off: in the line that made it, or in that of the one it is made of.

    Of several variables any may have been without a graph, as a target is.
    """
    target = re.compile(rf"^\s*{re.escape(name)}\s*(?::[^=]+)?=(?!=)\s*(?P<value>.*)")
    for at in range(len(before) - 1, -1, -1):
        assigned = target.match(before[at].text)
        if assigned is None:
            continue
        number = before[at].line
        for cause, regex, words in _DETACHES:
            if re.search(regex, assigned["value"]):
                return f"Line {number} detached {called}: {words}.", cause, number
        cut = _under_no_grad([item.text for item in before[: at + 1]], number)
        if cut is not None:
            return cut
        parts = set(_NAME.findall(assigned["value"])) - _LIBRARIES
        if len(parts) > 1 and assigned["value"].count("(") != 1:
            return None  # another call in it may lead to the parameters
        cuts = {part: _cut(part, before[:at], part) for part in parts}
        # What no line makes is data, which has no graph that could have been cut.
        unknown = [part for part in parts if not cuts[part] and _is_made(part, before[:at])]
        named = [cut for cut in cuts.values() if cut]
        return named[0] if len(named) == 1 and not unknown else None
    return None


def _is_made(name: str, before: Sequence[CodeLine]) -> bool:
    return any(re.match(rf"^\s*{re.escape(name)}\s*=(?!=)", item.text) for item in before)


def _under_no_grad(lines: list[str], number: int) -> _Cause | None:
    depth = _depth(lines[-1])
    for line in reversed(lines[:-1]):
        if line.strip() and _depth(line) < depth:
            if _NO_GRAD.match(line):
                words = (
                    f"Line {number} ran under {line.strip().removesuffix(':')}: no graph is made."
                )
                return words, "no_grad", number
            depth = _depth(line)
    return None


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())
