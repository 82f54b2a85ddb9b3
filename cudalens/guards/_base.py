"""The catalogue's framework: a guard's definition, and how one is made from a function.

A guard is one short function that returns what an op requires of its arguments.  Its parameters
are named after the schema arguments that it needs; it reads shapes, dtypes and numbers and returns
a requirement of :mod:`cudalens.guards.engine`, ``None`` where nothing is launched or torch
refuses the call.  The engine looks at the values before the kernel is launched, changes nothing and
reads the device at most once while nothing is wrong; a finding gets the guard's name, the op and
the overload from the framework.  The docstring has five parts, and the tests run the last two::

    The precondition in one sentence, with the bound as an interval.

    Source:   kernel and assertion that it mirrors, torch version
    Cost:     reductions and device-to-host copies
    Passes:   one expression, at the bound
    Violates: one expression, one step beyond
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from typing import Any

import torch

from cudalens.core._torch import has_kernel
from cudalens.core.errors import GuardRegistrationError
from cudalens.core.report_types import Violation
from cudalens.guards.engine import Need, checker

Requires = Callable[..., Need]
Check = Callable[..., "Violation | None"]
UserCheck = Callable[..., "Violation | str | None"]
"""A check of the user's own may answer with a sentence."""
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""The installed torch, as ``(2, 13)``."""
OF_USER = "user"
"""The ``frequency`` of a guard of the user's own."""
_SECTIONS = ("Source", "Cost", "Passes", "Violates")


@dataclass(frozen=True, kw_only=True)
class Guard:
    """One entry of the catalogue."""

    name: str
    requires: Callable[..., Any]
    """Returns the requirement, without reading the device."""
    check: Check
    """Checks it on the device."""
    parameters: tuple[str, ...]
    """Schema arguments that both take, by name."""
    required: int = 0
    """Number of them that every overload has; the others have defaults."""
    ops: tuple[str, ...]
    """Ops as ``aten::gather`` (overloads that have the parameters) or ``aten::index.Tensor``."""
    records: tuple[str, ...] = ()
    """Entries of the inventory of device-side assertions that this guard covers."""
    frequency: str = "rare"
    is_silent: bool = False
    """CUDA asserts nothing: the finding is a warning, the op still runs."""
    covers_inner: bool = False
    """The ops that the kernel calls in turn get these same values: no guard looks again."""
    is_composite: bool = False
    """The op only decomposes: its guard is above autograd, and below it for inference mode."""
    waits: bool = False
    """Deferred guards wait here as well: the requirement is no interval of one tensor's values."""
    precondition: str = ""
    source: str = ""
    cost: str = ""
    passes: str = ""
    violates: str = ""


_registered: list[Guard] = []


def guard(*ops: str, **options: Any) -> Callable[[Requires], Requires]:
    """Enter the decorated function into the catalogue for ``ops``.

    Args:
        options: fields of :class:`Guard`.
    """

    def enter(requires: Requires) -> Requires:
        _registered.append(make_guard(requires, ops, **options))
        return requires

    return enter


def make_guard(
    requires: Callable[..., Any], ops: Iterable[str], *, is_silent: bool = False, **options: Any
) -> Guard:
    """Build the catalogue entry of a guard's function from its signature and docstring."""
    doc = inspect.getdoc(requires) or ""
    precondition = re.split(r"\n\s*\n", doc, maxsplit=1)[0]
    parts: dict[str, Any] = {}
    for name in _SECTIONS:
        section = re.search(rf"^{name}:[ \t]*(.*(?:\n[ \t]+.*)*)", doc, flags=re.MULTILINE)
        parts[name.lower()] = " ".join(section[1].split()) if section else ""
    signature = inspect.signature(requires).parameters
    parameters = tuple(signature)
    required = [name for name in parameters if signature[name].default is inspect.Parameter.empty]
    return Guard(
        name=getattr(requires, "__name__", repr(requires)),
        requires=requires,
        check=checker(requires, parameters, is_silent),
        parameters=parameters,
        required=len(required),
        ops=tuple(ops),
        is_silent=is_silent,
        precondition=" ".join(precondition.split()),
        **options,
        **parts,
    )


@dataclass(frozen=True, kw_only=True)
class ArgumentSlot:
    """Position of one schema argument in a call."""

    name: str
    position: int
    default: Any

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the argument's value in a call as the dispatcher makes it."""
        if self.position < len(args):
            return args[self.position]
        return kwargs.get(self.name, self.default)

    def put(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any, item: int | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with another value of this one, or of an item of it."""
        if item is not None:
            items = list(self.of(args, kwargs))
            items[item] = value
            value = items
        if self.position < len(args):
            return (*args[: self.position], value, *args[self.position + 1 :]), kwargs
        return args, {**kwargs, self.name: value}


@cache
def schema_parameters(op: Any) -> tuple[ArgumentSlot, ...]:
    """Return all arguments of an overload in schema order, with their defaults."""
    return tuple(
        ArgumentSlot(
            name=argument.name,
            # Behind all positions, so that it is looked up by name alone.
            position=len(op._schema.arguments) if argument.kwarg_only else position,
            default=argument.default_value if argument.has_default_value() else None,
        )
        for position, argument in enumerate(op._schema.arguments)
    )


def full_name(op: Any) -> str:
    """Return an overload as the dispatcher spells it: ``aten::index.Tensor``."""
    return str(op.name())


def resolve(entry: Guard) -> tuple[Any, ...]:
    """Return the overloads that ``entry`` acts on in the running torch; unknown ops give none.

    Overloads that merely decompose are left out, since the guard of the inner op sees their
    values; a composite guard acts on these alone.
    """
    wanted = {*entry.parameters[: entry.required]}
    overloads = (op for op_name in entry.ops for op in _overloads(op_name))
    return tuple(
        dict.fromkeys(
            op
            for op in overloads
            if wanted <= {argument.name for argument in op._schema.arguments}
            and _decomposes(op) == entry.is_composite
        )
    )


def of_overload(entry: Guard, op: Any) -> Guard:
    """Return the guard as one of this overload: it takes what the overload has."""
    names = {argument.name for argument in op._schema.arguments}
    # The check gets its arguments by position, so it ends at the first one that the overload lacks.
    taken = tuple(takewhile(names.__contains__, entry.parameters))
    return entry if taken == entry.parameters else replace(entry, parameters=taken)


def _decomposes(op: Any) -> bool:
    return has_kernel(full_name(op), "CompositeImplicitAutograd")


def _overloads(op_name: str) -> list[Any]:
    namespace, _, rest = op_name.partition("::")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        return []
    names = [overload] if overload else packet.overloads()
    return [getattr(packet, item) for item in names if hasattr(packet, item)]


def _with_sentence(check: UserCheck, name: str) -> Check:
    """Let a check answer with a sentence instead of a whole violation."""

    def checked(*values: Any) -> Violation | None:
        answer: object = check(*values)
        if answer is None or isinstance(answer, Violation):
            return answer
        if not isinstance(answer, str):
            kind = type(answer).__name__
            msg = f"guard {name} returned {kind}, not None, a sentence or a Violation"
            raise TypeError(msg)
        return Violation(headline=answer, is_index=False)

    return checked


def _op_name(op: Any) -> str:
    """Return the name of an op object, one of ``torch.ops`` or custom."""
    custom = getattr(op, "_qualname", None)  # what torch.library.custom_op made has one
    if isinstance(custom, str):
        return custom
    if hasattr(op, "_schema"):  # its full name leaves out "default", which would be all overloads
        return f"{op._schema.name}.{op._overloadname}"
    return str(getattr(op, "_qualified_op_name", repr(op)))


def user_guard(op: Any, check: UserCheck, name: str | None = None) -> Guard:
    """Build a guard of the user's own for an op of the user's own.

    Args:
        name: the function's own by default.

    Raises:
        GuardRegistrationError: no such op is registered, or ``check`` is no function of arguments
            that the op has.
    """
    op_name = op if isinstance(op, str) else _op_name(op)
    if "::" not in op_name:
        msg = f"{op_name!r} is not an op name: write it as namespace::op, such as 'mylib::lookup'"
        raise GuardRegistrationError(msg)
    overloads = _overloads(op_name)
    if not overloads:
        msg = f"there is no op {op_name!r}: register it with torch.library before its guard"
        raise GuardRegistrationError(msg)
    # An op that merely decomposes is looked at where it stands, above autograd.
    decomposes = all(_decomposes(op) for op in overloads)
    try:
        entry = make_guard(
            check, (op_name,), frequency=OF_USER, is_composite=decomposes, waits=True
        )
    except (TypeError, ValueError):  # it does not say what it takes
        msg = (
            f"check = {check!r} is not a guard: give a function of the op's arguments by their "
            f"names"
        )
        raise GuardRegistrationError(msg) from None
    name = name or entry.name
    entry = replace(entry, name=name, check=_with_sentence(check, name))
    have = [argument.name for argument in overloads[0]._schema.arguments]
    if missing := [name for name in entry.parameters if name not in have]:
        msg = f"{op_name} has no argument {missing[0]!r}; its arguments are {', '.join(have)}"
        raise GuardRegistrationError(msg)
    return entry
