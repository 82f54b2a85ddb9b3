"""Shapes that a loss cannot take."""

from __future__ import annotations

import re

from cudalens.core.report import Evidence
from cudalens.diagnosis.host_errors._base import HostVerdict, family, host
from cudalens.diagnosis.host_errors._words import called, expression, ints, named, of_shape, said


@family(
    r"Target size \(torch\.Size\(\[(?P<target>[\d, ]*)\]\)\) must be the same as input size "
    r"\(torch\.Size\(\[(?P<input>[\d, ]*)\]\)\)"
    r"|Using a target size \(torch\.Size\(\[(?P<target2>[\d, ]*)\]\)\) that is different to the "
    r"input size \(torch\.Size\(\[(?P<input2>[\d, ]*)\]\)\) is deprecated"
)
def loss_shapes(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A loss over pairs of elements got an input and a target of different shapes."""
    first = match["target"] is not None
    target = ints(match["target"] if first else match["target2"])
    shape = ints(match["input"] if first else match["input2"])
    return host(
        f"target has shape {said(target)}, input has {said(shape)}: this loss takes equal shapes",
        "It compares element by element and does not broadcast.",
        "target",
        target=target,
        input=shape,
        target_expression=expression(of_shape(evidence, target, "target")),
        input_expression=expression(of_shape(evidence, shape, "input")),
    )


@family(
    r"Expected input batch_size \((?P<input>\d+)\) to match target batch_size \((?P<target>\d+)\)"
)
def loss_batch(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A classification loss got more or fewer labels than rows of scores."""
    rows, labels = int(match["input"]), int(match["target"])
    scores, target = named(evidence, "input"), named(evidence, "target")
    shapes = ""
    if scores is not None and target is not None:
        shapes = f": input is {said(scores.shape)}, target {said(target.shape)}"
    return host(
        f"target has {labels} labels for {rows} rows of input{shapes}",
        "Each row of scores takes one label.",
        "target",
        rows=rows,
        labels=labels,
        input=scores.shape if scores else None,
        target=target.shape if target else None,
        input_expression=expression(scores),
        target_expression=expression(target),
    )


@family(
    r"0D or 1D target tensor expected, multi-target not supported"
    r"|only batches of spatial targets supported \(3D tensors\) but got targets of "
    r"(?:dimension|size)"
)
def label_dimensions(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """Labels have another number of dimensions than one per element of the scores' grid."""
    scores, target = named(evidence, "input"), named(evidence, "target")
    wanted = None
    if scores is not None and len(scores.shape) >= 1:
        wanted = scores.shape[:1] + scores.shape[2:]
    have = f"shape {said(target.shape)}" if target else "too many or too few dimensions"
    want = f", {said(wanted)} is wanted" if wanted is not None and target else ""
    return host(
        f"target has {have}{want}: one class number for each place, without a class dimension",
        "Class numbers have the shape of the scores without dimension 1.",
        "target",
        target=target.shape if target else None,
        wanted=wanted,
        input=scores.shape if scores else None,
        target_expression=expression(target),
    )


@family(
    r"(?:input and target batch or spatial sizes don't match: target \[(?P<target>[\d, ]+)\], "
    r"input \[(?P<input>[\d, ]+)\]"
    r"|size mismatch \(got input: \[(?P<input2>[\d, ]+)\] ?, target: \[(?P<target2>[\d, ]+)\])"
)
def label_sizes(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """Labels of an image or sequence have another size than the scores."""
    target = ints(match["target"] or match["target2"])
    shape = ints(match["input"] or match["input2"])
    return host(
        f"target has shape {said(target)}, input {said(shape)} takes {said(shape[:1] + shape[2:])}",
        "Class numbers have the shape of the scores without dimension 1.",
        "target",
        target=target,
        wanted=shape[:1] + shape[2:],
        input=shape,
        target_expression=expression(of_shape(evidence, target, "target")),
    )


@family(r"Expected target size \[(?P<want>[\d, ]+)\], got \[(?P<got>[\d, ]+)\]")
def label_grid(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """Labels of a sequence have another shape than the scores without their classes."""
    want, got = ints(match["want"]), ints(match["got"])
    scores = named(evidence, "input")
    shape = f" for input {said(scores.shape)}" if scores else ""
    return host(
        f"target has shape {said(got)}, {said(want)} is wanted{shape}",
        "The classes of the scores are dimension 1: (batch, classes, length).",
        "target",
        target=got,
        wanted=want,
        input=scores.shape if scores else None,
        input_expression=expression(scores),
        target_expression=expression(named(evidence, "target")),
    )


@family(
    r"weight tensor should be defined either for all (?P<n>\d+) classes or no classes but got "
    r"weight tensor of shape: \[(?P<shape>[\d, ]*)\]"
)
def class_weights(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A loss got class weights for another number of classes."""
    shape = ints(match["shape"])
    return host(
        f"weight has shape {said(shape)}, there are {match['n']} classes",
        f"{called(evidence) or 'The loss'} takes one weight for each class.",
        "weight",
        want=int(match["n"]),
        shape=shape,
    )
