"""Fixes for shapes that torch refused on the host."""

from __future__ import annotations

from math import prod

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint
from cudalens.diagnosis.hints._base import rule
from cudalens.diagnosis.hints._fixes import rewritten
from cudalens.diagnosis.host_errors import verdict_of


@rule(priority=30)
def missing_channels(evidence: Evidence) -> Hint | None:
    """A batch of signals or images without a channel dimension, for a layer of one channel."""
    found = verdict_of(evidence, "conv_channels")
    if found is None or found.values["want"] != 1:
        return None
    shape = found.values["shape"]
    if len(shape) != found.values["spatial"] + 1:
        return None
    wanted = (shape[0], 1, *shape[1:])
    return Hint(
        text=f"the input has no channel dimension: unsqueeze(1) makes {wanted} of {shape}",
        fix=rewritten(evidence, evidence.tensor("input"), "{x}.unsqueeze(1)"),
    )


@rule(priority=30)
def channels_last(evidence: Evidence) -> Hint | None:
    """The channels are the last dimension, as images and sequences are often stored."""
    found = verdict_of(evidence, "conv_channels")
    if found is None:
        return None
    shape, want, spatial = (found.values[key] for key in ("shape", "want", "spatial"))
    if len(shape) != spatial + 2 or shape[-1] != want or shape[1] == want:
        return None
    order = (0, spatial + 1, *range(1, spatial + 1))
    moved = tuple(shape[at] for at in order)
    turn = ".transpose(1, 2)" if spatial == 1 else f".permute({', '.join(map(str, order))})"
    return Hint(
        text=f"the {want} channels are in the last dimension: {turn[1:]} makes {moved} of {shape}",
        fix=rewritten(evidence, evidence.tensor("input"), "{x}" + turn),
    )


@rule(priority=40)
def other_channels(evidence: Evidence) -> Hint | None:
    """No dimension of the input fits: the layer was built for other channels."""
    found = verdict_of(evidence, "conv_channels")
    if found is None or found.values["want"] in found.values["shape"]:
        return None
    if len(found.values["shape"]) != found.values["spatial"] + 2:
        return None
    got = found.values["got"]
    return Hint(
        text=f"no dimension of the input is {found.values['want']}: in_channels has to be {got}",
        fix=f"in_channels={got}",
    )


@rule(priority=30)
def not_flattened(evidence: Evidence) -> Hint | None:
    """A linear layer after convolutions takes all features of a sample in one dimension."""
    found = verdict_of(evidence, "matrix_product")
    if found is None or found.values["kind"] != "linear":
        return None
    shape, want = found.values["shape"], found.values["want"]
    if len(shape) < 3 or prod(shape[1:]) != want:
        return None
    return Hint(
        text=f"a sample of {shape[1:]} holds {want} numbers: flatten(1) makes ({shape[0]}, {want})",
        fix=rewritten(evidence, evidence.tensor("input"), "{x}.flatten(1)"),
    )


@rule(priority=40)
def in_features(evidence: Evidence) -> Hint | None:
    """A linear layer was built for another number of features."""
    found = verdict_of(evidence, "matrix_product")
    if found is None or found.values["kind"] != "linear" or not_flattened(evidence):
        return None
    got, out = found.values["got"], found.values["out"]
    return Hint(
        text=f"if the input is right, in_features has to be {got}",
        fix=f"nn.Linear({got}, {out})",
    )


@rule(priority=30)
def transposed_operand(evidence: Evidence) -> Hint | None:
    """One operand of a matrix product fits when it is transposed."""
    found = verdict_of(evidence, "matrix_product", "batched_product")
    if found is None or found.values["kind"] not in ("matmul", "bmm"):
        return None
    left, right = found.values["left"], found.values["right"]
    if left is None or right is None or left[:-2] != right[:-2]:
        return None
    turn = ".T" if len(right) == 2 else ".transpose(1, 2)"
    if left[-1] == right[-1]:
        at, name, size = 1, found.values["second"], right
    elif left[-2] == right[-2]:
        at, name, size = 0, found.values["first"], left
    else:
        return None
    side = ("left", "right")[at]
    turned = (*size[:-2], size[-1], size[-2])
    fact = next((item for item in evidence.tensors if name and item.expression == name), None)
    return Hint(
        text=f"the {side} operand fits transposed: {turned}",
        fix=rewritten(evidence, fact, "{x}" + turn),
    )


@rule(priority=30)
def loss_dimension(evidence: Evidence) -> Hint | None:
    """Input and target of a loss differ by a dimension of size 1."""
    found = verdict_of(evidence, "loss_shapes")
    if found is None:
        return None
    target, shape = found.values["target"], found.values["input"]
    if (dim := _extra_dimension(target, shape)) is not None:
        return Hint(
            text=f"the target has a dimension of size 1 that the input has not: {shape} is wanted",
            fix=rewritten(evidence, evidence.tensor("target"), f"{{x}}.squeeze({dim})"),
        )
    if (dim := _extra_dimension(shape, target)) is not None:
        return Hint(
            text=f"the input has a dimension of size 1 that the target has not: {target}",
            fix=rewritten(evidence, evidence.tensor("input"), f"{{x}}.squeeze({dim})"),
        )
    return None


def _extra_dimension(longer: tuple[int, ...], shorter: tuple[int, ...]) -> int | None:
    """Return the dimension of size 1 without which two shapes are equal."""
    if len(longer) != len(shorter) + 1:
        return None
    for dim in range(len(longer) - 1, -1, -1):
        if longer[dim] == 1 and longer[:dim] + longer[dim + 1 :] == shorter:
            return dim
    return None


@rule(priority=30)
def label_class_dimension(evidence: Evidence) -> Hint | None:
    """Class labels carry a dimension of size 1, or one-hot vectors, where numbers are wanted."""
    found = verdict_of(evidence, "label_dimensions")
    if found is None or found.values["target"] is None or found.values["wanted"] is None:
        return None
    target, wanted = found.values["target"], found.values["wanted"]
    dim = _extra_dimension(target, wanted)
    fact = evidence.tensor("target")
    if dim is not None:
        return Hint(
            text=f"the target has a dimension of size 1 too many: {wanted} is wanted",
            fix=rewritten(evidence, fact, f"{{x}}.squeeze({dim})"),
        )
    is_one_hot = fact is not None and set(fact.summary.unique or ()) == {0, 1}
    if is_one_hot and target == found.values["input"]:
        return Hint(
            text="the target is one-hot: class numbers are wanted",
            fix=rewritten(evidence, fact, "{x}.argmax(1)"),
        )
    return None


@rule(priority=30)
def labels_not_flat(evidence: Evidence) -> Hint | None:
    """The scores were flattened and the labels were not."""
    found = verdict_of(evidence, "loss_batch")
    if found is None or not found.values["target"]:
        return None
    target = found.values["target"]
    if len(target) < 2 or prod(target) != found.values["rows"]:
        return None
    return Hint(
        text=f"{target} labels are {prod(target)} in all, as many as the input has rows",
        fix=rewritten(evidence, evidence.tensor("target"), "{x}.reshape(-1)"),
    )


@rule(priority=30)
def classes_last(evidence: Evidence) -> Hint | None:
    """The scores hold their classes in the last dimension, a loss wants them in dimension 1."""
    found = verdict_of(evidence, "label_grid", "label_sizes")
    if found is None or not found.values["input"]:
        return None
    shape, target = found.values["input"], found.values["target"]
    if len(shape) < 3 or shape[:-1] != target:
        return None
    rank = len(shape)
    order = (0, rank - 1, *range(1, rank - 1))
    turn = ".transpose(1, 2)" if rank == 3 else f".permute({', '.join(map(str, order))})"
    return Hint(
        text="the classes of the scores are in the last dimension; the loss takes them second",
        fix=rewritten(evidence, evidence.tensor("input"), "{x}" + turn),
    )


@rule(priority=40)
def normalised_features(evidence: Evidence) -> Hint | None:
    """A normalisation or recurrent layer was built for another size."""
    names = {
        "batch_norm_channels": "num_features",
        "layer_norm_shape": "normalized_shape",
        "rnn_input_size": "input_size",
    }
    found = verdict_of(evidence, *names)
    if found is None or found.family is None:
        return None
    if found.family == "layer_norm_shape":
        value: object = found.values["shape"][-len(found.values["want"]) :]
        value = value[0] if isinstance(value, tuple) and len(value) == 1 else value
    else:
        value = found.values["got"]
    name = names[found.family]
    return Hint(text=f"if the input is right, {name} has to be {value}", fix=f"{name}={value}")


@rule(priority=40)
def batch_of_one(evidence: Evidence) -> Hint | None:
    """The last batch of a loader holds a single sample."""
    found = verdict_of(evidence, "batch_norm_one_value")
    if found is None or found.values["shape"][0] != 1:
        return None
    return Hint(
        text="the batch holds one sample: let the loader drop a last batch that is not full, or "
        "call model.eval() when not training",
        fix="DataLoader(..., drop_last=True)",
    )


@rule(priority=40)
def dimension_of_norm(evidence: Evidence) -> Hint | None:
    """The normalisation for another number of dimensions is the right one."""
    found = verdict_of(evidence, "norm_dimensions")
    kind = evidence.module_type or ""
    if found is None or not kind.endswith(("1d", "2d", "3d")):
        return None
    rank = {2: 1, 3: 1, 4: 2, 5: 3}.get(found.values["got"])
    if rank is None or kind[-2] == str(rank):
        return None
    return Hint(
        text=f"an input of {found.values['got']} dimensions goes to {kind[:-2]}{rank}d",
        fix=f"nn.{kind[:-2]}{rank}d",
    )


@rule(priority=30)
def input_beyond_positions(evidence: Evidence) -> Hint | None:
    """The input of a model of transformers has more tokens than the model has positions."""
    found = verdict_of(evidence, "broadcast", "expand_size")
    if found is None or "rows" not in found.values:
        return None
    rows, tokens = found.values["rows"], found.values["tokens"]
    return Hint(
        text=f"the sequence has {tokens} positions, the table {rows}: truncate the input",
        fix=f"tokenizer(text, truncation=True, max_length={rows})",
    )
