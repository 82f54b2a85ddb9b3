"""From Python 3.12 on a comprehension runs in the frame around it, and its variables end there."""

from __future__ import annotations

import textwrap

import pytest

from tests.hostcells import run_cell

pytestmark = pytest.mark.usefixtures("sim")
SETUP = """
import torch
x, w = torch.ones(2, 3, device="cuda"), torch.ones(2, 3, device="cuda")
xs = [torch.ones(4, 5, device="cuda")]
"""
FORMS = ["[x @ w for x in xs]", "{0: x @ w for x in xs}", "[[x @ w for _ in xs] for x in xs]"]


def in_function(line: str) -> str:
    body = textwrap.indent(f"{SETUP}y = {line}", "    ")
    return f"def f():\n{body}\nf()"


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("line", FORMS)
@pytest.mark.parametrize("place", ["cell", "function"])
def test_a_variable_outside_is_not_taken_for_it(place: str, line: str, fast: bool) -> None:
    code = f"{SETUP}y = {line}" if place == "cell" else in_function(line)
    report = run_cell(code, fast=fast).shown
    assert "(4x5 and 2x3)" in report.headline_schema
    assert report.to_text().count("f32[2, 3]") == 1
    assert report.hints == ()


@pytest.mark.parametrize(
    "line", ["[y for y in x @ w]", "[x for x in x @ w]", "[0 for x in xs], x @ w"]
)
def test_what_is_evaluated_outside_is_read(line: str) -> None:
    report = run_cell(f"{SETUP}y = {line}").shown
    assert report.headline.startswith("x and w shapes cannot be multiplied (2x3 and 2x3)")


@pytest.mark.parametrize("line", ["[p.grad.norm() for p in ps]", "p = ps[0]; p.grad.norm()"])
def test_a_missing_gradient_is_named(line: str) -> None:
    report = run_cell(f"import torch\nps = [torch.ones(3, requires_grad=True)]\n{line}").shown
    assert report.headline == "'NoneType' object has no attribute 'norm': p.grad is None"


def test_of_another_attribute_nothing_is_said() -> None:
    """Who knows what ``p`` was?"""
    code = "import torch\nclass P:\n    part = None\n[p.part.norm() for p in [P()]]"
    assert run_cell(code).report is None
