"""Fused kernels that C++ picks for CUDA tensors and the CPU lacks: LSTM, GRU, RMS norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from cudalens.simulate.kernels import Runtime
from cudalens.simulate.mismatch import check_devices
from cudalens.simulate.opfacts import OpFacts
from cudalens.simulate.relabel import to_device, to_host

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


def _on_device(cell: HostCell) -> Callable[[Runtime, OpFacts, list[Any]], Any]:
    def kernel(runtime: Runtime, facts: OpFacts, values: list[Any]) -> Any:
        runtime.state.launch()
        check_devices(facts, values)
        host = [to_host(v) if isinstance(v, Tensor) and v.is_cuda else v for v in values]
        return tuple(r if r is None else to_device(r) for r in cell(*host))

    return kernel


CELL_KERNELS: Final[Mapping[str, Callable[[Runtime, OpFacts, list[Any]], Any]]] = MappingProxyType(
    {
        "aten::_thnn_fused_lstm_cell": _on_device(_lstm),
        "aten::_thnn_fused_lstm_cell_backward_impl": _on_device(_lstm_backward),
        "aten::_thnn_fused_gru_cell": _on_device(_gru),
        "aten::_thnn_fused_gru_cell_backward": _on_device(_gru_backward),
        "aten::_fused_rms_norm": _on_device(_rms_norm),
        "aten::_fused_rms_norm_backward": _on_device(_rms_norm_backward),
    }
)
