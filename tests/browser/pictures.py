"""Makes the README's pictures of the lens from the real thing: light, dark, and step by step."""

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
COLOURS = 256
STEP_COLOURS = 96
STEP_WIDTH = 880
STEP_MS = 2200
MAX_BYTES = 200_000


def main(target: Path) -> None:
    """Write the pictures into ``target``."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_notebook(directory / "lens.ipynb", cells.SETUP, cells.FAILING)
        with (
            running_lab(directory) as lab,
            sync_playwright() as playwright,
            chromium(playwright) as browser,
        ):
            dark = opened(lab, browser, "Dark")
            save(shot(dark), target / "lens_dark.png")
            dark.page.close()
            lab.stop_kernels()
            light = opened(lab, browser, "Light")
            save(shot(light), target / "lens_light.png")
            save_steps(steps(light), target / "lens_steps.gif")


def opened(lab: Lab, browser: Browser, theme: str) -> Reader:
    """Run the failing cell under a theme and wait for its lens."""
    lab.use_theme(f"JupyterLab {theme}")
    reader = Reader(browser.new_page(viewport=SIZE))  # type: ignore[arg-type]
    reader.run_failing(lab, "lens.ipynb")
    reader.page.keyboard.press("Escape")
    reader.page.keyboard.press("Control+b")
    reader.page.wait_for_timeout(800)
    return reader


def shot(reader: Reader) -> Image.Image:
    """Take the lens as it is."""
    reader.page.mouse.move(0, 0)
    reader.page.wait_for_timeout(500)
    return Image.open(io.BytesIO(reader.lens.screenshot())).convert("RGB")


def steps(reader: Reader) -> list[Image.Image]:
    """Look around: a node, its rows, the accused tensor, the call stack."""
    frames = [shot(reader)]
    reader.node("addmm").click()
    frames.append(shot(reader))
    for name in ("Tensors", "History"):
        reader.tab(name)
        frames.append(shot(reader))
    reader.lens.locator("strong.cl-bad[data-id]").click()
    reader.tab("Call stack")
    frames.append(shot(reader))
    reader.tab("Replay on CPU")
    frames.append(shot(reader))
    return frames


def save(picture: Image.Image, path: Path) -> None:
    """Write a PNG with few colours."""
    picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE).save(path, optimize=True)
    report(path)


def save_steps(frames: list[Image.Image], path: Path) -> None:
    """Write the frames as one moving picture of one size."""
    height = frames[1].height
    small = [
        same_size(frame, height).resize(
            (STEP_WIDTH, round(height * STEP_WIDTH / frame.width)), Image.Resampling.LANCZOS
        )
        for frame in frames
    ]
    palette = small[1].quantize(STEP_COLOURS, Image.Quantize.MAXCOVERAGE)
    drawn = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in small]
    drawn[0].save(
        path, save_all=True, append_images=drawn[1:], duration=STEP_MS, loop=0, optimize=True
    )
    report(path)


def same_size(frame: Image.Image, height: int) -> Image.Image:
    """Cut or lengthen a frame to ``height``."""
    made = Image.new("RGB", (frame.width, height), "white")
    made.paste(frame)
    return made


def report(path: Path) -> None:
    """Say how large a picture is, and refuse one that a README should not carry."""
    size = path.stat().st_size
    print(f"{path}: {size} bytes")
    if size > MAX_BYTES:
        msg = f"{path} has {size} bytes, more than {MAX_BYTES}"
        raise SystemExit(msg)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
