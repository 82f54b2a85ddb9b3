"""Dtypes that do not go together, or that an op does not take."""

from __future__ import annotations

import re

from cudalens.core.report import Evidence
from cudalens.diagnosis.host_errors._base import HostVerdict, family, host
from cudalens.diagnosis.host_errors._words import (
    called,
    device_type,
    dtype,
    expression,
    named,
    spoken,
    subject,
)

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
    r"|expected m1 and m2 to have the same dtype, but got: (?P<a2>[\w: ]+?) != (?P<b2>[\w:]+)"
    r"|expected mat1 and mat2 to have the same dtype, but got: (?P<a3>[\w: ]+?) != (?P<b3>[\w:]+)"
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
    return host(
        f"{argument or subject(fact, 'a tensor')} is {got}, this call takes {want}",
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
    got, name = dtype(match["got"]), spoken(evidence, match["name"])
    want = [dtype(item) for item in match["want"].split(",")]
    fact = named(evidence, name)
    return host(
        f"{name} is {got}, {match['op']} takes {' or '.join(want)}",
        "Rows of a table are numbered by integers.",
        name,
        have=got,
        want=want[0],
        expression=expression(fact),
    )


@family(
    r"result type \w+ can't be cast to the desired output type (?P<out>\w+)"
    r"|Found dtype (?P<got>\w+) but expected \w+"
    r"|the `-` operator, (?:with|on) (?:a|two) bool tensors?"
)
def loss_target_dtype(evidence: Evidence, match: re.Match[str]) -> HostVerdict | None:
    """A loss that computes with its target got one of another dtype than the scores."""
    scores, target = named(evidence, "input"), named(evidence, "target")
    if not (evidence.op.api or "").startswith("torch.nn.functional."):
        return None
    if scores is None or target is None or "float" not in scores.dtype:
        return None
    # torch's words name the dtype that is in the way: here that of the target.
    if target.dtype != dtype(match["out"] or match["got"] or "bool"):
        return None
    if target.dtype == scores.dtype:
        return None
    return host(
        f"target is {target.dtype}, {called(evidence)} wants the dtype of the scores: "
        f"{scores.dtype}",
        "The loss computes with the target itself, and converts nothing.",
        "target",
        have=target.dtype,
        want=scores.dtype,
        expression=expression(target),
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
    r"(?P<op>\w+)\(\): could not infer output dtype\. Input dtype must be either a floating point "
    r"or "
    r"complex dtype\. Got: (?P<got>\w+)"
    r"|(?P<op2>\w+)\(\):? ?[Ii]nput dtype (?:must|should) be either (?:a )?floating point or "
    r"complex"
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


@family(r"Found dtype (?P<got>\w+) but expected (?P<want>\w+)")
def gradient_dtype(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A loss's input and target differ in dtype, which some losses show in backward only."""
    got, want = dtype(match["got"]), dtype(match["want"])
    if evidence.phase == "forward":
        return host(
            f"{called(evidence) or 'the op'} got {got} where it takes {want}",
            "All its tensors are of one dtype; nothing is converted silently.",
            None,
            have=got,
            want=want,
        )
    return host(
        f"a gradient is {got}, its tensor is {want}",
        f"A loss whose input is {want} and whose target is {got} can pass forward and fail in "
        "backward.",
        None,
        have=got,
        want=want,
    )


@family(r"(?P<op>torch\.nn\.functional\.\w+) and (?P<module>torch\.nn\.\w+) are unsafe to autocast")
def unsafe_autocast(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """Binary cross entropy of probabilities refuses to run under autocast."""
    op = match["op"].rpartition(".")[2]
    return host(
        f"{op} is unsafe to autocast: its input are probabilities",
        "A sigmoid in half precision rounds to 0 and 1, and their logarithms are infinite. Leave "
        f"the sigmoid out and call {op}_with_logits or BCEWithLogitsLoss, which are safe to "
        "autocast.",
        "input",
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
