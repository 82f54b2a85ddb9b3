"""Memory of a training loop with and without the full check: it is to be the same."""

from __future__ import annotations

import gc
import json
import resource
import sys
from pathlib import Path
from typing import Any

from benchmarks.children import measured_in_child

KINDS = ("plain", "full")
_PAGE = resource.getpagesize()


def memory(steps: int) -> dict[str, Any]:
    """Train with and without the check, on a GPU or the rehearsal device, and compare.

    Returns:
        for each kind the peak of device memory and what every step left allocated, the peak of
        resident memory and its growth over the second half of the steps, in bytes; and the
        ratio of the device's peaks.
    """
    found: dict[str, Any] = {kind: measured_in_child(__name__, kind, str(steps)) for kind in KINDS}
    plain, full = (found[kind] for kind in KINDS)
    found["steps"] = steps
    found["device"] = full.pop("device")
    plain.pop("device")
    found["peak_device_ratio"] = round(full["peak_device"] / plain["peak_device"], 4)
    found["device_is_same_after_each_step"] = plain.pop("after_steps") == full.pop("after_steps")
    return found


def resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE


def peak_resident() -> int:
    """Return the largest resident memory that this process has had, in bytes.

    Not ``ru_maxrss``: a child begins with the peak of the process that started it.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _child(kind: str, steps: int) -> dict[str, Any]:
    import torch

    import cudalens
    from benchmarks.steps import transformer

    torch.set_num_threads(1)
    has_gpu = torch.cuda.is_available()
    step = transformer(cudalens.ensure_cuda())
    step()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    after, resident_after = [], []

    def run() -> None:
        for number in range(steps):
            step()
            after.append(torch.cuda.memory_allocated())
            if number in (steps // 2 - 1, steps - 1):
                gc.collect()
                resident_after.append(resident())

    if kind == "full":
        with cudalens.check() as session:
            run()
        if session.report is not None:
            msg = f"a good step was reported: {session.report.headline}"
            raise RuntimeError(msg)
    else:
        run()
    return {
        "device": "a GPU" if has_gpu else "the rehearsal device",
        "peak_device": torch.cuda.max_memory_allocated(),
        "after_steps": after,
        "device_growth": after[-1] - after[steps // 2 - 1],
        "peak_resident": peak_resident(),
        "resident_growth": resident_after[1] - resident_after[0],
    }


if __name__ == "__main__":
    print(json.dumps(_child(sys.argv[1], int(sys.argv[2]))))
