"""Tensors on different devices, and what only works on one of them."""

from __future__ import annotations

import re

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, TensorFact
from cudalens.diagnosis.host_errors._base import Answer, host, pattern, row
from cudalens.diagnosis.host_errors._words import argument_name, expression_of, name_of, named
from cudalens.diagnosis.user_code import (
    called_name,
    list_items,
    passed,
    receiver,
    renamed,
    rewritten,
)

_PARAMETERS = frozenset(
    {"weight", "bias", "running_mean", "running_var", "in_proj_weight", "out_proj_weight"}
)
_ONE_DEVICE = "An op needs all its tensors on one device."


@pattern(
    r"Expected all tensors to be on the same device, but got (?P<name>\w+) is on (?P<here>[\w:]+), "
    r"different from other tensors on (?P<there>[\w:]+) \(when checking argument in method "
    r"(?P<method>\w+)\)"
    r"|Expected all tensors to be on the same device, but found at least two devices, "
    r"(?P<a>[\w:]+) and (?P<b>[\w:]+?)!"
)
def two_devices(evidence: Evidence, match: re.Match[str]) -> Answer:
    """The tensors of one call lie on different devices."""
    devices = [match["here"], match["there"]] if match["name"] else [match["a"], match["b"]]
    is_list = match["name"] == "tensors"
    stray = _stray_item(evidence, match) or _stray(evidence, devices, is_list=is_list)
    if stray is not None:
        there = next((item for item in devices if item != stray.device), devices[-1])
        yield from _of_stray(evidence, stray, there)
        return
    name, headline = None, f"tensors on {devices[0]} and on {devices[1]} meet in one op"
    if match["name"]:
        name = argument_name(evidence, match["name"])
        who = "one of tensors" if is_list else name_of(evidence.tensor(name), name)
        headline = f"{who} is on {match['here']}, the other tensors are on {match['there']}"
    yield host(headline, f"{_devices(evidence)}{_ONE_DEVICE}", name)
    yield from move(evidence, name, *devices)


def _of_stray(evidence: Evidence, stray: TensorFact, there: str) -> Answer:
    is_model = stray.argument in _PARAMETERS and stray.expression is None
    other = _elsewhere(evidence, stray)
    if is_model:
        headline = f"{stray.argument} of the module is on {stray.device}, its input is on {there}"
    else:
        rest = [item for item in evidence.tensors if item.device != stray.device]
        name = name_of(other, "") if len(rest) == 1 else ""
        headline = f"{name_of(stray, 'a tensor')} is on {stray.device}, "
        headline += f"{name} is on {there}" if name else f"the other tensors are on {there}"
    yield host(headline, f"{_devices(evidence)}{_ONE_DEVICE}", stray.argument)
    item = _item_of(evidence, stray)
    known = TensorFact(argument=stray.argument, expression=item) if item else None
    if known is None:
        yield from _left_behind(evidence, stray.argument, (stray.device, there))
    if is_model:
        yield _move_model(evidence, stray.device, there)
    else:
        yield from _move_tensor(evidence, stray.argument, stray.device, there, other, known)


def _stray(evidence: Evidence, devices: list[str], *, is_list: bool) -> TensorFact | None:
    """Return the one tensor that has to move: the input on the CPU, or the first parameter there.

    A tensor without dimensions may stay on the CPU.

    Args:
        is_list: whether a list of tensors was given, where its items have names.
    """
    if "cpu" not in devices:
        return None
    found = [item for item in evidence.tensors if item.device == "cpu"]
    # What else is on the line may be what an item is made of.
    found = [item for item in found if item.argument or not is_list]
    elsewhere = [item for item in evidence.tensors if item.device != "cpu"]
    parameters = [item for item in found if item.argument in _PARAMETERS and not item.expression]
    if found and len(found) == len(parameters):
        return parameters[0]
    found = [item for item in found if item.shape and item not in parameters]
    return found[0] if len(found) == 1 and (elsewhere or len(evidence.tensors) == 1) else None


def _stray_item(evidence: Evidence, match: re.Match[str]) -> TensorFact | None:
    """Return the one item of the line's list that no variable holds, when all others fit."""
    if match["name"] != "tensors":
        return None
    items = [evidence.tensor(f"tensors[{at}]") for at in range(len(list_items(evidence)))]
    missing = [at for at, item in enumerate(items) if item is None]
    here = {item.device for item in items if item is not None}
    # torch found two devices: the only item that is not known lies on the other one.
    there = {match["here"], match["there"]} - here
    if len(missing) != 1 or len(here) != 1 or len(there) != 1:
        return None
    return TensorFact(argument=f"tensors[{missing[0]}]", device=there.pop())


def _item_of(evidence: Evidence, stray: TensorFact) -> str | None:
    """Return the expression in the line's list that is an item without a name."""
    if stray.expression or not (place := re.fullmatch(r"tensors\[(\d+)\]", stray.argument or "")):
        return None
    items = list_items(evidence)
    return items[int(place[1])] if int(place[1]) < len(items) else None


def _elsewhere(evidence: Evidence, stray: TensorFact) -> TensorFact | None:
    found = [item for item in evidence.tensors if item.device != stray.device and item.expression]
    names = [item for item in found if "(" not in (item.expression or "")]
    return next(iter(names or found), None)


def _devices(evidence: Evidence) -> str:
    """Say where each tensor is."""
    parts = []
    for item in evidence.tensors:
        name = item.argument
        if item.expression and item.expression != name:
            name = f"{name} ({item.expression})" if name else item.expression
        if name:
            parts.append(f"{name} on {item.device}")
    return f"{', '.join(parts)}. " if parts else ""


# --- what has to move ----------------------------------------------------------------------------


def move(evidence: Evidence, argument: str | None, here: str, there: str) -> Answer:
    """Yield how the argument gets to the device of the others."""
    yield from _move_tensor(evidence, argument, here, there)
    yield from _left_behind(evidence, argument, (here, there))


def _move_tensor(
    evidence: Evidence,
    argument: str | None,
    here: str,
    there: str,
    other: TensorFact | None = None,
    item: TensorFact | None = None,
) -> Answer:
    fact = item or evidence.tensor(argument or "")
    if fact is None or not fact.expression:
        return
    text = expression_of(other)
    # Only a name is read a second time: a call, such as the model's, would run again.
    target = f"{text}.device" if text and "(" not in text else f'"{there}"'
    moved = f"{{x}}.to({target})"
    if fact.expression.endswith(".cpu()"):
        moved = fact.expression.removesuffix(".cpu()")
    yield Hint(
        rule="move_tensor",
        text=f"{fact.expression} is still on {here}: move it to {there}",
        fix=rewritten(evidence, fact, moved),
    )


def _left_behind(evidence: Evidence, argument: str | None, devices: tuple[str, str]) -> Answer:
    """A model was given one tensor on the CPU, and met a part of it further in."""
    inner = evidence.tensor(argument or "")
    if "cpu" not in devices or inner is None or inner.expression or inner.device != "cpu":
        return
    line = [item for item in evidence.tensors if item.argument is None and item.shape]
    left = [item for item in line if item.device == "cpu"]
    there = {item.device for item in line} - {"cpu"}
    if len(left) == len(there) == 1:
        device = there.pop()
        yield Hint(
            rule="left_behind",
            text=f"of the tensors on this line, only {left[0].expression} is on cpu: move it to "
            f"{device}",
            fix=rewritten(evidence, left[0], f'{{x}}.to("{device}")'),
        )


def _move_model(evidence: Evidence, here: str, there: str) -> Hint:
    """The model was left on another device than its input."""
    there = there if here == "cpu" else here
    model = called_name(evidence)
    return Hint(
        rule="move_model",
        text=f"the parameters are not on {there}: move the model",
        fix=f'{model}.to("{there}")' if model else None,
    )


def convolution_device(evidence: Evidence, which: str, here: str, there: str) -> Answer:
    """A convolution's input and its parameters lie on different devices."""
    fact, is_model = named(evidence, "input"), "cpu" in there
    argument = "input" if there != "cpu" else which
    yield host(
        f"input is on {fact.device if fact else here}, the {which} is on {there}",
        _ONE_DEVICE,
        argument,
    )
    if is_model:
        yield from _left_behind(evidence, argument, (here, there))
        yield _move_model(evidence, here, there)
    else:
        yield from move(evidence, argument, here, there)


@pattern(
    r"indices should be either on (?P<a>[\w:]+) or on the same device as the indexed tensor "
    r"\((?P<there>[\w:]+)\)"
)
def index_device(evidence: Evidence, match: re.Match[str]) -> Answer:
    """An index on the GPU selects from a tensor on the CPU."""
    there = match["there"]
    found = [item for item in evidence.tensors if item.device not in ("cpu", there)]
    where = found[0].device if len(found) == 1 else "another device"
    yield host(
        f"the index is on {where}, the indexed tensor on {there}",
        "The other way round, an index on the CPU into a tensor on the GPU, works.",
        "indices",
    )
    yield from move(evidence, "indices", where, there)


@pattern(
    r"expected self and mask to be on the same device, but got mask on (?P<mask>[\w:]+) and self "
    r"on (?P<self>[\w:]+)"
)
def mask_device(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A mask lies on another device than what it masks."""
    here, there = match["mask"], match["self"]
    yield host(f"mask is on {here}, self on {there}", _ONE_DEVICE, "mask")
    yield from _move_tensor(evidence, "mask", here, there, named(evidence, "self"))
    yield from _left_behind(evidence, "mask", (here, there))


@pattern(
    r"Input and (?P<what>hidden|parameter) tensors are not at the same device, found input tensor "
    r"at (?P<input>[\w:]+) and (?:hidden|parameter) tensor at (?P<other>[\w:]+)"
)
def rnn_device(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A recurrent layer's input lies on another device than its state or parameters."""
    what, here, there = match["what"], match["input"], match["other"]
    is_input = here == "cpu"
    argument = "input" if is_input else ("hx" if what == "hidden" else "weight")
    yield host(
        f"input is on {here}, the {'state' if what == 'hidden' else 'parameters'} on {there}",
        "A layer needs its input, its state and its parameters on one device.",
        argument,
    )
    devices = (here, there) if is_input else (there, here)
    if argument == "weight":
        yield from _left_behind(evidence, argument, devices)
        yield _move_model(evidence, *devices)
    else:
        yield from move(evidence, argument, *devices)


@pattern(
    r"module must have its parameters and buffers on device (?P<want>[\w:]+) \(device_ids\[0\]\) "
    r"but found one of them on device: (?P<got>[\w:]+)"
)
def parallel_device(evidence: Evidence, match: re.Match[str]) -> Answer:
    """DataParallel wants its module on its first device."""
    yield host(
        f"a parameter of the module is on {match['got']}, DataParallel wants {match['want']}",
        "It copies the module from its first device to the others.",
        "module",
    )
    yield _move_model(evidence, match["got"], match["want"])


# --- what only works on the host -----------------------------------------------------------------


@pattern(r"can't convert (?P<device>[\w:]+) device type tensor to numpy")
def numpy_of_cuda(evidence: Evidence, match: re.Match[str]) -> Answer:
    """NumPy cannot read the memory of a GPU."""
    fact = named(evidence, "self")
    text = expression_of(fact) or receiver(evidence)
    yield host(
        f"{text or 'the tensor'} is on {match['device']}; NumPy reads host memory only",
        "PyTorch copies nothing from the device unless it is asked to.",
        "self",
    )
    # Of a tensor that no variable holds it is not known; detach() does no harm.
    is_detached = text is not None and text.endswith(".detach()")
    has_graph = fact.requires_grad if fact else not is_detached
    yield _copy_to_host(evidence, ".detach().cpu()" if has_graph else ".cpu()", text)


@pattern(r"Can't call numpy\(\) on Tensor that requires grad")
def numpy_of_gradient(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A tensor in an autograd graph has no NumPy form."""
    text = expression_of(named(evidence, "self")) or receiver(evidence)
    yield host(
        f"{text or 'the tensor'} requires grad; autograd cannot follow into NumPy",
        "detach() gives the same values without the graph.",
        "self",
    )
    yield _copy_to_host(evidence, ".detach()", text)


def _copy_to_host(evidence: Evidence, way: str, text: str | None) -> Hint:
    fix = rewritten(evidence, evidence.tensor("self"), "{x}" + way)
    if fix is None and text:
        fix = renamed(evidence, "numpy", f"{way[1:]}.numpy")
    return Hint(rule="copy_to_host", text=f"{way[1:]} gives NumPy what it can read", fix=fix)


@pattern(r"cannot pin '(?P<kind>torch\.\w+\.\w+)' only dense CPU tensors can be pinned")
def pinned_cuda(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Only host memory can be pinned, and the samples are on the GPU already."""
    yield host(
        f"a {match['kind']} is pinned; only tensors on the CPU can be",
        "Pinned memory is host memory from which the GPU copies faster.",
        "self",
    )
    if any("pin_memory.py" in item.file for item in evidence.frames):
        yield Hint(
            rule="pin_on_host",
            text="the dataset returns tensors on the GPU: return CPU tensors, or do not pin them",
            fix="DataLoader(..., pin_memory=False)",
        )


row(
    "generator_device",
    r"Expected a '(?P<want>\w+)' device type for generator but found '(?P<got>\w+)'",
    "generator is on {got}, the tensor to fill is on {want}",
    "Each device has random generators of its own.",
    "generator",
    hint=Hint(
        rule="generator_of_device",
        text="the generator has to be one of {want}",
        fix='torch.Generator(device="{want}")',
    ),
)


@pattern(
    r"'lengths' argument should be a 1D CPU int64 tensor, but got (?P<rank>\d+)D "
    r"(?P<device>[\w:]+) \w+ tensor"
)
def packed_lengths(evidence: Evidence, match: re.Match[str]) -> Answer:
    """The lengths of packed sequences are counted on the host."""
    rank, device = int(match["rank"]), match["device"]
    wrong = [f"is on {device} instead of cpu"] if device != "cpu" else []
    wrong += [f"has {rank} dimensions instead of 1"] if rank != 1 else []
    yield host(
        f"lengths {' and '.join(wrong)}",
        "pack_padded_sequence cuts the batch on the host, and reads the lengths for it.",
        "lengths",
    )
    if device != "cpu":
        text = passed(evidence, "pack_padded_sequence", 1, "lengths")
        yield Hint(
            rule="lengths_on_host",
            text="only the lengths go to the host; the sequences stay where they are",
            fix=rewritten(evidence, TensorFact(argument="lengths", expression=text), "{x}.cpu()"),
        )
