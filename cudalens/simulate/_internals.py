"""The one seam between the simulation and private torch names, exported C++ symbols and ctypes."""

from __future__ import annotations

import ctypes
import functools
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from cudalens.simulate.state import not_rehearsed

CUDA_DEVICE_TYPE: Final = 1
PRIVATE_USE_SLOT: Final = 20
WORD: Final = ctypes.sizeof(ctypes.c_void_p)
VTABLE_PREFIX: Final = 2  # offset-to-top and type info lie in front of the first slot

# Slot numbers follow the order of the virtual functions in the shipped headers
# c10/core/impl/DeviceGuardImplInterface.h and ATen/detail/AcceleratorHooksInterface.h.
GUARD_SLOTS: Final = {
    "type": 0,
    "exchangeDevice": 1,
    "getDevice": 2,
    "setDevice": 3,
    "uncheckedSetDevice": 4,
    "exchangeStream": 9,
    "deviceCount": 15,
}
HOOK_ONE_SLOTS: Final = {
    "isBuilt": 2,
    "isAvailable": 3,
    "hasPrimaryContext": 4,
    "init": 5,
    "deviceCount": 6,
}
HOOK_ZERO_SLOTS: Final = {
    "setCurrentDevice": 7,
    "getCurrentDevice": 8,
    "exchangeDevice": 9,
    "maybeExchangeDevice": 10,
    "isPinnedPtr": 11,
}
HOOK_PINNED_ALLOCATOR_SLOT: Final = 12
GUARD_VTABLE_WORDS: Final = 40
HOOKS_VTABLE_WORDS: Final = 96

_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_REGISTER_GUARD = (
    "_ZN3c104impl19registerDeviceGuardENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"
)
_CUDA_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_PINNED_ALLOCATOR = "_ZN3c1028GetDefaultMobileCPUAllocatorEv"


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def native_one() -> int:
    """Return the address of a native function that returns 1 and needs no interpreter lock."""
    return _address(ctypes.pythonapi.Py_IsInitialized)


def native_zero() -> int:
    """Return the address of a native function that returns 0 whatever its arguments are."""
    return _address(ctypes.CDLL(None).pthread_mutexattr_destroy)


def _torch_library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))


def _replace_vtable(obj: int, words: int, slots: dict[int, int]) -> None:
    """Return the C++ object at `obj` a copy of its vtable with some slots replaced."""
    vptr = ctypes.c_void_p.from_address(obj).value or 0
    size = (words + VTABLE_PREFIX) * WORD
    # Static destructors call through this table after the interpreter is gone: never freed.
    malloc = ctypes.CDLL(None).malloc
    malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    copy = malloc(size)
    ctypes.memmove(copy, vptr - VTABLE_PREFIX * WORD, size)
    table = (ctypes.c_void_p * (words + VTABLE_PREFIX)).from_address(copy)
    for slot, target in slots.items():
        table[VTABLE_PREFIX + slot] = target
    ctypes.c_void_p.from_address(obj).value = copy + VTABLE_PREFIX * WORD


def _install_guard() -> None:
    acc: Any = torch._C._acc
    device_types: Any = torch._C._autograd.DeviceType

    class RehearsalDeviceGuard(acc.DeviceGuard):  # type: ignore[misc]
        # No Python function: an interrupt at its entry would end the process, since C++ calls it
        # from where no exception may pass.
        type_ = staticmethod(functools.partial(getattr, device_types, "CUDA"))

    guard = RehearsalDeviceGuard()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(guard))  # c10 keeps only its address
    c10 = _torch_library("libc10.so")
    registry = (ctypes.c_void_p * (PRIVATE_USE_SLOT + 1)).in_dll(c10, _REGISTRY)
    before = registry[PRIVATE_USE_SLOT]
    acc.register_python_privateuseone_device_guard(guard)
    pointer = registry[PRIVATE_USE_SLOT]
    if not pointer or pointer == before:
        raise OSError("the device guard did not reach c10's registry")
    one = native_one()
    _replace_vtable(pointer, GUARD_VTABLE_WORDS, dict.fromkeys(GUARD_SLOTS.values(), one))
    register = c10[_REGISTER_GUARD]
    register.argtypes = [ctypes.c_int8, ctypes.c_void_p]
    register.restype = None
    register(CUDA_DEVICE_TYPE, pointer)
    register(PRIVATE_USE_SLOT, before)


def _install_hooks() -> None:
    get_hooks = _torch_library("libtorch_cpu.so")[_CUDA_HOOKS]
    get_hooks.restype = ctypes.c_void_p
    hooks = get_hooks()
    original = ctypes.c_void_p.from_address(hooks).value
    slots = dict.fromkeys(HOOK_ONE_SLOTS.values(), native_one())
    slots |= dict.fromkeys(HOOK_ZERO_SLOTS.values(), native_zero())
    slots[HOOK_PINNED_ALLOCATOR_SLOT] = _address(_torch_library("libc10.so")[_PINNED_ALLOCATOR])
    _replace_vtable(hooks, HOOKS_VTABLE_WORDS, slots)
    if str(torch._C._get_accelerator()) != "cuda":
        ctypes.c_void_p.from_address(hooks).value = original
        raise OSError("torch did not accept the simulated device as its accelerator")


@cache
def install_device() -> None:
    """Let C++ find a device guard and hooks for CUDA; done once per process and left there."""
    _install_guard()
    _install_hooks()


@cache
def _memory_words() -> int:
    """Return at which word of a StorageImpl the address of its data lies; the size is four on."""
    storage = torch.empty(3, dtype=torch.uint8).untyped_storage()
    words = (ctypes.c_size_t * 10).from_address(storage._cdata)
    for i in range(1, 6):
        # DataPtr = data, deleter, context, device; then the number of bytes.
        if words[i] == storage.data_ptr() and words[i + 4] == storage.nbytes():
            return i
    raise not_rehearsed("resizing a cuda storage")


def _memory_of(storage: Any) -> Any:
    """Return the words of a storage from the address of its data to its size, to read and write."""
    return (ctypes.c_size_t * 5).from_address(storage._cdata + _memory_words() * WORD)


def storage_deleter(storage: Any) -> int:
    """Return the address of the function that frees this host storage, 0 where there is none."""
    data, deleter, *_ = _memory_of(storage)
    return deleter if data else 0


def swap_memory(storage: Any, other: Any) -> None:
    """Exchange the memory of two storages of one device, deleters and sizes included."""
    ours, theirs = _memory_of(storage), _memory_of(other)
    for i in (0, 1, 2, 4):
        ours[i], theirs[i] = theirs[i], ours[i]


def kernels_in_python() -> frozenset[str]:
    """Return the aten ops for which torch itself brings a CUDA kernel written in Python."""
    registry = getattr(getattr(torch, "_native", None), "registry", None)
    libraries = getattr(registry, "_aten_override_libs", getattr(registry, "_libs", {}))
    return frozenset(f"aten::{name}" for name, key in libraries if key == "CUDA")
