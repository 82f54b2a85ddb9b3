"""Arguments of the wrong kind: arrays and lists in place of tensors, unknown names, odd batches."""

from __future__ import annotations

import re

from cudalens.core.report import Evidence
from cudalens.diagnosis.host_errors._base import HostVerdict, family, host
from cudalens.diagnosis.host_errors._words import called, ints, said, spoken


@family(
    r"(?P<op>\w+)\(\): argument '(?P<name>\w+)' (?:\(position (?P<at>\d+)\) )?must be "
    r"(?P<want>[\w .]+), not (?P<got>[\w.]+)"
)
def argument_type(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A function of torch's got something that is no tensor, or no number."""
    odd = evidence.refused_call.odd_argument
    kind = odd.kind if odd else match["got"]
    name = spoken(evidence, match["name"])
    return host(
        f"{name} is a {kind}, {match['op']} takes a {match['want']}",
        "A NumPy array is no tensor: it has no device and no graph."
        if match["got"].startswith("numpy")
        else "Nothing is converted silently.",
        name,
        got=match["got"],
        want=match["want"],
        expression=odd.expression if odd else None,
        type=kind,
    )


@family(
    r"^'int' object is not callable|^'(?P<kind>numpy\.ndarray|list|tuple)' object has no attribute "
    r"'(?P<name>\w+)'",
    is_distinct=False,
)
def array_in_library(evidence: Evidence, match: re.Match[str]) -> HostVerdict | None:
    """A library asked an array or list what only a tensor knows."""
    odd = evidence.refused_call.odd_argument
    if odd is None:
        return None
    kind, name = odd.kind, odd.name
    asked = match["name"] or called(evidence) or "size"
    return host(
        f"{name} is a {kind}, a tensor is wanted: it was asked for .{asked}",
        "Models take tensors; an array or a list is not converted.",
        name,
        got=kind.split(" ", 1)[0],
        want="Tensor",
        expression=odd.expression if odd else None,
        type=kind,
    )


@family(r"(?P<f>[\w.]+)\(\) got an unexpected keyword argument '(?P<name>\w+)'", is_distinct=False)
def unknown_argument(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A function or model has no argument of this name."""
    known = evidence.refused_call.parameters
    kind = _model(evidence, match["f"])
    listed = f" It takes {', '.join(known[:12])}." if known else ""
    return host(
        f"{kind} has no argument {match['name']}",
        f"The call passes {match['name']}.{listed}",
        match["name"],
        name=match["name"],
        known=known,
    )


@family(
    r"(?P<f>[\w.]+)\(\) missing (?P<n>\d+) required (?:positional|keyword-only) arguments?: "
    r"'(?P<name>\w+)'",
    is_distinct=False,
)
def missing_argument(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A function or model was called without an argument that it needs."""
    return host(
        f"{_model(evidence, match['f'])} needs {match['name']}, and the call does not give it",
        "",
        match["name"],
        name=match["name"],
    )


@family(
    r"(?P<f>[\w.]+)\(\) takes (?:from )?(?P<want>\d+)(?: to (?P<most>\d+))? positional arguments? "
    r"but "
    r"(?P<got>\d+) (?:was|were) given",
    is_distinct=False,
)
def argument_count(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A method or module was called with too many arguments."""
    most, got = int(match["most"] or match["want"]), int(match["got"])
    is_method = "." in match["f"] or match["f"] == "forward"
    less = 1 if is_method else 0
    return host(
        f"{_model(evidence, match['f'])} takes {_count(most - less)} by position, the call gives "
        f"{got - less}",
        "",
    )


def _count(number: int) -> str:
    return f"{number} argument" if number == 1 else f"{number} arguments"


def _model(evidence: Evidence, function: str) -> str:
    """Name what was called: the model's class for its forward, else the function."""
    owner, _, name = function.rpartition(".")
    if name == "forward" or function == "forward":
        return (owner.rpartition(".")[2] or evidence.module_type or "the module") + ".forward"
    return function


@family(
    r"[Yy]ou (?:have to|must) specify (?:either |exactly one of |at least )*(?P<names>\w[\w, `]*)"
)
def model_input_missing(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A model of a library got none of the inputs that it can start from."""
    names = re.findall(r"\w+_\w+", match["names"])
    passed = evidence.refused_call.given
    if not names or passed is None:
        return host(match[0], "", None)
    kind = evidence.module_type or "the model"
    given = [name for name in names if name in passed]
    if given:
        return host(
            f"{kind} got {' and '.join(given)}, and takes exactly one of {', '.join(names)}",
            "They say the same thing in several ways.",
            given[-1],
        )
    is_decoder = (evidence.module_path or "").rpartition(".")[2] == "decoder"
    return host(
        f"{kind} got none of {', '.join(names)}",
        "A decoder gets them from labels or decoder_input_ids."
        if is_decoder
        else "It needs one of them; arguments under other names are ignored or passed on.",
        "decoder_input_ids" if is_decoder else names[0],
        names=tuple(names),
    )


@family(r"[Yy]ou cannot specify both (?P<a>\w+) and (?P<b>\w+) at the same time")
def model_input_twice(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A model of a library got its input in two forms."""
    return host(
        f"{match['a']} and {match['b']} are both given",
        "They say the same thing in two ways; the model takes one of them.",
        match["b"],
    )


# --- values that are no tensors, and tensors that are no values ----------------------------------


@family(r"expected sequence of length (?P<want>\d+) at dim (?P<dim>\d+) \(got (?P<got>\d+)\)")
def ragged_list(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A nested list with rows of different lengths is no tensor."""
    return host(
        f"the list has rows of {match['want']} and of {match['got']} elements in dimension "
        f"{match['dim']}",
        "A tensor needs rows of one length.",
        "data",
    )


@family(r"can't convert np\.ndarray of type (?P<kind>numpy\.\w+)\.")
def array_dtype(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """An array holds Python objects or texts."""
    return host(
        f"the array has dtype {match['kind']}, which no tensor has",
        "An array of dtype object often holds rows of different lengths.",
        "data",
        kind=match["kind"],
    )


@family(r"expected np\.ndarray \(got (?P<got>\w+)\)")
def array_wanted(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """from_numpy was given something else than an array."""
    is_tensor = match["got"] in ("Tensor", "Parameter")
    return host(
        f"from_numpy takes a NumPy array, and got a {match['got']}",
        "A tensor is one already." if is_tensor else "torch.tensor takes lists and numbers.",
        "ndarray",
        got=match["got"],
    )


@family(
    r"Could not infer dtype of (?P<kind>[\w.]+)|new\(\): data must be a sequence \(got "
    r"(?P<k2>\w+)\)"
)
def no_dtype(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A tensor cannot be made of this kind of value."""
    return host(
        f"no tensor can be made of a value of type {match['kind'] or match['k2']}",
        "Numbers, and lists and arrays of numbers, make a tensor.",
        "data",
    )


@family(
    r"a Tensor with (?P<n>\d+) elements cannot be converted to Scalar"
    r"|only one element tensors can be converted to Python scalars"
)
def many_to_scalar(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A tensor of several elements is no Python number."""
    count = match["n"] or "several"
    return host(
        f"the tensor has {count} elements, and a Python number is one",
        "item() and float() take tensors of one element.",
        "self",
    )


@family(r"Boolean value of Tensor with (?P<n>more than one|no) values? is ambiguous")
def ambiguous_truth(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A tensor of several elements is neither true nor false."""
    return host(
        f"a tensor with {match['n']} value{'s' if match['n'] == 'no' else ''} is asked whether it "
        "is true",
        "if, while, and, or and not ask for one truth value.",
        None,
    )


@family(
    r"Expected parameter (?P<name>\w+) \(\w+ of shape \((?P<shape>[\d, ]*)\)\) of distribution "
    r"(?P<kind>\w+)\(.*\) to satisfy the constraint (?P<rule>.+?), but found invalid values:"
    r"|Expected (?P<value>value) argument \(\w+ of shape \((?P<shape2>[\d, ]*)\)\) to be within "
    r"the support \((?P<support>.+)\) of the distribution (?P<kind2>\w+)\(.*but found invalid "
    r"values:"
)
def distribution_values(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A distribution does not take the values of a parameter or sample, as a whole."""
    name = match["name"] or match["value"]
    shape = ints(match["shape"] if match["name"] else match["shape2"])
    return HostVerdict(
        kind="host_error",
        headline=f"{name} {said(shape)} does not satisfy {match['rule'] or match['support']}, "
        f"which {match['kind'] or match['kind2']} asks for",
        explanation="The condition is on the tensor as a whole, and not on each element.",
        argument=name,
    )
