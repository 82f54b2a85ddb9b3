"""Tensors on different devices, and what only works on one of them."""

from __future__ import annotations

import re

from cudalens.core.report import Evidence
from cudalens.core.report_types import TensorFact
from cudalens.diagnosis.host_errors._base import HostVerdict, family, host
from cudalens.diagnosis.host_errors._words import (
    expression,
    list_items,
    named,
    passed,
    receiver,
    spoken,
    subject,
)

_PARAMETERS = frozenset(
    {"weight", "bias", "running_mean", "running_var", "in_proj_weight", "out_proj_weight"}
)


@family(
    r"Expected all tensors to be on the same device, but got (?P<name>\w+) is on (?P<here>[\w:]+), "
    r"different from other tensors on (?P<there>[\w:]+) \(when checking argument in method "
    r"(?P<method>\w+)\)"
    r"|Expected all tensors to be on the same device, but found at least two devices, "
    r"(?P<a>[\w:]+) and (?P<b>[\w:]+?)!"
)
def two_devices(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """The tensors of one call lie on different devices."""
    devices = [match["here"], match["there"]] if match["name"] else [match["a"], match["b"]]
    is_list = match["name"] == "tensors"
    stray = _stray_item(evidence, match) or _stray(evidence, devices, is_list=is_list)
    if stray is not None:
        return _of_stray(evidence, stray, _other_than(stray.device, devices))
    if match["name"]:
        name = spoken(evidence, match["name"])
        who = "one of tensors" if is_list else subject(evidence.tensor(name), name)
        return host(
            f"{who} is on {match['here']}, the other tensors are on {match['there']}",
            f"{_placed(evidence)}An op needs all its tensors on one device.",
            name,
            devices=tuple(devices),
        )
    return host(
        f"tensors on {devices[0]} and on {devices[1]} meet in one op",
        f"{_placed(evidence)}An op needs all its tensors on one device.",
        None,
        devices=tuple(devices),
    )


def _of_stray(evidence: Evidence, stray: TensorFact, there: str) -> HostVerdict:
    is_model = stray.argument in _PARAMETERS and stray.expression is None
    if is_model:
        headline = f"{stray.argument} of the module is on {stray.device}, its input is on {there}"
    else:
        others = _elsewhere(evidence, stray)
        rest = [item for item in evidence.tensors if item.device != stray.device]
        name = subject(others, "") if len(rest) == 1 else ""
        headline = f"{subject(stray, 'a tensor')} is on {stray.device}, "
        headline += f"{name} is on {there}" if name else f"the other tensors are on {there}"
    return host(
        headline,
        f"{_placed(evidence)}An op needs all its tensors on one device.",
        stray.argument,
        expression=expression(stray),
        item=_spelled(evidence, stray),
        devices=(stray.device, there),
        is_model=is_model,
        other=expression(_elsewhere(evidence, stray)),
        call=evidence.call_text,
    )


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


def _spelled(evidence: Evidence, stray: TensorFact) -> str | None:
    """Return the expression in the line's list that is an item without a name."""
    if stray.expression or not (place := re.fullmatch(r"tensors\[(\d+)\]", stray.argument or "")):
        return None
    items = list_items(evidence)
    return items[int(place[1])] if int(place[1]) < len(items) else None


def _elsewhere(evidence: Evidence, stray: TensorFact) -> TensorFact | None:
    found = [item for item in evidence.tensors if item.device != stray.device and item.expression]
    names = [item for item in found if "(" not in (item.expression or "")]
    return next(iter(names or found), None)


def _other_than(device: str, devices: list[str]) -> str:
    return next((item for item in devices if item != device), devices[-1])


def _placed(evidence: Evidence) -> str:
    """Say where each tensor is."""
    parts = []
    for item in evidence.tensors:
        name = item.argument
        if item.expression and item.expression != name:
            name = f"{name} ({item.expression})" if name else item.expression
        if name:
            parts.append(f"{name} on {item.device}")
    return f"{', '.join(parts)}. " if parts else ""


@family(
    r"indices should be either on (?P<a>[\w:]+) or on the same device as the indexed tensor "
    r"\((?P<there>[\w:]+)\)"
)
def index_device(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """An index on the GPU selects from a tensor on the CPU."""
    found = [item for item in evidence.tensors if item.device not in ("cpu", match["there"])]
    fact = found[0] if len(found) == 1 else None
    where = fact.device if fact else "another device"
    return host(
        f"the index is on {where}, the indexed tensor on {match['there']}",
        "The other way round, an index on the CPU into a tensor on the GPU, works.",
        "indices",
        expression=expression(fact),
        devices=(where, match["there"]),
    )


@family(
    r"expected self and mask to be on the same device, but got mask on (?P<mask>[\w:]+) and self "
    r"on "
    r"(?P<self>[\w:]+)"
)
def mask_device(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A mask lies on another device than what it masks."""
    fact = named(evidence, "mask")
    return host(
        f"mask is on {match['mask']}, self on {match['self']}",
        "An op needs all its tensors on one device.",
        "mask",
        expression=expression(fact),
        devices=(match["mask"], match["self"]),
        other=expression(named(evidence, "self")),
    )


@family(
    r"Input and (?P<what>hidden|parameter) tensors are not at the same device, found input tensor "
    r"at "
    r"(?P<input>[\w:]+) and (?:hidden|parameter) tensor at (?P<other>[\w:]+)"
)
def rnn_device(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A recurrent layer's input lies on another device than its state or parameters."""
    what, here, there = match["what"], match["input"], match["other"]
    is_input = here == "cpu"
    argument = "input" if is_input else ("hx" if what == "hidden" else "weight")
    fact = named(evidence, argument)
    return host(
        f"input is on {here}, the {'state' if what == 'hidden' else 'parameters'} on {there}",
        "A layer needs its input, its state and its parameters on one device.",
        argument,
        expression=expression(fact),
        devices=(here, there) if is_input else (there, here),
        is_model=argument == "weight",
        call=evidence.call_text,
    )


@family(
    r"module must have its parameters and buffers on device (?P<want>[\w:]+) \(device_ids\[0\]\) "
    r"but "
    r"found one of them on device: (?P<got>[\w:]+)"
)
def parallel_device(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """DataParallel wants its module on its first device."""
    return host(
        f"a parameter of the module is on {match['got']}, DataParallel wants {match['want']}",
        "It copies the module from its first device to the others.",
        "module",
        devices=(match["got"], match["want"]),
        is_model=True,
        call=evidence.call_text,
    )


@family(r"can't convert (?P<device>[\w:]+) device type tensor to numpy")
def numpy_of_cuda(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """NumPy cannot read the memory of a GPU."""
    fact = named(evidence, "self")
    text = expression(fact) or receiver(evidence)
    is_detached = text is not None and text.endswith(".detach()")
    return host(
        f"{text or 'the tensor'} is on {match['device']}; NumPy reads host memory only",
        "Nothing is copied from the device unless it is said.",
        "self",
        expression=expression(fact),
        receiver=text,
        # Of a tensor that no variable holds it is not known; detach() does no harm.
        requires_grad=fact.requires_grad if fact else not is_detached,
    )


@family(r"Can't call numpy\(\) on Tensor that requires grad")
def numpy_of_gradient(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A tensor in an autograd graph has no NumPy form."""
    fact = named(evidence, "self")
    text = expression(fact) or receiver(evidence)
    return host(
        f"{text or 'the tensor'} requires grad; autograd cannot follow into NumPy",
        "detach() gives the same values without the graph.",
        "self",
        expression=expression(fact),
        receiver=text,
        requires_grad=True,
    )


@family(r"cannot pin '(?P<kind>torch\.\w+\.\w+)' only dense CPU tensors can be pinned")
def pinned_cuda(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """Only host memory can be pinned, and the samples are on the GPU already."""
    fact = named(evidence, "self")
    in_loader = any("pin_memory.py" in item.file for item in evidence.frames)
    return host(
        f"a {match['kind']} is pinned; only tensors on the CPU can be",
        "Pinned memory is host memory from which the GPU copies faster.",
        "self",
        expression=expression(fact),
        in_loader=in_loader,
    )


@family(r"Expected a '(?P<want>\w+)' device type for generator but found '(?P<got>\w+)'")
def generator_device(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A random generator lives on another device than the tensor it fills."""
    return host(
        f"generator is on {match['got']}, the tensor to fill is on {match['want']}",
        "Each device has random generators of its own.",
        "generator",
        want=match["want"],
        got=match["got"],
    )


@family(
    r"'lengths' argument should be a 1D CPU int64 tensor, but got (?P<rank>\d+)D "
    r"(?P<device>[\w:]+) \w+ tensor"
)
def packed_lengths(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """The lengths of packed sequences are counted on the host."""
    rank, device = int(match["rank"]), match["device"]
    wrong = [f"on {device} and not on cpu"] if device != "cpu" else []
    wrong += [f"of {rank} dimensions and not of 1"] if rank != 1 else []
    return host(
        f"lengths is {', '.join(wrong)}",
        "pack_padded_sequence cuts the batch on the host, and reads the lengths for it.",
        "lengths",
        device=device,
        expression=passed(evidence, "pack_padded_sequence", 1, "lengths"),
    )
