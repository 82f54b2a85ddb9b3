"""What torch.cuda answers, and what copies meet on the device."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cudalens import simulate
from tests.simulate.device import CUDA, on_cuda, same

pytestmark = pytest.mark.usefixtures("seeded")


# --- torch.cuda ----------------------------------------------------------------------------


def test_device_has_its_own_random_stream() -> None:
    """The device draws from its own stream: seeded, saved, restored and forked on its own."""
    torch.manual_seed(5)
    host_first = torch.rand(3)
    torch.manual_seed(5)
    torch.rand(100, device="cuda")
    assert torch.equal(torch.rand(3), host_first)
    torch.cuda.manual_seed(7)
    first = torch.rand(3, device="cuda")
    state = torch.cuda.get_rng_state()
    second = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), second)
    torch.cuda.manual_seed_all(7)
    assert torch.equal(torch.rand(3, device="cuda"), first)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3, device="cuda"), first)
    with torch.random.fork_rng(devices=[0]):
        torch.rand(5, device="cuda")
    assert torch.equal(torch.rand(3, device="cuda"), second)
    torch.cuda.manual_seed(7)
    dropped = F.dropout(torch.ones(64, device="cuda"))
    torch.cuda.manual_seed(7)
    assert torch.equal(F.dropout(torch.ones(64, device="cuda")), dropped)


def test_device_generator() -> None:
    generator = torch.Generator(device="cuda")
    assert isinstance(generator, torch.Generator)
    first, again = (
        torch.rand(3, device="cuda", generator=generator.manual_seed(3)) for _ in range(2)
    )
    assert torch.equal(again, first)
    assert (generator.device.type, generator.initial_seed()) == ("cuda", 3)
    weights = torch.ones(4, device="cuda")
    assert torch.multinomial(weights, 2, generator=generator).is_cuda
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator"):
        torch.rand(3, device="cuda", generator=torch.Generator())
    assert torch.Generator().device.type == "cpu"


def test_device_queries_streams_events() -> None:
    """The torch.cuda surface answers, honestly, for one device; streams and events work."""
    assert torch.cuda.is_available() and torch.cuda.is_initialized()
    assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
    assert "cudalens" in torch.cuda.get_device_name()
    assert torch.cuda.get_device_name(0) == torch.cuda.get_device_properties(0).name
    assert torch.cuda.get_device_capability() >= (7, 0)
    assert torch.cuda.is_bf16_supported() in (True, False)
    torch.cuda.set_device(0)
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    with torch.cuda.device(0):
        assert torch.cuda.current_device() == 0
    stream = torch.cuda.Stream()
    start_event = torch.cuda.Event(enable_timing=True)
    end_event = torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        start_event.record()
        x = torch.ones(3, device="cuda") + 1
        x.record_stream(stream)
        end_event.record()
    stream.synchronize()
    torch.cuda.current_stream().wait_stream(stream)
    end_event.synchronize()
    assert end_event.query()
    assert start_event.elapsed_time(end_event) >= 0
    with torch.cuda.nvtx.range("marked"):
        x.add_(1)
    assert torch.cuda.is_current_stream_capturing() is False
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total


def test_one_device_has_no_peer() -> None:
    assert torch.cuda.can_device_access_peer(0, 0) is False
    for pair in ((0, 1), (1, 0)):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.cuda.can_device_access_peer(*pair)
    for call in (torch.cuda.set_device, torch.cuda.synchronize, torch.cuda.get_device_properties):
        call("cuda:0")
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            call(1)
    with pytest.raises(RuntimeError, match="invalid device ordinal"), torch.cuda.device(1):
        pass
    with torch.cuda.device(-1):
        assert torch.cuda.current_device() == 0


def test_only_memory_of_the_pinning_allocator_is_pinned() -> None:
    plain, pinned = torch.empty(2), torch.empty(2, pin_memory=True)
    for item, expected in ((plain, False), (pinned, True), (on_cuda(2), False)):
        assert item.is_pinned() is expected
        assert item.untyped_storage().is_pinned() is expected
    assert plain.pin_memory().is_pinned()
    assert not plain.to_sparse().is_pinned()


def test_old_tensor_types_are_told_by_device_and_dtype() -> None:
    x = on_cuda(2)
    assert isinstance(x, torch.cuda.FloatTensor)
    assert not isinstance(x, torch.cuda.DoubleTensor)
    assert not isinstance(x.cpu(), torch.cuda.FloatTensor)
    assert not isinstance(1, torch.cuda.FloatTensor)
    assert torch.cuda.FloatTensor(2, 3).shape == (2, 3)
    assert torch.cuda.FloatTensor().shape == (0,)
    assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
    assert torch.cuda.FloatTensor(torch.Size([4])).shape == (4,)
    assert torch.cuda.FloatTensor(3).shape == (3,)
    made = torch.cuda.DoubleTensor([1])
    assert made.is_cuda and made.dtype == torch.float64


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("BFloat16Tensor", torch.bfloat16), ("BoolTensor", torch.bool),
        ("ByteTensor", torch.uint8), ("CharTensor", torch.int8),
        ("DoubleTensor", torch.float64), ("FloatTensor", torch.float32),
        ("HalfTensor", torch.float16), ("IntTensor", torch.int32),
        ("LongTensor", torch.int64), ("ShortTensor", torch.int16),
    ],
)  # fmt: skip
def test_each_old_tensor_type_has_its_dtype(name: str, dtype: torch.dtype) -> None:
    made = getattr(torch.cuda, name)(2)
    assert made.dtype == dtype and made.is_cuda
    assert made.type() == f"torch.cuda.{name}"


def test_a_storage_of_the_device_makes_others_of_it() -> None:
    storage = on_cuda(4).untyped_storage()
    assert storage.new().device == CUDA
    assert torch.empty(4).untyped_storage().new().device.type == "cpu"
    assert storage.resize_(64) is storage
    assert storage.nbytes() == 64
    host = torch.empty(4).untyped_storage()
    assert host.resize_(64) is host
    assert host.nbytes() == 64


# --- copies and files ----------------------------------------------------------------------


def test_device_deepcopy_and_pickle() -> None:
    x = on_cuda(3)
    for twin in (copy.deepcopy(x), pickle.loads(pickle.dumps({"x": x}))["x"]):
        assert twin.is_cuda and torch.equal(twin, x)
        assert twin.data_ptr() != x.data_ptr()
    model = copy.deepcopy(nn.Linear(2, 2).to(CUDA))
    assert isinstance(model.weight, nn.Parameter) and model.weight.is_cuda


def test_device_save_and_load() -> None:
    def through_file(thing: Any, **options: Any) -> Any:
        file = io.BytesIO()
        torch.save(thing, file)
        file.seek(0)
        return torch.load(file, **options)

    x = on_cuda(3)
    state = nn.Linear(2, 2).to(CUDA).state_dict()
    assert torch.equal(through_file(x), x)
    assert through_file(x, map_location="cpu").device.type == "cpu"
    assert through_file(x.cpu(), map_location="cuda").device == CUDA
    assert through_file(x.cpu(), map_location=torch.device("cuda", 0)).is_cuda
    assert all(t.is_cuda for t in through_file(state).values())
    assert through_file(state, map_location="cpu")["weight"].device.type == "cpu"
    shared = through_file({"a": x, "b": x[:2]})
    assert shared["a"].data_ptr() == shared["b"].data_ptr()
    assert isinstance(through_file(nn.Parameter(x)), nn.Parameter)


@pytest.mark.thorough
def test_device_compile_runs_eagerly() -> None:
    def f(x: Tensor) -> Tensor:
        return x.sin() + x.cos()

    x = on_cuda(3)
    with torch.compiler.set_stance("force_eager"):
        assert same(torch.compile(f)(x), f(x.cpu()))
    torch._dynamo.reset()
    assert same(torch.compile(f, backend="eager", fullgraph=True)(x), f(x.cpu()))
    torch._dynamo.reset()


def test_the_mode_of_synchronisation_speaks_of_waits(sim: simulate.Simulation) -> None:
    """Copies across devices and reads warn or raise; launches and an event's wait do not."""
    x, host = torch.ones(3, device="cuda"), torch.empty(3)
    waits: tuple[Callable[[], Any], ...] = (
        x.cpu,
        x.sum().item,
        x.nonzero,
        x.unique,
        x.to_sparse,
        lambda: host.to("cuda"),
        torch.cuda.current_stream().synchronize,
    )
    warns, raises = partial(pytest.warns, UserWarning), partial(pytest.raises, RuntimeError)
    for number, mode, speaks in ((1, "warn", warns), (2, "error", raises)):
        torch.cuda.set_sync_debug_mode(mode)
        assert torch.cuda.get_sync_debug_mode() == number
        for wait in waits:
            with speaks(match="called a synchronizing CUDA operation"):
                wait()
    x.add_(1)
    host.copy_(x, non_blocking=True)
    torch.cuda.Event().synchronize()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(RuntimeError, match="expected one of"):
        torch.cuda.set_sync_debug_mode("loud")
