"""The generic kernel: run any op of the simulated device with its CPU kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch._prims_common import alert_not_deterministic

from cudalens.core.deterministic_ops import kernel_without_determinism
from cudalens.simulate.asserts import ASSERTS, AssertHit, Rule
from cudalens.simulate.memory import out_of_memory
from cudalens.simulate.op_schema import (
    OpSchema,
    check_devices,
    has_mixed_devices,
    number_tensor,
    schema_of,
)
from cudalens.simulate.relabel import is_device_generator, new_device_generator, to_device, to_host
from cudalens.simulate.state import DeviceState, not_rehearsed

CPU_KEYS: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_CPU: Final = torch.device("cpu")

# On CUDA these wait for the device, because the shape of the result or the answer is data.
SYNC_OPS: Final = frozenset(
    f"aten::{name}"
    for name in (
        "nonzero",
        "nonzero.out",
        "masked_select",
        "masked_select.out",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "unique_dim_consecutive",
        "equal",
        "bincount",
        "is_nonzero",
    )
)
SpecialKernel = Callable[..., Any]


@dataclass(kw_only=True)
class Runtime:
    """What the kernels of one running simulation share."""

    state: DeviceState
    generator: Any = field(default_factory=new_device_generator)
    rules: Mapping[str, Rule] = field(default_factory=lambda: ASSERTS)
    special: Mapping[str, SpecialKernel] = field(default_factory=dict)


def _bind(facts: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return one value per schema argument, defaults filled in."""
    values = list(args)
    for argument in facts.arguments[len(values) :]:
        values.append(kwargs.get(argument.name, argument.default))
    return values


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
    if facts.generator is not None:
        host[facts.generator] = _generator(runtime, host[facts.generator])
    return host


def _generator(runtime: Runtime, given: Any) -> Any:
    if given is None:
        return runtime.generator
    if not is_device_generator(given):
        raise RuntimeError(
            f"Expected a 'cuda' device type for generator but found '{given.device.type}'"
        )
    return given


def apply_rule(runtime: Runtime, facts: OpSchema, host: list[Any]) -> AssertHit | None:
    """Replace values that the kernel asserts on by harmless ones; tell which assert they cause."""
    rule = runtime.rules.get(facts.name)
    if rule is None:
        return None
    names = [argument.name for argument in facts.arguments]
    outcome = rule(dict(zip(names, host, strict=True)))
    if outcome is None:
        return None
    for name, value in outcome.repaired.items():
        host[names.index(name)] = value
    return outcome if isinstance(outcome, AssertHit) else None


def call_cpu(facts: OpSchema, host: Sequence[Any]) -> Any:
    """Run the CPU kernel: below autograd, autocast and the user's modes."""
    n = facts.positional
    kwargs = {a.name: v for a, v in zip(facts.arguments[n:], host[n:], strict=True)}
    try:
        return facts.op.redispatch(CPU_KEYS, *host[:n], **kwargs)
    except NotImplementedError as error:
        if str(error).startswith("Could not run"):
            raise not_rehearsed(f"{facts.name}, which has no CPU kernel,") from error
        raise


def adopt(out: Tensor, result: Tensor) -> None:
    """Let a device tensor take over the memory and shape of a CPU result."""
    labelled = to_device(result)
    _rewire(out, labelled.untyped_storage(), labelled.storage_offset(), labelled)


def _rewire(out: Tensor, storage: Any, offset: Any, shaped: Tensor) -> None:
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
        CPU_KEYS, out, storage, offset, shaped.shape, shaped.stride()
    )


def _call_with_outs(facts: OpSchema, values: Sequence[Any], host: list[Any]) -> Any:
    """Run an ``out=`` overload; the storage of a label cannot grow, so an empty out is replaced."""
    for i in facts.outs:
        if isinstance(host[i], Tensor) and host[i].numel() == 0:
            host[i] = torch.empty(0, dtype=host[i].dtype)
    try:
        result = call_cpu(facts, host)
    except RuntimeError as error:
        if "not resizable" not in str(error):
            raise
        for i in facts.outs:
            if isinstance(values[i], Tensor):
                # Not host[i]: the kernel gave it a shape that its memory does not hold.
                host[i] = to_host(values[i]).clone()
        result = call_cpu(facts, host)
    for i in facts.outs:
        _settle_out(values[i], host[i])
    return result


def _settle_out(out: Any, host: Any) -> None:
    if not isinstance(out, Tensor) or not out.is_cuda:
        return
    if out.data_ptr() != host.data_ptr():
        adopt(out, host)
    elif out.shape != host.shape:
        # An alias keeps its tensor alive but not the tensor's old storage: stay with that one.
        _rewire(out, out.untyped_storage(), out.storage_offset(), host)


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


class GenericKernel:
    """Serve every op that reaches the CUDA dispatch key."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Serve one call as the dispatcher makes it."""
        # Our own calls must stay invisible to the user's TorchFunctionMode and torch.device().
        with torch._C.DisableTorchFunction():
            facts = schema_of(op)
            if facts.is_view:
                return op.redispatch(CPU_KEYS, *args, **kwargs)
            serve: SpecialKernel = self._runtime.special.get(facts.name, run)
            try:
                return serve(self._runtime, facts, _bind(facts, args, kwargs))
            except RuntimeError as error:
                if (refused := out_of_memory(error)) is not None:
                    raise refused from None
                raise


def run(runtime: Runtime, facts: OpSchema, values: list[Any]) -> Any:
    """Launch one op: check devices, run its assert rule, run the CPU kernel, label the results."""
    runtime.state.launch()
    if has_mixed_devices(facts, values):
        if facts.is_composite:
            # Its parts meet the tensors as they are: the one that minds raises CUDA's own error.
            return call_cpu(facts, values)
        check_devices(facts, values)
    _check_determinism(facts, values)
    host = lower(runtime, facts, values)
    hit = apply_rule(runtime, facts, host)
    if _waits(facts, host):
        runtime.state.sync()
    result = _call_with_outs(facts, values, host) if facts.outs else call_cpu(facts, host)
    if hit is not None:
        # Only now: a call that torch refuses on the host never reaches the device.
        runtime.state.device_assert(facts.name, hit.text)
    if facts.written_lists:
        # The CPU kernel bumped the aliases' counters; ADInplaceOrView has no kernel for lists.
        for i in facts.written_lists:
            torch.autograd.graph.increment_version(values[i])
    return lift(facts, result, values, host)


def _check_determinism(facts: OpSchema, values: Sequence[Any]) -> None:
    """Refuse, or warn of, an op that has no deterministic kernel on CUDA."""
    if torch.are_deterministic_algorithms_enabled():
        names = [argument.name for argument in facts.arguments]
        kernel = kernel_without_determinism(facts.name, dict(zip(names, values, strict=True)))
        if kernel is not None:
            alert_not_deterministic(kernel)


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
        if facts.arguments[i].name == "indices"
        for item in host[i]
    )
