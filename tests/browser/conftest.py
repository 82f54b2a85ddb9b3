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
    from playwright.sync_api import Browser, Error, sync_playwright

    from tests.browser import cells
    from tests.browser.labpage import chromium, write_notebook
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
        write_notebook(directory / "quickstart.ipynb", cells.SETUP, cells.FAILING)
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

    @pytest.fixture
    def pictures() -> Path:
        """Where screenshots are kept."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        return PICTURES
