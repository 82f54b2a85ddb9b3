"""Makes the pictures of the README and the site from the real thing, in light and dark."""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from tests.browser import cells
from tests.browser.labpage import Reader, chromium, write_notebook
from tests.browser.labserver import Lab, running_lab

SIZE = {"width": 1400, "height": 1700}
README_WIDTH, README_HEIGHT = 1040, 540
"""The part of a page that the README shows, in CSS pixels: at most 500 high in GitHub's column."""
COLORS = 256
MAX_BYTES = 200_000


def main(target: Path) -> None:
    """Write the pictures into ``target``."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_notebook(directory / "lens.ipynb", cells.SETUP, cells.FAILING)
        write_notebook(directory / "short.ipynb", cells.SETUP_SHORT, cells.FAILING_SHORT)
        with (
            running_lab(directory) as lab,
            sync_playwright() as playwright,
            chromium(playwright) as browser,
        ):
            for theme in ("Light", "Dark"):
                whole = opened(lab, browser, theme, "lens.ipynb", SIZE)
                save(shot(whole), target / f"lens_{theme.lower()}.png")
                whole.page.close()
                lab.stop_kernels()
                size = {"width": README_WIDTH + 60, "height": 1700}
                short = opened(lab, browser, theme, "short.ipynb", size)
                suffix = "" if theme == "Light" else "_dark"
                save(cell_shot(short), target / f"lens_small{suffix}.png")
                short.page.close()
                lab.stop_kernels()


def opened(lab: Lab, browser: Browser, theme: str, name: str, size: dict[str, int]) -> Reader:
    """Run the failing cell of a notebook under a theme and wait for its lens."""
    lab.use_theme(f"JupyterLab {theme}")
    page = browser.new_page(viewport=size, device_scale_factor=2 if name == "short.ipynb" else 1)  # type: ignore[arg-type]
    reader = Reader(page)
    reader.run_failing(lab, name)
    page.keyboard.press("Escape")
    page.keyboard.press("Control+b")
    page.wait_for_timeout(800)
    return reader


def shot(reader: Reader) -> Image.Image:
    """Take the lens as it is."""
    reader.page.mouse.move(0, 0)
    reader.page.wait_for_timeout(500)
    return Image.open(io.BytesIO(reader.report.screenshot())).convert("RGB")


def cell_shot(reader: Reader) -> Image.Image:
    """Take the failing cell and what is visible of its output."""
    reader.page.mouse.move(0, 0)
    reader.page.wait_for_timeout(500)
    whole = Image.open(io.BytesIO(reader.page.locator(".jp-CodeCell").nth(1).screenshot()))
    scale = reader.page.evaluate("window.devicePixelRatio")
    width, height = round(README_WIDTH * scale), round(README_HEIGHT * scale)
    return whole.convert("RGB").crop((0, 0, min(width, whole.width), min(height, whole.height)))


def save(picture: Image.Image, path: Path) -> None:
    """Write a PNG with few colors, and refuse one that a README should not carry."""
    picture.quantize(COLORS, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path}: {size} bytes")
    if size > MAX_BYTES:
        raise SystemExit(f"{path} has {size} bytes, more than {MAX_BYTES}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
