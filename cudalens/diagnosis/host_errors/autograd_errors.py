"""Errors of the autograd graph: missing graphs, misshapen gradients, leaves changed in place.

Not here: saved tensors that were changed in place or freed (saved_tensors).
"""

from __future__ import annotations

import re

from cudalens.core.api_names import stem_of
from cudalens.core.evidence_types import GraphCut, SavedValues
from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, format_shape
from cudalens.core.torch_functions import Trait, functions
from cudalens.diagnosis.host_errors._base import Answer, autograd, pattern, row
from cudalens.diagnosis.host_errors._words import expression_of, named
from cudalens.diagnosis.user_code import place

_SHOWN = 4
"""Number of frozen parameters that are named."""


@pattern(r"element (?P<at>\d+) of tensors does not require grad and does not have a grad_fn")
def no_graph(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Backward was asked of a tensor without a graph."""
    fact = named(evidence, "self", f"tensors[{match['at']}]", f"outputs[{match['at']}]")
    headline = f"{expression_of(fact) or 'the tensor'} has no grad_fn: nothing leads from it to a "
    headline += "tensor that requires grad"
    follows = "Autograd follows grad_fn from the loss to the parameters."
    yield autograd(headline, follows, fact.argument if fact else None)
    if evidence.frozen:
        shown, count = ", ".join(evidence.frozen[:_SHOWN]), len(evidence.frozen)
        more = f" and {count - _SHOWN} more" if count > _SHOWN else ""
        name = expression_of(fact) or "the tensor"
        none = f"none of the parameters behind {name} requires"
        if count == 1:
            none = f"the only parameter behind {name} requires no"
        at = evidence.frozen_at
        by = f", which {place(at, evidence)} froze: {at.text}" if at is not None else ""
        yield Hint(text=f"{none} grad: {shown}{more}{by}", rule="all_frozen")
    if evidence.graph_cut is not None:
        yield _cut_by_call(evidence, evidence.graph_cut)


@pattern(r"^'(?P<kind>float|int)' object has no attribute 'backward'", is_distinct=False)
def number_for_loss(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Backward was asked of a Python number that the loss had become."""
    odd = next((item for item in evidence.refused_arguments.odd_arguments), None)
    name = odd.name if odd else "the loss"
    kind = odd.words if odd else f"of type {match['kind']}"
    yield autograd(
        f"{name} is {kind}: it has no graph, and no backward",
        "Autograd follows the graph of a tensor.",
    )
    if evidence.graph_cut is not None:
        yield _cut_by_call(evidence, evidence.graph_cut)


@pattern(r"grad can be implicitly created only for scalar outputs")
def not_a_scalar(evidence: Evidence, match: re.Match[str]) -> Answer:
    """backward() was called on a non-scalar without a gradient."""
    fact = named(evidence, "self", "tensors[0]", "outputs[0]")
    shape = f"has shape {format_shape(fact.shape)}" if fact else "has several elements"
    yield autograd(
        f"{expression_of(fact) or 'the tensor'} {shape}: backward() without a gradient takes one "
        "number",
        "A loss of reduction='none', or a model's whole output, is reduced by mean() or sum() "
        "first.",
        fact.argument if fact else None,
    )
    yield Hint(rule="reduce_loss", text="reduce it to one number: mean() or sum()")


@pattern(r"leaf Variable that requires grad is being used in an in-place operation")
def leaf_modified(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A leaf that requires grad was changed in place."""
    name = evidence.source.text if evidence.source else ""
    statement = re.match(r"(\w+) ([-+*/])= ", name or "")
    if statement is not None:
        name, op = statement[1], statement[2]
        yield Hint(
            rule="change_without_graph",
            text=f"{name} = {name} {op} … makes a new tensor with a graph. To change {name} "
            "itself, outside the graph, do it under torch.no_grad()",
        )
        return
    yield Hint(
        rule="change_without_graph",
        text="change a parameter under torch.no_grad(), where autograd does not record it. A "
        "tensor that collects results is made without requires_grad",
    )


row(
    "checkpoint_differs",
    r"torch\.utils\.checkpoint: (?:A different number of tensors was|Recomputed values for )",
    hint=Hint(
        rule="checkpoint_state",
        text="backward runs the function again: state that the first run changes (a counter, a "
        "cache, a flag of the module) must not affect the second run: change it outside of the "
        "checkpointed function",
    ),
)


@pattern(r"Function '(?P<f>\w+)' returned nan values in its (?P<at>\d+)th output")
def anomalous_gradient(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Anomaly detection stopped at the first NaN of a backward pass."""
    stem = match["f"].removesuffix("0").removesuffix("Backward").lower()
    if stem not in _STEEP:
        return
    saved = next((item for item in evidence.node_saved if item.name == _STEEP_AT[stem]), None)
    if saved is not None and saved.has_nan:
        what = "result" if saved.name == "result" else "input"
        text = f"the {what} of {stem} is NaN in forward already: {evidence.steps.nan} at its maker"
        yield Hint(rule="steep_gradient", text=text)
        return
    if saved is not None and stem == "log" and saved.min < 0:
        text = f"the input of log goes down to {saved.min:.4g}, where log is NaN in forward already"
        yield Hint(rule="steep_gradient", text=text)
        return
    if saved is not None and not _is_at_pole(stem, saved):
        return
    places = {
        item.source.format()
        for item in evidence.history
        if item.source and stem_of(item.op).replace("_", "") == stem
    }
    place = f" (the backward of {places.pop()})" if len(places) == 1 else ""
    yield Hint(
        rule="steep_gradient",
        text=f"{_STEEP[stem]}{place}: if its input gets there, keep it away before the op, not "
        "after it",
    )


def _is_at_pole(stem: str, saved: SavedValues) -> bool:
    """Return whether a value that a node has saved is one where the function has no slope."""
    if stem in functions(Trait.ARC):
        return bool(max(-saved.min, saved.max) >= 1)
    return bool(saved.nearest == 0)


_STEEP_AT = {
    **dict.fromkeys(("sqrt", "norm", "linalgvectornorm"), "result"),
    **dict.fromkeys({"pow", "log"} | functions(Trait.ARC), "self"),
    "div": "other",
}
"""The value that tells whether the function has a slope, by the name that its node saves it as."""
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


# --- what cut a tensor off its graph, as recorded ------------------------------------------------

_CUTS = {
    "item": (
        "item() gives a Python number, which has no graph",
        "keep the tensor and take item() for printing only",
    ),
    "detach": ("detach() cuts the tensor off its graph", "leave detach() out of the loss"),
    "data": (".data is the tensor without its graph", "leave .data out of the loss"),
    "tensor": (
        "torch.tensor copies values without their graph",
        "combine the tensors themselves, with torch.stack or +",
    ),
    "argmax": (
        "argmax gives indices, which have no gradient",
        "compute the loss from the scores",
    ),
    "grad": ("the gradient has no graph of its own", "pass create_graph=True"),
    "no_grad": (
        "its inputs have a graph and its result has none, as under torch.no_grad()",
        "run it outside of any torch.no_grad()",
    ),
    "no_grad block": (
        "what is computed in this block has no graph",
        "take the calls that the loss is made of out of it",
    ),
}
"""Words for each call: its effect on the graph, and the change that keeps the graph."""


def _cut_by_call(evidence: Evidence, cut: GraphCut) -> Hint:
    """Name the recorded call that made a number, or a tensor without a graph, of one that had it.

    A tensor may be meant to have no graph, and others may be what was to be trained.
    """
    op = cut.op.rstrip("_")
    gives = f"{op.strip('_')}() gives numbers without a gradient", _CUTS["argmax"][1]
    words, remedy = _CUTS.get(op, gives)
    lines = (f"{place(it, evidence)}: {it.text}" for it in (*cut.others, cut.line))
    text = f"{'; '.join(lines)}; {words}: to train through it, {remedy}"
    return Hint(rule="detached_loss", text=text)
