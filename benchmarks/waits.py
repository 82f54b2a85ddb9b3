"""How often a training step makes the host wait for the device, counted on the rehearsal device.

``python -m benchmarks.waits`` prints the counts as JSON: a process that has run a backward pass can
start no rehearsal device.
"""

from __future__ import annotations

import json

from benchmarks.measure import Opener
from benchmarks.steps import Workload, workloads
from benchmarks.tools import TOOLS
from cudalens import simulate
from cudalens.simulate.state import DeviceState

STEPS = 10
NAMES = ("control", "guards", "deferred")


def waits_per_step() -> dict[str, dict[str, float]]:
    """Return the synchronising calls of a step, for each workload and each way to guard it.

    Those are the calls that ``torch.cuda.set_sync_debug_mode`` speaks of.
    """
    openers = {tool.name: tool.opener for tool in TOOLS if tool.name in NAMES}
    with simulate.start(announce=False) as device:
        state: DeviceState = device._runtime.state
        return {
            workload.name: {
                name: _count(workload, opener, state) for name, opener in openers.items()
            }
            for workload in workloads("cpu")
        }


def _count(workload: Workload, opener: Opener, state: DeviceState) -> float:
    with opener(workload.make("cuda")) as step:
        step()
        before = state.sync_count
        for _ in range(STEPS):
            step()
        return (state.sync_count - before) / STEPS


if __name__ == "__main__":
    print(json.dumps(waits_per_step()))
