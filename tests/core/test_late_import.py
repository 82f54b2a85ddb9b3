"""A callback behind the import of a module that may never come."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cudalens.core.late_import import when_imported, when_loaded

NAME = "a_module_that_comes_late"


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What was called, while there is a module to be imported; no finder stays."""
    (tmp_path / f"{NAME}.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    before = list(sys.meta_path)
    yield []
    sys.modules.pop(NAME, None)
    assert sys.meta_path == before


def test_a_callback_comes_behind_the_import(late: list[Any]) -> None:
    when_imported(NAME, lambda module: late.append(module.value))
    assert late == []
    module = importlib.import_module(NAME)
    assert late == [3]
    assert "exec_module" not in vars(module.__loader__)


def test_two_that_wait_are_both_called(late: list[Any]) -> None:
    for at in (1, 2):
        when_imported(NAME, lambda module, at=at: late.append(at))  # type: ignore[misc]
    importlib.import_module(NAME)
    assert sorted(late) == [1, 2]


def test_who_waits_no_longer_is_not_called(late: list[Any]) -> None:
    forget = when_imported(NAME, late.append)
    forget()
    forget()
    importlib.import_module(NAME)
    assert late == []


def test_what_was_entered_is_left_again(late: list[Any]) -> None:
    def enter(module: ModuleType) -> Any:
        late.append("in")
        return lambda: late.append("out")

    leave = when_loaded(NAME, enter)
    assert late == []
    importlib.import_module(NAME)
    leave()
    leave()
    assert late == ["in", "out"]
    when_loaded(NAME, enter)()
    assert late == ["in", "out", "in", "out"]
    sys.modules.pop(NAME)
    when_loaded(NAME, enter)()
    assert late == ["in", "out", "in", "out"]


def test_a_folder_that_python_has_no_loader_for_is_imported_all_the_same(
    late: list[Any], tmp_path: Path
) -> None:
    (tmp_path / f"{NAME}.py").unlink()
    (tmp_path / NAME).mkdir()
    forget = when_imported(NAME, late.append)
    assert list(importlib.import_module(NAME).__path__) == [str(tmp_path / NAME)]
    forget()
    assert late == []


def test_a_module_of_a_package_is_waited_for_too(late: list[Any], tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.py").unlink()
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "__init__.py").write_text("")
    (tmp_path / NAME / "inner.py").write_text("value = 5\n")
    when_imported(f"{NAME}.inner", lambda module: late.append(module.value))
    importlib.import_module(NAME)
    assert late == []
    importlib.import_module(f"{NAME}.inner")
    assert late == [5]
    sys.modules.pop(f"{NAME}.inner")


def test_a_module_of_a_longer_name_is_another_one(late: list[Any], tmp_path: Path) -> None:
    (tmp_path / f"{NAME}_too.py").write_text("value = 4\n")
    importlib.invalidate_caches()
    when_imported(NAME, lambda module: late.append(module.value))
    assert importlib.import_module(f"{NAME}_too").value == 4
    assert late == []
    importlib.import_module(NAME)
    assert late == [3]
    sys.modules.pop(f"{NAME}_too")
