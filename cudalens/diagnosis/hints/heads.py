"""Causes of labels beyond the outputs of a model: its head is too small, or they pad its text."""

from __future__ import annotations

import ast
import re
from typing import Literal

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint
from cudalens.diagnosis.hints._base import rule
from cudalens.diagnosis.hints._reading import Ids, ids_of
from cudalens.diagnosis.user_code import called_name, in_library, list_of, parsed, rewritten

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


@rule(priority=20)
def label_beyond_vocabulary(evidence: Evidence) -> Hint | None:
    """Labels of a language model are no tokens of its: they pad, or were added to the tokenizer."""
    ids = ids_of(evidence, "label")
    if ids is None or not ids.is_above or head_of(evidence) != "tokens":
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
        f"none of them: labels that pad must be {ignored}; for added tokens, resize the model",
        fix=f"{_model_name(evidence)}.resize_token_embeddings(len(tokenizer))",
    )


def _model_name(evidence: Evidence) -> str:
    """Return the user's name for the model, when his call is one of the model."""
    tree = parsed(evidence.call_text or "")
    keywords = tree.keywords if isinstance(tree, ast.Call) else []
    is_model = any(item.arg in (None, "labels") for item in keywords)
    return (called_name(evidence) if is_model else None) or "model"


@rule(priority=22)
def label_equals_classes(evidence: Evidence) -> Hint | None:
    """The largest label equals the number of classes: one output is missing."""
    ids = ids_of(evidence, "label")
    if ids is None or ids.size < 2 or ids.high != ids.size or not ids.is_above:
        return None
    if ids.counts_from_one or ids.distinct == (0, 255) or head_of(evidence) == "tokens":
        return None
    full = ids.distinct == tuple(range(ids.size + 1))
    classes = f"labels 0 … {ids.size} are {ids.size + 1} classes"
    why = f"{classes}: one output is missing" if full else f"{classes}, if {ids.size} is a class"
    ignored = evidence.scalar("ignore_index")
    if ids.may_count_from_one:
        why += "; if the labels count from 1, take 1 away"
    if ids.size >= _LANGUAGE and ignored is not None:
        why += f"; if it pads a text, {ignored} is what the loss ignores"
    return Hint(
        text=f"label {ids.size} equals the number of outputs, which count from 0 to "
        f"{ids.size - 1}; {why}",
        fix=_more_outputs(evidence, ids, ids.size + 1),
    )


@rule(priority=40)
def label_beyond_classes(evidence: Evidence) -> Hint | None:
    """The head has fewer outputs than the labels have classes."""
    ids = ids_of(evidence, "label")
    if ids is None or ids.size < 2 or ids.high <= ids.size or not ids.is_above:
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
