"""Causes of node ids and actions without a row or output: graphs and reinforcement learning."""

from __future__ import annotations

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, TensorFact
from cudalens.diagnosis.hints._base import rule
from cudalens.diagnosis.hints._reading import Ids, ids_of, numel, runs_from_one, within
from cudalens.diagnosis.user_code import rewritten


@rule(priority=12)
def edges_with_original_ids(evidence: Evidence) -> Hint | None:
    """Edges name nodes by the ids of the data set, not by their rows."""
    ids = ids_of(evidence, "edge")
    if ids is None or not ids.is_above:
        return None
    both = _both_ends(evidence, ids)
    if _counts_from_one(ids, both):
        # One end alone cannot be shifted: the other one would keep its numbers.
        return Hint(
            text=f"the edges name nodes 1 … {ids.high}: they look 1-based; take 1 away from both "
            "ends",
            fix=rewritten(evidence, both, "{x} - 1"),
        )
    nodes = both or ids.named
    seen = nodes.summary.unique if nodes is not None else None
    if seen is not None and len(seen) > ids.size:
        return Hint(
            text=f"the edges name {len(seen)} different nodes up to {ids.high}, but there are only "
            f"{ids.size}: nodes were left out"
        )
    base = ", count from 1" if ids.may_count_from_one else ""
    # New numbers in the order of the ids are those of the rows only when no row is without edge.
    is_complete = both is not None and seen is not None and len(seen) == ids.size
    return Hint(
        text=f"the edges name node {ids.high}, but there are {ids.size} nodes: they still hold the "
        f"original ids{base}, or nodes were left out; number the nodes 0 … N-1 in the order of the "
        "rows",
        fix=rewritten(evidence, both, "{x}.unique(return_inverse=True)[1]")
        if is_complete
        else None,
    )


def _both_ends(evidence: Evidence, ids: Ids) -> TensorFact | None:
    """Return the tensor on the line that holds both ends of the edges."""
    spoken = (ids.named, *within(evidence, ids.fact))
    return next((item for item in spoken if item is not None and len(item.shape) > 1), None)


def _counts_from_one(ids: Ids, both: TensorFact | None) -> bool:
    if not ids.may_count_from_one:
        return False
    if both is None:
        return ids.counts_from_one
    return runs_from_one(both.summary.unique, ids.size, numel(both))


@rule(priority=12)
def actions_beyond_outputs(evidence: Evidence) -> Hint | None:
    """Stored actions have numbers for which the network has no output."""
    ids = ids_of(evidence, "action")
    if ids is None or not ids.is_above or evidence.op.name not in ("aten::gather", "aten::index"):
        return None
    if ids.counts_from_one:
        return Hint(
            text=f"the actions run from {ids.low} to {ids.high}: they look 1-based",
            fix=rewritten(evidence, ids.named, "{x} - 1"),
        )
    base = "; if the actions count from 1, take 1 away" if ids.may_count_from_one else ""
    return Hint(
        text=f"action {ids.high} was stored, the network has {ids.size} outputs (0 … "
        f"{ids.size - 1}): it was built for fewer actions than the environment has{base}",
        fix="nn.Linear(in_features, env.action_space.n)  # the last layer",
    )
