"""Texts for users are plain English: a list of words and phrases that do not occur in them.

Names in the code are nouns of the field, and docstrings begin with a noun or a verb.  The texts are
the string literals of the package without docstrings, the README, the pages under ``docs``, the
changelog, the notebooks with their stored outputs and the stored reports.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
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
NAMES = frozenset("found known given kept asked said told met".split())  # noqa: SIM905  a list of words
"""Participles that were names: what the thing is says more, ``violation`` or ``arguments``."""
OPENING = re.compile(r"(?:What|Whether|Whose|Where|How|That|So many|As|The ways?) ")
"""Relative clauses without a noun, with which no docstring begins."""
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


def names_in(code: str) -> Iterator[str]:
    """Return the names of the list that Python code gives to variables, arguments, functions."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                names = [name]
            case ast.Attribute(attr=name, ctx=ast.Store()):
                names = [name]
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names = [name]
            case _:
                names = []
        yield from (name for name in names if name.strip("_") in NAMES)


def openings_in(code: str) -> Iterator[str]:
    """Return the docstrings, of attributes as well, that begin with a word of the list."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = str(node.value.value)
            if OPENING.match(text):
                yield text.split("\n", 1)[0]


def hits_in(text: str) -> list[str]:
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
        for hit in hits_in(text)
    ]
    assert files
    assert hits == []


@pytest.mark.parametrize("read", [names_in, openings_in], ids=["names", "docstrings"])
def test_the_code_has_no_word_of_the_lists(read: Callable[[str], Iterator[str]]) -> None:
    hits = [
        f"{path.relative_to(ROOT)}: {hit}"
        for path in ROOT.glob("cudalens/**/*.py")
        for hit in read(path.read_text(encoding="utf-8"))
    ]
    assert sorted(hits) == []


def test_a_planted_name_is_seen() -> None:
    code = """
def _found(given, *, x):
    'What it is.'
    known: int = x.kept
    x.told = known
    for said, is_known in ():
        'Return what it is.'
"""
    assert sorted(names_in(code)) == ["_found", "given", "known", "said", "told"]
    assert list(openings_in(code)) == ["What it is."]


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
    assert len(hits_in(text)) == hits


def test_what_a_user_does_not_read_is_not_searched(tmp_path: Path) -> None:
    code = '"""It holds."""\nX = 1  # it holds\nMSG = f"{X} holds {X}"\nKEY = "holds"\n'
    assert [hit for text in literals(code) for hit in hits_in(text)] == ["holds"]
    page = tmp_path / "page.md"
    page.write_text("It works.\n\n```console\nit stands\n```\n\n```text\nit lies here\n```\n")
    assert [hit for text in texts_of(page) for hit in hits_in(text)] == [
        "It works. ```text it lies here ```"
    ]
