"""The report in a real JupyterLab: live, saved, reopened without a kernel, and untrusted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, ViewportSize, expect

from tests.browser import cells
from tests.browser.labpage import (
    CONTRAST,
    KERNEL,
    REPORT,
    ROW,
    Box,
    Reader,
    eventually,
    measured,
    new_page,
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
WINDOW: ViewportSize = {"width": 1400, "height": 900}
WIDTHS = (1400, 900, 500)
DEAD = "Error displaying widget"
PANE = ".jp-NotebookPanel-notebook"
"""The part of the window that the cells scroll in."""
BOOK = "kinds.ipynb"

FOLLOWED = """width => {
    const pane = document.querySelector('.jp-NotebookPanel-notebook').getBoundingClientRect();
    return innerWidth === width && pane.right <= width && pane.right > width - 60;
}"""
"""The notebook ends where the window does, but for the bar at its side."""
IS_LIGHT = """card => {
    const [red, green, blue] = getComputedStyle(card).backgroundColor.match(/[0-9]+/g);
    return +red + +green + +blue > 384;
}"""

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
        self.boxes: dict[str, tuple[Box, Box, Box]] = {}
        """Where the report, the whole output and the notebook's pane lay after Shift-Enter."""
        self.narrow: dict[str, tuple[Box, Box]] = {}
        """The report and the whole output in a window of 900 pixels without the bar at its side."""


@pytest.fixture(scope="session")
def book(lab: Lab, browser: Browser) -> Iterator[Book]:
    """At the end of a long notebook each kind is typed in and run with Shift-Enter, and saved."""
    page = new_page(browser, viewport=WINDOW)
    pictures = Path(__file__).parents[2] / "build" / "browser"
    pictures.mkdir(parents=True, exist_ok=True)
    write_notebook(lab.directory / BOOK, cells.SETUP_KINDS, *["# nothing"] * 30)
    book = Book(page)
    open_notebook(page, lab, BOOK)
    run_cell(page, 0)
    for kind, texts in cells.KINDS.items():
        for text in texts:
            cell = type_and_run(page, text)
        expect(cell.locator(REPORT)).to_have_count(1)
        # The row below the report comes in messages of its own.
        expect(cell.locator(f"{ROW} button").last).to_be_visible()
        parts = (cell.locator(REPORT), cell.locator(".jp-OutputArea"), page.locator(PANE))
        report, output, pane = measured(*parts)
        book.boxes[kind] = (report, output, pane)
        page.screenshot(path=pictures / f"{kind}.png")
    save(page, lab.directory / BOOK, len(cells.KINDS))
    narrow(page, 900, 900)
    outputs = page.locator(f".jp-OutputArea:has({REPORT})")
    for at, kind in enumerate(cells.KINDS):
        report, output = measured(outputs.nth(at).locator(REPORT), outputs.nth(at))
        book.narrow[kind] = (report, output)
    resize(page, WINDOW)
    yield book
    page.close()


@pytest.fixture
def reader(book: Book) -> Iterator[Reader]:
    """The reader of that notebook, whose window is afterwards as it was, with closed drawers."""
    yield book.reader
    page = book.reader.page
    page.evaluate("() => document.querySelectorAll('details[open]').forEach(at => at.open = false)")
    resize(page, WINDOW)


def narrow(page: Page, width: int, height: int = 1400) -> None:
    """Give the window a width; a narrow one has no room for the bar at its side."""
    resize(page, {"width": width, "height": height})
    if page.locator("#filebrowser").is_visible() and width < WINDOW["width"]:
        page.locator(".jp-Notebook").press("Control+b")
        expect(page.locator("#filebrowser")).to_be_hidden()


def resize(page: Page, size: ViewportSize) -> None:
    """Give the window another size and wait until JupyterLab has followed."""
    page.set_viewport_size(size)
    page.wait_for_function(FOLLOWED, arg=size["width"])


@pytest.mark.parametrize("kind", cells.KINDS)
def test_report_and_traceback_are_seen_at_once(kind: str, book: Book) -> None:
    """Behind a real Shift-Enter, from the headline to the traceback's last line."""
    report, output, pane = book.boxes[kind]
    assert report.height <= HEIGHT
    assert output.height <= WITH_TRACEBACK
    assert pane.y <= report.y
    assert output.bottom <= pane.bottom


@pytest.mark.parametrize("kind", cells.KINDS)
def test_heights_hold_in_a_narrower_window(kind: str, book: Book) -> None:
    report, output = book.narrow[kind]
    assert report.height <= HEIGHT
    assert output.height <= WITH_TRACEBACK


def test_the_end_of_the_traceback_is_seen_below_a_cell_at_the_edge(
    lab: Lab, browser: Browser
) -> None:
    """JupyterLab then puts the new cell into the middle: half of the window shows the output."""
    write_notebook(lab.directory / "edge.ipynb", cells.SETUP_KINDS, *["# nothing"] * 30)
    page = new_page(browser, viewport=WINDOW)
    open_notebook(page, lab, "edge.ipynb")
    run_cell(page, 0)
    cell = type_and_run(page, cells.KINDS["in_place"][0], room=0)
    output, pane = measured(cell.locator(".jp-OutputArea"), page.locator(PANE))
    assert pane.y <= output.bottom <= pane.bottom
    last = cell.locator(".jp-OutputArea-output").last
    assert last.inner_text().rstrip().splitlines()[-1].startswith("cudalens: hint: ")
    page.close()


def test_the_action_is_the_last_line_of_the_traceback_too(book: Book) -> None:
    output = book.reader.page.locator(".jp-OutputArea").filter(has_text="y[9] = 10").first
    expect(output).to_contain_text("try: F.cross_entropy(out, y - 1)")


@pytest.mark.parametrize("width", WIDTHS)
def test_everything_can_be_read_at_every_width(width: int, reader: Reader, pictures: Path) -> None:
    """Contrast, nothing beyond an edge, no word of a mark cut off; every drawer too."""
    page = reader.page
    narrow(page, width)
    reports = page.locator(REPORT)
    for at in range(reports.count()):
        report = reports.nth(at)
        report.scroll_into_view_if_needed()
        report.screenshot(path=pictures / f"report_{at}_{width}.png")
        eventually(partial(report.evaluate, CLIPPED), [])
        eventually(
            partial(report.evaluate, "root => root.scrollWidth <= root.clientWidth + 1"), True
        )
    for name in ("Tensors", "History", "Details", "Share", "Graph"):
        page.evaluate(
            """name => document.querySelectorAll('.cl-drawer').forEach(at => {
                if (at.querySelector('summary').textContent.startsWith(name)) at.open = true;
            })""",
            name,
        )
        eventually(reader.pale, [], name)
    assert reader.errors == []


def test_the_contrast_reading_sees_pale_text(reader: Reader) -> None:
    handle = reader.page.add_style_tag(content=".cudalens .cl-sub{color:#bbb!important}")
    found = reader.pale()
    handle.evaluate("style => style.remove()")
    assert found


def test_drawers_are_opened_by_keyboard_one_at_a_time(reader: Reader) -> None:
    """Tab goes from one to the next, Enter opens, the focus is seen, and what has it has a name."""
    page, report = reader.page, reader.report
    summary = report.locator(".cl-drawer > summary")
    opened = report.locator(".cl-drawer[open]")
    summary.nth(1).press("Enter")
    expect(opened).to_have_count(1)
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    expect(summary.nth(1)).to_be_focused()
    expect(summary.nth(1)).to_have_css("outline-style", "solid")
    summary.nth(2).press("Enter")
    expect(opened.locator("summary").first).to_contain_text("Origin")
    expect(opened).to_have_count(1)
    assert page.locator(REPORT).evaluate_all(f"all => all.flatMap({NAMELESS})") == []
    expect(page.get_by_role("region", name="cudalens report").first).to_be_visible()


def test_nothing_outside_changes_its_look(reader: Reader) -> None:
    """Other parts of the page keep their look without the report's style sheet."""
    script = """() => {
        const looks = ['color', 'backgroundColor', 'fontSize', 'padding', 'display', 'outline'];
        return ['body', '.jp-Cell', '.jp-InputPrompt', '.cm-line', '.jp-Toolbar', 'button']
            .map(query => document.querySelector(query))
            .map(item => looks.map(name => getComputedStyle(item)[name]).join());
    }"""
    sheets = f"on => document.querySelectorAll('{REPORT}~link').forEach(at => at.disabled = !on)"
    page = reader.page
    assert page.locator(f"{REPORT}~link").count() >= len(cells.KINDS)
    page.evaluate(sheets, False)
    without = page.evaluate(script)
    page.evaluate(sheets, True)
    # A style sheet that is asked for again comes a moment later.
    all_there = f"[...document.querySelectorAll('{REPORT}~link')].every(at => at.sheet)"
    page.wait_for_function(all_there)
    assert page.evaluate(script) == without


@contextmanager
def opened(lab: Lab, browser: Browser, address: str, *, theme: str = "Light") -> Iterator[Page]:
    """A page of its own under a theme, drawn whole; later pages are light again."""
    lab.use_theme(f"JupyterLab {theme}")
    page = new_page(browser, viewport=WINDOW)
    try:
        page.goto(address)
        expect(
            page.locator(f"body[data-jp-theme-light={str(theme == 'Light').lower()}]")
        ).to_be_attached()
        yield page
    finally:
        page.close()
        lab.use_theme("JupyterLab Light")


@pytest.mark.parametrize("front_end", ["lab", "classic", "dark"])
def test_a_saved_notebook_shows_every_report_without_a_kernel(
    front_end: str, book: Book, lab: Lab, browser: Browser, pictures: Path
) -> None:
    """In JupyterLab and in Notebook 7, with no word of a widget that is dead."""
    kept = lab.directory / "kept.ipynb"
    kept.write_bytes((lab.directory / BOOK).read_bytes())
    lab.stop_kernel("kept.ipynb")
    address = (lab.classic if front_end == "classic" else lab.notebook)("kept.ipynb")
    theme = "Dark" if front_end == "dark" else "Light"
    with opened(lab, browser, address, theme=theme) as page:
        reader = Reader(page)
        expect(page.locator(f"{REPORT} .cl-title")).to_have_count(len(cells.KINDS))
        # The words of the dead rows come late, when a new kernel has no model for them.
        dead = page.get_by_text(DEAD)
        expect(dead).to_have_count(len(cells.KINDS))
        eventually(lambda: [item.is_visible() for item in dead.all()], [False] * len(cells.KINDS))
        reader.report.scroll_into_view_if_needed()
        reader.report.locator("summary", has_text="Details").click()
        expect(reader.report).to_contain_text("ran on")
        card = reader.report.locator(".cl-card")
        eventually(partial(card.evaluate, IS_LIGHT), theme == "Light")
        eventually(reader.pale, [])
        page.screenshot(path=pictures / f"reopened_{front_end}.png")


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
    with opened(lab, browser, lab.notebook("mail.ipynb"), theme=theme) as page:
        titles = page.locator(".jp-RenderedHTMLCommon .cl-title")
        expect(titles).to_have_count(len(cells.KINDS))
        # What is not trusted has no widget at all, also when the kernel is there.
        page.wait_for_function(f"{KERNEL}?.status === 'idle'")
        expect(page.get_by_text(DEAD)).to_have_count(0)
        assert page.locator(".jp-OutputArea-output :is(style, svg, link, script)").count() == 0
        reports = page.locator(".jp-RenderedHTMLCommon .cl-card")
        for at in range(reports.count()):
            report = reports.nth(at)
            assert not re.search(r"\.cl-|font-size|base64", report.inner_text())
            pale = partial(report.evaluate, f"at => ({CONTRAST})(at).filter(it => it.ratio < 3)")
            eventually(pale, [])
        expect(reports.first.locator(".cl-code")).to_contain_text("i64[32], 3 bad")
        images = page.locator(".cl-card img")
        assert images.count() >= 4
        # Each is as large as its picture, which its data have to be read for.
        eventually(
            partial(images.evaluate_all, "all => all.filter(img => img.naturalWidth <= 50)"), []
        )
        reports.first.scroll_into_view_if_needed()
        page.screenshot(path=pictures / f"untrusted_{theme.lower()}.png")


def choose(choice: Locator, label: re.Pattern[str]) -> None:
    """Choose the first option with such a label.

    The options of a drop-down list come after the list, so the option is waited for.  It is chosen
    by its place: what is out of view has a text with other blanks than its label.
    """
    option = choice.locator("option").filter(has_text=label).first
    expect(option).to_be_attached()
    choice.select_option(index=option.evaluate("at => at.index"))


def test_the_live_row_answers(reader: Reader, pictures: Path) -> None:
    """A tensor, a walk through the graph, the slices of a mask, and a search among the calls."""
    page = reader.page
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
    choose(masks.locator("select"), re.compile("^tensor"))
    slices = masks.locator(".noUi-handle")
    first = masks.locator("img").get_attribute("src") or "none"
    slices.press("ArrowRight")
    expect(masks.locator("img")).not_to_have_attribute("src", first)
    page.screenshot(path=pictures / "slices.png")
    assert reader.errors == []
