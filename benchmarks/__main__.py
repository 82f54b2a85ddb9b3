"""Measure everything, print one table, and write the results and the pages that quote them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import compiled, growth, pages, startup
from benchmarks.apart import compare_apart
from benchmarks.children import measured_in_child
from benchmarks.measure import Ratio, compare
from benchmarks.memory import memory
from benchmarks.steps import Workload, has_transformers, workloads
from benchmarks.tools import (
    ANOMALY,
    DEBUG_MODE,
    DEBUG_TRACES,
    FULL,
    GUARDS,
    NAN,
    OWN,
    available,
    missing,
)
from tests.processes import ROOT

NAMED = (GUARDS, FULL, NAN, DEBUG_MODE, DEBUG_TRACES, ANOMALY)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def machine(device: str) -> dict[str, Any]:
    """Describe the machine in general words."""
    kind = torch.cuda.get_device_name() if device == "cuda" else pages.CPU_ONLY
    return {
        "cores": os.cpu_count(),
        "device": kind,
        "python": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
    }


def origin() -> dict[str, Any]:
    """Tell of which commit the results are, of which day, and how busy the machine was before."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "commit": said.stdout.strip() or None,
        "date": time.strftime("%Y-%m-%d"),
        "load": round(os.getloadavg()[0], 2),
    }


def overheads(device: str, *, quick: bool) -> dict[str, Any]:
    """Measure every tool on every step."""
    found: dict[str, Any] = {}
    for workload in workloads(device)[: 1 if quick else None]:
        say(f"steps: {workload.description}")
        ratios, plain_s = _ratios(workload, device, quick=quick)
        found[workload.name] = {
            "description": workload.description,
            "layers_of": "transformers" if has_transformers() else "torch",
            "plain_ms": round(1000 * plain_s, 2),
            "ratios": {name: ratio.to_dict() for name, ratio in ratios.items()},
        }
    return found


def _ratios(workload: Workload, device: str, *, quick: bool) -> tuple[dict[str, Ratio], float]:
    """Measure every tool on one step: the slow ones less often, some in their own processes."""
    step = workload.make(device)
    ratios: dict[str, Ratio] = {}
    plain_s = 0.0
    tools = available(device, lambda tool: not workload.is_large or tool.name in OWN)
    for is_slow in (True, False):
        measured, plain_s = compare(
            step,
            {t.name: t.opener for t in tools if t.is_slow is is_slow and not t.in_child},
            repetitions=1 if quick else 5 if is_slow or workload.is_large else 15,
            steps=1 if quick else 4 if is_slow or workload.is_large else 12,
            device=device,
        )
        ratios |= measured
    del step
    for tool in tools:
        if tool.in_child:
            ratios[tool.name] = compare_apart(
                tool,
                workload.name,
                repetitions=1 if quick else 3,
                steps=1 if quick else 8,
                device=device,
            )
    return ratios, plain_s


def measure(*, quick: bool) -> dict[str, Any]:
    """Measure everything."""
    torch.set_num_threads(1)
    measured = origin()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = overheads(device, quick=quick)
    say("growth with the ops of a step")
    sizes, repetitions = ((10, 30), 1) if quick else ((10, 100, 1_000, 10_000), 5)
    curves = growth.by_ops(sizes, repetitions)
    say("growth of the diagnosis")
    curves += growth.diagnosis_curves(quick=quick)
    say("start and weight")
    starts = startup.startup(1 if quick else 5)
    weights = startup.weights()
    say("memory")
    by_name = {curve.name: curve.to_dict() for curve in curves}
    used = memory(4 if quick else 200)
    say("waits of the host")
    waited = {} if device == "cuda" else measured_in_child("benchmarks.waits")
    say("compiled code")
    in_compiled = {} if quick or device == "cuda" else compiled.measured()
    small = steps["transformer"]["ratios"]
    return {
        "measured": measured,
        "machine": machine(device),
        **{f"{name}_step_ratio": small[name]["median"] for name in NAMED},
        **starts,
        "diagnose_s": by_name["graph_nodes"],
        **weights,
        "peak_device_ratio": used["peak_device_ratio"],
        "steps": steps,
        "not_installed": list(missing(device)),
        "growth": by_name,
        "memory": used,
        "waits_per_step": waited,
        "compiled": in_compiled,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="one repetition of small sizes: numbers mean nothing"
    )
    parser.add_argument(
        "--to",
        type=Path,
        default=ROOT,
        help="folder to write benchmarks/results.json and docs/ to, and whose README.md is updated",
    )
    options = parser.parse_args(arguments)
    started = time.monotonic()
    docs: Path = options.to / "docs"
    results = measure(quick=options.quick)
    pages.draw_costs(results, docs / "performance")
    file = options.to / "benchmarks" / "results.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    (docs / "performance.md").write_text(pages.performance_page(results), encoding="utf-8")
    if (readme := options.to / "README.md").exists():
        text = pages.with_costs(readme.read_text(encoding="utf-8"), results)
        readme.write_text(text, encoding="utf-8")
    say(f"{time.monotonic() - started:.0f} s")
    print(pages.summary(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
