"""The benchmark runs to its end and writes what it promises; no test looks at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import compiled, pages, steps
from benchmarks.children import measured_in_child
from benchmarks.measure import ratio_of
from tests.processes import ROOT, python

STORED = (ROOT / "benchmarks" / "results.json").read_text("utf-8")
PROMISED = {
    *("guards_step_ratio", "full_step_ratio", "nan_step_ratio", "debugmode_step_ratio"),
    *("debugmode_traces_step_ratio", "anomaly_step_ratio", "load_ext_ms", "diagnose_s"),
    *("report_html_kb", "notebook_kb", "wheel_kb", "peak_device_ratio"),
}


@pytest.mark.thorough
def test_a_quick_run_measures_everything(tmp_path: Path) -> None:
    """Every number, the table on three pages, the pictures, and no device memory of a check's."""
    begin, end = pages.MARKS
    (tmp_path / "README.md").write_text(f"before\n{begin}\nold\n{end}\nafter")
    done = python("-m", "benchmarks", "--quick", "--to", str(tmp_path), timeout=500, fresh=True)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads((tmp_path / "benchmarks" / "results.json").read_text(encoding="utf-8"))
    assert set(results) >= PROMISED
    for key in PROMISED - {"diagnose_s"}:
        assert results[key] > 0, key
    assert list(results["diagnose_s"]) == ["100", "1000"]
    assert results["waits_per_step"]["transformer"] == {"control": 1, "guards": 5, "deferred": 2}
    assert results["measured"]["commit"] and results["measured"]["date"]
    page = (tmp_path / "docs" / "performance.md").read_text("utf-8")
    assert pages.ratios_table(results) in done.stdout
    assert pages.ratios_table(results) in page
    readme = (tmp_path / "README.md").read_text("utf-8")
    section = pages.costs_section(results)
    assert readme == f"before\n{begin}\n\n{section}\n\n{end}\nafter"
    picture = (tmp_path / "docs" / "performance" / "costs.svg").read_text("utf-8")
    assert "<svg" in picture and "(performance/costs.svg)" in page
    assert results["memory"]["peak_device_ratio"] == 1
    assert results["memory"]["device_is_same_after_each_step"]


@pytest.mark.all
def test_compiled_code_is_measured_with_the_same_bits() -> None:
    """Two kinds of one step, each compiled in a process of its own."""
    found = compiled.compare(next(iter(compiled.workloads())), 1)
    assert found["same_bits"] and found["guarded"]["code_kb"] > found["plain"]["code_kb"]


def test_a_ratio_is_a_median_with_its_range() -> None:
    """The range of the resampled medians holds the median and is no wider than the values."""
    ratio = ratio_of([1.0, 2.0, 10.0])
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 1.0, 10.0)
    even = dict.fromkeys(("median", "low", "high"), 1.5)
    assert ratio_of([1.5] * 5).to_dict() == {**even, "repetitions": 5}


def test_the_pages_say_what_was_timed_and_where() -> None:
    """On a GPU it is wall time, and the guards need not be forced."""
    stored = json.loads(STORED)
    on_gpu = {**stored, "machine": {**stored["machine"], "device": "NVIDIA X"}}
    on_cpu = {**stored, "machine": {**stored["machine"], "device": pages.CPU_ONLY}}
    for results, clock, acting in (
        (on_gpu, "Wall time", "guards act on the GPU's tensors"),
        (on_cpu, "CPU time", "guards are forced to act on CPU tensors"),
    ):
        page = pages.performance_page(results)
        assert f"{clock} of one training step" in page and acting in page


@pytest.mark.parametrize(
    "has_transformers", [pytest.param(True, marks=pytest.mark.thorough), False]
)
@pytest.mark.parametrize("classes", [0, 3])
def test_large_steps_train_in_any_size(
    has_transformers: bool, classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps meant for a GPU run in a tiny size, from either library; the loss falls."""
    monkeypatch.setattr(steps, "has_transformers", lambda: has_transformers)
    size = steps.Size(
        layers=1, width=8, heads=2, vocabulary=11, batch=2, length=5, inner=16, classes=classes
    )
    step = steps.sized("cpu", size)
    step.optimizer.param_groups[0]["lr"] = 0.5
    is_torch_s = isinstance(step.model, steps.SizedTransformer)
    assert is_torch_s is not has_transformers
    losses = [step() for _ in range(20)]
    assert losses[-1] < losses[0]


@pytest.mark.thorough
def test_a_process_of_its_own_measures_a_step() -> None:
    """A child takes the step and the device by name, and gives its seconds."""
    found = measured_in_child("benchmarks.apart", "plain", "forward", "transformer", "cpu", "1")
    assert found["seconds"] > 0
