"""The neighbourhood of one call in the autograd graph: the few dozen nodes nearest to it.

The walk is breadth first from the call's tensor arguments towards the leaves and bounded, so its
time does not grow with the graph.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cudalens.core._torch import all_op_names, dtype_name, has_kernel, node_sequence_nr, plain_torch
from cudalens.core.graph_types import AutogradNeighbourhood, GraphEdge, GraphNode, Role
from cudalens.core.report_types import LineRef, Number, SourceSpan

MAX_VISITED = 5000
"""How many nodes a walk visits; the size of a larger graph stays unknown."""
FOCUS = "nF"
LIMIT = 60
"""How many nodes are kept, the call itself included."""

Site: TypeAlias = tuple[LineRef | None, str | None, str | None]
SiteOf: TypeAlias = Callable[[int], tuple[SourceSpan | None, str | None, str | None]]
"""Sequence number of a node -> line, module path and name of its forward call."""


def neighbourhood(
    arguments: Mapping[str, Tensor],
    *,
    op_name: str,
    bad: str | None,
    site: SiteOf | None = None,
    node: Any | None = None,
    names: Mapping[int, str] | None = None,
    inputs: Mapping[str, Number] | None = None,
    expressions: Mapping[str, str] | None = None,
) -> AutogradNeighbourhood:
    """Return the part of the autograd graph around a call.

    Args:
        arguments: the call's tensors by schema name.
        op_name: the op that failed, such as ``aten::embedding``.
        bad: the argument at fault, if there is one.
        site: returns the forward line and module of a node.
        node: the running autograd node, for a call in a backward pass.
        names: parameter names by ``id`` of the parameter.
        inputs: values of arguments, if the op made its first NaN or infinity from them.
        expressions: the user's expressions for arguments, if proven.

    Returns:
        Nodes in order of discovery, ``n0`` first; ``total_nodes`` counts the whole graph,
        the call and its inputs included, and is ``None`` beyond ``MAX_VISITED``.
    """
    walk = _GraphWalk(site, names or {})
    with plain_torch():
        for position, (name, tensor) in enumerate(arguments.items()):
            own = (expressions or {}).get(name)
            walk.add_argument(name, tensor, position, own, is_bad=name == bad)
        if node is not None:
            walk.add_running(node, first_input=len(arguments))
        walk.run()
    walk.show_values({key: value for key, value in (inputs or {}).items() if key in arguments})
    source, module_path, _ = (None, None, None) if node is None else walk.site_of(node)
    focus = GraphNode(
        id=FOCUS,
        name=op_name if node is None else name_of(node),
        op=op_name,
        role="failed",
        source=source,
        module_path=module_path,
    )
    return AutogradNeighbourhood(
        nodes=(*walk.nodes.values(), focus),
        edges=tuple(edge for edge in walk.edges if edge.src in walk.nodes),
        focus=FOCUS,
        total_nodes=walk.total,
    )


class _GraphWalk:
    """One breadth-first walk; it keeps autograd's nodes alive only while it runs."""

    def __init__(self, site: SiteOf | None, names: Mapping[int, str]) -> None:
        self.nodes: dict[str, GraphNode] = {}
        self.edges: list[GraphEdge] = []
        self._site = site
        self._names = names
        # torch returns the same object for a node again only while one is held, as here.
        self._ids: dict[Any, str] = {}
        self._waiting: deque[Any] = deque()
        self._visited = 0
        self._arguments: dict[str, str] = {}
        self._beside = 1  # the call itself, and inputs without an autograd node
        self._is_cut = False

    @property
    def total(self) -> int | None:
        """Number of nodes in the graph, ``None`` if the walk was cut short."""
        return None if self._is_cut else self._visited + self._beside

    def add_argument(
        self, name: str, tensor: Tensor, position: int, own: str | None, *, is_bad: bool
    ) -> None:
        """Start the walk at a tensor of the call; ``own`` is the user's expression for it."""
        grad_fn = tensor.grad_fn if tensor.requires_grad else None
        role: Role | None = "bad_input" if is_bad else None
        if grad_fn is not None:
            identifier = self._arguments[name] = self._discover(
                grad_fn, role, own if is_bad else None
            )
            self._edge(identifier, FOCUS, position)
            return
        self._beside += 1
        identifier = self._arguments[name] = f"n{len(self.nodes)}"
        if len(self.nodes) < LIMIT - 1:
            named = own if is_bad else None
            self.nodes[identifier] = self._leaf(identifier, tensor, own or name, role, named)
            self._edge(identifier, FOCUS, position)

    def show_values(self, values: Mapping[str, Number]) -> None:
        """Label the arguments' own nodes with their values."""
        by_node: dict[str, set[Number]] = {}
        for name, value in values.items():
            by_node.setdefault(self._arguments[name], set()).add(value)
        for identifier, held in by_node.items():
            # Two results of one node, such as a split, may have different values.
            if identifier in self.nodes and len(held) == 1:
                self.nodes[identifier] = replace(self.nodes[identifier], value=held.pop())

    def add_running(self, node: Any, first_input: int) -> None:
        """Add the running node of a backward pass as the start of the walk."""
        self._visited += 1
        self._beside -= 1  # this node is the call
        self._ids[node] = FOCUS
        self._look_behind(node, first_input)

    def run(self) -> None:
        """Walk towards the leaves, up to ``MAX_VISITED`` nodes."""
        while self._waiting and not self._is_cut:
            self._look_behind(self._waiting.popleft())

    def _look_behind(self, node: Any, first_input: int = 0) -> None:
        for position, (following, _) in enumerate(node.next_functions, first_input):
            if following is None:
                continue
            if following not in self._ids and self._visited >= MAX_VISITED:
                self._is_cut = True
                return
            self._edge(self._discover(following), self._ids[node], position)

    def site_of(self, node: Any) -> Site:
        """Return line, module and name of the forward call of a node."""
        number = node_sequence_nr(node)
        if self._site is None or number is None:
            return None, None, None
        place, module_path, name = self._site(number)
        return None if place is None else place.ref, module_path, name

    def _discover(self, node: Any, role: Role | None = None, own: str | None = None) -> str:
        number = self._ids.get(node)
        if number is not None:
            return number
        self._visited += 1
        self._waiting.append(node)
        # One place is left for the call itself.
        identifier = f"n{len(self.nodes)}" if len(self.nodes) < LIMIT - 1 else ""
        self._ids[node] = identifier
        if identifier:
            self.nodes[identifier] = self._describe(identifier, node, role, own)
        return identifier

    def _describe(
        self, identifier: str, node: Any, role: Role | None, own: str | None
    ) -> GraphNode:
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            return self._leaf(identifier, variable, name_of(node), role, own)
        source, module_path, called = self.site_of(node)
        # The inputs of a backward node have the shapes of the forward call's results.
        meta = next(iter(getattr(node, "_input_metadata", ())), None)
        return GraphNode(
            id=identifier,
            name=own or name_of(node),
            op=called or op_of(name_of(node)),
            shape=None if meta is None else _shape_of(meta),
            dtype=None if meta is None else dtype_name(meta.dtype),
            device=None if meta is None else str(meta.device),
            role=role or "upstream",
            source=source,
            module_path=module_path,
        )

    def _leaf(
        self, identifier: str, tensor: Tensor, name: str, role: Role | None, own: str | None
    ) -> GraphNode:
        variable = self._names.get(id(tensor), "")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        return GraphNode(
            id=identifier,
            name=own or variable or name,
            shape=_shape_of(tensor),
            dtype=dtype_name(tensor.dtype),
            device=str(tensor.device),
            role=role or ("parameter" if is_parameter else "leaf"),
            module_path=variable.rpartition(".")[0] or None,
        )

    def _edge(self, source: str, target: str, position: int) -> None:
        # Nodes beyond the limit have no name, and no edges.
        if source and target:
            self.edges.append(GraphEdge(src=source, dst=target, input=position))


def _shape_of(holder: Any) -> tuple[int, ...] | None:
    try:
        return tuple(int(size) for size in holder.shape)
    except (RuntimeError, TypeError):  # nested tensors have no shape
        return None


def name_of(node: Any) -> str:
    """Return the name of a node, such as ``AddmmBackward0``."""
    return str(node.name()).rpartition("::")[2]


def op_of(node_name: str) -> str | None:
    """Return the op that a node like ``AddmmBackward0`` differentiates, ``None`` if ambiguous."""
    stem = node_name.rstrip("0123456789")
    if stem == node_name or not stem.endswith("Backward"):
        return None
    ops = _ops_by_stem().get(stem.removesuffix("Backward").lower(), frozenset())
    return next(iter(ops)) if len(ops) == 1 else None


@functools.cache
def _ops_by_stem() -> dict[str, frozenset[str]]:
    """Map op names without underscores to the differentiable ops with that name."""
    ops: dict[str, set[str]] = {}
    for full in all_op_names():
        namespace, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        # The node of an in-place op has the name of the out-of-place op, too.
        if namespace != "aten" or name.endswith("_") or overload.endswith("out"):
            continue
        if has_kernel(full, "Autograd"):
            stem = name.replace("_", "").lower()
            ops.setdefault(stem, set()).add(f"aten::{name}")
            ops.setdefault(stem.removesuffix("forward"), set()).add(f"aten::{name}")
    return {stem: frozenset(names) for stem, names in ops.items()}


def nodes_behind(roots: Iterable[Any]) -> dict[Any, Any]:
    """Return the nodes reachable from some nodes, nearest first, each with its predecessor."""
    before = {node: None for node in roots if node is not None}
    waiting = deque(before)
    while waiting and len(before) < MAX_VISITED:
        node = waiting.popleft()
        for following, _ in node.next_functions:
            if following is not None and following not in before:
                before[following] = node
                waiting.append(following)
    return before
