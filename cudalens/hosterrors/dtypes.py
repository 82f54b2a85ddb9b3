"""Dtypes that do not go together, or that an op does not take."""

from __future__ import annotations

import re

from cudalens.hosterrors._base import HostVerdict, family, host
from cudalens.hosterrors._words import called, device_type, dtype, expression, named
from cudalens.model import Evidence

_TARGETS = ("cross_entropy", "nll_loss", "multi_margin_loss", "multilabel_margin_loss")


@family(
    r"Input type \((?P<input>[^)]+)\) and (?P<which>weight|bias) type \((?P<other>[^)]+)\) should "
    r"be the same"
)
def layer_dtype(evidence: Evidence, match: re.Match[str]) -> HostVerdict | None:
    """A convolution's input and its parameters differ in dtype, or lie on different devices."""
    here, there = device_type(match["input"]), device_type(match["other"])
    have, want = dtype(match["input"]), dtype(match["other"])
    fact = named(evidence, "input")
    which = match["which"]
    if here != there and have == want:
        return host(
            f"input is on {fact.device if fact else here}, the {which} is on {there}",
            "An op needs all its tensors on one device.",
            "input" if there != "cpu" else which,
            devices=(here, there),
            expression=expression(fact),
            is_model="cpu" in (there or ""),
        )
    return host(
        f"input is {have}, the {which} is {want}",
        "A layer computes in the dtype of its parameters and converts nothing.",
        "input",
        have=have,
        want=want,
        expression=expression(fact),
    )


@family(
    r"mat1 and mat2 must have the same dtype, but got (?P<a>\w+) and (?P<b>\w+)"
    r"|expected m1 and m2 to have the same dtype, but got: (?P<a2>[\w ]+?) != (?P<b2>[\w:]+)"
    r"|expected mat1 and mat2 to have the same dtype, but got: (?P<a3>[\w ]+?) != (?P<b3>[\w:]+)"
    r"|expected both vectors to have same dtype, but found (?P<a4>\w+) and (?P<b4>\w+)"
)
def product_dtypes(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """The operands of a matrix product differ in dtype."""
    one, two = (dtype(text) for text in match.groups() if text is not None)
    if called(evidence) == "linear":
        fact = named(evidence, "input")
        return host(
            f"input is {one}, the weight is {two}",
            "A layer computes in the dtype of its parameters and converts nothing.",
            "input",
            have=one,
            want=two,
            expression=expression(fact),
        )
    fact = named(evidence, "other", "mat2", "tensor", "vec")
    fact = fact if fact is not None and fact.dtype == two else None
    return host(
        f"the operands are {one} and {two}",
        "A matrix product needs one dtype and converts nothing.",
        (fact.argument if fact else None) or "other",
        have=two,
        want=one,
        expression=expression(fact),
    )


@family(
    r"expected (?:target dtype|scalar type) to be (?P<want>\w+)(?: or Byte)?,? but (?:got|found) "
    r"(?P<got>\w+)"
    r"|expected scalar type (?P<want2>\w+) but found (?P<got2>\w+)"
    r"|\"(?P<kernel>nll_loss\w*|cross_entropy\w*)\" not implemented for '(?P<got3>\w+)'"
)
def scalar_type(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A tensor has another dtype than the op takes; for a loss, its labels."""
    want = dtype(match["want"] or match["want2"] or "Long")
    got = dtype(match["got"] or match["got2"] or match["got3"])
    is_loss = bool(match["want"] or match["kernel"]) or called(evidence) in _TARGETS
    found = [item for item in evidence.tensors if item.dtype == got]
    fact = named(evidence, "target") if is_loss else (found[0] if len(found) == 1 else None)
    if fact is not None and fact.dtype != got:
        fact = None
    argument = "target" if is_loss else (fact.argument if fact else None)
    subject = argument or (fact.expression if fact else None) or "a tensor"
    return host(
        f"{subject} is {got}, this call takes {want}",
        "Class labels are numbers of type int64." if is_loss else "Nothing is converted silently.",
        argument,
        have=got,
        want=want,
        expression=expression(fact),
    )


@family(r"Expected floating point type for target with class probabilities, got (?P<got>\w+)")
def target_probabilities(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A target of the input's shape is read as probabilities, and holds integers."""
    got = dtype(match["got"])
    fact = named(evidence, "target")
    return host(
        f"target is {got} and has the shape of input, so it is read as class probabilities",
        "Probabilities are floating point; class numbers have the shape of the scores without "
        "dimension 1.",
        "target",
        have=got,
        want="float32",
        expression=expression(fact),
        is_one_hot=True,
    )


@family(
    r"Expected tensor for argument #(?P<n>\d+) '(?P<name>\w+)' to have one of the following scalar "
    r"types: (?P<want>[\w, ]+); but got (?P<got>\S+) instead \(while checking arguments for "
    r"(?P<op>\w+)\)"
)
def argument_scalar_type(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A lookup or bag got indices that are no integers."""
    got, name = dtype(match["got"]), match["name"]
    want = [dtype(item) for item in match["want"].split(",")]
    fact = named(evidence, name) or (named(evidence, "input") if name == "indices" else None)
    return host(
        f"{name} is {got}, {match['op']} takes {' or '.join(want)}",
        "Rows of a table are numbered by integers.",
        (fact.argument if fact else None) or name,
        have=got,
        want=want[0],
        expression=expression(fact),
    )


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
    r"|(?P<op2>index_select|index_add_?|index_copy_?|index_fill_?)\(\): [Ee]xpected dtype int32(?:/int64|"
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
    r"|(?P<op2>\w+)\(\): self \((?P<a>\w+)\) and source \((?P<b>\w+)\) must have the same scalar type"
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
    return host(
        f"{(value.argument if value else None) or default} is {have} and is written to {to}",
        "Writing at indices converts nothing.",
        (value.argument if value else None) or default,
        have=have,
        want=to,
        expression=expression(value),
    )


@family(r"result type (?P<result>\w+) can't be cast to the desired output type (?P<out>\w+)")
def in_place_dtype(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """An in-place op would have to store floats in an integer tensor."""
    out, result = dtype(match["out"]), dtype(match["result"])
    fact = named(evidence, "self")
    return host(
        f"the result is {result} and cannot be stored in place in a tensor of {out}",
        "An in-place op keeps the dtype of its tensor.",
        "self",
        have=out,
        want=result,
        expression=expression(fact),
    )


@family(
    r"(?P<op>\w+)\(\): could not infer output dtype\. Input dtype must be either a floating point or "
    r"complex dtype\. Got: (?P<got>\w+)"
    r"|(?P<op2>\w+)\(\):? ?[Ii]nput dtype (?:must|should) be either (?:a )?floating point or complex"
    r"(?: dtypes?)?\. (?:Got:?|but got) (?P<got2>\w+)"
    r"|\"(?P<kernel>\w+)\" not implemented for '(?P<got3>\w+)'"
)
def unsupported_dtype(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """An op has no kernel for the dtype of its input."""
    got = dtype(match["got"] or match["got2"] or match["got3"])
    found = [item for item in evidence.tensors if item.dtype == got]
    fact = found[0] if len(found) == 1 else None
    op = called(evidence) or match["op"] or match["op2"] or match["kernel"]
    is_int = got in ("int64", "int32", "int16", "int8", "uint8", "bool")
    return host(
        f"{op} has no kernel for {got}",
        "It computes in floating point." if is_int else f"No kernel was written for {got}.",
        fact.argument if fact else None,
        have=got,
        want="float32" if is_int else None,
        expression=expression(fact),
    )


@family(
    r"where expected condition to be a boolean tensor, but got a tensor with dtype (?P<got>\w+)"
    r"|masked_fill_? only supports boolean masks, but got (?:mask with )?dtype (?P<got2>\w+)"
    r"|masked_select: expected BoolTensor for mask|one_hot is only applicable to index tensor of type"
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
        f"{argument} is {have}, {want} is wanted",
        "Class numbers are int64." if is_one_hot else "A mask is true or false.",
        argument,
        have=have,
        want=want,
        expression=expression(fact),
    )


@family(r"Subtraction, the `-` operator, with (?:a bool|two bool) tensor|Negation, the `-` operator, on"
        r" a bool tensor")
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


@family(r"Found dtype (?P<got>\w+) but expected (?P<want>\w+)")
def gradient_dtype(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A loss's input and target differ in dtype, which shows in backward."""
    got, want = dtype(match["got"]), dtype(match["want"])
    return host(
        f"a gradient is {got}, its tensor is {want}",
        "A loss of a float32 input and a float64 target passes forward and fails in backward.",
        None,
        have=got,
        want=want,
    )


@family(r"[Oo]nly [Tt]ensors of floating point (?:and complex )?dtype can require gradients")
def gradient_of_integers(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """An integer tensor cannot require gradients."""
    fact = named(evidence, "self", "data", "tensor")
    have = f"{fact.dtype} tensor" if fact else "tensor that is not floating point"
    return host(
        f"a {have} cannot require gradients",
        "Gradients are real numbers.",
        fact.argument if fact else None,
        have=fact.dtype if fact else None,
        want="float32",
        expression=expression(fact),
    )
