"""Measure the guards inside compiled code on CPU inductor: ``python -m benchmarks.compiled``.

Each measurement is a process of its own, with inductor's caches in a folder of its own: the first
of each kind compiles, the others find its code there.  Times are those of the processor, so that
other work on the machine counts little.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own custom

import cudalens
from benchmarks.children import measured_in_child
from benchmarks.measure import seconds
from benchmarks.steps import SmallTransformer
from cudalens.guards.process import PROCESS

BATCHES, STEPS = 15, 30
PLAIN, GUARDED = "plain", "guarded"


def workloads() -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    """Return a model, its tokens and its labels, for each step."""
    torch.manual_seed(0)
    return {
        "embedding and cross entropy": (
            # Little else than what is guarded.
            nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 10)),
            torch.randint(0, 1000, (64, 32)),
            torch.randint(0, 10, (64, 32)),
        ),
        "small transformer": (
            SmallTransformer(),
            torch.randint(0, 50, (16, 32)),
            torch.randint(0, 50, (16, 32)),
        ),
    }


def measure(workload: str) -> dict[str, Any]:
    """Compile and run one step in this process, with what is installed."""
    torch.compile(lambda x: x + 1)(torch.ones(8))  # loads the compiler, and makes its headers
    model, tokens, labels = workloads()[workload]

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())

    compiled = torch.compile(loss_of)

    def step() -> Tensor:
        model.zero_grad()
        loss: Tensor = compiled(tokens, labels)
        loss.backward()
        return loss.detach()

    def steps() -> None:
        for _ in range(STEPS):
            step()

    before, started = code_bytes(), processor_s()
    step()
    compile_s, size = processor_s() - started, code_bytes() - before
    digest = hashlib.sha256(step().numpy().tobytes())
    for parameter in model.parameters():
        digest.update(parameter.grad.numpy().tobytes())  # type: ignore[union-attr]
    return {
        "compile_s": compile_s,
        "code_bytes": size,
        "step_us": seconds(steps, BATCHES, time.process_time) / STEPS * 1e6,
        "result": digest.hexdigest(),
    }


def processor_s() -> float:
    """Return the seconds that this process and its compilers have used so far."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def code_bytes() -> int:
    """Count what inductor has written: the code around the kernels, and the kernels."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    files = (item for end in ("py", "cpp") for item in Path(cache_dir()).rglob(f"*.{end}"))
    return sum(item.stat().st_size for item in files)


def compare(workload: str, repetitions: int) -> dict[str, Any]:
    """Measure both kinds in turn; times of a step are the least of the medians.

    The second repetition is the first that finds its code in inductor's caches.
    """
    found: dict[str, list[dict[str, Any]]] = {PLAIN: [], GUARDED: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repetitions):
            for kind, runs in found.items():
                apart = {
                    "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / kind),
                    "TORCHINDUCTOR_COMPILE_THREADS": "1",
                }
                runs.append(measured_in_child("benchmarks.compiled", workload, kind, **apart))
                print(workload, kind, runs[-1], file=sys.stderr, flush=True)
    return {
        "same_bits": len({run["result"] for runs in found.values() for run in runs}) == 1,
        **{
            kind: {
                "step_us": round(min(run["step_us"] for run in runs), 1),
                "compile_cold_s": round(runs[0]["compile_s"], 2),
                "compile_warm_s": round(runs[-1]["compile_s"], 2),
                "code_kb": round(runs[0]["code_bytes"] / 1024, 1),
            }
            for kind, runs in found.items()
        },
    }


def measured() -> dict[str, dict[str, Any]]:
    """Return what is measured of each step; nothing where there is no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return {}
    return {name: compare(name, 4) for name in workloads()}


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:]:
        workload, kind = sys.argv[1:]
        guarded = kind == GUARDED
        with PROCESS.acting_on("cpu"), cudalens.guard(deferred=True) if guarded else nullcontext():
            print(json.dumps(measure(workload)))
    else:
        print(json.dumps(measured(), indent=1))


if __name__ == "__main__":
    main()
