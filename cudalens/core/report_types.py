"""The pieces of a report: frozen, keyword-only dataclasses of strings, numbers and tuples.

Each states one fact about a failure.  Unknown facts are ``None`` or an empty tuple, never a guess.
None of them holds a tensor, a frame or an exception.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from cudalens.core.source_places import *  # re-exported: part of this module's API

Kind = Literal[
    "device_assert",
    "host_error",
    "autograd_error",
    "nonfinite",
    "silent",
    "cuda_error",
    "python_error",
]
Certainty = Literal["proven", "likely", "unknown"]
Phase = Literal["forward", "backward", "optimizer", "unknown"]
ReplayOutcome = Literal["raised", "returned", "unavailable"]
Number: TypeAlias = int | float | str | None
"""A number of a tensor as JSON can hold it: NaN and the infinities are the texts nan, inf, -inf."""


@dataclass(frozen=True, kw_only=True)
class TensorMeta:
    """Metadata of a tensor, without its values; safe after a context is lost."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    stride: tuple[int, ...] | None = None
    storage_offset: int = 0
    requires_grad: bool = False
    is_leaf: bool = True
    grad_fn: str | None = None


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Counts of the finite values between consecutive edges: ``len(edges) == len(counts) + 1``."""

    edges: tuple[float, ...] = ()
    """Edges of the bins, ascending."""
    counts: tuple[int, ...] = ()
    """Number of values in each bin."""


@dataclass(frozen=True, kw_only=True)
class TensorSummary:
    """Values of a tensor in short. Every field is ``None`` where it was not computed."""

    min: Number = None
    """The smallest finite value."""
    max: Number = None
    """The largest finite value."""
    mean: Number = None
    """The mean of the finite values."""
    nan: int | None = None
    """Number of NaN values."""
    inf: int | None = None
    """Number of infinite values."""
    unique: tuple[int, ...] | None = None
    """The distinct values of an integer tensor when there are at most 32 of them, else ``None``."""
    histogram: Histogram = field(default_factory=Histogram)
    """How the finite values are spread."""


@dataclass(frozen=True, kw_only=True)
class OpName:
    """An op by its schema name and overload, and the function that the user called to reach it."""

    name: str | None = None
    """Name of the op in its schema: ``aten::nll_loss_forward``."""
    overload: str | None = None
    """Overload of the op: ``default``, ``Tensor``."""
    api: str | None = None
    """The function that was called: ``torch.nn.functional.cross_entropy``."""


@dataclass(frozen=True, kw_only=True)
class Offender:
    """One bad element: its position in the tensor that the op was given, and its value."""

    position: tuple[int, ...]
    """Its index in each dimension."""
    value: Number
    """Its value."""
    sample: int | None = None
    """The item of the dataset that it came from, where that is proven."""
    inputs: tuple[tuple[str, Number], ...] = ()
    """For a first NaN or infinity: what went in at this position, by the tensors' names."""


@dataclass(frozen=True, kw_only=True)
class OffenderMap:
    """Places of the bad elements, on a grid of at most 32 rows by 64 columns.

    Lists are row-major.  A one-dimensional tensor has one row; more dimensions fold into columns.
    """

    rows: int
    """Number of rows of the grid."""
    columns: int
    """Number of columns of the grid."""
    bad: tuple[int, ...]
    """Number of bad values in each cell."""
    low: tuple[Number, ...]
    """The smallest value in each cell."""
    high: tuple[Number, ...]
    """The largest value in each cell."""


@dataclass(frozen=True, kw_only=True)
class Plane:
    """Values of one plane of a tensor, its last two dimensions, as a picture in characters.

    Each character is a cell: ``x`` for bad values alone, ``/`` for bad and good ones, ``-`` for one
    that is allowed apart from the bound, ``0`` to ``9`` for a good value between the smallest and
    the largest.
    """

    index: tuple[int, ...] = ()
    """Its place in the dimensions before the last two, those of size 1 left out."""
    size: tuple[int, int] = (0, 0)
    """Rows and columns of the plane."""
    rows: tuple[str, ...] = ()
    """At most 64 rows of at most 64 cells; a cell shows the values of a whole rectangle."""


@dataclass(frozen=True, kw_only=True)
class Offenders:
    """Number of bad elements, of how many, and the first of them in row-major order.

    Of a deferred finding the smallest and the largest value alone are known.
    """

    count: int = 0
    """Number of bad elements."""
    total: int = 0
    """Number of elements of the tensor."""
    min: Number = None
    """The smallest value of the tensor, bad or not. NaN if it contains one."""
    max: Number = None
    """The largest value of the tensor, bad or not. NaN if it contains one."""
    first: tuple[Offender, ...] = ()
    """Empty where they were looked at after the launch."""
    map: OffenderMap | None = None
    """Places of the bad elements. ``None`` for a scalar."""
    others: str | None = None
    """The good values within the bound, in short: ``0 … 4``."""
    allowed: int = 0
    """Number of values that are allowed apart from the bound, such as -100 (ignore_index)."""
    planes: tuple[Plane, ...] = ()
    """The first eight planes with a bad value, of a tensor that has rows and columns."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The closed interval of allowed values, other values that are allowed, and both as text."""

    min: Number = None
    """The smallest allowed value."""
    max: Number = None
    """The largest allowed value."""
    also_allowed: tuple[int, ...] = ()
    """Single values outside the interval that are allowed too, such as -100."""
    text: str | None = None
    """The same in words: ``0 … 9 or -100 (ignore_index)``."""


@dataclass(frozen=True, kw_only=True)
class OtherModule:
    """A module that ran the failing line before, with another bound than the one that failed."""

    module: str
    """Its path: ``layers.0``."""
    calls: int
    """Number of its calls of the line."""
    min: Number = None
    """The smallest value in them."""
    max: Number = None
    """The largest value in them."""
    size: int | None = None
    """The number that set the bound there."""


@dataclass(frozen=True, kw_only=True)
class SeenBefore:
    """Values that earlier calls of one line gave one argument, taken together.

    The calls of all modules, threads and recompilations of the check count.
    """

    calls: int
    """Number of earlier calls."""
    min: Number = None
    """The smallest value in them."""
    max: Number = None
    """The largest value in them."""
    other_modules: tuple[OtherModule, ...] = ()
    """Modules among the callers that have another bound."""


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A guard's finding: which argument of which op breaks which bound, and where.

    ``headline`` is a template: ``{argument}`` is the argument at fault, ``{related}`` that of
    ``related``, ``{input:self}`` another input, so that readers see their own names where they are
    proven.
    """

    headline: str
    guard: str = ""
    op: str = ""
    overload: str = ""
    argument: str = ""
    explanation: str = ""
    offenders: Offenders = field(default_factory=Offenders)
    bounds: Bounds = field(default_factory=Bounds)
    inputs: tuple[tuple[str, str], ...] = ()
    """For a first NaN or infinity: the op's inputs at its position, by schema name."""
    overwritten: tuple[str, ...] = ()
    """For a first NaN or infinity: the arguments that the op wrote to, and whose earlier values
    are gone."""
    dtype: str = ""
    """For a first NaN or infinity: the type of the result."""
    is_masked_row: bool = False
    """True if the NaN comes from a softmax over rows of nothing but -inf."""
    is_discarded: bool = False
    """True for gradients at places where ``where`` discards the function's result."""
    is_index: bool = True
    """True if the CPU would call it an IndexError (else a ValueError)."""
    element: str = ""
    """The first bad value, the start of ``headline``: ``{argument}[17] = 10``."""
    unit: str = ""
    """Unit of ``size``: ``row``, ``class``."""
    related: str | None = None
    """The schema name of the argument that sets the bound, such as ``weight``."""
    size: int | None = None
    """The number that sets the bound: classes, rows, length of the indexed dimension."""
    dim: int | None = None
    """The dimension of ``related`` that is indexed, when there is one."""
    list_position: int | None = None
    """Which element of a list argument (``indices``) is at fault."""
    device_text: str | None = None
    """The assertion CUDA would have printed; ``None`` for a silent finding."""
    is_silent: bool = False
    """No assert fires on CUDA, but the result is certainly wrong."""
    is_nonfinite: bool = False
    """Not a guard's finding: the op's *result* holds the first NaN or infinity."""
    is_replay_safe: bool = True
    """False when the CPU kernel reads or writes out of bounds on this very input."""

    def sentence(
        self,
        *,
        argument: str | None = None,
        related: str | None = None,
        position: tuple[int, ...] | None = None,
        inputs: Mapping[str, str] | None = None,
        template: str | None = None,
    ) -> str:
        """Return the headline with its placeholders replaced; by default by the schema's names.

        Args:
            argument: name of the argument at fault; for a list, of the tensor in it.
            related: name of the argument that sets the bound.
            position: that of the first bad value, if ``argument`` has another shape than the op's.
            inputs: names by schema name, for ``{input:self}`` and the like.
            template: used instead of the headline.
        """
        template = str(template or self.headline)
        if argument is not None:
            part = "" if self.list_position is None else f"[{self.list_position}]"
            first_position = next((item.position for item in self.offenders.first), ())
            at = _subscript(first_position if position is None else position)
            # The template has the position in the op's tensor, the name may be another tensor's.
            template = template.replace(
                f"{{argument}}{part}{_subscript(first_position)}", f"{{argument}}{at}"
            )
        names = {
            "argument": argument or self.argument,
            "related": related or self.related or "the input",
        }

        # In one pass: a name is an expression of the user's, and may hold braces.
        def filled(part: str) -> str:
            return _PLACEHOLDER.sub(
                lambda it: names[it[1]] if it[1] else (inputs or {}).get(it[2], it[2]), part
            )

        # Name an operand once: ``w / w`` has a single one for the reader.
        text, *operands = map(filled, _OPERANDS.split(template))
        return text + ", ".join(dict.fromkeys(operands))


_PLACEHOLDER = re.compile(r"\{(?:(argument|related)|input:([^{}]+))\}")
_OPERANDS = re.compile(r"(?<= from )(?=\{input:)|, (?=\{input:)")
"""The place in a headline before each operand with its value."""


def format_shape(sizes: Iterable[int] | None) -> str:
    """Return a shape, or a position, as torch writes it: ``[32, 10]``; empty where unknown."""
    return "" if sizes is None else f"[{', '.join(map(str, sizes))}]"


def format_count(number: int, noun: str) -> str:
    """Return ``1 row`` or ``3 rows``."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun[-1] == 's' else 's'}"


def _subscript(position: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, position))}]" if position else ""


def unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the position of flat element ``index`` in a row-major tensor of ``shape``."""
    position = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        position.append(rest)
    return tuple(reversed(position))


def ravel(position: Sequence[int], shape: Sequence[int]) -> int:
    """Return the flat index of a position, the inverse of :func:`unravel`."""
    index = 0
    for place, size in zip(position, shape, strict=True):
        index = index * size + place
    return index


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Result of the same overload with the same arguments on the CPU."""

    outcome: ReplayOutcome = "unavailable"
    """Whether the CPU kernel raised or returned, or could not be asked."""
    exception: str | None = None
    """Class of the exception that it raised."""
    message: str | None = None
    """Message of that exception."""
    reason: str | None = None
    """Why it could not be asked."""


@dataclass(frozen=True, kw_only=True)
class TensorFact:
    """A tensor on the failing line, under its schema name and the user's own expression."""

    argument: str | None
    """Schema name of the argument, ``None`` for another tensor on the line."""
    expression: str | None = None
    """The user's expression for the tensor, where that is proven."""
    shape: tuple[int, ...] = ()
    """Size of each dimension."""
    dtype: str = ""
    """Its dtype: ``int64``."""
    device: str = ""
    """Its device: ``cuda:0``."""
    stride: tuple[int, ...] | None = None
    """Stride of each dimension, in elements."""
    requires_grad: bool = False
    """True if autograd tracks it."""
    grad_fn: str | None = None
    """The autograd node that made it: ``AddmmBackward0``."""
    summary: TensorSummary = field(default_factory=TensorSummary)
    """Its values in short."""
    span: tuple[int, int, int] | None = None
    """Line, first and end column of the expression in the user's source, for drawing."""
    bad_at: tuple[int, ...] | None = None
    """Position of the first bad value in a tensor that the op was given in another shape."""

    @property
    def node(self) -> ast.expr | None:
        """Syntax of the expression, as it was read on the line."""
        return syntax(self.expression)


@dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """One recorded op before the failure, oldest first."""

    seq: int
    """Number of the op since the check began."""
    op: str
    """The function that was called, or the op where no function is known."""
    shapes: str = ""
    """Dtypes and shapes in and out: ``f32[32, 64] -> f32[32, 10]``."""
    source: LineRef | None = None
    """The user's line that called it."""
    module_path: str | None = None
    """The module that was running."""
    module_type: str | None = None
    """The class of that module, such as ``Conv1d``."""
    phase: Phase = "forward"
    """Phase of training in which it ran."""


@dataclass(frozen=True, kw_only=True)
class Hint:
    """A likely cause that the evidence carries, and the code that mends it."""

    text: str
    """The cause in words."""
    fix: str | None = None
    """Code that takes the place of the call, or of what is at ``at``."""
    rule: str = ""
    """Name of the rule that wrote the hint."""
    tried: bool | None = None
    """True when the call was tried with the fix, on copies, and succeeded."""
    at: SourceSpan | None = None
    """The place of the code that ``fix`` replaces, ``None`` for the failing call."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Versions and device. ``simulated`` is true on the rehearsal device."""

    cudalens: str | None = None
    """Version of cudalens."""
    python: str | None = None
    """Version of Python."""
    torch: str | None = None
    """Version of torch."""
    cuda: str | None = None
    """Version of CUDA that torch was built for, ``None`` for a CPU build."""
    device: str | None = None
    """Name of the GPU, or of the rehearsal device."""
    simulated: bool = False
    """True on the rehearsal device."""
    rank: int | None = None
    """Rank of the process in a distributed run."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Counts of what was checked and recorded, and seconds from failure to finished report."""

    checked_ops: int = 0
    """Number of guarded calls in this process."""
    recorded_ops: int = 0
    """Number of ops that were recorded."""
    diagnose_s: float | None = None
    """Seconds from the failure to the finished report."""


# --- what was observed, as data -------------------------------------------------------------------


ObservationKind = Literal[
    "values",
    "earlier",
    "came_from",
    "bound",
    "item",
    "pattern",
    "argument",
    "shape",
    "dtype",
    "device",
    "write",
    "graph",
    "maker",
    "sink",
    "suspect",
    "others",
]


@dataclass(frozen=True, kw_only=True)
class MarkedLine(LineRef):
    """A line of the user's code with the mark that is shown beside it."""

    mark: str = ""
    """A few words without a verb of advice: ``10 is made here``."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One proven fact about a failure; never advice.

    Example: ``Observation(kind="values", text="3 of 32 labels are 10, all others 1 … 9",
    facts={"count": 3, "total": 32})``.
    """

    kind: ObservationKind
    """What the fact is about."""
    text: str
    """The fact in one line, without a full stop."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """The numbers and names in ``text``: numbers, texts, and tuples of them."""
    sources: tuple[MarkedLine, ...] = ()
    """The lines that the fact is about, each with its mark."""


@dataclass(frozen=True, kw_only=True)
class RaisedException:
    """Class and message of an exception, as the last line of its traceback shows them."""

    type: str
    """Name of the class."""
    message: str = ""
    """Its message."""
