"""Shapes that a layer or a loss cannot take: convolutions, normalisation, attention, labels."""

from __future__ import annotations

import re

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint
from cudalens.diagnosis.host_errors._base import Answer, groups, host, pattern, row
from cudalens.diagnosis.host_errors._words import (
    format_shape,
    ints,
    its_shape,
    named,
    of_shape,
    owner,
)


def _if_input_is_right(name: str, value: object) -> Hint:
    return Hint(
        rule="size_of_layer", text=f"if the input is right, {name} of the layer has to be {value}"
    )


@pattern(
    r"weight of size \[(?P<weight>[\d, ]+)\], expected input\[(?P<input>[\d, ]+)\] to have "
    r"(?P<want>\d+) channels, but got (?P<got>\d+) channels"
)
def conv_channels(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A convolution's input has another number of channels than its weight takes."""
    weight, batched = ints(match["weight"]), ints(match["input"])
    want, got, spatial = int(match["want"]), int(match["got"]), len(weight) - 2
    unbatched = batched[0] == 1 and of_shape(evidence, batched[1:], "input") is not None
    shape = batched[1:] if unbatched else batched
    how = "is read as one unbatched sample" if unbatched else "has its channels in dimension 1"
    yield host(
        f"input has {got} channels, the weight takes {want}: shape {format_shape(shape)} {how}",
        f"The weight {format_shape(weight)} takes (batch, {want}, "
        f"{', '.join(['size'] * spatial)}); the input is {format_shape(shape)}.",
        "input",
    )
    if len(shape) == spatial + 2 and want not in shape:
        yield _if_input_is_right("in_channels", got)


@pattern(
    r"Expected (?P<low>\d)D \(unbatched\) or (?P<high>\d)D \(batched\) input to (?P<op>\w+), "
    r"but got input of size: \[(?P<shape>[\d, ]*)\]"
)
def conv_dimensions(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A convolution's or pooling's input has too few or too many dimensions."""
    shape, low, high = ints(match["shape"]), int(match["low"]), int(match["high"])
    count = "1 dimension" if len(shape) == 1 else f"{len(shape)} dimensions"
    yield host(
        f"input has {count}, {match['op']} takes {high}, or {low} for one sample: its shape is "
        f"{format_shape(shape)}",
        f"The {high} dimensions are (batch, channels, {', '.join(['size'] * (high - 2))}).",
        "input",
    )


row(
    "conv_kernel_size",
    r"Calculated padded input size per channel: \((?P<size>[\dx ]+)\)\. "
    r"Kernel size: \((?P<kernel>[\dx ]+)\)",
    "input is {size:shape} with its padding, smaller than the kernel {kernel:shape}",
    "Each convolution without padding and each pooling makes the image smaller; here it has become "
    "too small for this layer.",
    "input",
)


row(
    "batch_norm_channels",
    r"running_(?:mean|var) should contain (?P<got>\d+) elements not (?P<want>\d+)"
    r"|weight should contain (?P<got2>\d+) elements not (?P<want2>\d+)",
    "input has {got} channels in dimension 1, the normalisation is built for {want}{its_shape}",
    "num_features of {owner} must be the number of channels of the layer before it.",
    "input",
    tensors=("input",),
    hint=_if_input_is_right("num_features", "{got}"),
)


@pattern(r"expected (?P<want>[\dD or]+) input \(got (?P<got>\d)D input\)")
def norm_dimensions(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A normalisation or pooling module takes another number of dimensions."""
    kind = evidence.module_type or (evidence.op.api or "").rpartition(".")[2]
    yield host(
        f"input has {match['got']} dimensions, {kind} takes {match['want'].replace('D', '')}"
        f"{its_shape(named(evidence, 'input'))}",
        "Its name ends in the number of dimensions without batch and channels.",
        "input",
    )
    kind = evidence.module_type or ""
    rank = {"2": "1", "3": "1", "4": "2", "5": "3"}.get(match["got"])
    if kind.endswith(("1d", "2d", "3d")) and rank is not None and kind[-2] != rank:
        right = f"{kind[:-2]}{rank}d"
        yield Hint(
            rule="dimension_of_norm", text=f"for an input of {match['got']} dimensions, use {right}"
        )


@pattern(
    r"Expected more than 1 value per channel when training, got input size .*?\[(?P<s>[\d, ]+)"
)
def batch_norm_one_value(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Batch normalisation cannot train on one value per channel."""
    shape = ints(match["s"])
    yield host(
        f"input {format_shape(shape)} has one value per channel: batch normalisation cannot train "
        "on it",
        "Its variance over the batch would be that of a single value. The last batch of a loader "
        "often has only one sample.",
        "input",
    )
    if shape[0] == 1:
        yield Hint(
            rule="batch_of_one",
            text="the batch has one sample: let the loader drop a last batch that is not full, "
            "(drop_last), or call eval() of the model when not training",
        )


@pattern(
    r"Given normalized_shape=\[(?P<want>[\d, ]+)\], expected input with shape \[\*, .*?\], "
    r"but got input of size\s*\[(?P<shape>[\d, ]+)\]"
)
def layer_norm_shape(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Layer normalisation was built for other last dimensions."""
    want, shape = ints(match["want"]), ints(match["shape"])
    last = shape[-len(want) :]
    yield host(
        f"input {format_shape(shape)} ends in {format_shape(last)}, the normalisation is built for "
        f"{format_shape(want)}",
        f"normalized_shape of {owner(evidence)} must equal the last dimensions of its input.",
        "input",
    )
    yield _if_input_is_right("normalized_shape", last[0] if len(last) == 1 else last)


row(
    "group_norm_groups",
    r"Expected number of channels in input to be divisible by num_groups, but got input of shape "
    r"\[(?P<shape>\d+, (?P<n>\d+)[\d, ]*)\] and num_groups\s*=\s*(?P<groups>\d+)",
    "input has {n} channels in dimension 1, which cannot be divided evenly into {groups} groups",
    "Its shape is {shape:shape}.",
    "input",
)
row(
    "rnn_input_size",
    r"input\.size\(-1\) must be equal to input_size\. Expected (?P<want>\d+), got (?P<got>\d+)",
    "input has {got} features in its last dimension, the layer takes {want}{its_shape}",
    "input_size of {owner} must equal the last dimension of its input.",
    "input",
    tensors=("input",),
    hint=_if_input_is_right("input_size", "{got}"),
)


@pattern(r"Expected hidden(?P<part>\[\d\])? size \((?P<want>[\d, ]+)\), got \[?(?P<got>[\d, ]+)\]?")
def rnn_hidden_size(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A recurrent layer's state does not fit its input."""
    want, got, argument = ints(match["want"]), ints(match["got"]), f"hx{match['part'] or ''}"
    names = ("number of layers and directions", "batch size", "hidden size")
    wrong = [
        f"{name} {have} instead of {need}"
        for name, have, need in zip(names, got, want, strict=False)
        if have != need
    ]
    yield host(
        f"{argument} has shape {format_shape(got)}, the layer takes {format_shape(want)}: "
        f"{', '.join(wrong)}",
        "The batch dimension of a state is its second one, also with batch_first=True.",
        argument,
    )
    text = f"a state has {want[0]} rows (num_layers * num_directions) for a batch of {want[-2]}: "
    yield Hint(rule="shape_of_state", text=f"{text}make it of shape {format_shape(want)}")


@pattern(
    r"Expected key_padded_mask\.shape\[(?P<dim>[01])\] to be (?P<want>\d+), but got (?P<got>\d+)"
)
def key_padding_mask(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A padding mask of attention does not cover the keys."""
    what = "samples" if match["dim"] == "0" else "keys"
    yield host(
        f"key_padding_mask covers {match['got']} {what}, there are {match['want']}"
        f"{its_shape(named(evidence, 'key_padding_mask'))}",
        "It is (batch, length of the keys), true where a key is padding.",
        "key_padding_mask",
    )


@pattern(
    r"The shape of the (?P<n>[23])D attn_mask is .*?\[(?P<got>[\d, ]+)\]\)?, "
    r"but should be \((?P<want>[\d, ]+)\)"
)
def attention_mask(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A mask of attention has not the shape of the scores."""
    got, want = format_shape(ints(match["got"])), format_shape(ints(match["want"]))
    layout = "(queries, keys)" if match["n"] == "2" else "(batch · heads, queries, keys)"
    yield host(
        f"attn_mask has shape {got}, the scores have {want}",
        f"A {match['n']}-D mask is {layout}.",
        "attn_mask",
    )


row(
    "state_dict_shape",
    r"size mismatch for (?P<name>[\w.]+): copying a param with shape .*?\[(?P<got>[\d, ]*)\]\)?"
    r" from checkpoint, the shape in current model is .*?\[(?P<want>[\d, ]*)\]",
    "{name} has shape {got:shape} in the checkpoint and {want:shape} in the model",
    "The model was built with other sizes than the one that was saved.",
    "state_dict",
)


@pattern(r"(?P<kind>Missing|Unexpected) key\(s\) in state_dict: \"(?P<name>[^\"]+)\"")
def state_dict_keys(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A checkpoint lacks a parameter of the model, or has one that the model lacks."""
    lacks, has = ("checkpoint", "model") if match["kind"] == "Missing" else ("model", "checkpoint")
    yield host(
        f"the {lacks} has no {match['name']}, which the {has} has",
        "A prefix such as module. comes from a checkpoint of a DataParallel or compiled model.",
        "state_dict",
    )
    if evidence.error is not None and "module." in evidence.error.message:
        yield Hint(
            rule="wrapped_checkpoint",
            text="one side has the prefix module. of a DataParallel model: take it off, or wrap "
            "the other side too",
        )


# --- losses --------------------------------------------------------------------------------------

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
