"""A file that was edited after its import."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from cudalens.source import files
from cudalens.source.edited import ImportedFiles, is_edited
from tests.hostcells import run_cell

TEXT = """\
from os.path import join
from types import SimpleNamespace
from torch.nn import functional as F

def loss(x, y):
    y = y + 2
    return F.cross_entropy(x, y)

class Net:
    def forward(self, x):
        return [item for item in x]
"""


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "module_to_edit.py").write_text(TEXT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    yield importlib.import_module("module_to_edit")
    del sys.modules["module_to_edit"]


def write(module: ModuleType, text: str) -> str:
    """Overwrite the file of a module, at another time than before; return its name."""
    path = Path(module.__file__ or "")
    later = path.stat().st_mtime + 2
    path.write_text(text)
    os.utime(path, (later, later))
    return str(path)


@pytest.mark.parametrize(
    ("change", "is_other"),
    [
        (lambda text: text, False),
        (lambda text: text + "\nmore = 1\n", False),
        (lambda text: text.replace("def loss(x, y):", "def loss(x, *y):"), True),
        (lambda text: text.replace("class Net:", "class Net: # of ours"), False),
        (lambda text: "\n" + text, True),
        (lambda text: text.replace("y + 2", "y + 3"), True),
        (lambda text: text.replace("in x]", "in x if item]"), True),
        (lambda text: text.replace("return F", "retrun F"), True),
        (lambda text: text + "\0", True),
    ],
    ids=[
        "same",
        "added below",
        "parameters",
        "comment",
        "shifted",
        "number",
        "inner",
        "broken",
        "null",
    ],
)
def test_lines_that_did_not_run_are_none(
    imported: ModuleType, change: Callable[[str], str], is_other: bool
) -> None:
    assert files.source_lines(imported.__file__ or "") == TEXT.splitlines()
    name = write(imported, change(TEXT))
    assert is_edited(imported, name, change(TEXT).splitlines(keepends=True)) is is_other
    assert files.source(name).is_edited is is_other
    assert files.source_lines(name) == ([] if is_other else change(TEXT).splitlines())


def test_a_module_that_is_loaded_again_has_its_lines(imported: ModuleType) -> None:
    name = write(imported, "\n" + TEXT)
    assert files.source_lines(name) == []
    importlib.reload(imported)
    assert files.source_lines(name) == ["", *TEXT.splitlines()]


def test_a_file_that_is_nobodys_is_not_compared(
    imported: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "is_user_file", lambda name: False)
    assert files.source_lines(write(imported, "\n" + TEXT)) == ["", *TEXT.splitlines()]


def test_code_that_an_import_hook_rewrites_is_not_compared(
    imported: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = imported.__file__ or ""
    assert ImportedFiles().module_of(name) is imported
    monkeypatch.setattr(imported, "__loader__", object())
    assert ImportedFiles().module_of(name) is None


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("is_other", [False, True])
def test_a_report_quotes_no_line_of_an_edited_file(imported: ModuleType, is_other: bool) -> None:
    write(imported, TEXT.replace("y + 2", "y * 7") if is_other else TEXT)
    code = "import torch, module_to_edit\nx = torch.zeros(3, 3).cuda()\n"
    report = run_cell(code + "module_to_edit.loss(x, torch.arange(3).cuda())").shown
    text = report.to_text()
    assert "y * 7" not in text
    assert ("y = y + 2" in text) is not is_other
    note = "module_to_edit.py has changed since it was imported: its lines are not shown"
    assert (note in report.limits) is is_other
