"""Small pieces that the panes are put together from, and the facts of a chosen thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import ipywidgets

from cudalens.core.report import Report
from cudalens.render import words
from cudalens.render.fold import is_view
from cudalens.render.graph import graph_rows
from cudalens.render.words import one_line

_shared: dict[object, ipywidgets.Widget] = {}


def shared(make: Callable[..., ipywidgets.Widget], *args: str, **traits: str) -> ipywidgets.Widget:
    """Return the one widget of these traits that all views have in common.

    One for each part would make a saved notebook larger by a kilobyte a part.
    """
    key = (make, args, *traits.items())
    if key not in _shared or _shared[key].comm is None:  # not made yet, or closed by somebody
        _shared[key] = make(*args, **traits)
    return _shared[key]


def markup(html: str = "", *names: str) -> ipywidgets.HTML:
    """Show HTML of ours; ``names`` are its classes."""
    style = shared(ipywidgets.HTML.style.klass)  # ipywidgets 7 has no HTMLStyle
    widget = ipywidgets.HTML(html, layout=shared(ipywidgets.Layout), style=style)
    return _classed(widget, "cl-part", *names)


def button(label: str, tip: str, pressed: Callable[[], None]) -> ipywidgets.Button:
    """Return a button that calls ``pressed``."""
    looks = {"layout": shared(ipywidgets.Layout, width="auto")}
    looks["style"] = shared(ipywidgets.ButtonStyle)
    widget = ipywidgets.Button(description=label, tooltip=tip, **looks)
    widget.on_click(lambda _: pressed())
    return widget


def stack(*children: ipywidgets.Widget | None, name: str = "") -> ipywidgets.VBox:
    """Put widgets below each other; those that are ``None`` are left out."""
    return _box(ipywidgets.VBox, children, name)


def line(*children: ipywidgets.Widget | None, name: str = "") -> ipywidgets.HBox:
    """Put widgets beside each other, wrapping where there is no room."""
    return _box(ipywidgets.HBox, children, name, flex_flow="row wrap")


def _box(
    kind: type[ipywidgets.Box],
    children: tuple[ipywidgets.Widget | None, ...],
    name: str,
    **layout: str,
) -> ipywidgets.Box:
    # ipywidgets scrolls what overflows by default, which cuts focus rings and long code.
    looks = shared(ipywidgets.Layout, overflow="visible", **layout)
    widget = kind([child for child in children if child is not None], layout=looks)
    return _classed(widget, "cl-box", *name.split())


def _classed(widget: ipywidgets.DOMWidget, *names: str) -> Any:
    for name in names:
        widget.add_class(name)
    return widget


Facts: TypeAlias = tuple[tuple[str, str], ...]
_MAX_THINGS = 3


def details(report: Report, keys: tuple[str, ...]) -> tuple[tuple[str, Facts], ...]:
    """Return title and facts of each chosen thing; a box of several nodes by its first ones.

    Views and transposes of a module go without saying.
    """
    nodes = report.graph.nodes
    main = [key for key in keys if key[0] != "n" or not is_view(nodes[int(key[1:])])]
    keys = tuple(main or keys)
    sections: list[tuple[str, Facts]] = []
    for key in keys[:_MAX_THINGS]:
        if tell := _THINGS.get(key[0]):
            title, facts = tell(report, int(key[1:]))
            sections.append((title, tuple((name, value) for name, value in facts if value)))
    if len(keys) > _MAX_THINGS:
        sections.append((f"and {len(keys) - _MAX_THINGS} more in this box", ()))
    return tuple(sections)


def _node(report: Report, at: int) -> tuple[str, Facts]:
    node, row = report.graph.nodes[at], graph_rows(report.graph)[at]
    facts = (
        ("grad_fn", one_line(node.name) if node.op else ""),
        ("role", row.role),
        ("result", row.shape),
        ("went in", "" if node.value is None else words.format_number(node.value)),
        ("device", one_line(node.device or "")),
        ("module", row.module),
        ("line", row.source),
        ("feeds", row.feeds),
    )
    return row.name, facts


def _tensor(report: Report, at: int) -> tuple[str, Facts]:
    fact = report.tensors[at]
    summary = fact.summary
    span = "" if summary.min is None else f"{words.format_number(summary.min)} … "
    facts = (
        ("argument", one_line(fact.argument or "")),
        ("type", words.format_tensor_type(fact)),
        ("device", one_line(fact.device)),
        ("stride", words.format_shape(fact.stride)),
        ("grad_fn", one_line(fact.grad_fn or "")),
        ("values", span + words.format_number(summary.max) if span else ""),
        ("mean", "" if summary.mean is None else words.format_number(summary.mean)),
    )
    return words.tensor_name(fact), facts


def _op(report: Report, at: int) -> tuple[str, Facts]:
    entry = report.history[at]
    facts = (
        ("number", str(entry.seq)),
        ("arguments", one_line(entry.shapes)),
        ("line", words.format_line(entry.source)),
        ("module", one_line(entry.module_path or "")),
        ("phase", entry.phase),
    )
    return one_line(entry.op), facts


def _step(report: Report, at: int) -> tuple[str, Facts]:
    step = words.way(report)[at]
    facts = (("line", words.format_line(step.source)), ("note", one_line(step.note or "")))
    return one_line(step.op or "where the values entered"), facts


_THINGS = {"n": _node, "t": _tensor, "h": _op, "s": _step}
