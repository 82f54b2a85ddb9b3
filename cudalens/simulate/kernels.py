"""The generic kernel: run any op of the rehearsal device with its CPU kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from cudalens.core._torch import ops_that_read
from cudalens.simulate.asserts import look
from cudalens.simulate.op_schema import (
    OpSchema,
    aten_ops,
    check_devices,
    has_mixed_devices,
    number_tensor,
)
from cudalens.simulate.relabel import (
    CPU_KEYS,
    SPARSE_KEYS,
    is_device_generator,
    is_plain,
    new_device_generator,
    resize_storage,
    set_memory,
    to_device,
    to_host,
    to_host_sharing,
)
from cudalens.simulate.state import DeviceState, not_rehearsed

_CPU: Final = torch.device("cpu")

# On CUDA these wait for the device, because the shape of the result or the answer is data.  Torch
# does not tag the sparse ones, and tags by their schema some that wait for some arguments alone.
SYNC_OPS: Final = ops_that_read() - aten_ops(
    "index.Tensor repeat_interleave.Tensor _ctc_loss _ctc_loss.Tensor"
) | aten_ops("_coalesce _to_sparse _to_sparse.sparse_dim")
_OF_CUBLAS: Final = aten_ops(
    "mm mm.out addmm addmm_ addmm.out bmm bmm.out baddbmm baddbmm_ baddbmm.out mv mv.out addmv"
    " addmv_ addmv.out dot vdot _addmm_activation"
)
SpecialKernel = Callable[..., Any]


@dataclass(kw_only=True)
class Runtime:
    """State that the kernels of one running device share."""

    state: DeviceState
    generator: Any = field(default_factory=new_device_generator)


def _lowered(runtime: Runtime, value: Any) -> Any:
    """Return the CPU-side twin of one argument."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Tensor):
        return to_host(value) if value.is_cuda else value
    if isinstance(value, (list, tuple)):
        return [_lowered(runtime, item) for item in value]
    if isinstance(value, torch.device):
        if value.type != "cuda":
            return value
        runtime.state.check_device_index(value.index)
        return _CPU
    return value


def lower(runtime: Runtime, facts: OpSchema, values: Sequence[Any]) -> list[Any]:
    """Return the CPU-side twins of all arguments, numbers and generators included."""
    host = [_lowered(runtime, value) for value in values]
    for i in facts.tensors:
        if isinstance(host[i], (bool, int, float, complex)):
            host[i] = number_tensor(host[i], facts, host)
    if facts.written:
        _share_memory(facts, values, host)
    if facts.generator is not None:
        generator = host[facts.generator]
        if generator is None:
            host[facts.generator] = runtime.generator
        elif not is_device_generator(generator):
            kind = generator.device.type
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{kind}'")
    return host


def _share_memory(facts: OpSchema, values: Sequence[Any], host: list[Any]) -> None:
    """Let tensors of one device storage share a host storage, which is how overlap is found."""
    places = [(values, host, i) for i in facts.tensors]
    for i in facts.lists:
        if isinstance(values[i], (list, tuple)):
            places += [(values[i], host[i], k) for k in range(len(values[i]))]
    by_storage: dict[int, list[Any]] = {}
    for tensors, aliases, i in places:
        value = tensors[i]
        is_on_device = isinstance(value, Tensor) and value.is_cuda
        if is_on_device and is_plain(value):
            key = value.untyped_storage()._cdata
            by_storage.setdefault(key, []).append((value, aliases, i))
    for group in by_storage.values():
        value, aliases, i = group[0]
        if all(other is value for other, _, _ in group):
            for _, others, k in group:
                others[k] = aliases[i]
        else:
            shared = to_host_sharing([value for value, _, _ in group])
            for alias, (_, aliases, i) in zip(shared, group, strict=True):
                aliases[i] = alias


def _assert_line(facts: OpSchema, host: list[Any]) -> str | None:
    """Return the line that the kernel prints, if it asserts; put harmless values in place."""
    if any(isinstance(value, Tensor) and value.is_nested for value in host):
        return None
    arguments = dict(zip(facts.names, host, strict=True))
    text, harmless = look(facts.op, arguments)
    for name, value in harmless.items():
        host[facts.names.index(name)] = value
    return text


def call_cpu(facts: OpSchema, host: Sequence[Any], keys: Any = CPU_KEYS) -> Any:
    """Run the CPU kernel: below autograd, autocast and the user's modes."""
    n = facts.positional
    kwargs = dict(zip(facts.names[n:], host[n:], strict=True))
    try:
        return facts.op.redispatch(keys, *host[:n], **kwargs)
    except NotImplementedError as error:
        if str(error).startswith("Could not run"):
            raise not_rehearsed(f"{facts.name}, which has no CPU kernel,") from error
        raise


def adopt(out: Tensor, result: Tensor) -> None:
    """Let a device tensor take over the shape and values of a CPU result, as ``resize_`` does."""
    if not is_plain(out):
        torch.ops.aten.copy_sparse_to_sparse_.default.redispatch(
            SPARSE_KEYS, out, to_device(result)
        )
        return
    result = result.resolve_conj().resolve_neg()
    reach(out, result.shape, result.stride())
    set_memory(out, out.untyped_storage(), out.storage_offset(), result)
    to_host(out).copy_(result)


def reach(tensor: Tensor, shape: Sequence[int], strides: Sequence[int]) -> None:
    """Let the storage of a device tensor grow until this shape fits behind its offset."""
    last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    count = (
        (int(tensor.storage_offset()) + last + 1) * tensor.element_size() if 0 not in shape else 0
    )
    if count > tensor.untyped_storage().nbytes():
        resize_storage(tensor.untyped_storage(), count)


def _call_with_outs(facts: OpSchema, values: Sequence[Any], host: list[Any], keys: Any) -> Any:
    """Run an ``out=`` overload; the storage of a label cannot grow, so an empty out is replaced."""
    for i in facts.outs:
        if isinstance(host[i], Tensor) and is_plain(host[i]) and host[i].numel() == 0:
            host[i] = torch.empty(0, dtype=host[i].dtype)
    try:
        result = call_cpu(facts, host, keys)
    except RuntimeError as error:
        if "not resizable" not in str(error):
            raise
        for i in facts.outs:
            if isinstance(values[i], Tensor):
                # Not host[i]: the kernel gave it a shape that its memory does not hold.
                host[i] = to_host(values[i]).clone()
        result = call_cpu(facts, host, keys)
    for i in facts.outs:
        settle(values[i], host[i])
    return result


def settle(out: Any, host: Any) -> None:
    """Give a tensor that an op wrote what its host alias became."""
    if not isinstance(out, Tensor) or not out.is_cuda or out.is_nested:
        return
    if not is_plain(out) or out.data_ptr() != host.data_ptr():
        adopt(out, host)
    elif out.shape != host.shape:
        # An alias keeps its tensor alive but not the tensor's old storage: stay with that one.
        set_memory(out, out.untyped_storage(), out.storage_offset(), host)


def lift(facts: OpSchema, result: Any, values: Sequence[Any], host: Sequence[Any]) -> Any:
    """Label what the CPU kernel returned, or give back the argument that it aliases."""
    for i in facts.tensors:
        if result is host[i] and result is not None:
            return values[i]  # a kernel that had nothing to do may return its argument
    if len(facts.aliases) == 1:
        return _lifted(result, facts.aliases[0], values)
    if not isinstance(result, tuple):
        return result
    return tuple(
        _lifted(item, alias, values) for item, alias in zip(result, facts.aliases, strict=True)
    )


def _lifted(result: Any, alias: int | None, values: Sequence[Any]) -> Any:
    if alias is not None:
        return values[alias]
    if isinstance(result, Tensor):
        return to_device(result)
    if isinstance(result, list):
        return [_lifted(item, None, values) for item in result]
    return result


def run(runtime: Runtime, facts: OpSchema, values: list[Any], keys: Any = CPU_KEYS) -> Any:
    """Launch one op: check devices, look at the values, run the CPU kernel, label the results."""
    if facts.name in _OF_CUBLAS:
        runtime.state.use_cublas()
    runtime.state.launch()
    if has_mixed_devices(facts, values):
        if facts.is_composite:
            # Its parts get the tensors as they are: one of them raises CUDA's own error.
            return call_cpu(facts, values, keys)
        check_devices(facts, values)
        if facts.written and values[facts.written[0]].is_cpu and facts.name != "aten::copy_":
            # Only a number may be elsewhere, and torch copies it to the host: that can be seen.
            is_there = [isinstance(it, Tensor) and not it.is_cpu for it in values]
            values = [it.cpu() if there else it for it, there in zip(values, is_there, strict=True)]
    host = lower(runtime, facts, values)
    line = _assert_line(facts, host)
    if _waits(facts, host):
        runtime.state.synchronizing()
    if facts.outs:
        result = _call_with_outs(facts, values, host, keys)
    else:
        result = call_cpu(facts, host, keys)
    if line is not None:
        # Only now: a call that torch refuses on the host never reaches the device.
        runtime.state.device_assert(facts.name, line)
    # The CPU kernel bumped the aliases' counters; ADInplaceOrView has no kernel for lists.
    for i in {*facts.written} & {*facts.lists}:
        torch.autograd.graph.increment_version(values[i])
    if keys is not CPU_KEYS and facts.written and not facts.outs:
        settle(values[0], host[0])
    if keys is not CPU_KEYS and _CPU in values:
        runtime.state.synchronizing()
        return result  # a copy to the host
    return lift(facts, result, values, host)


def _waits(facts: OpSchema, host: Sequence[Any]) -> bool:
    """Return whether the op waits for the device before it can answer or allocate its result."""
    if facts.name in SYNC_OPS:
        return True
    if facts.name == "aten::repeat_interleave.Tensor":
        return host[1] is None  # output_size is there so that CUDA need not wait
    # An advanced index with a mask calls nonzero() on it.
    return any(
        item is not None and item.dtype in (torch.bool, torch.uint8)
        for i in facts.lists
        if facts.names[i] == "indices"
        for item in host[i]
    )
