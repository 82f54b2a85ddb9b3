"""Fold an autograd graph into a few boxes: parameters by op, chains by module."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, takewhile
from typing import TypeAlias

import networkx as nx

from cudalens.core.api_names import api_names
from cudalens.core.report import AutogradNeighbourhood, GraphNode, Role
from cudalens.core.torch_functions import Trait, functions
from cudalens.render import words
from cudalens.render.words import elide, one_line

MAX_NODES = 80
MAX_BOXES = 22
MAX_EDGES = 28
MAX_ROWS = 7
MAX_SIBLINGS = 3
_NEAR = 2
_TITLE = 26
_LONGEST_NAME = 100


@dataclass(frozen=True, kw_only=True)
class Box:
    """One drawn box: a node of the graph, or several folded into one."""

    key: str
    role: Role
    members: tuple[GraphNode, ...]

    @property
    def is_side(self) -> bool:
        """True for an input of the graph, which no node computes."""
        return self.role in ("parameter", "leaf")

    @property
    def main(self) -> tuple[GraphNode, ...]:
        """The nodes that compute something, without views and transposes."""
        return tuple(node for node in self.members if not is_view(node)) or self.members

    @property
    def module(self) -> str:
        """The path of the module that all nodes belong to, empty if there is none."""
        paths = {node.module_path or "" for node in self.main}
        return one_line(paths.pop()) if len(paths) == 1 and self.role in _FOLDS else ""

    def title(self, types: Types) -> str:
        """Return the first line: class and path of a module, or the op, or the ops in order."""
        if len(self.members) > 1 and self.is_side:
            return f"{len(self.members)} {'parameters' if self.role == 'parameter' else 'inputs'}"
        kind = types.get(self.module)
        return elide(f"{kind} {self.module}", _TITLE) if kind else self._ops()

    def _ops(self) -> str:
        names = [name for name, _ in groupby(map(node_name, self.main))]
        if len(names) == 1:
            return elide(names[0], _TITLE)
        # Of a long chain, show the first and the last op.
        between = " → " if len(names) == 2 else " → … → "
        first, last = names[0], names[-1]
        if len(first + between + last) > _TITLE:
            end = (_TITLE - len(between)) // 2
            first, last = elide(first, end), elide(last, end)
        return first + between + last


Types: TypeAlias = Mapping[str, str]
"""The class of each module, by path, as far as known."""

_FOLDS = ("upstream", "downstream")
_ALIKE = functions(Trait.WHOLE | Trait.VIEW, without=Trait.CAST | Trait.MOVES)
_VIEWS = frozenset(name.strip("_") for name in _ALIKE)
_CALLED = {
    **{"addmm": "F.linear", "convolution": "F.conv", "native_layer_norm": "F.layer_norm"},
    **{"native_batch_norm": "F.batch_norm", "cudnn_batch_norm": "F.batch_norm"},
    **{"native_dropout": "F.dropout", "log_softmax_backward_data": "F.log_softmax"},
}
"""The public functions behind ops that users do not call by name."""
_OF_SEVERAL_OPS = ("torch.nn.functional.", "torch.gru", "torch.lstm", "torch.rnn_")
"""Functions drawn as one box though they make several nodes, recurrent ones on the CPU only."""
_NODE = re.compile(r"^(.*?)Backward\d*$")

Rule: TypeAlias = Callable[[Box, Box], bool]
"""Returns whether two linked nodes may be drawn as one box."""


def is_statement(node: GraphNode) -> bool:
    """Return whether a bad node is named by the statement that wrote to it: it is no input."""
    return node.source is not None and node.name == node.source.text


def node_name(node: GraphNode) -> str:
    """Return the public name of a node: ``F.linear`` for ``aten::addmm``."""
    op = _op_of(node)
    if node.name == "AccumulateGrad":
        return "leaf tensor"
    if node.role == "failed" and (stem := _stem(op)):
        return stem
    if node.role in ("parameter", "leaf", "bad_input") or not op:
        return elide(one_line(node.name or "unnamed"), _TITLE)
    if not op.startswith("torch."):
        plain = op.rpartition("::")[2].partition(".")[0].strip("_")
        op = next(iter(api_names(op)), _CALLED.get(plain, plain))
    return words.format_api(op).removeprefix("torch.")


def is_view(node: GraphNode) -> bool:
    """Return whether a node is a view of its input."""
    # The node's own name first: F.linear also makes a TBackward0, which is a view.
    named = _stem(node.name) or _op_of(node).rpartition("::")[2].partition(".")[0]
    return node.role in _FOLDS and named.lstrip("_") in _VIEWS


def _stem(name: str) -> str:
    """Return the forward op for a node's name: ``add_mm`` for ``AddMmBackward0``."""
    match = _NODE.match(name[:_LONGEST_NAME])
    return re.sub("(?<!^)([A-Z])", r"_\1", match[1]).lower() if match else ""


def _op_of(node: GraphNode) -> str:
    """Return the op of a node, or the stem of its name if the op is unknown."""
    return node.op or (_stem(node.name) if node.role in _FOLDS else "")


def fold(graph: AutogradNeighbourhood) -> tuple[dict[str, Box], list[tuple[str, str]]]:
    """Return the boxes and their edges: acyclic, and few enough to read."""
    net = _Net(graph)
    net.join_siblings()
    for alike in (_beside_view, _same_module, _same_call):
        # `len` is always true here, so everything that matches is joined.
        net.contract(alike, len)
    # If that is still too much, fold further, but not next to the failure.
    for alike in (_same_parent, net.is_only_way):
        net.contract(alike, _is_large, near=_NEAR)
    # An unrolled loop has neither modules nor a single chain to fold.
    for alike in (_same_line, lambda one, other: True):
        net.contract(alike, _is_tangled, near=_NEAR)
    return {key: net.boxes[key] for key in net.links.nodes}, list(net.links.edges)


class _Net:
    """Boxes and their links, joined until they are few enough to read."""

    def __init__(self, graph: AutogradNeighbourhood) -> None:
        nodes = _nearest(graph)
        self.boxes = {n.id: Box(key=n.id, role=n.role, members=(n,)) for n in nodes}
        self.focus = graph.focus if graph.focus in self.boxes else None
        self.links = nx.DiGraph()
        self.links.add_nodes_from(self.boxes)
        for edge in graph.edges:
            is_drawn = edge.src in self.boxes and edge.dst in self.boxes
            # An edge that would make a cycle cannot be drawn in rows.
            if is_drawn and not nx.has_path(self.links, edge.dst, edge.src):
                self.links.add_edge(edge.src, edge.dst)

    def join_siblings(self) -> None:
        """Join parameters (and inputs, if there are many) that feed only one and the same box."""
        groups: dict[tuple[str, str], list[str]] = {}
        for key in self.links.nodes:
            role, targets = self.boxes[key].role, list(self.links.successors(key))
            is_side = self.boxes[key].is_side and self.links.in_degree(key) == 0
            if is_side and len(targets) == 1:
                groups.setdefault((role, targets[0]), []).append(key)
        for (kind, _), keys in groups.items():
            if len(keys) > (1 if kind == "parameter" else MAX_SIBLINGS):
                for key in keys[1:]:
                    self._join(self.boxes[keys[0]], self.boxes[key], keys[0])

    def contract(
        self, alike: Rule, is_too_much: Callable[[nx.DiGraph], object], near: int = 0
    ) -> None:
        """Join linked boxes that match, farthest from the failure first, while there are too many.

        Args:
            near: how many hops around the failure are left alone.
        """
        while is_too_much(self.links):
            around = self.links.to_undirected()
            away = nx.single_source_shortest_path_length(around, self.focus) if self.focus else {}
            hops = {
                pair: min(away.get(key, len(around)) for key in pair) for pair in self.links.edges
            }
            ranked = sorted(hops, key=hops.__getitem__, reverse=True)
            far = (pair for pair in ranked if hops[pair] >= near)
            pair = next((pair for pair in far if self._may_join(pair[0], pair[1], alike)), None)
            if pair is None:
                return
            self._join(self.boxes[pair[0]], self.boxes[pair[1]], pair[1])
            self.join_siblings()

    def is_only_way(self, one: Box, other: Box) -> bool:
        """Return whether a box feeds only the other, which has no other input."""
        sources = self.links.predecessors(other.key)
        data = [key for key in sources if self.boxes[key].role != "parameter"]
        return self.links.out_degree(one.key) == 1 and data == [one.key]

    def _may_join(self, src: str, dst: str, alike: Rule) -> bool:
        one, other = self.boxes[src], self.boxes[dst]
        if not {one.role, other.role} <= set(_FOLDS) or not alike(one, other):
            return False
        # If there is a second path from src to dst, the joined box would feed itself.
        others = (key for key in self.links.successors(src) if key != dst)
        return not any(nx.has_path(self.links, key, dst) for key in others)

    def _join(self, one: Box, other: Box, into: str) -> None:
        gone = one.key if into == other.key else other.key
        self.boxes[into] = replace(self.boxes[into], members=(*one.members, *other.members))
        del self.boxes[gone]
        nx.contracted_nodes(self.links, into, gone, self_loops=False, copy=False)


def _nearest(graph: AutogradNeighbourhood) -> tuple[GraphNode, ...]:
    if len(graph.nodes) <= MAX_NODES:
        return graph.nodes
    around = nx.Graph([(edge.src, edge.dst) for edge in graph.edges])
    start = graph.focus if graph.focus in around else graph.nodes[-1].id
    hops = nx.single_source_shortest_path_length(around, start) if start in around else {}
    far = len(graph.nodes)
    ranked = sorted(range(far), key=lambda at: (hops.get(graph.nodes[at].id, far), at))
    nearest = set(ranked[:MAX_NODES])
    return tuple(node for at, node in enumerate(graph.nodes) if at in nearest)


def _is_large(net: nx.DiGraph) -> bool:
    if len(net) <= 1:
        return False
    return len(net) > MAX_BOXES or nx.dag_longest_path_length(net, weight=None) >= MAX_ROWS


def _is_tangled(net: nx.DiGraph) -> bool:
    return len(net) > MAX_BOXES or net.number_of_edges() > MAX_EDGES


def _beside_view(one: Box, other: Box) -> bool:
    return any(all(map(is_view, box.members)) for box in (one, other))


def _same_module(one: Box, other: Box) -> bool:
    return bool(one.module) and one.module == other.module


def _same_call(one: Box, other: Box) -> bool:
    """Return whether two nodes belong to one call of a function on one line."""
    calls = {(node.op, node.source) for node in (*one.main, *other.main)}
    op, source = next(iter(calls))
    return len(calls) == 1 and source is not None and (op or "").startswith(_OF_SEVERAL_OPS)


def _same_parent(one: Box, other: Box) -> bool:
    paths = [(node.module_path or "").split(".") for node in (*one.members, *other.members)]
    common = takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
    return len([*common]) > 1


def _same_line(one: Box, other: Box) -> bool:
    lines = {words.format_place(node.source) for node in (*one.members, *other.members)}
    return len(lines) == 1 and "" not in lines
