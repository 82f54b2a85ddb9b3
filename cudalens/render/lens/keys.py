"""Which drawn things are the same thing, and which of them are chosen.

Every drawn thing carries its own key (nodes, tensors, ops, lines and steps) and the keys of all
that it is linked with, so choosing one needs no table: it marks whatever carries the chosen key.
Only links that the report proves are made.  The keys are numbers of ours, so nothing of the user's
reaches a selector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from markupsafe import Markup

from cudalens.core.report import GraphNode, HistoryEntry, LineRef, Report, SourceSpan, TensorFact
from cudalens.render import words
from cudalens.render.fold import node_name
from cudalens.render.graph import ROLES
from cudalens.render.words import clip, one_line


def line_key(ref: LineRef | SourceSpan | None) -> LineRef | None:
    """Return the line that ``ref`` points at, without what the user does not tell lines apart by.

    ``None`` when it names none.
    """
    if ref is None or ref.line is None:
        return None
    return LineRef(cell=ref.cell, file=None if ref.cell is not None else ref.file, line=ref.line)


class Keys:
    """The keys of one report and the links between them."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._nodes = {node.id: f"n{at}" for at, node in enumerate(report.graph.nodes)}
        self._lines: dict[LineRef, str] = {}
        self._links: dict[str, set[str]] = {}
        for at, entry in enumerate(report.history):
            self._link(f"h{at}", self._line(line_key(entry.source)))
        for at, step in enumerate(words.way(report)):
            self._link(f"s{at}", self._line(line_key(step.source)))
        for at, node in enumerate(report.graph.nodes):
            self._link_node(f"n{at}", node)
        for at, fact in enumerate(report.tensors):
            self._link_tensor(f"t{at}", fact)

    def linked(self, key: str) -> tuple[str, ...]:
        """Return ``key`` itself and the keys that it is linked with, its own first."""
        return (key, *sorted(self._links.get(key, ())))

    def present(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Return those of ``keys`` that this report has."""
        return tuple(key for key in keys if key in self._links)

    def code_line(self, number: int) -> str | None:
        """Return the key of a drawn line of code, ``None`` when nothing points at it."""
        source = self._report.source
        place = None if source is None else line_key(replace(source, line=number))
        return None if place is None else self._lines.get(place)

    def attributes(self, kind: str | None, at: int | None) -> Markup:
        """Return the attributes of the element that draws thing number ``at`` of a kind."""
        if kind is None or at is None:
            return Markup("")
        letters = {"node": "n", "tensor": "t", "op": "h", "step": "s"}
        key = self.code_line(at) if kind == "code" else f"{letters[kind]}{at}"
        if key is None:
            return Markup("")
        # The keys are ours: letters and digits.
        return Markup(f' data-id="{key}" data-k="{" ".join(self.linked(key))}"')

    def box(self, members: Sequence[GraphNode]) -> Mapping[str, str | None]:
        """Return the attributes of a box of the picture that stands for some nodes."""
        own = [self._nodes[node.id] for node in members]
        links = dict.fromkeys(link for key in own for link in self.linked(key))
        names = [node_name(node) for node in members]
        last = members[-1]
        parts = (
            ROLES.get(last.role, ""),
            f"{len(names)} nodes" if len(names) > 1 else "",
            words.format_dtype(last.dtype or "") + words.format_shape(last.shape),
            last.module_path or "",
            words.format_place(last.source),
        )
        label = ", ".join(filter(None, (" to ".join(dict.fromkeys((names[0], names[-1]))), *parts)))
        return {
            "data_id": " ".join(own),
            "data_k": " ".join(links),
            "data_n": str(len(own)),
            "aria_label": clip(one_line(label), 160),
        }

    def _link(self, key: str, *others: str | None) -> None:
        self._links.setdefault(key, set())
        for other in others:
            if other is not None and other != key:
                self._links[key].add(other)
                self._links.setdefault(other, set()).add(key)

    def _line(self, place: LineRef | None) -> str | None:
        if place is None:
            return None
        return self._lines.setdefault(place, f"l{len(self._lines)}")

    def _link_node(self, key: str, node: GraphNode) -> None:
        report = self._report
        is_failed = node.role == "failed"
        where = line_key(node.source) or (line_key(report.source) if is_failed else None)
        ops = [f"h{at}" for at, entry in enumerate(report.history) if _is_same_op(node, entry)]
        self._link(key, self._line(where), *ops)

    def _link_tensor(self, key: str, fact: TensorFact) -> None:
        report = self._report
        where = None
        if fact.span is not None and report.source is not None:
            where = replace(report.source, line=fact.span[0])
        made = _producers(fact, report)
        same = [node for node in report.graph.nodes if _is_value_of(node, fact, report)]
        nodes = [*same, *(made if len(made) == 1 else ())]
        self._link(key, self._line(line_key(where)), *(self._nodes[node.id] for node in nodes))


def _is_same_op(node: GraphNode, entry: HistoryEntry) -> bool:
    """Return whether a node is of an op of the history: same op, line and module."""
    where = line_key(node.source)
    same_line = where is not None and where == line_key(entry.source)
    same_op = bool(node.op) and _base(node.op or "") == _base(entry.op)
    return same_line and same_op and node.module_path == entry.module_path


def _base(op: str) -> str:
    namespace, _, name = op.rpartition("::")
    return f"{namespace}::{name.partition('.')[0]}"


def _is_value_of(node: GraphNode, fact: TensorFact, report: Report) -> bool:
    """Return whether a leaf of the graph is this tensor: by the user's own name for it."""
    if node.role == "bad_input":
        return words.is_at_fault(report, fact)
    named = node.role in ("leaf", "parameter") and fact.expression is not None
    return named and node.name == fact.expression and node.shape == fact.shape


def _producers(fact: TensorFact, report: Report) -> list[GraphNode]:
    """Return the nodes that can have made this tensor: one only is the one that did."""
    return [
        node
        for node in report.graph.nodes
        if fact.grad_fn is not None and (node.name, node.shape) == (fact.grad_fn, fact.shape)
    ]


Follower: TypeAlias = Callable[[tuple[str, ...]], None]

RULE = (
    "%ROOT% tr:is(%SEL%)>td{background:var(--cl-linksoft)}"
    "%ROOT% tr:is(%SEL%)>td:first-child{box-shadow:inset 3px 0 var(--cl-link)}"
    "%ROOT% li:is(%SEL%){background:var(--cl-linksoft);box-shadow:-6px 0 var(--cl-linksoft)}"
    "%ROOT% .cl-row:is(%SEL%){box-shadow:inset 3px 0 var(--cl-link)}"
    "%ROOT% .cl-row :is(%SEL%){background:var(--cl-linksoft);outline:2px solid var(--cl-link);"
    "border-radius:2px}"
    "%ROOT% g:is(%SEL%)>:is(rect,polygon){stroke:var(--cl-link);stroke-width:3}"
)
"""Look of the chosen things, wherever they are drawn; the browser module fills it in as well."""


class Selection:
    """The chosen keys of one lens, with those who follow it."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._followers: list[Follower] = []
        self.chosen: tuple[str, ...] = ()

    def follow(self, follower: Follower) -> None:
        """Call ``follower`` with the chosen keys whenever they change."""
        self._followers.append(follower)

    def choose(self, keys: Iterable[str]) -> None:
        """Choose these keys, those that the report has; none clears the selection."""
        chosen = self._keys.present(keys)
        if chosen == self.chosen:
            return
        self.chosen = chosen
        for follower in self._followers:
            follower(chosen)


def rule(root: str) -> str:
    """Return the rule for the lens of class ``root``; ``%SEL%`` stands for the chosen keys."""
    # As specific as the style sheet's own rules, and later than they are.
    return RULE.replace("%ROOT%", f".cudalens.cudalens.{root}")


def style(root: str, chosen: Iterable[str]) -> str:
    """Return the style element that marks the chosen things below the class ``root``."""
    selectors = ",".join(f'[data-k~="{key}"]' for key in chosen)
    marks = rule(root).replace("%SEL%", selectors) if selectors else ""
    return f'<style class="cl-marks">{marks}</style>'
