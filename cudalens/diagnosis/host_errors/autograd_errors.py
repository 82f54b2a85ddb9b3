"""Errors of the autograd graph: missing graphs, misshapen gradients, leaves changed in place.

Not here: saved tensors that were changed in place or freed (saved_tensors).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace

from cudalens.core.api_names import stem_of
from cudalens.core.report import Evidence
from cudalens.core.report_types import CodeLine, Hint, TensorFact
from cudalens.diagnosis.host_errors._base import Answer, Verdict, autograd, pattern, row
from cudalens.diagnosis.host_errors._words import (
    expression_of,
    format_shape,
    in_headline,
    ints,
    named,
)
from cudalens.diagnosis.user_code import api_function, parsed, rewritten


@pattern(r"element (?P<at>\d+) of tensors does not require grad and does not have a grad_fn")
def no_graph(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Backward was asked of a tensor without a graph."""
    fact = named(evidence, "self", f"tensors[{match['at']}]", f"outputs[{match['at']}]")
    headline = f"{expression_of(fact) or 'the tensor'} has no grad_fn: nothing leads from it to a "
    headline += "tensor that requires grad"
    follows = "Autograd follows grad_fn from the loss to the parameters."
    verdict = autograd(headline, follows, fact.argument if fact else None)
    yield from _detached(evidence, fact, verdict)


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
    call = parsed(evidence.call_text or "")
    is_method = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
    text = ast.unparse(call.func.value) if is_method else None  # type: ignore[union-attr]
    loss = TensorFact(argument="self", expression=text)
    yield Hint(
        rule="reduce_loss",
        text="reduce it to one number: mean() or sum()",
        fix=rewritten(evidence, loss, "{x}.mean()"),
    )


@pattern(
    r"Mismatch in shape: grad_output\[(?P<at>\d+)\] has a shape of torch\.Size\(\[(?P<got>[\d, "
    r"]*)\]\) and output\[\d+\] has a shape of torch\.Size\(\[(?P<want>[\d, ]*)\]\)"
)
def gradient_argument_shape(evidence: Evidence, match: re.Match[str]) -> Answer:
    """The gradient given to backward has another shape than the tensor."""
    got, want = format_shape(ints(match["got"])), format_shape(ints(match["want"]))
    yield autograd(
        f"the given gradient has shape {got}, the tensor has {want}",
        "backward(gradient) takes one number for each element of the tensor.",
        "gradient" if api_function(evidence) == "backward" else "grad_outputs",
    )


@pattern(
    r"[Ff]unction (?P<f>[\w:]+) returned an invalid gradient at index (?P<at>\d+) - got "
    r"\[(?P<got>[\d, ]*)\] but expected shape compatible with \[(?P<want>[\d, ]*)\]"
)
def gradient_shape(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A backward function returned a gradient of another shape than its input."""
    got, want = format_shape(ints(match["got"])), format_shape(ints(match["want"]))
    # torch's own nodes are numbered, EmbeddingBackward0; a custom Function's is not.
    is_custom = not match["f"][-1].isdigit()
    yield autograd(
        f"{match['f']} returned a gradient of shape {got} for its input {match['at']} of shape "
        f"{want}",
        "backward of a custom Function returns, for each input of forward, a gradient of that "
        "input's shape."
        if is_custom
        else "The tensor has another size now than when the graph was built: its data was replaced "
        "in between, while the older graph was still alive.",
    )


@pattern(
    r"[Ff]unction (?P<f>[\w:]+) returned an incorrect number of gradients \(expected "
    r"(?P<want>\d+), got (?P<got>\d+)\)"
)
def gradient_count(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A backward function returned too few or too many gradients."""
    got, want = int(match["got"]), int(match["want"])
    yield autograd(
        f"{match['f']} returned {got} gradients, its forward has {want} inputs",
        "backward returns one value for each input of forward; None for those without a gradient.",
    )
    if got < want:
        yield Hint(
            rule="count_of_gradients",
            text="an input without a gradient, such as a number or a flag, has None in its place",
        )


@pattern(
    r"a (?P<view>view of a )?leaf Variable that requires grad is being used in an in-place "
    r"operation"
)
def leaf_modified(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A leaf that requires grad was changed in place."""
    what = "a view of a leaf" if match["view"] else "a leaf"
    yield autograd(
        in_headline(
            expression_of(named(evidence, "self")) or "the tensor",
            f" is {what} that requires grad, and {api_function(evidence) or 'an op'} changes it in "
            "place",
        ),
        "The gradient of a leaf belongs to its values before the change, which would be lost.",
        "self",
    )
    yield Hint(
        rule="change_without_graph",
        text="change a parameter under torch.no_grad(): autograd then does not record the change",
    )


@pattern(
    r"Output (?P<at>\d+) of (?P<node>\w+) is a view and (?:is being|its base or another view of "
    r"its base has been) modified inplace"
)
def multi_view_modified(evidence: Evidence, match: re.Match[str]) -> Answer:
    """One of several views that a function returned was changed in place."""
    fact = named(evidence, "self")
    op = match["node"].removesuffix("0").removesuffix("Backward").lower()
    yield autograd(
        in_headline(
            expression_of(fact) or f"output {match['at']}",
            f" is one of several views that {op} returned, and is changed in place",
        ),
        "Autograd cannot follow a change of one of them through the others.",
        "self",
    )


@pattern(
    r"The differentiated Tensor at index (?P<at>\d+) appears to not have been used in the graph"
    r"|One of the differentiated Tensors appears to not have been used in the graph"
)
def input_unused(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A gradient is asked for a tensor that the outputs do not depend on."""
    which = f"inputs[{match['at'] or 0}]"
    fact = named(evidence, which, "inputs")
    subject = expression_of(fact) or (which if match["at"] else "one of the inputs")
    yield autograd(
        f"the outputs do not depend on {subject}",
        "It was not used in the forward pass, or a detached copy of it was.",
        (fact.argument if fact else None) or "inputs",
    )


row(
    "inference_tensor",
    r"Inference tensors cannot be saved for backward"
    r"|Inplace update to inference tensor outside InferenceMode",
    "a tensor made under torch.inference_mode is used where gradients are recorded",
    "Such a tensor has no version counter; clone() makes an ordinary tensor of it.",
    kind="autograd_error",
)
row(
    "flag_of_result",
    r"you can only change requires_grad flags of leaf variables",
    "{tensor} is the result of an op: its requires_grad follows from the inputs of the op",
    "Only leaf tensors can set it.",
    "self",
    kind="autograd_error",
    tensors=("self",),
)
row(
    "checkpoint_differs",
    r"torch\.utils\.checkpoint: (?:A different number of tensors was saved during the original "
    r"forward and recomputation|Recomputed values for the following tensors have different)",
    "the checkpointed function computed something else when backward ran it again",
    "Checkpointing runs a forward pass twice, and both must save the same tensors.",
    kind="autograd_error",
    hint=Hint(
        rule="checkpoint_state",
        text="state that the first run changes (a counter, a cache, a flag of the module) must not "
        "affect the second run: change it outside of the checkpointed function",
    ),
)


@pattern(r"Function '(?P<f>\w+)' returned nan values in its (?P<at>\d+)th output")
def anomalous_gradient(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Anomaly detection met the first NaN of a backward pass."""
    stem = match["f"].removesuffix("0").removesuffix("Backward").lower()
    made = [
        item.source.format()
        for item in evidence.history
        if item.source and stem_of(item.op).replace("_", "") == stem
    ]
    place = f", the backward of {made[0]}" if len(set(made)) == 1 else ""
    yield autograd(
        f"{match['f']} returned NaN as gradient {match['at']}{place}",
        "Anomaly detection stops at the first NaN; the forward op of this node had a value at the "
        "edge of its domain, or a gradient that was infinite already.",
    )
    if stem in _STEEP:
        text = f"{_STEEP[stem]}: keep its input away from there before the op, not after it"
        yield Hint(rule="steep_gradient", text=text)


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
    if cause is None:
        yield verdict
        return
    words, key, line = cause
    yield replace(verdict, explanation=f"{verdict.explanation} {words}")
    yield Hint(rule="detached_loss", text=f"line {line}: {_REMEDIES[key]}")


def number_for_loss(evidence: Evidence, name: str, kind: str) -> Answer:
    """backward was asked of a Python number that the loss had become."""
    headline = f"{name} is a {kind}: it has no graph, and no backward"
    verdict = autograd(headline, "Autograd follows the graph of a tensor.")
    yield from _detached(evidence, TensorFact(argument="self", expression=name), verdict)


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
        found = _under_no_grad([item.text for item in before[: at + 1]], number)
        if found is not None:
            return found
        parts = set(_NAME.findall(assigned["value"])) - _LIBRARIES
        if len(parts) > 1 and assigned["value"].count("(") != 1:
            return None  # another call in it may lead to the parameters
        cuts = {part: _cut(part, before[:at], part) for part in parts}
        # What no line makes is data, which has no graph that could have been cut.
        unknown = [part for part in parts if not cuts[part] and _is_made(part, before[:at])]
        named = [found for found in cuts.values() if found]
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
