"""Causes of class numbers outside the classes, in losses and in one-hot codes."""

from __future__ import annotations

import ast
import re
from typing import Literal

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint
from cudalens.diagnosis.hints._base import rule
from cudalens.diagnosis.hints._reading import Ids, ids_rule, is_wrapped, shifting_step
from cudalens.diagnosis.hints._roles import bad_values, fault
from cudalens.diagnosis.user_code import (
    called_name,
    in_library,
    list_of,
    parsed,
    rewritten,
    with_keyword,
)

MAX_CLASSES = 1 << 20
_GRAYS = (128, 255)
_LANGUAGE = 1000
"""Outputs from which on labels may be tokens."""
_TOKEN_HEAD = re.compile(
    r"(LMHead(Model)?|EncoderDecoderModel"
    r"|For(CausalLM|MaskedLM|ConditionalGeneration|SpeechSeq2Seq|ImageTextToText|Vision2Seq))$"
)
_CLASS_HEAD = re.compile(
    r"For((Sequence|Token|Image|Video|AudioFrame)Classification|SemanticSegmentation)$"
)
_OF_IMAGES = {4: "Conv2d(in_channels, {}, kernel_size)", 5: "Conv3d(in_channels, {}, kernel_size)"}
"""The layer behind scores of so many dimensions; those of three are sequences of either kind."""


def head_of(evidence: Evidence) -> Literal["classes", "tokens"] | None:
    """Return what the model of transformers that computed the loss scores; ``None`` if not
    known.
    """
    if not in_library(evidence, "transformers"):
        return None
    name = evidence.call_context.model or evidence.module_type or ""
    if _TOKEN_HEAD.search(name):
        return "tokens"
    return "classes" if _CLASS_HEAD.search(name) else None


def is_gray(ids: Ids) -> bool:
    """Return whether a mask of classes holds the levels of an image."""
    if len(ids.fact.shape) < 3 or ids.low is None or ids.low < 0:
        return False
    count = 33 if ids.distinct is None else len(ids.distinct)
    low, high = _GRAYS
    is_image = low <= ids.high <= high and 2 * ids.size <= ids.high
    return is_image and (len(ids.bad) > 2 or ids.size == 2) and count > max(ids.size, 2)


@ids_rule("label", priority=20)
def label_beyond_vocabulary(evidence: Evidence, ids: Ids) -> Hint | None:
    """Labels of a language model are no tokens of its: they pad, or were added to the tokenizer."""
    if not ids.is_above or head_of(evidence) != "tokens":
        return None
    ignored = evidence.scalar("ignore_index") or "-100"
    pad = evidence.call_context.pad_token_id
    if pad is not None and ids.only_bad(pad):
        mask = f"{{x}}.masked_fill({{x}} == {pad}, {ignored})"
        return Hint(
            text=f"{pad} is the tokenizer's padding id, and the loss ignores {ignored}",
            fix=rewritten(evidence, ids.named, mask) or f"labels[labels == {pad}] = {ignored}",
        )
    return Hint(
        text=f"the model scores {ids.size} tokens (0 … {ids.size - 1}), and {list_of(ids.bad)} is "
        f"not one of them: padding labels must be {ignored}; for added tokens, resize the model",
        fix=f"{_model_name(evidence)}.resize_token_embeddings(len(tokenizer))",
    )


def _model_name(evidence: Evidence) -> str:
    """Return the user's name for the model, when their call is one of the model."""
    tree = parsed(evidence.call_text or "")
    keywords = tree.keywords if isinstance(tree, ast.Call) else []
    is_model = any(item.arg in (None, "labels") for item in keywords)
    return (called_name(evidence) if is_model else None) or "model"


@ids_rule("label", priority=22)
def label_equals_classes(evidence: Evidence, ids: Ids) -> Hint | None:
    """The largest label equals the number of classes: one output is missing."""
    if ids.size < 2 or ids.high != ids.size or not ids.is_above:
        return None
    if ids.counts_from_one or ids.distinct == (0, 255) or head_of(evidence) == "tokens":
        return None
    full = ids.distinct == tuple(range(ids.size + 1))
    classes = f"labels 0 … {ids.size} are {ids.size + 1} classes"
    why = f"{classes}: one output is missing" if full else f"{classes}, if {ids.size} is a class"
    ignored = evidence.scalar("ignore_index")
    if ids.may_count_from_one:
        why += "; if the labels count from 1, subtract 1"
    if ids.size >= _LANGUAGE and ignored is not None:
        why += f"; if it is padding, use {ignored}, which the loss ignores"
    return Hint(
        text=f"label {ids.size} equals the number of outputs, which are numbered 0 to "
        f"{ids.size - 1}; {why}",
        fix=_more_outputs(evidence, ids, ids.size + 1),
    )


@ids_rule("label", priority=40)
def label_beyond_classes(evidence: Evidence, ids: Ids) -> Hint | None:
    """The head has fewer outputs than the labels have classes."""
    if ids.size < 2 or ids.high <= ids.size or not ids.is_above:
        return None
    if ids.high == 255 or is_gray(ids) or ids.high >= MAX_CLASSES:
        return None
    if head_of(evidence) == "tokens":
        return None
    listed = f" ({list_of(ids.bad)})" if len(ids.bad) > 1 else ""
    return Hint(
        text=f"labels up to {ids.high}{listed} need {ids.high + 1} outputs, the head "
        f"has {ids.size}",
        fix=_more_outputs(evidence, ids, ids.high + 1),
    )


def _more_outputs(evidence: Evidence, ids: Ids, classes: int) -> str | None:
    if in_library(evidence, "transformers"):
        # Only these heads are as wide as num_labels says.
        is_known = head_of(evidence) == "classes"
        return f"from_pretrained(name, num_labels={classes})" if is_known else None
    layer = _last_layer(evidence, ids)
    if layer is None:
        return f"num_classes = {classes}  # the outputs of the last layer"
    return f"nn.{layer.format(classes)}  # the last layer"


def _last_layer(evidence: Evidence, ids: Ids) -> str | None:
    """Write the layer that scores of this shape come from, ``None`` where it may be any."""
    scores = evidence.tensor("input") or evidence.tensor("self")
    rank = len(scores.shape) if scores is not None else 0
    if rank < 3 and evidence.op.name != "aten::nll_loss2d_forward":
        return "Linear(in_features, {})"
    shape = ids.fact.shape
    if rank < 3:
        # A loss of other ranks makes one dimension of all but the first, after one of size 1.
        rank = 4 if len(shape) == 3 and shape[1] != 1 else 3
    return _OF_IMAGES.get(rank)


# --- marks, masks and counting --------------------------------------------------------------------


LOSSES = ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss")
MARKS = (-1, -100)
_ONES = 4
"""So many labels are seldom all 1 where 0 is a class too."""


_CHECKED_IN_FORWARD = {
    "aten::nll_loss_backward": "labels",
    "aten::nll_loss2d_backward": "labels",
    "aten::embedding_dense_backward": "ids",
}


@rule(priority=3)
def changed_since_forward(evidence: Evidence) -> Hint | None:
    """The values were in range in the forward call: somebody wrote over them before backward."""
    what, violation = _CHECKED_IN_FORWARD.get(evidence.op.name or ""), evidence.violation
    if violation is None or not violation.offenders.first or what is None:
        return None
    if evidence.tensor(violation.argument) is None:
        return None
    steps = [step for step in evidence.provenance if step.op and step.source is not None]
    writer = next((step for step in steps if (step.op or "").split(".")[0].endswith("_")), None)
    where = f", in line {writer.source.line}" if writer is not None and writer.source else ""
    return Hint(
        text=f"the forward call took these {what}, so they were in range then: the tensor was "
        f"overwritten between forward and backward{where}",
        fix=f"{what}.clone()  # give the forward call a copy, where the buffer is filled again",
    )


@ids_rule("label", priority=10)
def binary_labels_one_output(evidence: Evidence, ids: Ids) -> Hint | None:
    """Labels 0 and 1 meet a head with a single output."""
    if ids.size != 1 or ids.low is None or ids.low < 0 or ids.high != 1:
        return None
    return Hint(
        text="the labels are 0 and 1 but the scores have one column: this loss takes one column "
        "per class, so 2; or use binary cross entropy with the single column",
        fix=_binary_loss(evidence, ids)
        or "F.binary_cross_entropy_with_logits(logits.squeeze(1), labels.float())",
    )


def _binary_loss(evidence: Evidence, ids: Ids) -> str | None:
    scores = evidence.tensor("input") or evidence.tensor("self")
    if scores is None or not scores.expression or ids.named is None or not ids.named.expression:
        return None
    name = called_name(evidence) or "F.cross_entropy"
    home = name.removesuffix("cross_entropy") if name.endswith(".cross_entropy") else "F."
    loss = f"{home}binary_cross_entropy_with_logits"
    fix = f"{loss}({scores.expression}.squeeze(1), {ids.named.expression}.float())"
    return fix if parsed(fix) is not None else None


@ids_rule("label", "one_hot", priority=12)
def mask_of_0_and_255(evidence: Evidence, ids: Ids) -> Hint | None:
    """A black-and-white image is used as a mask of class numbers: 255 stands for 1."""
    if ids.distinct != (0, 255) or ids.size < 2:
        return None
    text = "the mask holds only 0 and 255, like an image; the class numbers are 0 and 1"
    if ids.size > 2:
        text += "; if 255 marks pixels to leave out, use ignore_index=255"
    fix = rewritten(evidence, ids.named, "({x} == 255).long()")
    return Hint(text=text, fix=fix or "mask = (mask == 255).long()")


@ids_rule("label", "one_hot", priority=14)
def ignored_255(evidence: Evidence, ids: Ids) -> Hint | None:
    """255 marks pixels without a class, and the loss does not ignore it."""
    if not ids.only_bad(255) or ids.distinct == (0, 255) or ids.size < 2:
        return None
    if ids.size == 255:
        return None
    if ids.role == "one_hot":
        return Hint(
            text="255 usually marks elements without a class, and a one-hot encoding has no column "
            "for it: leave them out",
            fix=_without(evidence, ids, "{x}.masked_fill({x} == 255, 0)", "!= 255"),
        )
    return Hint(
        text=f"255 usually marks elements without a class; {_ignored(evidence)}",
        fix=_ignoring(evidence, ids, 255),
    )


@ids_rule("label", priority=14)
def mark_not_ignored(evidence: Evidence, ids: Ids) -> Hint | None:
    """Labels are marked with -1 or -100 to be left out, and the loss ignores another number."""
    if not any(ids.only_bad(mark) for mark in MARKS) or shifting_step(evidence):
        return None
    if _is_sign_coded(evidence, ids):
        return None
    (mark,) = ids.bad
    text = f"{mark} usually marks labels to leave out; {_ignored(evidence)}"
    shifted = ids.distinct == tuple(range(-1, ids.size - 1)) and mark == -1
    if shifted:
        text += (
            f"; but the labels fill -1 … {ids.size - 2}: perhaps 1 was subtracted once too often"
        )
    if ids.size == 2 and ids.distinct == (-1, 1):
        text += "; if the two classes are coded -1 and 1, use (labels + 1) // 2"
    return Hint(text=text, fix=_ignoring(evidence, ids, mark))


@ids_rule("label", "one_hot", priority=14)
def sign_coded_labels(evidence: Evidence, ids: Ids) -> Hint | None:
    """The two classes are coded -1 and 1, as for a margin loss."""
    if not _is_sign_coded(evidence, ids) or shifting_step(evidence):
        return None
    return Hint(
        text="the labels are -1 and 1, and none is 0: the classes are 0 and 1 here",
        fix=rewritten(evidence, ids.named, "({x} + 1) // 2") or "labels = (labels + 1) // 2",
    )


def _is_sign_coded(evidence: Evidence, ids: Ids) -> bool:
    """Return whether -1 and 1 are the classes: beside a mark, both 0 and 1 would be seen."""
    if evidence.violation is None or ids.size != 2 or ids.distinct != (-1, 1) or ids.count is None:
        return False
    return not ids.has_zero_around and ids.count - evidence.violation.offenders.count >= _ONES


def _ignored(evidence: Evidence) -> str:
    index = evidence.scalar("ignore_index")
    return "this loss ignores nothing" if index is None else f"the loss ignores {index}"


def _ignoring(evidence: Evidence, ids: Ids, mark: int) -> str | None:
    index = evidence.scalar("ignore_index")
    if index is None:
        return None
    call = with_keyword(evidence, LOSSES, "ignore_index", str(mark))
    if call is not None:
        return call
    if in_library(evidence, "transformers"):
        return rewritten(evidence, ids.named, f"{{x}}.masked_fill({{x}} == {mark}, {index})")
    kind = evidence.module_type if evidence.module_type in LOSSES else "CrossEntropyLoss"
    return f"nn.{kind}(ignore_index={mark})"


@rule(priority=14)
def wrapped_in_uint8(evidence: Evidence) -> Hint | None:
    """A negative mark was stored in uint8, which has no negative numbers."""
    found, bad = fault(evidence), bad_values(evidence)
    if found is None or not is_wrapped(evidence):
        return None
    was = " and ".join(f"{value - 256} became {value}" for value in sorted(bad, reverse=True))
    fix = None
    if len(bad) == 1 and evidence.scalar("ignore_index") is not None:
        fix = with_keyword(evidence, LOSSES, "ignore_index", str(next(iter(bad))))
    return Hint(
        text=f"uint8 has no negative numbers, so {was}: make the labels int64 before they can "
        "become negative",
        fix=fix or "labels = labels.long()  # before -1 or -100 is put in",
    )


@ids_rule("label", "one_hot", priority=16)
def gray_mask(evidence: Evidence, ids: Ids) -> Hint | None:
    """A mask holds gray levels or colours, or values that resizing has invented."""
    if not is_gray(ids) or ids.only_bad(255):
        return None
    seen = "more than 32" if ids.distinct is None else str(len(ids.distinct))
    return Hint(
        text=f"the mask holds {seen} different values up to {ids.high}, the model has {ids.size} "
        "classes: these are gray levels, or values that resizing interpolated between classes",
        fix='F.interpolate(mask[:, None].float(), size, mode="nearest")[:, 0].long()',
    )


@ids_rule("label", "one_hot", priority=20)
def one_based_labels(evidence: Evidence, ids: Ids) -> Hint | None:
    """Labels run from 1 to C: shift them down by one."""
    if ids.size < 2 or not ids.counts_from_one or head_of(evidence) == "tokens":
        return None
    return Hint(
        text=f"the labels run from {ids.low} to {ids.high}: they look 1-based",
        fix=rewritten(evidence, ids.named, "{x} - 1") or "labels = labels - 1",
    )


@ids_rule("one_hot", priority=20)
def one_hot_too_small(evidence: Evidence, ids: Ids) -> Hint | None:
    """The one-hot code has fewer places than the values need."""
    if not ids.is_above or ids.high >= MAX_CLASSES or ids.only_bad(255):
        return None
    if ids.counts_from_one or ids.distinct == (0, 255) or is_gray(ids):
        return None
    base = "; if they count from 1, subtract 1" if ids.may_count_from_one else ""
    fix = with_keyword(evidence, ("one_hot",), "num_classes", str(ids.high + 1), position=1)
    return Hint(
        text=f"values up to {ids.high} need {ids.high + 1} columns, the encoding has {ids.size}"
        f"{base}",
        fix=fix or f"num_classes = {ids.high + 1}",
    )


@ids_rule("one_hot", priority=20)
def negative_in_one_hot(evidence: Evidence, ids: Ids) -> Hint | None:
    """A mark such as -1 or -100 is given to a one-hot code, which has no place for it."""
    if max(ids.bad) >= 0 or shifting_step(evidence):
        return None
    if _is_sign_coded(evidence, ids):
        return None
    return Hint(
        text=f"{list_of(ids.bad)} is not a class, and a one-hot encoding has no column for it: "
        "leave these labels out",
        fix=_without(evidence, ids, "{x}.clamp(min=0)", ">= 0"),
    )


def _without(evidence: Evidence, ids: Ids, harmless: str, kept: str) -> str | None:
    """Return the one-hot code of harmless values, with zeros where the mark was."""
    code = rewritten(evidence, ids.named, harmless)
    is_code = (called_name(evidence) or "").rpartition(".")[2] == "one_hot"
    if code is None or ids.named is None or not is_code:
        return None
    return f"{code} * ({ids.named.expression} {kept})[..., None]"
