"""Dtypes that do not go together, or that an op does not take; of indices and masks too."""

from __future__ import annotations

import re

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, TensorFact
from cudalens.diagnosis.host_errors._base import Answer, groups, host, pattern, row
from cudalens.diagnosis.host_errors._words import INTEGERS, argument_name, dtype, name_of, named
from cudalens.diagnosis.user_code import api_function

_TARGETS = ("cross_entropy", "nll_loss", "multi_margin_loss", "multilabel_margin_loss")
_LAYER = "A layer computes in the dtype of its parameters and converts nothing."
_SILENT = "Nothing is converted silently."


def _only_of(evidence: Evidence, name: str) -> TensorFact | None:
    """Return the only tensor of a dtype."""
    found = [item for item in evidence.tensors if item.dtype == name]
    return found[0] if len(found) == 1 else None


row(
    "layer_dtype",
    r"Input type \((?P<input>[^)]+)\) and (?P<which>weight|bias) type \((?P<other>[^)]+)\) should "
    r"be the same",
    "input is {input:dtype}, the {which} is {other:dtype}",
    _LAYER,
    "input",
)


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
        return
    fact = named(evidence, "other", "mat2", "tensor", "vec")
    argument = fact.argument if fact is not None and fact.dtype == two else None
    yield host(
        f"the operands are {one} and {two}",
        "A matrix product needs one dtype and converts nothing.",
        argument or "other",
    )


@pattern(
    r"expected (?:target dtype|scalar type) to be (?P<want>\w+)(?: or Byte)?,? but (?:got|found) "
    r"(?P<got>\w+)"
    r"|expected scalar type (?P<want2>\w+) but found (?P<got2>\w+)"
    r"|\"(?P<kernel>nll_loss\w*|cross_entropy\w*)\" not implemented for '(?P<got3>\w+)'"
    r"|Expected tensor for argument #\d+ '(?P<name>\w+)' to have one of the following scalar "
    r"types: (?P<want4>[\w, ]+); but got (?P<got4>\S+) instead \(while checking arguments for "
    r"(?P<op4>\w+)\)"
    r"|tensors used as (?P<name5>indices) must be (?P<want5>long, int, byte or bool) tensors"
    r"|(?P<op6>\w+)\(\): [Ee]xpected dtype int32(?:/int64| or int64) for (?P<name6>index)"
    r"|(?P<op7>\w+)\(\): Expected dtype int64 for (?P<name7>index)"
    r"|where expected (?P<name8>condition) to be a (?P<want8>bool)ean tensor, but got a tensor "
    r"with dtype (?P<got8>\w+)"
    r"|masked_fill_? only supports (?P<want9>bool)ean (?P<name9>mask)s, but got (?:mask with )?"
    r"dtype (?P<got9>\w+)"
    r"|masked_select: expected (?P<want10>Bool)Tensor for (?P<name10>mask)"
    r"|(?P<op11>one_hot) is only applicable to index (?P<name11>tensor) of type"
)
def wanted_dtype(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A tensor has another dtype than the op takes; for a loss, its labels."""
    found, function = groups(match), api_function(evidence)
    is_loss = bool(match["want"] or match["kernel"]) or function in _TARGETS
    name = "target" if is_loss else found.get("name")
    want = [dtype(item) for item in re.split(r", | or |,", found.get("want", "Long"))]
    if name == "indices" and match["name"] is None:
        odd = [item for item in evidence.tensors if "float" in item.dtype]
        odd = [item for item in odd if item.argument != "self"]
        fact = odd[0] if len(odd) == 1 else None
    elif name is not None:
        name = argument_name(evidence, name)
        fact = named(evidence, name, *(("self", "input") if name == "tensor" else ()))
    else:
        fact = _only_of(evidence, dtype(found["got"]))
    got = dtype(found["got"]) if "got" in found else fact.dtype if fact else "of another dtype"
    if fact is not None and (fact.dtype == got or not is_loss):
        name = fact.argument or name
    who = name if is_loss or match["want4"] else name_of(fact, name or "a tensor")
    op = "this call" if is_loss or name is None else found.get("op", function)
    op = "indexing" if op == "__getitem__" else op
    kinds = " or ".join(filter(None, [", ".join(want[:-1]), want[-1]]))
    yield host(
        f"{who} is {got}, {op} takes {kinds}",
        "Class labels are numbers of type int64." if is_loss else _SILENT,
        name,
    )


row(
    "target_probabilities",
    r"Expected floating point type for target with class probabilities, got (?P<got>\w+)",
    "target is {got:dtype} and has the shape of input, so it is read as class probabilities",
    "Probabilities are floating point; class numbers have the shape of the scores without "
    "dimension 1.",
    "target",
)


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


row(
    "in_place_dtype",
    r"result type (?P<result>\w+) can't be cast to the desired output type (?P<out>\w+)",
    "the result is {result:dtype} and cannot be stored in place in a tensor of {out:dtype}",
    "An in-place op keeps the dtype of its tensor.",
    "self",
    hint=Hint(
        rule="in_place_dtype",
        text="make the tensor {result:dtype} where it is made, or let the op make a new one, "
        "as in x = x / 2",
    ),
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
    is_int = got in INTEGERS
    yield host(
        f"{api_function(evidence) or found['op']} has no kernel for {got}",
        "It computes in floating point." if is_int else f"No kernel was written for {got}.",
        argument,
    )


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
        f"A loss with {want} input and {got} target can pass forward and fail in backward.",
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


# --- indices and masks, and what is written at them ----------------------------------------------


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
