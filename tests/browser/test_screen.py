"""The report in a real JupyterLab: live, saved, reopened without a kernel, and untrusted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser import cells
from tests.browser.labpage import (
    CONTRAST,
    REPORT,
    ROW,
    Reader,
    open_notebook,
    run_cell,
    save,
    type_and_run,
    write_notebook,
)
from tests.browser.labserver import Lab

pytestmark = pytest.mark.browser

HEIGHT, WITH_TRACEBACK = 400, 580
"""Pixels of a report, and of all that JupyterLab shows below a new cell at the end."""
WINDOW = {"width": 1400, "height": 900}
WIDTHS = (1400, 900, 500)
DEAD = "Error displaying widget"
BOOK = "kinds.ipynb"

CLIPPED = """root => [...root.querySelectorAll('.cl-fail,.cl-mark,.cl-badlabel')]
    .filter(at => at.checkVisibility())
    .filter(at => {
        const pane = at.closest('.cl-code,.cl-panel').getBoundingClientRect();
        const own = at.getBoundingClientRect();
        return own.right > pane.right + 1 || own.left < pane.left - 1;
    })
    .map(at => at.textContent)"""
"""What is marked, or has failed, and lies beyond the edge of its pane."""
NAMELESS = """root => [...root.querySelectorAll('[tabindex],summary,a,img')]
    .filter(at => !(at.getAttribute('aria-label') || at.alt || at.textContent.trim()))
    .map(at => at.outerHTML.slice(0, 80))"""
"""What takes the focus, or is a picture, and has no name."""


class Book:
    """A notebook in which every kind has failed, one after the other."""

    def __init__(self, page: Page) -> None:
        self.reader = Reader(page)
        self.heights: dict[str, tuple[float, float]] = {}


@pytest.fixture(scope="session")
def book(lab: Lab, browser: Browser) -> Iterator[Book]:
    """At the end of a long notebook each kind is typed in and run with Shift-Enter, and saved."""
    page = browser.new_page(viewport=WINDOW)  # type: ignore[arg-type]
    pictures = Path(__file__).parents[2] / "build" / "browser"
    pictures.mkdir(parents=True, exist_ok=True)
    write_notebook(lab.directory / BOOK, cells.SETUP_KINDS, *["# nothing"] * 30)
    book = Book(page)
    open_notebook(page, lab, BOOK)
    run_cell(page, 0)
    for kind, texts in cells.KINDS.items():
        for text in texts:
            cell = type_and_run(page, text)
        report, output = cell.locator(REPORT), cell.locator(".jp-OutputArea")
        expect(report).to_have_count(1)
        page.wait_for_timeout(1000)  # the row below the report comes in a message of its own
        own, whole = report.bounding_box(), output.bounding_box()
        assert own is not None and whole is not None
        book.heights[kind] = (own["height"], whole["height"])
        page.screenshot(path=pictures / f"{kind}.png")
    save(page, lab.directory / BOOK, len(cells.KINDS))
    yield book
    page.close()


@pytest.mark.parametrize("kind", cells.KINDS)
def test_report_and_traceback_are_seen_at_once(kind: str, book: Book) -> None:
    """Behind a real Shift-Enter, from the headline to the traceback's last line."""
    report, whole = book.heights[kind]
    assert report <= HEIGHT
    assert whole <= WITH_TRACEBACK


def test_the_action_is_the_last_line_of_the_traceback_too(book: Book) -> None:
    output = book.reader.page.locator(".jp-OutputArea").filter(has_text="y[9] = 10").first
    expect(output).to_contain_text("try: F.cross_entropy(out, y - 1)")


@pytest.mark.parametrize("width", WIDTHS)
def test_everything_can_be_read_at_every_width(width: int, book: Book, pictures: Path) -> None:
    """Contrast, nothing beyond an edge, no word of a mark cut off; every drawer too."""
    page = book.reader.page
    page.set_viewport_size({"width": width, "height": 1400})
    if page.locator("#filebrowser").is_visible() and width < 1400:
        page.locator(".jp-Notebook").press("Control+b")
        expect(page.locator("#filebrowser")).to_be_hidden()
    reports = page.locator(REPORT)
    for at in range(reports.count()):
        report = reports.nth(at)
        report.scroll_into_view_if_needed()
        report.screenshot(path=pictures / f"report_{at}_{width}.png")
        assert report.evaluate(CLIPPED) == []
        assert report.evaluate("root => root.scrollWidth - root.clientWidth") <= 1
    for name in ("Tensors", "History", "Details", "Share", "Graph"):
        page.evaluate(
            """name => document.querySelectorAll('.cl-drawer').forEach(at => {
                if (at.querySelector('summary').textContent.startsWith(name)) at.open = true;
            })""",
            name,
        )
        assert book.reader.pale() == [], name
    assert book.reader.errors == []
    page.set_viewport_size(WINDOW)  # type: ignore[arg-type]


def test_the_contrast_reading_sees_pale_text(book: Book) -> None:
    handle = book.reader.page.add_style_tag(content=".cudalens .cl-sub{color:#bbb!important}")
    found = book.reader.pale()
    handle.evaluate("style => style.remove()")
    assert found


def test_drawers_are_opened_by_keyboard_one_at_a_time(book: Book) -> None:
    """Tab goes from one to the next, Enter opens, the focus is seen, and what has it has a name."""
    page, report = book.reader.page, book.reader.report
    summary = report.locator(".cl-drawer > summary")
    summary.nth(1).focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    outline = "at => getComputedStyle(at).outlineStyle"
    assert summary.nth(1).evaluate(outline) == "solid"
    opened = report.locator(".cl-drawer[open]")
    expect(opened).to_have_count(1)
    summary.nth(2).focus()
    page.keyboard.press("Enter")
    expect(opened).to_have_count(1)
    expect(opened.locator("summary").first).to_contain_text("Origin")
    assert page.locator(REPORT).evaluate_all(f"all => all.flatMap({NAMELESS})") == []
    expect(page.get_by_role("region", name="cudalens report").first).to_be_visible()


def test_nothing_outside_changes_its_look(book: Book) -> None:
    """Other parts of the page keep their look without the report's style sheet."""
    script = """() => {
        const looks = ['color', 'backgroundColor', 'fontSize', 'padding', 'display', 'outline'];
        return ['body', '.jp-Cell', '.jp-InputPrompt', '.cm-line', '.jp-Toolbar', 'button']
            .map(query => document.querySelector(query))
            .map(item => looks.map(name => getComputedStyle(item)[name]).join());
    }"""
    sheets = f"on => document.querySelectorAll('{REPORT}~link').forEach(at => at.disabled = !on)"
    page = book.reader.page
    before = page.evaluate(script)
    assert page.locator(f"{REPORT}~link").count() >= len(cells.KINDS)
    page.evaluate(sheets, False)
    without = page.evaluate(script)
    page.evaluate(sheets, True)
    assert before == without


@pytest.mark.parametrize("front_end", ["lab", "classic", "dark"])
def test_a_saved_notebook_shows_every_report_without_a_kernel(
    front_end: str, book: Book, lab: Lab, browser: Browser, pictures: Path
) -> None:
    """In JupyterLab and in Notebook 7, with no word of a widget that is dead."""
    kept = lab.directory / "kept.ipynb"
    kept.write_bytes((lab.directory / BOOK).read_bytes())
    lab.stop_kernel("kept.ipynb")
    lab.use_theme(f"JupyterLab {'Dark' if front_end == 'dark' else 'Light'}")
    page = browser.new_page(viewport=WINDOW)  # type: ignore[arg-type]
    reader = Reader(page)
    page.goto((lab.classic if front_end == "classic" else lab.notebook)("kept.ipynb"))
    expect(page.locator(f"{REPORT} .cl-title")).to_have_count(len(cells.KINDS))
    page.wait_for_timeout(1500)
    lab.use_theme("JupyterLab Light")
    assert not any(item.is_visible() for item in page.get_by_text(DEAD).all())
    reader.report.scroll_into_view_if_needed()
    reader.report.locator("summary", has_text="Details").click()
    expect(reader.report).to_contain_text("ran on")
    canvas = reader.report.locator(".cl-card").evaluate("at => getComputedStyle(at).background")
    is_light = sum(map(int, re.findall(r"\d+", canvas)[:3])) > 384
    assert is_light is (front_end != "dark")
    assert reader.pale() == []
    page.screenshot(path=pictures / f"reopened_{front_end}.png")
    page.close()


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_a_foreign_notebook_shows_the_whole_report(
    theme: str, book: Book, lab: Lab, browser: Browser, pictures: Path
) -> None:
    """Sent by mail it is not trusted, and yet it has its look, its pictures and no garble."""
    source = json.loads((lab.directory / BOOK).read_text(encoding="utf-8"))
    source["metadata"]["title"] = "changed by somebody, so its signature does not hold"
    for cell in source["cells"]:
        cell["metadata"].pop("trusted", None)
    (lab.directory / "mail.ipynb").write_text(json.dumps(source), encoding="utf-8")
    lab.use_theme(f"JupyterLab {theme}")
    page = browser.new_page(viewport=WINDOW)  # type: ignore[arg-type]
    page.goto(lab.notebook("mail.ipynb"))
    titles = page.locator(".jp-RenderedHTMLCommon .cl-title")
    expect(titles).to_have_count(len(cells.KINDS))
    page.wait_for_timeout(1500)
    lab.use_theme("JupyterLab Light")
    assert page.locator(".jp-OutputArea-output :is(style, svg, link, script)").count() == 0
    assert not any(item.is_visible() for item in page.get_by_text(DEAD).all())
    reports = page.locator(".jp-RenderedHTMLCommon .cl-card")
    for at in range(reports.count()):
        text = reports.nth(at).inner_text()
        assert not re.search(r"\.cl-|font-size|base64", text)
        pale = [it for it in reports.nth(at).evaluate(CONTRAST) if it["ratio"] < 3.0]
        assert pale == []
    expect(reports.first.locator(".cl-code")).to_contain_text("i64[32], 3 bad")
    drawn = page.locator(".cl-card img").evaluate_all("all => all.map(img => img.naturalWidth)")
    assert len(drawn) >= 4 and min(drawn) > 50
    reports.first.scroll_into_view_if_needed()
    page.screenshot(path=pictures / f"untrusted_{theme.lower()}.png")
    page.close()


def choose(choice: Locator, label: re.Pattern[str]) -> None:
    """Choose the first option with such a label.

    JupyterLab draws a cell anew when it comes into view again, and the options of a drop-down list
    come after the list, so the option is waited for.
    """
    option = choice.locator("option").filter(has_text=label).first
    expect(option).to_be_attached()
    choice.select_option(option.inner_text())


def test_the_live_row_answers(book: Book, pictures: Path) -> None:
    """A tensor, a walk through the graph, the slices of a mask, and a search among the calls."""
    page = book.reader.page
    row = page.locator(ROW).first
    row.scroll_into_view_if_needed()
    choice = row.locator("select")
    choose(choice, re.compile("^tensor"))
    expect(row.locator("dl")).to_contain_text("how often")
    choose(choice, re.compile("F.cross_entropy"))
    row.get_by_role("button", name="log_softmax").first.click()
    expect(row.locator("dl")).to_contain_text("LogSoftmaxBackward0")
    page.screenshot(path=pictures / "walk.png")
    row.get_by_placeholder("search").fill("linear")
    expect(row.locator("table")).to_contain_text("linear")
    row.get_by_placeholder("search").fill("")
    expect(row.locator("table")).to_have_count(0)
    masks = page.locator(ROW).nth(1)
    masks.locator("select").select_option(index=1)
    image = masks.locator("img")
    before = image.get_attribute("src")
    masks.locator(".noUi-handle").focus()
    page.keyboard.press("ArrowRight")
    expect(image).not_to_have_attribute("src", before or "")
    page.screenshot(path=pictures / "slices.png")
    assert book.reader.errors == []
