"""Deferred guards beside other work, in CUDA graphs and in compiled code, on real hardware.

A bad index is replaced before any kernel sees it, so that these tests need no process of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cudalens
from cudalens.guards.pending import PENDING

pytestmark = pytest.mark.gpu


@pytest.fixture
def deferred() -> Iterator[None]:
    """Deferred guards; the device computes on behind the test."""
    torch.compiler.reset()
    with cudalens.guard(deferred=True):
        yield
    torch.compiler.reset()
    assert int(torch.ones(3, device="cuda").sum()) == 3


def test_a_wait_leaves_what_is_queued_behind_the_last_call(
    deferred: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second of work is still under way when the checks have been looked at."""
    monkeypatch.setattr(PENDING, "_replays", {})  # replays are waited for
    table, at = torch.randn(5, 3, device="cuda"), torch.tensor([4, 0], device="cuda")
    F.embedding(at, table)
    cudalens.settle()  # what is made at the first call may wait
    for _ in range(3):
        F.embedding(at, table)
        torch.cuda._sleep(2_000_000_000)
        cudalens.settle()
        assert not torch.cuda.current_stream().query()
        torch.cuda.synchronize()


def test_a_bad_replay_of_a_captured_graph_is_found(deferred: None) -> None:
    """The third one is bad; those before it and behind it are good."""
    table, at = torch.randn(5, 3, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        F.embedding(at, table)
    torch.cuda.current_stream().wait_stream(side)
    cudalens.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = F.embedding(at, table)
    for value in (1, 4, 5, 2):
        at.fill_(value)
        graph.replay()
    with pytest.raises(cudalens.DeviceIndexError) as caught:
        cudalens.settle()
    says = "Its values went from 1 to 5, in the replays of a CUDA graph. "
    assert says in caught.value.report.explanation
    assert caught.value.report.op.name == "aten::embedding"
    cudalens.settle()  # it is told once
    assert torch.equal(rows, table[2].expand(4, 3))


def test_nothing_is_asked_of_the_host_in_a_capture(deferred: None) -> None:
    """The capture goes on, and what it captured is good."""
    table, at = torch.randn(5, 3, device="cuda"), torch.tensor([4, 0], device="cuda")
    F.embedding(at, table)
    cudalens.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = F.embedding(at, table)
        F.embedding(at, table)
    graph.replay()
    cudalens.settle()
    assert torch.equal(rows, table[at])


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits * 2, labels)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_bad_label_in_compiled_code(deferred: None, mode: str) -> None:
    """Compiled for the GPU, with and without CUDA graphs: it runs on, and its line is named."""
    loss = torch.compile(_loss, mode=mode)
    logits = torch.randn(64, 10, device="cuda", requires_grad=True)
    labels = torch.randint(0, 10, (64,), device="cuda")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        loss(logits, labels).backward()
    cudalens.settle()
    torch.compiler.cudagraph_mark_step_begin()
    assert torch.allclose(loss(logits, labels), _loss(logits, labels))
    labels[3] = 10
    torch.compiler.cudagraph_mark_step_begin()
    loss(logits, labels)
    with pytest.raises(cudalens.DeviceIndexError, match="contained 10, which is outside") as caught:
        cudalens.settle()
    assert caught.value.report.source is not None
    assert caught.value.report.source.text == "return F.cross_entropy(logits * 2, labels)"
