"""What torch.cuda answers, and what copies meet on the device."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cudalens import simulate
from cudalens.simulate import streams, surface
from cudalens.simulate.state import Forks
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


COMPILED = (
    "init getDevice getDeviceCount setDevice exchangeDevice maybeExchangeDevice synchronize"
    " isCurrentStreamCapturing emptyCache"
)


def test_the_compiled_functions_answer_for_the_one_device(
    sim: simulate.Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in COMPILED.split():  # a CPU build lacks most of them
        monkeypatch.setattr(torch._C, f"_cuda_{name}", None, raising=False)
    c: Any = torch._C
    with surface.Patches() as patches:
        surface._patch_private(patches, sim._runtime)
        answers = c._cuda_init(), c._cuda_getDevice(), c._cuda_getDeviceCount()
        assert (*answers, c._cuda_getCurrentRawStream(0)) == (None, 0, 1, 0)
        assert (c._cuda_exchangeDevice(0), c._cuda_maybeExchangeDevice(0)) == (0, 0)
        assert (c._cuda_maybeExchangeDevice(-1), c._cuda_isCurrentStreamCapturing()) == (-1, False)
        for call in (c._cuda_setDevice, c._cuda_exchangeDevice, c._cuda_synchronize):
            with pytest.raises(RuntimeError, match="invalid device ordinal"):
                call(1)
        (part,) = c._scatter(torch.ones(4, 2), [0], None, 0, None)
        assert (part.device, part.shape) == (CUDA, (4, 2))
        assert c._distributed_c10d.Logger.set_runtime_stats_and_log("logger") is None
        sim.device_assert("aten::mine", "mine.cu:1: Assertion `x` failed.")
        c._cuda_emptyCache()
        with pytest.raises(RuntimeError, match="device-side assert"):
            c._cuda_synchronize()
        with pytest.raises(RuntimeError, match="device-side assert"):
            c._cuda_emptyCache()
        sim.reset()
    assert c._cuda_getDevice is None


@pytest.mark.parametrize(
    ("call", "waits"),
    [
        (lambda: torch.accelerator.synchronize(), True),
        (lambda: torch._C._cuda_isCurrentStreamCapturing(), False),
        (lambda: torch.cuda.graphs._cuda_isCurrentStreamCapturing(), False),
        (lambda: torch.cuda.memory.empty_cache(), False),
        (lambda: torch.cuda.mem_get_info(), False),
        (lambda: torch.ones(2).is_pinned(), False),
    ],
)
def test_what_waits_raises_what_is_pending_and_the_rest_what_was_raised(
    sim: simulate.Simulation, call: Callable[[], object], waits: bool
) -> None:
    sim.device_assert("aten::mine", "mine.cu:1: Assertion `x` failed.")
    for raises in (waits, True):
        if raises:
            with pytest.raises(RuntimeError, match="device-side assert"):
                call()
        else:
            call()
        with pytest.raises(RuntimeError, match="device-side assert"):
            torch.cuda.synchronize()
    sim.reset()
    call()


def test_the_cuda_runtime_as_programs_call_it() -> None:
    library = torch.cuda.cudart()
    assert library.cudaProfilerStart() == library.cudaProfilerStop() == library.cudaError.success
    assert library.cudaGetErrorString(2) == "CUDA error 2"
    assert library.cudaMemGetInfo(0) == torch.cuda.mem_get_info()
    nvtx = torch.cuda.nvtx
    assert (nvtx.range_push("a"), nvtx.range_pop(), nvtx.range_start("b")) == (0, 0, 0)
    assert (nvtx.mark("c"), nvtx.range_end(0)) == (None, None)


def test_the_properties_agree_with_what_else_is_answered() -> None:
    properties = torch.cuda.get_device_properties()
    assert (properties.major, properties.minor) == torch.cuda.get_device_capability()
    assert properties.total_memory == torch.cuda.mem_get_info()[1]
    assert torch.cuda.get_arch_list() == []
    assert not torch.cuda.is_tf32_supported()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("CUDAGraph", "a CUDA graph"),
        ("graph_pool_handle", "a CUDA graph"),
        ("ExternalStream", "a stream of another library"),
        ("MemPool", "another memory allocator"),
        ("caching_allocator_alloc", "another memory allocator"),
        ("utilization", "what the driver measures"),
    ],
)
def test_what_only_hardware_could_answer_is_refused_by_its_name(name: str, what: str) -> None:
    for owner in (torch.cuda, torch.cuda.memory):
        if hasattr(owner, name):
            with pytest.raises(simulate.NotRehearsedError, match=f"^{what} is not"):
                getattr(owner, name)(1, of=2)


def test_a_class_is_refused_with_its_static_methods() -> None:
    class Original:
        make = staticmethod(len)
        __wrapped__ = len
        number = 3

    refused: Any = surface._refusal("it", Original)
    for call in (refused, refused.make):
        with pytest.raises(simulate.NotRehearsedError, match=r"^it is not"):
            call()
    assert refused.__wrapped__ is len
    assert not hasattr(refused, "number")


def test_a_forked_process_is_told_that_cuda_does_not_serve_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not torch.cuda._is_in_bad_fork()
    monkeypatch.setattr(Forks, "count", Forks.count + 1)
    assert torch.cuda._is_in_bad_fork()
    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
        torch.ones(2, device="cuda")


def test_streams_wait_for_no_device_once_it_has_stopped() -> None:
    patches = surface.Patches()
    runtime: Any = SimpleNamespace(state=object(), generator=None)
    bound = streams._Bound.state
    with pytest.raises(AttributeError), patches:
        surface.patch_surface(patches, runtime)  # no state of a device
    assert streams._Bound.state is None
    streams.bind_state(bound)


def test_what_was_replaced_comes_back() -> None:
    class Base:
        inherited = "base"

    class Owner(Base):
        own = "own"
        kept = staticmethod(len)

    before = dict(vars(Owner))
    with surface.Patches() as patches:
        for value in (1, 2):
            patches.set(Owner, "own", value)
        patches.set(Owner, "inherited", 3)
        patches.set(Owner, "added", 4)
        patches.replace(Owner, own=5, kept=abs, missing=6)
        patches.replace(None, own=7)
        names = ("own", "inherited", "added", "kept", "missing")
        assert [vars(Owner).get(name) for name in names] == [5, 3, 4, abs, None]
    assert dict(vars(Owner)) == before


@pytest.mark.parametrize(("device", "expected"), [("cuda", "forward"), ("cpu", "inductor")])
def test_only_graphs_with_tensors_of_the_device_run_op_by_op(
    device: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper: Any = torch._TorchCompileInductorWrapper
    monkeypatch.setattr(wrapper, "__call__", lambda self, model, inputs, by: by)
    values = (None, torch.ones(1), torch.ones(1, device=device), 3)
    nodes = [SimpleNamespace(meta={"example_value": it} if it else {}) for it in values]
    model = SimpleNamespace(graph=SimpleNamespace(nodes=nodes), forward="forward")
    with surface.Patches() as patches:
        surface._compile_for_device(patches)
        assert wrapper.__call__(None, model, (), by="inductor") == expected
    assert wrapper.__call__(None, model, (), by="inductor") == "inductor"


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
    assert torch.cuda.FloatTensor.is_cuda and torch.cuda.FloatTensor.dtype == torch.float32
    assert not isinstance(x, torch.cuda.DoubleTensor)
    assert not isinstance(x.cpu(), torch.cuda.FloatTensor)
    assert not isinstance(1, torch.cuda.FloatTensor)
    assert torch.cuda.FloatTensor(2, 3).shape == (2, 3)
    assert torch.cuda.FloatTensor().shape == (0,)
    assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
    assert torch.cuda.LongTensor((1, 2)).tolist() == [1, 2]
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


def test_a_storage_is_made_where_it_is_asked_for() -> None:
    assert torch.UntypedStorage([1, 2], device="cuda").tolist() == [1, 2]
    for made, size in (
        (torch.UntypedStorage(8, device="cuda"), 8),
        (torch.UntypedStorage(size=8, device="cuda:0"), 8),
        (torch.UntypedStorage(device=CUDA), 0),
    ):
        assert (made.device, made.nbytes()) == (CUDA, size)
    for made in (torch.UntypedStorage(8), torch.UntypedStorage(8, device="cpu")):
        assert (made.device.type, made.nbytes()) == ("cpu", 8)
    assert torch.UntypedStorage(8, device="meta").device.type == "meta"
    with pytest.raises(simulate.NotRehearsedError, match="a tensor shared with another"):
        on_cuda(2).untyped_storage()._share_cuda_()


def test_a_generator_of_either_device_is_a_generator() -> None:
    for device, kind in (("cuda:0", "cuda"), (CUDA, "cuda"), ("cpu", "cpu")):
        made = torch.Generator(device)
        assert made.device.type == kind
        assert isinstance(made, torch.Generator) and issubclass(type(made), torch.Generator)
    assert not isinstance(3, torch.Generator) and not issubclass(int, torch.Generator)


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
