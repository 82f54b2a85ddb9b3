"""Make torch.cuda, torch.accelerator and methods of tensors answer for the rehearsal device."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch

from cudalens.simulate import streams
from cudalens.simulate._internals import storage_deleter
from cudalens.simulate.kernels import Runtime
from cudalens.simulate.memory import MEMORY_FUNCTIONS, TOTAL_BYTES, constant
from cudalens.simulate.relabel import new_device_generator, resize_storage, to_device
from cudalens.simulate.state import refusal

DEVICE_NAME: Final = "cudalens rehearsal device (CPU)"


@dataclass(frozen=True, kw_only=True)
class DeviceProperties:
    """Result of torch.cuda.get_device_properties; the figures are invented and round."""

    name: str = DEVICE_NAME
    # Ampere, because kernels for newer GPUs alone are not rehearsed.
    major: int = 8
    minor: int = 0
    total_memory: int = TOTAL_BYTES
    multi_processor_count: int = 1
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 166912
    shared_memory_per_multiprocessor: int = 167936
    L2_cache_size: int = 0
    warp_size: int = 32
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    uuid: str = "00000000-0000-0000-0000-000000000000"
    gcnArchName: str = ""  # noqa: N815 - torch's own name


def _index_of(device: Any) -> int | None:
    if device is None or isinstance(device, int):
        return device
    return torch.device(device).index


def _device_functions(runtime: Runtime) -> dict[str, Any]:
    state = runtime.state

    def checked(value: Any) -> Any:
        def answer(device: Any = None) -> Any:
            state.check_device_index(_index_of(device))
            return value

        return answer

    def exchange_device(index: int) -> int:
        state.check_device_index(index)
        return 0 if index >= 0 else -1

    def can_access_peer(device: Any, peer_device: Any) -> bool:
        state.check_device_index(_index_of(device))
        state.check_device_index(_index_of(peer_device))
        return False

    def synchronize(device: Any = None) -> None:
        state.check_device_index(_index_of(device))
        state.sync()

    return {
        "set_device": checked(None),
        "synchronize": synchronize,
        "get_device_properties": checked(DeviceProperties()),
        "can_device_access_peer": can_access_peer,
        "_exchange_device": exchange_device,
        # Another function: the compiler takes none under two names.
        "_maybe_exchange_device": partial(exchange_device),
        "_is_in_bad_fork": lambda: state.is_forked,
    }


_CONSTANTS: Final = {
    "is_available": constant(True),
    "device_count": constant(1),
    "current_device": constant(0),
    "get_arch_list": constant([]),
    "is_bf16_supported": constant(True),
    "is_tf32_supported": constant(False),
    "current_blas_handle": constant(0),
    "current_solver_handle": constant(0),
    "_sleep": constant(None),
}
_STREAMS: Final = {
    "Stream": streams.Stream,
    "Event": streams.Event,
    "current_stream": streams.current_stream,
    "default_stream": streams.default_stream,
    "set_stream": streams.set_stream,
}


_MARKERS: Final = {
    **dict.fromkeys(("rangePushA", "rangePop", "rangeStartA", "deviceRangeStart"), constant(0)),
    **dict.fromkeys(("rangeEnd", "markA", "deviceRangeEnd"), constant(None)),
}
"""Receiver of NVTX ranges: no one listens."""


def _refusal(what: str, original: Any) -> type:
    """Return a class that says what is not rehearsed when it, or a static method, is called."""
    members: dict[str, Any] = {"__init__": refusal(what)}
    for name, member in getattr(original, "__dict__", {}).items():
        if isinstance(member, staticmethod):
            members[name] = staticmethod(refusal(what))
        elif name == "__wrapped__":  # torch 2.14's dynamo looks for it while it is imported
            members[name] = staticmethod(member)
    return type("NotRehearsed", (), members)


_REFUSED: Final = {
    "a CUDA graph": "CUDAGraph graph make_graphed_callables graph_pool_handle",
    "a green context": "GreenContext",
    "a stream of another library": "ExternalStream get_stream_from_external",
    "another memory allocator": "CUDAPluggableAllocator MemPool use_mem_pool"
    " change_current_allocator caching_allocator_alloc caching_allocator_delete"
    " caching_allocator_enable",
    "what the driver measures": "memory_usage utilization temperature power_draw clock_rate"
    " list_gpu_processes",
}
"""Names of torch.cuda that only hardware could answer, by what is refused."""


class CudaStatus(int):
    """A result code of the CUDA runtime."""

    success: int = 0


def _compile_for_device(patches: Patches) -> None:
    """Run compiled graphs of the device op by op: inductor would make code for a GPU."""
    wrapper: Any = torch._TorchCompileInductorWrapper
    original = wrapper.__call__

    def call(self: Any, model_: Any, inputs_: Any, **kwargs: Any) -> Any:
        for node in model_.graph.nodes:
            value = node.meta.get("example_value")
            if isinstance(value, torch.Tensor) and value.is_cuda:
                return model_.forward
        return original(self, model_, inputs_, **kwargs)

    patches.set(wrapper, "__call__", call)


def _scatter(tensor: Any, devices: Any, chunk_sizes: Any, dim: int, streams: Any) -> Any:
    """Spread a batch over the one device that there is, as DataParallel asks for."""
    return (tensor.to(torch.device("cuda", devices[0])),)


def _is_capturing() -> bool:
    streams.check_context()
    return False


def _patch_private(patches: Patches, runtime: Runtime) -> None:
    """Answer for the compiled functions that other parts of torch call directly."""
    # dynamo keeps a rule per function object: these must not be the objects that torch.cuda got.
    functions = _device_functions(runtime)
    # dynamo imports this name as soon as it takes the build for a CUDA build.
    patches.set(torch._C, "_cuda_getCurrentRawStream", constant(0))
    patches.set(torch._C, "_scatter", _scatter)
    patches.set(torch._C, "_cuda_set_sync_debug_mode", runtime.state.set_sync_debug_mode)
    patches.set(torch._C, "_cuda_get_sync_debug_mode", lambda: runtime.state.sync_debug_mode)
    patches.replace(
        torch._C,
        _cuda_init=constant(None),
        _cuda_getDevice=constant(0),
        _cuda_getDeviceCount=constant(1),
        _cuda_setDevice=functions["set_device"],
        _cuda_exchangeDevice=functions["_exchange_device"],
        _cuda_maybeExchangeDevice=functions["_exchange_device"],
        _cuda_synchronize=functions["synchronize"],
        _cuda_isCurrentStreamCapturing=_is_capturing,
        _cuda_emptyCache=streams.check_context,
    )
    # DistributedDataParallel's log of run times asks for a timer of CUDA's.
    logger = getattr(getattr(torch._C, "_distributed_c10d", None), "Logger", None)
    patches.replace(logger, set_runtime_stats_and_log=constant(None))


def patch_surface(patches: Patches, runtime: Runtime) -> None:
    """Patch every public name that answers for the device; `patches` undoes it."""
    streams.bind_state(runtime.state)
    patches.callback(streams.bind_state, None)
    answers = {**_device_functions(runtime), **MEMORY_FUNCTIONS, **_STREAMS, **_CONSTANTS}
    for owner in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
        patches.replace(owner, **answers)
    patches.replace(torch.cuda.graphs, _cuda_isCurrentStreamCapturing=_is_capturing)
    for what, names in _REFUSED.items():
        for owner in (torch.cuda, torch.cuda.memory):
            refused = {name: _refusal(what, getattr(owner, name, None)) for name in names.split()}
            patches.replace(owner, **refused)
    # What torch.cuda.cudart gives: the calls that PyTorch programs make.
    library = SimpleNamespace(
        cudaError=CudaStatus,
        cudaGetErrorString="CUDA error {}".format,
        cudaProfilerStart=constant(0),
        cudaProfilerStop=constant(0),
        cudaMemGetInfo=MEMORY_FUNCTIONS["mem_get_info"],
    )
    patches.set(torch.cuda, "_cudart", library)
    _compile_for_device(patches)
    # With these torch's own Python answers for random numbers, and refuses in a child process.
    patches.set(torch.cuda, "_initialized", True)
    patches.set(torch.cuda, "default_generators", (runtime.generator,))
    patches.set(torch.cuda.nvtx, "_nvtx", SimpleNamespace(**_MARKERS))
    synchronize = _device_functions(runtime)["synchronize"]
    for owner in (torch.accelerator, getattr(torch.accelerator, "memory", torch.accelerator)):
        patches.replace(owner, **MEMORY_FUNCTIONS, synchronize=synchronize)
    _patch_private(patches, runtime)
    _patch_generator(patches)
    _patch_storage(patches)
    _patch_pinning(patches)
    for name in _LEGACY_TENSORS.split():
        dtype = getattr(torch, f"{name}Tensor").dtype
        patches.set(torch.cuda, f"{name}Tensor", _legacy_tensor(f"{name}Tensor", dtype))


# --- replaced attributes --------------------------------------------------------------------------


class Patches(ExitStack):
    """Remember what was changed; ``close`` restores it in reverse order."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace or add one attribute of a module or class."""
        if name in vars(owner):
            self.callback(setattr, owner, name, vars(owner)[name])
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)

    def replace(self, owner: Any, **values: Any) -> None:
        """Replace the attributes that the installed torch has; leave out those that it has not."""
        for name, value in values.items():
            if hasattr(owner, name):
                self.set(owner, name, value)


# --- tensors, storages and generators -------------------------------------------------------------


_LEGACY_TENSORS: Final = "Float Double Half BFloat16 Long Int Short Char Byte Bool"


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _patch_generator(patches: Patches) -> None:
    original: Any = torch.Generator

    class GeneratorFactory(type):
        """Build device generators for ``cuda`` and answer isinstance for both kinds."""

        def __call__(cls, device: Any = "cpu") -> Any:
            return new_device_generator() if _is_device(device) else original(device)

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, original)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, original)

    patches.set(torch, "Generator", GeneratorFactory("Generator", (), {}))


def _patch_storage(patches: Patches) -> None:
    original: Any = torch.UntypedStorage.__new__

    def new(cls: type[Any], *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if not _is_device(device):
            extra = {} if device is None else {"device": device}
            return original(cls, *args, **kwargs, **extra)
        content = args[0] if args else kwargs.get("size", 0)
        data = original(torch.UntypedStorage, content)
        host = torch.empty(0, dtype=torch.uint8).set_(data)
        return to_device(host).untyped_storage()

    resize: Any = torch.UntypedStorage.resize_

    def resize_(self: Any, size: int) -> Any:
        if not _is_device(self.device):
            return resize(self, size)
        resize_storage(self, size)
        return self

    empty: Any = torch.UntypedStorage.new

    def like(self: Any) -> Any:
        if not _is_device(self.device):
            return empty(self)
        return to_device(torch.empty(0, dtype=torch.uint8)).untyped_storage()

    patches.set(torch.UntypedStorage, "__new__", staticmethod(new))
    patches.set(torch.UntypedStorage, "new", like)
    patches.set(torch.UntypedStorage, "resize_", resize_)
    shared = refusal("a tensor shared with another process")
    patches.set(torch.UntypedStorage, "_share_cuda_", shared)  # by torch.multiprocessing


def _patch_pinning(patches: Patches) -> None:
    # Pinned memory comes from another host allocator, which its deleter gives away.
    pinned = storage_deleter(torch.empty(1, pin_memory=True).untyped_storage())

    def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
        streams.check_context()
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return False
        return storage_deleter(tensor.untyped_storage()) == pinned

    def is_storage_pinned(storage: Any, device: Any = "cuda") -> bool:
        return storage.device.type == "cpu" and storage_deleter(storage) == pinned

    patches.set(torch.Tensor, "is_pinned", is_pinned)
    patches.set(torch.UntypedStorage, "is_pinned", is_storage_pinned)


def _legacy_tensor(name: str, dtype: torch.dtype) -> Any:
    class LegacyTensor(type):
        """Build tensors as the old torch.cuda.FloatTensor(...) did and answer isinstance."""

        def __call__(cls, *args: Any) -> torch.Tensor:
            if len(args) == 1 and not isinstance(args[0], int):
                content = args[0]
                if isinstance(content, torch.Size):
                    return torch.empty(content, dtype=dtype, device="cuda")
                return torch.tensor(content, dtype=dtype, device="cuda")
            return torch.empty(args or (0,), dtype=dtype, device="cuda")

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, torch.Tensor) and value.is_cuda and value.dtype is dtype

    # Tensor.type() reads the C name of a class, so the qualified name goes in whole.
    return LegacyTensor(f"torch.cuda.{name}", (), {"dtype": dtype, "is_cuda": True})
