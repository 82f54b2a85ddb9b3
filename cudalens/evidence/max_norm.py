"""A bad id of a lookup with ``max_norm``, found by the op inside it that cuts the norms.

That op takes negative ids and a detached table.  The lookup behind it takes neither: its bound, its
argument names and its table are what the user has to know.
"""

from __future__ import annotations

from dataclasses import replace

from cudalens.core.call import OpCall
from cudalens.core.report_types import Violation
from cudalens.guards.max_norm import RENORM, running_lookup
from cudalens.guards.plans import guarded_op


def of_lookup(op: OpCall, violation: Violation) -> tuple[OpCall, Violation]:
    """Return the finding as one of the lookup that is about to follow on the same ids.

    A finding of another op, or of ``torch.embedding_renorm_`` itself, is returned as it is.  The
    assert text stays that of the op which would have been launched first.
    """
    lookup = running_lookup() if violation.op == RENORM else None
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
