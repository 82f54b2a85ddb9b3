"""The report where JupyterLab is not: VS Code's notebook page, an exported notebook, a saved page.

Nothing of it needs a script, a kernel or a network.
"""

from __future__ import annotations

from functools import partial

import nbformat
import pytest
from nbconvert import HTMLExporter
from playwright.sync_api import Browser, Page, Route, expect

from cudalens.core.report import Report
from cudalens.render.html import render_fragment, render_page
from tests.browser.labpage import WAIT_MS, Reader, eventually
from tests.builders import REPRESENTATIVE

pytestmark = pytest.mark.browser

ORIGIN = "http://frontend.test/"
VSCODE = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src https: http: data:; font-src https:;"
)
"""What VS Code's notebook page allows: styles within the page, and none from an address."""
THEMES = {
    "light": ("vscode-light", "#ffffff", "#3b3b3b"),
    "dark": ("vscode-dark", "#1f1f1f", "#cccccc"),
    "solarized": ("vscode-dark", "#002b36", "#93a1a1"),
}
KINDS = ("labels", "segmentation", "host_error", "autograd_error", "lost_context", "silent")


def exported(report: Report) -> str:
    """Return a notebook with the report as nbconvert exports it, dead row included."""
    row = {"application/vnd.jupyter.widget-view+json": {"model_id": "gone"}, "text/plain": ""}
    bundles = ({"text/html": render_fragment(report)}, row)
    outputs = [nbformat.v4.new_output("display_data", data=data) for data in bundles]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("f()", outputs=outputs)])
    return str(HTMLExporter().from_notebook_node(book)[0])


def page_with(browser: Browser, body: str, *, csp: str = "", scheme: str = "light") -> Reader:
    """Show a page in a browser that reaches nothing else."""
    options = {"viewport": {"width": 900, "height": 900}, "color_scheme": scheme}
    context = browser.new_context(**options)  # type: ignore[arg-type]

    def answer(route: Route) -> None:
        if route.request.url != ORIGIN:
            route.abort()
            return
        headers = {"Content-Security-Policy": csp} if csp else {}
        route.fulfill(body=body, content_type="text/html; charset=utf-8", headers=headers)

    context.route("**/*", answer)
    context.set_default_timeout(WAIT_MS)
    reader = Reader(context.new_page())
    reader.page.goto(ORIGIN)
    return reader


def fits(page: Page) -> bool:
    """Whether nothing sticks out of a window that is 500 pixels wide by now."""
    script = """() => innerWidth === 500
        && document.body.scrollWidth <= document.body.clientWidth + 1"""
    return bool(page.evaluate(script))


@pytest.mark.parametrize("theme", THEMES)
def test_vs_code_shows_the_whole_report(theme: str, browser: Browser) -> None:
    """It takes no style sheet from an address: then each element has its own look."""
    name, ground, text = THEMES[theme]
    drawn = "".join(render_fragment(REPRESENTATIVE[kind]()) for kind in KINDS)
    style = f"--vscode-editor-background:{ground};background:{ground};color:{text}"
    body = f'<!DOCTYPE html><body class="{name}" style="{style}">{drawn}</body>'
    reader = page_with(browser, body, csp=VSCODE)
    expect(reader.page.locator(".cl-title")).to_have_count(len(KINDS))
    expect(reader.report.locator(".cl-fix")).to_have_text("F.cross_entropy(logits, y - 1)")
    reader.report.locator("summary", has_text="Details").click()
    expect(reader.report).to_contain_text("ran on")
    assert reader.pale(3.0) == []
    reader.page.context.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_saved_page_can_be_read(kind: str, scheme: str, browser: Browser) -> None:
    """By what the system asks for; nothing sticks out of a narrow window."""
    reader = page_with(browser, render_page(REPRESENTATIVE[kind]()), scheme=scheme)
    canvas = reader.report.locator(".cl-card").evaluate("at => getComputedStyle(at).background")
    assert ("255, 255, 255" in canvas) is (scheme == "light")
    for at in range(reader.report.locator(".cl-drawer").count()):
        reader.report.locator(".cl-drawer > summary").nth(at).click()
        assert reader.pale() == []
    reader.page.set_viewport_size({"width": 500, "height": 900})
    eventually(partial(fits, reader.page), True)
    assert reader.page.locator("script").count() == 0
    reader.page.context.close()


def test_an_exported_notebook_has_the_report_and_no_dead_widget(browser: Browser) -> None:
    reader = page_with(browser, exported(REPRESENTATIVE["labels"]()))
    expect(reader.report.locator(".cl-title")).to_contain_text("y[17] = 10")
    assert reader.pale() == []
    assert "Error" not in reader.page.locator("body").inner_text()
    reader.page.context.close()
