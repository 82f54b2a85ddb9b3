"""Guards and sessions where torch code runs in many threads and processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import cudalens
from cudalens import DeviceAssertError, simulate
from cudalens.guards.process import PROCESS
from tests.blocks import cuda, line_of

pytestmark = pytest.mark.usefixtures("sim")


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, device="cuda")


FAILING: tuple[tuple[Callable[[], object], int], ...] = (
    (lambda: F.embedding(cuda(1, 40), zeros(5, 2)), 40),
    (lambda: F.cross_entropy(zeros(2, 3), cuda(0, 41)), 41),
    (lambda: zeros(3, 4).gather(1, cuda(0, 42).reshape(1, 2)), 42),
    (lambda: zeros(3, 4).index_select(0, cuda(43)), 43),
    (lambda: zeros(3, 4)[cuda(0, 44)], 44),
    (lambda: zeros(3, 4).index_put_((cuda(0, 45),), zeros(4)), 45),
    (lambda: zeros(3, 4).take(cuda(0, 46)), 46),
    (lambda: zeros(3, 4).scatter(1, cuda(0, 47).reshape(1, 2), 1.0), 47),
)


def error_of(function: Callable[[], Any]) -> DeviceAssertError:
    with pytest.raises(DeviceAssertError) as caught:
        function()
    return caught.value


def is_alive() -> bool:
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    (leaf * 2).sum().backward()
    torch.cuda.synchronize()
    return leaf.grad is not None and leaf.grad.tolist() == [2.0] * 3


def test_eight_threads_get_eight_right_errors(sim: simulate.Simulation) -> None:
    together = threading.Barrier(len(FAILING))

    def work(function: Callable[[], object]) -> DeviceAssertError:
        together.wait()
        return error_of(function)

    with cudalens.guard(), ThreadPoolExecutor(len(FAILING)) as pool:
        errors = list(pool.map(work, [function for function, _ in FAILING]))
        assert is_alive()
    for (function, value), error in zip(FAILING, errors, strict=True):
        report = error.report
        assert [item.value for item in report.offenders.first] == [value]
        assert str(value) in str(error)
        assert report.source.line == function.__code__.co_firstlineno
    assert len({id(error.report) for error in errors}) == len(FAILING)
    assert not sim.is_poisoned


def test_threads_under_one_session_are_all_found() -> None:
    """The findings of threads that a checked block starts belong to that block."""
    with cudalens.check() as session, ThreadPoolExecutor(4) as pool:
        errors = list(pool.map(error_of, [function for function, _ in FAILING]))
    assert session.swallowed
    assert sorted(map(id, session.findings)) == sorted(id(error.report) for error in errors)
    told = session.report.explanation
    assert "This error was raised in another thread and did not leave the block" in told
    assert "handled" not in told
    assert is_alive()


def test_an_error_that_a_thread_hands_back_leaves_the_block() -> None:
    """A pool raises it again where its result is asked for: nothing is said of threads."""
    with pytest.raises(DeviceAssertError) as caught, cudalens.check() as session:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(FAILING[0][0]).result()
    assert session.report is caught.value.report
    assert not session.swallowed and "thread" not in session.report.explanation


@pytest.mark.parametrize("rows", [4, 5])
def test_what_a_replica_raised_leaves_the_block_as_it_is(rows: int) -> None:
    """torch raises it anew with its text: it is the finding, and nothing was swallowed."""
    table = torch.nn.Embedding(rows, 2).cuda()
    is_good = rows == 5
    ending = nullcontext() if is_good else pytest.raises(DeviceAssertError, match="in replica 1")
    with ending as caught, cudalens.check(fast=True) as session:
        torch.nn.parallel.parallel_apply([table, table], [(cuda(1),), (cuda(4),)])
    assert session.report is (None if is_good else caught.value.report)
    assert not session.swallowed
    assert is_good or "did not leave" not in session.report.explanation


def overwrite_before_backward(value: int = 50) -> None:
    scores = torch.zeros(2, 3, device="cuda", requires_grad=True)
    ids = cuda(1, 2).reshape(2, 1)
    loss = scores.gather(1, ids).sum()
    ids.data[1] = value
    loss.backward()


@pytest.mark.parametrize("options", [{}, {"fast": True}, None], ids=["full", "fast", "installed"])
def test_autograds_device_thread(options: dict[str, Any] | None) -> None:
    """A bad index in backward is found in autograd's own thread and raised in the caller's."""
    threads: list[int] = []

    def run() -> None:
        leaf = torch.ones(2, device="cuda", requires_grad=True)
        held = leaf * 1
        held.register_hook(lambda grad: threads.append(threading.get_ident()))
        held.sum().backward()
        overwrite_before_backward()

    with cudalens.guard() if options is None else cudalens.check(**options):
        error = error_of(run)
    assert threads != [threading.get_ident()]
    report = error.report
    assert report.phase == "backward"
    assert report.op.name.rstrip("_") == "aten::scatter_add"
    assert report.source.line == line_of(overwrite_before_backward, "loss.backward()")
    assert is_alive()


def test_two_sessions_in_two_threads_report_each_its_own() -> None:
    """Also what autograd's shared device thread finds: it is of the session whose pass it was."""
    together = threading.Barrier(2)
    in_backward = [(partial(overwrite_before_backward, value), value) for value in (60, 61)]

    def work(item: tuple[Callable[[], object], int]) -> tuple[Any, BaseException, int]:
        function, value = item
        together.wait()
        with pytest.raises(DeviceAssertError) as caught, cudalens.check() as session:
            together.wait()
            function()
        return session, caught.value, value

    for pair in (*zip(FAILING[::2], FAILING[1::2], strict=True), in_backward):
        with ThreadPoolExecutor(2) as pool:
            for session, error, value in pool.map(work, pair):
                assert session.report is error.report
                assert [item.value for item in session.report.offenders.first] == [value]
                assert len(session.findings) == 1
                assert not session.swallowed


def test_a_session_in_a_thread_outlives_one_in_another() -> None:
    opened, closed = threading.Event(), threading.Event()

    def other() -> None:
        with cudalens.check():
            opened.set()
            assert closed.wait(60)

    thread = threading.Thread(target=other)
    with cudalens.check():
        thread.start()
        assert opened.wait(60)
    assert PROCESS.is_installed
    closed.set()
    thread.join()
    assert not PROCESS.is_installed
    with cudalens.check() as session:
        assert is_alive()
    assert session.report is None


def test_installing_from_many_threads_at_once() -> None:
    together = threading.Barrier(8)

    def work(_: int) -> None:
        together.wait()
        for _ in range(5):
            with cudalens.guard():
                assert PROCESS.is_installed
                assert error_of(FAILING[0][0]).report is not None

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
