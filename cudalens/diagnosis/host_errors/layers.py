"""Shapes that a layer cannot take: convolutions, linear, normalisation, recurrent, attention."""

from __future__ import annotations

import re

from cudalens.core.report import Evidence
from cudalens.diagnosis.host_errors._base import HostVerdict, family, host
from cudalens.diagnosis.host_errors._words import expression, ints, named, of_shape, owner, said


@family(
    r"weight of size \[(?P<weight>[\d, ]+)\], expected input\[(?P<input>[\d, ]+)\] to have "
    r"(?P<want>\d+) channels, but got (?P<got>\d+) channels"
)
def conv_channels(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A convolution's input has another number of channels than its weight takes."""
    weight, batched = ints(match["weight"]), ints(match["input"])
    want, got = int(match["want"]), int(match["got"])
    unbatched = batched[0] == 1 and of_shape(evidence, batched[1:], "input") is not None
    shape = batched[1:] if unbatched else batched
    fact = of_shape(evidence, shape, "input")
    headline = f"input has {got} channels, the weight takes {want}: "
    if unbatched:
        headline += f"shape {said(shape)} is read as one unbatched sample"
    else:
        headline += f"shape {said(shape)} has its channels in dimension 1"
    return host(
        headline,
        f"The weight {said(weight)} takes (batch, {want}, "
        f"{', '.join(['size'] * (len(weight) - 2))}); the input is {said(shape)}.",
        "input",
        shape=shape,
        want=want,
        got=got,
        spatial=len(weight) - 2,
        expression=expression(fact),
    )


@family(
    r"Expected (?P<low>\d)D \(unbatched\) or (?P<high>\d)D \(batched\) input to (?P<op>\w+), "
    r"but got input of size: \[(?P<shape>[\d, ]*)\]"
)
def conv_dimensions(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A convolution's or pooling's input has too few or too many dimensions."""
    shape = ints(match["shape"])
    low, high = int(match["low"]), int(match["high"])
    fact = of_shape(evidence, shape, "input")
    return host(
        f"input has {len(shape)} dimensions, {match['op']} takes {high}, or {low} for one sample: "
        f"its shape is {said(shape)}",
        f"The {high} dimensions are (batch, channels, {', '.join(['size'] * (high - 2))}).",
        "input",
        shape=shape,
        high=high,
        expression=expression(fact),
    )


@family(
    r"Calculated padded input size per channel: \((?P<size>[\dx ]+)\)\. "
    r"Kernel size: \((?P<kernel>[\dx ]+)\)"
)
def conv_kernel_size(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A convolution's kernel is larger than its padded input."""
    size, kernel = ints(match["size"]), ints(match["kernel"])
    return host(
        f"input is {said(size)} with its padding, smaller than the kernel {said(kernel)}",
        "Each convolution without padding and each pooling makes the image smaller; here nothing "
        "is left for this one.",
        "input",
        size=size,
        kernel=kernel,
    )


@family(
    r"running_(?:mean|var) should contain (?P<got>\d+) elements not (?P<want>\d+)"
    r"|weight should contain (?P<got2>\d+) elements not (?P<want2>\d+)"
)
def batch_norm_channels(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """Batch normalisation was built for another number of channels."""
    got, want = int(match["got"] or match["got2"]), int(match["want"] or match["want2"])
    fact = named(evidence, "input")
    shape = f": its shape is {said(fact.shape)}" if fact else ""
    return host(
        f"input has {got} channels in dimension 1, the normalisation is built for {want}{shape}",
        f"num_features of {owner(evidence)} must be the number of channels of the layer before it.",
        "input",
        got=got,
        want=want,
        shape=fact.shape if fact else None,
        expression=expression(fact),
    )


@family(r"expected (?P<want>[\dD or]+) input \(got (?P<got>\d)D input\)")
def norm_dimensions(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A normalisation or pooling module takes another number of dimensions."""
    fact = named(evidence, "input")
    kind = evidence.module_type or (evidence.op.api or "").rpartition(".")[2]
    shape = f": its shape is {said(fact.shape)}" if fact else ""
    return host(
        f"input has {match['got']} dimensions, {kind} takes "
        f"{match['want'].replace('D', '')}{shape}",
        "Its name ends in the number of dimensions besides batch and channels.",
        "input",
        got=int(match["got"]),
        want=match["want"],
    )


@family(r"Expected more than 1 value per channel when training, got input size .*?\[(?P<s>[\d, ]+)")
def batch_norm_one_value(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """Batch normalisation cannot train on one value per channel."""
    shape = ints(match["s"])
    return host(
        f"input {said(shape)} has one value per channel: batch normalisation cannot train on it",
        "Its variance over the batch would be that of a single value. The last batch of a loader "
        "often holds one sample only.",
        "input",
        shape=shape,
    )


@family(
    r"Given normalized_shape=\[(?P<want>[\d, ]+)\], expected input with shape \[\*, .*?\], "
    r"but got input of size\s*\[(?P<shape>[\d, ]+)\]"
)
def layer_norm_shape(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """Layer normalisation was built for other last dimensions."""
    want, shape = ints(match["want"]), ints(match["shape"])
    fact = of_shape(evidence, shape, "input")
    return host(
        f"input {said(shape)} ends in {said(shape[-len(want) :])}, "
        f"the normalisation is built for {said(want)}",
        f"normalized_shape of {owner(evidence)} must equal the last dimensions of its input.",
        "input",
        want=want,
        shape=shape,
        expression=expression(fact),
    )


@family(
    r"Expected number of channels in input to be divisible by num_groups, but got input of shape "
    r"\[(?P<shape>[\d, ]+)\] and num_groups\s*=\s*(?P<groups>\d+)"
)
def group_norm_groups(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """Group normalisation cannot split its channels evenly."""
    shape, groups = ints(match["shape"]), int(match["groups"])
    return host(
        f"input has {shape[1]} channels in dimension 1, which {groups} groups cannot share evenly",
        f"Its shape is {said(shape)}.",
        "input",
        shape=shape,
        groups=groups,
    )


@family(r"input\.size\(-1\) must be equal to input_size\. Expected (?P<want>\d+), got (?P<got>\d+)")
def rnn_input_size(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A recurrent layer's input has another number of features."""
    got, want = int(match["got"]), int(match["want"])
    fact = named(evidence, "input")
    shape = f": its shape is {said(fact.shape)}" if fact else ""
    return host(
        f"input has {got} features in its last dimension, the layer takes {want}{shape}",
        f"input_size of {owner(evidence)} must equal the last dimension of its input.",
        "input",
        got=got,
        want=want,
        expression=expression(fact),
    )


@family(r"Expected hidden(?P<part>\[\d\])? size \((?P<want>[\d, ]+)\), got \[?(?P<got>[\d, ]+)\]?")
def rnn_hidden_size(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A recurrent layer's state does not fit its input."""
    want, got = ints(match["want"]), ints(match["got"])
    argument = f"hx{match['part'] or ''}"
    names = ("number of layers and directions", "batch size", "hidden size")
    wrong = [
        f"{name} {have} instead of {need}"
        for name, have, need in zip(names, got, want, strict=False)
        if have != need
    ]
    return host(
        f"{argument} has shape {said(got)}, the layer takes {said(want)}: {', '.join(wrong)}",
        "The batch dimension of a state is its second one, also with batch_first=True.",
        argument,
        got=got,
        want=want,
    )


@family(
    r"Expected key_padded_mask\.shape\[(?P<dim>[01])\] to be (?P<want>\d+), but got (?P<got>\d+)"
)
def key_padding_mask(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A padding mask of attention does not cover the keys."""
    what = "samples" if match["dim"] == "0" else "keys"
    fact = named(evidence, "key_padding_mask")
    shape = f": its shape is {said(fact.shape)}" if fact else ""
    return host(
        f"key_padding_mask covers {match['got']} {what}, there are {match['want']}{shape}",
        "It is (batch, length of the keys), true where a key is padding.",
        "key_padding_mask",
        want=int(match["want"]),
        got=int(match["got"]),
    )


@family(
    r"The shape of the (?P<n>[23])D attn_mask is .*?\[(?P<got>[\d, ]+)\]\)?, "
    r"but should be \((?P<want>[\d, ]+)\)"
)
def attention_mask(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A mask of attention has not the shape of the scores."""
    got, want = ints(match["got"]), ints(match["want"])
    layout = "(queries, keys)" if match["n"] == "2" else "(batch · heads, queries, keys)"
    return host(
        f"attn_mask has shape {said(got)}, the scores have {said(want)}",
        f"A {match['n']}-D mask is {layout}.",
        "attn_mask",
        want=want,
        got=got,
    )


@family(
    r"size mismatch for (?P<name>[\w.]+): copying a param with shape .*?\[(?P<got>[\d, ]*)\]\)?"
    r" from checkpoint, the shape in current model is .*?\[(?P<want>[\d, ]*)\]"
)
def state_dict_shape(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A checkpoint's parameter has another shape than the model's."""
    got, want = ints(match["got"]), ints(match["want"])
    return host(
        f"{match['name']} has shape {said(got)} in the checkpoint and {said(want)} in the model",
        "The model was built with other sizes than the one that was saved.",
        "state_dict",
        name=match["name"],
        got=got,
        want=want,
    )


@family(r"(?P<kind>Missing|Unexpected) key\(s\) in state_dict: \"(?P<name>[^\"]+)\"")
def state_dict_keys(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A checkpoint lacks a parameter of the model, or has one that the model lacks."""
    name = match["name"]
    is_missing = match["kind"] == "Missing"
    headline = (
        (f"the checkpoint has no {name}" if is_missing else f"the model has no {name}")
        + ", which the "
        + ("model has" if is_missing else "checkpoint has")
    )
    return host(
        headline,
        "A prefix such as module. comes from a checkpoint of a DataParallel or compiled model.",
        "state_dict",
        name=name,
        is_missing=is_missing,
    )
