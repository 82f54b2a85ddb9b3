"""One JupyterLab and one Chromium for all browser tests, and the notebook that they look at."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("playwright") is None:
    # `make test-browser` installs it; every other run leaves these tests out.
    collect_ignore_glob = ["test_*.py"]
else:
    from playwright.sync_api import Browser, BrowserContext, Error, sync_playwright

    from tests.browser import cells
    from tests.browser.labpage import Reader, chromium, write_notebook
    from tests.browser.labserver import Lab, running_lab

    NO_BROWSER = (
        "No Chromium could be started: install it with `apt-get install chromium` "
        "or `python -m playwright install --with-deps chromium`."
    )
    PICTURES = Path(__file__).parents[2] / "build" / "browser"

    @pytest.fixture(scope="session")
    def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
        """A real JupyterLab over a new directory."""
        directory = tmp_path_factory.mktemp("lab")
        write_notebook(directory / "quickstart.ipynb", cells.SETUP, cells.FAILING, cells.BUSY)
        with running_lab(directory) as lab:
            lab.use_theme("JupyterLab Light")
            yield lab

    @pytest.fixture(scope="session")
    def browser() -> Iterator[Browser]:
        """The system's Chromium; without one there is nothing to test, and that is a failure."""
        with sync_playwright() as playwright:
            starting = chromium(playwright)
            try:
                browser = starting.__enter__()
            except Error as error:
                pytest.exit(f"{NO_BROWSER}\n{error}", returncode=2)
            yield browser
            starting.__exit__(None, None, None)

    @pytest.fixture(scope="session")
    def context(browser: Browser) -> Iterator[BrowserContext]:
        """A profile of its own, which may use the clipboard."""
        context = browser.new_context(viewport={"width": 1400, "height": 1000})
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        yield context
        context.close()

    @pytest.fixture(scope="session")
    def opened(lab: Lab, context: BrowserContext) -> Reader:
        """The quickstart, run up to its failing cell."""
        reader = Reader(context.new_page())
        try:
            reader.run_failing(lab, "quickstart.ipynb")
        except Error:
            PICTURES.mkdir(parents=True, exist_ok=True)
            reader.page.screenshot(path=PICTURES / "not_opened.png")
            raise
        return reader

    @pytest.fixture
    def reader(opened: Reader) -> Iterator[Reader]:
        """The reader with nothing chosen and the first tab open; no script may have failed."""
        opened.begin()
        yield opened
        assert opened.errors == []

    @pytest.fixture
    def pictures() -> Path:
        """Where screenshots are kept."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        return PICTURES
