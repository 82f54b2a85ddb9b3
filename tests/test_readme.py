"""The README says what the catalogue and the benchmark say: its tables are cut from them.

``CUDALENS_UPDATE_README=1`` rewrites the tables instead of comparing them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import pages
from cudalens.guards import all_guards, catalogue_rows
from cudalens.guards._unguarded import UNGUARDABLE

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results.json"
INVENTORY = ROOT / "tests" / "data" / "device_asserts.json"
ORDER = ("very common", "common", "rare")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _short_ops(names: list[str]) -> str:
    stems = sorted({name.removeprefix("aten::").split(".")[0] for name in names})
    return ", ".join(f"`{name}`" for name in stems)


def catalogue_table() -> str:
    """One row a guard, the most frequent first."""
    rows = ["| op | what must hold | kind | how often met |", "| --- | --- | --- | --- |"]
    entries = sorted(
        catalogue_rows(), key=lambda row: (row["silent"], ORDER.index(row["frequency"]), row["op"])
    )
    for row in entries:
        kind = "warning: CUDA asserts nothing" if row["silent"] else "error"
        rows.append(
            f"| {_short_ops(row['op'])} | {_cell(row['precondition'])} | {kind} "
            f"| {row['frequency']} |"
        )
    return "\n".join(rows)


def inventory_table() -> str:
    """One row for each reachable assertion of the inventory: its guards, or the reason for none."""
    guards: dict[str, list[str]] = {}
    for entry in all_guards():
        for record in entry.records:
            guards.setdefault(record, []).append(entry.name)
    rows = ["| assertion | in | guarded by |", "| --- | --- | --- |"]
    for record in json.loads(INVENTORY.read_text(encoding="utf-8")):
        if not record["reachable"]:
            continue
        name = record["id"]
        by = ", ".join(f"`{item}`" for item in guards.get(name, []))
        file = str(record["file"]).rpartition("/")[2]
        rows.append(f"| {name} | {_cell(file)} | {by or 'no guard: ' + _cell(UNGUARDABLE[name])} |")
    return "\n".join(rows)


def _between(text: str, name: str) -> tuple[int, int]:
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    return text.index(begin) + len(begin), text.index(end)


def _check(name: str, table: str, page: Path = README) -> None:
    text = page.read_text(encoding="utf-8")
    start, end = _between(text, name)
    if os.environ.get("CUDALENS_UPDATE_README") == "1":
        page.write_text(f"{text[:start]}\n{table}\n\n{text[end:]}", encoding="utf-8")
        return
    assert text[start:end].strip() == table


def test_the_catalogue_table_is_cut_from_the_code() -> None:
    """The README lists every guard, as the catalogue describes it."""
    _check("catalogue", catalogue_table())


def test_the_inventory_table_is_cut_from_the_code() -> None:
    """The README accounts for every reachable assertion."""
    _check("inventory", inventory_table())


def test_the_costs_are_those_of_the_last_benchmark() -> None:
    """The README's figures, and those of the page it points to, are the stored results."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    _check("costs", pages.costs_section(results))
    page = ROOT / "docs" / "performance.md"
    assert page.read_text(encoding="utf-8") == pages.performance_page(results)


def test_the_first_screen_is_short() -> None:
    """What it is, both messages, install and use fit into the first 25 lines."""
    lines = README.read_text(encoding="utf-8").splitlines()
    first = "\n".join(lines[:25])
    assert "pip install cudalens" in first
    assert "%%cudacheck" in first
    assert "device-side assert triggered" in first


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("catalogue", "| `gather` |", "| `gathers` |"),
        ("catalogue", "in [0, rows - 1]", "in [0, rows]"),
        ("inventory", "| take | IndexKernel.cu | `take_index_in_range` |\n", ""),
        ("costs", "`%%cudacheck --nan` | ", "`%%cudacheck --nan` | 1"),
    ],
)
def test_the_comparison_can_fail(
    name: str, old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A README with another word, a row less or another figure is not what the code says."""
    monkeypatch.delenv("CUDALENS_UPDATE_README", raising=False)
    whole = README.read_text(encoding="utf-8")
    start, end = _between(whole, name)
    table = whole[start:end].strip()
    assert old in table
    page = tmp_path / "README.md"
    page.write_text(whole.replace(old, new), encoding="utf-8")
    with pytest.raises(AssertionError):
        _check(name, table, page)
    monkeypatch.setenv("CUDALENS_UPDATE_README", "1")
    _check(name, table, page)
    start, end = _between(page.read_text(encoding="utf-8"), name)
    assert page.read_text(encoding="utf-8")[start:end].strip() == table
