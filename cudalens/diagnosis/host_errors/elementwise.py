"""Shapes that do not go together outside of layers: broadcasting, views, indices, lists."""

from __future__ import annotations

import re
from math import prod

from cudalens.core.report import Evidence
from cudalens.core.report_types import TensorFact
from cudalens.diagnosis.host_errors._base import HostVerdict, family, host
from cudalens.diagnosis.host_errors._words import (
    called,
    expression,
    ints,
    named,
    said,
    spoken,
    subject,
)

_PAIRS = (
    ("input", "target"),
    ("query", "attn_mask"),
    ("self", "other"),
    ("input", "other"),
    ("self", "mask"),
    ("self", "source"),
)


@family(
    r"The size of tensor a \((?P<a>\d+)\) must match the size of tensor b \((?P<b>\d+)\) at "
    r"non-singleton dimension (?P<dim>\d+)"
)
def broadcast(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """Two shapes cannot be broadcast to one."""
    a, b, dim = int(match["a"]), int(match["b"]), int(match["dim"])
    if called(evidence) == "scaled_dot_product_attention":
        return _attention(evidence, a, b)
    too_long = beyond_positions(evidence, a, b)
    if too_long is not None:
        return too_long
    left, right = _pair(evidence, a, b, dim)
    if left is None or right is None:
        return host(
            f"sizes {a} and {b} meet in dimension {dim} of the result",
            "Sizes broadcast when they are equal or one of them is 1.",
            size=a,
            other=b,
            dim=dim,
        )
    return host(
        f"{subject(left, 'one')} {said(left.shape)} and {subject(right, 'the other')} "
        f"{said(right.shape)} do not broadcast: "
        f"{a} meets {b} in dimension {dim} of the result",
        "Shapes are lined up at their last dimension; sizes go together when they are equal or "
        "one of them is 1.",
        right.argument,
        left=left.shape,
        right=right.shape,
        first=expression(left),
        second=expression(right),
        is_loss=right.argument == "target",
    )


def _attention(evidence: Evidence, a: int, b: int) -> HostVerdict:
    fact = named(evidence, "attn_mask")
    shape = f": its shape is {said(fact.shape)}" if fact else ""
    return host(
        f"attn_mask has {b} where the attention scores have {a}{shape}",
        "The mask must broadcast to (batch, heads, queries, keys).",
        "attn_mask",
    )


_Pair = tuple[TensorFact, TensorFact] | tuple[None, None]


def _pair(evidence: Evidence, a: int, b: int, dim: int) -> _Pair:
    """Return the two tensors that collide, when the evidence names exactly two that do so."""
    for one, two in _PAIRS:
        left, right = evidence.tensor(one), evidence.tensor(two)
        if left is not None and right is not None and _collide(left.shape, right.shape, a, b, dim):
            return left, right
    line = [item for item in evidence.tensors if item.expression]
    found = [
        (left, right)
        for left in line
        for right in line
        if left is not right and _collide(left.shape, right.shape, a, b, dim)
    ]
    return found[0] if len(found) == 1 else (None, None)


def _collide(left: tuple[int, ...], right: tuple[int, ...], a: int, b: int, dim: int) -> bool:
    rank = max(len(left), len(right))
    first, second = dim - (rank - len(left)), dim - (rank - len(right))
    if not (0 <= first < len(left) and 0 <= second < len(right)):
        return False
    return left[first] == a and right[second] == b


@family(r"shape '\[(?P<want>[-\d, ]+)\]' is invalid for input of size (?P<numel>\d+)")
def view_numel(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A view has not as many elements as the tensor."""
    want, numel = ints(match["want"]), int(match["numel"])
    fixed = prod(size for size in want if size >= 0)
    fact = named(evidence, "self", "input")
    fact = fact if fact is not None and prod(fact.shape) == numel else None
    shape = f" of shape {said(fact.shape)}" if fact else ""
    if -1 in want:
        problem = f"{numel} elements{shape} cannot be split into pieces of {fixed}"
    else:
        problem = f"{numel} elements{shape} do not fill {said(want)}, which takes {fixed}"
    return host(
        problem,
        f"The asked shape is {said(want)}; a view neither adds nor drops elements.",
        "size" if called(evidence) == "view" else "shape",
        want=want,
        numel=numel,
        shape=fact.shape if fact else None,
    )


@family(r"view size is not compatible with input tensor's size and stride")
def view_stride(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A tensor that is not contiguous cannot be viewed in this shape."""
    fact = named(evidence, "self", "input")
    memory = ""
    if fact is not None and fact.stride is not None:
        memory = f": shape {said(fact.shape)} with stride {said(fact.stride)}"
    return host(
        f"the elements do not lie in memory in the order that this view needs{memory}",
        "transpose, permute and some slices give such tensors; reshape copies where it must.",
        "self",
        call=evidence.call_text,
    )


@family(
    r"Sizes of tensors must match except in dimension (?P<dim>\d+)\. Expected size (?P<want>\d+) "
    r"but got size (?P<got>\d+) for tensor number (?P<n>\d+) in the list"
)
def cat_sizes(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """Tensors to be joined differ in another dimension than the one they are joined along."""
    first, other = evidence.tensor("tensors[0]"), evidence.tensor(f"tensors[{match['n']}]")
    shapes = f": {said(first.shape)} and {said(other.shape)}" if first and other else ""
    return host(
        f"tensors[{match['n']}] has size {match['got']} where the first has "
        f"{match['want']}{shapes}",
        f"They are joined along dimension {match['dim']}; all others must be equal.",
        f"tensors[{match['n']}]",
        dim=int(match["dim"]),
    )


@family(
    r"The expanded size of the tensor \((?P<want>-?\d+)\) must match the existing size "
    r"\((?P<got>\d+)\) at non-singleton dimension (?P<dim>\d+)\.  Target sizes: "
    r"\[(?P<target>[-\d, ]*)\]\.  Tensor sizes: \[(?P<shape>[\d, ]*)\]"
)
def expand_size(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A tensor cannot be expanded to a shape, also when it is written into a slice."""
    too_long = beyond_positions(evidence, int(match["want"]), int(match["got"]))
    if too_long is not None:
        return too_long
    target, shape = ints(match["target"]), ints(match["shape"])
    is_write = called(evidence) == "__setitem__"
    what = "is written to" if is_write else "is expanded to"
    return host(
        f"a tensor of shape {said(shape)} {what} {said(target)}: {match['got']} meets "
        f"{match['want']} in dimension {match['dim']}",
        "Only dimensions of size 1 expand.",
        "value" if is_write else "self",
        target=target,
        shape=shape,
    )


@family(
    r"shape mismatch: value tensor of shape \[(?P<value>[\d, ]*)\] cannot be broadcast to indexing "
    r"result of shape \[(?P<shape>[\d, ]*)\]"
)
def written_shape(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """The value that is written does not fit the indexed places."""
    value, shape = ints(match["value"]), ints(match["shape"])
    return host(
        f"a value of shape {said(value)} is written to places of shape {said(shape)}",
        "The value must broadcast to the shape that the index selects.",
        "value",
    )


_INDEXED_BY_TENSORS = ("aten::index", "aten::_index_put", "aten::_unsafe_index")


@family(r"index (?P<index>-?\d+) is out of bounds for dimension (?P<dim>\d+) with size (?P<n>\d+)")
def index_bound(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """An index lies beyond the end of a dimension."""
    index, dim, size = int(match["index"]), int(match["dim"]), int(match["n"])
    last = f"the last valid index is {size - 1}" if size else "the dimension is empty"
    is_known = _is_true_dimension(evidence)
    where = f"dimension {dim} with size {size}" if is_known else f"a dimension of size {size}"
    return host(
        f"index {index} is out of bounds for {where}: {last}",
        f"Indices run from {-size} to {size - 1}." if size else "No index is valid.",
        spoken(evidence, "indices"),
        index=index,
        dim=dim,
        size=size,
    )


def _is_true_dimension(evidence: Evidence) -> bool:
    """Return whether the number in the text is that of a dimension.

    Indexed by tensors, the CPU counts only the dimensions that they index.
    """
    if evidence.op.name is not None:
        return not evidence.op.name.startswith(_INDEXED_BY_TENSORS)
    api = evidence.op.api or ""
    return evidence.refused_call.is_indexed_by_numbers or bool(api and not api.endswith("item__"))


@family(
    r"Dimension out of range \(expected to be in range of \[(?P<low>-?\d+), (?P<high>-?\d+)\], "
    r"but got (?P<got>-?\d+)\)"
)
def dimension_bound(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A dimension is named that the tensor does not have."""
    rank = int(match["high"]) + 1
    fact = named(evidence, "self", "input")
    fact = fact if fact is not None and len(fact.shape) == rank else None
    shape = f": its shape is {said(fact.shape)}" if fact else ""
    return host(
        f"dim {match['got']} does not exist in a tensor of {rank} dimensions{shape}",
        f"Dimensions run from {match['low']} to {match['high']}.",
        spoken(evidence, "dim"),
        got=int(match["got"]),
        rank=rank,
    )


@family(r"too many indices for tensor of dimension (?P<rank>\d+)")
def index_count(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """More indices than dimensions."""
    fact = named(evidence, "self", "input")
    shape = f" of shape {said(fact.shape)}" if fact else ""
    return host(
        f"more indices than the {match['rank']} dimensions of the tensor{shape}",
        "Each index takes one dimension; None adds one and takes none.",
        "indices",
    )


@family(
    r"The shape of the mask \[(?P<mask>[\d, ]*)\] at index (?P<at>\d+) does not match the shape of "
    r"the indexed tensor \[(?P<shape>[\d, ]*)\] at index (?P<at2>\d+)"
)
def mask_shape(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A mask has not the shape of what it selects from."""
    mask, shape = ints(match["mask"]), ints(match["shape"])
    at, there = int(match["at"]), int(match["at2"])
    return host(
        f"the mask {said(mask)} has {mask[at]} where the tensor {said(shape)} has {shape[there]}",
        "A mask covers the leading dimensions of the tensor exactly; it does not broadcast.",
        "indices",
        mask=mask,
        shape=shape,
    )


@family(
    r"number of dimensions in the tensor input does not match the length of the desired ordering "
    r"of "
    r"dimensions i\.e\. input\.dim\(\) = (?P<rank>\d+) is not equal to len\(dims\) = (?P<n>\d+)"
)
def permuted_dimensions(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """permute was given more or fewer dimensions than the tensor has."""
    fact = named(evidence, "self", "input")
    shape = f" of shape {said(fact.shape)}" if fact else ""
    return host(
        f"permute orders {match['n']} dimensions, the tensor{shape} has {match['rank']}",
        "Each dimension is named once.",
        "dims",
    )


# --- an input with more tokens than its model has positions, as t ---------------------------------


def beyond_positions(evidence: Evidence, *sizes: int) -> HostVerdict | None:
    """Return the verdict when the sizes that collide are the tokens and the rows of the table."""
    found = evidence.refused_call.position_table
    if found is None or {found.rows, found.tokens} != set(sizes):
        return None
    name, rows, tokens = found.input, found.rows, found.tokens
    kind = evidence.module_type or "the model"
    return host(
        f"{name} has {tokens} tokens, {kind} has positions for {rows}",
        "max_position_embeddings sets how many tokens a row may have: each takes its own position.",
        name,
        rows=rows,
        tokens=tokens,
    )
