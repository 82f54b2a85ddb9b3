"""Errors of the autograd graph: in-place changes, freed graphs, missing and misshapen gradients."""

from __future__ import annotations

import re

from cudalens.core.evidence_types import FreedGraph
from cudalens.core.report import Evidence
from cudalens.core.report_types import LineRef, ProvenanceStep
from cudalens.diagnosis.host_errors._base import HostVerdict, autograd, family
from cudalens.diagnosis.host_errors._detaching import detaching
from cudalens.diagnosis.host_errors._words import called, dtype, expression, ints, named, said

_MAX_SAVERS = 3


@family(
    r"modified by an inplace operation: \[(?P<kind>[\w.]+) \[(?P<shape>[\d, ]*)\]\],?"
    r"(?: which is output (?P<at>\d+) of (?P<node>[\w:]+),)? is at version (?P<found>\d+); "
    r"expected version (?P<saved>\d+)"
)
def saved_tensor_modified(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A tensor that backward needs was changed in place after it had been saved."""
    shape, kind = ints(match["shape"]), dtype(match["kind"])
    modified = _format_step(evidence.modified.modified if evidence.modified else None)
    source = f", output {match['at']} of {match['node']}," if match["node"] else ""
    if modified:
        headline = f"{modified} changed a tensor that backward needs: "
    else:
        headline = "a tensor that backward needs was changed in place: "
    headline += (
        f"{kind} {said(shape)}{source} is at version {match['found']}, and was saved at version "
        f"{match['saved']}"
    )
    return autograd(
        headline,
        f"{_savers(evidence)}Each in-place op adds one to a tensor's version; backward refuses a "
        "saved tensor whose version has changed, since its values are other ones.",
        None,
        shape=shape,
        node=match["node"],
        modified=modified,
    )


def _savers(evidence: Evidence) -> str:
    """Say which op saved the tensor, or what is known of it besides."""
    known = evidence.modified
    if known is None:
        return ""
    savers = list(map(_format_step, known.savers))
    if len(savers) == 1:
        return f"It was saved by {savers[0]}. "
    if 1 < len(savers) <= _MAX_SAVERS:
        return f"It was saved by one of these: {'; '.join(savers)}. "
    made, read = _format_step(known.made), _format_step(known.read)
    if made and read and made != read:
        return f"It was made by {made} and last read by {read}. "
    if made or read:
        return f"It was {'made' if made else 'last read'} by {made or read}. "
    return ""


def _format_step(step: ProvenanceStep | None) -> str:
    """Return an op and its line: ``aten::add_ at In [3] line 7: w += 1``."""
    if step is None:
        return ""
    return " at ".join(filter(None, [step.op, step.source.format() if step.source else ""]))


@family(r"element (?P<at>\d+) of tensors does not require grad and does not have a grad_fn")
def no_graph(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """Backward was asked of a tensor without a graph."""
    fact = named(evidence, "self", f"tensors[{match['at']}]", f"outputs[{match['at']}]")
    subject = expression(fact) or "the tensor"
    cause = detaching(evidence, fact)
    why = f" {cause[0]}" if cause else ""
    return autograd(
        f"{subject} has no grad_fn: nothing leads from it to a tensor that requires grad",
        f"Autograd follows grad_fn from the loss to the parameters.{why}",
        fact.argument if fact else None,
        expression=expression(fact),
        dtype=fact.dtype if fact else None,
        cause=cause[1] if cause else None,
        line=cause[2] if cause else None,
        code=cause[3] if cause else None,
    )


@family(r"grad can be implicitly created only for scalar outputs")
def not_a_scalar(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """Backward without a gradient was asked of a tensor of several elements."""
    fact = named(evidence, "self", "tensors[0]", "outputs[0]")
    subject = expression(fact) or "the tensor"
    shape = f" has shape {said(fact.shape)}" if fact else " has several elements"
    return autograd(
        f"{subject}{shape}: backward() without a gradient takes one number",
        "A loss of reduction='none', or a model's whole output, is reduced by mean() or sum() "
        "first.",
        fact.argument if fact else None,
        expression=expression(fact),
        shape=fact.shape if fact else None,
    )


@family(
    r"Mismatch in shape: grad_output\[(?P<at>\d+)\] has a shape of torch\.Size\(\[(?P<got>[\d, "
    r"]*)\]\) "
    r"and output\[\d+\] has a shape of torch\.Size\(\[(?P<want>[\d, ]*)\]\)"
)
def gradient_argument_shape(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """The gradient given to backward has another shape than the tensor."""
    got, want = ints(match["got"]), ints(match["want"])
    return autograd(
        f"the given gradient has shape {said(got)}, the tensor has {said(want)}",
        "backward(gradient) takes one number for each element of the tensor.",
        "gradient" if called(evidence) == "backward" else "grad_outputs",
    )


@family(
    r"[Ff]unction (?P<f>[\w:]+) returned an invalid gradient at index (?P<at>\d+) - got "
    r"\[(?P<got>[\d, ]*)\]"
    r" but expected shape compatible with \[(?P<want>[\d, ]*)\]"
)
def gradient_shape(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A backward function returned a gradient of another shape than its input."""
    got, want = ints(match["got"]), ints(match["want"])
    # torch's own nodes are numbered, EmbeddingBackward0; a custom Function's is not.
    is_custom = not match["f"][-1].isdigit()
    return autograd(
        f"{match['f']} returned a gradient of shape {said(got)} for its input {match['at']} of "
        "shape "
        f"{said(want)}",
        "backward of a custom Function returns, for each input of forward, a gradient of that "
        "input's shape."
        if is_custom
        else "The tensor has another size now than when the graph was built: its data was replaced "
        "in between, while the older graph was still alive.",
        None,
        function=match["f"],
        at=int(match["at"]),
        got=got,
        want=want,
    )


@family(
    r"[Ff]unction (?P<f>[\w:]+) returned an incorrect number of gradients \(expected "
    r"(?P<want>\d+), "
    r"got (?P<got>\d+)\)"
)
def gradient_count(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A backward function returned too few or too many gradients."""
    return autograd(
        f"{match['f']} returned {match['got']} gradients, its forward has {match['want']} inputs",
        "backward returns one value for each input of forward; None for those without a gradient.",
        None,
        function=match["f"],
        got=int(match["got"]),
        want=int(match["want"]),
    )


@family(
    r"a (?P<view>view of a )?leaf Variable that requires grad is being used in an in-place "
    r"operation"
)
def leaf_modified(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A leaf that requires grad was changed in place."""
    fact = named(evidence, "self")
    subject = expression(fact) or "the tensor"
    what = "a view of a leaf" if match["view"] else "a leaf"
    return autograd(
        f"{subject} is {what} that requires grad, and {called(evidence) or 'an op'} changes it in "
        "place",
        "The gradient of a leaf belongs to its values before the change, which would be lost.",
        "self",
        expression=expression(fact),
        call=evidence.call_text,
    )


@family(
    r"Output (?P<at>\d+) of (?P<node>\w+) is a view and (?:is being|its base or another view of "
    r"its base "
    r"has been) modified inplace"
)
def multi_view_modified(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """One of several views that a function returned was changed in place."""
    fact = named(evidence, "self")
    subject = expression(fact) or f"output {match['at']}"
    op = match["node"].removesuffix("0").removesuffix("Backward").lower()
    return autograd(
        f"{subject} is one of several views that {op} returned, and is changed in place",
        "Autograd cannot follow a change of one of them through the others.",
        "self",
        expression=expression(fact),
    )


@family(
    r"The differentiated Tensor at index (?P<at>\d+) appears to not have been used in the graph"
    r"|One of the differentiated Tensors appears to not have been used in the graph"
)
def input_unused(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A gradient is asked for a tensor that the outputs do not depend on."""
    which = f"inputs[{match['at'] or 0}]"
    fact = named(evidence, which, "inputs")
    subject = expression(fact) or (which if match["at"] else "one of the inputs")
    return autograd(
        f"the outputs do not depend on {subject}",
        "It was not used in the forward pass, or a detached copy of it was.",
        (fact.argument if fact else None) or "inputs",
    )


@family(
    r"Inference tensors cannot be saved for backward"
    r"|Inplace update to inference tensor outside InferenceMode"
)
def inference_tensor(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A tensor made under inference_mode takes part in autograd."""
    return autograd(
        "a tensor made under torch.inference_mode is used where gradients are recorded",
        "Such a tensor has no version counter; clone() makes an ordinary one of it.",
        None,
    )


@family(r"you can only change requires_grad flags of leaf variables")
def flag_of_result(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """requires_grad was changed on the result of an op."""
    fact = named(evidence, "self")
    return autograd(
        f"{expression(fact) or 'the tensor'} is the result of an op, whose requires_grad follows "
        "from "
        "its inputs",
        "Only leaves have a flag of their own.",
        "self",
        expression=expression(fact),
    )


@family(r"Function '(?P<f>\w+)' returned nan values in its (?P<at>\d+)th output")
def anomalous_gradient(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """Anomaly detection stopped at a NaN in a gradient."""
    return autograd(
        f"{match['f']} returned NaN as gradient {match['at']}",
        "Anomaly detection stops at the first NaN; the forward op of this node met a value at the "
        "edge of its domain, or a gradient that was infinite already.",
        None,
        function=match["f"],
    )


# --- a second backward through a part of the graph that an earlie ---------------------------------


_GENERAL = (
    "backward frees what the forward pass had saved. A second backward of the same loss, or a "
    "tensor kept from an earlier step (a hidden state, a running loss), leads into that part."
)


@family(r"Trying to backward through the graph a second time")
def second_backward(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """The graph was freed by an earlier backward."""
    fact = named(evidence, "self", "tensors", "tensors[0]", "outputs", "outputs[0]")
    subject = expression(fact) or "this loss"
    freed = evidence.freed or FreedGraph(node="")
    made, by = _where(freed.made), _where(freed.freed)
    headline = f"a part of the graph of {subject} was freed by an earlier backward"
    if made and by:
        headline = f"{subject} leads into the graph of {made}, which backward in {by} has freed"
    return autograd(
        headline,
        _told(evidence) or _GENERAL,
        fact.argument if fact else None,
        expression=expression(fact),
        name=freed.name,
        kind=freed.container,
        by=by,
        read=_where(freed.read),
        kept=_where(freed.kept),
        is_made_again=freed.is_made_again,
        has_stepped=freed.has_stepped,
        code=(freed.freed and freed.freed.text) or "",
        kept_code=(freed.kept and freed.kept.text) or "",
    )


def _told(evidence: Evidence) -> str:
    """Say what freed the graph, and what led back into it."""
    freed = evidence.freed
    if freed is None:
        return ""
    by, made, read, kept = _with_code(freed.freed, freed.made, freed.read, freed.kept)
    if not made or not by:
        return ""
    said = f"backward frees what the forward pass had saved: {by} freed {freed.node} of {made}."
    if not read:
        return said
    what = freed.name or "a tensor"
    return f"{said} After that, {read} read {what} as {kept} had made it before."


def _with_code(*lines: LineRef | None) -> list[str]:
    """Return places with their texts, each text once: ``line 7 (h = rnn(x, h))``."""
    found: list[str] = []
    for line in lines:
        where = _where(line) or ""
        text = f"{where} ({line.text})" if line and line.text else where
        found.append(where if text in found else text)
    return found


def _where(line: LineRef | None) -> str | None:
    return (line.where or None) if line else None
