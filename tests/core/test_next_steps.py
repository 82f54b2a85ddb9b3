"""What to do next is said for the place in which the code runs: a notebook or a script."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import cudalens
from cudalens.core.next_steps import NOTEBOOK, SCRIPT
from cudalens.simulate import Simulation

PACKAGE = Path(cudalens.__path__[0]) / "diagnosis"
OF_NOTEBOOKS = re.compile(r"%cudacheck|%%|[Rr]estart the kernel|\bcells?\b")
UNCHECKED = "cells again: the bad value is then found before its launch, or the op at fault"
"""Only a notebook's magic explains what ran without a check."""


def test_no_sentence_of_the_diagnosis_speaks_of_a_notebook_by_itself() -> None:
    """It names the step, and the place puts it into words."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) else None
            is_sentence = isinstance(text, str) and "\n" not in text and UNCHECKED not in text
            if is_sentence and OF_NOTEBOOKS.search(text):
                found[f"{path.stem}:{node.lineno}"] = text
    texts = {place: text for place, text in found.items() if not text.startswith("In [")}
    docstrings = {place for place, text in texts.items() if text.endswith(".") and "{" not in text}
    assert {place: texts[place] for place in texts.keys() - docstrings} == {}


def test_each_step_of_a_script_can_be_taken_in_a_script() -> None:
    for name, words in vars(SCRIPT).items():
        assert not OF_NOTEBOOKS.search(words), name
        assert words != getattr(NOTEBOOK, name)


def test_a_line_of_a_script_gets_a_fix_for_scripts(sim: Simulation) -> None:
    """``cudalens.check()`` outside of IPython: NaN probabilities are looked for with a command."""
    code = "import torch\nz = torch.zeros(3, device='cuda')\ntorch.bernoulli((z / z).softmax(0))"
    with pytest.raises(cudalens.DeviceAssertError), cudalens.check() as session:
        exec(compile(code, "script.py", "exec"), {})
    assert session.report is not None
    advice = "python -m cudalens --nan, or cudalens.check(nan=True), stops at the first one"
    assert any(item.text.endswith(advice) for item in session.report.hints)
    assert "%%cudacheck" not in session.report.to_json()


def test_a_sentence_takes_the_words_of_its_place() -> None:
    text = "{check_anew}, the {code} or {block}"
    assert NOTEBOOK.fill(text) == (
        "restart the kernel and run the cell under %%cudacheck, the cell or cell"
    )
    assert SCRIPT.fill(text) == "run the script with python -m cudalens, the script or block"
    assert SCRIPT.fill("as it is") == "as it is"
    with pytest.raises(KeyError):
        SCRIPT.fill("{unheard_of}")
