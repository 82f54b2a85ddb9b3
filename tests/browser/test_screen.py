"""The report in a real JupyterLab: live, saved, and reopened without a kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser import cells
from tests.browser.labpage import REPORT, ROW, Reader, write_notebook
from tests.browser.labserver import Lab

pytestmark = pytest.mark.browser

HEIGHT, WITH_TRACEBACK = 400, 580
DEAD = "Error displaying widget"


def opened(lab: Lab, browser: Browser, name: str) -> Reader:
    write_notebook(lab.directory / name, cells.SETUP_SHORT, cells.FAILING_SHORT)
    reader = Reader(browser.new_page(viewport={"width": 1400, "height": 900}))
    reader.run_failing(lab, name)
    return reader


def test_report_and_traceback_are_seen_at_once(
    lab: Lab, browser: Browser, pictures: Path
) -> None:
    """The heights that Lab leaves behind Shift-Enter; the action is the last line of both."""
    reader = opened(lab, browser, "heights.ipynb")
    output = reader.page.locator(".jp-CodeCell").nth(1).locator(".jp-OutputArea")
    box, whole = reader.report.bounding_box(), output.bounding_box()
    assert box is not None and whole is not None
    assert box["height"] <= HEIGHT
    assert whole["height"] <= WITH_TRACEBACK
    expect(output).to_contain_text("try: F.cross_entropy(out, y - 1)")
    reader.page.screenshot(path=pictures / "live.png")
    for width in (1400, 900, 500):
        reader.page.set_viewport_size({"width": width, "height": 1400})
        assert reader.pale() == []
    reader.page.locator(ROW).locator("input").fill("linear")
    expect(reader.page.locator(f"{ROW} table")).to_contain_text("linear")
    assert reader.errors == []
    reader.page.close()


def test_a_saved_notebook_shows_the_whole_report_without_a_kernel(
    lab: Lab, browser: Browser, pictures: Path
) -> None:
    """In JupyterLab and in Notebook 7, with no word of a widget that is dead."""
    reader = opened(lab, browser, "kept.ipynb")
    path = lab.directory / "kept.ipynb"
    for _ in range(60):
        reader.page.locator(".jp-Notebook").press("Control+s")
        reader.page.wait_for_timeout(500)
        if "cl-card" in path.read_text(encoding="utf-8"):
            break
    reader.page.close()
    for name, address in (("lab", lab.notebook), ("classic", lab.classic)):
        lab.stop_kernels()
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(address("kept.ipynb"))
        expect(page.locator(f"{REPORT} .cl-title")).to_be_visible()
        page.wait_for_timeout(3000)
        assert not any(item.is_visible() for item in page.get_by_text(DEAD).all())
        page.locator("summary", has_text="Details").click()
        expect(page.locator(REPORT)).to_contain_text("ran on")
        page.screenshot(path=pictures / f"reopened_{name}.png")
        page.close()
