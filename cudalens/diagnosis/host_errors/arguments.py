"""Arguments of the wrong kind: arrays and lists in place of tensors, unknown names, odd batches."""

from __future__ import annotations

import difflib
import re

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint
from cudalens.diagnosis.host_errors._base import Answer, HostVerdict, groups, host, pattern, row
from cudalens.diagnosis.host_errors._words import argument_name, format_shape, ints
from cudalens.diagnosis.user_code import api_function


@pattern(
    r"(?P<op>\w+)\(\): argument '(?P<name>\w+)' (?:\(position (?P<at>\d+)\) )?must be "
    r"(?P<want>[\w .]+), not (?P<got>[\w.]+)"
)
def argument_type(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A function of torch's got something that is no tensor, or no number."""
    odd = evidence.refused_call.odd_argument
    name, got = argument_name(evidence, match["name"]), match["got"]
    kind = odd.kind if odd else got
    yield host(
        f"{name} is a {kind}, {match['op']} takes a {match['want']}",
        "A NumPy array is not a tensor: it has no device and no graph."
        if got.startswith("numpy")
        else "Nothing is converted silently.",
        name,
    )
    if match["want"] in ("Tensor", "Tensor or Number"):
        yield from _tensor_of(evidence, got, kind)


@pattern(
    r"^'int' object is not callable|^'(?P<kind>numpy\.ndarray|list|tuple)' object has no attribute "
    r"'(?P<name>\w+)'",
    is_distinct=False,
)
def array_in_library(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A library asked an array or list what only a tensor knows."""
    odd = evidence.refused_call.odd_argument
    if odd is None:
        return
    asked = match["name"] or api_function(evidence) or "size"
    yield host(
        f"{odd.name} is a {odd.kind}, a tensor is wanted: it was asked for .{asked}",
        "Models take tensors; an array or a list is not converted.",
        odd.name,
    )
    yield from _tensor_of(evidence, odd.kind.split(" ", 1)[0], odd.kind)


def _tensor_of(evidence: Evidence, got: str, kind: str) -> Answer:
    """Make a tensor of an array or list, with the dtype and device that a weight has."""
    if got not in ("numpy.ndarray", "list"):
        return
    is_array = got == "numpy.ndarray"
    odd = evidence.refused_call.odd_argument
    fix = None
    if odd is not None and odd.expression:
        weight = evidence.tensor("weight")
        fix = f"torch.{'from_numpy' if is_array else 'tensor'}({odd.expression})"
        fix += ".float()" if is_array and "float64" in kind else ""
        fix += f'.to("{weight.device}")' if weight and weight.device != "cpu" else ""
    what = "array" if is_array else "list"
    yield Hint(rule="array_to_tensor", text=f"make a tensor of the {what}", fix=fix)


@pattern(r"(?P<f>[\w.]+)\(\) got an unexpected keyword argument '(?P<name>\w+)'", is_distinct=False)
def unknown_argument(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A function or model has no argument of this name."""
    name, known = match["name"], evidence.refused_call.parameters
    listed = f" It takes {', '.join(known[:12])}." if known else ""
    kind = _function(evidence, match["f"])
    yield host(f"{kind} has no argument {name}", f"The call passes {name}.{listed}", name)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if near:
        call = evidence.call_text or ""
        written = re.compile(rf"\b{re.escape(name)}(?=\s*=[^=])")
        fix = written.sub(near[0], call) if len(written.findall(call)) == 1 else None
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
            "They say the same thing in several ways.",
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


row(
    "model_input_twice",
    r"[Yy]ou cannot specify both (?P<a>\w+) and (?P<b>\w+) at the same time",
    "{a} and {b} are both given",
    "They say the same thing in two ways; the model takes one of them.",
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
    "the array has dtype {kind}, and there are no tensors of that dtype",
    "An array of dtype object often holds rows of different lengths.",
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
    values = "no values" if match["n"] == "no" else "more than one value"
    yield host(
        f"a tensor with {values} is used as a condition",
        "if, while, and, or and not need a single true or false.",
    )
    yield Hint(
        rule="truth_of_all",
        text="say whether one element or all of them must hold: .any() or .all()",
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
    yield HostVerdict(
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
    if in_loader and a and len(a) == len(b) and a[1:] == b[1:]:
        yield Hint(
            rule="pad_samples",
            text=f"the samples are sequences of {a[0]} and {b[0]} steps: pad them in a collate_fn",
            fix="torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)",
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
row(
    "unequal_lists",
    r"each element in list of batch should be of equal size",
    "the samples of the batch are lists of different lengths",
    "default_collate joins the first elements, the second ones, and so on.",
    "batch",
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
    "unequal_tokens",
    r"Unable to create tensor, you should probably activate truncation and/or padding"
    r"|Unable to create tensor returning overflowing tokens",
    "the texts have different numbers of tokens, and no padding makes them equal",
    "All rows of a tensor have the same length.",
    "padding",
    hint=Hint(
        rule="pad_tokens",
        text="let the tokenizer make the rows equal",
        fix="tokenizer(texts, padding=True, truncation=True)",
    ),
)
