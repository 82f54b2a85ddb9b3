"""Training steps with and without checks: bit-equal losses, memory, time, autocast."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

__all__ = ["AGAIN", "IN_TURN", "STEPS", "TINY", "WAYS", "Size", "run_step", "train"]

Check = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, kw_only=True)
class Size:
    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int
    steps: int


BERT_BASE = Size(layers=12, width=768, heads=12, vocabulary=30522, batch=8, length=128, steps=12)
BUSY = replace(BERT_BASE, batch=64)
"""The kernels take longer than their launches: the host waits for the device."""
TINY = Size(layers=1, width=16, heads=2, vocabulary=11, batch=2, length=5, steps=2)
MODES: dict[str, dict[str, bool]] = {
    "full": {},
    "no sync": {"sync": False},
    "fast": {"fast": True},
    "nan": {"nan": True},
}
"""Options of a check, by the name of the run."""
AGAIN = "plain again"
"""The control: what it differs by from the first is no cost of a check."""
BLOCKING, DEBUG = "launch blocking", "DebugMode"
"""Torch's own ways, to compare with: ``CUDA_LAUNCH_BLOCKING=1``, which is set before CUDA starts,
and the mode that records each call."""
IN_TURN = {"in turn": BERT_BASE, "in turn, a busy GPU": BUSY}
"""Runs that take one step in each way, round after round: their ratios are those of one process."""
WAYS = ("plain", "guards", "deferred", *MODES, DEBUG, AGAIN)
STEPS = (
    *("plain", "guards", "deferred", *MODES, BLOCKING, DEBUG, AGAIN, "float16", "bfloat16"),
    *IN_TURN,
)
ROUNDS = 2 if os.environ.get("HOUR_TINY") else 12


DEFAULT = TINY if os.environ.get("HOUR_TINY") else BERT_BASE
"""A rehearsal without a GPU has no time for the large one."""


def _debug_mode() -> AbstractContextManager[Any]:
    from torch.utils._debug_mode import DebugMode  # from torch 2.9 on

    return DebugMode()


def run_step(kind: str, size: Size = DEFAULT, device: str = "cuda") -> dict[str, Any]:
    """Train a few steps in one way and tell losses, time and memory.

    Args:
        kind: ``plain``, ``guards`` only, at once or ``deferred``, a check of :data:`MODES`, a way
            of torch's own, or a full check under autocast to a dtype; then a bad label follows
            and must be stopped.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if kind == BLOCKING:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    import torch

    import cudalens

    checks: dict[str, Check] = {
        "plain": nullcontext,
        AGAIN: nullcontext,
        BLOCKING: nullcontext,
        DEBUG: _debug_mode,
        "guards": cudalens.guard,
        "deferred": partial(cudalens.guard, deferred=True),
        **{name: partial(cudalens.check, **options) for name, options in MODES.items()},
    }
    torch.use_deterministic_algorithms(True)
    try:
        if kind in IN_TURN:
            own = size if size is TINY else IN_TURN[kind]
            return in_turn(own, device, {way: checks[way] for way in WAYS})
        result = train(size, device, checks.get(kind, cudalens.check), kind)
    finally:
        torch.use_deterministic_algorithms(False)
    if kind in ("float16", "bfloat16"):
        result["stopped"] = _bad_label_is_stopped(kind, device)
    return result


def in_turn(size: Size, device: str, checks: dict[str, Check]) -> dict[str, Any]:
    """Take one step in each way, round after round, and tell the median of each.

    Every round begins with another way, so that none always comes first.
    """
    import torch

    step = _trainer(size, device)
    seconds: dict[str, list[float]] = {way: [] for way in checks}
    ways = list(checks)
    for turn in range(ROUNDS + 1):
        for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
            torch.cuda.synchronize()
            started = time.perf_counter()
            with checks[way]():
                step()
            torch.cuda.synchronize()
            if turn:  # the first round makes what is made once
                seconds[way].append(time.perf_counter() - started)
    return {
        "size": f"{size.batch} x {size.length} tokens",
        "medians": {way: statistics.median(taken) for way, taken in seconds.items()},
    }


def train(size: Size, device: str, check: Check, kind: str) -> dict[str, Any]:
    """Train an encoder with a head over the vocabulary, each step under ``check``."""
    import torch

    step = _trainer(size, device)
    autocast = torch.autocast(device, dtype=getattr(torch, kind)) if "float" in kind else None
    losses, seconds = [], []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(size.steps):
        started = time.perf_counter()
        with check(), autocast or nullcontext():
            loss = step()
        losses.append(loss.detach().double().cpu().item().hex())
        seconds.append(time.perf_counter() - started)
    return {
        "losses": losses,
        "seconds": statistics.median(seconds[1:]),
        "least": min(seconds[1:]),
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def _trainer(size: Size, device: str) -> Callable[[], Any]:
    """Return what takes a step of a model of its own, and gives the loss."""
    import torch
    from torch.nn import functional as F

    torch.manual_seed(0)
    model, embed, head = _model(size, device)
    parameters = [*model.parameters(), *embed.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    ids = torch.randint(0, size.vocabulary, (size.batch, size.length)).to(device)

    def step() -> Any:
        scores = head(model(embed(ids)))
        loss = F.cross_entropy(scores.flatten(0, 1).float(), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def _model(size: Size, device: str) -> tuple[Any, Any, Any]:
    from torch import nn

    layer = nn.TransformerEncoderLayer(
        size.width, size.heads, 4 * size.width, dropout=0.0, batch_first=True
    )
    model = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
    parts = model, nn.Embedding(size.vocabulary, size.width), nn.Linear(size.width, size.vocabulary)
    return tuple(part.to(device) for part in parts)  # type: ignore[return-value]


def _bad_label_is_stopped(dtype: str, device: str) -> str | None:
    import torch
    from torch.nn import functional as F

    import cudalens

    layer = torch.nn.Linear(8, 4).to(device)
    try:
        with cudalens.check() as session, torch.autocast(device, dtype=getattr(torch, dtype)):
            labels = torch.tensor([0, 4], device=device)
            F.cross_entropy(layer(torch.ones(2, 8, device=device)), labels)
    except cudalens.DeviceAssertError:
        pass
    return session.report.headline if session.report is not None else None
