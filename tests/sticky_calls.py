"""Which calls of torch raise once a kernel has failed, and what: for the rehearsal and the lane."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch


class Scene:
    """What the calls use, made before the device is lost."""

    def __init__(self) -> None:
        self.x = torch.ones(4, 3, device="cuda")
        self.host = torch.ones(4, 3)
        self.stream, self.event = torch.cuda.Stream(), torch.cuda.Event()
        self.event.record()
        self.model = torch.nn.Linear(3, 2).cuda()
        torch.ones(3_000_000, device="cuda")  # leaves a block in the cache


Calls = dict[str, Callable[[Scene], Any]]

RAISING: Calls = {
    "launch": lambda s: s.x + 1,
    "matmul": lambda s: s.x @ s.x.T,
    "new values": lambda s: torch.zeros(3, device="cuda"),
    "item": lambda s: s.x[0, 0].item(),
    "cpu": lambda s: s.x.cpu(),
    "tolist": lambda s: s.x.tolist(),
    "repr": lambda s: repr(s.x),
    "to the device": lambda s: s.host.cuda(),
    "is_pinned of a host tensor": lambda s: s.host.is_pinned(),
    "synchronize": lambda s: torch.cuda.synchronize(),
    "accelerator.synchronize": lambda s: torch.accelerator.synchronize(),
    "Stream.synchronize": lambda s: s.stream.synchronize(),
    "Stream.query": lambda s: s.stream.query(),
    "Stream.wait_stream": lambda s: s.stream.wait_stream(torch.cuda.current_stream()),
    "Event.record": lambda s: torch.cuda.Event().record(),
    "Event.query": lambda s: s.event.query(),
    "Event.synchronize": lambda s: s.event.synchronize(),
    "is_current_stream_capturing": lambda s: torch.cuda.is_current_stream_capturing(),
    "empty_cache": lambda s: torch.cuda.empty_cache(),
    "mem_get_info": lambda s: torch.cuda.mem_get_info(),
    "save": lambda s: torch.save(s.x, io.BytesIO()),
    "deepcopy": lambda s: copy.deepcopy(s.x),
    "Module.cpu": lambda s: s.model.cpu(),
    "backward": lambda s: s.x.clone().requires_grad_().sum().backward(),
}
SILENT: Calls = {
    "shape": lambda s: s.x.shape,
    "view": lambda s: s.x.view(-1),
    "index by a number": lambda s: s.x[0].shape,
    "state_dict": lambda s: s.model.state_dict(),
    "Event": lambda s: torch.cuda.Event(),
    "Stream": lambda s: torch.cuda.Stream(),
    "current_stream": lambda s: torch.cuda.current_stream(),
    "stream block": lambda s: torch.cuda.stream(s.stream).__enter__(),
    "is_available": lambda s: torch.cuda.is_available(),
    "is_initialized": lambda s: torch.cuda.is_initialized(),
    "device_count": lambda s: torch.cuda.device_count(),
    "current_device": lambda s: torch.cuda.current_device(),
    "get_device_name": lambda s: torch.cuda.get_device_name(),
    "get_device_capability": lambda s: torch.cuda.get_device_capability(),
    "memory_allocated": lambda s: torch.cuda.memory_allocated(),
    "memory_reserved": lambda s: torch.cuda.memory_reserved(),
    "memory_summary": lambda s: torch.cuda.memory_summary(),
    "memory_stats": lambda s: torch.cuda.memory_stats(),
    "reset_peak_memory_stats": lambda s: torch.cuda.reset_peak_memory_stats(),
    "ipc_collect": lambda s: torch.cuda.ipc_collect(),
}


def texts_after(lose: Callable[[], Any]) -> dict[str, str | None]:
    """Return for each call what it raises after the loss, ``None`` where it raises nothing."""
    scene = Scene()
    lose()
    found: dict[str, str | None] = {}
    try:
        torch.cuda.synchronize()
    except torch.AcceleratorError as error:
        found["first"] = str(error)
    for name, call in (RAISING | SILENT).items():
        try:
            call(scene)
            found[name] = None
        except RuntimeError as error:  # cuBLAS says it in words of its own
            found[name] = str(error)
    return found


def expected(text: str, matmul: str | None = None) -> dict[str, str | None]:
    """Return what :func:`texts_after` gives where each call raises this text, or nothing.

    Args:
        text: CUDA's error.
        matmul: what the first matmul of the process raises, if not what cuBLAS says on a GPU.
    """
    found: dict[str, str | None] = {"first": text, **dict.fromkeys(RAISING, text)}
    return found | {"matmul": matmul or NO_CUBLAS} | dict.fromkeys(SILENT)


NO_CUBLAS = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
"""Seen on an H200 with torch 2.11: no matmul had run there, so that cuBLAS had no handle yet."""


TEXT = (
    "CUDA error: device-side assert triggered\n"
    "Search for `cudaErrorAssert' in https://docs.nvidia.com/cuda/cuda-runtime-api/"
    "group__CUDART__TYPES.html for more information.\n"
)
ADVICE = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace"
    " below might be incorrect.\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)
"""Missing where launches block."""
ORDINAL = (
    "CUDA error: invalid device ordinal\n"
    "GPU device may be out of range, do you have enough GPUs?\n"
    "For more detailed error information, run with CUDA_LOG_FILE=stderr\n"
)
