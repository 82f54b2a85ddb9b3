"""Cells in which nothing is wrong: a check must leave them alone, however they use the device."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

__all__ = ["HARMLESS", "Cell", "run_harmless"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell that runs through, with and without a check."""

    name: str
    code: str
    needs_bytes: int = 0
    """Free device memory that it takes."""
    is_rehearsable: bool = True
    """Whether the rehearsal device can run it too."""


_START = """import torch
from torch import nn
from torch.nn import functional as F

target = torch.arange(8, device="cuda") % 3
x = torch.randn(8, 4, device="cuda")
layer = nn.Linear(4, 3).to("cuda")

def step():
    loss = F.cross_entropy(layer(x), target)
    loss.backward()
    return loss
"""
"""What every cell may use."""

HARMLESS: tuple[Cell, ...] = (
    Cell(
        name="a graph is captured, with its backward, and replayed",
        code="""side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        layer.zero_grad()
        step()
torch.cuda.current_stream().wait_stream(side)
layer.zero_grad()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()
graph.replay()
assert loss.isfinite()
""",
        is_rehearsable=False,
    ),
    Cell(
        name="synchronizing is forbidden",
        code="""torch.cuda.set_sync_debug_mode("error")
try:
    step()
    F.embedding(target, torch.ones(3, 2, device="cuda"))
finally:
    torch.cuda.set_sync_debug_mode("default")
""",
        is_rehearsable=False,
    ),
    Cell(
        name="algorithms are deterministic",
        code="""torch.use_deterministic_algorithms(True)
try:
    table = torch.ones(3, 2, device="cuda", requires_grad=True)
    F.embedding(target, table).sum().backward()
    torch.zeros(3, device="cuda").index_put_((target,), torch.ones(8, device="cuda"), True)
    step()
finally:
    torch.use_deterministic_algorithms(False)
""",
    ),
    Cell(
        name="a loader with workers pins its batches",
        code="""data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.arange(32) % 3)
loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2, pin_memory=True)
for inputs, labels in loader:
    inputs, labels = (item.to("cuda", non_blocking=True) for item in (inputs, labels))
    F.cross_entropy(layer(inputs), labels).backward()
""",
    ),
    Cell(
        name="streams wait for events",
        code="""side, event = torch.cuda.Stream(), torch.cuda.Event()
event.record()
with torch.cuda.stream(side):
    side.wait_event(event)
    rows = F.embedding(target, torch.ones(3, 2, device="cuda"))
    rows.record_stream(torch.cuda.current_stream())
torch.cuda.current_stream().wait_stream(side)
assert rows.sum().item() == 16
""",
    ),
    Cell(
        name="checkpointing under autocast",
        code="""from torch.utils.checkpoint import checkpoint
with torch.autocast("cuda", dtype=torch.bfloat16):
    hidden = checkpoint(layer, x.requires_grad_(), use_reentrant=False)
    F.cross_entropy(hidden.float(), target).backward()
""",
    ),
    Cell(
        name="attention in half precision",
        code="""q, k, v = (torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16,
           requires_grad=True) for _ in range(3))
F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
assert q.grad.isfinite().all()
""",
    ),
    Cell(
        name="a recurrent layer of cuDNN",
        code="""rnn = nn.LSTM(4, 3, num_layers=2, dropout=0.1).to("cuda")
out, _ = rnn(torch.randn(8, 1, 4, device="cuda"))
F.cross_entropy(out.squeeze(1), target).backward()
nn.Conv1d(4, 3, 3, padding=1).to("cuda")(torch.randn(2, 4, 8, device="cuda")).sum().backward()
""",
    ),
    Cell(
        name="sparse tensors",
        code="""places = torch.stack([target, torch.arange(8, device="cuda")])
matrix = torch.sparse_coo_tensor(places, torch.ones(8, device="cuda"), (3, 8))
assert (matrix @ torch.ones(8, 2, device="cuda")).sum().item() == 16
assert (torch.zeros(3, 8, device="cuda") + matrix).sum().item() == 8
matrix.coalesce().to_sparse_csr() @ torch.ones(8, 1, device="cuda")
table = nn.Embedding(3, 2, sparse=True).to("cuda")
table(target).sum().backward()
""",
        is_rehearsable=False,
    ),
    Cell(
        name="complex numbers and eight bits",
        code="""torch.fft.ifft(torch.fft.fft(torch.randn(8, device="cuda"))).abs().sum().item()
small = torch.randn(3, 16, device="cuda").to(torch.float8_e4m3fn)
small.float().index_select(0, target).sum().item()
torch.randint(0, 3, (8,), device="cuda", dtype=torch.uint8).long().bincount()
""",
    ),
    Cell(
        name="fused optimizers",
        code="""for make in (
    lambda p: torch.optim.AdamW(p, fused=True),
    lambda p: torch.optim.Adam(p, capturable=True),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
):
    optimizer = make(layer.parameters())
    step()
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    Cell(
        name="more than 2^31 indices",
        code="""index = torch.zeros(2**31 + 8, dtype=torch.int64, device="cuda")
index[-1] = 3
taken = torch.take(torch.arange(4, dtype=torch.uint8, device="cuda"), index)
assert taken[-1].item() == 3
""",
        needs_bytes=30 << 30,
        is_rehearsable=False,
    ),
    Cell(
        name="a function of torch.compile's",
        code="torch.compile(step)()\n",
    ),
    Cell(
        name="vmap, and no gradients",
        code="""table = torch.randn(3, 2, device="cuda")
torch.func.vmap(lambda i: table[i])(target[:, None])
with torch.inference_mode():
    F.embedding(target, table)
""",
    ),
    Cell(
        name="random numbers",
        code="""torch.manual_seed(0)
weights = torch.rand(4, 8, device="cuda")
torch.multinomial(weights, 1)
torch.multinomial(weights, 8)
torch.multinomial(weights, 20, replacement=True)
torch.bernoulli(weights)
torch.poisson(weights)
""",
    ),
)


def run_harmless(name: str) -> dict[str, Any]:
    """Run a cell under a full check and tell everything that was said of it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    import cudalens

    cell = next(item for item in HARMLESS if item.name == name)
    if cell.needs_bytes and torch.cuda.mem_get_info()[0] < cell.needs_bytes:
        return {"unavailable": "the GPU has not enough free memory"}
    said: list[str] = []
    session = cudalens.check()
    error = None
    try:
        with session:
            exec(compile(_START + cell.code, "<cell>", "exec"), {"__name__": "cell"})
            said += session.recorder.limits if session.recorder is not None else ["no recorder"]
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}".split("\n", 1)[0]
    report = session.report
    return {
        "error": error,
        "report": report.headline if report is not None else None,
        "troubles": [*said, *session.internal_errors],
    }
