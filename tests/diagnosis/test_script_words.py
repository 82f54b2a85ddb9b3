"""In a script the texts say what a script can do (issue 17, item 15)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import cudalens
from cudalens.diagnosis import script_words
from cudalens.diagnosis.script_words import PHRASES, in_script_words
from cudalens.simulate import Simulation

PACKAGE = Path(cudalens.__path__[0]) / "diagnosis"
# What reads the log of a crash, a notebook's too, and says what to do in the place that it is of.
NO_REPORT = ("crash_log.py", "log_verdict.py")
OF_NOTEBOOKS = re.compile(r"%cudacheck|%%|[Rr]estart the kernel|\bcells?\b")


def texts() -> dict[str, str]:
    """Return every text of the diagnosis that speaks of a notebook, by its place."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name in NO_REPORT or path == Path(script_words.__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
            if is_text and OF_NOTEBOOKS.search(node.value) and "\n" not in node.value:
                found[f"{path.stem}:{node.lineno}"] = node.value
    return found


def test_item_15_no_text_for_a_script_speaks_of_a_notebook() -> None:
    """Each text that a notebook may show is in words of a script after the table was applied."""
    given = {place: text for place, text in texts().items() if not text.startswith(("In [", '"""'))}
    assert len(given) >= 10
    left = {place: in_script_words(text) for place, text in given.items()}
    assert {place: text for place, text in left.items() if OF_NOTEBOOKS.search(text)} == {}


@pytest.mark.parametrize("phrase", [phrase for phrase, _ in PHRASES])
def test_item_15_each_phrase_of_the_table_is_one_of_a_text(phrase: str) -> None:
    """No row of the table is dead: its phrase stands in a text, whatever rows stand above it."""
    assert any(phrase in text for text in texts().values())


def test_item_15_other_words_stay_as_they_are() -> None:
    """A CUDA kernel is one in a script too."""
    text = "a custom kernel is the usual cause; the kernel stops there"
    assert in_script_words(text) == text


def test_item_15_a_line_of_a_script_gets_a_fix_for_scripts(sim: Simulation) -> None:
    """``cudalens.check()`` outside of IPython: NaN probabilities are looked for with a command."""
    code = "import torch\ntorch.bernoulli(torch.full((3,), float('nan'), device='cuda'))"
    with pytest.raises(cudalens.DeviceAssertError), cudalens.check() as session:
        exec(compile(code, "script.py", "exec"), {})
    assert session.report is not None
    advice = "python -m cudalens --nan, or cudalens.check(nan=True), stops at the first one"
    assert any(item.text.endswith(advice) for item in session.report.hints)
    assert "%%cudacheck" not in session.report.to_json()
