"""Folding of an autograd neighbourhood into few boxes: parameters by op, chains by module."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import networkx as nx

from cudalens.core.report import AutogradNeighbourhood, GraphNode, Role
from cudalens.render import words
from cudalens.render.words import clip, clip_left, one_line

CALLS = "calls"
"""The focus of a graph that shows calls in their order where there is no autograd graph."""
MAX_NODES = 80
MAX_BOXES = 22
MAX_EDGES = 28
MAX_ROWS = 7
MAX_SIBLINGS = 3
_NEAR = 2
_TITLE = 30
_DETAIL = 34


@dataclass(frozen=True, kw_only=True)
class Box:
    """One drawn box: a node of the graph, or several folded into one."""

    key: str
    role: Role
    members: tuple[GraphNode, ...]

    @property
    def main(self) -> tuple[GraphNode, ...]:
        """The nodes that compute something: views and transposes of them go without saying."""
        return tuple(node for node in self.members if not _is_view(node)) or self.members

    @property
    def module(self) -> str:
        """The path of the one module that all nodes belong to, empty when there is none."""
        paths = {node.module_path or "" for node in self.main}
        return one_line(paths.pop()) if len(paths) == 1 and self.role in _FOLDS else ""

    def title(self, types: Types) -> str:
        """Return the first line: class and path of a module, else the op or the ops in order."""
        if len(self.members) > 1 and self.role in ("parameter", "leaf"):
            return f"{len(self.members)} {'parameters' if self.role == 'parameter' else 'inputs'}"
        kind = types.get(self.module)
        return f"{kind} {clip_left(self.module, _TITLE - len(kind))}" if kind else self._ops()

    def detail(self, types: Types, *, prevented: bool) -> str:
        """Return the second line: what the shape of the box says, the module, the line."""
        lead = {
            "failed": "not launched" if prevented else "failed here",
            "bad_input": "bad input",
            "parameter": "parameter",
            "leaf": "leaf",
        }.get(self.role)
        many = len(self.main) > 1
        first = self.main[0]
        is_named = self.module in types
        if many:
            lead = _folded(self.members, self.role)
        elif is_named:
            lead = self._ops()
        module = "" if self.role == "parameter" or is_named else _common_module(self.main)
        line = f"line {first.source.line}" if first.source and first.source.line else ""
        shape = words.format_shape(first.shape) if self.role == "parameter" and not many else ""
        facts = filter(None, (lead, shape, "" if many else line))
        rest = " · ".join(facts)
        room = max(_DETAIL - len(rest) - 3, 10)
        return " · ".join(filter(None, (clip_left(module, room), rest)))

    def _ops(self) -> str:
        names = [node_name(node) for node in self.main]
        if len(names) == 1:
            return clip(names[0], _TITLE)
        # The two ends say where the chain begins and stops: both are to be read.
        between = " → " if len(names) == 2 else " → … → "
        first, last = names[0], names[-1]
        if len(first + between + last) > _TITLE:
            end = (_TITLE - len(between)) // 2
            first, last = clip(first, end), clip(last, end)
        return first + between + last


@dataclass(frozen=True, kw_only=True)
class Folding:
    """What the reader asked to see unfolded and folded; the default leaves it to the size."""

    near: int = 0
    """Nodes within so many hops of the failure are drawn one by one."""
    opened: frozenset[str] = field(default_factory=frozenset)
    """Ids of nodes that are drawn one by one wherever they are."""
    closed: frozenset[str] = field(default_factory=frozenset)
    """Modules that are drawn as one box wherever they are."""


DEFAULT_FOLDING = Folding()

Types: TypeAlias = Mapping[str, str]
"""The class of each module by its path, as far as it is known."""

_FOLDS = ("upstream", "downstream")
_VIEWS = (
    *("t", "transpose", "view", "unsafe_view", "reshape", "reshape_alias", "expand", "detach"),
    *("alias", "permute", "squeeze", "unsqueeze"),
)
_NODE = re.compile(r"^(.*?)Backward\d*$")

Rule: TypeAlias = Callable[[nx.DiGraph, dict[str, Box], tuple[str, str]], bool]
"""Tells whether the two ends of an edge are alike enough to be drawn as one box."""


def node_name(node: GraphNode) -> str:
    """Return the op of a node without its namespace, else the node's own name."""
    op = _op_of(node)
    if node.role in ("parameter", "leaf", "bad_input") or not op:
        return clip_left(one_line(node.name or "unnamed"), _TITLE)
    return one_line(op.removeprefix("aten::"))


def _is_view(node: GraphNode) -> bool:
    """Return whether a node only looks at its input in another shape."""
    return _op_of(node).rpartition("::")[2].partition(".")[0].lstrip("_") in _VIEWS


def _op_of(node: GraphNode) -> str:
    """Return the op of a node: of ``ConvolutionBackward0``, where no more is known, its stem."""
    found = None if node.op or node.role not in _FOLDS else _NODE.match(node.name)
    return re.sub("(?<!^)([A-Z])", r"_\1", found[1]).lower() if found else node.op or ""


def fold(
    graph: AutogradNeighbourhood, folding: Folding = DEFAULT_FOLDING
) -> tuple[dict[str, Box], list[tuple[str, str]]]:
    """Return the boxes and the edges between them, acyclic and few enough to be read."""
    nodes = _nearest(graph)
    boxes = {node.id: Box(key=node.id, role=node.role, members=(node,)) for node in nodes}
    net = nx.DiGraph()
    net.add_nodes_from(boxes)
    for edge in graph.edges:
        known = edge.src in boxes and edge.dst in boxes
        # Data flows one way; an edge that would close a circle cannot be drawn in rows.
        if known and not nx.has_path(net, edge.dst, edge.src):
            net.add_edge(edge.src, edge.dst)
    _join_siblings(net, boxes, folding)
    focus = graph.focus if graph.focus in boxes else None
    for module in sorted(folding.closed):
        _close(net, boxes, module)
    for same in (_beside_view, _same_module) if focus != CALLS else ():
        _contract(net, boxes, focus, same, folding, len)
    # What is still too much is folded further, but not right beside the failure.
    wide = replace(folding, near=max(folding.near, _NEAR))
    for same in (_same_parent, _unary):
        _contract(net, boxes, focus, same, wide, _is_large)
    # An unrolled loop has no modules to fold by, and no single chain.
    for same in (_same_line, _anything):
        _contract(net, boxes, focus, same, wide, _is_tangled)
    return {key: boxes[key] for key in net.nodes}, list(net.edges)


def _nearest(graph: AutogradNeighbourhood) -> tuple[GraphNode, ...]:
    if len(graph.nodes) <= MAX_NODES:
        return graph.nodes
    around = nx.Graph([(edge.src, edge.dst) for edge in graph.edges])
    start = graph.focus if graph.focus in around else graph.nodes[-1].id
    hops = nx.single_source_shortest_path_length(around, start) if start in around else {}
    far = len(graph.nodes)
    ranked = sorted(range(far), key=lambda at: (hops.get(graph.nodes[at].id, far), at))
    kept = set(ranked[:MAX_NODES])
    return tuple(node for at, node in enumerate(graph.nodes) if at in kept)


def _join_siblings(net: nx.DiGraph, boxes: dict[str, Box], folding: Folding) -> None:
    groups: dict[tuple[str, str], list[str]] = {}
    for key in list(net.nodes):
        role = boxes[key].role
        if is_unfolded(boxes[key], folding):
            continue
        if net.in_degree(key) == 0 and net.out_degree(key) == 1 and role in ("parameter", "leaf"):
            groups.setdefault((role, next(iter(net.successors(key)))), []).append(key)
    for (kind, _), keys in groups.items():
        if len(keys) > (1 if kind == "parameter" else MAX_SIBLINGS):
            _absorb(net, boxes, keys[0], keys[1:])


def is_unfolded(box: Box, folding: Folding) -> bool:
    """Return whether the reader asked to see nodes of this box one by one."""
    return any(node.id in folding.opened for node in box.members)


def _close(net: nx.DiGraph, boxes: dict[str, Box], module: str) -> None:
    """Draw the ops of a module as one box, as far as no way leads out of it and back."""

    def inside(net: nx.DiGraph, boxes: dict[str, Box], pair: tuple[str, str]) -> bool:
        return all(is_within(node, module) for key in pair for node in boxes[key].members)

    while pair := next((p for p in net.edges if _may_join(net, boxes, p, inside)), None):
        _absorb(net, boxes, pair[1], [pair[0]], before=True)
        _join_siblings(net, boxes, DEFAULT_FOLDING)


def is_within(node: GraphNode, module: str) -> bool:
    """Return whether a node belongs to a module or to one inside it."""
    return f"{node.module_path or ''}.".startswith(f"{module}.")


def _contract(
    net: nx.DiGraph,
    boxes: dict[str, Box],
    focus: str | None,
    same: Rule,
    folding: Folding,
    is_too_much: Callable[[nx.DiGraph], object],
) -> None:
    while is_too_much(net):
        candidates = (
            pair
            for pair in _far_first(net, focus, folding.near)
            if not any(is_unfolded(boxes[key], folding) for key in pair)
        )
        pair = next((pair for pair in candidates if _may_join(net, boxes, pair, same)), None)
        if pair is None:
            return
        src, dst = pair
        _absorb(net, boxes, dst, [src], before=True)
        _join_siblings(net, boxes, folding)


def _is_large(net: nx.DiGraph) -> bool:
    if len(net) <= 1:
        return False
    return len(net) > MAX_BOXES or nx.dag_longest_path_length(net, weight=None) >= MAX_ROWS


def _is_tangled(net: nx.DiGraph) -> bool:
    return len(net) > MAX_BOXES or net.number_of_edges() > MAX_EDGES


def _far_first(net: nx.DiGraph, focus: str | None, hops: int) -> Iterator[tuple[str, str]]:
    near = nx.single_source_shortest_path_length(net.to_undirected(), focus) if focus else {}
    far = len(net)
    ranked = sorted(net.edges, key=lambda pair: -min(near.get(key, far) for key in pair))
    return (pair for pair in ranked if min(near.get(key, far) for key in pair) >= hops)


def _may_join(net: nx.DiGraph, boxes: dict[str, Box], pair: tuple[str, str], same: Rule) -> bool:
    src, dst = pair
    is_foldable = boxes[src].role in _FOLDS and boxes[dst].role in _FOLDS
    if not is_foldable or not same(net, boxes, pair):
        return False
    # Joined across a second way from src to dst, the box would feed itself.
    return not any(nx.has_path(net, other, dst) for other in net.successors(src) if other != dst)


def _beside_view(net: nx.DiGraph, boxes: dict[str, Box], pair: tuple[str, str]) -> bool:
    return any(all(map(_is_view, boxes[key].members)) for key in pair)


def _same_module(net: nx.DiGraph, boxes: dict[str, Box], pair: tuple[str, str]) -> bool:
    one, other = (boxes[key].module for key in pair)
    return bool(one) and one == other


def _same_parent(net: nx.DiGraph, boxes: dict[str, Box], pair: tuple[str, str]) -> bool:
    both = (*boxes[pair[0]].members, *boxes[pair[1]].members)
    return _common_module(both).count(".") >= 1


def _unary(net: nx.DiGraph, boxes: dict[str, Box], pair: tuple[str, str]) -> bool:
    src, dst = pair
    data = [key for key in net.predecessors(dst) if boxes[key].role != "parameter"]
    return net.out_degree(src) == 1 and data == [src]


def _same_line(net: nx.DiGraph, boxes: dict[str, Box], pair: tuple[str, str]) -> bool:
    lines = {words.format_place(node.source) for key in pair for node in boxes[key].members}
    return len(lines) == 1 and "" not in lines


def _anything(net: nx.DiGraph, boxes: dict[str, Box], pair: tuple[str, str]) -> bool:
    return True


def _absorb(
    net: nx.DiGraph,
    boxes: dict[str, Box],
    into: str,
    others: Sequence[str],
    *,
    before: bool = False,
) -> None:
    for other in others:
        gone = boxes.pop(other).members
        kept = boxes[into].members
        boxes[into] = replace(boxes[into], members=(*gone, *kept) if before else (*kept, *gone))
        sources, targets = list(net.predecessors(other)), list(net.successors(other))
        net.remove_node(other)
        net.add_edges_from((src, into) for src in sources if src != into)
        net.add_edges_from((into, dst) for dst in targets if dst != into)


def _common_module(members: Sequence[GraphNode]) -> str:
    paths = [(node.module_path or "").split(".") for node in members]
    common = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        common.append(names[0])
    return one_line(".".join(common))


def _folded(members: Sequence[GraphNode], role: Role) -> str:
    if role == "parameter":
        return " ".join(words.format_shape(node.shape) for node in members[:2]) + (
            " …" if len(members) > 2 else ""
        )
    return "" if role == "leaf" else f"{len(members)} ops"
