"""Texts for users are plain English: a list of words and phrases that do not occur in them.

The texts are the string literals of the package without docstrings, the README, the pages under
``docs``, the changelog, the notebooks with their stored outputs and the stored reports.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
BANNED = {
    "report, name, show": r"tells?|told|telling|speaks?|spoken",
    "is, are": r"stands?(?!-in)|stood|standing|lies|lie|lying",
    "contain, have": r"holds?|held|holding",
    "fix": r"mend(?:s|ed|ing)?|cure",
    "slow, expensive": r"dear(?:er)?",
    "hit, have, are used": r"meets?|meeting|(?:is|are|was|were) met",
    "no one, only, not": r"nobody|somebody",
    "is not a": r"(?<!there )is no(?= (?:text|JSON|proof|op name|guard|label|GPU|exception))",
    "an earlier line": r"innocent",
    "is lost": r"(?:is|are) gone|lives on",
    "likely cause": r"likely, not proven",
    "the public name of the function": r"first op whose|_to_copy|lift_fresh",
    "input": r"(?<!`)upstream",
    "where it came from": r"the ways? of|what is kept",
    "dataset, dataset item": r"data sets?|dataset's rows?|rows? of the dataset",
    "instead of, swapped": r"in place of|in each other's place",
    "also, apart from": r"besides",
    "synchronize": r"synchronis\w+",
    "rehearsal device": r"simulated device",
    "violation": r"breach\w*",
}
"""Plain words, and those that are not used in their place."""
WORDS = re.compile(rf"\b(?:{'|'.join(BANNED.values())})\b", re.IGNORECASE)
FENCE = re.compile(r"^```console\n.*?^```", re.MULTILINE | re.DOTALL)
"""What CUDA and PyTorch print."""


def literals(code: str) -> Iterator[str]:
    """Return the texts in Python code that a user may see: strings of several words."""
    tree = ast.parse(code)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        is_pattern = "\\" in node.value  # of what torch prints
        text = node.value if id(node) in parts else node.value.strip()
        if id(node) not in docs and " " in text and not is_pattern:
            yield node.value


def texts_of(path: Path) -> Iterator[str]:
    """Return the texts for users in a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from literals(text)
    elif path.suffix == ".ipynb":
        for cell in nbformat.reads(text, as_version=4).cells:  # type: ignore[no-untyped-call]
            if cell.cell_type == "markdown":
                yield cell.source
            for output in cell.get("outputs", ()):
                yield output.get("text", "")
                yield output.get("data", {}).get("text/plain", "")
    else:
        yield FENCE.sub("", text)


def found_in(text: str) -> list[str]:
    """Return the words of the list in a text, with what is around them."""
    flat = " ".join(text.split())
    return [flat[max(at.start() - 40, 0) : at.end() + 20] for at in WORDS.finditer(flat)]


FILES = [
    *sorted(ROOT.glob("cudalens/**/*.py")),
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("docs/*.rst")),
    *sorted(ROOT.glob("notebooks/*.ipynb")),
    *sorted(ROOT.glob("tests/golden/*.txt")),
]


@pytest.mark.parametrize("suffix", [".py", ".md", ".rst", ".ipynb", ".txt"])
def test_texts_for_users_have_no_word_of_the_list(suffix: str) -> None:
    files = [path for path in FILES if path.suffix == suffix]
    hits = [
        f"{path.relative_to(ROOT)}: {hit}"
        for path in files
        for text in texts_of(path)
        for hit in found_in(text)
    ]
    assert files
    assert hits == []


@pytest.mark.parametrize(
    ("text", "hits"),
    [
        ("the log holds no line", 1),
        ("an innocent line; Nobody told it", 3),
        ("there is no GPU", 0),
        ("it is no GPU", 1),
        ("its role is `upstream`", 0),
        ("a stand-in with a threshold", 0),
        ("row 3 (dataset item 12)", 0),
        ("the row of the\n  dataset", 1),
    ],
)
def test_a_planted_word_is_found(text: str, hits: int) -> None:
    assert len(found_in(text)) == hits


def test_what_a_user_does_not_read_is_not_searched(tmp_path: Path) -> None:
    code = '"""It holds."""\nX = 1  # it holds\nMSG = f"{X} holds {X}"\nKEY = "holds"\n'
    assert [hit for text in literals(code) for hit in found_in(text)] == ["holds"]
    page = tmp_path / "page.md"
    page.write_text("It works.\n\n```console\nit stands\n```\n\n```text\nit lies here\n```\n")
    assert [hit for text in texts_of(page) for hit in found_in(text)] == [
        "It works. ```text it lies here ```"
    ]
