"""Dtypes that do not go together, or that an op does not take; of indices and masks too."""

from __future__ import annotations

import re

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, TensorFact
from cudalens.diagnosis.host_errors._base import Answer, groups, host, pattern, row
from cudalens.diagnosis.host_errors._words import (
    argument_name,
    cast,
    device_type,
    dtype,
    name_of,
    named,
)
from cudalens.diagnosis.host_errors.devices import convolution_device
from cudalens.diagnosis.user_code import api_function, rewritten

_TARGETS = ("cross_entropy", "nll_loss", "multi_margin_loss", "multilabel_margin_loss")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "bool")
_LAYER = "A layer computes in the dtype of its parameters and converts nothing."
_SILENT = "Nothing is converted silently."


def cast_needed(
    evidence: Evidence, argument: str | None, have: str | None, want: str | None
) -> Answer:
    """Yield the cast of an argument to the dtype that the call takes."""
    if argument is None or not want or want == have:
        return
    fact = evidence.tensor(argument)
    subject = (fact.expression if fact else None) or argument
    twins = [item for item in evidence.tensors if fact and item.expression == fact.expression]
    yield Hint(
        rule="cast_needed",
        text=f"{subject} is {have or 'of another dtype'}: cast it to {want}",
        # The same expression for two arguments: only one of the places is meant.
        fix=rewritten(evidence, fact, _cast_to(evidence, fact, want)) if len(twins) == 1 else None,
    )


def _cast_to(evidence: Evidence, fact: TensorFact | None, want: str) -> str:
    """Write the cast, or leave the user's own cast out where the tensor before it was right."""
    text = fact.expression if fact and fact.expression else ""
    before = re.sub(r"\.(?:float|double|half|bfloat16|int|long|bool)\(\)$", "", text)
    is_right = any(item.expression == before and item.dtype == want for item in evidence.tensors)
    return before if before != text and is_right else "{x}" + cast(want)


def _only_of(evidence: Evidence, name: str) -> TensorFact | None:
    """Return the only tensor of a dtype."""
    found = [item for item in evidence.tensors if item.dtype == name]
    return found[0] if len(found) == 1 else None


@pattern(
    r"Input type \((?P<input>[^)]+)\) and (?P<which>weight|bias) type \((?P<other>[^)]+)\) should "
    r"be the same"
)
def layer_dtype(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A convolution's input and its parameters differ in dtype, or lie on different devices."""
    here, there = device_type(match["input"]), device_type(match["other"])
    have, want = dtype(match["input"]), dtype(match["other"])
    if here != there and have == want:
        yield from convolution_device(evidence, match["which"], here or "", there or "")
        return
    yield host(f"input is {have}, the {match['which']} is {want}", _LAYER, "input")
    yield from cast_needed(evidence, "input", have, want)


@pattern(
    r"mat1 and mat2 must have the same dtype, but got (?P<a>\w+) and (?P<b>\w+)"
    r"|expected m1 and m2 to have the same dtype, but got: (?P<a2>[\w: ]+?) != (?P<b2>[\w:]+)"
    r"|expected mat1 and mat2 to have the same dtype, but got: (?P<a3>[\w: ]+?) != (?P<b3>[\w:]+)"
    r"|expected both vectors to have same dtype, but found (?P<a4>\w+) and (?P<b4>\w+)"
)
def product_dtypes(evidence: Evidence, match: re.Match[str]) -> Answer:
    """The operands of a matrix product differ in dtype."""
    one, two = map(dtype, groups(match).values())
    if api_function(evidence) == "linear":
        yield host(f"input is {one}, the weight is {two}", _LAYER, "input")
        yield from cast_needed(evidence, "input", one, two)
        return
    fact = named(evidence, "other", "mat2", "tensor", "vec")
    argument = fact.argument if fact is not None and fact.dtype == two else None
    yield host(
        f"the operands are {one} and {two}",
        "A matrix product needs one dtype and converts nothing.",
        argument or "other",
    )
    yield from cast_needed(evidence, argument or "other", two, one)


@pattern(
    r"expected (?:target dtype|scalar type) to be (?P<want>\w+)(?: or Byte)?,? but (?:got|found) "
    r"(?P<got>\w+)"
    r"|expected scalar type (?P<want2>\w+) but found (?P<got2>\w+)"
    r"|\"(?P<kernel>nll_loss\w*|cross_entropy\w*)\" not implemented for '(?P<got3>\w+)'"
)
def scalar_type(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A tensor has another dtype than the op takes; for a loss, its labels."""
    found = groups(match)
    want, got = dtype(found.get("want", "Long")), dtype(found["got"])
    is_loss = bool(match["want"] or match["kernel"]) or api_function(evidence) in _TARGETS
    fact = named(evidence, "target") if is_loss else _only_of(evidence, got)
    fact = fact if fact is not None and fact.dtype == got else None
    argument = "target" if is_loss else (fact.argument if fact else None)
    yield host(
        f"{argument or name_of(fact, 'a tensor')} is {got}, this call takes {want}",
        "Class labels are numbers of type int64." if is_loss else _SILENT,
        argument,
    )
    yield from cast_needed(evidence, argument, got, want)


@pattern(r"Expected floating point type for target with class probabilities, got (?P<got>\w+)")
def target_probabilities(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A target of the input's shape is read as probabilities, and holds integers."""
    got = dtype(match["got"])
    yield host(
        f"target is {got} and has the shape of input, so it is read as class probabilities",
        "Probabilities are floating point; class numbers have the shape of the scores without "
        "dimension 1.",
        "target",
    )
    yield from cast_needed(evidence, "target", got, "float32")


@pattern(
    r"Expected tensor for argument #(?P<n>\d+) '(?P<name>\w+)' to have one of the following scalar "
    r"types: (?P<want>[\w, ]+); but got (?P<got>\S+) instead \(while checking arguments for "
    r"(?P<op>\w+)\)"
)
def argument_scalar_type(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A lookup or bag got indices that are no integers."""
    got, name = dtype(match["got"]), argument_name(evidence, match["name"])
    want = [dtype(item) for item in match["want"].split(",")]
    yield host(
        f"{name} is {got}, {match['op']} takes {' or '.join(want)}",
        "Rows of a table are numbered by integers.",
        name,
    )
    yield from cast_needed(evidence, name, got, want[0])


@pattern(
    r"result type \w+ can't be cast to the desired output type (?P<got>\w+)"
    r"|Found dtype (?P<got2>\w+) but expected \w+"
    r"|the `-` operator, (?:with|on) (?:a|two) bool tensors?"
)
def loss_target_dtype(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A loss that computes with its target got one of another dtype than the scores."""
    scores, target = named(evidence, "input"), named(evidence, "target")
    if not (evidence.op.api or "").startswith("torch.nn.functional."):
        return
    if scores is None or target is None or "float" not in scores.dtype:
        return
    # torch's words name the dtype that is in the way: here that of the target.
    in_the_way = dtype(groups(match).get("got", "bool"))
    if target.dtype != in_the_way or target.dtype == scores.dtype:
        return
    yield host(
        f"target is {target.dtype}, {api_function(evidence)} wants the dtype of the scores: "
        f"{scores.dtype}",
        "The loss computes with the target itself, and converts nothing.",
        "target",
    )
    yield from cast_needed(evidence, "target", target.dtype, scores.dtype)


row(
    "in_place_dtype",
    r"result type (?P<result>\w+) can't be cast to the desired output type (?P<out>\w+)",
    "the result is {result:dtype} and cannot be stored in place in a tensor of {out:dtype}",
    "An in-place op keeps the dtype of its tensor.",
    "self",
)


@pattern(
    r"(?P<op>\w+)\(\): could not infer output dtype\. Input dtype must be either a floating point "
    r"or complex dtype\. Got: (?P<got>\w+)"
    r"|(?P<op2>\w+)\(\):? ?[Ii]nput dtype (?:must|should) be either (?:a )?floating point or "
    r"complex(?: dtypes?)?\. (?:Got:?|but got) (?P<got2>\w+)"
    r"|\"(?P<op3>\w+)\" not implemented for '(?P<got3>\w+)'"
)
def unsupported_dtype(evidence: Evidence, match: re.Match[str]) -> Answer:
    """An op has no kernel for the dtype of its input."""
    found = groups(match)
    got = dtype(found["got"])
    fact = _only_of(evidence, got)
    argument = fact.argument if fact else None
    is_int = got in _INTEGERS
    yield host(
        f"{api_function(evidence) or found['op']} has no kernel for {got}",
        "It computes in floating point." if is_int else f"No kernel was written for {got}.",
        argument,
    )
    yield from cast_needed(evidence, argument, got, "float32" if is_int else None)


@pattern(r"Found dtype (?P<got>\w+) but expected (?P<want>\w+)")
def gradient_dtype(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A loss's input and target differ in dtype, which some losses show in backward only."""
    got, want = dtype(match["got"]), dtype(match["want"])
    if evidence.phase == "forward":
        yield host(
            f"{api_function(evidence) or 'the op'} got {got} where it takes {want}",
            "All its tensors have the same dtype; nothing is converted silently.",
        )
        return
    yield host(
        f"a gradient is {got}, its tensor is {want}",
        f"A loss whose input is {want} and whose target is {got} can pass forward and fail in "
        "backward.",
    )


row(
    "unsafe_autocast",
    r"torch\.nn\.functional\.(?P<op>\w+) and torch\.nn\.\w+ are unsafe to autocast",
    "{op} is unsafe to autocast: its input is probabilities",
    "A sigmoid in half precision rounds to 0 and 1, and their logarithms are infinite. Leave the "
    "sigmoid out and call {op}_with_logits or BCEWithLogitsLoss, which are safe to autocast.",
    "input",
)


@pattern(r"[Oo]nly [Tt]ensors of floating point (?:and complex )?dtype can require gradients")
def gradient_of_integers(evidence: Evidence, match: re.Match[str]) -> Answer:
    """An integer tensor cannot require gradients."""
    fact = named(evidence, "self", "data", "tensor")
    have = f"{fact.dtype} tensor" if fact else "tensor that is not floating point"
    argument = fact.argument if fact else None
    yield host(f"a {have} cannot require gradients", "Gradients are real numbers.", argument)
    yield from cast_needed(evidence, argument, fact.dtype if fact else None, "float32")


# --- indices and masks, and what is written at them ----------------------------------------------


@pattern(r"tensors used as indices must be long, int, byte or bool tensors")
def index_dtype(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A floating-point tensor was used as an index."""
    found = [
        item
        for item in evidence.tensors
        if item.dtype.startswith(("float", "bfloat", "complex")) and item.argument != "self"
    ]
    have = found[0].dtype if len(found) == 1 else None
    yield host(
        f"the index {f'is {have}' if have else 'has a floating-point dtype'}; int64, int32, uint8 "
        "or bool are possible",
        "An index counts elements, or is a mask of them.",
        "indices",
    )
    yield from cast_needed(evidence, "indices", have, "int64")


@pattern(
    r"(?P<op>\w+)\(\): Expected dtype (?:int32/)?int64 for index"
    r"|(?P<op2>index_select|index_add_?|index_copy_?|index_fill_?)\(\): [Ee]xpected dtype "
    r"int32(?:/int64| or int64) for index"
)
def gather_index_dtype(evidence: Evidence, match: re.Match[str]) -> Answer:
    """gather, scatter and their kin got an index of another dtype."""
    fact = named(evidence, "index")
    have = fact.dtype if fact else None
    yield host(
        f"index is {have or 'of another dtype'}, {groups(match)['op']} takes int64",
        "An index counts elements.",
        "index",
    )
    yield from cast_needed(evidence, "index", have, "int64")


@pattern(
    r"(?P<op>\w+)\(\): Expected self\.dtype to be equal to src\.dtype"
    r"|(?P<op2>\w+)\(\): self \((?P<to>\w+)\) and source \((?P<have>\w+)\) must have the same "
    r"scalar type"
    r"|Index put requires the source and destination dtypes match, got (?P<to2>\w+) for the "
    r"destination and (?P<have2>\w+) for the source"
)
def written_dtype(evidence: Evidence, match: re.Match[str]) -> Answer:
    """What is written has another dtype than what it is written to."""
    found, target = groups(match), named(evidence, "self")
    value = named(evidence, "src", "source", "values", "value")
    to = dtype(found.get("to") or (target.dtype if target else "another dtype"))
    have = dtype(found.get("have") or (value.dtype if value else "another dtype"))
    op = found.get("op", "")
    default = {"scatter": "src", "index": "source", "": "values"}.get(op.split("_")[0], "src")
    name = (value.argument if value else None) or default
    is_known = value is not None or "have" in found
    yield host(
        f"{name} is {have} and is written to {to}"
        if is_known
        else f"{name} has another dtype than self, which is {to}",
        "Writing at indices converts nothing.",
        name,
    )
    yield from cast_needed(evidence, name, have, to)


@pattern(
    r"where expected condition to be a boolean tensor, but got a tensor with dtype (?P<got>\w+)"
    r"|masked_fill_? only supports boolean masks, but got (?:mask with )?dtype (?P<got2>\w+)"
    r"|masked_select: expected BoolTensor for mask|one_hot is only applicable to index tensor of "
    r"type"
)
def mask_or_index_dtype(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A condition, a mask or the classes of one_hot have another dtype."""
    is_one_hot = "one_hot" in match[0]
    names = ("tensor", "self", "input") if is_one_hot else ("condition", "mask")
    fact, got = named(evidence, *names), groups(match).get("got")
    have = dtype(got) if got else (fact.dtype if fact else "of another dtype")
    want = "int64" if is_one_hot else "bool"
    default = "condition" if "where" in match[0] else "tensor" if is_one_hot else "mask"
    argument = (fact.argument if fact else None) or default
    yield host(
        f"{name_of(fact, argument)} is {have}, and has to be {want}",
        "Class numbers are int64." if is_one_hot else "A mask is true or false.",
        argument,
    )
    yield from cast_needed(evidence, argument, have, want)


@pattern(
    r"Subtraction, the `-` operator, with (?:a bool|two bool) tensor|Negation, the `-` operator, on"
    r" a bool tensor"
)
def bool_arithmetic(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Masks are subtracted or negated as if they were numbers."""
    fact = _only_of(evidence, "bool")
    yield host(
        "a bool tensor is subtracted or negated as a number",
        "Masks are combined with ~, &, | and ^.",
        fact.argument if fact else None,
    )
