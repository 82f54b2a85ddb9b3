"""Files that users name: their lines, and why they cannot be read or written."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from cudalens.core import text_files
from cudalens.core.text_files import expanded, lines_of, packaged, why_unreadable, why_unwritable


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_lines_of_a_file_and_of_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    file = tmp_path / "a.log"
    file.write_bytes("é\nb".encode(encoding))
    assert list(lines_of(str(file))) == ["é\n", "b"]
    stdin = SimpleNamespace(buffer=io.BufferedReader(io.BytesIO("é\nb".encode(encoding))))
    monkeypatch.setattr(text_files.sys, "stdin", stdin)
    assert list(lines_of("-")) == ["é\n", "b"]
    assert not stdin.buffer.closed


@pytest.mark.parametrize("order", ["le", "be"])
def test_the_first_two_bytes_say_the_order_of_wide_characters(tmp_path: Path, order: str) -> None:
    file = tmp_path / "a.log"
    file.write_bytes("\ufeffé\nb".encode(f"utf-16-{order}"))
    assert list(lines_of(str(file))) == ["é\n", "b"]


def test_what_is_no_text_stands_for_itself_and_long_lines_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.log"
    file.write_bytes(b"\xff a\n")
    assert list(lines_of(str(file))) == ["� a\n"]
    monkeypatch.setattr(text_files, "LONGEST_LINE", 3)
    file.write_bytes(b"abcde\n")
    assert list(lines_of(str(file))) == ["abc", "de\n"]


def test_an_error_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        list(lines_of(str(tmp_path / "none")))
    assert caught.value.filename == str(tmp_path / "none")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="a file that cannot be read")
def test_an_error_while_a_file_is_read_names_it_too() -> None:
    with pytest.raises(OSError) as caught:
        list(lines_of("/proc/self/mem"))
    assert caught.value.filename == "/proc/self/mem"


def test_a_home_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded("~/a") == Path("/home/me/a")
    assert expanded("~nobody-has-this-name/a") == Path("~nobody-has-this-name/a")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(2, "No such file"), "No such file"),
        (OSError("odd"), "odd"),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "bad"), "it is not a text file"),
        (json.JSONDecodeError("bad", "x", 0), "it is not JSON (bad: line 1 column 1 (char 0))"),
        (ValueError("first\nsecond"), "first"),
        (ValueError(), "ValueError"),
    ],
)
def test_why_a_file_cannot_be_read(error: Exception, words: str) -> None:
    assert why_unreadable(error) == words


def test_why_a_file_cannot_be_written(tmp_path: Path) -> None:
    new = tmp_path / "folder" / "deeper" / "new.json"
    assert why_unwritable(str(new)) is None
    assert (new.parent.is_dir(), new.exists()) == (True, False)
    new.write_text("kept")
    assert (why_unwritable(str(new)), new.read_text()) == (None, "kept")
    assert why_unwritable(str(new / "below")) == "File exists"
    assert why_unwritable(str(tmp_path)) == "Is a directory"


def test_a_new_file_is_tried_in_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*, dir: Path) -> None:
        raise OSError(30, f"nothing is written in {dir}")

    monkeypatch.setenv("HOME", str(tmp_path))
    assert why_unwritable("~/made/new.json") is None
    assert (tmp_path / "made").is_dir()
    monkeypatch.setattr(text_files.tempfile, "TemporaryFile", refuse)
    assert why_unwritable("~/new.json") == f"nothing is written in {tmp_path}"


def test_data_of_the_package_is_read_once() -> None:
    assert packaged("asserts.json") is packaged("asserts.json")
