"""Shapes that a loss cannot take."""

from __future__ import annotations

import re

from cudalens.core.report import Evidence
from cudalens.diagnosis.host_errors._base import Answer, groups, host, pattern, row
from cudalens.diagnosis.host_errors._words import format_shape, ints, named

_CLASS_NUMBERS = "Class numbers have the shape of the scores without dimension 1."


row(
    "loss_shapes",
    r"Target size \(torch\.Size\(\[(?P<target>[\d, ]*)\]\)\) must be the same as input size "
    r"\(torch\.Size\(\[(?P<input>[\d, ]*)\]\)\)"
    r"|Using a target size \(torch\.Size\(\[(?P<target2>[\d, ]*)\]\)\) that is different to the "
    r"input size \(torch\.Size\(\[(?P<input2>[\d, ]*)\]\)\) is deprecated",
    "target has shape {target:shape}, input has {input:shape}: this loss takes equal shapes",
    "It compares element by element and does not broadcast.",
    "target",
)


@pattern(
    r"Expected input batch_size \((?P<input>\d+)\) to match target batch_size \((?P<target>\d+)\)"
)
def loss_batch(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A classification loss got more or fewer labels than rows of scores."""
    scores, target = named(evidence, "input"), named(evidence, "target")
    shapes = ""
    if scores is not None and target is not None:
        shapes = f": input is {format_shape(scores.shape)}, target {format_shape(target.shape)}"
    yield host(
        f"target has {match['target']} labels for {match['input']} rows of input{shapes}",
        "Each row of scores takes one label.",
        "target",
    )


@pattern(
    r"0D or 1D target tensor expected, multi-target not supported"
    r"|only batches of spatial targets supported \(3D tensors\) but got targets of "
    r"(?:dimension|size)"
)
def label_dimensions(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Labels have another number of dimensions than one per element of the scores' grid."""
    scores, target = named(evidence, "input"), named(evidence, "target")
    wanted = None
    if scores is not None and len(scores.shape) >= 1:
        wanted = scores.shape[:1] + scores.shape[2:]
    have = f"shape {format_shape(target.shape)}" if target else "too many or too few dimensions"
    want = f" instead of {format_shape(wanted)}" if wanted is not None and target else ""
    yield host(
        f"target has {have}{want}: one class number for each sample or pixel, without a class "
        "dimension",
        _CLASS_NUMBERS,
        "target",
    )


@pattern(
    r"(?:input and target batch or spatial sizes don't match: target \[(?P<target>[\d, ]+)\], "
    r"input \[(?P<input>[\d, ]+)\]"
    r"|size mismatch \(got input: \[(?P<input2>[\d, ]+)\] ?, target: \[(?P<target2>[\d, ]+)\])"
)
def label_sizes(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Labels of an image or sequence have another size than the scores."""
    found = groups(match)
    target, shape = ints(found["target"]), ints(found["input"])
    yield host(
        f"target has shape {format_shape(target)}, input {format_shape(shape)} takes "
        f"{format_shape(shape[:1] + shape[2:])}",
        _CLASS_NUMBERS,
        "target",
    )


row(
    "label_grid",
    r"Expected target size \[(?P<want>[\d, ]+)\], got \[(?P<got>[\d, ]+)\]",
    "target has shape {got:shape} instead of {want:shape}{for_input}",
    "The classes of the scores are dimension 1: (batch, classes, length).",
    "target",
)
row(
    "class_weights",
    r"weight tensor should be defined either for all (?P<n>\d+) classes or no classes but got "
    r"weight tensor of shape: \[(?P<shape>[\d, ]*)\]",
    "weight has shape {shape:shape}, there are {n} classes",
    "{function} takes one weight for each class.",
    "weight",
)
