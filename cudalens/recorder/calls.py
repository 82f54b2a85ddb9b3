"""Record of an API call: weak references, shapes and numbers, and no tensor.

A recorded call is a plain tuple (see :class:`Recorded` for its fields): hundreds of thousands of
them are made, and almost all are thrown away unread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from cudalens.core._python import raise_if_outside
from cudalens.core._torch import base_of
from cudalens.core.call import function_name, public_name
from cudalens.core.torch_functions import CONVERSIONS, Trait, functions, is_in_place, value_at
from cudalens.core.user_objects import is_tensor
from cudalens.recorder._torch import (
    dtype_of,
    is_contiguous,
    is_of_inference,
    is_view,
    offset_of,
    shape_of,
    stride_of,
    version_of,
)
from cudalens.recorder.arguments import named_arguments, parameters_of
from cudalens.recorder.sites import RawSite
from cudalens.recorder.tensor_refs import NO_TENSORS, Ref, tensors_in

_QUIET = functions(Trait.ASKS)
_VIEWS = functions(Trait.VIEW)
_PURE = functions(Trait.OPERATOR)
_ADDS = functions(Trait.ADDS)
_COMPILED = ("method_descriptor", "builtin_function_or_method", "wrapper_descriptor")
BACKWARD = (Tensor.backward, torch.autograd.grad, torch.autograd.backward)
"""Functions that run a backward pass."""
_SUBSTITUTES = functions(Trait.SUBSTITUTES)
_RESERVES = functions(Trait.RESERVES)
FROM_PYTHON = functions(Trait.FROM_PYTHON)
_FORGETFUL = functions(Trait.FORGETS_KEYWORDS)
_NOBODYS = ("cudalens.", "profiler._record_function_")
"""Ops that no user calls: the guards' own in compiled code, and the profiler's ranges."""
_DIVISIONS = functions(Trait.DIVIDES)


class Api:
    """What the recorder needs to know about a function of torch's API, read from its name once."""

    __slots__ = (
        "adds",
        "extra_of",
        "forgets",
        "freezes",
        "func",
        "has_statistics",
        "is_backward",
        "is_foreign",
        "is_in_place",
        "is_quiet",
        "is_shown",
        "is_special",
        "is_view",
        "makes_values",
        "may_write",
        "parameters",
        "stem",
        "value_at",
    )

    def __init__(self, func: Any) -> None:
        self.func = func
        kind, name = type(func).__name__, function_name(func)
        is_getter = name == "__get__"
        is_setter = name in ("__set__", "__delete__")
        if is_getter or is_setter:
            name = str(getattr(func.__self__, "__name__", name))
        is_op = kind in ("OpOverload", "OpOverloadPacket", "TorchBindOpOverload")
        full = str(func) if is_op else ""
        self.stem: str = full.split(".")[1] if is_op else name
        """The name alone, such as ``add_`` or ``__setitem__``."""
        self.is_foreign = is_op and not full.startswith(("aten.", "prims.", "profiler."))
        """True if it is an op of a library other than torch."""
        # `x.T` makes a view, and `x.data = y` swaps the memory. No other attribute reads or makes
        # values.
        is_asked = (is_getter and name not in _VIEWS) or (is_setter and name != "data")
        self.is_quiet = is_asked or name in _QUIET or full.startswith(_NOBODYS)
        """True if its calls are not recorded."""
        self.freezes = name == "requires_grad_" or (is_setter and name == "requires_grad")
        """True if it sets whether a tensor requires grad."""
        self.is_shown = name == "__format__" or self.freezes
        """True if it is quiet but shown to the watch: ``f"{loss:.3f}"`` reads values."""
        self.is_view = name in _VIEWS
        # ``__iadd__`` writes, ``__invert__`` and ``__iter__`` do not.
        self.is_in_place = (
            value_at(name) > 0
            or is_in_place(name)
            or (name[:3] == "__i" and name not in _PURE | _VIEWS)
            or (is_setter and name == "data")
        )
        self.is_backward = any(func is item for item in BACKWARD)
        """True if it runs a backward pass."""
        self.value_at: int = value_at(name)
        """The position of the argument that it writes to some elements; 0 for others."""
        self.has_statistics = self.stem in _STATISTICS and not self.is_foreign
        """True if it may write to running statistics."""
        self.parameters = parameters_of(func) if self.has_statistics else None
        """Its parameter names, cached where each call needs them: ``inspect.signature`` is slow."""
        self.adds = name in _ADDS
        """True if it adds to the old elements instead of replacing them."""
        makes_none = (self.is_view and name not in CONVERSIONS) or name in _RESERVES
        self.makes_values = not (makes_none or self.is_backward)
        """False for views, which show old values, and for ``empty``, whose values are arbitrary."""
        self.forgets = kind == "function" and name in _FORGETFUL
        self.is_special = self.is_foreign or self.forgets
        self.may_write = not self.is_backward and (
            # A Python function may write by an option such as `inplace=True`, which no schema of an
            # op shows.
            kind not in _COMPILED or self.is_in_place or not writes_nothing(name)
        )
        self.extra_of: Callable[..., Any] | None = None
        """Function that reads the ``extra`` field of a call, or ``None``."""
        if self.is_view:
            self.extra_of = shows_argument
        elif name == "__setitem__":
            self.extra_of = keyed_write_of
        elif self.value_at:
            self.extra_of = operand_of
        elif name in _SUBSTITUTES:
            self.extra_of = numbers_of
        elif name in _DIVISIONS:
            self.extra_of = divisor_of

    @property
    def name(self) -> str:
        """The public name, such as ``torch.nn.functional.linear``."""
        return public_name(self.func)

    @property
    def is_positional(self) -> bool:
        """True if each element of the result comes from its own position in the arguments."""
        return is_pointwise(self.stem)


_REFLECTED = {"rdiv": "div", "rfloordiv": "floor_divide", "rmod": "remainder"}
"""Reflected operators (number first), and the ops that compute them."""


def is_pointwise(stem: str) -> bool:
    """Return whether each element of an op's result comes from its own position in the inputs."""
    # `add`, `add_` and `__add__` are one op.
    name = stem.strip("_")
    packet = getattr(torch.ops.aten, _REFLECTED.get(name, name), None)
    overloads = packet.overloads() if packet is not None else ()
    tags = (getattr(packet, item).tags for item in overloads)
    return any(torch.Tag.pointwise in item for item in tags)


@cache
def writes_nothing(name: str) -> bool:
    """Return whether the op behind a C++ function is known to write to none of its arguments."""
    if name in _PURE:
        return True
    # A norm may update running statistics, which its schema does not mark as written.
    packet = None if "norm" in name else getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if packet is not None else ()
    # `out=` is a keyword, and the mode looks for it in each call.
    schemas = [getattr(packet, item)._schema for item in overloads if "out" not in item]
    # A view's schema has an alias, too, but is not marked as written.
    infos = [item.alias_info for schema in schemas for item in schema.arguments]
    return bool(schemas) and not any(item is not None and item.is_write for item in infos)


class Apis(dict[Any, Api]):
    """Cache from function to :class:`Api`."""

    def __missing__(self, func: Any) -> Api:
        api = self[func] = Api(func)
        return api


class Write(NamedTuple):
    """A tensor that a call wrote to: its version counter went from ``before`` to ``after``."""

    tensor: Ref
    before: int | None = None
    """``None`` for a tensor made in inference mode, which has no version counter."""
    after: int = 0
    base: Ref | None = None
    """The tensor that it is a view of."""

    @property
    def target(self) -> Ref:
        """The tensor whose memory was written to."""
        return self.tensor if self.base is None else self.base


class Recorded(NamedTuple):
    """One recorded call; the fields of the tuples in the ring."""

    seq: int
    api: Api
    site: RawSite
    first_nr: int
    """The first sequence number of the autograd nodes that the call made ..."""
    last_nr: int
    """... and the number behind the last one; equal if it made none."""
    reads: Sequence[Ref] | None
    """References to its tensor arguments, ``None`` inside optimizers, where they are not kept."""
    output: Any
    """A reference to the result, or a tuple of them."""
    shape: Any
    """The shape of the result, or a tuple of them."""
    dtype: Any
    written: tuple[Write, ...] = ()
    extra: Any = None
    """The result of ``api.extra_of``, or ``None``."""

    @property
    def operand(self) -> Any:
        """The value that a call writes to some elements: a number or a tensor reference."""
        if self.api.is_view:
            return None
        return self.extra.operand if type(self.extra) is KeyedWrite else self.extra

    @property
    def key(self) -> Any:
        """The key of ``x[key] = value``, with references for tensors; ``None`` if unknown."""
        return self.extra.key if type(self.extra) is KeyedWrite else None

    @property
    def layout(self) -> tuple[int, tuple[int, ...]] | None:
        """Offset in the base and strides of the view ``x`` in ``x[key] = value``."""
        return self.extra.layout if type(self.extra) is KeyedWrite else None

    @property
    def numbers(self) -> tuple[Any, ...] | None:
        """The Python numbers among the arguments of a function that chooses between values."""
        return self.extra if self.api.extra_of is numbers_of else None

    @property
    def divisor(self) -> int | float | None:
        """The Python number that a division divides by."""
        return self.extra if self.api.extra_of is divisor_of else None

    @property
    def is_alias(self) -> bool:
        """Return whether the result shows the memory of the first argument."""
        return self.api.is_view and bool(self.extra)

    @property
    def name(self) -> str:
        """The public name of the function."""
        return self.api.name

    @property
    def inputs(self) -> Sequence[Ref]:
        """References to the tensors that the call read, as far as they are recorded."""
        return self.reads or ()

    @property
    def outputs(self) -> tuple[Ref, ...]:
        """References to the tensors that the call returned."""
        return self.output if isinstance(self.output, tuple) else (self.output,)

    @property
    def results(self) -> tuple[Ref, ...]:
        """References to the tensors that the call returned or wrote to."""
        if not self.written:
            return self.outputs
        # Not a set: a dead weak reference that was never hashed cannot be hashed any more.
        return (*self.outputs, *(item for it in self.written for item in (it.tensor, it.target)))

    @property
    def metas(self) -> tuple[tuple[Any, Any], ...]:
        """Shape and dtype of each output."""
        if isinstance(self.output, tuple):
            return tuple(zip(self.shape, self.dtype, strict=True))
        return ((self.shape, self.dtype),)


_NUMBERS = (int, float, bool)


def writes_of(
    api: Api,
    tensors: Sequence[Tensor],
    versions: Sequence[int] | None,
    args: tuple[Any, ...],
    kwargs: Any,
) -> tuple[Write, ...]:
    """Return which of its tensors a call wrote to: those whose version counter went up.

    Args:
        tensors: the tensors among its arguments.
        versions: their version counters before the call, ``None`` in inference mode.
        args, kwargs: its arguments.
    """
    if api.has_statistics:
        return _statistics_of(api, args, kwargs)
    if versions is None:
        return (Write(ref(tensors[0])),) if api.is_in_place else ()
    writes = []
    for tensor, before in zip(tensors, versions, strict=True):
        after = version_of(tensor)
        if after != before:
            base = base_of(tensor) if is_view(tensor) else None
            shown = None if base is None else ref(base)
            writes.append(Write(ref(tensor), before, after, shown))
    return tuple(writes)


_STATISTICS = {
    **dict.fromkeys(
        (
            *("batch_norm", "_batch_norm_impl_index", "native_batch_norm"),
            *("_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm"),
        ),
        ("training", False),
    ),
    "instance_norm": ("use_input_stats", True),
    **dict.fromkeys(
        (
            *("_batch_norm_with_update", "batch_norm_update_stats"),
            *("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
        ),
        ("", True),
    ),
}
"""Functions that update running statistics: the argument that enables it, if there is one, and its
default."""


def _statistics_of(api: Api, args: tuple[Any, ...], kwargs: Any) -> tuple[Write, ...]:
    """Return the running statistics that a call wrote to: most ops do not bump their versions."""
    given = named_arguments(api.func, args, kwargs, api.parameters)
    flag, default = _STATISTICS[api.stem]
    if not given.get(flag, default):
        return ()
    written = (given.get("running_mean"), given.get("running_var"))
    return tuple(
        Write(ref(it)) if is_of_inference(it) else Write(ref(it), version_of(it), version_of(it))
        for it in written
        if is_tensor(it)
    )


def operand_of(
    api: Api, args: tuple[Any, ...], kwargs: Any, result: Any, tensors: Sequence[Tensor]
) -> Any:
    """Return the value that a call writes to some elements."""
    value = args[api.value_at] if api.value_at < len(args) else None
    # Options such as `accumulate` and `reduce` come after the value.
    if api.adds or any(args[api.value_at + 1 :]) or kwargs:  # it may keep part of the old value
        return None
    return ref(value) if is_tensor(value) else value if type(value) in _NUMBERS else None


class KeyedWrite(NamedTuple):
    """Arguments of ``x[key] = value``."""

    operand: Any
    key: Any
    layout: tuple[int, tuple[int, ...]] | None = None
    """For a view ``x`` of a contiguous base: its offset in the base and its strides."""


def keyed_write_of(
    api: Api, args: tuple[Any, ...], kwargs: Any, result: Any, tensors: Sequence[Tensor]
) -> Any:
    """Return what was written, and the key that selects the elements, tensors as references."""
    operand = operand_of(api, args, kwargs, result, tensors)
    if operand is None or len(args) < 3:
        return operand
    parts = args[1] if type(args[1]) is tuple else (args[1],)
    for part in parts:
        kind = type(part)
        is_known = kind is int or kind is Tensor or part is None or part is ...
        if kind is slice:
            is_known = all(
                it is None or type(it) is int for it in (part.start, part.stop, part.step)
            )
        # A list or an array may be changed after the call, so such a key is not kept.
        if not is_known:
            return operand
    key = tuple(ref(it) if type(it) is Tensor else it for it in parts)
    return KeyedWrite(operand, key, _layout_in_base(args[0]))


def _layout_in_base(tensor: Tensor) -> tuple[int, tuple[int, ...]] | None:
    """Return a view's offset in its contiguous base and its strides: it may be freed by later."""
    try:
        base = base_of(tensor) if is_view(tensor) else None
        if base is None or not is_contiguous(base):
            return None
        return offset_of(tensor) - offset_of(base), stride_of(tensor)
    except RuntimeError as error:  # a sparse tensor has no strides
        raise_if_outside(error)
        return None


def numbers_of(
    api: Api, args: tuple[Any, ...], kwargs: Any, result: Any, tensors: Sequence[Tensor]
) -> tuple[Any, ...] | None:
    """Return the Python numbers among the arguments, ``None`` if keywords may hide some."""
    if kwargs:
        return None
    return tuple(item for item in args if type(item) in _NUMBERS)


def divisor_of(
    api: Api, args: tuple[Any, ...], kwargs: Any, result: Any, tensors: Sequence[Tensor]
) -> int | float | None:
    """Return the Python number that a tensor is divided by, ``None`` for a tensor."""
    divisor = args[1] if len(args) > 1 else None
    return divisor if type(divisor) in (int, float) else None


def shows_argument(
    api: Api, args: tuple[Any, ...], kwargs: Any, result: Any, tensors: Sequence[Tensor]
) -> bool:
    """Return whether the result of a view function shares the memory of its argument."""
    # A view function that returns several tensors, such as `split`, never copies.
    if len(tensors) != 1 or not is_tensor(result):
        return len(tensors) == 1
    # `_is_view` is false for inference tensors, and for the result of `detach`.
    is_said = result is tensors[0] or is_view(result) or is_of_inference(result)
    return is_said or api.stem == "detach"


def describe_results(result: Any) -> tuple[tuple[Ref, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Return references to the tensors that a call returned, their shapes and their dtypes."""
    if type(result) in NO_TENSORS:
        return (), (), ()
    outputs = tensors_in((result,))
    shapes, dtypes = zip(*map(meta_of, outputs), strict=True) if outputs else ((), ())
    return tuple(map(ref, outputs)), shapes, dtypes


def meta_of(tensor: Tensor) -> tuple[Any, Any]:
    """Return shape and dtype, both ``None`` for a tensor without a readable shape."""
    try:
        return shape_of(tensor), dtype_of(tensor)
    except Exception as trouble:  # nested tensors have no shape, and a subclass may refuse it
        raise_if_outside(trouble)
        return None, None
