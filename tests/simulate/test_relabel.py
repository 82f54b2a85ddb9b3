"""Tensors and generators that answer to the name cuda, over memory of the host."""

from __future__ import annotations

import ctypes
import pickle
import sys
from typing import Any

import pytest
import torch

from cudalens.core.errors import NotRehearsedError
from cudalens.simulate import relabel
from cudalens.simulate.relabel import (
    is_device_generator,
    new_device_generator,
    resize_storage,
    set_memory,
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
        torch.tensor([1 + 2j]).conj().imag,
        torch.ones(2).to(torch.float8_e5m2),
        torch.empty_strided((1, 3), (7, 2)).fill_(4.0),
        torch.eye(2).to_sparse(),
    ],
)
def test_a_label_changes_and_the_memory_stays(tensor: Any) -> None:
    made = to_device(tensor)
    assert (made.device.type, made.shape, made.dtype) == ("cuda", tensor.shape, tensor.dtype)
    back = to_host(made)
    assert back.device.type == "cpu"
    if not tensor.is_sparse:
        assert made.stride() == back.stride() == tensor.stride()
    assert back.to_dense().tolist() == tensor.to_dense().tolist()


@pytest.mark.parametrize("is_coalesced", [True, False])
def test_a_sparse_tensor_keeps_its_form_and_its_memory(is_coalesced: bool) -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    host = torch.sparse_coo_tensor(torch.tensor([[0, 3]]), rows, (5, 2))._coalesced_(is_coalesced)
    made = to_device(host)
    for item, device in ((made, "cuda"), (to_host(made), "cpu")):
        parts = (item, item._indices(), item._values())
        assert [part.device.type for part in parts] == [device] * 3
        assert (item.sparse_dim(), item.dense_dim(), item.shape) == (1, 1, (5, 2))
        assert (item.dtype, item.is_coalesced()) == (torch.float64, is_coalesced)
        assert item._values().data_ptr() == host._values().data_ptr()
        assert item._indices().data_ptr() == host._indices().data_ptr()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_a_nested_tensor_keeps_its_sizes_strides_and_places() -> None:
    buffer = torch.arange(9.0)
    sizes, strides = torch.tensor([[2, 3], [3, 1]]), torch.tensor([[1, 2], [1, 3]])
    host = torch._nested_view_from_buffer(buffer, sizes, strides, torch.tensor([3, 0]))
    made = to_device(host)
    assert made.is_cuda
    back = to_host(made)
    assert back.device.type == "cpu"
    assert [part.tolist() for part in back.unbind()] == [[[3, 5, 7], [4, 6, 8]], [[0], [1], [2]]]
    assert back.values().data_ptr() == buffer.data_ptr()


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor")
def test_what_is_neither_dense_nor_a_list_of_elements_is_not_rehearsed() -> None:
    with pytest.raises(NotRehearsedError, match=r"^a torch.sparse_csr tensor of torch.float32 is"):
        to_device(torch.eye(2).to_sparse_csr())
    with pytest.raises(NotRehearsedError, match=r"^a torch.strided tensor of torch.qint8 is not"):
        to_device(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))


def test_what_a_capsule_of_an_older_torch_lacks_is_made_up_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has neither small floats nor the strides of a dimension with one element."""
    to_capsule, from_capsule = relabel._to_capsule, relabel._from_capsule

    def refuse(tensor: torch.Tensor) -> Any:
        if tensor.dtype == torch.float8_e5m2:
            raise BufferError("no such type")
        return to_capsule(tensor)

    def lose(capsule: Any) -> torch.Tensor:
        made = from_capsule(capsule)
        return set_memory(made, made.untyped_storage(), 0, torch.empty(made.shape))

    monkeypatch.setattr(relabel, "_to_capsule", refuse)
    monkeypatch.setattr(relabel, "_from_capsule", lose)
    monkeypatch.setattr(relabel, "_loses_strides", True)
    odd = torch.empty_strided((1, 3), (7, 2)).fill_(4.0)
    for tensor in (torch.ones(2).to(torch.float8_e5m2), odd):
        made = to_device(tensor)
        assert (made.device.type, made.dtype, made.stride()) == (
            "cuda",
            tensor.dtype,
            tensor.stride(),
        )
        assert made.data_ptr() == tensor.data_ptr()
        assert to_host(made).float().tolist() == tensor.float().tolist()


def test_an_error_on_the_way_is_the_user_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a signal handler, or of too deep a recursion, which C tells as that of an argument."""

    def handler(number: int, frame: object) -> None:
        raise RuntimeError("mine")

    def fail(capsule: object, name: bytes) -> None:
        raise ctypes.ArgumentError("maximum recursion depth exceeded")

    monkeypatch.setattr(relabel, "_pointer_of", fail)
    with pytest.raises(RecursionError, match="maximum recursion depth exceeded"):
        to_device(torch.ones(1))
    monkeypatch.setattr(relabel, "_to_capsule", lambda tensor: handler(14, sys._getframe()))
    with pytest.raises(RuntimeError, match=r"^mine$"):
        to_device(torch.ones(1))


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
    _, turned = to_host_sharing([whole, whole.view(2, 2).t()])
    assert turned.tolist() == [[0, 2], [1, 3]]


def test_conjugated_views_of_one_storage_stay_conjugated() -> None:
    whole = torch.tensor([1 + 2j, 3 - 4j], device="cuda")
    views = whole[1:], whole[:1].conj(), whole[1:].conj().imag, torch._neg_view(whole[1:].conj())
    values = [3 - 4j], [1 - 2j], [4], [-3 - 4j]
    shared = to_host_sharing(views)
    assert (*(item.tolist() for item in shared),) == values
    assert (*(to_host(item).tolist() for item in views),) == values
    one, _, three, _ = shared
    assert one.untyped_storage().data_ptr() == three.untyped_storage().data_ptr()


@pytest.mark.parametrize(("count", "kept"), [(8, 2), (1, 1), (0, 0)])
def test_a_storage_of_another_size_keeps_what_fits(count: int, kept: int) -> None:
    tensor = torch.tensor([5, 6], dtype=torch.uint8, device="cuda")
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
    assert new_device_generator().initial_seed() == torch.Generator().initial_seed()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("set_offset", "the offset of a random generator"),
        ("get_offset", "the offset of a random generator"),
        ("graphsafe_set_state", "a CUDA graph"),
        ("graphsafe_get_state", "a CUDA graph"),
    ],
)
def test_what_a_generator_of_the_cpu_lacks_is_refused(name: str, what: str) -> None:
    with pytest.raises(NotRehearsedError, match=f"^{what} is not rehearsed"):
        getattr(new_device_generator(), name)(4)


def test_generators_that_are_gone_are_forgotten() -> None:
    held = [new_device_generator() for _ in range(5)]  # each at an address of its own
    one, *_ = held
    del held, _
    two = new_device_generator()
    kept = {item() for item in relabel._device_generators.values()}
    assert {one, two} <= kept
    assert None not in kept
