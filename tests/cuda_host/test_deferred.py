"""Deferred guards on torch's own streams, events and CUDA graphs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import cudalens
from cudalens.guards import pending
from tests import standin
from tests.processes import ROOT, python

sys.path.insert(0, str(ROOT / "tests" / "gpu"))

# These replay and capture on the stand-in too; its queue is done when the host waits for it.
from test_captured_on_gpu import (  # noqa: F401
    deferred,
    test_a_bad_replay_of_a_captured_graph_is_found,
    test_a_wait_leaves_what_is_queued_behind_the_last_call,
    test_nothing_is_asked_of_the_host_in_a_capture,
)

SLOTS = pending.MAX_PENDING


@pytest.fixture(autouse=True)
def lagging_queue() -> None:
    standin.lag()


def embed() -> tuple[torch.nn.Embedding, torch.Tensor]:
    return torch.nn.Embedding(10, 4).cuda(), torch.tensor([1, 2, 3], device="cuda")


@pytest.mark.parametrize(("mode", "waits"), [("deferred", False), ("fast", True)])
def test_a_call_waits_for_nothing(mode: str, waits: bool) -> None:
    """Forward and backward, in a queue of which nothing is done unless the host waits."""
    emb, at = embed()
    labels = torch.zeros(3, dtype=torch.int64, device="cuda")

    def step() -> None:
        F.cross_entropy(emb(at), labels).backward()

    with cudalens.check(**{mode: True}):
        step()
        with standin.counting() as seen:
            for _ in range(5):
                step()
    assert bool(seen.waits) is waits
    assert bool(seen.copies_out) is waits


def test_an_optimizer_waits_once_a_step() -> None:
    emb, at = embed()
    optimizer = torch.optim.SGD(emb.parameters(), lr=0.1)
    with cudalens.check(deferred=True):
        emb(at).sum().backward()
        optimizer.step()
        with standin.counting() as seen:
            for _ in range(5):
                emb(at + 0).sum().backward()
                optimizer.step()
    assert seen.blocked == 5


@pytest.mark.parametrize(("calls", "waits"), [(SLOTS - 1, 0), (SLOTS, 1)])
def test_a_full_page_is_waited_for(calls: int, waits: int) -> None:
    emb, at = embed()
    with cudalens.check(deferred=True):
        emb(at)
        with standin.counting() as seen:
            for _ in range(calls - 1):
                emb(at + 0)
    assert (seen.blocked, seen.copies_out) == (waits, waits)


@pytest.mark.parametrize("bad", [9, 10])
def test_a_bad_index_is_told_where_the_host_waits(bad: int) -> None:
    emb, at = embed()
    session = cudalens.check(deferred=True)
    try:
        with session:
            at[1] = bad
            rows = emb(at)
            at.fill_(0)
            rows.sum().item()
    except cudalens.DeviceIndexError as error:
        assert bad == 10
        assert "10" in str(error)
    assert (session.report is not None) == (bad == 10)
    assert standin.count("healthy")


SHAPES: dict[str, Callable[[torch.Tensor], object]] = {
    "mask": lambda y: y[y > 0],
    "nonzero": lambda y: y.nonzero(),
    "bincount": torch.bincount,
    "repeat_interleave": torch.repeat_interleave,
    "unique": torch.unique,
    "host copy": lambda y: torch.zeros(1, dtype=torch.int64).copy_(y),
    "host copy, of the base": lambda y: torch._C.TensorBase.copy_(torch.zeros_like(y.cpu()), y),
}


@pytest.mark.parametrize("bad", [2, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_nothing_that_came_of_a_bad_call_reaches_the_host(name: str, bad: int) -> None:
    """Where a shape is made of values, as anywhere that torch reads them."""
    cudalens.install(deferred=True)
    values, at = torch.ones(3, dtype=torch.int64, device="cuda"), torch.tensor([bad], device="cuda")
    with pytest.raises(cudalens.DeviceIndexError) if bad == 3 else nullcontext():
        SHAPES[name](values[at])
    cudalens.uninstall()


def test_several_streams() -> None:
    """Each has its own slots; what is found on all of them is told in the order of the calls."""
    emb, at = embed()
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    with (
        pytest.raises(cudalens.DeviceIndexError, match="contained 11") as caught,
        cudalens.guard(deferred=True),
    ):
        for value, stream in zip((9, 11, 12), streams, strict=True):
            with torch.cuda.stream(stream):
                emb(at * 0 + value)
    assert ["contained 12" in note for note in caught.value.__notes__] == [True]


class Lookup(torch.autograd.Function):
    """Indexes in its backward pass, which autograd runs in a thread of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: int) -> torch.Tensor:
        ctx.value = value
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad[torch.full((3,), ctx.value, device="cuda")], None


@pytest.mark.parametrize("bad", [2, 3])
def test_a_bad_call_in_backward_is_raised_where_backward_was_called(bad: int) -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=1.0)
    cudalens.install(deferred=True)
    Lookup.apply(x, bad).sum().backward()
    if bad == 2:
        optimizer.step()
    else:
        with pytest.raises(cudalens.DeviceIndexError) as caught:
            optimizer.step()
        report = caught.value.report
        assert report.phase == "backward"
        assert report.source.text == 'return grad[torch.full((3,), ctx.value, device="cuda")], None'
    assert (x.detach().cpu() == 1).all() == (bad == 3)
    cudalens.uninstall()


def test_a_lost_device_ends_no_process() -> None:
    emb, at = embed()
    standin.fault("sigmoid")
    session = cudalens.check(deferred=True)
    with pytest.raises(torch.AcceleratorError), session:
        for _ in range(SLOTS + 1):
            hidden = emb(at + 0)
        torch.sigmoid(hidden).sum().item()
    assert session.report is not None
    assert (session.report.kind, session.report.context_usable) == ("device_assert", False)
    cudalens.settle()


@pytest.mark.parametrize("calls", [SLOTS - 1, SLOTS])
def test_a_forked_child_lives(calls: int) -> None:
    """So many calls fill a page, which is then copied."""
    emb, at = embed()
    cudalens.install(deferred=True)
    for _ in range(calls):
        emb(at + 0)
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    cudalens.uninstall()


def test_workers_of_a_loader_live() -> None:
    emb, at = embed()
    cudalens.install(deferred=True)
    for _ in range(SLOTS + 1):
        emb(at + 0)
    data = TensorDataset(torch.randint(0, 10, (16,)))
    for (batch,) in DataLoader(data, batch_size=8, num_workers=2, pin_memory=True):
        emb(batch.to("cuda", non_blocking=True)).sum().backward()
    cudalens.uninstall()
    assert emb.weight.grad is not None


PROGRAM = """
import os, sys, torch, cudalens
from tests import standin
emb, at = torch.nn.Embedding(10, 4).cuda(), torch.tensor([1, 2, 3], device="cuda")
cudalens.install(deferred=True)
for _ in range(600):
    hidden = emb(at + 0)
if sys.argv[1] == "forked":
    child = os.fork()
    sys.exit(7 if child == 0 else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
if sys.argv[1] == "lost":
    standin.fault("sigmoid")
    torch.sigmoid(hidden).sum().item()
"""


@pytest.mark.parametrize(("end", "status"), [("good", 0), ("forked", 7), ("lost", 1)])
def test_a_program_ends_as_without_guards(end: str, status: int) -> None:
    done = python("-c", PROGRAM, end)
    assert done.returncode == status, done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.stderr.count("AcceleratorError") == (end == "lost")
