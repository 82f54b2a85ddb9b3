"""What a reader does in JupyterLab: open a notebook, run its cells, look at an output."""

from __future__ import annotations

import shutil
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import nbformat
from playwright.sync_api import TimeoutError, expect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from playwright.sync_api import Browser, Locator, Page, Playwright

    from tests.browser.labserver import Lab

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
SWITCHES = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
REPORT = "section.cudalens"
ROW = ".cl-live"
KERNEL = "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
CONTRAST = Path(__file__).with_name("contrast.js").read_text(encoding="utf-8")
WAIT_MS = 180_000
"""How long anything may take: a machine that is busy with something else is no failure of ours."""
KEYS_MS = 6_000
"""How long keys may stay without an answer before they are pressed again."""
ATTEMPTS = 20
PAUSE_MS, STILL = 200, 3

expect.set_options(timeout=WAIT_MS)


class Box(NamedTuple):
    """Where a part of the page lies, in pixels."""

    x: float
    y: float
    width: float
    height: float

    @property
    def bottom(self) -> float:
        return self.y + self.height


def write_notebook(path: Path, *cells: str) -> None:
    """Write a notebook of code cells for the kernel that runs the tests."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    book.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    nbformat.write(book, path)


@contextmanager
def chromium(playwright: Playwright) -> Iterator[Browser]:
    """Start the system's Chromium without a window, or the one that Playwright installed."""
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    browser = playwright.chromium.launch(
        executable_path=found, args=list(SWITCHES), timeout=WAIT_MS
    )
    try:
        yield browser
    finally:
        browser.close()


def new_page(browser: Browser, **options: Any) -> Page:
    """Open a page that waits as long as a busy machine takes."""
    page = browser.new_page(**options)
    page.set_default_timeout(WAIT_MS)
    return page


def eventually(read: Callable[[], Any], wanted: object, told: object = "") -> None:
    """Assert that a reading of the page becomes what is wanted: a page is drawn step by step."""
    end = time.monotonic() + WAIT_MS / 4_000
    found = read()
    while found != wanted and time.monotonic() < end:
        time.sleep(PAUSE_MS / 1000)
        found = read()
    assert found == wanted, told


def open_notebook(page: Page, lab: Lab, name: str, *, classic: bool = False) -> None:
    """Open a notebook, in JupyterLab or in Notebook 7, and wait until its kernel listens."""
    lab.start_kernel(name)
    page.goto(lab.classic(name) if classic else lab.notebook(name))
    page.wait_for_selector(".jp-CodeCell .cm-content")
    # The page says "idle" before it has a kernel, and a cell run then starts a second one.
    page.wait_for_function(f"{KERNEL}?.status === 'idle'")


def run_cell(page: Page, number: int) -> Locator:
    """Run one cell and give it."""
    cell = page.locator(".jp-CodeCell").nth(number)
    before = cell.locator(".jp-InputPrompt").inner_text()
    for _ in range(ATTEMPTS):
        # JupyterLab drops the keys of the first moments, while its panels still move.
        cell.locator(".cm-content").click()
        page.keyboard.press("Control+Enter")
        try:
            expect(cell.locator(".jp-InputPrompt")).not_to_have_text(before, timeout=KEYS_MS)
        except AssertionError:
            continue
        return cell
    raise AssertionError("JupyterLab did not run the cell")


NEW_CELL = """text => {
    const book = jupyterapp.shell.currentWidget.content;
    book.activeCellIndex = book.widgets.length - 1;
    book.activeCell.model.sharedModel.setSource(text);
    return book.activeCellIndex;
}"""
SCROLL_TO = """(cell, room) => {
    const pane = cell.closest('.jp-WindowedPanel-outer');
    const end = pane.getBoundingClientRect().bottom - room;
    pane.scrollTop += cell.getBoundingClientRect().bottom - end;
}"""
HAS_BEGUN = """at => {
    const cell = jupyterapp.shell.currentWidget.content.widgets[at];
    return cell.model.executionCount || cell.promptNode.innerText.includes('*');
}"""
HAS_RUN = """at => {
    const book = jupyterapp.shell.currentWidget.content;
    return book.widgets.length > at + 1 && book.widgets[at].model.executionCount
        && !book.widgets[at].promptNode.innerText.includes('*');
}"""


def type_and_run(page: Page, text: str, room: int = 200) -> Locator:
    """Write into the notebook's last cell, press Shift-Enter, wait, and give the cell.

    Args:
        room: pixels between the end of the cell and the lower edge of the window.  With some, the
            new cell is in view at once, and JupyterLab keeps its place while the output grows.
    """
    at = page.evaluate(NEW_CELL, text)
    cell = page.locator(".jp-Cell").nth(at)
    for _ in range(ATTEMPTS):
        cell.locator(".cm-content").click()
        page.keyboard.press("Control+End")
        cell.evaluate(SCROLL_TO, room)
        page.keyboard.press("Shift+Enter")
        try:
            # A cell that has begun is never run again, however long it takes.
            page.wait_for_function(HAS_BEGUN, arg=at, timeout=KEYS_MS)
        except TimeoutError:
            continue
        page.wait_for_function(HAS_RUN, arg=at)
        return cell
    raise AssertionError("JupyterLab did not run the cell")


def measured(*parts: Locator) -> list[Box]:
    """Return where parts of the page lie, once that has stopped to change."""
    last, end = _boxes(parts), time.monotonic() + WAIT_MS / 1000
    still = 0
    while still < STILL and time.monotonic() < end:
        time.sleep(PAUSE_MS / 1000)
        now = _boxes(parts)
        still, last = (still + 1 if now == last else 0), now
    return last


def _boxes(parts: Sequence[Locator]) -> list[Box]:
    boxes = [part.bounding_box() for part in parts]
    return [Box(*(box[side] for side in ("x", "y", "width", "height"))) for box in boxes if box]


def save(page: Page, path: Path, reports: int) -> None:
    """Save the notebook and wait until so many reports lie in its file."""
    end = time.monotonic() + WAIT_MS / 1000
    while path.read_text(encoding="utf-8").count('<div class=\\"cl-card') < reports:
        assert time.monotonic() < end, f"{path.name} was not saved"
        page.locator(".jp-Notebook").press("Control+s")
        page.wait_for_timeout(PAUSE_MS)


class Reader:
    """Somebody who looks at a report in JupyterLab."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.report = page.locator(REPORT).first

    def run_failing(self, lab: Lab, name: str) -> None:
        """Open a notebook, run its first cell and the one that fails, and wait for its report."""
        open_notebook(self.page, lab, name)
        for number in (0, 1):
            run_cell(self.page, number)
        self.page.wait_for_selector(ROW)

    def pale(self, asked: float = 4.5) -> list[Any]:
        """Return what is visible now with less contrast than that, in every report."""
        found = self.page.locator(REPORT).evaluate_all(f"all => all.flatMap({CONTRAST})")
        # A square of a legend is a picture, which may be paler than words.
        return [item for item in found if item["ratio"] < (3 if item["text"] == "■" else asked)]
