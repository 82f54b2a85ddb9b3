"""Arguments of the wrong kind: arrays and lists in place of tensors, unknown names, odd batches."""

from __future__ import annotations

import ast
import difflib
import re

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint
from cudalens.diagnosis.host_errors._base import Answer, Verdict, groups, host, pattern, row
from cudalens.diagnosis.host_errors._words import argument_name, format_shape, ints, name_of
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
    if name.rpartition(".")[2].split(" ")[0] in _METHODS:
        return "a method that was not called"
    if name == "NoneType":
        return "None"
    if not name.startswith(("numpy.", "torch.d")):
        name = name.rpartition(".")[2]
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _only_argument(evidence: Evidence) -> str | None:
    """Return the text of the only argument of the running call."""
    tree = parsed(evidence.call_text or "")
    args = [*tree.args, *tree.keywords] if isinstance(tree, ast.Call) else []
    return ast.unparse(args[0]) if len(args) == 1 and isinstance(args[0], ast.expr) else None


def _of_kind(evidence: Evidence, got: str, what: str, where: str, argument: str | None) -> Answer:
    """Say that something is no tensor, and what that kind of value is."""
    text = _only_argument(evidence) or what
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
    name = argument_name(evidence, found["name"])
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
    elif odd is not None:
        yield from _of_kind(evidence, odd.kind, odd.name, wanted, odd.name)
    else:
        text = _only_argument(evidence) or "an argument"
        yield from _of_kind(evidence, kind, text, wanted, None)


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
    r"(?P<f>[\w.]+)\(\) missing (?P<n>\d+) required (?:positional|keyword-only) arguments?: "
    r"'(?P<name>\w+)'",
    is_distinct=False,
)
def missing_argument(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A function or model was called without an argument that it needs."""
    name = match["name"]
    yield host(
        f"{_function(evidence, match['f'])} needs {name}, and the call does not give it", "", name
    )


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


@pattern(r"^repeats can not be negative")
def negative_repeats(evidence: Evidence, match: re.Match[str]) -> Answer:
    """An element cannot be repeated less than no times."""
    known = [item for item in evidence.tensors if isinstance(item.summary.min, int)]
    fact = next((item for item in known if item.summary.min < 0), None)  # type: ignore[operator]
    low = f": the smallest is {fact.summary.min}" if fact else ""
    yield host(
        f"{name_of(fact, 'repeats')} contains negative numbers{low}",
        "Each number is the number of times an element is repeated.",
        "repeats",
    )
    text = "a difference of offsets that do not grow, or a mark such as -1, is negative"
    yield Hint(rule="negative_repeats", text=text)


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


row(
    "model_input_twice",
    r"[Yy]ou cannot specify both (?P<a>\w+) and (?P<b>\w+) at the same time",
    "{a} and {b} are both given",
    "Only one of them can be given.",
    "{b}",
)

# --- values that are no tensors, and tensors that are no values ----------------------------------

row(
    "ragged_list",
    r"expected sequence of length (?P<want>\d+) at dim (?P<dim>\d+) \(got (?P<got>\d+)\)",
    "the list has rows of {want} and of {got} elements in dimension {dim}",
    "All rows of a tensor have the same length.",
    "data",
)
row(
    "array_dtype",
    r"can't convert np\.ndarray of type (?P<kind>numpy\.\w+)\.",
    "the array has dtype {kind}, which tensors cannot have",
    "An array of dtype object often contains rows of different lengths.",
    "data",
)


@pattern(r"expected np\.ndarray \(got (?P<got>\w+)\)")
def array_wanted(evidence: Evidence, match: re.Match[str]) -> Answer:
    """from_numpy was given something else than an array."""
    is_tensor = match["got"] in ("Tensor", "Parameter")
    yield host(
        f"from_numpy takes a NumPy array, and got a {match['got']}",
        "It is a tensor already." if is_tensor else "torch.tensor takes lists and numbers.",
        "ndarray",
    )


row(
    "no_dtype",
    r"Could not infer dtype of (?P<kind>[\w.]+)"
    r"|new\(\): data must be a sequence \(got (?P<kind2>\w+)\)",
    "a value of type {kind} cannot be made a tensor",
    "Numbers, and lists and arrays of numbers, can.",
    "data",
)


@pattern(
    r"a Tensor with (?P<n>\d+) elements cannot be converted to Scalar"
    r"|only one element tensors can be converted to Python scalars"
)
def many_to_scalar(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A tensor of several elements is no Python number."""
    yield host(
        f"the tensor has {match['n'] or 'several'} elements, and is converted to one Python number",
        "item() and float() take tensors of one element.",
        "self",
    )


@pattern(r"Boolean value of Tensor with (?P<n>more than one|no) values? is ambiguous")
def ambiguous_truth(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A tensor of several elements is neither true nor false."""
    if any(item.function == "__init__" and not item.is_user for item in evidence.frames):
        made = called_name(evidence) or "a layer"
        yield host(
            f"{made} is made with a tensor as one of its settings",
            "A layer is made first, with its settings, and is called with tensors after that.",
        )
        return
    values = "no values" if match["n"] == "no" else "more than one value"
    yield host(
        f"a tensor with {values} is used as a condition",
        "if, while, and, or and not need a single true or false.",
    )
    yield Hint(
        rule="truth_of_all",
        text="use .any() if one true element is enough, .all() if all must be true",
    )


@pattern(
    r"Expected parameter (?P<name>\w+) \(\w+ of shape \((?P<shape>[\d, ]*)\)\) of distribution "
    r"(?P<kind>\w+)\(.*\) to satisfy the constraint (?P<rule>.+?), but found invalid values:"
    r"|Expected (?P<name2>value) argument \(\w+ of shape \((?P<shape2>[\d, ]*)\)\) to be within "
    r"the support \((?P<rule2>.+)\) of the distribution (?P<kind2>\w+)\(.*but found invalid "
    r"values:"
)
def distribution_values(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A distribution does not take the values of a parameter or sample, as a whole."""
    found = groups(match)
    yield Verdict(
        kind="host_error",
        headline=f"{found['name']} {format_shape(ints(found['shape']))} does not satisfy "
        f"{found['rule']}, which {found['kind']} requires",
        explanation="The condition is on the tensor as a whole, and not on each element.",
        argument=found["name"],
    )


# --- samples that no batch can be made of --------------------------------------------------------


@pattern(
    r"stack expects each tensor to be equal size, but got \[(?P<a>[\d, ]*)\] at entry (?P<i>\d+) "
    r"and \[(?P<b>[\d, ]*)\] at entry (?P<j>\d+)"
)
def unequal_samples(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Tensors of different shapes cannot be stacked, in a batch or elsewhere."""
    a, b, i, j = ints(match["a"]), ints(match["b"]), match["i"], match["j"]
    in_loader = _is_collating(evidence)
    one, other = f"tensors[{i}]", f"tensors[{j}]"
    if in_loader:
        one, other = f"sample {i} of the batch", f"sample {j}"
    yield host(
        f"{one} has shape {format_shape(a)}, {other} has {format_shape(b)}: they cannot be stacked",
        "A batch is one tensor, so its samples must all have the same shape."
        if in_loader
        else "stack joins tensors of the same shape.",
        "batch" if in_loader else other,
    )
    if len(a) == len(b) == 3 and a[1:] == b[1:]:
        text = f"the samples are images of {a[0]} and of {b[0]} channels: read all as the same "
        yield Hint(rule="size_images", text=text + "kind, with convert('RGB') or convert('L')")
    elif len(a) == len(b) >= 3:
        text = "the samples are images of different sizes: resize, crop or pad them to one size "
        text += "before they are stacked"
        keep = "; for a model that takes a list of images, a collate_fn leaves them in one"
        yield Hint(rule="size_images", text=text + keep * in_loader)
    elif a and len(a) == len(b) and a[1:] == b[1:]:
        yield Hint(
            rule="pad_samples",
            text=f"sequences of {a[0]} and {b[0]} steps: pad them with "
            "torch.nn.utils.rnn.pad_sequence"
            + ", in a collate_fn of the loader that stacks the labels too"
            * in_loader,
        )


def _is_collating(evidence: Evidence) -> bool:
    """Return whether a DataLoader was making a batch."""
    in_worker = evidence.error is not None and "DataLoader worker" in evidence.error.message
    return in_worker or any("collate" in item.file for item in evidence.frames)


row(
    "uncollatable_sample",
    r"default_collate: batch must contain .*?; found <class '(?P<kind>[\w.]+)'>",
    "the dataset returned a sample with a value of type {kind}, which default_collate cannot batch",
    "It takes tensors, arrays, numbers, strings, and dicts and lists of them.",
    "batch",
)


@pattern(r"^object of type 'NoneType' has no len", is_distinct=False)
def no_sample(evidence: Evidence, match: re.Match[str]) -> Answer:
    """The dataset returned nothing for a sample."""
    if _is_collating(evidence):
        text = "The __getitem__ of the dataset returned nothing for it."
        yield host("a sample of the batch is None", text, "batch")


row(
    "texts_in_tensor",
    r"too many dimensions 'str'|new\(\): invalid data type 'str'",
    "data contains strings, and a tensor contains numbers",
    "Class names are numbered first, words are given ids by a tokenizer or a vocabulary.",
    "data",
)
row(
    "unequal_lists",
    r"each element in list of batch should be of equal size",
    "the samples of the batch are lists of different lengths",
    "default_collate joins the first elements, the second ones, and so on.",
    "batch",
    hint=Hint(
        rule="pad_lists",
        text="let the dataset return tensors and pad them in a collate_fn of the loader, or let a "
        "collate_fn leave them lists",
    ),
)


@pattern(r"^'(?P<key>[^']*)'$", is_distinct=False)
def sample_key(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Samples that are dicts have different keys."""
    error = evidence.error
    if error is not None and error.type_name == "KeyError" and _is_collating(evidence):
        yield host(
            f"a sample of the batch has no key {match['key']!r}, which its first sample has",
            "default_collate joins the samples key by key.",
            "batch",
        )


row(
    "image_size",
    r"Input image size \((?P<got>\d+\*\d+)\) doesn't match model \((?P<want>\d+\*\d+)\)",
    "the images are {got}, the model takes {want}",
    "Its table of positions has one row for each patch of an image of that size.",
    "pixel_values",
    hint=Hint(
        rule="image_size",
        text="let the model's own processor resize them; or interpolate_pos_encoding=True",
    ),
)
row(
    "audio_length",
    r"Whisper expects the mel input features to be of length (?P<want>\d+), but found (?P<got>\d+)",
    "input_features has {got} frames, the model takes {want}",
    "Its encoder takes pieces of 30 seconds, padded.",
    "input_features",
    hint=Hint(rule="audio_length", text="let the model's own feature extractor pad or cut them"),
)
row(
    "image_channels",
    r"channel dimension of the pixel values match with the one set in the configuration\.?"
    r"(?: Expected (?P<want>\d+) but got (?P<got>\d+))?",
    "pixel_values has another number of channels than the model takes{its_shape}",
    "It reads them in dimension 1.",
    "pixel_values",
    tensors=("pixel_values",),
    hint=Hint(rule="image_channels", text="a gray image is made one of three with convert('RGB')"),
)
row(
    "unequal_tokens",
    r"Unable to create tensor, you should probably activate truncation and/or padding"
    r"|Unable to create tensor returning overflowing tokens",
    "the texts have different numbers of tokens, and no padding makes them equal",
    "All rows of a tensor have the same length.",
    "padding",
    hint=Hint(
        rule="pad_tokens",
        text="let the tokenizer make the rows equal: padding=True, truncation=True",
    ),
)
