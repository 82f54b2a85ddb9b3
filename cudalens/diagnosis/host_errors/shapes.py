"""Shapes that do not go together outside of layers: products, broadcasting, views, indices."""

from __future__ import annotations

import ast
import re
from math import isqrt, prod

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, TensorFact
from cudalens.diagnosis.host_errors._base import Answer, Verdict, host, pattern, row
from cudalens.diagnosis.host_errors._words import (
    Shape,
    argument_name,
    format_shape,
    ints,
    its_shape,
    name_of,
    named,
    of_shape,
    owner,
)
from cudalens.diagnosis.user_code import api_function, in_library, parsed, renamed, rewritten

# --- matrix products -----------------------------------------------------------------------------

_LEFT, _RIGHT = ("self", "input", "mat1"), ("other", "mat2", "weight", "vec", "tensor")
_MATMUL = "torch.matmul takes any number of dimensions."


@pattern(r"mat1 and mat2 shapes cannot be multiplied \((?P<a>\d+x\d+) and (?P<b>\d+x\d+)\)")
def matrix_product(evidence: Evidence, match: re.Match[str]) -> Answer:
    """The columns of the left matrix are not the rows of the right one."""
    left, right = ints(match["a"]), ints(match["b"])
    linear = api_function(evidence) == "linear"
    yield from (_linear if linear else _product)(evidence, left, right)


def _linear(evidence: Evidence, left: Shape, right: Shape) -> Answer:
    fact, shape = named(evidence, "input"), left
    # Torch shows the input as a matrix: the leading dimensions are folded into its rows.
    if fact is not None and fact.shape[-1:] == left[1:] and prod(fact.shape) == prod(left):
        shape = fact.shape
    got, (want, out) = left[1], right
    yield host(
        f"input has {got} features in its last dimension, {owner(evidence)} takes {want}: its "
        f"shape is {format_shape(shape)}",
        f"The layer maps {want} features to {out}; its input has {got}.",
        "input",
    )
    yield Hint(rule="in_features", text=f"if the input is right, in_features has to be {got}")


def _product(evidence: Evidence, left: Shape, right: Shape) -> Answer:
    one, two = of_shape(evidence, left, *_LEFT), of_shape(evidence, right, *_RIGHT)
    # Known as the operand of one side, a tensor is not that of the other.
    one = None if one is not None and one.argument in _RIGHT else one
    two = None if two is not None and two.argument in _LEFT else two
    first, second = name_of(one, "the left matrix"), name_of(two, "the right one")
    yield host(
        f"{first} has {left[1]} columns and {second} has {right[0]} rows: "
        f"{format_shape(left)} and {format_shape(right)} cannot be multiplied",
        f"The last dimension of the left operand ({left[1]}) and the first of the right one "
        f"({right[0]}) must be equal.",
        (two.argument if two else None) or "other",
    )


@pattern(
    r"Expected size for first two dimensions of batch2 tensor to be: \[(?P<want>[\d, ]+)\] "
    r"but got: \[(?P<got>[\d, ]+)\]"
)
def batched_product(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Two stacks of matrices differ in number, or do not fit one another."""
    want, got = ints(match["want"]), ints(match["got"])
    left = named(evidence, "self", "input", "batch1")
    right = named(evidence, "mat2", "other", "batch2")
    first, second = name_of(left, "the left operand"), name_of(right, "the right one")
    if want[0] != got[0]:
        headline = f"{first} holds {want[0]} matrices and {second} holds {got[0]}"
    else:
        headline = (
            f"the matrices of {first} have {want[1]} columns, those of {second} {got[1]} rows"
        )
    shapes = ""
    if left and right:
        shapes = f": {format_shape(left.shape)} and {format_shape(right.shape)}"
    yield host(
        headline + shapes,
        "A batched product takes (batch, n, k) and (batch, k, m).",
        right.argument if right else "mat2",
    )


@pattern(
    r"(?P<name>batch1|batch2|self|mat2|vec1|vec2|mat1) must be a (?P<want>\d)D tensor"
    r"|(?P<name2>vector and vector|1D tensors) expected, but got (?P<a>\d)D and (?P<b>\d)D"
)
def product_dimensions(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A matrix product's operand has another number of dimensions than this product takes."""
    name = match["name"]
    if name is None:
        yield host(
            f"{api_function(evidence) or 'dot'} takes two vectors, and got {match['a']} and "
            f"{match['b']} dimensions",
            _MATMUL,
            "self",
        )
        return
    names = _RIGHT if name in ("batch2", "mat2", "vec2") else _LEFT
    fact = named(evidence, *names) or named(evidence, name)
    argument = (fact.argument if fact else None) or name
    yield host(
        f"{name_of(fact, argument)} must have {match['want']} dimensions for this product"
        f"{its_shape(fact)}",
        _MATMUL,
        argument,
    )


@pattern(r"size mismatch, got input \((?P<n>\d+)\), mat \((?P<mat>\d+x\d+)\), vec \((?P<vec>\d+)\)")
def matrix_vector(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A vector has not as many elements as the matrix has columns."""
    matrix, length = ints(match["mat"]), int(match["vec"])
    left = of_shape(evidence, matrix, *_LEFT)
    right = of_shape(evidence, (length,), *_RIGHT)
    yield host(
        f"{name_of(left, 'the matrix')} has {matrix[1]} columns and {name_of(right, 'the vector')} "
        f"has {length} elements: {format_shape(matrix)} and {format_shape((length,))} cannot be "
        "multiplied",
        f"{matrix[1]} and {length} must be equal.",
        (right.argument if right else None) or "other",
    )


row(
    "dot_length",
    r"inconsistent tensor size, expected tensor \[(?P<a>\d+)\] and src \[(?P<b>\d+)\] to have the "
    r"same number of elements",
    "the vectors have {a} and {b} elements",
    "A dot product takes two vectors of the same length.",
    "tensor",
)
row(
    "einsum_subscript",
    r"einsum\(\): subscript (?P<letter>\w) has size (?P<a>\d+) for operand (?P<n>\d+) which does "
    r"not broadcast with previously seen size (?P<b>\d+)",
    "subscript {letter} is {a} in operand {n} and {b} in an operand before it",
    "A letter means the same size in all operands.",
    "operands[{n}]",
)

# --- broadcasting, views and lists ---------------------------------------------------------------

_PAIRS = (
    ("input", "target"),
    ("query", "attn_mask"),
    ("self", "other"),
    ("input", "other"),
    ("self", "mask"),
    ("self", "source"),
)


@pattern(
    r"The size of tensor a \((?P<a>\d+)\) must match the size of tensor b \((?P<b>\d+)\) at "
    r"non-singleton dimension (?P<dim>\d+)"
)
def broadcast(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Two shapes cannot be broadcast to one."""
    a, b, dim = int(match["a"]), int(match["b"]), int(match["dim"])
    if api_function(evidence) == "scaled_dot_product_attention":
        yield host(
            f"attn_mask has {b} where the attention scores have {a}"
            f"{its_shape(named(evidence, 'attn_mask'))}",
            "The mask must broadcast to (batch, heads, queries, keys).",
            "attn_mask",
        )
        return
    if answer := _beyond_positions(evidence, a, b):
        yield from answer
        return
    pair = _pair(evidence, a, b, dim)
    if pair is None:
        yield host(
            f"sizes {a} and {b} do not match in dimension {dim} of the result",
            "Sizes broadcast when they are equal or one of them is 1.",
        )
        return
    left, right = pair
    yield host(
        f"{name_of(left, 'one')} {format_shape(left.shape)} and {name_of(right, 'the other')} "
        f"{format_shape(right.shape)} do not broadcast: {a} and {b} differ in dimension {dim} of "
        "the result",
        "Shapes are lined up at their last dimension; two sizes fit when they are equal or one of "
        "them is 1.",
        right.argument,
    )
    yield from _other_lengths(evidence, left, right, (a, b))


def _other_lengths(
    evidence: Evidence, left: TensorFact, right: TensorFact, sizes: tuple[int, int]
) -> Answer:
    """A table of positions ends before the sequence does, or images have another size."""
    a, b = sizes
    table = _short_slice(evidence, left if a < b else right)
    one, other = isqrt(max(a - 1, 0)), isqrt(max(b - 1, 0))
    if (one**2 + 1, other**2 + 1) == (a, b) and len(left.shape) == len(right.shape) == 3:
        yield Hint(
            rule="patches_of_image",
            text=f"{a} = {one}² + 1 and {b} = {other}² + 1: patches and a class token of images of "
            "two sizes; resize the images, or interpolate the position embeddings",
        )
    elif table is not None and min(a, b) > 1:
        yield Hint(
            rule="table_of_positions",
            text=f"{table} ends after {min(a, b)} positions, and a slice beyond the end is "
            f"shorter: make the table for at least {max(a, b)}, or cut the input to {min(a, b)}",
        )


def _short_slice(evidence: Evidence, fact: TensorFact) -> str | None:
    """Return the table of which the call takes a slice up to the length of the other tensor."""
    tree = parsed(evidence.call_text or "")
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Subscript) and any(
            isinstance(item, ast.Slice) and item.upper is not None and item.lower is None
            for item in ast.walk(node.slice)
        ):
            base = ast.unparse(node.value)
            if fact.expression in (base, ast.unparse(node)):
                return base
    return None


def _pair(evidence: Evidence, a: int, b: int, dim: int) -> tuple[TensorFact, TensorFact] | None:
    """Return the two tensors that do not fit, when the evidence names exactly two such."""
    for one, two in _PAIRS:
        left, right = evidence.tensor(one), evidence.tensor(two)
        if left is not None and right is not None and _meet(left.shape, right.shape, a, b, dim):
            return left, right
    line = [item for item in evidence.tensors if item.expression]
    found = [
        (left, right)
        for left in line
        for right in line
        if left is not right and _meet(left.shape, right.shape, a, b, dim)
    ]
    return found[0] if len(found) == 1 else None


def _meet(left: Shape, right: Shape, a: int, b: int, dim: int) -> bool:
    rank = max(len(left), len(right))
    first, second = dim - (rank - len(left)), dim - (rank - len(right))
    if not (0 <= first < len(left) and 0 <= second < len(right)):
        return False
    return left[first] == a and right[second] == b


@pattern(r"shape '\[(?P<want>[-\d, ]+)\]' is invalid for input of size (?P<numel>\d+)")
def view_numel(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A view has not as many elements as the tensor."""
    want, numel = ints(match["want"]), int(match["numel"])
    fixed = prod(size for size in want if size >= 0)
    fact = named(evidence, "self", "input")
    known = fact is not None and prod(fact.shape) == numel
    shape = f" of shape {format_shape(fact.shape)}" if fact and known else ""
    if -1 in want:
        problem = f"{numel} elements{shape} cannot be split into pieces of {fixed}"
    else:
        problem = f"{numel} elements{shape} do not fill {format_shape(want)}, which takes {fixed}"
    yield host(
        problem,
        f"The requested shape is {format_shape(want)}; a view neither adds nor drops elements.",
        "size" if api_function(evidence) == "view" else "shape",
    )


@pattern(r"view size is not compatible with input tensor's size and stride")
def view_stride(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A tensor that is not contiguous cannot be viewed in this shape."""
    fact = named(evidence, "self", "input")
    memory = ""
    if fact is not None and fact.stride is not None:
        memory = f": shape {format_shape(fact.shape)} with stride {format_shape(fact.stride)}"
    yield host(
        f"the elements are not stored in the order that this view needs{memory}",
        "transpose, permute and some slices give such tensors; reshape copies where it must.",
        "self",
    )
    if in_library(evidence, "transformers"):
        yield Hint(
            rule="reshape_for_view",
            text="the model views it: give it a contiguous copy",
            fix=rewritten(evidence, evidence.tensor("self"), "{x}.contiguous()"),
        )
        return
    yield Hint(
        rule="reshape_for_view",
        text="reshape does the same and copies when it has to",
        fix=renamed(evidence, "view", "reshape"),
    )


@pattern(
    r"Sizes of tensors must match except in dimension (?P<dim>\d+)\. Expected size (?P<want>\d+) "
    r"but got size (?P<got>\d+) for tensor number (?P<n>\d+) in the list"
)
def cat_sizes(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Tensors to be joined differ in another dimension than the one they are joined along."""
    name = f"tensors[{match['n']}]"
    first, other, shapes = evidence.tensor("tensors[0]"), evidence.tensor(name), ""
    if first and other:
        shapes = f": {format_shape(first.shape)} and {format_shape(other.shape)}"
    yield host(
        f"{name} has size {match['got']} where the first has {match['want']}{shapes}",
        f"They are joined along dimension {match['dim']}; all others must be equal.",
        name,
    )


@pattern(
    r"The expanded size of the tensor \((?P<want>-?\d+)\) must match the existing size "
    r"\((?P<got>\d+)\) at non-singleton dimension (?P<dim>\d+)\.  Target sizes: "
    r"\[(?P<target>[-\d, ]*)\]\.  Tensor sizes: \[(?P<shape>[\d, ]*)\]"
)
def expand_size(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A tensor cannot be expanded to a shape, also when it is written into a slice."""
    if answer := _beyond_positions(evidence, int(match["want"]), int(match["got"])):
        yield from answer
        return
    target, shape = format_shape(ints(match["target"])), format_shape(ints(match["shape"]))
    is_write = api_function(evidence) == "__setitem__"
    what = "is written to" if is_write else "is expanded to"
    yield host(
        f"a tensor of shape {shape} {what} {target}: {match['got']} and {match['want']} differ in "
        f"dimension {match['dim']}",
        "Only dimensions of size 1 expand.",
        "value" if is_write else "self",
    )


row(
    "written_shape",
    r"shape mismatch: value tensor of shape \[(?P<value>[\d, ]*)\] cannot be broadcast to indexing "
    r"result of shape \[(?P<shape>[\d, ]*)\]",
    "a value of shape {value:shape} is written to a selection of shape {shape:shape}",
    "The value must broadcast to the shape that the index selects.",
    "value",
)


# --- indices and dimensions ----------------------------------------------------------------------

_INDEXED_BY_TENSORS = ("aten::index", "aten::_index_put", "aten::_unsafe_index")


@pattern(r"index (?P<index>-?\d+) is out of bounds for dimension (?P<dim>\d+) with size (?P<n>\d+)")
def index_bound(evidence: Evidence, match: re.Match[str]) -> Answer:
    """An index lies beyond the end of a dimension."""
    index, dim, size = int(match["index"]), int(match["dim"]), int(match["n"])
    last = f"the last valid index is {size - 1}" if size else "the dimension is empty"
    is_known = _is_true_dimension(evidence)
    where = f"dimension {dim} with size {size}" if is_known else f"a dimension of size {size}"
    yield host(
        f"index {index} is out of bounds for {where}: {last}",
        f"Indices run from {-size} to {size - 1}." if size else "No index is valid.",
        argument_name(evidence, "indices"),
    )


def _is_true_dimension(evidence: Evidence) -> bool:
    """Return whether the number in the text is that of a dimension.

    Indexed by tensors, the CPU counts only the dimensions that they index.
    """
    name = evidence.op.name or ""
    if "::" in name:
        return not name.startswith(_INDEXED_BY_TENSORS)
    api = evidence.op.api or name
    return evidence.refused_call.is_indexed_by_numbers or bool(api and not api.endswith("item__"))


@pattern(
    r"Dimension out of range \(expected to be in range of \[(?P<low>-?\d+), (?P<high>-?\d+)\], "
    r"but got (?P<got>-?\d+)\)"
)
def dimension_bound(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A dimension is named that the tensor does not have."""
    rank = int(match["high"]) + 1
    fact = named(evidence, "self", "input")
    fact = fact if fact is not None and len(fact.shape) == rank else None
    count = "1 dimension" if rank == 1 else f"{rank} dimensions"
    yield host(
        f"dim {match['got']} does not exist in a tensor of {count}{its_shape(fact)}",
        f"Dimensions run from {match['low']} to {match['high']}.",
        argument_name(evidence, "dim"),
    )


row(
    "index_count",
    r"too many indices for tensor of dimension (?P<rank>\d+)",
    "more indices than the {rank} dimensions of the tensor{of_shape}",
    "Each index takes one dimension; None adds one and takes none.",
    "indices",
    tensors=("self", "input"),
)
row(
    "permuted_dimensions",
    r"number of dimensions in the tensor input does not match the length of the desired ordering "
    r"of dimensions i\.e\. input\.dim\(\) = (?P<rank>\d+) is not equal to len\(dims\) = (?P<n>\d+)",
    "permute orders {n} dimensions, the tensor{of_shape} has {rank}",
    "Each dimension is named once.",
    "dims",
    tensors=("self", "input"),
)


@pattern(
    r"The shape of the mask \[(?P<mask>[\d, ]*)\] at index (?P<at>\d+) does not match the shape of "
    r"the indexed tensor \[(?P<shape>[\d, ]*)\] at index (?P<there>\d+)"
)
def mask_shape(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A mask has not the shape of what it selects from."""
    mask, shape = ints(match["mask"]), ints(match["shape"])
    size, wanted = mask[int(match["at"])], shape[int(match["there"])]
    yield host(
        f"the mask {format_shape(mask)} has {size} where the tensor {format_shape(shape)} has "
        f"{wanted}",
        "A mask covers the leading dimensions of the tensor exactly; it does not broadcast.",
        "indices",
    )
    yield Hint(
        rule="mask_of_other_data",
        text=f"the mask was made for {size} rows: it belongs to another dataset or split, or to "
        "this tensor before it was cut",
    )


# --- an input with more tokens than its model has positions ---------------------------------------


def _beyond_positions(evidence: Evidence, *sizes: int) -> list[Verdict | Hint]:
    """Return what is said where the sizes that do not fit are the tokens and the table's rows."""
    found = evidence.refused_call.position_table
    if found is None or {found.rows, found.tokens} != set(sizes):
        return []
    verdict = host(
        f"{found.input} has {found.tokens} tokens, {evidence.module_type or 'the model'} has "
        f"positions for {found.rows}",
        "max_position_embeddings sets how many tokens a row may have: each takes its own position.",
        found.input,
    )
    hint = Hint(
        rule="input_beyond_positions",
        text=f"the sequence has {found.tokens} positions, the table {found.rows}: let the "
        f"tokenizer truncate to max_length={found.rows}",
    )
    return [verdict, hint]
