"""A bad id of a lookup with ``max_norm``, found by the op inside it that cuts the norms.

That op takes negative ids and a detached table.  The lookup behind it takes neither: its bound, its
argument names and its table are what the user has to know.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from torch.nn import functional

from cudalens.core.call import OpCall
from cudalens.core.report_types import Violation
from cudalens.guards.plans import guarded_op

_RENORM = "aten::embedding_renorm_"
_TABLE = ("weight", "input", "padding_idx", "scale_grad_by_freq", "sparse")
_BAG = (
    *("weight", "input", "offsets", "scale_grad_by_freq", "mode_enum", "sparse"),
    *("per_sample_weights", "include_last_offset", "padding_idx"),
)
"""Variables of the two functions, in the order of their ops' arguments."""
_BAGS = ("_embedding_bag_forward_only", "_embedding_bag")
_CUTS_NORMS = getattr(functional, "_no_grad_embedding_renorm_", None)


def of_lookup(op: OpCall, violation: Violation) -> tuple[OpCall, Violation]:
    """Return the finding as one of the lookup that is about to follow on the same ids.

    A finding of another op, or of ``torch.embedding_renorm_`` itself, is returned as it is.  The
    assert text stays that of the op which would have been launched first.
    """
    lookup = _running_lookup() if violation.op == _RENORM else None
    if lookup is None:
        return op, violation
    guarded = guarded_op(lookup.op)
    for plan in guarded.plans:
        found = plan.check(*plan.find(lookup.args, {}))
        if found is not None and found.argument == "indices":
            found = replace(
                found,
                guard=violation.guard,
                op=str(lookup.op._schema.name),
                overload=str(lookup.op._overloadname),
                device_text=violation.device_text,
            )
            return lookup, found
    return op, violation


def _running_lookup() -> OpCall | None:
    """Return the op that ``F.embedding`` or ``F.embedding_bag`` calls after the norms are cut."""
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
        args[-1] = -1 if args[-1] is None else args[-1]
        is_trained = args[0].requires_grad
        op = getattr(torch.ops.aten, _BAGS[is_trained]).default
    arguments = {item.name: value for item, value in zip(op._schema.arguments, args, strict=True)}
    return OpCall(op=op, arguments=arguments, args=tuple(args))
