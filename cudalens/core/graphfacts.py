"""Where tensors come from, as data: the autograd graph, and the way of the bad values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cudalens.core.places import LineRef

Role = Literal["failed", "bad_input", "upstream", "downstream", "leaf", "parameter"]


@dataclass(frozen=True, kw_only=True)
class GraphNode:
    """One autograd node, leaf or plain input near the failure."""

    id: str
    name: str
    op: str | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    device: str | None = None
    module_path: str | None = None
    source: LineRef | None = None
    role: Role = "upstream"


@dataclass(frozen=True, kw_only=True)
class GraphEdge:
    """Data flows from node ``src`` into input number ``input`` of node ``dst``."""

    src: str
    dst: str
    input: int = 0


@dataclass(frozen=True, kw_only=True)
class AutogradNeighbourhood:
    """The 20 to 60 nodes around the failure, of a graph with ``total_nodes`` nodes."""

    nodes: tuple[GraphNode, ...] = ()
    edges: tuple[GraphEdge, ...] = ()
    focus: str | None = None
    total_nodes: int | None = None


@dataclass(frozen=True, kw_only=True)
class ProvenanceStep:
    """One step on the way of the bad values, newest first: an op, or the place they entered."""

    op: str | None = None
    source: LineRef | None = None
    note: str | None = None


FIRST_BAD = "first op whose result is out of bounds"
"""The note of the step that is proven to have made the bad values."""
