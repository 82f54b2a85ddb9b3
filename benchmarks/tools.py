"""The tools that are compared, each as a block around the plain training step."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import cudalens
from benchmarks.measure import Opener
from benchmarks.steps import Step, TrainingStep
from cudalens.guards.process import PROCESS


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One way to run a step."""

    name: str
    label: str
    opener: Opener
    is_slow: bool = False
    """Measured with fewer repetitions."""
    in_child: bool = False
    """It changes the process for good: measured in processes of its own, against plain ones."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables of those processes."""
    is_forward_only: bool = False
    """Runs the model alone, and is compared with the model alone."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    needs: str | None = None
    """A module that must be installed."""

    def is_available(self, device: str) -> bool:
        has_module = self.needs is None or importlib.util.find_spec(self.needs) is not None
        return device in self.devices and has_module


def guards(**options: Any) -> Opener:
    """The guards, forced to act on the tensors of whatever device the step is on."""

    @contextmanager
    def opener(step: Step) -> Iterator[Step]:
        with PROCESS.acting_on("cpu", "cuda"), cudalens.guard(**options):
            yield step

    return opener


def check(**options: Any) -> Opener:
    """A checked block, with the guards forced to act."""

    @contextmanager
    def opener(step: Step) -> Iterator[Step]:
        with PROCESS.acting_on("cpu", "cuda"), cudalens.check(**options) as session:
            yield step
        if session.report is not None:
            msg = f"a good step was reported: {session.report.headline}"
            raise RuntimeError(msg)

    return opener


def debug_mode(**options: Any) -> Opener:
    """torch's own recorder."""

    @contextmanager
    def opener(step: Step) -> Iterator[Step]:
        from torch.utils._debug_mode import DebugMode

        def run() -> Any:
            # One mode a step: it keeps every call, and would run out of memory.
            with DebugMode(**options):
                return step()

        yield run

    return opener


@contextmanager
def anomaly(step: Step) -> Iterator[Step]:
    """torch's anomaly detection."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            yield step


@contextmanager
def torchlens(step: Step) -> Iterator[Step]:
    """torchlens around the model; it wraps torch's functions for the rest of the process."""
    import torchlens

    assert isinstance(step, TrainingStep)
    # It takes the first input by position alone.
    (_, first), *others = step.inputs.items()
    model, rest = step.model, dict(others)
    yield lambda: torchlens.trace(model, [first], rest)


@contextmanager
def snooper(step: Step) -> Iterator[Step]:
    """TorchSnooper over the step, its output thrown away."""
    import torchsnooper

    with Path(os.devnull).open("w") as sink:
        # The lines of one function are traced: those of the step.
        snooped: Step = torchsnooper.snoop(output=sink)(step.__call__)
        yield snooped


@contextmanager
def tensor_sensor(step: Step) -> Iterator[Step]:
    """tensor-sensor's clarify around the step."""
    import tsensor

    with tsensor.clarify():
        yield step


GUARDS, DEFERRED, FULL, NAN = "guards", "deferred", "full", "nan"
DEBUG_MODE, DEBUG_TRACES, ANOMALY = "debugmode", "debugmode_traces", "anomaly"

TOOLS = (
    Tool(name="control", label="plain again (control)", opener=nullcontext),
    Tool(name=GUARDS, label="`cudalens.install()`: guards only", opener=guards()),
    Tool(name=DEFERRED, label="`cudalens.install(deferred=True)`", opener=guards(deferred=True)),
    Tool(name=FULL, label="`%%cudacheck`: guards, recorder, sync", opener=check()),
    Tool(name="full_no_sync", label="`%%cudacheck --no-sync`", opener=check(sync=False)),
    Tool(name=NAN, label="`%%cudacheck --nan`", opener=check(nan=True)),
    Tool(name=ANOMALY, label="`torch.autograd.detect_anomaly()`", opener=anomaly),
    Tool(name=DEBUG_MODE, label="torch `DebugMode()`", opener=debug_mode(), is_slow=True),
    Tool(
        name=DEBUG_TRACES,
        label="torch `DebugMode` with modules and stack traces",
        opener=debug_mode(record_nn_module=True, record_stack_trace=True),
        is_slow=True,
    ),
    Tool(
        name="launch_blocking",
        label="`CUDA_LAUNCH_BLOCKING=1`",
        opener=nullcontext,
        in_child=True,
        environment=(("CUDA_LAUNCH_BLOCKING", "1"),),
        devices=("cuda",),
    ),
    Tool(name="snooper", label="TorchSnooper", opener=snooper, is_slow=True, needs="torchsnooper"),
    Tool(name="tensor_sensor", label="tensor-sensor", opener=tensor_sensor, needs="tsensor"),
    Tool(
        name="torchlens",
        label="torchlens `trace` (model alone)",
        opener=torchlens,
        in_child=True,
        is_forward_only=True,
        needs="torchlens",
    ),
)
OWN = (GUARDS, DEFERRED, FULL, NAN, "control", "launch_blocking")
"""What is measured on large steps too."""


def missing(device: str) -> tuple[str, ...]:
    """Return the labels of the tools that are not installed here."""
    mine = (tool for tool in TOOLS if device in tool.devices)
    return tuple(tool.label for tool in mine if not tool.is_available(device))


def available(device: str, only: Callable[[Tool], bool] = lambda tool: True) -> tuple[Tool, ...]:
    """Return the tools that can be measured here."""
    return tuple(tool for tool in TOOLS if tool.is_available(device) and only(tool))
