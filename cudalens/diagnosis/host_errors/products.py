"""Matrix products whose inner dimensions differ: linear, matmul, bmm, dot, einsum."""

from __future__ import annotations

import re
from math import prod

from cudalens.core.report import Evidence
from cudalens.diagnosis.host_errors._base import HostVerdict, family, host
from cudalens.diagnosis.host_errors._words import (
    called,
    expression,
    ints,
    named,
    of_shape,
    owner,
    said,
    subject,
)

_LEFT, _RIGHT = ("self", "input", "mat1"), ("other", "mat2", "weight", "vec", "tensor")


@family(r"mat1 and mat2 shapes cannot be multiplied \((?P<a>\d+x\d+) and (?P<b>\d+x\d+)\)")
def matrix_product(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """The columns of the left matrix are not the rows of the right one."""
    left, right = ints(match["a"]), ints(match["b"])
    if called(evidence) == "linear":
        return _linear(evidence, left, right)
    return _product(evidence, left, right)


def _linear(evidence: Evidence, left: tuple[int, ...], right: tuple[int, ...]) -> HostVerdict:
    fact = named(evidence, "input")
    shape = left
    # Torch shows the input as a matrix: the leading dimensions are folded into its rows.
    if fact is not None and fact.shape[-1:] == left[1:] and prod(fact.shape) == prod(left):
        shape = fact.shape
    else:
        fact = None
    return host(
        f"input has {left[1]} features in its last dimension, {owner(evidence)} takes {right[0]}: "
        f"its shape is {said(shape)}",
        f"The layer maps {right[0]} features to {right[1]}; {left[1]} and {right[0]} collide.",
        "input",
        kind="linear",
        shape=shape,
        want=right[0],
        got=left[1],
        out=right[1],
        expression=expression(fact),
    )


def _product(evidence: Evidence, left: tuple[int, ...], right: tuple[int, ...]) -> HostVerdict:
    one, two = of_shape(evidence, left, *_LEFT), of_shape(evidence, right, *_RIGHT)
    # Known as the operand of one side, a tensor is not that of the other.
    one = None if one is not None and one.argument in _RIGHT else one
    two = None if two is not None and two.argument in _LEFT else two
    first, second = subject(one, "the left matrix"), subject(two, "the right one")
    return host(
        f"{first} has {left[1]} columns and {second} has {right[0]} rows: "
        f"{said(left)} and {said(right)} cannot be multiplied",
        f"The last dimension of the left operand ({left[1]}) and the first of the right one "
        f"({right[0]}) collide.",
        (two.argument if two else None) or "other",
        kind="matmul",
        left=left,
        right=right,
        first=expression(one),
        second=expression(two),
    )


@family(
    r"Expected size for first two dimensions of batch2 tensor to be: \[(?P<want>[\d, ]+)\] "
    r"but got: \[(?P<got>[\d, ]+)\]"
)
def batched_product(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """Two stacks of matrices differ in number, or do not fit one another."""
    want, got = ints(match["want"]), ints(match["got"])
    left = named(evidence, "self", "input", "batch1")
    right = named(evidence, "mat2", "other", "batch2")
    first, second = subject(left, "the left operand"), subject(right, "the right one")
    if want[0] != got[0]:
        headline = f"{first} holds {want[0]} matrices and {second} holds {got[0]}"
    else:
        headline = (
            f"the matrices of {first} have {want[1]} columns, those of {second} {got[1]} rows"
        )
    shapes = f": {said(left.shape)} and {said(right.shape)}" if left and right else ""
    return host(
        headline + shapes,
        "A batched product takes (batch, n, k) and (batch, k, m).",
        right.argument if right else "mat2",
        kind="bmm",
        left=left.shape if left else None,
        right=right.shape if right else None,
        first=expression(left),
        second=expression(right),
    )


@family(
    r"(?P<name>batch1|batch2|self|mat2|vec1|vec2|mat1) must be a (?P<want>\d)D tensor"
    r"|(?P<name2>vector and vector|1D tensors) expected, but got (?P<a>\d)D and (?P<b>\d)D"
)
def product_dimensions(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A matrix product's operand has another number of dimensions than this product takes."""
    if match["name"] is None:
        return host(
            f"{called(evidence) or 'dot'} takes two vectors, and got {match['a']} and "
            f"{match['b']} dimensions",
            "torch.matmul takes any number of dimensions.",
            "self",
        )
    at = 1 if match["name"] in ("batch2", "mat2", "vec2") else 0
    names = _LEFT if at == 0 else _RIGHT
    fact = named(evidence, *names) or named(evidence, match["name"])
    shape = f": its shape is {said(fact.shape)}" if fact else ""
    argument = (fact.argument if fact else None) or match["name"]
    return host(
        f"{subject(fact, argument)} has not the {match['want']} dimensions that this product "
        f"takes{shape}",
        "torch.matmul takes any number of dimensions.",
        argument,
    )


@family(r"size mismatch, got input \((?P<n>\d+)\), mat \((?P<mat>\d+x\d+)\), vec \((?P<vec>\d+)\)")
def matrix_vector(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A vector has not as many elements as the matrix has columns."""
    matrix, length = ints(match["mat"]), int(match["vec"])
    left = of_shape(evidence, matrix, *_LEFT)
    right = of_shape(evidence, (length,), *_RIGHT)
    return host(
        f"{subject(left, 'the matrix')} has {matrix[1]} columns and {subject(right, 'the vector')} "
        f"has {length} elements: {said(matrix)} and {said((length,))} cannot be multiplied",
        f"{matrix[1]} and {length} collide.",
        (right.argument if right else None) or "other",
        kind="mv",
        left=matrix,
        right=(length,),
        first=expression(left),
        second=expression(right),
    )


@family(
    r"inconsistent tensor size, expected tensor \[(?P<a>\d+)\] and src \[(?P<b>\d+)\] to have the "
    r"same number of elements"
)
def dot_length(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """Two vectors of a dot product differ in length."""
    return host(
        f"the vectors have {match['a']} and {match['b']} elements",
        "A dot product takes two vectors of one length.",
        "tensor",
    )


@family(
    r"einsum\(\): subscript (?P<letter>\w) has size (?P<a>\d+) for operand (?P<n>\d+) which does "
    r"not broadcast with previously seen size (?P<b>\d+)"
)
def einsum_subscript(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """One letter of an einsum stands for dimensions of different sizes."""
    return host(
        f"subscript {match['letter']} is {match['a']} in operand {match['n']} and {match['b']} "
        "in an operand before it",
        "A letter stands for one size in all operands.",
        f"operands[{match['n']}]",
    )
