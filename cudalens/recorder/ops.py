"""What the recorder knows of an op, learned once, and of a call, kept as cheaply as possible.

A recorded call is a plain tuple (see :class:`Call` for its fields): hundreds of thousands of them
are made, and almost all are thrown away unread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from cudalens.core._python import raise_if_outside
from cudalens.recorder._torch import OpOverload
from cudalens.recorder.sites import RawSite
from cudalens.recorder.tensor_refs import (
    NO_TENSORS,
    NUMBERS,
    SHIFTS,
    Noted,
    Ref,
    Version,
    tensors_in,
)


def aten(names: str) -> frozenset[str]:
    """Return the full names of some of torch's own ops."""
    return frozenset(f"aten::{name}" for name in names.split())


_BUILT_IN = frozenset({"aten", "prims"})
_SHORT = {torch.bool: "bool", torch.bfloat16: "bf16"}
_SHORT |= {getattr(torch, f"uint{bits}"): f"u{bits}" for bits in (8, 16, 32, 64)}


class View(NamedTuple):
    """Which elements of its base a view shows; the base shares their memory."""

    base: Ref
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class OpFacts:
    """What the schema of an op says, in the form that the recorder asks for it."""

    __slots__ = (  # read several times per op
        "call",
        "is_foreign",
        "is_in_place",
        "is_range",
        "is_range_start",
        "is_special",
        "is_view",
        "name",
        "noted",
        "op",
        "overload",
        "tensors_first",
        "writes",
        "writes_several",
    )

    def __init__(self, op: Any) -> None:
        self.op = op
        overload = isinstance(op, OpOverload)
        self.call: Callable[..., Any] = op._op if overload and type(op) is OpOverload else op
        self.name: str = op._schema.name if overload else str(op)
        self.overload: str | None = op._overloadname if overload else None
        is_noted = self.full_name in SHIFTS or self.full_name in NUMBERS
        self.noted: str = self.full_name if is_noted else ""
        """The full name where a number among the arguments is noted besides the tensors."""
        self.is_view: bool = overload and bool(op.is_view)
        is_own = overload and op.namespace in _BUILT_IN
        self.is_range_start = self.name.startswith("profiler::_record_function_enter")
        self.is_range = self.name.startswith("profiler::_record_function_")
        self.is_foreign = overload and not is_own and not self.is_range
        """Whether a library other than torch brought this op."""
        arguments: list[Any] = op._schema.arguments if overload else []
        self.writes: tuple[str, ...] = tuple(
            item.name for item in arguments if item.alias_info and item.alias_info.is_write
        )
        """The names of the arguments that it writes to."""
        kinds = [str(item.type) for item in arguments]
        # Most ops take one or two tensors and then numbers: the cheapest kinds to note.
        count = sum("Tensor" in kind for kind in kinds)
        is_simple = kinds[:count] == ["Tensor"] * count and not self.noted
        self.tensors_first = (count or -1) if is_simple and overload else 0
        """So many arguments are tensors, the first ones; -1 where none is, 0 where it is not as
        simple."""
        self.is_in_place = (
            bool(self.writes)
            and str(arguments[0].type) == "Tensor"
            and self.writes == (arguments[0].name,)
        )
        self.writes_several = bool(self.writes) and (
            (self.is_foreign and not self.is_in_place)
            # Not any: Python drops an interrupt that comes while a generator is closed early.
            or "List" in str([item.type for item in arguments if item.name in self.writes])
        )
        """Whether what it writes to has to be noted apart, since it does not give it back."""
        self.is_special = not is_own or self.writes_several

    @property
    def full_name(self) -> str:
        """The name with its overload, as torch prints it: ``aten::add.Tensor``."""
        is_plain = self.overload in (None, "default")
        return self.name if is_plain else f"{self.name}.{self.overload}"

    @property
    def tensor_arguments(self) -> list[tuple[str, str]]:
        """Name and type of each argument that holds tensors: ``("indices", "List[…]")``."""
        schema = getattr(self.op, "_schema", None)
        arguments = () if schema is None else schema.arguments
        return [(item.name, str(item.type)) for item in arguments if "Tensor" in str(item.type)]

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by their schema names."""
        if not isinstance(self.op, OpOverload):
            return {str(index): value for index, value in enumerate(args)} | dict(kwargs)
        names = [item.name for item in self.op._schema.arguments]
        return dict(zip(names, args, strict=False)) | dict(kwargs)


class Call(NamedTuple):
    """One recorded call; the fields of the tuples in the ring."""

    seq: int
    facts: OpFacts
    site: RawSite
    sequence_nr: int
    """The number that the next autograd node of this thread would get: that of the call's own
    node, when it has one, plus one.  0 where what is read was not noted."""
    reads: Any
    """A reference to the only tensor argument, several of them, or ``None`` where what is read
    was not noted: in backward passes and optimizers' steps."""
    output: Any
    """A reference to the result, or a tuple of them."""
    shape: Any
    """The shape of the result, or a tuple of them.  Of a call in place, where the tensor lives on
    to tell its shape, the tensor's version before the call."""
    dtype: Any
    """The dtype, or a tuple of them; of a call in place on a view, its :class:`View`."""

    @property
    def is_brief(self) -> bool:
        """Whether only the result was noted."""
        return self.reads is None

    @property
    def inputs(self) -> Sequence[Ref]:
        """References to the tensors that the call read, as far as they were noted."""
        if self.reads is None:
            return ()
        return self.reads if isinstance(self.reads, (list, tuple)) else (self.reads,)

    @property
    def noted(self) -> Noted:
        """What was noted besides the tensors that the call read."""
        return self.reads if isinstance(self.reads, Noted) else Noted()

    @property
    def adds(self) -> bool:
        """Whether the call added what it wrote to what was there."""
        return self.noted.adds or "reduce" in (self.facts.overload or "")

    @property
    def outputs(self) -> tuple[Ref, ...]:
        """References to the tensors that the call gave back."""
        return self.output if isinstance(self.output, tuple) else (self.output,)

    @property
    def metas(self) -> tuple[tuple[Any, Any], ...]:
        """Shape and dtype of each output, ``None`` where they were not noted."""
        if isinstance(self.output, tuple):
            return tuple(zip(self.shape, self.dtype, strict=True))
        return ((None, None) if self.facts.is_in_place else (self.shape, self.dtype),)

    @property
    def _is_in_place(self) -> bool:
        return self.facts.is_in_place and not isinstance(self.output, tuple)

    @property
    def version(self) -> int | None:
        """The version, before the call, of the tensor that it wrote to."""
        return self.shape if self._is_in_place else None

    @property
    def view(self) -> View | None:
        """Which elements of its base were written to, when it was a view."""
        return self.dtype if self._is_in_place else None

    @property
    def base(self) -> Ref | None:
        """The tensor whose view was written to, when it was a view."""
        return None if self.view is None else self.view.base

    @property
    def written(self) -> tuple[Version, ...]:
        """The tensors that the call is known to have written to."""
        if self.version is None:
            return self.noted.versions
        return ((self.output, self.version, self.base),)


def version_and_base(tensor: Tensor) -> tuple[int | None, Ref | None]:
    """Return the version of a tensor, and its base when it is a view; ``None`` where it has
    none.
    """
    if tensor.is_inference():
        return None, None
    base = tensor._base if tensor._is_view() else None
    return tensor._version, None if base is None else ref(base)


def version_and_view(tensor: Tensor) -> tuple[int | None, View | None]:
    """Return the version of a tensor, and which elements of its base it shows when it is a view."""
    version, base = version_and_base(tensor)
    if base is None:
        return version, None
    shown = View(base, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    return version, shown


def is_node_of(node_name: str, op_name: str) -> bool:
    """Return whether an autograd node belongs to an op by its name.

    Nodes are called ``NllLossBackward0``, and in some messages of autograd's ``NllLoss``.
    """
    node = node_name.rpartition("::")[2].rstrip("0123456789").removesuffix("Backward").lower()
    op = op_name.rpartition("::")[2].replace("_", "").lower()
    return op in (node, f"{node}forward")


def describe_results(result: Any) -> tuple[tuple[Ref, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Refer to the tensors that a call gave back, and note their shapes and dtypes.

    A tensor that does not say its shape, or would run code of the user's to do so, has ``None``.
    """
    if type(result) in NO_TENSORS:
        return (), (), ()
    outputs, shapes, dtypes = [], [], []
    for tensor in tensors_in((result,)):
        outputs.append(ref(tensor))
        kind = type(tensor)
        try:
            is_plain = kind is Tensor or kind is Parameter
            shape, dtype = (tensor.shape, tensor.dtype) if is_plain else (None, None)
        except RuntimeError as trouble:  # nested tensors have no shape
            raise_if_outside(trouble)
            shape, dtype = None, None
        shapes.append(shape)
        dtypes.append(dtype)
    return tuple(outputs), tuple(shapes), tuple(dtypes)


def short_meta(shape: Any, dtype: Any) -> str:
    """Return ``f32[32, 10]``, and ``?`` for a tensor of which nothing is known any more."""
    if shape is None or dtype is None:
        return "?"
    short = _SHORT.get(dtype)
    if short is None:
        kind = "f" if dtype.is_floating_point else "c" if dtype.is_complex else "i"
        bits = dtype.itemsize * 8
        is_plain = str(dtype) in (f"torch.float{bits}", f"torch.complex{bits}", f"torch.int{bits}")
        short = f"{kind}{bits}" if is_plain else str(dtype).removeprefix("torch.")
    return f"{short}[{', '.join(str(size) for size in shape)}]"


# --- what a call writes to without giving it back: lists of parameters ----------------------------


def versions_before(facts: OpFacts, arguments: Mapping[str, Any]) -> tuple[Version, ...]:
    """Note the tensors that a call is about to write to.

    Of lists only those that require grad: the others are the state of an optimizer, which no
    graph has saved.
    """
    return tuple(
        (ref(tensor), *version_and_base(tensor))
        for name in facts.writes
        for tensor in tensors_in((arguments.get(name),))
        if tensor.requires_grad or not isinstance(arguments[name], (list, tuple))
    )


def count_writes(facts: OpFacts, written: tuple[Version, ...]) -> None:
    """Count the writes of a call over lists as torch counts them where no mode is on.

    On the CPU such a call counts them in ops of its own, below which a dispatch mode has switched
    the counting off: backward would pass over a weight that was changed.
    """
    if not facts.name.startswith("aten::_foreach_"):
        return  # the fused optimizers count nothing
    for item, version, _ in written:
        tensor = item()
        if tensor is not None and version is not None and tensor._version == version:
            increment_version(tensor)
