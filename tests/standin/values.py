"""Real values on the stand-in: torch's CUDA kernel for the host side, the CPU's for the numbers.

Each op with a kernel for CUDA and one for the CPU gets a kernel in Python.  It calls torch's own
CUDA kernel, whose host code checks, allocates and launches as ever while the launches do nothing,
and puts into the results what the CPU kernel makes of the same bytes.  Where the CPU kernel refuses
a value that the CUDA kernel's host code accepts, the launch asserts.  While a graph is captured the
computation is captured too.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests import standin
from tests.standin.build import KERNELS

_C: Any = torch._C
_TORCH_S_OWN = """
    empty empty_strided empty_like set_ resize_ resize_as_ as_strided as_strided_
    _reshape_alias view unfold _local_scalar_dense record_stream is_pinned _pin_memory
    is_set_to lift alias _has_same_storage_numel _resize_output_ _efficientzerotensor
    squeeze_ unsqueeze_ transpose_ t_ detach_ _nested_view_from_buffer
    _cudnn_init_dropout_state _lazy_clone
"""
"""Ops on metadata and memory alone: torch's kernels are right as they are."""
_ONLY_CPU = re.compile(
    r"aten::(addmm|mm|bmm|baddbmm|addbmm|addmv|dot|vdot|addr|_addmm|_int_mm|_scaled|_grouped_mm"
    r"|linalg_|_linalg|_fft|cholesky|triangular_solve|ormqr|geqrf|orgqr|lu_|svd|qr|_cdist"
    r"|convolution|_convolution|_slow_conv|slow_conv|conv_|nonzero|masked_select|_?unique"
    r"|embedding_renorm_|embedding_dense_backward|_flash|_efficient|_cudnn|cudnn|repeat_interleave"
    r"|_?segment|_?ctc_loss|_?histogram|kthvalue|mode|_weight_norm|_assert_async|searchsorted)"
)
"""Ops whose CUDA kernels call cuBLAS or cuDNN, or read a count from the device."""
_COUNTED_ON_DEVICE = re.compile(r"aten::(nonzero|masked_select|_?unique)")
_WITHOUT_KEY = frozenset({"aten::convolution", "aten::convolution_backward", "aten::copy_"})
_CPU_KEYS = _C.DispatchKeySet(_C.DispatchKey.CPU)
_replays: list[Callable[[], None]] = [lambda: None]
_kept: list[Any] = []


def register() -> None:
    """Register the kernels, and let graphs replay them."""
    if not hasattr(_C, "_cuda_init"):
        return  # a CPU build
    for backend in ("flash", "mem_efficient", "cudnn"):  # chosen past the dispatcher
        getattr(torch.backends.cuda, f"enable_{backend}_sdp")(False)
    torch.backends.cudnn.enabled = False
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each is an override
        for name in _C._dispatch_get_all_op_names():
            op = _computed(name)
            if op is not None:
                kernel = partial(_Frameless, _Kernel(op, name))
                kernel.__name__ = name
                library.impl(name, kernel, "CUDA", with_keyset=True, allow_override=True)
    replay = ctypes.CFUNCTYPE(None, ctypes.c_uint64)(lambda number: _replays[number]())
    standin.library.python(ctypes.cast(replay, ctypes.c_void_p))
    _kept.extend((library, replay))


def _computed(name: str) -> Any:
    """Return the op whose values the CPU's kernel is to compute, ``None`` for any other."""
    has = _C._dispatch_has_kernel_for_dispatch_key
    packet, _, overload = name.removeprefix("aten::").partition(".")
    if not name.startswith("aten::") or packet in _TORCH_S_OWN.split():
        return None
    if name not in _WITHOUT_KEY and not has(name, "CUDA"):
        return None
    shared = ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    if not any(has(name, key) for key in shared):
        return None
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    is_view = any(r.alias_info and not r.alias_info.is_write for r in op._schema.returns)
    return None if is_view else op


@cache
def _kernel_of() -> Any:
    """Return torch's function that gives the kernel of an op, or ours where it has none."""
    own = getattr(_C, "_dispatch_get_computed_kernel_for_dispatch_key", None)
    if own is not None:
        return own
    path = standin.FOLDER / KERNELS
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    return importlib.util.module_from_spec(spec).kernel_of


_ended: Any = (item for item in ())
list(_ended)


class _Frameless:
    """A call of a kernel that leaves no frame in the traceback of what it raises, as C++ does.

    Python calls ``__init__`` only where ``__new__`` returns an object of the class.  From there on
    it is C, up to the generator that has ended, which raises what is thrown into it.
    """

    __init__ = property(methodcaller("fail"))  # type: ignore[assignment]
    fail: Callable[[], None]

    def __new__(cls, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(*args, **kwargs)
        except Exception as error:
            call = object.__new__(cls)
            call.fail = partial(_ended.throw, error.with_traceback(None))
            return call


class _Kernel:
    """The kernel of one op."""

    def __init__(self, op: Any, name: str) -> None:
        self._op, self._name = op, name
        self._arguments = list(op._schema.arguments)
        self._is_written = [bool(a.alias_info and a.alias_info.is_write) for a in self._arguments]
        self._positional = sum(not a.kwarg_only for a in self._arguments)
        self._cuda = None
        if not _ONLY_CPU.match(name):
            self._cuda = _kernel_of()(name, _C.DispatchKey.CUDA)

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if self._name == "aten::_fused_sdp_choice":
            return 0
        tensors = [item for item in _flat((args, kwargs.values())) if isinstance(item, Tensor)]
        is_transfer = self._name == "aten::copy_" and not (args[0].is_cuda and args[1].is_cuda)
        if is_transfer or any(t.layout is not torch.strided or t.is_nested for t in tensors):
            return self._cuda.call_boxed(keyset, *args, **kwargs)
        values = list(args)
        for argument in self._arguments[len(args) :]:
            values.append(kwargs.get(argument.name, argument.default_value))
        for i, argument in enumerate(self._arguments):
            if isinstance(values[i], (int, float, complex)) and "Tensor" in str(argument.type):
                values[i] = _wrapped(values[i], tensors)
        is_complex = any(tensor.is_complex() for tensor in tensors)  # made by NVRTC, some of them
        with _C.DisableTorchFunction():
            if self._cuda is None or is_complex:
                return self._without_cuda(values)
            return self._beside_cuda(keyset, values)

    def _beside_cuda(self, keyset: Any, values: list[Any]) -> Any:
        stream = _C._cuda_getCurrentRawStream(0)
        is_captured = standin.library.capture(stream, 0)
        host, result, refusal = self._compute(values) if _is_healthy() else (None, None, None)
        is_value = refusal is not None and not isinstance(refusal, NotImplementedError)
        if is_value:
            standin.library.fail_next(standin.ASSERT, _assertion(self._name).encode())
        try:
            made = self._call(lambda *a, **k: self._cuda.call_boxed(keyset, *a, **k), values)
        finally:
            standin.library.fail_next(0, b"")  # no launch may have taken it
        if host is None or refusal is not None:
            return made
        if is_captured:
            self._capture(stream, values, made)
            return made
        return self._fill(made, result, values, host)

    def _without_cuda(self, values: list[Any]) -> Any:
        stream = _C._cuda_getCurrentRawStream(0)
        is_captured = standin.library.capture(stream, 0)
        host, result, refusal = self._compute(values)
        if standin.library.launch(self._name.encode(), stream):
            torch.cuda.current_stream().query()  # raises what is wrong
        if refusal is not None:
            raise refusal
        if _COUNTED_ON_DEVICE.match(self._name):
            torch.cuda.current_stream().synchronize()
        made = self._results(result, values, host)
        if is_captured:
            self._capture(stream, values, made)
            return made
        return self._fill(made, result, values, host)

    # --- on the host ------------------------------------------------------------------------------

    def _call(self, function: Any, values: list[Any]) -> Any:
        n = self._positional
        names = (argument.name for argument in self._arguments[n:])
        return function(*values[:n], **dict(zip(names, values[n:], strict=True)))

    def _lowered(self, values: list[Any], *, is_replay: bool = False) -> list[Any]:
        """Return the arguments for the CPU kernel; what it writes to is a copy."""
        host = []
        for argument, value, is_written in zip(
            self._arguments, values, self._is_written, strict=True
        ):
            if "Generator" in str(argument.type):
                host.append(torch.Generator() if is_replay else _generator(value))
            elif argument.name == "pin_memory":
                host.append(False)
            else:
                host.append(_lower(value, is_written and not is_replay, argument.is_out))
        return host

    def _compute(self, values: list[Any]) -> tuple[list[Any], Any, Exception | None]:
        host = self._lowered(values)
        try:
            return host, self._on_cpu(host), None
        except Exception as refusal:
            return host, None, refusal

    def _on_cpu(self, host: list[Any]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._call(lambda *a, **k: self._op.redispatch(_CPU_KEYS, *a, **k), host)

    # --- results ----------------------------------------------------------------------------------

    def _results(self, result: Any, values: list[Any], host: list[Any]) -> Any:
        """Return what the op gives back on the device, without values yet."""
        written = [v for v, is_written in zip(values, self._is_written, strict=True) if is_written]
        if not written:
            return _map(result, _like_on_device)
        for argument, value, computed in zip(self._arguments, values, host, strict=True):
            if argument.is_out and value.shape != computed.shape:
                value.resize_(computed.shape)
        return tuple(written) if isinstance(result, tuple) else written[0]

    def _fill(self, made: Any, result: Any, values: list[Any], host: list[Any]) -> Any:
        if not any(self._is_written):
            return _pairwise(made, result, _put)
        for value, computed, is_written in zip(values, host, self._is_written, strict=True):
            if is_written:
                _pairwise(value, computed, _put)
        return made

    def _capture(self, stream: int, values: list[Any], made: Any) -> None:
        """Let a replay compute on the bytes that are there then."""
        host = self._lowered(values, is_replay=True)
        outputs = [_bytes(t) for t in _flat([made]) if isinstance(t, Tensor) and t.is_cuda]

        def replay() -> None:
            with _C.DisableTorchFunction(), torch.no_grad():
                fresh = [
                    _map(value, Tensor.clone) if is_written else value
                    for value, is_written in zip(host, self._is_written, strict=True)
                ]
                result = self._on_cpu(fresh)
                if any(self._is_written):
                    result = [v for v, w in zip(fresh, self._is_written, strict=True) if w]
                computed = [item for item in _flat([result]) if isinstance(item, Tensor)]
                for output, value in zip(outputs, computed, strict=True):
                    output.copy_(value)

        _replays.append(replay)
        standin.library.capture(stream, len(_replays) - 1)


# --- tensors --------------------------------------------------------------------------------------


def _is_healthy() -> bool:
    return bool(standin.count("healthy"))


def _bytes(tensor: Tensor) -> Tensor:
    """Return a CPU tensor over the bytes of one on the device; it keeps nothing alive."""
    storage = tensor.untyped_storage()
    if tensor._is_zerotensor():
        return torch.zeros(tensor.size(), dtype=tensor.dtype)
    if not tensor.numel():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    size = storage.nbytes() // tensor.itemsize * tensor.itemsize
    at = storage.data_ptr() + standin.library.shift()
    flat = torch.frombuffer((ctypes.c_char * size).from_address(at), dtype=torch.uint8)
    made = flat.view(tensor.dtype).as_strided(
        tensor.size(), tensor.stride(), tensor.storage_offset()
    )
    made = torch._conj(made) if tensor.is_conj() else made
    return torch._neg_view(made) if tensor.is_neg() else made


def _lower(value: Any, is_copied: bool, is_out: bool) -> Any:
    if isinstance(value, (list, tuple)):
        return [_lower(item, is_copied, is_out) for item in value]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if not isinstance(value, Tensor) or not value.is_cuda:
        return value
    if is_out and is_copied:
        return torch.empty(0, dtype=value.dtype)  # of any shape
    return _bytes(value).clone() if is_copied else _bytes(value)


def _generator(given: Any) -> torch.Generator:
    """Return numbers that follow from the seed and from what the device's generator has given."""
    cuda = torch.cuda.default_generators[0] if given is None else given
    made = torch.Generator()
    if not torch.cuda.is_current_stream_capturing():
        made.manual_seed((cuda.initial_seed() * 1_000_003 + cuda.get_offset()) % 2**63)
    return made


def _wrapped(value: Any, tensors: list[Tensor]) -> Tensor:
    """Return a number as the 0-dim tensor that promotes as the number does."""
    other = max(tensors, key=lambda tensor: tensor.dim() > 0, default=None)
    if other is None or isinstance(value, bool):
        return torch.tensor(value, device="cpu")
    dtype = torch.result_type(other, value)
    if dtype is other.dtype and other.dim() and not isinstance(value, int):
        dtype = torch.float64 if isinstance(value, float) else torch.complex128
    return torch.tensor(value, dtype=dtype, device="cpu")


def _like_on_device(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cuda")


def _put(made: Any, computed: Any) -> Any:
    """Put computed values into a tensor on the device; another one where its shape is not known."""
    if not isinstance(made, Tensor) or not made.is_cuda:
        return computed if not isinstance(made, Tensor) else made
    if made.shape != computed.shape:
        if made.numel() == computed.numel():
            computed = computed.reshape(made.shape)
        else:
            made = _like_on_device(computed)
    if made.numel():
        _bytes(made).copy_(computed)
    return made


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, Iterable) and not isinstance(value, (Tensor, str)):
            yield from _flat(value)
        else:
            yield value


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, change) for item in value)
    return change(value) if isinstance(value, Tensor) else value


def _pairwise(made: Any, computed: Any, put: Callable[[Any, Any], Any]) -> Any:
    if isinstance(made, (list, tuple)):
        return type(made)(
            _pairwise(one, other, put) for one, other in zip(made, computed, strict=True)
        )
    return put(made, computed)


@cache
def _assertions() -> dict[str, str]:
    path = Path(__file__).parent.parent / "data" / "device_asserts.json"
    texts: dict[str, str] = {}
    for record in json.loads(path.read_text(encoding="utf-8")):
        for name in record["ops"]:
            texts.setdefault(name, "".join(record["stderr_text"][:1]))
    return texts


def _assertion(name: str) -> str:
    """Return what the kernel of an op prints when it asserts."""
    return _assertions().get(name) or standin.LINE
