"""Small pieces of core ipywidgets that the panes are put together from."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets


def markup(html: str = "", *names: str) -> ipywidgets.HTML:
    """Show HTML of ours; ``names`` are its classes."""
    widget = ipywidgets.HTML(html)
    widget.add_class("cl-part")
    for name in names:
        widget.add_class(name)
    return widget


def button(label: str, tip: str, pressed: Callable[[], None]) -> ipywidgets.Button:
    """Return a button that calls ``pressed``."""
    widget = ipywidgets.Button(description=label, tooltip=tip)
    widget.layout.width = "auto"
    widget.on_click(lambda _: pressed())
    return widget


def stack(*children: ipywidgets.Widget | None, name: str = "") -> ipywidgets.VBox:
    """Put widgets below each other; those that are ``None`` are left out."""
    return _box(ipywidgets.VBox, children, name)


def line(*children: ipywidgets.Widget | None, name: str = "") -> ipywidgets.HBox:
    """Put widgets beside each other, wrapping where there is no room."""
    widget = _box(ipywidgets.HBox, children, name)
    widget.layout.flex_flow = "row wrap"
    return widget


def _box(
    kind: type[ipywidgets.Box], children: tuple[ipywidgets.Widget | None, ...], name: str
) -> ipywidgets.Box:
    widget = kind([child for child in children if child is not None])
    # ipywidgets scrolls what overflows by default, which cuts focus rings and long code.
    widget.layout.overflow = "visible"
    for item in ("cl-box", *name.split()):
        widget.add_class(item)
    return widget
