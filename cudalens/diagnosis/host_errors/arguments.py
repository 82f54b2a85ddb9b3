"""Arguments of the wrong kind: arrays and lists in place of tensors, unknown names, odd batches."""

from __future__ import annotations

import ast
import difflib
import re

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint
from cudalens.diagnosis.host_errors._base import Answer, groups, host, pattern, row
from cudalens.diagnosis.host_errors.autograd_errors import number_for_loss
from cudalens.diagnosis.user_code import (
    api_function,
    called_name,
    list_items,
    parsed,
    renamed_keyword,
)

_METHODS = ("method", "builtin_function_or_method", "function")
_NO_GRADIENT = (
    "{x} is None: it has no gradient here",
    "A leaf has one after the backward of a loss that depends on it, until zero_grad() takes it "
    "away; the result of an op keeps none without retain_grad().",
)


def _kind(name: str) -> str:
    """Return what a value is, by the name of its type."""
    if _type_name(name) in _METHODS:
        return "a method that was not called"
    if name == "NoneType":
        return "None"
    if not name.startswith(("numpy.", "torch.d")):
        name = name.rpartition(".")[2]
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _type_name(kind: str) -> str:
    return kind.partition(" ")[0].rpartition(".")[2]


def _only_argument(evidence: Evidence) -> str | None:
    """Return the text of the only argument of the running call."""
    tree = parsed(evidence.call_text or "")
    args = [*tree.args, *tree.keywords] if isinstance(tree, ast.Call) else []
    return ast.unparse(args[0]) if len(args) == 1 and isinstance(args[0], ast.expr) else None


def _of_kind(evidence: Evidence, got: str, what: str, where: str, argument: str | None) -> Answer:
    """Say that something is no tensor, and what that kind of value is."""
    text = (argument and _only_argument(evidence)) or what
    if got == "NoneType" and text.endswith(".grad"):
        yield host(_NO_GRADIENT[0].format(x=text), _NO_GRADIENT[1])
        return
    array = "A NumPy array is not a tensor: it has no device and no graph."
    reason = array if got.startswith("numpy") else "Nothing is converted silently."
    yield host(f"{what} is {_kind(got)}, {where}", reason, argument)
    if got in _INSTEAD:
        yield Hint(rule="other_kind", text=_INSTEAD[got].format(x=text))


_INSTEAD = {
    "NoneType": "{x} is None here: its code did not run, or a function returned nothing",
    "torch.device": "{x} is a device, not a tensor: perhaps another argument was meant",
    "torch.dtype": "{x} is a dtype, not a tensor: perhaps another argument was meant",
}


@pattern(
    r"(?P<op>\w+)\(\): argument '(?P<name>\w+)' (?:\(position (?P<at>\d+)\) )?must be "
    r"(?P<want>[\w .]+), not (?P<got>[\w.]+)"
    # torch 2.11 has a second overload of cat, with a dimension's name, and so names neither.
    r"|^(?P<op2>cat)\(\) received an invalid combination of arguments - got \((?P<got2>Tensor), "
    r"[^\n]+\n \* \((?P<want2>tuple of Tensors) (?P<name2>tensors),"
)
def argument_type(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A function of torch's got something that is no tensor, or no number."""
    odd, found = evidence.refused_call.odd_argument, groups(match)
    got = odd.kind if odd and found["got"] != "NoneType" else found["got"]
    name = odd.name if odd else found["name"]
    yield from _of_kind(evidence, got, name, f"{found['op']} takes {_kind(found['want'])}", name)


@pattern(r"expected Tensor as element (?P<at>\d+) in argument \d+, but got (?P<got>[\w.]+)")
def item_type(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A list of tensors holds something that is none."""
    item = dict(enumerate(list_items(evidence))).get(int(match["at"]), f"item {match['at']}")
    where = f"all items of the list for {api_function(evidence) or 'the call'} are tensors"
    yield from _of_kind(evidence, match["got"], item, where, None)


@pattern(
    r"unsupported operand type\(s\) for (?P<op>[^:]+): '(?P<a>[\w.]+)' and '(?P<b>[\w.]+)'",
    is_distinct=False,
)
def operand_type(evidence: Evidence, match: re.Match[str]) -> Answer:
    """An operator stands between a tensor, or what a tensor gave, and something that is none."""
    kinds, tree = [match["a"], match["b"]], parsed(evidence.call_text or "")
    at = next((at for at in (1, 0) if kinds[at] in (*_METHODS, "NoneType")), kinds[0] == "Tensor")
    sides = [tree.left, tree.right] if isinstance(tree, ast.BinOp) else []
    text = ast.unparse(sides[at]) if sides else "the other operand"
    if kinds[at] == "NoneType" and text.endswith(".grad"):
        yield host(_NO_GRADIENT[0].format(x=text), _NO_GRADIENT[1])
        return
    other = "a tensor" if kinds[not at] == "Tensor" else _kind(kinds[not at])
    yield host(f"operator {match['op'].strip()} was used between {other} and {_kind(kinds[at])}")
    if kinds[at] in _INSTEAD:
        yield Hint(rule="other_kind", text=_INSTEAD[kinds[at]].format(x=text))


@pattern(
    r"^'(?P<kind>int)' object is not callable|^'(?P<kind2>[\w.]+)' object has no attribute "
    r"'(?P<name>\w+)'",
    is_distinct=False,
)
def no_tensor(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Something was asked for what only a tensor knows."""
    odd, kind = evidence.refused_call.odd_argument, match["kind"] or match["kind2"]
    asked = match["name"] or api_function(evidence) or "size"
    wanted = f"not a tensor: it has no .{asked}"
    text = (evidence.call_text or "").partition("(")[0].removesuffix(f".{asked}")
    if evidence.frames and evidence.frames[-1].is_user and kind == "NoneType":
        yield host(_NO_GRADIENT[0].format(x=text), _NO_GRADIENT[1])
    elif asked == "backward":
        yield from number_for_loss(evidence, text, kind)
    # Inside a library the object may be one of its own, and no argument of the call.
    elif odd is not None and (match["kind"] or _type_name(odd.kind) == _type_name(kind)):
        yield from _of_kind(evidence, odd.kind, odd.name, wanted, odd.name)


@pattern(r"(?P<f>[\w.]+)\(\) got an unexpected keyword argument '(?P<name>\w+)'", is_distinct=False)
def unknown_argument(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A function or model has no argument of this name."""
    name, known = match["name"], evidence.refused_call.parameters
    listed = f" It takes {', '.join(known[:12])}." if known else ""
    kind = _function(evidence, match["f"])
    yield host(f"{kind} has no argument {name}", f"The call passes {name}.{listed}", name)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if near:
        fix = renamed_keyword(evidence, name, near[0])
        yield Hint(rule="misspelt_argument", text=f"there is an argument {near[0]}", fix=fix)


@pattern(
    r"(?P<f>[\w.]+)\(\) takes (?:from )?(?P<want>\d+)(?: to (?P<most>\d+))? positional arguments? "
    r"but (?P<got>\d+) (?:was|were) given",
    is_distinct=False,
)
def argument_count(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A method or module was called with too many arguments."""
    itself = int("." in match["f"] or match["f"] == "forward")
    most, got = int(match["most"] or match["want"]) - itself, int(match["got"]) - itself
    count = f"{most} argument" if most == 1 else f"{most} arguments"
    yield host(f"{_function(evidence, match['f'])} takes {count} by position, the call gives {got}")


def _function(evidence: Evidence, function: str) -> str:
    """Name what was called: the model's class for its forward, else the function."""
    owner, _, name = function.rpartition(".")
    if name == "forward" or function == "forward":
        return (owner.rpartition(".")[2] or evidence.module_type or "the module") + ".forward"
    return function


@pattern(
    r"[Yy]ou (?:have to|must) specify (?:either |exactly one of |at least )*(?P<names>\w[\w, `]*)"
)
def model_input_missing(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A model of a library got none of the inputs that it can start from."""
    names, passed = re.findall(r"\w+_\w+", match["names"]), evidence.refused_call.given
    if not names or passed is None:
        yield host(match[0])
        return
    kind, listed = evidence.module_type or "the model", ", ".join(names)
    given = [name for name in names if name in passed]
    if given:
        yield host(
            f"{kind} got {' and '.join(given)}, and takes exactly one of {listed}",
            "Only one of them can be given.",
            given[-1],
        )
        return
    is_decoder = (evidence.module_path or "").rpartition(".")[2] == "decoder"
    yield host(
        f"{kind} got none of {listed}",
        "A decoder gets them from labels or decoder_input_ids."
        if is_decoder
        else "It needs one of them; arguments under other names are ignored or passed on.",
        "decoder_input_ids" if is_decoder else names[0],
    )


@pattern(
    r"argument '(?P<name>\w+)'[^.]*? failed to unpack the object at pos (?P<at>\d+) with error "
    r"\"type must be tuple of ints, ?but got (?P<got>\w+)\""
    r"|argument '(?P<name2>size)' \(.*\) must be tuple of ints, but found element of type "
    r"(?P<got2>\w+)"
)
def size_no_integer(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A size is a float, or a method that was not called."""
    found = groups(match)
    which = f"size number {match['at']}" if match["at"] else "one of the sizes"
    reason = "In Python 6 / 2 is a float, 6 // 2 is a whole number." * (found["got"] == "float")
    headline = f"{which} is {_kind(found['got'])}, and a size is a whole number"
    yield host(headline, reason, found["name"])


@pattern(r"^Boolean value of Tensor with (?:more than one|no) values? is ambiguous")
def ambiguous_truth(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A tensor is used as a condition, or a layer was made with tensors as its settings."""
    if any(item.function == "__init__" and not item.is_user for item in evidence.frames):
        made = called_name(evidence) or "a layer"
        yield host(
            f"{made} is made with a tensor as one of its settings",
            "A layer is made first, with its settings, and is called with tensors after that.",
        )
        return
    yield Hint(
        rule="truth_of_all",
        text="use .any() if one true element is enough, .all() if all must be true",
    )


row(
    "texts_in_tensor",
    r"too many dimensions 'str'|new\(\): invalid data type 'str'",
    "data contains strings, and a tensor contains numbers",
    "Class names are numbered first, words are given ids by a tokenizer or a vocabulary.",
    "data",
)
