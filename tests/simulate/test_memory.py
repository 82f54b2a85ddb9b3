"""Memory that tensors of the device share: overlap is refused, storages grow where they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cudalens.simulate import memory
from tests.simulate.device import CUDA

pytestmark = pytest.mark.usefixtures("seeded")

Call = Callable[[Tensor], object]


def outcome(call: Call, device: str) -> tuple[object, list[float]]:
    """Run a call on ten numbers; return its error's text, or nothing, and the numbers after it."""
    x = torch.arange(10.0, device=device)
    try:
        call(x)
    except RuntimeError as error:
        return (type(error), str(error)), []
    return None, x.tolist()


def order(x: Tensor) -> Tensor:
    return torch.arange(9, device=x.device)


# Each writes x[:-1] or x while it reads x[1:].
OVERLAPPING: dict[str, Call] = {
    "add out": lambda x: torch.add(x[1:], 1, out=x[:-1]),
    "where out": lambda x: torch.where(x[1:] > 0, x[1:], x[1:], out=x[:-1]),
    "cat out": lambda x: torch.cat([x[1:5], x[1:6]], out=x[:-1]),
    "gather out": lambda x: torch.gather(x[1:], 0, order(x), out=x[:-1]),
    "mul_": lambda x: x[:-1].mul_(x[1:]),
    "copy_": lambda x: x[:-1].copy_(x[1:]),
    "slice": lambda x: x.__setitem__(slice(0, 9), x[1:]),
    "index_put_": lambda x: x[:-1].index_put_((order(x),), x[1:]),
    "index_put_ by itself": lambda x: (y := x.long()).index_put_((y,), y.clone()),
    "scatter_ by itself": lambda x: (y := x.long()).scatter_(0, y, y.clone()),
    "list op": lambda x: torch._foreach_add_([x[:-1]], [x[1:]]),
    "expanded": lambda x: x[:1].expand(4).add_(1),
}
# The same ops on memory that is the very same, or shared without an element in common.
APART: dict[str, Call] = {
    "add out": lambda x: torch.add(x[:5], 1, out=x[5:]),
    "every other": lambda x: torch.add(x[::2], 1, out=x[1::2]),
    "square": lambda x: x.mul_(x),
    "slice": lambda x: x.__setitem__(slice(0, 5), x[5:]),
    "index_put_": lambda x: x.index_put_((x.long(),), x.clone()),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_overlapping_memory_is_refused_as_by_torch(name: str) -> None:
    """The error is the one that torch's own check raises on the CPU."""
    error, _ = outcome(OVERLAPPING[name], "cpu")
    assert error is not None
    assert "clone() the tensor" in str(error)
    assert outcome(OVERLAPPING[name], "cuda") == (error, [])


@pytest.mark.parametrize("name", APART)
def test_memory_without_an_element_in_common_is_written(name: str) -> None:
    """Views of one storage that do not meet are no overlap."""
    result = outcome(APART[name], "cpu")
    assert result[0] is None
    assert outcome(APART[name], "cuda") == result


def test_conjugated_views_of_one_storage_keep_their_bits() -> None:
    """What shares memory is read through its own conj and neg bits."""
    x = torch.tensor([1 + 2j, 3 - 4j], device=CUDA)
    x[:1].mul_(x[1:].conj())
    assert x.tolist() == [(1 + 2j) * (3 + 4j), 3 - 4j]
    x[:1].imag.copy_(x[1:].conj().imag)
    assert x[0].item().imag == 4.0


# --- growing -------------------------------------------------------------------------------


def test_resizing_keeps_data_order_and_sharing() -> None:
    """Resize_ grows the storage under all views, in the order of memory.

    A tensor that shrinks, or stays as large, keeps its first values.
    """

    def grown(device: str) -> list[object]:
        x = torch.arange(6.0, device=device)
        first, last = x[:2], x[4:]
        turned = x.view(2, 3).t()
        turned.resize_(4, 3)
        turned.view(-1)[6:] = torch.arange(6.0, 12.0, device=device)
        first.add_(100)
        last.resize_(5)
        return [
            turned.tolist(),
            x.tolist(),
            last.tolist(),
            last.storage_offset(),
            last.data_ptr() - x.data_ptr(),
            x.untyped_storage().nbytes(),
            turned.untyped_storage()._cdata == first.untyped_storage()._cdata,
            *(x.resize_(size).tolist() for size in (6, 4)),
        ]

    assert grown("cuda") == grown("cpu")


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_growing_into_a_memory_format(memory_format: torch.memory_format) -> None:
    """The strides are those of the format that was asked for."""
    x = torch.empty(0, device=CUDA).resize_(2, 3, 4, 5, memory_format=memory_format)
    assert x.is_contiguous(memory_format=memory_format)
    assert x.untyped_storage().nbytes() == 480


def test_a_storage_is_resized() -> None:
    """To nothing and back, as sharded training does; the counter follows."""
    before = torch.cuda.memory_allocated()
    x = torch.arange(1024.0, device=CUDA)
    storage = x.untyped_storage()
    storage.resize_(0)
    assert (storage.nbytes(), torch.cuda.memory_allocated() - before) == (0, 0)
    assert storage.resize_(8192) is storage
    assert torch.cuda.memory_allocated() - before == 8192
    x.copy_(torch.ones(1024))
    assert x.sum().item() == 1024.0
    storage.resize_(1024 * 4)
    assert x.tolist() == [1.0] * 1024
    del x, storage
    assert torch.cuda.memory_allocated() == before
    assert torch.arange(3.0).untyped_storage().resize_(8).nbytes() == 8


def test_an_empty_storage_like_one_of_the_device() -> None:
    """It ended the process: a CPU build has no allocator for the device."""
    made = torch.arange(3.0, device=CUDA).untyped_storage().new()
    assert (made.device, made.nbytes()) == (torch.device("cuda", 0), 0)
    assert torch.arange(3.0).untyped_storage().new().device.type == "cpu"


# --- figures -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "size"),
    [
        (0, "0 bytes"), (1024, "1024 bytes"), (1025, "1.00 KiB"), (1536, "1.50 KiB"),
        (2**20, "1024.00 KiB"), (2**20 + 1, "1.00 MiB"), (2**30, "1024.00 MiB"),
        (3 * 2**30, "3.00 GiB"),
    ],
)  # fmt: skip
def test_a_number_of_bytes_is_written_as_by_the_allocator(count: int, size: str) -> None:
    refused = RuntimeError(f"can't allocate memory: you tried to allocate {count} bytes.")
    made = memory.out_of_memory(refused)
    assert made is not None and f"Tried to allocate {size}. GPU 0" in str(made)
    assert memory.out_of_memory(RuntimeError("another")) is None


def test_what_is_free_is_what_no_tensor_has_now() -> None:
    """The peak counts for nothing: what was freed is there again."""
    x = torch.empty(2**23, device=CUDA)  # a number of bytes that the text would show
    del x
    y = torch.ones(1024, device=CUDA)
    free, total = torch.cuda.mem_get_info()
    assert (free, total) == (total - torch.cuda.memory_allocated(), 16 * 2**30)
    assert torch.cuda.max_memory_allocated() > torch.cuda.memory_allocated() >= y.nbytes
    made = memory.out_of_memory(
        RuntimeError("can't allocate memory: you tried to allocate 9 bytes")
    )
    assert str(made).endswith(f"total capacity of 16.00 GiB of which {memory._size(free)} is free.")


def test_the_meter_counts_blocks_of_512_bytes_until_a_storage_dies() -> None:
    meter = memory.MemoryMeter()
    assert (meter.allocated_bytes, meter.peak_bytes, meter.storages()) == (0, 0, [])
    assert meter.fraction == 1.0
    empty, one, more = (torch.UntypedStorage(size) for size in (0, 1, 513))
    for storage in (empty, one, more, one):
        meter.track(storage)
    assert (meter.allocated_bytes, meter.peak_bytes) == (1536, 1536)
    assert len(meter.storages()) == 2 and all(it is one or it is more for it in meter.storages())
    del more, storage
    assert (meter.allocated_bytes, meter.peak_bytes) == (512, 1536)
    meter.reset_peak()
    assert meter.peak_bytes == 512
    one.resize_(0)
    meter.track(one)
    assert meter.allocated_bytes == 0


def test_the_figures_of_the_allocator_agree() -> None:
    x = torch.ones(2**18, device=CUDA) + 1
    now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    assert peak > now
    assert now == torch.cuda.memory_reserved() >= x.nbytes
    assert peak == torch.cuda.max_memory_reserved() >= now
    flat, nested = torch.cuda.memory_stats(), torch.cuda.memory_stats_as_nested_dict()
    for kind in ("allocated", "active", "reserved", "requested"):
        for pool in ("all", "large_pool", "small_pool"):
            assert nested[f"{kind}_bytes"][pool] == {"current": now, "peak": peak}
            assert flat[f"{kind}_bytes.{pool}.current"] == now
            assert flat[f"{kind}_bytes.{pool}.peak"] == peak
    assert torch.cuda.memory_summary() == f"{now} bytes in live tensors, peak {peak}"
    assert torch.cuda.memory_snapshot() == []
    assert torch.cuda.get_allocator_backend() == memory.constant("native")(0, of=1) == "native"


@pytest.mark.parametrize(("fraction", "is_refused"), [(0.0, False), (0.5, False), (1.0, False),
    (-0.1, True), (1.1, True)])  # fmt: skip
def test_a_share_of_the_memory_lies_between_none_and_all(fraction: float, is_refused: bool) -> None:
    if is_refused:
        with pytest.raises(ValueError, match="Allowed range: 0~1"):
            torch.cuda.set_per_process_memory_fraction(fraction)
        fraction = 1.0
    else:
        torch.cuda.set_per_process_memory_fraction(fraction)
    assert torch.cuda.get_per_process_memory_fraction() == fraction
    torch.cuda.set_per_process_memory_fraction(1.0)
