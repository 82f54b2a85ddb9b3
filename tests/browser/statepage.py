"""The lens in a page that has the state of its widgets, a widget manager, and nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import ipywidgets
from ipywidgets.embed import dependency_state, embed_data

from cudalens.render import widget as lens
from tests.browser import bundles
from tests.browser.labpage import WAIT_MS, Reader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from playwright.sync_api import Browser, Route

    from cudalens.core.report import Report

# Not a secure origin, like many a page that shows notebooks, and no host that exists.
ORIGIN = "http://frontend.test"
HOST = Path(__file__).with_name("vscode_host.js")
NO_INLINE_SCRIPT = "script-src 'self' 'unsafe-eval'"
Scheme = Literal["light", "dark"]

# What the extension's page says around a widget; a theme says the rest.
VSCODE_STYLE = """
body { margin: 0; padding: 8px; background: var(--vscode-editor-background);
  color: var(--vscode-editor-foreground); font: 13px var(--vscode-font-family); }
.cell-output-ipywidget-background { background: white !important;
  color: var(--vscode-editor-foreground);
  --jp-ui-font-family: var(--vscode-editor-font-family);
  --jp-widgets-color: var(--vscode-editor-foreground);
  --jp-content-font-color0: var(--vscode-editor-foreground);
  --jp-layout-color0: var(--vscode-input-background);
  --jp-layout-color1: var(--vscode-input-background); }
"""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A lens as a notebook saves it: the state of its widgets and the name of the outermost."""

    state: str
    model: str

    @classmethod
    def of(cls, report: Report) -> Saved:
        """Save the lens of ``report``."""
        view = lens.build(report, keep=lambda: None)
        data = embed_data(views=[view], state=dependency_state([view], drop_defaults=False))
        ipywidgets.Widget.close_all()
        # As nbconvert and ipywidgets.embed write it: no text may end the script element.
        state = json.dumps(data["manager_state"]).replace("</", "<\\/")
        return cls(state=state, model=data["view_specs"][0]["model_id"])


@dataclass(frozen=True, kw_only=True)
class Theme:
    """How a front end says its theme: words for its elements, and style variables."""

    attributes: str = ""
    variables: Mapping[str, str] | None = None

    @property
    def style(self) -> str:
        """Return the variables as a style sheet."""
        said = (self.variables or {}).items()
        return "html{" + "".join(f"--vscode-{name}:{value};" for name, value in said) + "}"


class StatePage:
    """One page in a browser that reaches nothing."""

    def __init__(self, browser: Browser, *, width: int, scheme: Scheme) -> None:
        viewport = {"width": width, "height": 1400}
        context = browser.new_context(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
        self._files: dict[str, tuple[str, str]] = {}
        self._headers: dict[str, str] = {}
        self.asked: list[str] = []
        context.route("**/*", self._answer)
        self.reader = Reader(context.new_page())

    def close(self) -> None:
        """Close the page and its profile."""
        self.reader.page.context.close()

    def plain(self, saved: Saved, theme: Theme, *, scripts: bool) -> Reader:
        """Show the lens as a web page of a notebook does."""
        view = json.dumps({"version_major": 2, "version_minor": 0, "model_id": saved.model})
        kind = "application/vnd.jupyter.widget"
        state = _json_script(f"{kind}-state+json", saved.state)
        head = f'<script src="manager.js"></script>{state}'
        body = "<body>" + _json_script(f"{kind}-view+json", view)
        page = _page(f"<html {theme.attributes}>", head, body)
        return self._show(page, bundles.PLAIN.text(), scripts=scripts)

    def vscode(self, saved: Saved, theme: Theme, *, scripts: bool) -> Reader:
        """Show the lens as VS Code does."""
        style = f"<style>{theme.style}{VSCODE_STYLE}</style>"
        body = f"""<body {theme.attributes} data-model="{saved.model}">
            <div class="cell-output-ipywidget-background"><div id="output"></div></div>
            <script type="application/json" id="state">{saved.state}</script>
            <script type="module" src="host.js"></script>"""
        self._files["/host.js"] = ("text/javascript", HOST.read_text(encoding="utf-8"))
        page = _page("<html>", style, body)
        return self._show(page, bundles.VSCODE.text(), scripts=scripts)

    def _show(self, page: str, manager: str, *, scripts: bool) -> Reader:
        self._files |= {"/": ("text/html", page), "/manager.js": ("text/javascript", manager)}
        # Without inline scripts the lens's own module cannot run; the manager is a file.
        self._headers = {} if scripts else {"Content-Security-Policy": NO_INLINE_SCRIPT}
        self.reader.page.goto(f"{ORIGIN}/")
        ready = ".cl-lens[data-started]" if scripts else ".cl-lens .lm-TabBar-tab"
        self.reader.page.wait_for_selector(ready, state="attached", timeout=WAIT_MS)
        return self.reader

    def _answer(self, route: Route) -> None:
        url = route.request.url
        found = self._files.get(url.removeprefix(ORIGIN))
        if found is None:
            self.asked.append(url)
            route.abort()
            return
        kind, text = found
        route.fulfill(body=text, content_type=f"{kind}; charset=utf-8", headers=self._headers)


def _json_script(kind: str, text: str) -> str:
    return f'<script type="{kind}">{text}</script>'


def _page(opening: str, head: str, body: str) -> str:
    icon = '<link rel="icon" href="data:,">'
    return f'<!DOCTYPE html>{opening}<head><meta charset="utf-8">{icon}{head}</head>{body}</html>'
