"""Tensor, storage and generator methods that bypass the dispatcher."""

from __future__ import annotations

from typing import Any, Final

import torch

from cudalens.simulate._internals import storage_deleter
from cudalens.simulate.generators import new_device_generator
from cudalens.simulate.patches import Patches
from cudalens.simulate.relabel import to_device
from cudalens.simulate.state import not_rehearsed

_LEGACY_TENSORS: Final = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


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

    patches.set(torch.UntypedStorage, "__new__", staticmethod(new))


def _patch_pinning(patches: Patches) -> None:
    # Pinned memory comes from another host allocator, which its deleter gives away.
    pinned = storage_deleter(torch.empty(1, pin_memory=True).untyped_storage())

    def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return False
        return storage_deleter(tensor.untyped_storage()) == pinned

    def is_storage_pinned(storage: Any, device: Any = "cuda") -> bool:
        return storage.device.type == "cpu" and storage_deleter(storage) == pinned

    patches.set(torch.Tensor, "is_pinned", is_pinned)
    patches.set(torch.UntypedStorage, "is_pinned", is_storage_pinned)


def _patch_exchange(patches: Patches) -> None:
    """Refuse to hand the memory to other GPU libraries: the pointer is a host pointer."""
    original = torch.Tensor.__dlpack__
    array_interface: Any = torch.Tensor.__cuda_array_interface__
    to_dlpack: Any = vars(torch.utils.dlpack)["to_dlpack"]

    def dlpack(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.is_cuda:
            raise not_rehearsed("DLPack exchange of a cuda tensor")
        return original(self, *args, **kwargs)

    def interface(self: torch.Tensor) -> Any:
        if self.is_cuda:
            raise not_rehearsed("__cuda_array_interface__")
        return array_interface.fget(self)

    def capsule(tensor: torch.Tensor) -> Any:
        if tensor.is_cuda:
            raise not_rehearsed("DLPack exchange of a cuda tensor")
        return to_dlpack(tensor)

    patches.set(torch.Tensor, "__dlpack__", dlpack)
    patches.set(torch.Tensor, "__cuda_array_interface__", property(interface))
    patches.set(torch.utils.dlpack, "to_dlpack", capsule)
    patches.replace(torch, "to_dlpack", capsule)


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


def patch_tensor_surface(patches: Patches) -> None:
    """Patch pinning, storages, generators, legacy types and memory exchange."""
    _patch_generator(patches)
    _patch_storage(patches)
    _patch_pinning(patches)
    _patch_exchange(patches)
    for name, dtype in _LEGACY_TENSORS.items():
        patches.set(torch.cuda, name, _legacy_tensor(name, dtype))
