"""What guards and the rehearsal's kernels make of a call, which neither of them makes."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from cudalens.core._torch import op_of
from cudalens.core.report_types import Violation
from cudalens.guards import GUARDS
from cudalens.guards._base import schema_parameters


def filled(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return every argument of the schema, the defaults filled in."""
    arguments = op_of(name)._schema.arguments
    return {
        a.name: given.get(a.name, a.default_value)
        for a in arguments
        if a.name in given or a.has_default_value() or not a.is_out
    }


def call(name: str, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """Run an op, on copies of what it writes, with output tensors where the schema wants them."""
    op = op_of(name)
    arguments = op._schema.arguments
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    chosen = {
        a.name: given[a.name].clone() if a.name in written else given[a.name]
        for a in arguments
        if a.name in given
    }
    wanted = [a.name for a in arguments if a.is_out]
    if wanted:
        produced = call(functional(name), given)
        chosen.update(zip(wanted, (torch.empty_like(t) for t in produced), strict=True))
    result = op(**chosen)
    return result if isinstance(result, tuple) else () if result is None else (result,)


def functional(name: str) -> str:
    """Name the overload that returns what this `out=` overload writes."""
    packet, _, variant = name.partition(".")
    kept = re.sub(r"(_out|^out|^output|^grad_input)$", "", variant)
    return f"{packet}.{kept}" if kept else packet


def ask(op: Any, *args: Any, **options: Any) -> list[tuple[str, Violation]]:
    """Return the guards that find something in a call, and what; the call is not made."""
    places = {item.name: item for item in schema_parameters(op)}
    asked = (
        (entry.name, entry.check(*(places[name].of(args, options) for name in entry.parameters)))
        for entry in GUARDS.get(op, ())
    )
    return [(name, found) for name, found in asked if found is not None]


def finding(name: str, given: dict[str, Any]) -> Violation | None:
    """Return what the first guard that objects finds in a call."""
    op = op_of(name)
    outputs = {a.name: torch.empty(0) for a in op._schema.arguments if a.is_out}
    return next((found for _, found in ask(op, **filled(name, given), **outputs)), None)


def on_device(value: Any) -> Any:
    """Copy tensors, alone or in lists, to the device; expanded ones stay expanded."""
    if isinstance(value, list):
        return [on_device(item) for item in value]
    if not isinstance(value, Tensor):
        return value
    if value.dim() > 1 and value.stride(-1) == 0:
        return value[..., :1].to("cuda").expand(value.shape)
    return value.to("cuda")


def without_thread(line: str | None) -> str:
    """Return a line without what differs by thread.

    One kernel looks at four probabilities, each in a line of its own; the guard tells of one.
    """
    varying = r" block: \[0,0,0\], thread: \[0,0,0\]|(?<=Templates\.h:)\d+|(?<=\bp)\d"
    return re.sub(varying, "", line or "")
