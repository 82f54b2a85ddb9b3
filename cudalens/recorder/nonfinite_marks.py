"""Which tensors are not finite, by weak references, and what made them so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol
from weakref import ref

from torch import Tensor

from cudalens.core import _torch
from cudalens.core.report_types import Violation
from cudalens.recorder.nonfinite_values import nonfinite, suspects
from cudalens.recorder.sites import RawSite
from cudalens.recorder.tensor_refs import Ref, tensors_in

Sink = Literal["loss", "gradient", "parameter", "read", "result", "scaler", "guard"]
MakerKind = Literal["made", "asked", "entered"]
_MAX_MARKS = 4096
"""How many tensors are remembered as finite, and how many as non-finite."""
_MAX_STEPS = 16
"""How many calls of a value's path are kept."""


class Step(NamedTuple):
    """A call that a non-finite value has passed through."""

    name: str
    site: RawSite


@dataclass(eq=False, slots=True)
class Maker:
    """A call that made non-finite values, or first read them."""

    kind: MakerKind
    """``made`` from finite inputs, ``asked`` for as a number, or ``entered`` from outside."""
    step: Step
    has_nan: bool
    violation: Violation | None = None
    case: Any = None
    """Evidence about the call, collected while it ran."""


@dataclass(eq=False, slots=True)
class NonFiniteTensor:
    """The mark of a tensor with non-finite values."""

    tensor: Ref
    version: int | None
    maker: Maker
    has_nan: bool
    way: tuple[Step, ...] = ()
    is_of_view: bool = False
    """True for a view of a marked tensor whose own values have not been read."""

    @property
    def may_be_mask(self) -> bool:
        """True for infinities that were asked for, or came from outside: no call has made them."""
        return not self.has_nan and self.maker.kind != "made"


class Arrival(NamedTuple):
    """Non-finite values at a sink."""

    sink: Sink
    maker: Maker | None
    way: tuple[Step, ...]
    step: Step
    """The call that they were found in."""
    has_nan: bool
    tensor: Tensor | None = None
    """The loss, the parameter, or the tensor that was read."""
    text: str = ""
    """Further facts, in words."""
    arguments: Mapping[str, Any] | None = None
    """The arguments of the maker, if it has only just run."""
    is_alone: bool = True
    """False if other nodes of the pass have made non-finite values, too."""

    @classmethod
    def of(
        cls,
        sink: Sink,
        mark: NonFiniteTensor | None,
        step: Step,
        tensor: Tensor | None = None,
        **more: Any,
    ) -> Arrival:
        """Return where the values of a marked tensor have come to matter."""
        if mark is None:
            return cls(sink, None, (), step, has_nan=False, tensor=tensor, **more)
        return cls(sink, mark.maker, mark.way, step, mark.has_nan, tensor, **more)


class Reports(Protocol):
    """A maker of reports of the watch's findings."""

    def stop(
        self, arguments: Mapping[str, Any], violation: Violation, condition: Tensor | None = None
    ) -> BaseException | None:
        """Return the exception for a call that makes the first NaN or infinity."""

    def note(
        self, arguments: Mapping[str, Any], violation: Violation, condition: Tensor | None = None
    ) -> Any:
        """Collect, while the call runs, what a later report needs; keep no tensor.

        Args:
            condition: the condition of the ``where`` behind the running node's forward call.
        """

    def arrived(self, arrival: Arrival) -> BaseException | None:
        """Return the exception for non-finite values at a sink."""


class NonFiniteTensors:
    """The tensors that are known to be non-finite, and those known to be finite.

    A mark holds for one version of a tensor, until the next write.

    Args:
        recorder: returns the recorder, which knows the base of a view.
    """

    def __init__(self, recorder: Callable[[], Any]) -> None:
        self._recorder = recorder
        self.bad: dict[int, NonFiniteTensor] = {}
        """The marks, by the ``id`` of their weak references."""
        self._finite: dict[int, tuple[Ref, int | None]] = {}
        """Tensors that were finite when last checked, and their versions then."""
        self.last: Ref | None = None
        """The result of the previous call, if it was finite: usually an input of the next one."""

    def __bool__(self) -> bool:
        return bool(self.bad)

    def let_go(self) -> None:
        """Drop all references: ``torch.utils.swap_tensors`` rejects tensors with weak ones."""
        self.bad.clear()
        self._finite.clear()
        self.last = None

    def forget(self, tensor: Tensor) -> None:
        """Remove the mark of a tensor that is finite now."""
        # Python keeps one plain reference of an object, so this is the one that the mark holds.
        self.bad.pop(id(ref(tensor)), None)

    def was_finite(self, tensor: Tensor) -> bool:
        """Return whether all values of a tensor are finite; read them only if that is unknown."""
        if self.last is not None and self.last() is tensor:
            return True
        key, version = ref(tensor), _version(tensor)
        known = self._finite.get(id(key))
        # Without a version, a write since then would not show.
        if known is not None and known[1] == version and version is not None:
            return True
        mark = self.bad.get(id(key))
        if mark is not None and mark.version == version and not mark.is_of_view:
            return False
        finite: bool = _torch.without_modes(are_finite, (tensor,))
        return finite

    def keep_finite(self, tensor: Tensor) -> None:
        """Remember a tensor as finite until the next write."""
        key = ref(tensor)
        self.bad.pop(id(key), None)
        self._finite[id(key)] = (key, _version(tensor))
        _shorten(self._finite)

    def mark_view(self, args: tuple[Any, ...], result: Any) -> None:
        """Mark a view of a marked tensor; it may or may not contain the bad values."""
        base = self.of(args[0]) if args and isinstance(args[0], Tensor) else None
        if base is None:
            return
        for item in tensors_in((result,)):
            if item is not args[0]:
                self.mark(item, base.maker, has_nan=base.has_nan, way=base.way, is_of_view=True)

    def mark_whole(self, tensor: Tensor) -> None:
        """Mark the base of a view, which contains the values written to the view."""
        mark, whole = self.of(tensor), _torch.base_of(tensor)
        if mark is None or mark.is_of_view:
            return
        if whole is None and mark.maker.kind == "made":  # ``parameter.data`` has no base
            whole = self._recorder().snapshot().whole(ref(tensor))()
        if whole is not None and whole is not tensor:
            self.mark(whole, mark.maker, has_nan=mark.has_nan, way=mark.way)

    def mark(
        self,
        tensor: Tensor,
        maker: Maker,
        *,
        has_nan: bool,
        way: tuple[Step, ...] = (),
        is_of_view: bool = False,
    ) -> NonFiniteTensor:
        """Mark a tensor as non-finite."""
        key = ref(tensor)
        mark = NonFiniteTensor(key, _version(tensor), maker, has_nan, way, is_of_view)
        self.bad[id(key)] = mark
        self._finite.pop(id(key), None)
        _shorten(self.bad)
        return mark

    def pass_on(
        self, tensor: Tensor, source: NonFiniteTensor, step: Step, *, has_nan: bool
    ) -> None:
        """Mark a tensor whose bad values come from a marked one."""
        way = source.way if len(source.way) >= _MAX_STEPS else (*source.way, step)
        self.mark(tensor, source.maker, has_nan=has_nan, way=way)

    def of(self, tensor: Tensor) -> NonFiniteTensor | None:
        """Return the mark of a tensor or of its base, unless it was written to since."""
        base = _torch.base_of(tensor)
        for item in (tensor,) if base is None else (tensor, base):
            mark = self.bad.get(id(ref(item)))
            if mark is not None and mark.version == _version(item):
                if item is tensor:
                    return mark
                return self.mark(
                    tensor, mark.maker, has_nan=mark.has_nan, way=mark.way, is_of_view=True
                )
        return None


def _shorten(known: dict[int, Any]) -> None:
    # A dict keeps the order of insertion, so the first key is the oldest.
    while len(known) > _MAX_MARKS:
        del known[next(iter(known))]


def _version(tensor: Tensor) -> int | None:
    # torch raises for the version of a tensor that was made in inference mode.
    return None if tensor.is_inference() else tensor._version


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all values of all tensors are finite."""
    return not suspects(tensors) or next(nonfinite(tensors), None) is None
