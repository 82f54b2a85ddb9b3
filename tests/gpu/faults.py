"""Failures that no guard prevents, for the second and third line of defence on a real device."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "BAD_ROWS",
    "FAULTS",
    "KERNEL",
    "SOURCE",
    "Fault",
    "name_a_toolkit",
    "run_fault",
    "unavailable",
]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A cell that dies, and what its report has to say."""

    name: str
    code: str
    kind: str
    op: str | None = None
    argument_max: tuple[str, float] | None = None
    """An argument of the op with its largest value: a host copy must have it."""
    source: str | None = None
    """What the line that is named has to contain."""
    is_no_op: bool = False
    """Whether the kernel is launched past the dispatcher: then no op is to blame."""
    is_lost: bool = True
    options: tuple[tuple[str, bool], ...] = ()
    before: str = ""
    """What runs before the check, in the same namespace."""


SOURCE = """
extern "C" __global__ void pick(const float* table, const long long* rows, float* out, int n,
                                int size, int unchecked) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    if (!unchecked) assert(rows[i] >= 0 && rows[i] < size);
    out[i] = table[rows[i]];
}
"""
# The table comes first: a kernel is loaded into a context, which torch makes with a tensor.
KERNEL = (
    f"""
import torch
table = torch.arange(8.0, device="cuda")
kernel = torch.cuda._compile_kernel({SOURCE!r}, "pick")
"""
    + """
library = torch.library.Library("gpu_suite", "DEF")
library.define("pick(Tensor table, Tensor rows, int unchecked=0) -> Tensor")

def on_cuda(table, rows, unchecked=0):
    out = torch.empty(rows.numel(), device=table.device)
    n = rows.numel()
    blocks = (n + 255) // 256
    kernel((blocks, 1, 1), (256, 1, 1), [table, rows, out, n, table.numel(), unchecked])
    return out

library.impl("pick", on_cuda, "CUDA")
library.impl("pick", lambda table, rows, unchecked=0: table[rows], "CPU")
"""
)
BAD_ROWS = "rows = torch.tensor([0, 9, 3], device='cuda')\n"
_PICK = "gpu_suite::pick"
_COMPILED = """import torch
f = torch.compile(lambda table, rows: (table + 1)[rows] * 2)
table = torch.ones(8, device="cuda")
f(table, torch.tensor([1, 2], device="cuda"))
"""


def _in_pick(name: str, code: str) -> Fault:
    """Return an assertion of the extension's kernel, behind its op."""
    return Fault(
        name=name,
        code=KERNEL + code,
        kind="device_assert",
        op=_PICK,
        source="gpu_suite.pick(",
    )


FAULTS: tuple[Fault, ...] = (
    _in_pick(
        "assert in a kernel of an extension",
        BAD_ROWS + "out = torch.ops.gpu_suite.pick(table, rows)\nlater = out + 1",
    ),
    _in_pick(
        "ten thousand assert lines",
        "rows = torch.full((10_000,), 9, device='cuda')\n"
        "out = torch.ops.gpu_suite.pick(table, rows)",
    ),
    _in_pick(
        "assert in a hook inside backward",
        BAD_ROWS + "leaf = torch.ones(3, device='cuda', requires_grad=True)\n"
        "leaf.register_hook(lambda grad: torch.ops.gpu_suite.pick(table, rows))\n"
        "(leaf * 2).sum().backward()",
    ),
    _in_pick(
        "assert on a side stream",
        BAD_ROWS + "with torch.cuda.stream(torch.cuda.Stream()):\n"
        "    out = torch.ops.gpu_suite.pick(table, rows)",
    ),
    Fault(
        name="assert in a kernel that is no op",
        code=KERNEL
        + BAD_ROWS
        + "out = torch.empty(3, device='cuda')\n"
        + "kernel((1, 1, 1), (256, 1, 1), [table, rows, out, 3, 8, 0])\n"
        + "later = table + 1",
        kind="device_assert",
        is_no_op=True,
    ),
    Fault(
        name="bad index while synchronizing is forbidden",
        code="import torch\n"
        "table, rows = torch.ones(3, 2, device='cuda'), torch.tensor([0, 3], device='cuda')\n"
        "torch.cuda.set_sync_debug_mode('error')\n"
        "torch.nn.functional.embedding(rows, table)",
        kind="device_assert",
        op="aten::embedding",
        argument_max=("indices", 3),
        is_lost=False,
    ),
    Fault(
        name="illegal memory access",
        code=KERNEL
        + "rows = torch.tensor([0, 2**40], device='cuda')\n"
        + "out = torch.ops.gpu_suite.pick(table, rows, 1)",
        kind="cuda_error",
        op=_PICK,
    ),
    Fault(
        name="out of memory",
        code="import torch\nbig = torch.empty(2**45, device='cuda')",
        kind="cuda_error",
        is_lost=False,
    ),
    Fault(
        name="invalid device ordinal",
        code="import torch\nx = torch.ones(1, device='cuda:99')",
        kind="cuda_error",
        is_lost=False,
    ),
    Fault(
        name="bad index in code compiled under the check",
        code=f"{_COMPILED}f(table, torch.tensor([1, 9], device='cuda'))\ntorch.cuda.synchronize()",
        kind="device_assert",
        op="aten::index",
        is_lost=False,
        options=(("force_eager", False),),
    ),
    Fault(
        name="assert in code compiled before the check",
        before=_COMPILED,
        code="f(table, torch.tensor([1, 9], device='cuda'))\ntorch.cuda.synchronize()",
        kind="device_assert",
        options=(("force_eager", False),),
    ),
)


def unavailable(fault: Fault) -> str | None:
    """Say why a fault cannot be provoked with this installation, ``None`` when it can."""
    import torch

    if "_compile_kernel" in fault.code and not hasattr(torch.cuda, "_compile_kernel"):
        return "this torch has no torch.cuda._compile_kernel"
    if "torch.compile" in fault.before + fault.code:
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        if not (shutil.which("cc") or shutil.which("gcc")):
            return "there is no C compiler"
    return None


def name_a_toolkit() -> None:
    """Let torch compile a kernel without headers where CUDA's toolkit is not installed.

    It insists on the toolkit's folder, only to have headers searched there.
    """
    if not (shutil.which("nvcc") or Path("/usr/local/cuda").exists()):
        os.environ.setdefault("CUDA_HOME", os.environ.get("CUDA_PATH", sys.prefix))


def run_fault(name: str) -> dict[str, Any]:
    """Run a fault under a full check and give its report."""
    name_a_toolkit()
    import cudalens
    from cudalens.source.files import CELLS

    fault = next(item for item in FAULTS if item.name == name)
    if reason := unavailable(fault):
        return {"unavailable": reason}
    CELLS.register("<fault>", 1, fault.code.splitlines())
    session = cudalens.check(**dict(fault.options))
    error = None
    names: dict[str, Any] = {}
    exec(compile(fault.before, "<before>", "exec"), names)
    try:
        with session:
            exec(compile(fault.code, "<fault>", "exec"), names)
    except Exception as raised:
        error = raised
    report = session.report
    return {
        "error": type(error).__name__ if error is not None else None,
        "message": str(error).split("\n", 1)[0] if error is not None else None,
        "code": getattr(error, "error_code", None),
        "report": report.to_dict() if report is not None else None,
    }
