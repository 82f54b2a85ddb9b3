"""Kernels for the ops whose CUDA form differs from the CPU's, or that the CPU lacks.

Copies, resizing, softmax; and the fused cells that C++ picks for CUDA tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from cudalens.simulate.kernels import Runtime, SpecialKernel, adopt, lower, reach, run, settle
from cudalens.simulate.op_schema import OpSchema, aten_ops, check_devices, has_mixed_devices
from cudalens.simulate.relabel import CPU_KEYS, is_plain, set_memory, to_device, to_host

aten: Final = torch.ops.aten
_SCALAR_TYPES: Final = {
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
}
_CONTIGUOUS: Final = torch.contiguous_format


def _copy(runtime: Runtime, facts: OpSchema, values: list[Any], keys: Any) -> Tensor:
    """Copy between or within devices; across them it waits unless non_blocking."""
    self, source, non_blocking = values
    runtime.state.launch()
    if self.is_cuda != source.is_cuda and not non_blocking:
        runtime.state.synchronizing()
    host = lower(runtime, facts, values)
    aten.copy_.default.redispatch(keys, host[0], host[1], False)
    if not is_plain(self):
        settle(self, host[0])
    return self  # type: ignore[no-any-return]


def _local_scalar(runtime: Runtime, facts: OpSchema, values: list[Any], keys: Any) -> Any:
    """Read one element: this is where item(), float() and bool() wait for the device."""
    runtime.state.launch()
    runtime.state.synchronizing()
    return facts.op.redispatch(CPU_KEYS, to_host(values[0]))


def _resize(runtime: Runtime, facts: OpSchema, values: list[Any], keys: Any) -> Tensor:
    """Resize in place: the storage grows for all that share it, elements stay where they are."""
    self, size, memory_format = values
    reach(self, size, torch.empty(size, dtype=self.dtype, device="meta").stride())
    facts.op.redispatch(keys, self, size, memory_format=memory_format)
    return self  # type: ignore[no-any-return]


def _set_on_device(runtime: Runtime, facts: OpSchema, values: list[Any], keys: Any) -> Tensor:
    """Share another device storage: the CPU kernel only rewires metadata."""
    facts.op.redispatch(CPU_KEYS, *values)
    return values[0]  # type: ignore[no-any-return]


def _set_empty(runtime: Runtime, facts: OpSchema, values: list[Any], keys: Any) -> Tensor:
    empty = to_device(torch.empty(0, dtype=values[0].dtype))
    set_memory(values[0], empty.untyped_storage(), 0, empty)
    return values[0]  # type: ignore[no-any-return]


def _add(runtime: Runtime, facts: OpSchema, values: list[Any], keys: Any) -> Any:
    """Add a sparse tensor as CUDA does: the CPU does not look at the positions."""
    one, other = values[0], values[1]
    target = values[facts.outs[0]] if facts.outs else one
    if (
        getattr(other, "layout", None) is not torch.sparse_coo
        or one.is_nested
        or one.shape != other.shape
        or has_mixed_devices(facts, values)
        or (facts.written and not torch.can_cast(torch.result_type(one, other), target.dtype))
    ):
        return run(runtime, facts, values, keys)
    runtime.state.launch()
    total = (_dense_sum if is_plain(one) else _sparse_sum)(*values[:3])
    if not facts.written:
        return total
    return target.resize_as_(total).copy_(total)


def _sparse_sum(one: Tensor, other: Tensor, alpha: Any) -> Tensor:
    """Join the elements of both; only too many of them are put together."""
    dtype = torch.result_type(one, other)
    data = [one._values().to(dtype), other._values().to(dtype) * alpha]
    total = torch.sparse_coo_tensor(
        torch.cat([one._indices(), other._indices()], 1),
        torch.cat(data),
        one.shape,
        check_invariants=False,
    )
    return total.coalesce() if total._nnz() > total.numel() else total


def _dense_sum(dense: Tensor, sparse: Tensor, alpha: Any) -> Tensor:
    """Add with `index_add_` on flat positions."""
    indices, data = sparse._indices(), sparse._values()
    rows = math.prod(sparse.shape[: sparse.sparse_dim()])
    flat = torch.zeros_like(indices[0])
    for size, index in zip(sparse.shape, indices, strict=False):
        flat = flat * size + index
    if sparse.is_coalesced():
        # The kernel for those asserts nothing; what it writes elsewhere is lost.
        inside = (flat >= 0) & (flat < rows)
        flat = flat.where(inside, 0)
        data = data.where(inside.view(-1, *[1] * (data.dim() - 1)), 0)
    total = dense.to(torch.result_type(dense, sparse), copy=True, memory_format=_CONTIGUOUS)
    if total.numel():
        matrix = total.view(rows, -1)
        data = data.to(total.dtype).reshape(len(flat), matrix.shape[1])
        matrix.index_add_(0, flat, data, alpha=alpha)
    return total


def _embedding_bag(runtime: Runtime, facts: OpSchema, values: list[Any], keys: Any) -> Any:
    """Look up bags of rows; CUDA has its own words for weights of another dtype."""
    table, scale = values[0], values[facts.names.index("per_sample_weights")]
    if scale is not None and scale.dtype != table.dtype:
        wanted, actual = (_SCALAR_TYPES.get(t.dtype, str(t.dtype)) for t in (table, scale))
        raise RuntimeError(f"expected scalar type {wanted} but found {actual}")
    return run(runtime, facts, values, keys)


def _zeros(runtime: Runtime, facts: OpSchema, values: list[Any], keys: Any) -> Tensor:
    """Return real zeros: a ZeroTensor has no memory that could be labelled."""
    runtime.state.launch()
    return to_device(torch.zeros(values[0], dtype=values[1]))


def _native_dropout(
    runtime: Runtime, facts: OpSchema, values: list[Any], keys: Any
) -> tuple[Tensor, Tensor]:
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


def _softmax(runtime: Runtime, facts: OpSchema, values: list[Any], keys: Any) -> Tensor:
    """Softmax; half_to_float exists on CUDA only, so widen first."""
    runtime.state.launch()
    data, dim, half_to_float = values[:3]
    host = to_host(data).float() if half_to_float else to_host(data)
    return _into(values, facts, _plain_overload(facts).redispatch(CPU_KEYS, host, dim, False))


def _softmax_backward(runtime: Runtime, facts: OpSchema, values: list[Any], keys: Any) -> Tensor:
    runtime.state.launch()
    check_devices(facts, values)
    grad, output, dim, dtype = values[:4]
    result = _plain_overload(facts).redispatch(
        CPU_KEYS, to_host(grad), to_host(output), dim, grad.dtype
    )
    return _into(values, facts, result.to(dtype))


def _matmul_to_dtype(runtime: Runtime, facts: OpSchema, values: list[Any], keys: Any) -> Tensor:
    """Multiply half-precision matrices into a wider dtype: an overload that only CUDA has."""
    runtime.state.launch()
    check_devices(facts, values)
    last = facts.names.index("out_dtype")
    dtype = values[last]
    operands = [to_host(v).to(dtype) for v in values[:last]]
    scales = {n: v for n, v in zip(facts.names, values, strict=True) if n in ("beta", "alpha")}
    return _into(values, facts, _plain_overload(facts).redispatch(CPU_KEYS, *operands, **scales))


def _plain_overload(facts: OpSchema) -> Any:
    return getattr(aten, facts.name.removeprefix("aten::").partition(".")[0]).default


def _into(values: list[Any], facts: OpSchema, result: Tensor) -> Tensor:
    if not facts.outs:
        return to_device(result)
    out = values[facts.outs[0]]
    if out.shape != result.shape:
        adopt(out, result.to(out.dtype))
    else:
        to_host(out).copy_(result)
    return out  # type: ignore[no-any-return]


# --- fused cells ---------------------------------------------------------------------------------


HostCell = Callable[..., tuple[Tensor | None, ...]]


def _biased(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


# The workspace that a forward leaves for its backward holds the sums of the gates: from them the
# backward that torch has for other devices computes the gradients.


def _lstm(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, b_in: Tensor | None, b_hid: Tensor | None
) -> tuple[Tensor, ...]:
    gates = _biased(input_gates, b_in) + _biased(hidden_gates, b_hid)
    i, f, g, o = gates.chunk(4, 1)
    cy = f.sigmoid() * cx + i.sigmoid() * g.tanh()
    return o.sigmoid() * cy.tanh(), cy, gates


def _lstm_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    gates: Tensor,
    has_bias: bool,
) -> tuple[Tensor | None, ...]:
    grad_gates, _, grad_cx, *_ = aten._thnn_differentiable_lstm_cell_backward(
        grad_hy, grad_cy, gates, torch.zeros_like(gates), None, None, cx, cy
    )
    is_summed = has_bias and grad_gates is not None
    return grad_gates, grad_cx, grad_gates.sum(0) if is_summed else None


def _gru(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, b_in: Tensor | None, b_hid: Tensor | None
) -> tuple[Tensor, ...]:
    ir, ii, inew = _biased(input_gates, b_in).chunk(3, 1)
    hr, hi, hnew = _biased(hidden_gates, b_hid).chunk(3, 1)
    reset, update = ir + hr, ii + hi
    new = (inew + reset.sigmoid() * hnew).tanh()
    hy = new + update.sigmoid() * (hx - new)
    return hy, torch.cat([reset, update, inew, hnew, hx], 1)


def _gru_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    reset, update, inew, hnew, hx = workspace.chunk(5, 1)
    gates = torch.cat([reset, update, inew], 1)
    hidden = torch.cat([torch.zeros_like(reset), torch.zeros_like(update), hnew], 1)
    grads = aten._thnn_differentiable_gru_cell_backward(grad_hy, gates, hidden, hx, None, None)
    biases = (grads[0].sum(0), grads[1].sum(0)) if has_bias else (None, None)
    return *grads[:3], *biases


def _on_device(cell: HostCell) -> SpecialKernel:
    def kernel(runtime: Runtime, facts: OpSchema, values: list[Any], keys: Any) -> Any:
        runtime.state.launch()
        check_devices(facts, values)
        host = [to_host(v) if isinstance(v, Tensor) and v.is_cuda else v for v in values]
        return tuple(r if r is None else to_device(r) for r in cell(*host))

    return kernel


_KERNELS: Final[dict[str, SpecialKernel]] = {
    "copy_": _copy,
    "_local_scalar_dense": _local_scalar,
    "resize_": _resize,
    "set_": _set_empty,
    "set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor": _set_on_device,
    # No allocator here reuses memory while another stream still reads it.
    "record_stream": lambda *call: None,
    "_embedding_bag _embedding_bag_forward_only": _embedding_bag,
    "native_dropout": _native_dropout,
    "_efficientzerotensor": _zeros,
    "_softmax _softmax.out _log_softmax _log_softmax.out": _softmax,
    "_softmax_backward_data _softmax_backward_data.out": _softmax_backward,
    "_log_softmax_backward_data _log_softmax_backward_data.out": _softmax_backward,
    # Without cuDNN, torch takes its own kernels for the loss.
    "_use_cudnn_ctc_loss _use_cudnn_ctc_loss.Tensor": lambda *call: False,
    "_use_miopen_ctc_loss _use_miopen_ctc_loss.Tensor": lambda *call: False,
    "mm.dtype bmm.dtype addmm.dtype baddbmm.dtype": _matmul_to_dtype,
    "mm.dtype_out bmm.dtype_out addmm.dtype_out baddbmm.dtype_out": _matmul_to_dtype,
    "_thnn_fused_lstm_cell": _on_device(_lstm),
    "_thnn_fused_lstm_cell_backward_impl": _on_device(_lstm_backward),
    "_thnn_fused_gru_cell": _on_device(_gru),
    "_thnn_fused_gru_cell_backward": _on_device(_gru_backward),
}
SPECIAL_KERNELS: Final[Mapping[str, SpecialKernel]] = {
    name: kernel for names, kernel in _KERNELS.items() for name in aten_ops(names)
}
LAYOUT_KERNELS: Final[Mapping[str, SpecialKernel]] = {
    "aten::copy_": _copy,
    **dict.fromkeys(aten_ops("add.Tensor add_.Tensor add.out"), _add),
}
"""Those for sparse and nested tensors."""
