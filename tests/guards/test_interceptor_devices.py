"""A call that torch refuses for its devices is no device assert."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cudalens

pytestmark = pytest.mark.usefixtures("sim")

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


@pytest.mark.parametrize("call", TOGETHER)
def test_tensors_on_one_device_are_looked_at(call: Callable[[Tensor, Tensor], object]) -> None:
    with cudalens.check(), pytest.raises(cudalens.DeviceIndexError):
        call(HERE.to("cuda"), THERE.to("cuda"))


@pytest.mark.parametrize("index", ["cpu", "cuda"])
def test_an_index_may_stay_on_the_cpu(index: str) -> None:
    """``x[index]`` copies its index to the device: there it asserts."""
    table, rows, one = HERE.to("cuda"), THERE.to(index), torch.tensor(1.0)
    with cudalens.check(), pytest.raises(cudalens.DeviceIndexError):
        table[rows]
    with cudalens.check(), pytest.raises(cudalens.DeviceIndexError):
        table[rows] = one


def test_a_table_on_the_cpu_takes_no_index_of_the_device() -> None:
    with cudalens.check(), pytest.raises(RuntimeError, match="either on cpu or on the same") as e:
        HERE[THERE.to("cuda")]
    assert not isinstance(e.value, cudalens.DeviceAssertError)
