"""Kernels for the ops whose CUDA form differs from the CPU's: copies, resizing, cells, softmax."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from cudalens.simulate.cells import CELL_KERNELS
from cudalens.simulate.kernels import CPU_KEYS, Runtime, SpecialKernel, adopt
from cudalens.simulate.mismatch import check_devices
from cudalens.simulate.opfacts import OpFacts
from cudalens.simulate.relabel import to_device, to_host

aten: Final = torch.ops.aten


def _host(tensor: Tensor) -> Tensor:
    return to_host(tensor) if tensor.is_cuda else tensor


def _copy(runtime: Runtime, facts: OpFacts, values: list[Any]) -> Tensor:
    """Copy between or within devices; across them it waits unless non_blocking."""
    self, source, non_blocking = values
    runtime.state.launch()
    if self.is_cuda != source.is_cuda and not non_blocking:
        runtime.state.sync()
    aten.copy_.default.redispatch(CPU_KEYS, _host(self), _host(source), False)
    return self  # type: ignore[no-any-return]


def _copy_and_resize(runtime: Runtime, facts: OpFacts, values: list[Any]) -> Tensor:
    source, destination = values
    if destination.shape != source.shape:
        destination.resize_(source.shape)
    return _copy(runtime, facts, [destination, source, False])


def _local_scalar(runtime: Runtime, facts: OpFacts, values: list[Any]) -> Any:
    """Read one element: this is where item(), float() and bool() wait for the device."""
    runtime.state.launch()
    runtime.state.sync()
    return facts.op.redispatch(CPU_KEYS, to_host(values[0]))


def _resize(runtime: Runtime, facts: OpFacts, values: list[Any]) -> Tensor:
    """Resize in place; a labelled storage cannot grow, so a larger one is adopted."""
    self, size, memory_format = values
    # The CPU kernel writes the new shape before it finds that the storage is too small.
    old = to_host(self).reshape(-1) if self.numel() else torch.empty(0, dtype=self.dtype)
    try:
        facts.op.redispatch(CPU_KEYS, self, size, memory_format=memory_format)
    except RuntimeError as error:
        if "not resizable" not in str(error):
            raise
        grown = torch.empty(size, dtype=self.dtype)
        grown.view(-1)[: old.numel()].copy_(old)
        if memory_format is not None and memory_format is not torch.preserve_format:
            grown = grown.contiguous(memory_format=memory_format)
        adopt(self, grown)
    return self  # type: ignore[no-any-return]


def _set_on_device(runtime: Runtime, facts: OpFacts, values: list[Any]) -> Tensor:
    """Share another device storage: the CPU kernel only rewires metadata."""
    facts.op.redispatch(CPU_KEYS, *values)
    return values[0]  # type: ignore[no-any-return]


def _set_empty(runtime: Runtime, facts: OpFacts, values: list[Any]) -> Tensor:
    adopt(values[0], torch.empty(0, dtype=values[0].dtype))
    return values[0]  # type: ignore[no-any-return]


def _nothing(runtime: Runtime, facts: OpFacts, values: list[Any]) -> None:
    return None


def _no(runtime: Runtime, facts: OpFacts, values: list[Any]) -> bool:
    return False


def _zeros(runtime: Runtime, facts: OpFacts, values: list[Any]) -> Tensor:
    """Return real zeros: a ZeroTensor has no memory that could be labelled."""
    runtime.state.launch()
    return to_device(torch.zeros(values[0], dtype=values[1]))


def _native_dropout(runtime: Runtime, facts: OpFacts, values: list[Any]) -> tuple[Tensor, Tensor]:
    """Drop out with the device's own random stream, which the schema does not mention."""
    data, p, train = values
    runtime.state.launch()
    host = to_host(data)
    if train is False:
        return to_device(host.clone()), to_device(torch.ones_like(host, dtype=torch.bool))
    keep = 1.0 - p
    mask = torch.empty_like(host, dtype=torch.bool)
    mask.bernoulli_(keep, generator=runtime.generator)
    scale = 1.0 / keep if keep else 0.0
    return to_device(host.mul(mask).mul_(scale)), to_device(mask)


def _softmax(runtime: Runtime, facts: OpFacts, values: list[Any]) -> Tensor:
    """Softmax; half_to_float exists on CUDA only, so widen first."""
    runtime.state.launch()
    data, dim, half_to_float = values[0], values[1], values[2]
    host = to_host(data).float() if half_to_float else to_host(data)
    op = aten._softmax if facts.name.startswith("aten::_softmax") else aten._log_softmax
    result = op.default.redispatch(CPU_KEYS, host, dim, False)
    return _into(values, facts, result)


def _softmax_backward(runtime: Runtime, facts: OpFacts, values: list[Any]) -> Tensor:
    runtime.state.launch()
    check_devices(facts, values)
    grad, output, dim, dtype = values[0], values[1], values[2], values[3]
    name = facts.name.removeprefix("aten::").partition(".")[0]
    op = getattr(aten, name).default
    result = op.redispatch(CPU_KEYS, to_host(grad), to_host(output), dim, grad.dtype)
    return _into(values, facts, result.to(dtype))


def _matmul_to_dtype(runtime: Runtime, facts: OpFacts, values: list[Any]) -> Tensor:
    """Multiply half-precision matrices into a wider dtype: an overload that only CUDA has."""
    runtime.state.launch()
    check_devices(facts, values)
    names = [argument.name for argument in facts.arguments]
    dtype = values[names.index("out_dtype")]
    operands = [to_host(v).to(dtype) for v in values[: names.index("out_dtype")]]
    scales = {n: v for n, v in zip(names, values, strict=True) if n in ("beta", "alpha")}
    op = getattr(aten, facts.name.removeprefix("aten::").partition(".")[0]).default
    return _into(values, facts, op.redispatch(CPU_KEYS, *operands, **scales))


def _into(values: list[Any], facts: OpFacts, result: Tensor) -> Tensor:
    if not facts.outs:
        return to_device(result)
    out = values[facts.outs[0]]
    if out.shape != result.shape:
        adopt(out, result.to(out.dtype))
    else:
        to_host(out).copy_(result)
    return out  # type: ignore[no-any-return]


SPECIAL_KERNELS: Final[Mapping[str, SpecialKernel]] = MappingProxyType(
    {
        "aten::copy_": _copy,
        "aten::_copy_from_and_resize": _copy_and_resize,
        "aten::_local_scalar_dense": _local_scalar,
        "aten::resize_": _resize,
        "aten::set_": _set_empty,
        "aten::set_.source_Storage": _set_on_device,
        "aten::set_.source_Storage_storage_offset": _set_on_device,
        "aten::set_.source_Tensor": _set_on_device,
        "aten::record_stream": _nothing,
        "aten::native_dropout": _native_dropout,
        "aten::_efficientzerotensor": _zeros,
        "aten::_softmax": _softmax,
        "aten::_softmax.out": _softmax,
        "aten::_log_softmax": _softmax,
        "aten::_log_softmax.out": _softmax,
        "aten::_softmax_backward_data": _softmax_backward,
        "aten::_softmax_backward_data.out": _softmax_backward,
        "aten::_log_softmax_backward_data": _softmax_backward,
        "aten::_log_softmax_backward_data.out": _softmax_backward,
        "aten::_use_cudnn_ctc_loss": _no,
        "aten::_use_cudnn_ctc_loss.Tensor": _no,
        "aten::_use_miopen_ctc_loss": _no,
        "aten::_use_miopen_ctc_loss.Tensor": _no,
        **{
            f"aten::{name}.{overload}": _matmul_to_dtype
            for name in ("mm", "bmm", "addmm", "baddbmm")
            for overload in ("dtype", "dtype_out")
        },
        **CELL_KERNELS,
    }
)
