"""Shapes that a loss cannot take."""

from __future__ import annotations

import re
from math import prod

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint
from cudalens.diagnosis.host_errors._base import Answer, groups, host, pattern, row
from cudalens.diagnosis.host_errors._words import Shape, format_shape, ints, named
from cudalens.diagnosis.host_errors.layers import channels_first
from cudalens.diagnosis.user_code import rewritten

_CLASS_NUMBERS = "Class numbers have the shape of the scores without dimension 1."


@pattern(
    r"Target size \(torch\.Size\(\[(?P<target>[\d, ]*)\]\)\) must be the same as input size "
    r"\(torch\.Size\(\[(?P<input>[\d, ]*)\]\)\)"
    r"|Using a target size \(torch\.Size\(\[(?P<target2>[\d, ]*)\]\)\) that is different to the "
    r"input size \(torch\.Size\(\[(?P<input2>[\d, ]*)\]\)\) is deprecated"
)
def loss_shapes(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A loss over pairs of elements got an input and a target of different shapes."""
    found = groups(match)
    target, shape = ints(found["target"]), ints(found["input"])
    yield host(
        f"target has shape {format_shape(target)}, input has {format_shape(shape)}: this loss "
        "takes equal shapes",
        "It compares element by element and does not broadcast.",
        "target",
    )
    for name, longer, other, shorter in (
        ("target", target, "input", shape),
        ("input", shape, "target", target),
    ):
        dim = _extra_dimension(longer, shorter)
        if dim is not None:
            yield Hint(
                rule="loss_dimension",
                text=f"the {name} has an extra dimension of size 1; the {other} has shape "
                f"{format_shape(shorter)}",
                fix=rewritten(evidence, evidence.tensor(name), f"{{x}}.squeeze({dim})"),
            )


def _extra_dimension(longer: Shape, shorter: Shape) -> int | None:
    """Return the dimension of size 1 without which two shapes are equal."""
    if len(longer) != len(shorter) + 1:
        return None
    for dim in range(len(longer) - 1, -1, -1):
        if longer[dim] == 1 and longer[:dim] + longer[dim + 1 :] == shorter:
            return dim
    return None


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
    if target and len(target.shape) > 1 and prod(target.shape) == int(match["input"]):
        yield Hint(
            rule="labels_not_flat",
            text=f"{target.shape} labels are {prod(target.shape)} in all, as many as the input has "
            "rows",
            fix=rewritten(evidence, target, "{x}.reshape(-1)"),
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
    if target is None or wanted is None:
        return
    dim = _extra_dimension(target.shape, wanted)
    if dim is not None:
        yield Hint(
            rule="label_class_dimension",
            text=f"the target has an extra dimension of size 1: its shape should be {wanted}",
            fix=rewritten(evidence, target, f"{{x}}.squeeze({dim})"),
        )
    elif set(target.summary.unique or ()) == {0, 1} and scores and target.shape == scores.shape:
        yield Hint(
            rule="label_class_dimension",
            text="the target is one-hot: this loss takes class numbers",
            fix=rewritten(evidence, target, "{x}.argmax(1)"),
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
    yield from _classes_last(evidence, shape, target)


@pattern(r"Expected target size \[(?P<want>[\d, ]+)\], got \[(?P<got>[\d, ]+)\]")
def label_grid(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Labels of a sequence have another shape than the scores without their classes."""
    want, got = ints(match["want"]), ints(match["got"])
    scores = named(evidence, "input")
    shape = f" for input {format_shape(scores.shape)}" if scores else ""
    yield host(
        f"target has shape {format_shape(got)} instead of {format_shape(want)}{shape}",
        "The classes of the scores are dimension 1: (batch, classes, length).",
        "target",
    )
    if scores is not None:
        yield from _classes_last(evidence, scores.shape, got)


def _classes_last(evidence: Evidence, shape: Shape, target: Shape) -> Answer:
    """The scores hold their classes in the last dimension, a loss wants them in dimension 1."""
    if len(shape) >= 3 and shape[:-1] == target:
        turn, _ = channels_first(shape)
        yield Hint(
            rule="classes_last",
            text="the classes of the scores are in the last dimension; the loss takes them second",
            fix=rewritten(evidence, evidence.tensor("input"), "{x}" + turn),
        )


row(
    "class_weights",
    r"weight tensor should be defined either for all (?P<n>\d+) classes or no classes but got "
    r"weight tensor of shape: \[(?P<shape>[\d, ]*)\]",
    "weight has shape {shape:shape}, there are {n} classes",
    "{function} takes one weight for each class.",
    "weight",
)
