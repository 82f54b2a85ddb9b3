"""Refuse tensors of different devices in the words that CUDA's compiled kernels use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from cudalens.simulate.opfacts import DeviceCheck, OpFacts

if TYPE_CHECKING:
    from torch import Tensor

_TWO_DEVICES: Final = (
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
)
_INDEX_OPS: Final = frozenset(
    {"aten::index.Tensor", "aten::index.Tensor_out", "aten::_index_put_impl_"}
)
# Their kernel makes its result before TensorIterator sees the operands.
_NO_SCALARS: Final = frozenset({"aten::binary_cross_entropy", "aten::binary_cross_entropy.out"})


def _tensors(facts: OpFacts, values: Sequence[Any]) -> Iterator[tuple[str, bool, Tensor]]:
    """Yield name, is_written and tensor in schema order."""
    import torch

    for argument, value in zip(facts.arguments, values, strict=True):
        if isinstance(value, torch.Tensor):
            yield argument.name, argument.is_written, value
        elif argument.is_tensor_list and value is not None:
            for item in value:
                if item is not None:
                    yield argument.name, argument.is_written, item


def method_name(facts: OpFacts) -> str:
    """Return the name of the compiled wrapper, which CUDA puts into its message."""
    name, _, overload = facts.name.removeprefix("aten::").partition(".")
    cpp = f"{name}_out" if facts.outs else name
    if not facts.is_structured:
        return f"wrapper_CUDA_{overload}_{cpp}"
    return f"wrapper_CUDA_{cpp}" + (f"_{overload}" if overload else "")


def _check_wrapper(facts: OpFacts, tensors: list[tuple[str, bool, Tensor]]) -> None:
    outs = {facts.arguments[i].name for i in facts.outs}
    ordered = sorted(tensors, key=lambda item: item[0] not in outs)
    common = ordered[0][2].device
    for name, _, tensor in ordered:
        if tensor.device != common:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but got"
                f" {name} is on {tensor.device}, different from other tensors on {common}"
                f" (when checking argument in method {method_name(facts)})"
            )


def _check_index(facts: OpFacts, values: Sequence[Any]) -> None:
    """Refuse a CPU tensor that is indexed, or CPU values with dimensions; CPU indices are moved."""
    self, indices = values[0], values[1]
    if not self.is_cuda and any(i is not None and i.is_cuda for i in indices):
        raise RuntimeError(
            f"indices should be either on {self.device} or on the same device as the indexed"
            f" tensor ({self.device})"
        )
    if facts.name == "aten::_index_put_impl_" and not values[2].is_cuda and values[2].dim() > 0:
        raise RuntimeError(_TWO_DEVICES)


def has_mixed_devices(facts: OpFacts, values: Sequence[Any]) -> bool:
    """Return whether any tensor of this call lives elsewhere than on the device."""
    for i in facts.tensors:
        # What is no tensor here is None or a number, and goes anywhere.
        if getattr(values[i], "is_cuda", True) is False:
            return True
    return any(
        item is not None and not item.is_cuda for i in facts.lists for item in values[i] or ()
    )


def check_devices(facts: OpFacts, values: Sequence[Any]) -> None:
    """Raise CUDA's own error when the tensors of this call live on different devices."""
    if facts.check is DeviceCheck.NONE and facts.name not in _INDEX_OPS:
        return
    tensors = list(_tensors(facts, values))
    if all(tensor.is_cuda for _, _, tensor in tensors):
        return
    if facts.name in _INDEX_OPS:
        _check_index(facts, values)
    elif facts.name in ("aten::masked_fill_.Scalar", "aten::masked_fill_.Tensor"):
        self, mask = values[0], values[1]
        if mask.device != self.device:
            raise RuntimeError(
                "expected self and mask to be on the same device, but got mask on"
                f" {mask.device} and self on {self.device}"
            )
    elif facts.check is DeviceCheck.WRAPPER:
        _check_wrapper(facts, tensors)
    elif facts.name in _NO_SCALARS or any(
        not t.is_cuda and (t.dim() > 0 or written) for _, written, t in tensors
    ):
        raise RuntimeError(_TWO_DEVICES)
