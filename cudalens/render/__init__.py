"""Draws a report: text, HTML, widget.  Nothing about the failure is computed here.

Renderers share a shape, not a base class, and are loaded when they are asked for, so that
ipywidgets, jinja2 and networkx stay away from a process that shows nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from cudalens.core._python import same_random_state

RENDERERS: dict[str, str] = {
    "text": "cudalens.render.text:render",
    "html": "cudalens.render.html:render_page",
    "fragment": "cudalens.render.html:render_fragment",
    "widget": "cudalens.render.widget:build",
}
"""Name of a view to the dotted path of the function that draws it."""


def renderer(name: str) -> Callable[..., Any]:
    """Load the function that draws the view ``name``.

    Raises:
        ValueError: there is no such view.
    """
    try:
        module, _, function = RENDERERS[name].partition(":")
    except KeyError:
        msg = f"no renderer is called {name!r}: choose one of {', '.join(RENDERERS)}"
        raise ValueError(msg) from None
    with same_random_state():
        drawn: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return drawn
