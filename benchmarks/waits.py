"""How often a training step makes the host wait for the device, counted on the rehearsal device.

``python -m benchmarks.waits`` prints the counts as JSON: a process that has run a backward pass can
start no rehearsal device.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import cudalens
from benchmarks.steps import Workload, workloads
from cudalens import simulate
from cudalens.simulate.state import DeviceState

STEPS = 10
Guarding = Callable[[], AbstractContextManager[object]]
# Not forced to act on the CPU, where the rehearsal device itself reads values.
WAYS: dict[str, Guarding] = {
    "control": nullcontext,
    "guards": cudalens.guard,
    "deferred": partial(cudalens.guard, deferred=True),
}


def waits_per_step() -> dict[str, dict[str, float]]:
    """Return the synchronising calls of a step, for each workload and each way to guard it.

    Those are the calls that ``torch.cuda.set_sync_debug_mode`` speaks of.
    """
    with simulate.start(announce=False) as device:
        state: DeviceState = device._runtime.state
        return {
            workload.name: {
                name: _count(workload, guarding, state) for name, guarding in WAYS.items()
            }
            for workload in workloads("cpu")
        }


def _count(workload: Workload, guarding: Guarding, state: DeviceState) -> float:
    step = workload.make("cuda")
    with guarding():
        step()
        before = state.sync_count
        for _ in range(STEPS):
            # Guards do not read a good tensor again that has not changed; a loader gives new ones.
            step.inputs.update({name: item.clone() for name, item in step.inputs.items()})
            step()
        return (state.sync_count - before) / STEPS


if __name__ == "__main__":
    print(json.dumps(waits_per_step()))
