"""Tensors on different devices, and what only works on one of them."""

from __future__ import annotations

import re

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, TensorFact
from cudalens.diagnosis.host_errors._base import Answer, groups, host, pattern, row
from cudalens.diagnosis.host_errors._words import (
    argument_name,
    device_type,
    dtype,
    expression_of,
    name_of,
    named,
)
from cudalens.diagnosis.user_code import list_items, receiver, renamed, rewritten

_PARAMETERS = frozenset(
    {"weight", "bias", "running_mean", "running_var", "in_proj_weight", "out_proj_weight"}
)
_ONE_DEVICE = "An op needs all its tensors on one device."


@pattern(
    r"Expected all tensors to be on the same device, but got (?P<name>\w+) is on (?P<a>[\w:]+), "
    r"different from other tensors on (?P<b>[\w:]+) \(when checking argument in method "
    r"|Expected all tensors to be on the same device, but found at least two devices, "
    r"(?P<a2>[\w:]+) and (?P<b2>[\w:]+?)!"
    r"|indices should be either on [\w:]+ or on the same device as the indexed tensor "
    r"\((?P<b3>[\w:]+)\)"
    r"|expected self and mask to be on the same device, but got (?P<name4>mask) on (?P<a4>[\w:]+) "
    r"and self on (?P<b4>[\w:]+)"
    r"|Input type \((?P<a6>[^)]+)\) and (?:weight|bias) type \((?P<b6>[^)]+)\) should be the same"
)
def two_devices(evidence: Evidence, match: re.Match[str]) -> Answer:
    """The tensors of one call lie on different devices."""
    found = groups(match)
    if match["a6"]:
        here, there = device_type(match["a6"]), device_type(match["b6"])
        if here == there or dtype(match["a6"]) != dtype(match["b6"]):
            return  # it is the dtype that differs
        found |= {"a": here or "", "b": there or "", "name": "input"}
    known = {item.device for item in evidence.tensors} - {found["b"]}
    devices = [found.get("a") or next(iter(known), "another device"), found["b"]]
    strays = _strays(evidence, devices, is_list=match["name"] == "tensors")
    rest = [item for item in evidence.tensors if item not in strays]
    if strays:
        there = next((item for item in devices if item != strays[0].device), devices[-1])
        is_model = strays[0].argument in _PARAMETERS and strays[0].expression is None
        subject = " and ".join(name_of(item, "a tensor") for item in strays)
        subject += f" {'is' if len(strays) == 1 else 'are'} on {strays[0].device}"
        other = name_of(rest[0], "") if len(rest) == 1 and rest[0].expression else ""
        if is_model:
            headline = f"{strays[0].argument} of the module is on {strays[0].device}, its input is "
            headline += f"on {there}"
        else:
            rest_is = f"{other} is" if other else "the other tensors are"
            headline = f"{subject}, {rest_is} on {there}"
        yield host(headline, f"{_devices(evidence)}{_ONE_DEVICE}", strays[0].argument)
        return
    name, headline = None, f"tensors on {devices[0]} and on {devices[1]} are used in one op"
    if "name" in found:
        name = argument_name(evidence, found["name"])
        who = "one of tensors" if name == "tensors" else name_of(evidence.tensor(name), name)
        headline = f"{who} is on {devices[0]}, the other tensors are on {devices[1]}"
    yield host(headline, f"{_devices(evidence)}{_ONE_DEVICE}", name)


def _strays(evidence: Evidence, devices: list[str], *, is_list: bool) -> list[TensorFact]:
    """Return the tensors that have to move: inputs on the CPU, or the first parameter there.

    A tensor without dimensions may stay on the CPU.

    Args:
        is_list: whether a list of tensors was given, where its items have names.
    """
    if is_list and (item := _stray_item(evidence, set(devices))):
        return [item]
    if "cpu" not in devices:
        return []
    # What else is on the line may be what an item is made of.
    meant = [item for item in evidence.tensors if item.argument or not is_list]
    here = [item for item in meant if item.device == "cpu"]
    elsewhere = [item for item in evidence.tensors if item.device != "cpu"]
    parameters = [item for item in here if item.argument in _PARAMETERS and not item.expression]
    if here and len(here) == len(parameters):
        return parameters[:1]
    found = [item for item in here if item.shape and item not in parameters]
    is_sure = len(found) == 1 or all(item.argument and item.expression for item in found)
    return found if is_sure and (elsewhere or len(evidence.tensors) == 1) else []


def _stray_item(evidence: Evidence, devices: set[str]) -> TensorFact | None:
    """Return the one item of the line's list that no variable holds, when all others fit."""
    items = [evidence.tensor(f"tensors[{at}]") for at in range(len(list_items(evidence)))]
    missing = [at for at, item in enumerate(items) if item is None]
    # torch found two devices: the only item that is not known lies on the other one.
    there = devices - {item.device for item in items if item is not None}
    if len(missing) != 1 or len(there) != 1 or len(items) == 1:
        return None
    return TensorFact(argument=f"tensors[{missing[0]}]", device=there.pop())


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


@pattern(
    r"Input and (?P<what>hidden|parameter) tensors are not at the same device, found input tensor "
    r"at (?P<input>[\w:]+) and (?:hidden|parameter) tensor at (?P<other>[\w:]+)"
)
def rnn_device(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A recurrent layer's input lies on another device than its state or parameters."""
    is_state, here, there = match["what"] == "hidden", match["input"], match["other"]
    states = (item for item in evidence.tensors if (item.argument or "").split("[")[0] == "hx")
    stray = [item for item in states if is_state and item.device == there]
    others = {item.device for item in evidence.tensors if item.argument not in (None, "input")}
    argument = "hx" if is_state else "weight"
    if stray:
        # Where nothing of the call but the input is on its device, the input has to move.
        argument = "input" if others == {there} else (stray[0].argument or argument)
    elif here == "cpu":
        argument = "input"
    names = [item.expression for item in stray if item.expression]
    other = "state" if is_state else "parameters"
    if names and len(names) == len(stray):
        other = f"state{'s' * (len(names) > 1)} {' and '.join(names)}"
    yield host(
        f"input is on {here}, the {other} on {there}",
        "A layer needs its input, its state and its parameters on one device.",
        argument,
    )


row(
    "parallel_device",
    r"module must have its parameters and buffers on device (?P<want>[\w:]+) \(device_ids\[0\]\) "
    r"but found one of them on device: (?P<got>[\w:]+)",
    "a parameter of the module is on {got}, DataParallel wants {want}",
    "It copies the module from its first device to the others.",
    "module",
)

# --- what only works on the host -----------------------------------------------------------------


@pattern(
    r"can't convert (?P<device>[\w:]+) device type tensor to numpy"
    r"|Can't call numpy\(\) on Tensor that requires grad"
)
def to_numpy(evidence: Evidence, match: re.Match[str]) -> Answer:
    """NumPy can read neither the memory of a GPU nor a tensor in an autograd graph."""
    fact = named(evidence, "self")
    text = expression_of(fact) or receiver(evidence)
    if match["device"]:
        yield host(
            f"{text or 'the tensor'} is on {match['device']}; NumPy reads host memory only",
            "PyTorch does not copy from the device by itself.",
            "self",
        )
        # Of a tensor that no variable holds it is not known; detach() does no harm.
        is_detached = text is not None and text.endswith(".detach()")
        has_graph = fact.requires_grad if fact else not is_detached
        way = "detach().cpu()" if has_graph else "cpu()"
    else:
        yield host(
            f"{text or 'the tensor'} requires grad; autograd cannot follow into NumPy",
            "detach() gives the same values without the graph.",
            "self",
        )
        way = "detach()"
    fix = rewritten(evidence, fact, f"{{x}}.{way}")
    if fix is None and text:
        fix = renamed(evidence, "numpy", f"{way}.numpy")
    yield Hint(rule="copy_to_host", text=f"{way} gives NumPy an array that it can read", fix=fix)


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
        )


row(
    "generator_device",
    r"Expected a '(?P<want>\w+)' device type for generator but found '(?P<got>\w+)'",
    "generator is on {got}, the tensor to fill is on {want}",
    "Each device has its own random generators.",
    "generator",
    hint=Hint(rule="generator_of_device", text="make the generator with device='{want}'"),
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
