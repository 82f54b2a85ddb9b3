"""An input with more tokens than its model has positions, as two shapes that do not fit."""

from __future__ import annotations

from cudalens.core.report import Evidence
from cudalens.diagnosis.host_errors._base import HostVerdict, host


def beyond_positions(evidence: Evidence, *sizes: int) -> HostVerdict | None:
    """Give the verdict when the sizes that collide are the tokens and the rows of the table."""
    name, rows, tokens = (
        evidence.fact(f"positions.{item}") for item in ("input", "rows", "tokens")
    )
    if name is None or rows is None or tokens is None:
        return None
    if {int(rows), int(tokens)} != set(sizes):
        return None
    kind = evidence.module_type or "the model"
    return host(
        f"{name} has {tokens} tokens, {kind} has positions for {rows}",
        "max_position_embeddings sets how many tokens a row may have: each takes its own position.",
        name,
        rows=int(rows),
        tokens=int(tokens),
    )
