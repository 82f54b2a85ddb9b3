"""A failed call with the live objects around it, the source of all evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import FrameType, SimpleNamespace, TracebackType
from typing import Any

from torch import Tensor

from cudalens.core import _torch
from cudalens.core.call import ApiCall, Call, OpCall
from cudalens.core.graph_types import FIRST_BAD, FIRST_NAN
from cudalens.core.limits import Limits
from cudalens.core.report import ErrorFacts, Evidence
from cudalens.core.report_types import OpName, SourceSpan, TensorFact, Violation
from cudalens.core.tensor_values import outside
from cudalens.evidence.call_stack import locate, parameter_names
from cudalens.evidence.tensors import bad_key
from cudalens.evidence.trial import ApiTrial
from cudalens.guards._ranges import breaks
from cudalens.guards.process import PROCESS
from cudalens.recorder.provenance import Provenance
from cudalens.recorder.sites import entries_of
from cudalens.recorder.tensor_refs import tensor_values
from cudalens.source.locate import CallSite, locate_entries
from cudalens.source.module_path import running_modules
from cudalens.source.running_call import RunningCall
from cudalens.source.stack import Entry, StackEntry, frame_of, place_of

_NOTHING = Evidence()


@dataclass(kw_only=True)
class FailureContext:
    """A failed call with the live objects around it.  Exists only while its report is made."""

    call: Call = field(default_factory=Call)
    entries: Sequence[Entry]
    """The stack, outermost first: frames, traceback entries, or the lines of a past call."""
    violation: Violation | None = None
    error: ErrorFacts | None = None
    is_lost: bool = False
    """True if the device's context has ended, so that no tensor on it can be read."""
    op: OpName = field(default_factory=OpName)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """All arguments, by name."""
    named: Sequence[tuple[str, object]] = ()
    """Arguments of the function that the user called, if they differ from the op's."""
    raised: ApiCall | None = None
    """The user's call that raised, if it was recorded."""
    node: Any = None
    """The autograd node that is running."""
    recorder: Any = None
    trial: ApiTrial | None = None
    """Tries changes of the call on copies, if the user's line could be read."""
    beside: Callable[[], Sequence[TensorFact]] = tuple
    """Other tensors to describe if the device is lost."""
    started: float
    """When the work on the report began, on the performance counter."""
    limits: Limits = field(default_factory=Limits)
    found: Any = field(default_factory=lambda: SimpleNamespace(**vars(_NOTHING)))
    """The fields of the evidence so far: collectors read those of the collectors before them."""

    @property
    def reader(self) -> RunningCall | None:
        """The user's line, if more is known than its source and variables."""
        return None if self.trial is None else self.trial.line.call

    @property
    def message(self) -> str:
        """The message of the exception, empty without one."""
        return "" if self.error is None else self.error.message

    @property
    def guarded(self) -> OpCall | None:
        """The running op, if a guard or the NaN watch has found something in it."""
        return self.call.op

    @property
    def is_running(self) -> bool:
        """False for a past call, of which only the lines are known."""
        return not any(isinstance(item, StackEntry) for item in self.entries)

    @cached_property
    def values(self) -> Mapping[str, Tensor]:
        """The tensor arguments, by name."""
        return tensor_values(self.arguments)

    @cached_property
    def site(self) -> CallSite:
        """The user's line, and the proven expressions of its tensors."""
        find = partial(locate, self.entries, self.values, self.reader)
        return self.limits.attempt("source", find, CallSite)

    @cached_property
    def trace(self) -> list[TracebackType]:
        """The traceback of an exception, outermost first."""
        return [item for item in self.entries if isinstance(item, TracebackType)]

    @cached_property
    def frames(self) -> list[FrameType]:
        """The frames of the stack, none for a past call."""
        return [frame_of(item) for item in self.entries if not isinstance(item, StackEntry)]

    @cached_property
    def modules(self) -> list[object]:
        """The modules whose methods are on the stack, outermost first."""
        return running_modules([place_of(item) for item in self.frames])

    @cached_property
    def names(self) -> dict[int, str]:
        """Parameters, and other leaves, by ``id``."""
        return parameter_names(self.frames)

    def forward_call(self, number: int) -> tuple[SourceSpan | None, str | None, str | None]:
        """Return place, module and name of the forward call behind an autograd node."""
        snapshot = None if self.recorder is None else self.recorder.snapshot()
        call = None if snapshot is None else snapshot.forward_call(number)
        if snapshot is None or call is None:
            return None, None, None
        module_path = snapshot.reader.module(call.site).path
        return locate_entries(entries_of(call.site)), module_path, call.name

    @property
    def bad(self) -> Tensor | None:
        """The tensor at fault."""
        violation, values = self.violation, self.values
        if violation is None:
            return None
        if violation.is_nonfinite and not violation.argument:
            return next(filter(has_infinity, values.values()), None)
        return values.get(bad_key(violation))

    @cached_property
    def way(self) -> Provenance:
        """The provenance of the bad values, as far as recorded."""
        violation, recorder, bad = self.violation, self.recorder, self.bad
        if violation is None or bad is None or recorder is None:
            return Provenance()
        positions = [item.position for item in violation.offenders.first]
        is_bad = breaks(violation)
        if violation.is_nonfinite and not violation.argument:
            is_bad, positions = has_infinity, []
        mask = self.limits.attempt("bad values", partial(bad_places, violation, bad))
        look = partial(recorder.provenance, bad, is_bad, positions, mask)
        way = self.limits.attempt("provenance", look, Provenance)
        if positions and violation.offenders.first[0].value == "nan":
            way.steps = [
                replace(item, note=FIRST_NAN) if item.note == FIRST_BAD else item
                for item in way.steps
            ]
        if way.is_open:
            self.limits.add(recorder.beyond_ring("the op that made the bad values, or wrote them,"))
        return way


def current_recorder() -> Any:
    """Return the recorder of the running check, ``None`` without one."""
    listener = PROCESS.listener
    return listener.recorder if listener is not None else None


def error_facts(error: BaseException) -> ErrorFacts:
    """Describe an exception without keeping it."""
    code = getattr(error, "error_code", None)
    return ErrorFacts(
        type_name=type(error).__name__,
        bases=tuple(item.__name__ for item in type(error).__mro__[1:-1]),
        message=str(error),
        error_code=code if isinstance(code, int) else None,
    )


def bad_places(violation: Violation, tensor: Tensor) -> Tensor | None:
    """Return bool[shape of the tensor], true for elements outside the bound."""
    low, high = violation.bounds.min, violation.bounds.max
    if violation.is_nonfinite or low is None or high is None or not _torch.is_plain(tensor):
        return None
    with _torch.plain_torch(), _torch.no_dispatch_modes():
        bad = outside(tensor.detach(), float(low), float(high))
        for value in violation.bounds.also_allowed:
            bad &= tensor != value
        # A bound on sums or rows says nothing of single elements.
        return bad if int(bad.count_nonzero()) == violation.offenders.count else None


def has_infinity(tensor: Tensor) -> bool:
    """Return whether a tensor contains an infinity above 0."""
    return tensor.is_floating_point() and bool(tensor.isposinf().any())
