"""The autograd graph around a failure, as data: nodes, edges, and the lines they come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["failed", "bad_input", "upstream", "downstream", "leaf", "parameter"]


@dataclass(frozen=True, kw_only=True)
class LineRef:
    """A line of the user's code in the short form that lists use."""

    line: int | None = None
    text: str | None = None
    cell: int | None = None
    file: str | None = None


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
