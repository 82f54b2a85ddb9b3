"""The one seam of the rehearsal device to private torch names, exported C++ symbols and ctypes."""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from cudalens.simulate.state import not_rehearsed

CPU_DEVICE_TYPE: Final = 0
CUDA_DEVICE_TYPE: Final = 1
WORD: Final = ctypes.sizeof(ctypes.c_void_p)
VTABLE_PREFIX: Final = 2  # offset-to-top and type info lie in front of the first slot

_INCLUDE: Final = Path(torch.__file__).parent / "include"
GUARD_HEADER: Final = _INCLUDE / "c10" / "core" / "impl" / "DeviceGuardImplInterface.h"
HOOKS_HEADER: Final = _INCLUDE / "ATen" / "detail" / "AcceleratorHooksInterface.h"
# More than the class has, which adds functions of its own to those of the header.
HOOKS_VTABLE_WORDS: Final = 96

# The device cuda:0, its default stream, 1 and true are one pair of words, (1, 0): a Device is two
# bytes, type and index, and a Stream is a Device and a number.
_GUARD_ONE: Final = (
    "type exchangeDevice getDevice deviceCount getStream getDefaultStream getStreamFromGlobalPool"
    " getNewStream exchangeStream queryStream queryEvent"
)
_GUARD_ZERO: Final = (
    "setDevice uncheckedSetDevice destroyEvent record block synchronizeStream synchronizeEvent"
    " synchronizeDevice recordDataPtrOnStream getStreamNativeHandle isStreamCapturing"
)
_HOOKS_ONE: Final = "isBuilt isAvailable hasPrimaryContext init deviceCount"
_HOOKS_ZERO: Final = (
    "setCurrentDevice getCurrentDevice exchangeDevice maybeExchangeDevice isPinnedPtr"
)
_PINNED: Final = "getPinnedMemoryAllocator"

_X86_64: Final = (
    bytes.fromhex("b801000000 31d2 c3"),  # mov eax, 1; xor edx, edx; ret
    bytes.fromhex("31c0 31d2 c3"),  # xor eax, eax; xor edx, edx; ret
)
_ARM64: Final = (
    bytes.fromhex("200080d2 010080d2 c0035fd6"),  # mov x0, #1; mov x1, #0; ret
    bytes.fromhex("000080d2 010080d2 c0035fd6"),  # mov x0, #0; mov x1, #0; ret
)
CODE: Final = {"x86_64": _X86_64, "aarch64": _ARM64, "arm64": _ARM64}
"""By processor, two functions: one returns the words (1, 0), the other (0, 0)."""

_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_MPS_HOOKS = "_ZN2at6detail11getMPSHooksEv"
_PINNED_ALLOCATOR = "_ZN3c1028GetDefaultMobileCPUAllocatorEv"


def virtual_slots(header: Path) -> dict[str, int]:
    """Return the slot of each function that a header declares virtual: they are in its order."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", header.read_text(encoding="utf-8"), flags=re.DOTALL)
    slots: dict[str, int] = {}
    place = 0
    for name in re.findall(r"\bvirtual\s[^(;{]*?(~?\w+)\s*\(", text):
        slots[name] = place
        place += 1 + name.startswith("~")  # a destructor has two: with and without deleting
    return slots


@cache
def _native_functions() -> tuple[int, int]:
    """Return the addresses of two functions without arguments: (1, 0) and (0, 0).

    C++ calls them without the interpreter's lock, from where no exception may pass, and also after
    the interpreter is gone: they are machine code in memory that is never freed.
    """
    one, zero = CODE[platform.machine()]
    page = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(page))
    # The second function begins 16 bytes on, since both are shorter.
    page.write(one.ljust(16) + zero)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # Executable only now: some systems allow no memory that is writable at the same time.
    if protect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError("this system lets no process make memory executable")
    return address, address + 16


def _targets(slots: dict[str, int], ones: str, zeros: str) -> dict[int, int]:
    """Return by slot what answers there; functions that this torch lacks are left out."""
    one, zero = _native_functions()
    answers = {**dict.fromkeys(ones.split(), one), **dict.fromkeys(zeros.split(), zero)}
    return {slots[name]: target for name, target in answers.items() if name in slots}


def _torch_library(name: str) -> ctypes.CDLL:
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"{name}.{suffix}"))


def _malloc(size: int) -> int:
    """Return memory that is never freed: static destructors call through it at exit."""
    malloc = ctypes.CDLL(None).malloc
    malloc.argtypes, malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    return malloc(size)  # type: ignore[no-any-return]


def _replace_vtable(obj: int, words: int, targets: dict[int, int]) -> None:
    """Give the C++ object at `obj` a copy of its vtable with some slots replaced."""
    vptr = ctypes.c_void_p.from_address(obj).value or 0
    size = (words + VTABLE_PREFIX) * WORD
    copy = _malloc(size)
    ctypes.memmove(copy, vptr - VTABLE_PREFIX * WORD, size)
    table = (ctypes.c_void_p * (words + VTABLE_PREFIX)).from_address(copy)
    for slot, target in targets.items():
        table[VTABLE_PREFIX + slot] = target
    ctypes.c_void_p.from_address(obj).value = copy + VTABLE_PREFIX * WORD


@cache
def install_device() -> None:
    """Let C++ find a device guard and hooks for CUDA; done once per process and left there."""
    # A copy of the CPU's device guard, which does nothing, becomes that of CUDA.
    registry = (ctypes.c_void_p * 2).in_dll(_torch_library("libc10"), _REGISTRY)
    host = registry[CPU_DEVICE_TYPE]
    if not host:
        raise OSError("c10 has no device guard for the CPU")
    slots = virtual_slots(GUARD_HEADER)
    guard = _malloc(WORD)  # the object has no members: it is the address of its vtable
    ctypes.memmove(guard, host, WORD)
    # Slots count from 0, and a destructor at the end has two.
    words = max(slots.values()) + 2
    _replace_vtable(guard, words, _targets(slots, _GUARD_ONE, _GUARD_ZERO))
    registry[CUDA_DEVICE_TYPE] = guard
    # Torch's own hooks for CUDA get answers of an accelerator that is there.
    slots = virtual_slots(HOOKS_HEADER)
    if sys.platform == "darwin":  # torch refuses two accelerators at once
        _replace_vtable(_hooks(_MPS_HOOKS), HOOKS_VTABLE_WORDS, _targets(slots, "", "isBuilt"))
    hooks = _hooks(_CUDA_HOOKS)
    original = ctypes.c_void_p.from_address(hooks).value
    targets = _targets(slots, _HOOKS_ONE, _HOOKS_ZERO)
    allocator = _torch_library("libc10")[_PINNED_ALLOCATOR]
    targets[slots[_PINNED]] = ctypes.cast(allocator, ctypes.c_void_p).value or 0
    _replace_vtable(hooks, HOOKS_VTABLE_WORDS, targets)
    if str(torch._C._get_accelerator()) != "cuda":
        ctypes.c_void_p.from_address(hooks).value = original
        raise OSError("torch did not accept the rehearsal device as its accelerator")


def _hooks(name: str) -> int:
    get_hooks = _torch_library("libtorch_cpu")[name]
    get_hooks.restype = ctypes.c_void_p
    return get_hooks()  # type: ignore[no-any-return]


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
    # Not word 3, the device, which is the same for both.
    for i in (0, 1, 2, 4):
        ours[i], theirs[i] = theirs[i], ours[i]


def kernels_in_python() -> frozenset[str]:
    """Return the aten ops for which torch itself brings a CUDA kernel written in Python."""
    registry = getattr(getattr(torch, "_native", None), "registry", None)
    libraries = getattr(registry, "_aten_override_libs", getattr(registry, "_libs", {}))
    return frozenset(f"aten::{name}" for name, key in libraries if key == "CUDA")
