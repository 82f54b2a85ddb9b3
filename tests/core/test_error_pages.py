"""The pages on common errors: their names, their addresses, and their text in the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from cudalens.core import error_pages


def test_a_page_on_the_site_and_without_a_network() -> None:
    assert error_pages.address("nan") == (
        "https://cudalens.github.io/cudalens/docs/errors/nan.html"
    )
    assert error_pages.offline("nan") == "cudalens page nan"


def test_each_page_has_a_name_and_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b", "a", "README"):
        (tmp_path / f"{name}.md").write_text(f"# {name} é", encoding="utf-8")
    (tmp_path / "c.txt").write_text("no page")
    monkeypatch.setattr(error_pages, "_FOLDERS", (tmp_path / "none", tmp_path, Path()))
    assert error_pages.names() == ("a", "b")
    assert (error_pages.text("a"), error_pages.text()) == ("# a é", "# README é")
    with pytest.raises(KeyError, match="c"):
        error_pages.text("c")
