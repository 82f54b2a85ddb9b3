"""Who changed what backward needs: its line in the code, its node in the graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cudalens import Report
from cudalens.core.report_types import CHANGED
from cudalens.render.words import page_link
from tests.hostcells import run_cell

PAGES = Path(__file__).parents[2] / "docs" / "errors"


NEAR = "y = x.exp()\ny += 1\ny.sum().backward()"
FAR = "y = x.exp()\nz = y * 2\ny += 1\n" + "count = 0\n" * 12 + "z.sum().backward()"
TWICE = "y = x.exp().sum()\ny.backward()\ny.backward()"
NO_GRADIENT = "x.detach().sum().backward()"
NO_MEMORY = """raise RuntimeError(
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
)"""


def reported(code: str) -> Report:
    """Return the report of a cell that torch refuses."""
    return run_cell(code, {"x": torch.ones(3, requires_grad=True)}, fast=False).shown


@pytest.mark.parametrize(("code", "line"), [(NEAR, 2), (FAR, 3)])
def test_item_23_the_line_at_fault_stands_in_the_code(code: str, line: int) -> None:
    """Both lines are drawn, when far apart with a sign that some are left out."""
    report = reported(code)
    assert report.kind == "autograd_error"
    assert report.headline == f"`y += 1` in line {line} changed `y`, which backward needs"
    assert "y = x.exp()" in report.explanation
    assert "<code>y += 1</code> in line" in report.to_html()
    assert [hint.text for hint in report.hints] == [
        f"In [{report.source.cell}] line {line}: make a new tensor instead of changing the one "  # type: ignore[union-attr]
        "that backward needs: y = y + 1"
    ]
    for text in (report.to_text(), report.to_html()):
        assert "y += 1" in text
        assert CHANGED in text
        assert "sum().backward()" in text
    assert ("⋮" in report.to_text()) is (code is FAR)


def test_item_23_the_node_at_fault_is_marked() -> None:
    """Where backward leads over the write; a graph that does not has no mark."""
    marked = [node for node in reported(NEAR).graph.nodes if node.role == "bad_input"]
    assert [(node.op, node.source and node.source.text) for node in marked] == [
        ("torch.Tensor.add_", "y += 1")
    ]
    assert not [node for node in reported(FAR).graph.nodes if node.role == "bad_input"]


@pytest.mark.parametrize(
    ("code", "page"),
    [
        (NEAR, "modified-by-an-inplace-operation"),
        (FAR, "modified-by-an-inplace-operation"),
        (TWICE, "backward-a-second-time"),
        (NO_MEMORY, "cublas-alloc-failed"),
        (NO_GRADIENT, ""),
    ],
)
def test_item_21_a_report_links_the_page_on_its_error(code: str, page: str) -> None:
    """Of the pages of ``docs/errors``; an error without a page has no link."""
    report = reported(code)
    link = page_link(report)
    address = link.address if link else ""
    assert address.rpartition("/")[2] == (page and f"{page}.html")
    assert not page or (PAGES / f"{page}.md").is_file()
    assert not page or f'href="{address}"' in report.to_html()
