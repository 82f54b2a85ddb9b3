"""Advice where no change of the call is one: sizes of layers, datasets, checkpoints.

The words of the message are torch's.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, format_shape
from cudalens.diagnosis.host_errors._base import Answer, host, pattern, row
from cudalens.diagnosis.host_errors._words import INTEGERS, Shape, dtype, ints, named, user_name
from cudalens.diagnosis.user_code import api_function, in_transformers

_SIZES = {
    "in_channels": r"^Given groups=.* expected input\[(?P<shape>[\d, ]+)\] to have (?P<want>\d+) "
    r"channels, but got (?P<n>\d+) channels",
    "num_features": r"^(?:running_mean|running_var|weight) should contain (?P<n>\d+) elements not "
    r"(?P<want>\d+)",
    "normalized_shape": r"^Given normalized_shape=\[(?P<want>\d+)\].* of size\s*"
    r"\[(?:.*, )?(?P<n>\d+)\]",
}
"""Messages by the setting of the layer that does not fit its input."""


def _size_of_layer(evidence: Evidence, setting: str, match: re.Match[str]) -> Hint:
    fact = named(evidence, "input")
    name = (fact.expression if fact else None) or "the input"
    text = f"{name} has {match['n']}, and {setting} of the layer is {match['want']}"
    return Hint(rule="size_of_layer", text=text)


for _setting, _regex in _SIZES.items():

    @pattern(_regex, name=_setting)
    def size_of_layer(evidence: Evidence, match: re.Match[str], setting: str = _setting) -> Answer:
        """A layer was made for inputs of another size."""
        parts = match.groupdict()
        if parts["want"] not in parts.get("shape", "").split(", "):
            yield _size_of_layer(evidence, setting, match)  # else it is the order


@pattern(r"input\.size\(-1\) must be equal to input_size\. Expected (?P<want>\d+), got (?P<n>\d+)")
def input_size(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A recurrent layer got other features."""
    yield _size_of_layer(evidence, "input_size", match)


@pattern(r"^mat1 and mat2 shapes cannot be multiplied \(\d+x(?P<n>\d+) and (?P<want>\d+)x")
def in_features(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A linear layer was made for another number of features."""
    if api_function(evidence) == "linear":
        yield _size_of_layer(evidence, "in_features", match)


row(
    "batch_of_one",
    r"^Expected more than 1 value per channel when training, got input size .*?\[1, ",
    hint=Hint(
        rule="batch_of_one",
        text="the batch has one sample: let the loader drop a last batch that is not full "
        "(drop_last), or call eval() of the model when not training",
    ),
)
row(
    "shape_of_state",
    r"^Expected hidden(?:\[\d\])? size \((?P<want>[\d, ]+)\)",
    hint=Hint(
        rule="shape_of_state",
        text="a state is (num_layers * num_directions, batch, hidden size), also with "
        "batch_first=True: ({want}) for this input, whose batch is dimension 0 with "
        "batch_first=True, 1 without",
    ),
)


@pattern(r"^result type (?P<type>\w+) can't be cast to the desired output type")
def in_place_dtype(evidence: Evidence, match: re.Match[str]) -> Answer:
    """The result of an in-place op has another dtype than its tensor."""
    if api_function(evidence).endswith("_"):
        yield Hint(
            rule="in_place_dtype",
            text=f"an in-place op keeps the dtype of its tensor: make it {dtype(match['type'])} "
            "where it is made, or let the op make a new one, as in x = x / 2",
        )


@pattern(r"^index (?P<i>-?\d+) is out of bounds for dimension (?P<dim>\d+) with size (?P<n>\d+)$")
def index_bound(evidence: Evidence, match: re.Match[str]) -> Answer:
    """torch counts indexed dimensions only, and takes ``...`` before a number for another one."""
    shape = dict(enumerate(getattr(named(evidence, "self"), "shape", ())))
    if shape and shape.get(int(match["dim"])) != int(match["n"]):
        yield host(f"index {match['i']} is out of bounds for a dimension of size {match['n']}")


@pattern(
    r"^expand\([^{]+\{\[(?P<b>[\d, ]*)\]\}, size=\[(?P<a>[\d, ]*)\]\): the number of sizes provided"
    r"|^The expanded size of the tensor .*Target sizes: \[(?P<a2>[\d, ]*)\]\.  Tensor sizes: "
    r"\[(?P<b2>[\d, ]*)\]",
    name="assigned_shape",
)
def assigned_shape(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A part of a tensor is given a value of another shape."""
    statement = evidence.call and evidence.call.node
    if api_function(evidence) == "__setitem__" and isinstance(statement, ast.Assign):
        part, value = map(ast.unparse, (statement.targets[0], statement.value))
        a, b = (format_shape(ints(match[key] or match[f"{key}2"] or "")) for key in "ab")
        # torch has left out leading dimensions of size 1.
        whole = (format_shape(it.shape) for it in evidence.tensors if it.expression == value)
        yield host(f"{part} has shape {a}, {value} has shape {next(whole, b)}", "", "values")


@pattern(
    r"^Target size \(torch\.Size\(\[\d+\]\)\) must be the same as input size \(torch\.Size\(\[\d+, "
    r"(?P<n>\d+)\]\)\)|^Expected input batch_size \(\d+\) to match target batch_size \(\d+\)"
)
def labels_of_head(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A head of transformers takes one class number a row, or one number for each label."""
    takes, logits = evidence.refused_arguments.problem_type, named(evidence, "input")
    scores: tuple[int, ...] = logits.shape if logits is not None else ()
    if not in_transformers(evidence) or len(scores) != 2:
        return
    many, one = (f'"{name}_label_classification"' for name in ("multi", "single"))
    for fact in (item for item in evidence.tensors if item.expression and item is not logits):
        has = f"{fact.expression} has shape {format_shape(fact.shape)} and is {fact.dtype}"
        if fact.shape == scores[:1] and match["n"] and f'"{takes}"' == many:
            # Without a setting the model takes it from the dtype of the labels.
            cast = "" if fact.dtype in INTEGERS else f", as int64: {fact.expression}.long()"
            yield Hint(
                rule="problem_type",
                text=f"{has}. The model takes one float for each of its {scores[1]} labels, as its "
                f"config has problem_type={many}: class numbers are {one}{cast}",
            )
            return
        if fact.dtype not in INTEGERS:
            continue
        is_code = fact.summary.min in (0, None) and fact.summary.max in (0, 1, None)
        if fact.shape == scores and is_code and f'"{takes}"' == one:
            yield Hint(
                rule="problem_type",
                text=f"{has}. The model takes one class number a row, as its config has "
                f"problem_type={one}: for several labels a row set it to {many} and pass "
                f"{fact.expression}.float()",
            )
            return


# --- positions -----------------------------------------------------------------------------------


@pattern(
    r"^The size of tensor a \((?P<a>\d+)\) must match the size of tensor b \((?P<b>\d+)\)"
    r"|^The expanded size of the tensor \((?P<a2>\d+)\) must match the existing size "
    r"\((?P<b2>\d+)\)"
)
def positions(evidence: Evidence, match: re.Match[str]) -> Answer:
    """The sequence is longer than a table of positions."""
    few, many = sorted(int(item) for item in match.groups() if item is not None)
    table = evidence.refused_arguments.position_table
    if table is not None and (table.rows, table.tokens) == (few, many):
        yield host(
            f"{table.input} has {many} tokens, {evidence.module_type or 'the model'} has "
            f"positions for {few}",
            "max_position_embeddings sets how many tokens a row may have: each takes its own "
            "position.",
            table.input,
        )
        yield Hint(
            rule="input_beyond_positions",
            text=f"the sequence has {many} positions, the table {few}: let the tokenizer truncate "
            f"to max_length={few}",
        )
        return
    for fact in evidence.tensors:
        tree = fact.node
        if not isinstance(tree, ast.Subscript) or few not in fact.shape or few < 2:
            continue
        name, shapes = ast.unparse(tree.value), {it.expression: it.shape for it in evidence.tensors}
        parts = tree.slice.elts if isinstance(tree.slice, ast.Tuple) else [tree.slice]
        ends = [
            (at, part.upper)
            for at, part in enumerate(parts)
            if isinstance(part, ast.Slice) and part.upper is not None and part.lower is None
        ]
        whole = shapes.get(name, ())
        if any(whole[at : at + 1] == (few,) or _size(end, shapes) == many for at, end in ends):
            yield Hint(
                rule="table_of_positions",
                text=f"{name} ends after {few} positions, and a slice beyond the end is shorter: "
                f"make the table for at least {many}, or cut the input to {few}",
            )
            return


def _size(node: ast.expr, shapes: Mapping[str | None, Shape]) -> int | None:
    """Return the number that ``x.size(1)`` or ``x.shape[1]`` is, for a tensor of the line."""
    match node:
        case ast.Call(ast.Attribute(value, "size"), [ast.Constant(int(at))]):
            pass
        case ast.Subscript(ast.Attribute(value, "shape"), ast.Constant(int(at))):
            pass
        case _:
            return None
    return next(iter(shapes.get(ast.unparse(value), ())[at : at + 1]), None)


# --- samples that no batch can be made of --------------------------------------------------------


def _is_collating(evidence: Evidence) -> bool:
    """Return whether a DataLoader was making a batch."""
    in_worker = evidence.error is not None and "DataLoader worker" in evidence.error.message
    files = (item.file.replace("\\", "/") for item in evidence.frames)
    return in_worker or any("torch/utils/data/_utils/collate" in file for file in files)


@pattern(
    r"^stack expects each tensor to be equal size, but got \[(?P<a>[\d, ]*)\] at entry \d+ and "
    r"\[(?P<b>[\d, ]*)\]"
)
def unequal_samples(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Tensors of different shapes cannot be stacked, in a batch or elsewhere."""
    a, b, in_loader = ints(match["a"]), ints(match["b"]), _is_collating(evidence)
    if len(a) != len(b):
        return
    if in_loader and len(a) == 3 and a[1:] == b[1:] and {a[0], b[0]} <= {1, 3, 4}:
        text = f"if the samples are images of {a[0]} and of {b[0]} channels, read all as the same "
        yield Hint(rule="size_images", text=text + "kind, with convert('RGB') or convert('L')")
    elif len(a) == 3 and a[0] == b[0]:
        text = "if they are images of different sizes, resize, crop or pad them to one size before "
        text += "they are stacked"
        keep = ". For a model that takes a list of images, a collate_fn leaves them in one"
        yield Hint(rule="size_images", text=text + keep * in_loader)
    elif a[1:] == b[1:]:
        text = f"{a[0]} and {b[0]} {'rows' if a[1:] else 'elements'}: if they are steps of "
        text += "sequences, torch.nn.utils.rnn.pad_sequence pads them"
        text += ", in a collate_fn of the loader" * in_loader
        if not in_loader:
            text += ". If they are batches, torch.cat joins them"
        elif a[1:]:
            text += ". If they are objects of images, keep them in a list"
        yield Hint(rule="pad_samples", text=text)


@pattern(
    r"^Sizes of tensors must match except in dimension (?P<dim>\d+)\. Expected size \d+ but got "
    r"size \d+ for tensor number (?P<at>\d+) in the list"
)
def cat_sizes(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Parts of one tensor differ in another dimension; which of them is right is not known."""
    parts = [fact for fact in evidence.tensors if (fact.argument or "").startswith("tensors[")]
    at, joined = f"tensors[{match['at']}]", int(match["dim"])
    pair = [evidence.tensor("tensors[0]"), evidence.tensor(at)]
    known = [(fact.shape, user_name(evidence, fact)) for fact in pair if fact is not None]
    if len(known) != len(pair) or len({len(part.shape) for part in parts}) != 1:
        return
    # vstack, column_stack and dstack join what they make of parts of fewer dimensions.
    unequal = {
        dim for dim, (a, b) in enumerate(zip(*(it[0] for it in known), strict=True)) if a != b
    }
    if joined >= len(parts[0].shape) or not unequal - {joined}:
        return
    said = " and ".join(f"{name} is {format_shape(shape)}" for shape, name in known)
    yield host(f"{said}: only dimension {joined} may differ", argument=at)
    sizes = [sorted(set(of_dim)) for of_dim in zip(*(part.shape for part in parts), strict=True)]
    dims = [dim for dim, found in enumerate(sizes) if len(found) > 1 and dim != joined]
    (small, smaller), (large, larger) = sorted(known, key=lambda it: [it[0][dim] for dim in dims])
    ways = []
    if all(len(sizes[dim]) == len(pair) and small[dim] < large[dim] for dim in dims):
        is_pair = len(parts) == len(pair)
        which, other = (larger, smaller) if is_pair else ("the larger", "the smaller")
        if is_pair and not smaller.isidentifier():
            other = "the other"  # said twice, a long expression hides the rest
        # Without the numbers, which the headline has: another input may have other sizes.
        ways += [f"crop {which} to the size of {other} in {_dimensions(dims)}"]
        ways += [f"enlarge {other}"]
    # Another dimension than the first was asked for.
    if len(dims) == 1 and len(sizes[joined]) == 1 and joined == 0:
        ways.append("join along it" if ways else f"join them along dimension {dims[0]}")
    if ways:
        *first, last = ways
        yield Hint(rule="cat_sizes", text=", or ".join(filter(None, (", ".join(first), last))))


def _dimensions(dims: Sequence[int]) -> str:
    *others, last = map(str, dims)
    return f"dimensions {', '.join(others)} and {last}" if others else f"dimension {last}"


@pattern(r"^object of type 'NoneType' has no len|^'(?P<key>[^']*)'$", is_distinct=False)
def odd_sample(evidence: Evidence, match: re.Match[str]) -> Answer:
    """The dataset returned nothing for a sample, or dicts of different keys."""
    if _is_collating(evidence) and evidence.error is not None:
        if match["key"] is None:
            text = "The __getitem__ of the dataset returned nothing for it."
            yield host("a sample of the batch is None", text, "batch")
        elif evidence.error.type_name == "KeyError":
            key = match["key"]
            yield host(
                f"a sample of the batch has no key {key!r}, which its first sample has",
                "default_collate joins the samples key by key.",
                "batch",
            )
