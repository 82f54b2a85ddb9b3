"""What is told of the chosen thing, as names and values."""

from __future__ import annotations

from typing import TypeAlias

from cudalens.core.report import Report
from cudalens.render import words
from cudalens.render.graph import graph_rows
from cudalens.render.safe import one_line

Facts: TypeAlias = tuple[tuple[str, str], ...]
_MAX_THINGS = 3


def details(report: Report, keys: tuple[str, ...]) -> tuple[tuple[str, Facts], ...]:
    """Return title and facts of each chosen thing; a folded box is told by its first nodes."""
    told = [(title, facts) for key in keys[:_MAX_THINGS] for title, facts in _told(report, key)]
    if len(keys) > _MAX_THINGS:
        told.append((f"and {len(keys) - _MAX_THINGS} more in this box", ()))
    return tuple(told)


def _told(report: Report, key: str) -> list[tuple[str, Facts]]:
    kind, at = key[0], int(key[1:])
    tell = {"n": _node, "t": _tensor, "h": _op, "s": _step}.get(kind)
    return [] if tell is None else [tell(report, at)]


def _node(report: Report, at: int) -> tuple[str, Facts]:
    node, row = report.graph.nodes[at], graph_rows(report.graph)[at]
    facts = (
        ("grad_fn", one_line(node.name) if node.op else ""),
        ("role", row.role),
        ("result", row.shape),
        ("device", one_line(node.device or "")),
        ("module", row.module),
        ("line", row.source),
        ("feeds", row.feeds),
    )
    return row.name, _known(facts)


def _tensor(report: Report, at: int) -> tuple[str, Facts]:
    fact = report.tensors[at]
    summary = fact.summary
    span = "" if summary.min is None else f"{words.number(summary.min)} … "
    facts = (
        ("argument", one_line(fact.argument or "")),
        ("type", words.tensor_type(fact)),
        ("device", one_line(fact.device)),
        ("stride", words.shape(fact.stride)),
        ("grad_fn", one_line(fact.grad_fn or "")),
        ("values", span + words.number(summary.max) if span else ""),
        ("mean", "" if summary.mean is None else words.number(summary.mean)),
    )
    return words.tensor_name(fact), _known(facts)


def _op(report: Report, at: int) -> tuple[str, Facts]:
    entry = report.history[at]
    facts = (
        ("number", str(entry.seq)),
        ("arguments", one_line(entry.shapes)),
        ("line", words.spot(entry.source)),
        ("module", one_line(entry.module_path or "")),
        ("phase", entry.phase),
    )
    return one_line(entry.op), _known(facts)


def _step(report: Report, at: int) -> tuple[str, Facts]:
    step = report.provenance[at]
    facts = (("line", words.spot(step.source)), ("note", one_line(step.note or "")))
    return one_line(step.op or "where the values entered"), _known(facts)


def _known(facts: Facts) -> Facts:
    return tuple((name, value) for name, value in facts if value)
