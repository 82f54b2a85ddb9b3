"""What is said beside a report: where it is, and what was looked at (issue 17, item 29)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.notebook.conftest import BAD
from tests.shells import run

GOOD = "F.embedding(ids.clamp(max=4), table).sum().shape"


def status(shell: Any, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return the lines of ``%cudacheck status`` by their names."""
    capsys.readouterr()
    run(shell, "%cudacheck status")
    lines = [line.partition(":") for line in capsys.readouterr().out.splitlines()]
    return {name: text.strip() for name, _, text in lines}


@pytest.mark.parametrize("how", ["%%cudacheck {}\n", "%cudacheck {} ", "%cudacheck on {}"])
def test_item_29_the_files_of_a_report_are_named(
    shell: Any, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With their whole paths, one line each; a good cell writes nothing and says nothing."""
    page, data = tmp_path / "out.html", tmp_path / "out.json"
    magic = how.format(f"--html {page} --json {data}")
    if "on" in how:
        run(shell, magic)
        magic = ""
    capsys.readouterr()
    run(shell, magic + GOOD)
    assert "report" not in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    run(shell, magic + BAD)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cudalens")]
    assert said == [f"cudalens: the report is in {path}" for path in (page, data)]
    assert page.exists() and data.exists()
    run(shell, "%cudacheck off")
    capsys.readouterr()
    run(shell, f"%cudacheck last --json {tmp_path / 'again.json'}")
    assert f"cudalens: the report is in {tmp_path / 'again.json'}" in capsys.readouterr().out


def test_item_29_a_file_that_was_not_written_is_not_named(
    shell: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report says so among its limits."""
    run(shell, f"%%cudacheck --html {tmp_path} -r found\n{BAD}")
    assert "the report is in" not in capsys.readouterr().out
    assert any("was not written" in line for line in shell.user_ns["found"].limits)


@pytest.mark.parametrize("how", ["%%cudacheck\n", "%cudacheck ", "%cudacheck on"])
def test_item_29_status_says_what_a_silent_check_looked_at(
    shell: Any, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checked cell says nothing itself; an unchecked one does not change the line."""
    if "on" in how:
        run(shell, how)
        how = ""
    capsys.readouterr()
    run(shell, how + GOOD)
    assert "cudalens" not in "".join(capsys.readouterr())
    said = status(shell, capsys)["last check"]
    assert said == "1 guarded call looked at, 3 ops recorded; nothing found"
    run(shell, "%cudacheck off")
    run(shell, "torch.ones(3) + 1")
    assert status(shell, capsys)["last check"] == (
        said if how else "0 guarded calls looked at, 0 ops recorded; nothing found"
    )
    run(shell, f"%%cudacheck\n{BAD}")
    assert status(shell, capsys)["last check"].endswith("recorded; device_assert")


def test_item_29_the_display_of_a_value_counts_for_its_cell(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is a second check, and one cell."""
    run(shell, f"class R:\n    def __repr__(self): return str({GOOD})")
    run(shell, f"%%cudacheck\n{GOOD}\nR()")
    said = status(shell, capsys)["last check"]
    assert said == "2 guarded calls looked at, 6 ops recorded; nothing found"


@pytest.mark.parametrize("is_first", [True, False])
def test_item_29_simulate_says_at_once_what_it_is_doing(
    shell: Any, is_first: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch has to be loaded first, a line says so before; else it is there at once."""
    seen: list[str] = []
    start = "cudalens.session.process.start_simulation"
    monkeypatch.setattr(start, lambda: seen.append(capsys.readouterr().out))
    if is_first:
        monkeypatch.delitem(sys.modules, "cudalens.simulate.activation")
    capsys.readouterr()
    run(shell, "%cudacheck simulate")
    assert seen == ["starting the rehearsal device ...\n" if is_first else ""]
