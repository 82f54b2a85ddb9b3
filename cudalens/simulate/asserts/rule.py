"""What a rule of the assert table is, and the range checks that the rules share.

A rule gets the arguments of one call by schema name and answers what the CUDA kernel would have
done with their values. It never raises: a call that torch refuses on the host (shapes, dtypes,
dimensions) is left to the CPU kernel, whose error is the host error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from cudalens.core._python import raise_if_outside
from cudalens.core.device_asserts import AssertSite, as_printed_by, assert_site

Arguments = Mapping[str, Any]
INDEX_DTYPES = (torch.int64, torch.int32)


@dataclass(frozen=True, kw_only=True)
class Repair:
    """Arguments to replace: CUDA takes them in silence, the CPU kernel refuses or misreads them."""

    repaired: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class AssertHit(Repair):
    """One device assert: the line CUDA prints, and arguments the CPU kernel can run with.

    text: as the installed release of torch prints it.
    record: id of the assertion in the inventory of torch 2.13.0, empty for a rule of the user's.
    """

    text: str
    record: str = ""


Outcome = Repair | None
Rule = Callable[[Arguments], Outcome]
RULES: dict[str, Rule] = {}
"""The rules of all modules, by full overload name."""
_Checked = TypeVar("_Checked", bound=Callable[..., Outcome])


def rule(ops: str, **chosen: Any) -> Callable[[_Checked], _Checked]:
    """Enter the decorated function for these ops, in place and with ``out=`` too.

    Args:
        chosen: arguments of the function besides those of the call.
    """

    def enter(check: _Checked) -> _Checked:
        for op in ops.split():
            RULES.update(dict.fromkeys(_forms(op), partial(check, **chosen)))
        return check

    return enter


# The functional form makes them, and has the rule.
_WITHOUT_A_RULE = {"_ctc_loss.out", "_ctc_loss.Tensor_out", "_ctc_loss_backward.out"}


def _forms(op: str) -> Iterator[str]:
    """Yield the overloads that take what this one takes."""
    name, _, overload = op.partition(".")
    wanted = _inputs(getattr(getattr(torch.ops.aten, name), overload or "default"))
    for packet in (name, f"{name}_"):
        for form in getattr(getattr(torch.ops.aten, packet, None), "overloads", list)():
            found = packet if form == "default" else f"{packet}.{form}"
            is_same = _inputs(getattr(getattr(torch.ops.aten, packet), form)) == wanted
            if is_same and found not in _WITHOUT_A_RULE:
                yield f"aten::{found}"


def _inputs(op: Any) -> list[tuple[str, str]]:
    return [(item.name, str(item.type)) for item in op._schema.arguments if not item.is_out]


def hit(record: str, site: AssertSite | str | None = None, /, **repaired: object) -> Repair:
    """Return the hit of an assertion, the repaired arguments by schema name.

    A release whose kernel has no such assertion goes on in silence.

    Args:
        site: the assertion, or its key in the table of texts where that is not the record's id.
    """
    if not isinstance(site, AssertSite):
        site = assert_site(site or record)
    line = site.text("block: [0,0,0], thread: [0,0,0] ")
    text = as_printed_by(torch.__version__, line)
    if text is None:
        return Repair(repaired=repaired)
    return AssertHit(text=text, record=record, repaired=repaired)


def dim_size(tensor: Tensor, dim: int) -> int | None:
    """Return the size of a dimension, 1 for a 0-dim tensor, None if there is no such dimension."""
    rank = max(tensor.dim(), 1)
    if not -rank <= dim < rank:
        return None
    return tensor.size(dim) if tensor.dim() else 1


def broadcast(*shapes: torch.Size) -> torch.Size | None:
    """Return the common shape, None where the shapes do not fit."""
    try:
        # Not torch.broadcast_shapes: its first call imports the compiler for half a second.
        return reduce(torch._C._infer_size, shapes, torch.Size())
    except RuntimeError as trouble:
        raise_if_outside(trouble)
        return None


def outside(index: Tensor, low: int, high: int) -> bool:
    """Return whether any index lies outside low <= value < high; False for a dtype of no index."""
    if index.numel() == 0 or index.dtype not in INDEX_DTYPES:
        return False
    smallest, largest = torch.aminmax(index)
    return int(smallest) < low or int(largest) >= high


def clamped(index: Tensor, low: int, high: int) -> Tensor:
    """Return the indices moved into low <= value < high."""
    return index.clamp(low, high - 1)


def cut_to_32_bits(index: Tensor, *, is_signed: bool = False) -> Tensor:
    """Return the values that a kernel compares that reads its indices into 32 bits."""
    return index.to(torch.int32) if is_signed else index.to(torch.int64) & 0xFFFFFFFF


def narrowed(name: str, index: Tensor, size: int, *, is_signed: bool = False) -> Repair | None:
    """Return the repair of indices that cutting them to 32 bits brings into range."""
    cut = cut_to_32_bits(index, is_signed=is_signed)
    return None if outside(cut, 0, size) else Repair(repaired={name: cut.to(index.dtype)})


def rows_are_copied_whole(source: Tensor, dim: int) -> bool:
    """Return whether the row copy kernels apply: whole contiguous rows in multiples of 16 bytes."""
    if source.dim() < 2 or dim % source.dim() != 0 or not source.is_contiguous():
        return False
    row_bytes = source.stride(0) * source.element_size()
    return row_bytes > 0 and row_bytes % 16 == 0 and source.data_ptr() % 16 == 0
