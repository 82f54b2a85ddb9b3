"""Tools that change their process for good, each repetition in a process between two plain ones."""

from __future__ import annotations

import gc
import json
import sys

from benchmarks.children import measured_in_child
from benchmarks.measure import Ratio, clock, ratio_of, seconds
from benchmarks.steps import WORKLOADS, Step
from benchmarks.tools import TOOLS, Tool

PLAIN = "plain"


def compare_apart(
    tool: Tool, workload: str, *, repetitions: int, steps: int, device: str = "cpu"
) -> Ratio:
    """Measure a tool in its own processes against plain ones before and after each.

    Args:
        workload: the name of a training step.
        repetitions: how often the tool is measured.
        steps: steps per process, after some that warm up.
    """
    what = ("forward" if tool.is_forward_only else "step", workload, device, str(steps))

    def child(name: str, **environment: str) -> float:
        found = measured_in_child(__name__, name, *what, **environment)
        return float(found["seconds"])

    values = []
    before = child(PLAIN)
    for _ in range(repetitions):
        took = child(tool.name, **dict(tool.environment))
        after = child(PLAIN)
        values.append(2 * took / (before + after))
        before = after
    return ratio_of(values)


def _child(name: str, part: str, workload: str, device: str, steps: int) -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    step = WORKLOADS[workload].make(device)
    plain: Step = step.forward if part == "forward" else step
    for _ in range(3):
        plain()
    gc.collect()
    gc.disable()
    if name == PLAIN:
        return {"seconds": seconds(plain, steps, clock(device))}
    (tool,) = (item for item in TOOLS if item.name == name)
    with tool.opener(step) as run:
        return {"seconds": seconds(run, steps, clock(device))}


if __name__ == "__main__":
    print(json.dumps(_child(*sys.argv[1:5], int(sys.argv[5]))))
