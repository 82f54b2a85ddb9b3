"""The benchmark runs to its end and writes what it promises; no test looks at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pages
from benchmarks.measure import ratio_of

ROOT = Path(__file__).parent.parent
PROMISED = {
    *("guards_step_ratio", "full_step_ratio", "nan_step_ratio", "debugmode_step_ratio"),
    *("debugmode_traces_step_ratio", "anomaly_step_ratio", "load_ext_ms", "diagnose_s"),
    *("report_html_kb", "notebook_kb", "wheel_kb", "peak_device_ratio"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("bench")
    (folder / "README.md").write_text(
        "before\n<!-- costs:begin -->\nold\n<!-- costs:end -->\nafter"
    )
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--to", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((folder / "benchmarks" / "results.json").read_text(encoding="utf-8"))
    return folder, results, done.stdout


def test_every_promised_number_is_there(run: tuple[Path, dict[str, Any], str]) -> None:
    """Each key of the results has a number; the diagnosis has one for each graph size."""
    _, results, _ = run
    assert set(results) >= PROMISED
    for key in PROMISED - {"diagnose_s"}:
        assert results[key] > 0, key
    assert list(results["diagnose_s"]) == ["100", "1000"]


def test_the_table_is_printed_and_quoted(run: tuple[Path, dict[str, Any], str]) -> None:
    """The run ends with one table; the page has it too, and the README its short form."""
    folder, results, printed = run
    assert pages.ratios_table(results) in printed
    assert pages.ratios_table(results) in (folder / "docs" / "performance.md").read_text("utf-8")
    readme = (folder / "README.md").read_text("utf-8")
    assert readme.startswith("before\n<!-- costs:begin -->\n")
    assert readme.endswith("<!-- costs:end -->\nafter")
    assert "old" not in readme
    assert pages.costs_section(results) in readme


def test_every_curve_has_its_picture(run: tuple[Path, dict[str, Any], str]) -> None:
    """Each growth measurement is drawn, and the page shows the drawing."""
    folder, results, _ = run
    page = (folder / "docs" / "performance.md").read_text("utf-8")
    for name in results["growth"]:
        assert (folder / "docs" / "performance" / f"{name}.svg").read_text("utf-8").count("<svg")
        assert f"(performance/{name}.svg)" in page


def test_device_memory_is_the_same_with_the_check(
    run: tuple[Path, dict[str, Any], str],
) -> None:
    """The check holds no device memory: not at the peak, and not after any step."""
    memory = run[1]["memory"]
    assert memory["peak_device_ratio"] == 1
    assert memory["device_is_same_after_each_step"]


def test_a_ratio_is_a_median_with_its_range() -> None:
    """The range of the resampled medians holds the median and is no wider than the values."""
    ratio = ratio_of([1.0, 2.0, 10.0])
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 1.0, 10.0)
    assert ratio_of([1.5] * 5).to_dict() == {
        "median": 1.5,
        "low": 1.5,
        "high": 1.5,
        "repetitions": 5,
    }


def test_a_readme_without_marks_is_left_alone(tmp_path: Path) -> None:
    """Nothing is written where no section is marked."""
    file = tmp_path / "README.md"
    file.write_text("text")
    with pytest.raises(ValueError, match="no section"):
        pages.write_readme(file, {})
    assert file.read_text() == "text"
