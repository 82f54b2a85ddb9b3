"""The lens in a real JupyterLab: what a reader sees, clicks, types, saves and finds again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.browser import cells
from tests.browser.labpage import (
    CONTRAST,
    LENS,
    TABS,
    WORDS,
    Reader,
    open_notebook,
    run_cell,
    wait_for_lens,
    write_notebook,
)
from tests.browser.labserver import Lab

pytestmark = pytest.mark.browser

WIDTHS = (500, 900, 1400)
CHOSEN_IN_VIEW = """root => {
    const box = root.querySelector('.cl-graph').getBoundingClientRect();
    return [...root.querySelectorAll('g[aria-pressed=true]')].map(at => {
        const own = at.getBoundingClientRect();
        return own.top >= box.top - 1 && own.bottom <= box.bottom + 1
            && own.left >= box.left - 1 && own.right <= box.right + 1;
    });
}"""
"""Which boxes of the chosen node lie wholly within the picture's pane."""
HEADLINE = "y[17] = 10 is outside the 10 classes of logits"


def test_the_verdict_is_seen_without_scrolling(reader: Reader) -> None:
    """Below the cell: what is wrong, that CUDA lives, and where in the code."""
    expect(reader.lens.locator(".cl-title")).to_contain_text(HEADLINE)
    expect(reader.lens.locator(".cl-pill").first).to_contain_text("CUDA is fine")
    cell = reader.page.locator(".jp-CodeCell").nth(1)
    cell.evaluate("cell => cell.scrollIntoView({block: 'start'})")
    expect(reader.lens.locator(".cl-title")).to_be_in_viewport()


def test_a_click_marks_the_same_thing_everywhere(reader: Reader) -> None:
    """A node of the picture is a line of the code and a row of the history."""
    reader.node("F.linear").click()
    reader.settle()
    marked = reader.marked()
    assert any(text.startswith("Linear") and "F.linear" in text for text in marked)
    assert any("logits = net(x)" in text and text[0].isdigit() for text in marked)
    assert any("functional.linear" in text for text in marked)
    expect(reader.lens.locator(".cl-details")).to_contain_text("AddmmBackward0")
    expect(reader.node("F.linear")).to_have_attribute("aria-pressed", "true")
    rows = reader.tab("History").locator("tr[aria-selected=true]")
    expect(rows.first).to_contain_text("functional.linear")


def test_a_click_on_the_code_marks_the_picture(reader: Reader) -> None:
    """The labels are the bad input, and a tensor of the table."""
    reader.lens.locator("strong.cl-bad[data-id]:visible").click()
    reader.settle()
    assert any("bad input" in text for text in reader.marked())
    expect(reader.tab("Tensors").locator("tr[aria-selected=true]")).to_contain_text("int64")


def test_keys_go_from_node_to_node(reader: Reader) -> None:
    """Arrows move, Enter chooses, Escape clears; the notebook's own keys stay out of it."""
    before = reader.page.locator(".jp-Cell.jp-mod-active").get_attribute("data-windowed-list-index")
    reader.node("F.cross_entropy").focus()
    reader.page.keyboard.press("ArrowUp")
    first = reader.focused()
    reader.page.keyboard.press("ArrowUp")
    assert first
    assert reader.focused() not in ("", first)
    reader.page.keyboard.press("ArrowDown")
    assert reader.focused() == first
    reader.page.keyboard.press("Enter")
    reader.settle()
    assert reader.marked()
    reader.page.keyboard.press("Escape")
    reader.settle()
    assert reader.marked() == []
    assert reader.focused() == first
    after = reader.page.locator(".jp-Cell.jp-mod-active").get_attribute("data-windowed-list-index")
    assert after == before


def test_rows_are_walked_by_keys(reader: Reader) -> None:
    """One stop of the Tab key for each table, arrows inside."""
    rows = reader.tab("History").locator("tr[data-id]")
    assert rows.count() > 5
    assert [rows.nth(at).get_attribute("tabindex") for at in range(3)] == ["0", "-1", "-1"]
    rows.first.focus()
    reader.page.keyboard.press("ArrowDown")
    expect(rows.nth(1)).to_be_focused()
    reader.page.keyboard.press(" ")
    expect(rows.nth(1)).to_have_attribute("aria-selected", "true")


def test_the_focus_is_seen(reader: Reader) -> None:
    """Every kind of thing that takes the focus by keyboard shows it."""
    reader.tab("Tensors")
    for query in (
        "g[data-id][tabindex='0']",
        "tr[data-id]:visible",
        ".cl-copy",
        ".cl-tools button",
    ):
        item = reader.lens.locator(query).first
        item.focus()
        reader.page.keyboard.press("Shift")
        script = """item => {
            const own = getComputedStyle(item), shape = item.querySelector('rect,polygon');
            return shape ? getComputedStyle(shape).strokeWidth === '3px'
                : own.outlineStyle !== 'none' && parseFloat(own.outlineWidth) >= 1;
        }"""
        assert item.evaluate(script), query


def test_line_numbers_stay_where_long_code_is_scrolled(reader: Reader) -> None:
    """Once at the edge they stay there, and the text moves under them."""
    script = """code => {
        const gutter = code.querySelector('.cl-gutter'), kept = code.getAttribute('style');
        const left = item => item.getBoundingClientRect().left;
        const text = document.createRange();
        text.selectNodeContents(gutter.nextSibling || gutter.parentElement.lastChild);
        code.style.width = '140px';
        code.scrollLeft = 20;
        const before = [left(gutter), left(text)];
        code.scrollLeft = 60;
        const after = [left(gutter), left(text)];
        code.scrollLeft = 0;
        kept === null ? code.removeAttribute('style') : code.setAttribute('style', kept);
        return [before[0] - after[0], before[1] - after[1]];
    }"""
    moved = reader.lens.locator(".cl-code:visible").first.evaluate(script)
    assert [round(part) for part in moved] == [0, 40]


def test_the_picture_zooms(reader: Reader) -> None:
    """By button and by key, and back."""
    svg = reader.lens.locator(".cl-graph svg")
    width = (svg.bounding_box() or {})["width"]
    reader.lens.locator(".cl-zoom button", has_text="+").click()
    assert (svg.bounding_box() or {})["width"] > width * 1.2
    reader.node("F.linear").focus()
    reader.page.keyboard.press("0")
    assert abs((svg.bounding_box() or {})["width"] - width) < 2


def test_the_picture_has_a_name_and_a_table(reader: Reader) -> None:
    """For those who hear it: a group with a name, buttons with names, the same facts as rows."""
    svg = reader.lens.locator(".cl-graph svg")
    expect(svg).to_have_attribute("role", "group")
    assert "Autograd graph around F.cross_entropy" in (svg.get_attribute("aria-label") or "")
    boxes = reader.lens.locator("g[data-id]")
    assert all(boxes.nth(at).get_attribute("aria-label") for at in range(boxes.count()))
    summary = reader.lens.locator("summary", has_text="nodes as a table")
    summary.click()
    expect(reader.lens.get_by_role("table", name="Autograd graph").first).to_be_visible()
    summary.click()


def test_the_history_filters_as_one_types(reader: Reader) -> None:
    """By op, shape, line or module."""
    tab = reader.tab("History")
    tab.locator("input").fill("relu")
    expect(tab.locator("tr[data-id]").first).to_contain_text("relu")
    expect(tab.locator(".cl-status")).to_contain_text("of")
    tab.locator("input").fill("")
    expect(tab.locator("tr[data-id]").first).not_to_contain_text("relu")


def test_the_fix_is_copied(reader: Reader) -> None:
    """The clipboard holds the code, not the words around it."""
    fix = reader.lens.locator(".cl-try .cl-fix").inner_text()
    reader.lens.locator(".cl-try .cl-copy").click()
    expect(reader.lens.locator(".cl-try .cl-copy")).to_have_text("Copied")
    assert reader.page.evaluate("navigator.clipboard.readText()") == fix


def test_the_picture_works_while_the_kernel_is_busy(reader: Reader, lab: Lab) -> None:
    """A click marks at once, without an answer from Python."""
    (lab.directory / "go_on").unlink(missing_ok=True)
    run_cell(reader.page, 2)
    expect(reader.page.locator(".jp-InputPrompt").nth(2)).to_have_text("[*]:")
    reader.node("relu").click()
    assert any(text.startswith("ReLU") for text in reader.marked())
    reader.page.keyboard.press("ArrowUp")
    assert "conv" in reader.focused()
    expect(reader.page.locator(".jp-InputPrompt").nth(2)).to_have_text("[*]:")
    (lab.directory / "go_on").touch()
    expect(reader.page.locator(".jp-InputPrompt").nth(2)).not_to_have_text("[*]:")


def test_the_saved_page_stands_alone(reader: Reader, lab: Lab, browser: Browser) -> None:
    """Opened from disk, without a network: the same verdict, and no script in it."""
    reader.lens.get_by_role("button", name="Export").click()
    reader.lens.get_by_role("button", name="HTML").click()
    status = reader.lens.get_by_role("status")
    expect(status).to_contain_text("saved as cudalens_report_")
    name = status.inner_text().removeprefix("saved as ")
    reader.lens.get_by_role("button", name="Export").click()
    page, asked = browser.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((lab.directory / name).as_uri())
    expect(page.locator(".cl-title")).to_contain_text(HEADLINE)
    assert page.locator("script").count() == 0
    assert [url for url in asked if not url.startswith("file:")] == []
    page.close()


@pytest.mark.parametrize("theme", ["Light", "Dark", "Light High Contrast", "Dark High Contrast"])
def test_text_can_be_read(
    theme: str, lab: Lab, browser: Browser, opened: Reader, pictures: Path
) -> None:
    """Contrast of every visible text is at least 4.5, and nothing sticks out of a narrow screen."""
    reader = _reopened(lab, browser, opened, theme)
    asked = 7.0 if "High" in theme else 4.5
    for width in (1400, 900, 500):
        reader.page.set_viewport_size({"width": width, "height": 1000})
        reader.lens.scroll_into_view_if_needed()
        for name in TABS:
            reader.tab(name)
            assert reader.pale(asked) == [], name
        reader.tab("Values")
        reader.node("F.linear").click()
        reader.page.mouse.move(0, 0)
        assert reader.pale() == []
        assert reader.lens.evaluate("root => root.scrollWidth - root.clientWidth") <= 1
        name = f"lens_{theme.lower().replace(' ', '_')}_{width}"
        reader.page.screenshot(path=pictures / f"{name}.png")
        reader.page.set_viewport_size({"width": width, "height": 2600})
        reader.lens.screenshot(path=pictures / f"{name}_whole.png")
        reader.node("F.linear").click()
    assert reader.errors == []
    reader.page.context.close()


def _reopened(lab: Lab, browser: Browser, opened: Reader, theme: str) -> Reader:
    _save(opened, lab.directory / "quickstart.ipynb")
    base, _, high = theme.partition(" ")
    lab.use_theme(f"JupyterLab {base}")
    context = browser.new_context(
        viewport={"width": 1400, "height": 1000}, contrast="more" if high else "no-preference"
    )
    reader = Reader(context.new_page())
    open_notebook(reader.page, lab, "quickstart.ipynb")
    wait_for_lens(reader.page)
    reader.page.locator(".jp-Notebook").press("Control+b")
    lab.use_theme("JupyterLab Light")
    return reader


def _hide_files(page: Page) -> None:
    """Close the list of files, which takes half of a narrow page."""
    if page.locator("#filebrowser").is_visible():
        page.locator(".jp-Notebook").press("Control+b")
        expect(page.locator("#filebrowser")).to_be_hidden()


def _save(reader: Reader, path: Path, *, without: str = "\0") -> None:
    """Save the notebook and wait until the report lies in the file, and what is gone does not."""
    for _ in range(100):
        reader.page.locator(".jp-Notebook").press("Control+s")
        reader.page.wait_for_timeout(500)
        text = path.read_text(encoding="utf-8")
        if "cl-card" in text and without not in text:
            return
    raise AssertionError(f"{path.name} was not saved")


def test_a_notebook_is_small_and_reopens(
    reader: Reader, lab: Lab, context: BrowserContext, pictures: Path
) -> None:
    """From disk, with the kernel still there: the lens is back and answers."""
    _save(reader, lab.directory / "quickstart.ipynb")
    size = (lab.directory / "quickstart.ipynb").stat().st_size
    assert size < 300_000
    again = Reader(context.new_page())
    open_notebook(again.page, lab, "quickstart.ipynb")
    wait_for_lens(again.page)
    again.node("F.linear").click()
    expect(again.lens.locator(".cl-details")).to_contain_text("AddmmBackward0")
    again.page.close()


def test_a_saved_view_needs_no_kernel(
    reader: Reader, lab: Lab, browser: Browser, pictures: Path
) -> None:
    """With JupyterLab's "Save Widget State Automatically", after the kernel is gone."""
    lab.save_widgets(True)
    first = Reader(browser.new_page(viewport={"width": 1400, "height": 1000}))
    write_notebook(lab.directory / "kept.ipynb", cells.SETUP, cells.FAILING)
    first.run_failing(lab, "kept.ipynb")
    _save(first, lab.directory / "kept.ipynb")
    first.page.close()
    lab.stop_kernel("kept.ipynb")
    saved = json.loads((lab.directory / "kept.ipynb").read_text(encoding="utf-8"))
    assert "widgets" in saved["metadata"]
    assert (lab.directory / "kept.ipynb").stat().st_size < 300_000
    again = Reader(browser.new_page(viewport={"width": 1400, "height": 1000}))
    open_notebook(again.page, lab, "kept.ipynb")
    wait_for_lens(again.page)
    again.node("F.linear").click()
    assert any("functional.linear" in text for text in again.marked())
    again.page.screenshot(path=pictures / "kept.png")
    again.page.close()
    lab.save_widgets(False)


def test_a_kept_report_needs_neither_kernel_nor_state(
    lab: Lab, browser: Browser, pictures: Path
) -> None:
    """As JupyterLab saves by default: the lens gives its place to the static report."""
    first = Reader(browser.new_page(viewport={"width": 1400, "height": 1000}))
    write_notebook(lab.directory / "plain.ipynb", cells.SETUP, cells.FAILING)
    first.run_failing(lab, "plain.ipynb")
    _save(first, lab.directory / "plain.ipynb")
    open_notebook(first.page, lab, "plain.ipynb")
    wait_for_lens(first.page)
    # A page that was loaded anew knows no output by its name: the lens stays and says so.
    first.lens.get_by_role("button", name="Export").click()
    first.lens.get_by_role("button", name="Keep in notebook").click()
    expect(first.lens.get_by_role("status")).to_contain_text("run it again")
    run_cell(first.page, 1)
    expect(first.lens.get_by_role("status")).to_have_count(0)
    wait_for_lens(first.page)
    first.lens.get_by_role("button", name="Export").click()
    first.lens.get_by_role("button", name="Keep in notebook").click()
    expect(first.lens).to_have_count(0)
    expect(first.page.locator(".jp-RenderedHTMLCommon .cl-title")).to_contain_text(HEADLINE)
    expect(first.page.locator(".jp-RenderedHTMLCommon .cl-title")).to_be_visible()
    _save(first, lab.directory / "plain.ipynb", without="widget-view")
    first.page.close()
    lab.stop_kernel("plain.ipynb")
    text = (lab.directory / "plain.ipynb").read_text(encoding="utf-8")
    assert "widget-view" not in text
    assert "widgets" not in json.loads(text)["metadata"]
    again = browser.new_page(viewport={"width": 1400, "height": 1000})
    open_notebook(again, lab, "plain.ipynb")
    twin = again.locator(".jp-RenderedHTMLCommon .cl-card")
    expect(twin.locator(".cl-title")).to_contain_text(HEADLINE)
    expect(twin.locator(".cl-code")).to_contain_text("i64[32], 3 bad")
    expect(again.get_by_text("Error displaying widget")).to_have_count(0)
    again.screenshot(path=pictures / "kept_static.png")
    again.close()


def test_notebook_7_shows_the_same(
    lab: Lab, opened: Reader, context: BrowserContext, pictures: Path
) -> None:
    """With mouse, keyboard and an answer from Python."""
    _save(opened, lab.directory / "quickstart.ipynb")
    reader = Reader(context.new_page())
    open_notebook(reader.page, lab, "quickstart.ipynb", classic=True)
    run_cell(reader.page, 1)
    wait_for_lens(reader.page)
    reader.errors.clear()  # what Notebook's own extensions said while they loaded
    reader.node("F.linear").click()
    expect(reader.lens.locator(".cl-details")).to_contain_text("AddmmBackward0")
    reader.page.keyboard.press("ArrowDown")
    assert "log_softmax" in reader.focused()
    reader.page.screenshot(path=pictures / "notebook_7.png")
    assert reader.errors == []
    reader.page.close()


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_a_foreign_notebook_shows_the_static_twin(
    theme: str, lab: Lab, opened: Reader, context: BrowserContext, pictures: Path
) -> None:
    """Sent by mail it is not trusted, and yet it has its look, its pictures, no garble."""
    _save(opened, lab.directory / "quickstart.ipynb")
    source = json.loads((lab.directory / "quickstart.ipynb").read_text(encoding="utf-8"))
    source["metadata"]["title"] = "changed by somebody, so its signature does not hold"
    (lab.directory / "mail.ipynb").write_text(json.dumps(source), encoding="utf-8")
    lab.use_theme(f"JupyterLab {theme}")
    page = context.new_page()
    open_notebook(page, lab, "mail.ipynb")
    lab.use_theme("JupyterLab Light")
    twin = page.locator(".jp-RenderedHTMLCommon .cl-card")
    expect(twin.locator(".cl-title")).to_contain_text(HEADLINE)
    expect(page.locator(LENS)).to_have_count(0)
    assert page.locator(".jp-OutputArea-output :is(style, svg, link)").count() == 0
    text = twin.locator("xpath=ancestor::*[contains(@class, 'jp-RenderedHTMLCommon')]").inner_text()
    assert not re.search(r"[{}]|\.cl-|font-size|base64", text)
    assert twin.locator("table").count() >= 4
    expect(twin.locator(".cl-code")).to_contain_text("i64[32], 3 bad")
    drawn = twin.locator("img").evaluate_all("all => all.map(img => img.naturalWidth)")
    assert len(drawn) == 3
    assert min(drawn) > 100
    _hide_files(page)
    assert [item for item in twin.evaluate(CONTRAST) if item["ratio"] < 3.0] == []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 1600})
        twin.screenshot(path=pictures / f"untrusted_{theme.lower()}_{width}.png")
        code = twin.locator(".cl-code:visible").first
        assert code.evaluate("code => code.scrollWidth - code.clientWidth") <= 0
    page.close()


def test_nothing_outside_changes_its_look(reader: Reader) -> None:
    """Styles of the lens stay in the lens: other parts of the page keep theirs without it."""
    script = """() => {
        const looks = ['color', 'backgroundColor', 'fontSize', 'padding', 'display', 'outline'];
        return ['body', '.jp-Cell', '.jp-InputPrompt', '.cm-line', '.jp-Toolbar', 'button']
            .map(query => document.querySelector(query))
            .map(item => looks.map(name => getComputedStyle(item)[name]).join());
    }"""
    page: Page = reader.page
    before: Any = page.evaluate(script)
    page.evaluate(
        "document.querySelectorAll('.cl-lens style').forEach(style => { style.media = 'not all' })"
    )
    without = page.evaluate(script)
    page.evaluate("document.querySelectorAll('.cl-lens style').forEach(s => { s.media = '' })")
    assert before == without


@pytest.mark.parametrize("width", WIDTHS)
def test_what_matters_is_in_view(width: int, reader: Reader, pictures: Path) -> None:
    """Items 20, 21, 26, 27: column 0, the bad expression, Export, words of 9 pixels, the choice."""
    _hide_files(reader.page)
    reader.page.set_viewport_size({"width": width, "height": 1000})
    expect(reader.lens.get_by_role("button", name="Export")).to_be_visible()
    expect(reader.lens.get_by_role("link", name="about this error")).to_be_visible()
    script = """code => {
        const bad = code.querySelector('strong.cl-bad').getBoundingClientRect();
        const pane = code.getBoundingClientRect();
        return [code.scrollLeft, pane.right - bad.right, bad.left - pane.left];
    }"""
    shown = reader.lens.locator(".cl-code:visible").first
    scrolled, right, left = shown.evaluate(script)
    assert scrolled == 0
    assert right > 0
    assert left > 0
    assert min(reader.lens.evaluate(WORDS)) >= 8.99
    reader.node("bad input").click()
    reader.settle()
    assert any(reader.lens.evaluate(CHOSEN_IN_VIEW))
    reader.lens.screenshot(path=pictures / f"chosen_{width}.png")
    reader.page.set_viewport_size({"width": 1400, "height": 1000})


def test_the_contrast_reading_sees_pale_text(reader: Reader) -> None:
    """Grey on white and pale words in a picture are both found."""
    for rule in (".cl-sub{color:#bbb!important}", "svg text{fill:#ddd!important}"):
        handle = reader.page.add_style_tag(content=f".cl-lens {rule}")
        found = reader.pale()
        handle.evaluate("style => style.remove()")
        assert found, rule
    assert reader.pale() == []
