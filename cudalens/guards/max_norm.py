"""Lookups with ``max_norm``: ``embedding_renorm_`` runs before the lookup, with the same ids.

It accepts negative ids, and gets a detached table.  The lookup does neither, so its requirements
are checked instead.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from cudalens.core.call import OpCall
from cudalens.guards._base import schema_parameters
from cudalens.guards.plans import Requirement, guarded_op, required_of

RENORM = "aten::embedding_renorm_"
_TABLE = ("weight", "input", "padding_idx", "scale_grad_by_freq", "sparse")
_BAG = (
    *("weight", "input", "offsets", "scale_grad_by_freq", "mode_enum", "sparse"),
    *("per_sample_weights", "include_last_offset", "padding_idx"),
)
"""Local variables of the two functions, in the order of their ops' arguments."""
_BAGS = ("_embedding_bag_forward_only", "_embedding_bag")
_CUTS_NORMS = getattr(functional, "_no_grad_embedding_renorm_", None)


def running_lookup() -> OpCall | None:
    """Return the op that ``F.embedding`` or ``F.embedding_bag`` calls after the renormalization.

    Read from the locals of torch's function, which has not called that op yet.
    """
    caller, code = sys._getframe(1), getattr(_CUTS_NORMS, "__code__", None)
    while caller.f_back is not None and caller.f_code is not code:
        caller = caller.f_back
    is_cut = caller.f_code is code
    local = caller.f_back.f_locals if is_cut and caller.f_back is not None else {}
    is_bag = "mode_enum" in local
    names = _BAG if is_bag else _TABLE
    if not {*names} <= {*local}:  # the locals of a frame are no dict from Python 3.13 on
        return None
    args = [local[name] for name in names]
    op = torch.ops.aten.embedding.default
    if is_bag:
        # The op takes -1 where the function takes None.
        args[-1] = -1 if args[-1] is None else args[-1]
        # As torch chooses in C++: without a gradient the op need not keep what backward reads.
        is_trained = args[0].requires_grad
        op = getattr(torch.ops.aten, _BAGS[is_trained]).default
    arguments = {slot.name: value for slot, value in zip(schema_parameters(op), args, strict=True)}
    return OpCall(op=op, arguments=arguments, args=tuple(args))


def required_by_lookup(own: Requirement) -> tuple[Any, Requirement] | None:
    """Return the op of the running lookup, and what it requires of its ids.

    Args:
        own: what ``embedding_renorm_`` requires of the same ids.
    """
    lookup = running_lookup()
    if lookup is None:
        return None
    for its in required_of(guarded_op(lookup.op).plans, lookup.args, {}).deferred:
        if its.need.argument == "indices":
            return lookup.op, replace(its, slot=own.slot, item=own.item)
    return None
