"""Kernels for the ops whose CUDA form differs from the CPU's, or that the CPU lacks.

Copies, resizing, softmax; and the fused cells and norms that C++ picks for CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from cudalens.simulate.kernels import CPU_KEYS, Runtime, SpecialKernel, adopt
from cudalens.simulate.op_schema import OpSchema, check_devices
from cudalens.simulate.relabel import to_device, to_host

aten: Final = torch.ops.aten


def _host(tensor: Tensor) -> Tensor:
    return to_host(tensor) if tensor.is_cuda else tensor


def _copy(runtime: Runtime, facts: OpSchema, values: list[Any]) -> Tensor:
    """Copy between or within devices; across them it waits unless non_blocking."""
    self, source, non_blocking = values
    runtime.state.launch()
    if self.is_cuda != source.is_cuda and not non_blocking:
        runtime.state.sync()
    aten.copy_.default.redispatch(CPU_KEYS, _host(self), _host(source), False)
    return self  # type: ignore[no-any-return]


def _copy_and_resize(runtime: Runtime, facts: OpSchema, values: list[Any]) -> Tensor:
    source, destination = values
    if destination.shape != source.shape:
        destination.resize_(source.shape)
    return _copy(runtime, facts, [destination, source, False])


def _local_scalar(runtime: Runtime, facts: OpSchema, values: list[Any]) -> Any:
    """Read one element: this is where item(), float() and bool() wait for the device."""
    runtime.state.launch()
    runtime.state.sync()
    return facts.op.redispatch(CPU_KEYS, to_host(values[0]))


def _resize(runtime: Runtime, facts: OpSchema, values: list[Any]) -> Tensor:
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


def _set_on_device(runtime: Runtime, facts: OpSchema, values: list[Any]) -> Tensor:
    """Share another device storage: the CPU kernel only rewires metadata."""
    facts.op.redispatch(CPU_KEYS, *values)
    return values[0]  # type: ignore[no-any-return]


def _set_empty(runtime: Runtime, facts: OpSchema, values: list[Any]) -> Tensor:
    adopt(values[0], torch.empty(0, dtype=values[0].dtype))
    return values[0]  # type: ignore[no-any-return]


def _nothing(runtime: Runtime, facts: OpSchema, values: list[Any]) -> None:
    return None


def _no(runtime: Runtime, facts: OpSchema, values: list[Any]) -> bool:
    return False


def _zeros(runtime: Runtime, facts: OpSchema, values: list[Any]) -> Tensor:
    """Return real zeros: a ZeroTensor has no memory that could be labelled."""
    runtime.state.launch()
    return to_device(torch.zeros(values[0], dtype=values[1]))


def _native_dropout(runtime: Runtime, facts: OpSchema, values: list[Any]) -> tuple[Tensor, Tensor]:
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


def _softmax(runtime: Runtime, facts: OpSchema, values: list[Any]) -> Tensor:
    """Softmax; half_to_float exists on CUDA only, so widen first."""
    runtime.state.launch()
    data, dim, half_to_float = values[0], values[1], values[2]
    host = to_host(data).float() if half_to_float else to_host(data)
    op = aten._softmax if facts.name.startswith("aten::_softmax") else aten._log_softmax
    result = op.default.redispatch(CPU_KEYS, host, dim, False)
    return _into(values, facts, result)


def _softmax_backward(runtime: Runtime, facts: OpSchema, values: list[Any]) -> Tensor:
    runtime.state.launch()
    check_devices(facts, values)
    grad, output, dim, dtype = values[0], values[1], values[2], values[3]
    name = facts.name.removeprefix("aten::").partition(".")[0]
    op = getattr(aten, name).default
    result = op.redispatch(CPU_KEYS, to_host(grad), to_host(output), dim, grad.dtype)
    return _into(values, facts, result.to(dtype))


def _matmul_to_dtype(runtime: Runtime, facts: OpSchema, values: list[Any]) -> Tensor:
    """Multiply half-precision matrices into a wider dtype: an overload that only CUDA has."""
    runtime.state.launch()
    check_devices(facts, values)
    names = [argument.name for argument in facts.arguments]
    dtype = values[names.index("out_dtype")]
    operands = [to_host(v).to(dtype) for v in values[: names.index("out_dtype")]]
    scales = {n: v for n, v in zip(names, values, strict=True) if n in ("beta", "alpha")}
    op = getattr(aten, facts.name.removeprefix("aten::").partition(".")[0]).default
    return _into(values, facts, op.redispatch(CPU_KEYS, *operands, **scales))


def _into(values: list[Any], facts: OpSchema, result: Tensor) -> Tensor:
    if not facts.outs:
        return to_device(result)
    out = values[facts.outs[0]]
    if out.shape != result.shape:
        adopt(out, result.to(out.dtype))
    else:
        to_host(out).copy_(result)
    return out  # type: ignore[no-any-return]


# --- fused cells and norms ------------------------------------------------------------------------


HostCell = Callable[..., tuple[Tensor | None, ...]]


def _biased(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


def _lstm(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, b_in: Tensor | None, b_hid: Tensor | None
) -> tuple[Tensor, ...]:
    gates = _biased(input_gates, b_in) + _biased(hidden_gates, b_hid)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Tensor | None, ...]:
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    tanh_cy = cy.tanh()
    dh = torch.zeros_like(cx) if grad_hy is None else grad_hy
    dc = dh * o * (1 - tanh_cy * tanh_cy)
    if grad_cy is not None:
        dc = dc + grad_cy
    grad_gates = torch.cat(
        [
            dc * g * i * (1 - i),
            dc * cx * f * (1 - f),
            dc * i * (1 - g * g),
            dh * tanh_cy * o * (1 - o),
        ],
        1,
    )
    return grad_gates, dc * f, grad_gates.sum(0) if has_bias else None


def _gru(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, b_in: Tensor | None, b_hid: Tensor | None
) -> tuple[Tensor, ...]:
    ir, ii, inew = _biased(input_gates, b_in).chunk(3, 1)
    hr, hi, hnew = _biased(hidden_gates, b_hid).chunk(3, 1)
    reset, update = (ir + hr).sigmoid(), (ii + hi).sigmoid()
    new = (inew + reset * hnew).tanh()
    hy = new + update * (hx - new)
    return hy, torch.cat([reset, update, new, hx, hnew.expand_as(hx)], 1)


def _gru_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    reset, update, new, hx, hnew = workspace.chunk(5, 1)
    grad_update = grad_hy * (hx - new) * update * (1 - update)
    grad_new = grad_hy * (1 - update) * (1 - new * new)
    grad_reset = grad_new * hnew * reset * (1 - reset)
    grad_input = torch.cat([grad_reset, grad_update, grad_new], 1)
    grad_hidden = torch.cat([grad_reset, grad_update, grad_new * reset], 1)
    biases = (grad_input.sum(0), grad_hidden.sum(0)) if has_bias else (None, None)
    return grad_input, grad_hidden, grad_hy * update, *biases


def _rms_norm(
    data: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, ...]:
    dims = list(range(data.dim() - len(shape), data.dim()))
    wide = data.float() if data.dtype in (torch.float16, torch.bfloat16) else data
    tiny = torch.finfo(wide.dtype).eps if eps is None else eps
    scale = wide.square().mean(dims, keepdim=True).add(tiny).rsqrt()
    result = wide * scale
    if weight is not None:
        result = result * weight
    return result.to(data.dtype), scale


def _rms_norm_backward(
    grad: Tensor,
    data: Tensor,
    shape: list[int],
    scale: Tensor,
    weight: Tensor | None,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    dims = list(range(data.dim() - len(shape), data.dim()))
    grad_wide, wide = grad.to(scale.dtype), data.to(scale.dtype)
    normal = wide * scale
    weighted = grad_wide if weight is None else grad_wide * weight
    inner = (weighted * normal).mean(dims, keepdim=True)
    grad_data = (scale * (weighted - normal * inner)).to(data.dtype) if wanted[0] else None
    grad_weight = None
    if weight is not None and wanted[1]:
        grad_weight = (grad_wide * normal).sum_to_size(weight.shape).to(weight.dtype)
    return grad_data, grad_weight


def _on_device(cell: HostCell) -> Callable[[Runtime, OpSchema, list[Any]], Any]:
    def kernel(runtime: Runtime, facts: OpSchema, values: list[Any]) -> Any:
        runtime.state.launch()
        check_devices(facts, values)
        host = [to_host(v) if isinstance(v, Tensor) and v.is_cuda else v for v in values]
        return tuple(r if r is None else to_device(r) for r in cell(*host))

    return kernel


CELL_KERNELS: Final[Mapping[str, Callable[[Runtime, OpSchema, list[Any]], Any]]] = MappingProxyType(
    {
        "aten::_thnn_fused_lstm_cell": _on_device(_lstm),
        "aten::_thnn_fused_lstm_cell_backward_impl": _on_device(_lstm_backward),
        "aten::_thnn_fused_gru_cell": _on_device(_gru),
        "aten::_thnn_fused_gru_cell_backward": _on_device(_gru_backward),
        "aten::_fused_rms_norm": _on_device(_rms_norm),
        "aten::_fused_rms_norm_backward": _on_device(_rms_norm_backward),
    }
)


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
