"""Tensors and generators that answer to the name cuda, over memory of the host."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from cudalens.simulate import relabel
from cudalens.simulate.relabel import (
    is_device_generator,
    new_device_generator,
    resize_storage,
    to_device,
    to_host,
    to_host_sharing,
)

pytestmark = pytest.mark.usefixtures("sim")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.ones(0),
        torch.tensor(3),
        torch.ones(2, dtype=torch.bool),
        torch.tensor([1 + 2j]).conj(),
        torch.eye(2).to_sparse(),
    ],
)
def test_a_label_changes_and_the_memory_stays(tensor: Any) -> None:
    made = to_device(tensor)
    assert (made.device.type, made.shape, made.dtype) == ("cuda", tensor.shape, tensor.dtype)
    back = to_host(made)
    assert back.device.type == "cpu"
    assert torch.equal(back.to_dense(), tensor.to_dense())


def test_both_labels_show_one_memory() -> None:
    host = torch.zeros(3)
    device = to_device(host)
    host[1] = 7
    assert to_host(device).tolist() == [0, 7, 0]
    assert to_host(device).data_ptr() == host.data_ptr()


def test_what_overlaps_shares_one_storage_of_the_host() -> None:
    whole = torch.arange(4, device="cuda")
    one, two = to_host_sharing([whole[:3], whole[1:]])
    assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
    assert (one.tolist(), two.tolist()) == ([0, 1, 2], [1, 2, 3])


@pytest.mark.parametrize(("count", "kept"), [(32, 2), (8, 1), (0, 0)])
def test_a_storage_of_another_size_keeps_what_fits(count: int, kept: int) -> None:
    tensor = torch.tensor([5, 6], device="cuda")
    resize_storage(tensor.untyped_storage(), count)
    assert tensor.untyped_storage().nbytes() == count
    assert tensor[:kept].tolist() == [5, 6][:kept]


def test_a_generator_and_its_copies_draw_the_same() -> None:
    one = new_device_generator()
    one.manual_seed(3)
    copies = [one.clone_state(), pickle.loads(pickle.dumps(one))]
    wanted = torch.rand(4, device="cuda", generator=one).tolist()
    for other in copies:
        assert is_device_generator(other)
        assert (other.device.type, other is one) == ("cuda", False)
        assert torch.rand(4, device="cuda", generator=other).tolist() == wanted
    assert not is_device_generator(torch.Generator())


def test_generators_that_are_gone_are_forgotten() -> None:
    held = [new_device_generator() for _ in range(5)]  # each at an address of its own
    one, *_ = held
    del held, _
    two = new_device_generator()
    kept = {item() for item in relabel._device_generators.values()}
    assert {one, two} <= kept
    assert None not in kept
