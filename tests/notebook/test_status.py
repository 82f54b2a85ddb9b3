"""What is said beside a report: where it is, and what was looked at."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.shells import BAD, Notebook

GOOD = "F.embedding(ids.clamp(max=4), table).sum().shape"


def last_check(notebook: Notebook) -> str:
    """Return what ``%cudacheck status`` says of the last check."""
    notebook.run("%cudacheck status")
    return notebook.out.partition("\nlast check:")[2].partition("\n")[0].strip()


@pytest.mark.parametrize("how", ["%%cudacheck {}\n", "%cudacheck {} ", "%cudacheck on {}"])
def test_a_report_is_bound_and_its_files_are_written_and_named(
    notebook: Notebook, how: str, tmp_path: Path
) -> None:
    """With their whole paths, one line each; a good cell writes nothing and says nothing."""
    page, data = tmp_path / "a page.html", tmp_path / "out.json"
    magic = notebook.under(how.format(f"-r found --html '{page}' --json {data}"))
    notebook.names["found"] = "an older one"
    notebook.run(magic + GOOD)
    assert "report" not in notebook.out
    assert notebook.names["found"] is None
    assert list(tmp_path.iterdir()) == []
    notebook.run(magic + BAD)
    said = [line for line in notebook.out.splitlines() if line.startswith("cudalens")]
    assert said == [f"cudalens: the report is in {path}" for path in (page, data)]
    assert notebook.names["found"].argument == "indices"
    assert json.loads(data.read_text(encoding="utf-8"))["argument"] == "indices"
    assert "<html" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("how", ["%%cudacheck\n", "%cudacheck ", "%cudacheck on"])
def test_status_says_what_a_silent_check_looked_at(notebook: Notebook, how: str) -> None:
    """A checked cell says nothing itself; an unchecked one does not change the line."""
    magic = notebook.under(how)
    notebook.run(magic + GOOD)
    assert "cudalens" not in notebook.out + notebook.err
    said = "1 guarded call checked, 3 ops recorded, nothing found"
    assert last_check(notebook) == said
    notebook.run("%cudacheck off")
    notebook.run("torch.ones(3) + 1")
    assert last_check(notebook) == (
        said if magic else "0 guarded calls checked, 0 ops recorded, nothing found"
    )
    notebook.run(f"%%cudacheck\n{BAD}")
    assert last_check(notebook).endswith("recorded, a problem found")


def test_status_says_what_is_installed_and_found(notebook: Notebook) -> None:
    notebook.run("%cudacheck status")
    for line in (
        "cells:        checked under %%cudacheck only",
        "guards:       not installed",
        "CUDA:         fine (",
        "last finding: none",
    ):
        assert line in notebook.out
    notebook.run(f"%%cudacheck\n{BAD}")
    notebook.run("%cudacheck on")
    notebook.run("%cudacheck status")
    for line in ("cells:        checked\n", "guards:       installed", "7 is outside the 5 rows"):
        assert line in notebook.out


def test_the_display_of_a_value_counts_for_its_cell(notebook: Notebook) -> None:
    """It is a second check, and one cell."""
    notebook.run(f"class R:\n    def __repr__(self): return str({GOOD})")
    notebook.run(f"%%cudacheck\n{GOOD}\nR()")
    assert last_check(notebook) == "2 guarded calls checked, 6 ops recorded, nothing found"


@pytest.mark.parametrize("is_first", [True, False])
def test_simulate_says_at_once_what_it_is_doing(
    notebook: Notebook,
    is_first: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where torch has to be loaded first, a line says so before; else it is there at once."""
    seen: list[str] = []
    start = "cudalens.session.process.start_simulation"
    monkeypatch.setattr(start, lambda: seen.append(capsys.readouterr().out))
    if is_first:
        monkeypatch.delitem(sys.modules, "cudalens.simulate.activation")
    notebook.run("%cudacheck simulate")
    assert seen == ["starting the rehearsal device ...\n" if is_first else ""]
