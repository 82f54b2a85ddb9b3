"""The benchmark runs to its end and writes what it promises; no test looks at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import apart, compiled, memory, pages, steps, tools
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
    assert results["waits_per_step"]["transformer"]["deferred"] == 1
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


def test_a_child_has_a_peak_of_its_own() -> None:
    """The peak of the process that started it is none of its own, as it is in ``ru_maxrss``."""
    held = bytearray(b"x") * 300_000_000
    code = "from benchmarks.memory import peak_resident; print(peak_resident())"
    assert 1_000_000 < int(python("-c", code, fresh=True).stdout) < len(held)
    assert memory.peak_resident() > len(held)


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


def test_the_page_has_sections_for_what_was_measured_alone() -> None:
    """Waits and compiled code are measured on the CPU, and code where there is a compiler."""
    stored = json.loads(STORED)
    kinds = {
        "plain": {"step_us": 10.5, "compile_cold_s": 6, "compile_warm_s": 2, "code_kb": 70.25},
        "guarded": {"step_us": 11, "compile_cold_s": 7, "compile_warm_s": 2, "code_kb": 80},
    }
    for same, word in ((True, "yes"), (False, "no")):
        found = {"a step": {"same_bits": same, **kinds}}
        waits = {"transformer": {"control": 1.0, "deferred": 1.0}}
        page = pages.performance_page({**stored, "compiled": found, "waits_per_step": waits})
        assert (
            "| a step, plain | 10.5 | 6 | 2 | 70.25 |\n| a step, guarded | 11 | 7 | 2 | 80 |"
            in page
        )
        assert f"bit-identical: {word}." in page
        assert "| `cudalens.install(deferred=True)` | 1 |" in page
    without = pages.performance_page({**stored, "compiled": {}, "waits_per_step": {}})
    assert "Compiled code" not in without and "Waits for the GPU" not in without
    assert "<summary>Memory</summary>" in without and "\n\n\n" not in without


def test_the_readme_names_the_median_and_the_extremes_of_all_steps() -> None:
    """The lowest and the highest step, and the day of the run."""
    stored = json.loads(STORED)
    for factor, name in ((0.5, "conv"), (7.0, "tiny_bert")):
        stored["steps"][name]["ratios"]["full"]["median"] = factor
    section = pages.costs_section(stored)
    assert "times slower (0.5 to 7.0 on 6 models)" in section
    assert stored["measured"]["date"] in section


def test_the_chart_has_a_bar_for_each_model_and_tool(tmp_path: Path) -> None:
    """A figure that was not measured on every model is left out."""
    stored = json.loads(STORED)
    del stored["steps"]["conv"]["ratios"]["anomaly"]
    drawn = pages.draw_costs(stored, tmp_path).read_text("utf-8")
    for label in ("conv net", "recurrent loop", "guards only", "DebugMode()"):
        assert label in drawn
    assert "detect_anomaly()" not in drawn
    assert f"{stored['steps']['graph']['ratios']['full']['median']:.1f}" in drawn


def test_a_readme_without_marks_is_left_alone() -> None:
    with pytest.raises(ValueError, match="no section"):
        pages.with_costs("text", {})


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


def test_a_decoder_of_torch_s_layers_does_not_look_ahead() -> None:
    size = steps.Size(layers=1, width=8, heads=2, vocabulary=11, batch=1, length=5, inner=16)
    model = steps.SizedTransformer(size).eval()
    tokens = torch.arange(5)[None]
    changed = tokens.clone()
    changed[0, 4] = 9
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4], after[:, 4])


def test_large_steps_are_for_a_gpu_alone() -> None:
    assert not any(workload.is_large for workload in steps.workloads("cpu"))
    large = [workload.name for workload in steps.workloads("cuda") if workload.is_large]
    assert large == ["bert_base", "gpt2_medium"]
    assert set(steps.WORKLOADS) == set(pages.WORKLOADS)


def test_a_tool_apart_is_measured_in_its_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each repetition stands between two plain processes, which do not get the variables."""
    seen: list[tuple[str, str, dict[str, str]]] = []
    times = {"plain": 2.0, "launch_blocking": 3.0}

    def child(
        module: str, name: str, part: str, *rest: str, **environment: str
    ) -> dict[str, float]:
        seen.append((name, part, environment))
        return {"seconds": times[name]}

    monkeypatch.setattr(apart, "measured_in_child", child)
    (blocking,) = (tool for tool in tools.TOOLS if tool.name == "launch_blocking")
    ratio = apart.compare_apart(blocking, "conv", repetitions=2, steps=1, device="cuda")
    assert ratio.median == 1.5
    plain = ("plain", "step", {})
    blocked = ("launch_blocking", "step", {"CUDA_LAUNCH_BLOCKING": "1"})
    assert seen == [plain, blocked, plain, blocked, plain]


@pytest.mark.thorough
def test_a_process_of_its_own_measures_a_step() -> None:
    """A child takes the step and the device by name, and gives its seconds."""
    found = measured_in_child("benchmarks.apart", "plain", "forward", "transformer", "cpu", "1")
    assert found["seconds"] > 0


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tools are left out with one line where they are missing, and only there."""
    monkeypatch.setattr(tools.importlib.util, "find_spec", lambda name: None)
    left_out = tools.missing("cpu")
    assert "TorchSnooper" in left_out and "tensor-sensor" in left_out
    steps_of_torch = {"transformer": {"layers_of": "torch"}}
    gpu = {"machine": {"device": "a GPU"}}
    text = pages._left_out({"not_installed": list(left_out), "steps": steps_of_torch, **gpu})
    assert "not measured: TorchSnooper, tensor-sensor, torchlens" in text
    assert "torch's own layers" in text
    monkeypatch.setattr(tools.importlib.util, "find_spec", lambda name: object())
    assert tools.missing("cpu") == ()
    both = {"not_installed": [], "steps": {"transformer": {"layers_of": "transformers"}}}
    assert pages._left_out({**both, **gpu}) == ""
    assert "On a GPU" in pages._left_out({**both, "machine": {"device": pages.CPU_ONLY}})
