"""Matrix products whose inner dimensions differ: linear, matmul, bmm, dot, einsum."""

from __future__ import annotations

import re
from math import prod

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint
from cudalens.diagnosis.host_errors._base import Answer, host, pattern, row
from cudalens.diagnosis.host_errors._words import (
    Shape,
    format_shape,
    ints,
    its_shape,
    name_of,
    named,
    of_shape,
    owner,
)
from cudalens.diagnosis.user_code import api_function

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
    "A letter stands for the same size in all operands.",
    "operands[{n}]",
)
