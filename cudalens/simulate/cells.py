"""The fused LSTM and GRU cells that C++ picks for CUDA tensors and the CPU does not have."""

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


def _gru_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    reset, update, new, hx, hnew = workspace.chunk(5, 1)
    grad_update = grad_hy * (hx - new) * update * (1 - update)
    grad_new = grad_hy * (1 - update) * (1 - new * new)
    grad_reset = grad_new * hnew * reset * (1 - reset)
    grad_input = torch.cat([grad_reset, grad_update, grad_new], 1)
    grad_hidden = torch.cat([grad_reset, grad_update, grad_new * reset], 1)
    biases = (grad_input.sum(0), grad_hidden.sum(0)) if has_bias else (None, None)
    return grad_input, grad_hidden, grad_hy * update, *biases


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
    }
)
