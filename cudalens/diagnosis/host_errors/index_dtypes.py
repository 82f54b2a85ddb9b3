"""Dtypes of indices and masks, and of what is written at them."""

from __future__ import annotations

import re

from cudalens.core.report import Evidence
from cudalens.diagnosis.host_errors._base import HostVerdict, family, host
from cudalens.diagnosis.host_errors._words import dtype, expression, named, subject


@family(r"tensors used as indices must be long, int, byte or bool tensors")
def index_dtype(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A floating-point tensor was used as an index."""
    found = [
        item
        for item in evidence.tensors
        if item.dtype.startswith(("float", "bfloat", "complex")) and item.argument != "self"
    ]
    fact = found[0] if len(found) == 1 else None
    have = f" is {fact.dtype}" if fact else " has a floating-point dtype"
    return host(
        f"the index{have}; int64, int32, uint8 or bool are possible",
        "An index counts elements, or is a mask of them.",
        "indices",
        have=fact.dtype if fact else None,
        want="int64",
        expression=expression(fact),
    )


@family(
    r"(?P<op>\w+)\(\): Expected dtype (?:int32/)?int64 for index"
    r"|(?P<op2>index_select|index_add_?|index_copy_?|index_fill_?)\(\): [Ee]xpected dtype "
    r"int32(?:/int64|"
    r" or int64) for index"
)
def gather_index_dtype(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """gather, scatter and their kin got an index of another dtype."""
    fact = named(evidence, "index")
    have = fact.dtype if fact else "of another dtype"
    return host(
        f"index is {have}, {match['op'] or match['op2']} takes int64",
        "An index counts elements.",
        "index",
        have=fact.dtype if fact else None,
        want="int64",
        expression=expression(fact),
    )


@family(
    r"(?P<op>\w+)\(\): Expected self\.dtype to be equal to src\.dtype"
    r"|(?P<op2>\w+)\(\): self \((?P<a>\w+)\) and source \((?P<b>\w+)\) must have the same scalar "
    r"type"
    r"|Index put requires the source and destination dtypes match, got (?P<a2>\w+) for the "
    r"destination and (?P<b2>\w+) for the source"
)
def written_dtype(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """What is written has another dtype than what it is written to."""
    target, value = named(evidence, "self"), named(evidence, "src", "source", "values", "value")
    to = dtype(match["a"] or match["a2"] or (target.dtype if target else "another dtype"))
    have = dtype(match["b"] or match["b2"] or (value.dtype if value else "another dtype"))
    names = {"scatter": "src", "index": "source"}
    op = match["op"] or match["op2"] or "index_put"
    default = "values" if match["a2"] else names.get(op.split("_")[0], "src")
    name = (value.argument if value else None) or default
    is_known = value is not None or bool(match["b"] or match["b2"])
    return host(
        f"{name} is {have} and is written to {to}"
        if is_known
        else f"{name} has another dtype than self, which is {to}",
        "Writing at indices converts nothing.",
        name,
        have=have,
        want=to,
        expression=expression(value),
    )


@family(
    r"where expected condition to be a boolean tensor, but got a tensor with dtype (?P<got>\w+)"
    r"|masked_fill_? only supports boolean masks, but got (?:mask with )?dtype (?P<got2>\w+)"
    r"|masked_select: expected BoolTensor for mask|one_hot is only applicable to index tensor of "
    r"type"
)
def mask_or_index_dtype(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A condition, a mask or the classes of one_hot have another dtype."""
    is_one_hot = "one_hot" in match[0]
    names = ("tensor", "self", "input") if is_one_hot else ("condition", "mask")
    fact = named(evidence, *names)
    got = match["got"] or match["got2"]
    have = dtype(got) if got else (fact.dtype if fact else "of another dtype")
    want = "int64" if is_one_hot else "bool"
    argument = (fact.argument if fact else None) or (
        "condition" if "where" in match[0] else "tensor" if is_one_hot else "mask"
    )
    return host(
        f"{subject(fact, argument)} is {have}, {want} is wanted",
        "Class numbers are int64." if is_one_hot else "A mask is true or false.",
        argument,
        have=have,
        want=want,
        expression=expression(fact),
    )


@family(
    r"Subtraction, the `-` operator, with (?:a bool|two bool) tensor|Negation, the `-` operator, on"
    r" a bool tensor"
)
def bool_arithmetic(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """Masks are subtracted or negated as if they were numbers."""
    found = [item for item in evidence.tensors if item.dtype == "bool"]
    fact = found[0] if len(found) == 1 else None
    return host(
        "a bool tensor is subtracted or negated as a number",
        "Masks are combined with ~, &, | and ^.",
        fact.argument if fact else None,
        is_mask=True,
        expression=expression(fact),
    )
