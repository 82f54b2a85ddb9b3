"""Other errors, and those of other processes, in a real JupyterLab at every width and theme."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.labpage import TABS, WORDS, Reader, write_notebook
from tests.browser.labserver import Lab

pytestmark = pytest.mark.browser

SETUP = """\
%load_ext cudalens
import cudalens, torch
from torch import nn

cudalens.ensure_cuda()
torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1568, 10)
).to("cuda")
images = torch.randn(4, 1, 28, 28, device="cuda")
weight = torch.randn(16, 16, device="cuda", requires_grad=True)
variance = torch.tensor([[0.5, 1e-3], [-0.02, 2.0]], device="cuda")"""
RANKS_SETUP = """\
%load_ext cudalens
import contextlib
import cudalens, torch
import torch.multiprocessing as mp
import torch.nn.functional as F

labels = torch.tensor([0, 4, 2, 1, 3, 5])


def score(rank):
    with contextlib.redirect_stdout(None):
        cudalens.ensure_cuda()
    y = labels[2 * rank : 2 * rank + 2].to("cuda")
    F.cross_entropy(torch.zeros(2, 5, device="cuda"), y)"""
CELLS = {
    "ranks": (
        RANKS_SETUP,
        """\
%%cudacheck
mp.start_processes(score, nprocs=3, start_method="fork")""",
        "y[1] = 5 is outside the 5 classes",
    ),
    "in_place": (
        SETUP,
        """\
%%cudacheck
gate = torch.sigmoid(weight @ weight)
hidden = gate * weight
gate[hidden < 0.1] = 0
hidden.sum().backward()""",
        "changed gate, which backward needs",
    ),
    "nan": (
        SETUP,
        """\
%%cudacheck --nan
deviation = torch.sqrt(variance)
score = (variance / deviation).mean()""",
        "made nan",
    ),
    "shapes": (
        SETUP,
        """\
%%cudacheck
with torch.no_grad():
    scores = net(images)""",
        "1568",
    ),
}
MARKED = ".cl-code .cl-bad, .cl-code .cl-hot [class]:not(.cl-gutter)"
ROOM = """(root, marked) => [...root.querySelectorAll(marked)]
    .filter(at => at.getClientRects().length)
    .map(at => [at.getBoundingClientRect(), at.closest('.cl-code').getBoundingClientRect()])
    .map(([own, pane]) => Math.min(pane.right - own.right, own.left - pane.left))"""
"""How far what is marked in the code stays from the edges of its pane."""

COVERED = """root => {
    if (!root.querySelector('.cl-zoom')) return false;  // a graph of three boxes is not drawn
    const zoom = root.querySelector('.cl-zoom').getBoundingClientRect();
    const words = document.createRange();
    words.selectNodeContents(root.querySelector('.cl-pane:has(>.cl-zoom) .cl-heading strong'));
    return [...words.getClientRects()].some(at => at.right > zoom.left && at.bottom > zoom.top
        && at.top < zoom.bottom);
}"""
"""Whether the buttons of the picture lie on its heading."""


@pytest.mark.parametrize(
    ("kind", "theme"),
    [
        *((kind, "Light") for kind in CELLS),
        ("in_place", "Dark"),
        *(pytest.param(kind, "Dark", marks=pytest.mark.all) for kind in list(CELLS)[2:]),
    ],
)
def test_other_errors_can_be_read(
    kind: str, theme: str, lab: Lab, browser: Browser, pictures: Path
) -> None:
    """Contrast, size of words, the code at fault, no overflow."""
    setup, cell, said = CELLS[kind]
    name = f"{kind}_{theme.lower()}"
    write_notebook(lab.directory / f"{name}.ipynb", setup, cell)
    lab.use_theme(f"JupyterLab {theme}")
    reader = Reader(browser.new_page(viewport={"width": 1400, "height": 1000}))
    reader.run_failing(lab, f"{name}.ipynb")
    lab.use_theme("JupyterLab Light")
    reader.page.keyboard.press("Escape")
    reader.page.keyboard.press("Control+b")
    expect(reader.page.locator("#filebrowser")).to_be_hidden()
    expect(reader.lens.locator(".cl-title")).to_contain_text(said)
    for width in (1400, 900, 500):
        reader.page.set_viewport_size({"width": width, "height": 2600})
        reader.lens.screenshot(path=pictures / f"{name}_{width}.png")
        for tab in reversed((*TABS, "Ranks")):
            tabs = reader.lens.locator(".lm-TabBar-tab", has_text=tab)
            if tabs.count():
                tabs.first.click()
                assert reader.pale() == [], (width, tab)
        assert reader.lens.evaluate("root => root.scrollWidth - root.clientWidth") <= 1
        assert min(reader.lens.evaluate(WORDS), default=9) >= 8.99
        assert not reader.lens.evaluate(COVERED)
        assert min(reader.lens.evaluate(ROOM, MARKED)) > 0
    has_ranks = reader.lens.locator(".lm-TabBar-tab", has_text="Ranks").count() == 1
    assert has_ranks == (kind == "ranks")
    assert reader.errors == []
    reader.page.close()
    lab.stop_kernels()
