"""Possible edits of one argument of a failing call: its device, dtype, shape or kind.

A move replaces a tensor by a template's expression.  No move drops or invents values, or mixes the
samples of a batch.  Which moves are tried together is decided in ``candidates.py``.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from cudalens.core.report import Evidence
from cudalens.core.report_types import TensorFact, format_shape
from cudalens.core.torch_functions import Trait, functions, is_in_place
from cudalens.diagnosis.host_errors._words import INTEGERS
from cudalens.diagnosis.user_code import api_function

OF_KIND = ("cast_needed", "move_tensor")
"""Moves that keep the shape."""
_CASTS = {
    "float32": ".float()",
    "float64": ".double()",
    "float16": ".half()",
    "bfloat16": ".bfloat16()",
    "int64": ".long()",
    "int32": ".int()",
    "bool": ".bool()",
}
PRODUCTS = functions(Trait.PRODUCT)
_COUNTED = ("pack_padded_sequence", "_pack_padded_sequence")
_ON_HOST = ("__getitem__", "numpy", *_COUNTED)
"""Functions that require one of their tensors on the CPU."""
_WHOLE_BATCH = ("linear", "batch_norm", "layer_norm", "group_norm")
"""Layers whose first dimension is the batch, which no move may change."""
_OF_IMAGES = (
    *("conv", "batchnorm", "batch_norm", "max_pool", "maxpool", "avg_pool", "avgpool"),
    *("adaptive", "instance", "interpolate", "unfold"),
)
"""Layers and functions with channels in dimension 1."""
_BATCHED = {"conv1d": 3, "conv2d": 4, "conv3d": 5, "lstm": 3, "gru": 3, "rnn": 3}
_BATCHED |= {"instancenorm1d": 3, "instancenorm2d": 4, "instancenorm3d": 5}
"""Rank of the input with a batch, for layers that also accept one sample without it."""
_SEQUENCES = ("LSTM", "GRU", "RNN", "Multihead", "Transformer")
_OF_MASK = re.compile(r"^only bool and floating types of \w+ are supported")
"""Arguments that are masks: for integers it is unknown whether 1 means keep or drop."""
_TAKES_RANK = ("expand", "expand_as", "permute")
"""Errors that state the expected rank, which no other tensor shows."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """A change of one tensor: its replacement, in words and in code."""

    rule: str
    template: str
    words: str
    cost: int = 1


@dataclass(frozen=True, kw_only=True)
class Called:
    """Facts about the call that the moves need, besides its operands."""

    device: str | None = None
    """The device of the called module's parameters."""
    is_model: bool = False
    """True if a library's model is called, whose meaning of dimensions is unknown."""
    is_batch_second: bool = False
    """True if a sequence layer made without ``batch_first`` is called."""


def moves(
    evidence: Evidence, fact: TensorFact, operands: Sequence[TensorFact], called: Called
) -> Iterator[Move]:
    """Yield the changes of one operand with which the call may succeed."""
    others = [item for item in operands if item.expression != fact.expression]
    function = api_function(evidence)
    writes = is_in_place(function) or function == "__setitem__"
    writes |= function.startswith("__i") and function not in ("__invert__", "__int__")
    if writes and function != "requires_grad_" and fact is operands[0]:
        return  # a write to a copy would be lost
    yield from _of_device(evidence, fact, others, called.device)
    yield from _of_dtype(evidence, fact, operands, others)
    if not _is_contiguous(fact):
        words = f"{fact.expression} is not contiguous: copy it"
        yield Move(rule="not_contiguous", template="{x}.contiguous()", words=words)
    # Permuting an indexed tensor would select other elements.
    if called.is_model or (function == "__getitem__" and fact is operands[0]):
        return
    has = f"{fact.expression} has shape {format_shape(fact.shape)}"
    for rule, template, words, cost in _of_shape(evidence, fact, operands, called):
        text = has + words.replace("{it}", template.replace("{x}", f"{fact.expression}"))
        yield Move(rule=rule, template=template, words=text, cost=cost)


def _is_contiguous(fact: TensorFact) -> bool:
    sizes = [item for item in zip(fact.shape, fact.stride or (), strict=False) if item[0] != 1]
    return all(
        stride == prod(size for size, _ in sizes[at + 1 :]) for at, (_, stride) in enumerate(sizes)
    )


def _of_device(
    evidence: Evidence, fact: TensorFact, others: Sequence[TensorFact], module: str | None
) -> Iterator[Move]:
    devices = dict.fromkeys([item.device for item in others] + ([module] if module else []))
    if api_function(evidence) in ("numpy", "__array__"):
        devices = dict.fromkeys(["cpu"])
        if fact.requires_grad:
            moved = "" if fact.device == "cpu" else ".cpu()"
            words = f"{fact.expression} requires grad, and autograd does not follow into NumPy"
            yield Move(rule="copy_to_host", template="{x}.detach()" + moved, words=words)
    if api_function(evidence) in _COUNTED and fact.dtype == "int64":
        devices = dict.fromkeys(["cpu"])
    for device in devices:
        if device == fact.device:
            continue
        at = next((item.expression for item in others if item.device == device), None)
        # Repeat only names: a repeated call would run again.
        target = f"{at}.device" if at and "(" not in at and at.isidentifier() else f'"{device}"'
        is_back = device == "cpu"
        yield Move(
            rule="move_tensor",
            template="{x}.cpu()" if is_back else f"{{x}}.to({target})",
            words=f"{fact.expression} is on {fact.device}: move it to {device}",
            cost=3 if is_back and api_function(evidence) not in _ON_HOST else 1,
        )


def _of_dtype(
    evidence: Evidence,
    fact: TensorFact,
    operands: Sequence[TensorFact],
    others: Sequence[TensorFact],
) -> Iterator[Move]:
    weight = evidence.tensor("weight")
    seen = [item.dtype for item in others] + ([weight.dtype] if weight is not None else [])
    function = api_function(evidence)
    message = evidence.error.message if evidence.error is not None else ""
    if (function == "__getitem__" and fact.dtype == "bool") or _OF_MASK.search(message):
        return
    if _is_loss(evidence) and fact is operands[0] and fact.dtype in INTEGERS:
        return  # class indices instead of scores have no gradient
    is_scores = any(item.shape == fact.shape for item in others) and len(fact.shape) > 1
    is_class_code = _has_classes(evidence) and is_scores and fact.dtype in INTEGERS
    # A float attention mask is added to the scores. 0 and 1 are a boolean mask.
    is_mask = "attention" in function and fact.dtype in INTEGERS
    for name in ("bool",) if is_mask else dict.fromkeys([*seen, "float32", "int64", "bool"]):
        if name == fact.dtype or name not in _CASTS:
            continue
        if is_class_code and "float" in name:
            continue  # multi-label targets would be read as probabilities
        # Weights may be narrower than the input. Scores and labels must not lose digits.
        is_narrower = (name, fact.dtype) == ("float32", "float64")
        is_loss = _is_loss(evidence)
        is_late = is_narrower is is_loss if "float64" in (name, fact.dtype) else name not in seen
        cost = 3 if is_late and "float" in fact.dtype else 1 + is_late
        # One 0 or 1 for each row is a mask, not a list of indices.
        is_list = fact.shape != operands[0].shape[: len(fact.shape)] or fact.shape <= (2,)
        yield Move(
            rule="cast_needed",
            template="{x}" + _CASTS[name],
            words=f"{fact.expression} is {fact.dtype}: cast it to {name}",
            cost=1 if (function, name, is_list) == ("__getitem__", "bool", False) else cost,
        )


_Change = tuple[str, str, str, int]
"""A change of shape: rule, template, words and cost."""


def _of_shape(
    evidence: Evidence, fact: TensorFact, operands: Sequence[TensorFact], called: Called
) -> Iterator[_Change]:
    shape, rank = fact.shape, len(fact.shape)
    others = [item for item in operands if item.expression != fact.expression]
    is_paired = _is_loss(evidence) and not _has_classes(evidence)
    if is_paired and prod(shape) not in [prod(item.shape) for item in others]:
        return  # it would broadcast to an outer product
    function = api_function(evidence)
    is_sequence = (evidence.module_type or "").startswith(_SEQUENCES)
    is_state = is_sequence and fact is not operands[0]
    first = int(function.startswith(_WHOLE_BATCH) or (called.device is not None and not is_state))
    layer = (evidence.module_type or function).lower()
    # At this rank, the layer would read a batch as one sample, or a sample as a batch.
    is_batch = rank <= _BATCHED.get(layer, 0)
    for dim in range(rank - 1, -1, -1):
        if shape[dim] == 1 and rank > 1 and not is_batch:
            left = format_shape((*shape[:dim], *shape[dim + 1 :]))
            words = f": without its dimension {dim} of size 1 it is {left}"
            yield "extra_dimension", f"{{x}}.squeeze({dim})", words, 1
    yield from _of_missing(evidence, fact, others, called, layer)
    # A loss would read the features of a sequence's steps as classes.
    if rank > 2 and not _is_loss(evidence):
        words = ": make one dimension of all behind the first"
        # If the other tensor has another rank, it may lack a dimension instead.
        yield "not_flattened", "{x}.flatten(1)", words, 1 + (function != "linear")
    yield from _of_order(evidence, fact, others, first)
    if _is_loss(evidence):
        yield from _of_labels(evidence, fact, others, has_classes=_has_classes(evidence))


def _called(evidence: Evidence) -> str:
    """Return the names of the called function and its module, in lower case."""
    return f"{api_function(evidence)} {evidence.module_type or ''}".lower()


def _is_loss(evidence: Evidence) -> bool:
    name = _called(evidence)
    return "loss" in name or "entropy" in name


def _has_classes(evidence: Evidence) -> bool:
    """Return whether the loss has a class dimension, which no reshape may mix."""
    name = _called(evidence).replace("_", "")
    return ("crossentropy" in name or "nll" in name) and "binary" not in name


def _of_missing(
    evidence: Evidence, fact: TensorFact, others: Sequence[TensorFact], called: Called, layer: str
) -> Iterator[_Change]:
    """Add dimensions of size 1: a batch, channels, or to line up with another tensor."""
    shape, rank = fact.shape, len(fact.shape)
    is_layer = bool(called.device) and "loss" not in (evidence.module_type or "").lower()
    is_wanted = is_layer or api_function(evidence) in _TAKES_RANK
    larger = [item.shape for item in others if len(item.shape) == rank + 1]
    added = {dim: (*shape[:dim], 1, *shape[dim:]) for dim in dict.fromkeys((0, min(1, rank), rank))}
    # If one position makes the sizes match another tensor's, only that one is meant.
    lined = {
        dim
        for dim, made in added.items()
        for other in larger
        if all(a in (1, b) for a, b in zip(made, other, strict=True))
    }
    is_paired = _is_loss(evidence) and not _has_classes(evidence)
    for dim, made in added.items():
        if is_paired and made not in [item.shape for item in others]:
            continue
        if api_function(evidence) == "permute" and dim and shape[-1] in (1, 3, 4):
            continue  # an image with channels lacks only the batch
        if fact.dtype == "bool" and len(lined) > 1:
            continue  # as many queries as keys: the mask may be of either
        if layer.startswith("conv") and dim == rank:
            continue  # a length of 1, which only padding could extend
        is_beside = any(rank < len(item.shape) for item in others)
        if rank < 4 and (is_wanted or is_beside) and (not lined or dim in lined):
            rule, words = "missing_dimension", ": with a dimension of size 1 it is "
            words += format_shape(made)
            yield rule, f"{{x}}.unsqueeze({dim})", words, 2
    ends = {(item.shape[0], item.shape[-1]) for item in others if len(item.shape) == 4}
    if rank == 2 and fact.dtype == "bool" and shape in ends:
        words = ": flags for the last dimension, as of the keys, are lined up by {it}"
        yield "missing_dimension", "{x}[:, None, None]", words, 2
    channels = {(item.shape[1:2], len(item.shape)) for item in others if len(item.shape) > 2}
    for rest in (size - 2 for kind, size in channels if kind == shape):
        words = ", one number for each channel of dimension 1: {it} lines it up with them"
        yield "missing_dimension", "{x}[:" + ", None" * rest + "]", words, 2
    if is_layer and rank == 2 and layer.startswith(_OF_IMAGES) and layer.endswith("2d"):
        words = f": one image of one channel is (1, 1, {shape[0]}, {shape[1]})"
        yield "missing_dimension", "{x}[None, None]", words, 3


def _of_order(
    evidence: Evidence, fact: TensorFact, others: Sequence[TensorFact], first: int
) -> Iterator[_Change]:
    """Permute the dimensions from ``first`` on."""
    shape, rank, function = fact.shape, len(fact.shape), api_function(evidence)
    is_product, name = function in PRODUCTS, _called(evidence)
    # (2, 3) @ (4, 2) may also be meant with swapped factors.
    is_ordered = [item.shape for item in others if len(item.shape) == 2 and rank == 2]
    is_either = any(a[-1] == shape[0] or a[0] == shape[-1] for a in is_ordered)
    if rank == 2 and is_product and not is_either:
        yield "transposed_operand", "{x}.T", ": transpose it", 2
    for one, two in itertools.combinations(range(first, rank), 2):
        # With equal sizes, steps and classes could not be distinguished.
        if _has_classes(evidence) and len(set(shape)) < rank:
            break
        is_common = rank == 3 or (is_product and one > 0 and two - one == 1)
        if rank > 2 and is_common and shape[one] != shape[two]:
            words = f": exchange its dimensions {one} and {two}"
            yield "other_order", f"{{x}}.transpose({one}, {two})", words, 2 + (one == 0)
    is_of_images = any(word.startswith(_OF_IMAGES) for word in name.split())
    if rank in (3, 4, 5) and (is_of_images or _is_loss(evidence)):
        order = (*range(rank - 3), rank - 1, rank - 3, rank - 2)
        if rank == 5:
            order = (0, 4, 1, 2, 3)
        words = ": move its last dimension, the channels, before the others"
        yield "channels_last", f"{{x}}.permute{order}", words, 1


def _of_labels(
    evidence: Evidence, fact: TensorFact, others: Sequence[TensorFact], *, has_classes: bool
) -> Iterator[_Change]:
    shape, rank = fact.shape, len(fact.shape)
    if any(item.shape == shape for item in others) and rank > 1:
        # With a cast to integers, which the trial rejects if it changes values.
        cast = "" if fact.dtype in INTEGERS else ".long()"
        words = " and is one-hot: this loss takes class numbers"
        # Integer labels may be multi-label, with a single one in each row of this batch.
        is_one = bool(cast) or "crossentropy" not in _called(evidence).replace("_", "")
        rule = "one_hot_target" if is_one else "one_hot_classes"
        yield rule, f"{{x}}{cast}.argmax(1)", words, 1
    is_label = fact.dtype in INTEGERS or not has_classes
    flat = next((item for item in others if item.shape[:1] == (prod(shape),)), None)
    if is_label and rank > 1 and flat is not None:
        rows, words = _shape_before(evidence, flat)[:rank], f", {prod(shape)} labels in all: "
        if rows == shape:
            words += "make one dimension of them"
            yield "labels_not_flat", "{x}.reshape(-1)", words, 2
        elif rows != shape[::-1]:
            words += f"{{it}} is right if the rows of {flat.expression} are in that order"
            yield "labels_in_order", "{x}.reshape(-1)", words, 2


def _shape_before(evidence: Evidence, fact: TensorFact) -> tuple[int, ...]:
    """Return the shape before a reshape in the line, empty if the line has none."""
    match fact.node:
        case ast.Call(func=ast.Attribute(value, "view" | "reshape" | "flatten")):
            text = ast.unparse(value)
            return next((it.shape for it in evidence.tensors if it.expression == text), ())
    return ()


# --- of what is no tensor -------------------------------------------------------------------------

_MADE_OF = {
    "method": (("{x}()", "{x} is a method: call it"),),
    "tensors": (
        ("torch.stack({x})", "{x} is a list of tensors: make one of them, with a new dimension"),
        ("torch.cat({x})", "{x} is a list of tensors: join them along their first dimension"),
    ),
    "list": (("torch.tensor({x})", "{x} is a list: make a tensor of it"),),
    "numpy.ndarray": (
        ("torch.from_numpy({x})", "{x} is an array: make a tensor of it"),
        ("torch.from_numpy({x}).float()", "{x} is an array: make a tensor of it"),
    ),
}
"""Templates that make a tensor, by the kind of the value.

Not for tuples and model outputs: only the user knows which part is meant.
"""


def to_tensor_templates(text: str, kind: str, device: str | None) -> Iterator[tuple[str, str]]:
    """Yield templates, and their words, that convert an argument to a tensor.

    Args:
        text, kind: see ``Trial.others``.
        device: the device of the called module.
    """
    made = list(_MADE_OF.get(kind, ()))
    if device not in (None, "cpu"):
        moved = f'.to("{device}")'
        made += [(f"{template}{moved}", words) for template, words in made]
    for template, words in made:
        yield template, words.replace("{x}", text)
