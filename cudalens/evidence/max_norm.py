"""Report a bad id that ``embedding_renorm_`` has met as one of the ``max_norm`` lookup around it.

That op accepts negative ids, and gets a detached table.  The user needs the lookup's bound,
argument names and table.
"""

from __future__ import annotations

from dataclasses import replace

from cudalens.core.call import OpCall
from cudalens.core.report_types import Violation
from cudalens.guards.max_norm import RENORM, running_lookup
from cudalens.guards.plans import guarded_op


def of_lookup(op: OpCall, violation: Violation) -> tuple[OpCall, Violation]:
    """Return the finding as one of the lookup that follows with the same ids.

    A finding of another op, or in a direct call of ``torch.embedding_renorm_``, is returned
    unchanged.  The assert text stays that of ``embedding_renorm_``, which is launched first.
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
