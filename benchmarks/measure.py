"""Ratios of CPU time, measured so that what else the machine does falls on both sides alike."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.steps import Step

Opener = Callable[[Step], AbstractContextManager[Step]]
"""Takes the plain step; what the block gives is the step as it is to be run with the tool."""

RESAMPLES = 1000


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """How many times the plain step's CPU time a tool takes: median and 95 % bootstrap range."""

    median: float
    low: float
    high: float
    repetitions: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def ratio_of(values: Sequence[float]) -> Ratio:
    """Return the median of single ratios, with the range that resampling them gives."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return Ratio(
        median=round(median(values), 3),
        low=round(medians[int(0.025 * RESAMPLES)], 3),
        high=round(medians[int(0.975 * RESAMPLES)], 3),
        repetitions=len(values),
    )


def clock(device: str) -> Callable[[], float]:
    """Return the clock: CPU seconds of this process, or wall time behind a synchronised GPU."""
    if device != "cuda":
        return time.process_time

    def wall() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return wall


def seconds(run: Step, times: int, now: Callable[[], float]) -> float:
    """Return the median seconds of several runs, after one that warms the caches."""
    run()
    found = []
    for _ in range(times):
        started = now()
        run()
        found.append(now() - started)
    return median(found)


def compare(
    step: Step, tools: dict[str, Opener], *, repetitions: int, steps: int, device: str = "cpu"
) -> tuple[dict[str, Ratio], float]:
    """Measure tools against the plain step, each repetition between two plain ones.

    Args:
        tools: by name, how to open each.
        repetitions: how often each tool is measured.
        steps: training steps per measurement, after one that is not counted.

    Returns:
        the ratios by name, and the seconds of the plain step.
    """
    now = clock(device)
    found: dict[str, list[float]] = {name: [] for name in tools}
    plain: list[float] = []
    for _ in range(3):
        step()
    # Not always the same tool is to come after the same other.
    order, draw = list(tools.items()), random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for _ in range(repetitions):
            draw.shuffle(order)
            for name, opener in order:
                before = seconds(step, steps, now)
                with opener(step) as run:
                    took = seconds(run, steps, now)
                after = seconds(step, steps, now)
                plain += (before, after)
                found[name].append(2 * took / (before + after))
            gc.collect()
            step()
    finally:
        gc.enable()
    return {name: ratio_of(values) for name, values in found.items()}, median(plain)
