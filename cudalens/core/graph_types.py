"""Types for the origin of tensors: autograd nodes, and the steps of the bad values.

Like the other pieces of a report they are frozen dataclasses of strings, numbers and tuples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cudalens.core.report_types import LineRef, Number

Role = Literal["failed", "bad_input", "upstream", "downstream", "leaf", "parameter"]


@dataclass(frozen=True, kw_only=True)
class GraphNode:
    """One autograd node, leaf or plain input near the failure."""

    id: str
    """Name of the node within this graph."""
    name: str
    """Name of the autograd node (``AddmmBackward0``), of the parameter or of the tensor."""
    op: str | None = None
    """The function that was called, or the op where no function is known."""
    shape: tuple[int, ...] | None = None
    """Shape of its result."""
    dtype: str | None = None
    """Dtype of its result."""
    device: str | None = None
    """Device of its result."""
    module_path: str | None = None
    """The module that ran it."""
    source: LineRef | None = None
    """The user's line that called it."""
    role: Role = "upstream"
    """Its part in the failure."""
    value: Number = None
    """For an input of an op that made a first NaN or infinity: its value at that position."""


@dataclass(frozen=True, kw_only=True)
class GraphEdge:
    """Data flows from one node into input number ``input`` of another."""

    src: str
    """``id`` of the node that the data comes from."""
    dst: str
    """``id`` of the node that it goes to."""
    input: int = 0
    """Number of the input, from 0."""


@dataclass(frozen=True, kw_only=True)
class AutogradNeighbourhood:
    """The 20 to 60 nodes around the failure, of a graph with ``total_nodes`` nodes."""

    nodes: tuple[GraphNode, ...] = ()
    """The nodes."""
    edges: tuple[GraphEdge, ...] = ()
    """The connections between them."""
    focus: str | None = None
    """``id`` of the node that failed."""
    total_nodes: int | None = None
    """Number of nodes of the whole graph."""
    module_names: tuple[tuple[str, str], ...] = ()
    """Module paths with the variable of the model, where that is proven: ``("0", "net.0")``."""


@dataclass(frozen=True, kw_only=True)
class ProvenanceStep:
    """One step in the provenance of the bad values: an op, or the place they entered."""

    op: str | None = None
    """The op, where the step is one."""
    source: LineRef | None = None
    """The user's line."""
    note: str | None = None
    """What the step did, in words: ``it writes 20``."""
    count: int | None = None
    """Number of the bad values that this step wrote, where it is known."""


WRITES = "it writes"
"""Start of the note of a step that wrote a bad number; the number follows."""

CHANGED = "changes a tensor in place that backward needs"
"""The note of the step that autograd rejects."""

FIRST_BAD = "first out of range here"
"""The note of the step that is proven to have made the bad values."""

DIVIDES = "divides by 0 here"
"""The note of a step that divides all values by 0, some of which have become NaN since."""

FIRST_NAN = "NaN first appears here"
"""The note of the step that is proven to have made the first NaN."""
