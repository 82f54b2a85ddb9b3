"""Where guards stand aside: calls that torch refuses, and graphs that are being captured.

While a CUDA graph is captured nothing may be read or waited for.  The capture itself is pretended:
its flag is all that the code asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, ones, tensor, zeros
from torch.nn import functional as F

import cudalens
from cudalens import simulate
from cudalens.core import _torch
from cudalens.evidence import lost_context
from cudalens.recorder import Recorder
from cudalens.recorder.hostcopies import host_copies
from tests.cpu_guards import guarded, positions


@pytest.fixture
def waits(sim: simulate.Simulation, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Each wait for the device, with whether a graph was being captured."""
    seen: list[bool] = []
    state = sim._runtime.state
    wait = state.sync

    def sync() -> None:
        seen.append(torch.cuda.is_current_stream_capturing())
        wait()

    monkeypatch.setattr(state, "sync", sync)
    return seen


@pytest.mark.parametrize("capturing", [False, True])
def test_the_recorder_does_not_wait(
    capturing: bool, waits: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each op is waited for, except during a capture; it is recorded all the same."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    with Recorder() as recorder:
        torch.ones(2, device="cuda").add_(1)
    assert recorder.recorded_ops >= 2
    assert bool(waits) is not capturing


@pytest.mark.parametrize("capturing", [False, True])
def test_arguments_are_not_copied(
    capturing: bool, sim: simulate.Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy to the host would break the capture."""
    x = torch.ones(2, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert bool(host_copies({"x": x}, 100)) is not capturing


@pytest.mark.parametrize("capturing", [False, True])
def test_guards_do_not_read(
    capturing: bool, sim: simulate.Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bad op goes to the device unread, and is stopped where reading is allowed."""
    table, ids = torch.zeros(3, 2, device="cuda"), torch.tensor([7], device="cuda")
    with cudalens.guard():
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        if capturing:
            F.embedding(ids, table)
        else:
            with pytest.raises(cudalens.DeviceIndexError):
                F.embedding(ids, table)
    assert (sim.pending is not None) is capturing


def test_the_device_is_not_asked(waits: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe for a lost context stands aside too."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert lost_context.probe(wait=True) is None
    assert waits == []


def test_a_lost_context_that_cannot_say_counts_as_a_capture(
    sim: simulate.Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a dead context even the question fails: guards then read nothing."""

    def refuse() -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", refuse)
    assert _torch.is_capturing() is True
    probed = lost_context.probe()
    assert probed is not None and lost_context.is_lost(probed)


# --- devices --------------------------------------------------------------------------------------


HERE, THERE = torch.zeros(3, 3), torch.tensor([0, 7])


def scattered(table: Tensor, index: Tensor) -> Tensor:
    return table.clone().scatter_(0, index[:, None], 1.0)


TOGETHER: list[Callable[[Tensor, Tensor], object]] = [
    lambda table, index: F.embedding(index, table),
    lambda table, index: table.index_select(0, index),
    lambda table, index: table.gather(0, index[:, None]),
    lambda table, index: nn.Embedding.from_pretrained(table)(index),
    scattered,
]


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("call", TOGETHER)
@pytest.mark.parametrize(("table", "index"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_tensors_on_two_devices_are_torch_s_own_error(
    call: Callable[[Tensor, Tensor], object], table: str, index: str
) -> None:
    """The label out of range does not matter: nothing would have been launched."""
    with pytest.raises(RuntimeError, match="same device") as caught, cudalens.check() as session:
        call(HERE.to(table), THERE.to(index))
    assert not isinstance(caught.value, cudalens.DeviceAssertError)
    assert session.report is not None and session.report.kind == "host_error"


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("call", TOGETHER)
def test_tensors_on_one_device_are_looked_at(call: Callable[[Tensor, Tensor], object]) -> None:
    with cudalens.check(), pytest.raises(cudalens.DeviceIndexError):
        call(HERE.to("cuda"), THERE.to("cuda"))


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("index", ["cpu", "cuda"])
def test_an_index_may_stay_on_the_cpu(index: str) -> None:
    """``x[index]`` copies its index to the device: there it asserts."""
    table, rows, one = HERE.to("cuda"), THERE.to(index), torch.tensor(1.0)
    with cudalens.check(), pytest.raises(cudalens.DeviceIndexError):
        table[rows]
    with cudalens.check(), pytest.raises(cudalens.DeviceIndexError):
        table[rows] = one


@pytest.mark.usefixtures("sim")
def test_a_table_on_the_cpu_takes_no_index_of_the_device() -> None:
    with cudalens.check(), pytest.raises(RuntimeError, match="either on cpu or on the same") as e:
        HERE[THERE.to("cuda")]
    assert not isinstance(e.value, cudalens.DeviceAssertError)


# --- what torch refuses on the host ---------------------------------------------------------------


aten = torch.ops.aten


@pytest.mark.parametrize(
    "call",
    [
        lambda i: aten.max_unpool2d(ones(1, 1, 2), i.view(1, 1, 3), [2, 2]),
        lambda i: aten.max_unpool3d(
            ones(1, 1, 1, 2), i.view(1, 1, 1, 3), [2, 2, 2], [2, 2, 2], [0, 0, 0]
        ),
        lambda i: aten.adaptive_max_pool2d_backward(ones(1, 1, 1), zeros(1, 2, 2), i.view(1, 1, 3)),
        lambda i: aten.adaptive_max_pool3d_backward(
            ones(1, 1, 1, 1), zeros(1, 2, 2, 2), i.view(1, 1, 1, 3)
        ),
    ],
)
def test_positions_of_another_shape_are_torch_s_to_refuse(call: Any) -> None:
    """More positions than values: torch's own error comes, whatever the positions are."""
    with guarded() as guards:
        error = guards.unguarded(lambda: call(tensor([0, 99, 1])))
    assert guards.found == []
    assert isinstance(error, (RuntimeError, IndexError))


@pytest.mark.parametrize(
    ("offsets", "position", "interval"),
    [
        ([0, 4], (1,), "0 … 3"),
        ([9, 4, 2], (1,), "0 … 3"),
        ([0, 2, 1], (2,), "2 … 3"),
        ([0, 3, 4], (2,), "3 … 3"),
    ],
)
def test_an_offset_is_bounded_by_the_one_before_it(
    offsets: list[int], position: tuple[int, ...], interval: str
) -> None:
    """The headline names the offset before, and 0 before the second: the first counts as 0."""
    with guarded() as guards:
        found = guards.look(
            lambda: aten._embedding_bag(zeros(3, 2), tensor([0, 1, 2]), tensor(offsets))
        )
    assert found is not None
    assert positions(found)[0] == position
    assert f"is outside {interval}: from the offset before it" in found.headline
