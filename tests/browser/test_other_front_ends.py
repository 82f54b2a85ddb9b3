"""The lens where JupyterLab is not: the managers of VS Code and of web pages, with no network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser import bundles
from tests.browser.labpage import TABS, Reader
from tests.browser.statepage import Saved, StatePage, Theme
from tests.builders import REPRESENTATIVE, make_report

pytestmark = pytest.mark.browser

FONTS = {"font-family": "sans-serif", "editor-font-family": "monospace"}
INPUTS = {"light": "#ffffff", "dark": "#3c3c3c"}


def vscode(kind: str, background: str, foreground: str) -> Theme:
    """Return a colour theme of VS Code by its kind and its editor's colours."""
    name = {"light": "vscode-light", "dark": "vscode-dark"}.get(kind, kind)
    colours = {"editor-background": background, "editor-foreground": foreground}
    colours["input-background"] = INPUTS["light" if "light" in kind else "dark"]
    return Theme(attributes=f'class="{name}"', variables={**FONTS, **colours})


VSCODE_THEMES = {
    "light": vscode("light", "#ffffff", "#3b3b3b"),
    "dark": vscode("dark", "#1f1f1f", "#cccccc"),
    "solarized light": vscode("light", "#fdf6e3", "#657b83"),
    "solarized dark": vscode("dark", "#002b36", "#839496"),
    "red": vscode("dark", "#390000", "#f8f8f8"),
    "high contrast": vscode("vscode-high-contrast", "#000000", "#ffffff"),
    "high contrast light": vscode(
        "vscode-high-contrast vscode-high-contrast-light", "#ffffff", "#292929"
    ),
    "no variables": Theme(attributes='class="vscode-dark"'),
}
PLAIN_THEMES = {
    "system": Theme(),
    "light": Theme(attributes='theme="light"'),
    "dark": Theme(attributes='theme="dark"'),
}


@pytest.fixture(scope="session", autouse=True)
def managers() -> None:
    """The two managers, from npm."""
    for bundle in (bundles.VSCODE, bundles.PLAIN):
        try:
            bundle.text()
        except bundles.FetchError as error:
            pytest.skip(f"npm cannot fetch {bundle.package}: {error}")


@pytest.fixture(scope="session")
def saved() -> Saved:
    """The lens of a label out of range."""
    return Saved.of(make_report())


@pytest.fixture
def blank(browser: Browser) -> Iterator[StatePage]:
    """A page of usual width; at the end nothing was asked for and no script has failed."""
    page = StatePage(browser, width=1100, scheme="light")
    yield page
    assert page.asked == []
    assert page.reader.errors == []
    page.close()


def shown(page: StatePage, name: str, saved: Saved, *, scripts: bool) -> Reader:
    if name == "vscode":
        return page.vscode(saved, VSCODE_THEMES["dark"], scripts=scripts)
    return page.plain(saved, PLAIN_THEMES["system"], scripts=scripts)


@pytest.mark.parametrize("scripts", [True, False], ids=["module", "no module"])
@pytest.mark.parametrize("name", ["vscode", "plain"])
def test_the_state_alone_shows_the_report(
    name: str, scripts: bool, blank: StatePage, saved: Saved, pictures: Path
) -> None:
    """Verdict, code, picture and every tab, whether or not our own module can run."""
    reader = shown(blank, name, saved, scripts=scripts)
    expect(reader.lens.locator(".cl-title")).to_contain_text("y[17] = 10 is outside the 10 classes")
    expect(reader.lens.locator(".cl-code").first).to_contain_text("i64[32], 3 bad")
    expect(reader.node("F.cross_entropy")).to_be_visible()
    titles = " ".join(reader.lens.locator(".lm-TabBar-tab").all_inner_texts())
    assert titles == "Values Tensors 2 History 5 Replay on CPU Call stack 2 Environment"
    expect(reader.tab("History").locator("tr", has_text="aten::addmm")).to_be_visible()
    expect(reader.tab("Environment")).to_contain_text("guarded calls")
    expect(reader.tab("Values").locator("svg").first).to_be_visible()
    assert (reader.lens.get_attribute("data-started") is not None) is scripts
    suffix = "" if scripts else "_no_module"
    reader.page.screenshot(path=pictures / f"state_{name}{suffix}.png")


@pytest.mark.parametrize("name", ["vscode", "plain"])
def test_what_needs_a_kernel_is_left_out_without_one(
    name: str, blank: StatePage, saved: Saved
) -> None:
    """One line says so; no button does nothing, and no widget wears a broken chain."""
    reader = shown(blank, name, saved, scripts=True)
    for tool in reader.lens.locator(".cl-tools").all():
        expect(tool).to_be_hidden()
    signs = "items => items.map(item => getComputedStyle(item, '::before').content)"
    said = reader.lens.locator(".jupyter-widgets-disconnected").evaluate_all(signs)
    assert len(said) > 10
    assert set(said) == {"none", '"No kernel behind this view: what needs one is left out."'}
    assert len([text for text in said if text != "none"]) == 1


@pytest.mark.parametrize("name", ["vscode", "plain"])
def test_the_module_links_the_panes_without_a_kernel(
    name: str, blank: StatePage, saved: Saved
) -> None:
    """Click, keys, zoom and copy are the browser's own."""
    reader = shown(blank, name, saved, scripts=True)
    reader.node("F.linear").click()
    marked = reader.marked()
    assert any(text.startswith("Linear") and "F.linear" in text for text in marked)
    assert any("logits = net(x)" in text for text in marked)
    assert any("aten::addmm" in text for text in marked)
    reader.page.keyboard.press("ArrowDown")
    assert "F.cross_entropy" in reader.focused()
    svg = reader.lens.locator(".cl-graph svg")
    width = (svg.bounding_box() or {})["width"]
    reader.lens.locator(".cl-zoom button", has_text="+").click()
    assert (svg.bounding_box() or {})["width"] > width * 1.2
    reader.lens.locator(".cl-try .cl-copy").click()
    expect(reader.lens.locator(".cl-try .cl-copy")).to_have_text("Copied")


@pytest.mark.parametrize("theme", VSCODE_THEMES)
def test_text_can_be_read_in_vs_code(
    theme: str, browser: Browser, saved: Saved, pictures: Path
) -> None:
    """In VS Code's own themes, also where the system asks for the opposite."""
    is_light = "light" in theme
    page = StatePage(browser, width=1100, scheme="dark" if is_light else "light")
    reader = page.vscode(saved, VSCODE_THEMES[theme], scripts=True)
    assert unreadable(reader, 7.0 if "contrast" in theme else 4.5) == []
    canvas = reader.lens.locator(".cl-card").evaluate("card => getComputedStyle(card).background")
    assert (sum(int(part) for part in canvas[4:].split(")")[0].split(",")) > 384) is is_light
    reader.page.screenshot(path=pictures / f"vscode_{theme.replace(' ', '_')}.png")
    page.close()


@pytest.mark.parametrize(
    ("theme", "scheme", "is_light"),
    [
        ("system", "light", True),
        ("system", "dark", False),
        ("light", "dark", True),
        ("dark", "light", False),
    ],
)
def test_text_can_be_read_in_a_page(
    theme: str, scheme: str, is_light: bool, browser: Browser, saved: Saved, pictures: Path
) -> None:
    """By what the system asks for, unless the page says its theme as Colab's outputs do."""
    page = StatePage(browser, width=1100, scheme="light" if scheme == "light" else "dark")
    reader = page.plain(saved, PLAIN_THEMES[theme], scripts=True)
    assert unreadable(reader, 4.5) == []
    canvas = reader.lens.locator(".cl-card").evaluate("card => getComputedStyle(card).background")
    assert ("255, 255, 255" in canvas) is is_light
    reader.page.screenshot(path=pictures / f"page_{theme}_{scheme}.png")
    page.close()


def unreadable(reader: Reader, asked: float) -> list[object]:
    found = []
    for tab in TABS:
        reader.tab(tab)
        found += reader.pale(asked)
    return found


@pytest.mark.parametrize("name", ["vscode", "plain"])
def test_a_narrow_page_holds_it(name: str, browser: Browser, saved: Saved, pictures: Path) -> None:
    """Nothing sticks out at 480 pixels."""
    page = StatePage(browser, width=480, scheme="light")
    reader = shown(page, name, saved, scripts=True)
    for tab in TABS:
        reader.tab(tab)
        script = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert reader.page.evaluate(script) <= 0, tab
    page.close()


def test_every_kind_of_report_comes_up(browser: Browser, pictures: Path) -> None:
    """From the state alone, in VS Code's manager."""
    for name, build in REPRESENTATIVE.items():
        page = StatePage(browser, width=1100, scheme="light")
        reader = page.vscode(Saved.of(build()), VSCODE_THEMES["light"], scripts=True)
        expect(reader.lens.locator(".cl-title")).to_be_visible()
        assert page.asked == [], name
        assert reader.errors == [], name
        assert reader.pale() == [], name
        page.close()
