"""The report, and the evidence that it is made from.

A :class:`Report` survives the tensors, frames and exceptions that it describes, so it can be kept,
saved, sent and rendered long after the failure.  Its pieces live in
:mod:`cudalens.core.report_types` and :mod:`cudalens.core.graph_types` and are exported here too, so
that this module has the whole data model.

This module imports neither torch nor a renderer.  A rendering method of :class:`Report` imports its
renderer by name when it is called.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from cudalens.core._python import same_random_state
from cudalens.core.evidence_types import (
    BoundOrigin,
    CallContext,
    CallSyntax,
    DatasetColumn,
    DeviceFault,
    EarlierShape,
    FittingCall,
    FreedGraph,
    GraphCut,
    InPlaceChange,
    LostDimension,
    Marks,
    NanCause,
    NanHolder,
    OwnerModule,
    RefusedArguments,
    Regrouped,
    SavedValues,
    Synchronization,
)
from cudalens.core.graph_types import *  # re-exported: part of this module's API
from cudalens.core.next_steps import NOTEBOOK, SCRIPT, NextSteps
from cudalens.core.report_types import *

SCHEMA_VERSION = 4
READABLE_VERSIONS = (1, 2, 3, 4)
_FIGURES = (".png", ".svg", ".pdf")


@dataclass(frozen=True, kw_only=True)
class ErrorFacts:
    """Type, message and CUDA error code of an exception, without the exception."""

    type_name: str
    """The class name, such as ``RuntimeError``."""
    bases: tuple[str, ...] = ()
    """The names of all its base classes, nearest first."""
    message: str = ""
    error_code: int | None = None
    """The CUDA error code when torch gave one (710 is an assert)."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The evidence on a failure that a report keeps."""

    prevented: bool = False
    """True if it was found before the launch."""
    context_usable: bool | None = None
    """True if CUDA can still be used; ``None`` where the process has not used it."""
    phase: Phase = "unknown"
    """Phase of training in which the failing call ran."""
    op: OpName = field(default_factory=OpName)
    """The op that was called, and the public function that led to it."""
    bound_source: SourceSpan | None = None
    """The line that set the size behind the bound, where it is known."""
    seen_before: SeenBefore | None = None
    """Values of the argument at fault in earlier calls of the same line."""
    source: SourceSpan | None = None
    """The innermost line of the user's cell or script."""
    forward_source: SourceSpan | None = None
    """For a failure in backward: where the forward call was made."""
    module_path: str | None = None
    """The module that was running, such as ``encoder.layers.0.linear1``."""
    frames: tuple[Frame, ...] = ()
    """The call stack, without frames of this package."""
    replay: Replay = field(default_factory=Replay)
    """Result of the CPU kernel with the same arguments."""
    device_text: str | None = None
    """The assertion line of CUDA: as it was printed, or as it would have been."""
    tensors: tuple[TensorFact, ...] = ()
    """The tensors of the failing call and of the user's line."""
    graph: AutogradNeighbourhood = field(default_factory=AutogradNeighbourhood)
    """The autograd graph around the failure."""
    provenance: tuple[ProvenanceStep, ...] = ()
    """The ops and lines that the bad values came through, first one first."""
    history: tuple[HistoryEntry, ...] = ()
    """The last ops before the failure."""
    environment: Environment = field(default_factory=Environment)
    """Versions and device."""
    timing: Timing = field(default_factory=Timing)
    """Number of calls checked and recorded, and seconds of the diagnosis."""
    deferred: bool = False
    """True if it was found after the launch, by a check that does not wait for each op."""
    synchronization: Synchronization = field(default_factory=Synchronization)
    """Whether the check waited for the device, so that an error belongs to the op it met."""
    limits: tuple[str, ...] = ()
    """Facts that could not be established, one line each."""


@dataclass(frozen=True, kw_only=True)
class Evidence(Facts):
    """Everything that was collected about one failure, before any conclusion is drawn.

    The lists contain proven facts only: an expression is in ``tensors`` only when its value *is*
    the tensor that the op received.
    """

    violation: Violation | None = None
    error: ErrorFacts | None = None
    call: CallSyntax | None = None
    """The running call in the user's line."""
    fitting_call: FittingCall | None = None
    """After an assertion that no recorded op explains: the only call of the code that fits it."""
    module_type: str | None = None
    """Class name of the innermost module, such as ``BertEmbeddings`` or ``Embedding``."""
    module_names: tuple[tuple[str, str], ...] = ()
    """Module paths with the variable of the model, where that is proven: ``("0", "net.0")``."""
    scalars: tuple[tuple[str, str], ...] = ()
    """Other arguments of the op by schema name, as text: ``("ignore_index", "-100")``."""
    node_saved: tuple[SavedValues, ...] = ()
    """Saved tensors of the autograd node that failed in anomaly mode."""
    bound: BoundOrigin | None = None
    """The place that chose the size behind the bound, and the object that has it."""
    marks: Marks = field(default_factory=Marks)
    owners: tuple[OwnerModule, ...] = ()
    """The modules whose parameters or buffers are arguments of the op."""
    call_context: CallContext = field(default_factory=CallContext)
    dataset_column: DatasetColumn | None = None
    refused_arguments: RefusedArguments = field(default_factory=RefusedArguments)
    modified: InPlaceChange | None = None
    freed: FreedGraph | None = None
    graph_cut: GraphCut | None = None
    frozen: tuple[str, ...] = ()
    """The parameters behind a tensor without a graph, where all of them require no grad."""
    frozen_at: LineRef | None = None
    """The line that froze all of them."""
    lost_dimension: LostDimension | None = None
    regrouped: Regrouped | None = None
    flattened: Regrouped | None = None
    """The call before the failing one, if it flattened each image to a row of features."""
    earlier_shapes: tuple[EarlierShape, ...] = ()
    device_fault: DeviceFault = field(default_factory=DeviceFault)
    nan_holder: NanHolder | None = None
    nan_cause: NanCause | None = None
    """Why a softmax has made NaN, where its input proves it."""
    has_nan_watch: bool = False
    """True if each result was checked for NaN."""
    memory_holders: tuple[str, ...] = ()
    """The largest objects of the user's variables on a full device, in words."""
    worker_line: str | None = None
    """The user's line in a worker process whose exception was raised again here."""
    has_run_kernels: bool = False
    """True if the values at fault were read by kernels before the call was refused."""
    other_functions: tuple[str, ...] = ()
    """Names of the other functions that the instruction of a refused call has called."""
    is_checked: bool = True
    """True if the failing code ran inside a check."""
    is_script: bool = False
    """True if neither a notebook nor IPython runs here: the report then suits a script."""

    @property
    def call_text(self) -> str | None:
        """Source of the running call."""
        return None if self.call is None else self.call.text

    @property
    def steps(self) -> NextSteps:
        """The phrases for what to do next."""
        return SCRIPT if self.is_script else NOTEBOOK

    def tensor(self, argument: str) -> TensorFact | None:
        """Return the tensor that the op received as ``argument`` (its schema name)."""
        return next((item for item in self.tensors if item.argument == argument), None)

    def scalar(self, name: str) -> str | None:
        """Return the text of another argument of the op, ``None`` when it was not given."""
        return dict(self.scalars).get(name)


def is_of_cell(source: SourceSpan | None, frames: Iterable[Frame]) -> bool:
    """Return whether a place, or one of the calls that led to it, is in a cell of a notebook."""
    return any(item is not None and item.cell is not None for item in (source, *frames))


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """The conclusions that a report draws from the facts."""

    schema_version: int = SCHEMA_VERSION
    """Version of this form. This release writes 4 and reads 1 to 4."""
    kind: Kind = "device_assert"
    """Kind of failure. docs/reference/report.md describes each."""
    certainty: Certainty = "unknown"
    """``proven`` if a guard fired or the CPU kernel raised, else ``likely`` or ``unknown``."""
    headline: str = ""
    """One sentence with the observed value, in the user's names where they are proven."""
    headline_schema: str = ""
    """The same in the names of the op's schema."""
    headline_own: str = field(init=False, default="")
    """The same as ``headline``, under the name that versions 2 and 3 gave it."""
    exception: RaisedException | None = None
    """The exception that the failure was raised as."""
    observations: tuple[Observation, ...] = ()
    """Proven facts beyond the headline, one line each. None of them is advice."""
    explanation: str = ""
    """Two or three sentences: why the kernel would have stopped, what the numbers mean."""
    argument: str | None = None
    """The schema's name of the argument at fault."""
    expression: str | None = None
    """The user's own expression for it, where it is proven to be that tensor."""
    offenders: Offenders | None = None
    """The bad values: how many of how many, and the first 20 with their positions."""
    bounds: Bounds | None = None
    """Allowed values."""
    hints: tuple[Hint, ...] = ()
    """Suggested changes. ``fix`` is code that was tried, otherwise the advice is in words."""

    def __post_init__(self) -> None:
        """Fill in the forms of the headline that were not passed."""
        # A frozen dataclass refuses an ordinary assignment.
        object.__setattr__(self, "headline_schema", self.headline_schema or self.headline)
        object.__setattr__(self, "headline_own", self.headline)


@dataclass(frozen=True, kw_only=True)
class Report(Facts, Conclusion):
    """Everything that is known about one failure.  Its JSON form: docs/reference/report.md.

    Example:
        >>> with cudalens.guard():
        ...     torch.zeros(3, device="cuda")[torch.tensor([3], device="cuda")]
        Traceback (most recent call last):
        cudalens.core.errors.DeviceIndexError: ...
        >>> report = cudalens.last_report()
        >>> report.kind, report.certainty, report.context_usable
        ('device_assert', 'proven', True)
        >>> cudalens.Report.from_dict(report.to_dict()) == report
        True
    """

    ranks: tuple[RankResult, ...] = ()
    """Each of several processes that ran under the check, and the report it made."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain dictionaries, lists, strings and numbers."""
        return typing.cast("dict[str, Any]", to_plain(self))

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as JSON text."""
        # JSON has no NaN, and `to_dict` has made texts of them.
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """Read what :meth:`to_dict` wrote, in this release or an earlier one.

        Raises:
            ValueError: the schema version is not one that this release reads.
        """
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version not in READABLE_VERSIONS:
            versions = f"{READABLE_VERSIONS[0]} to {SCHEMA_VERSION}"
            msg = f"schema_version {version!r} cannot be read: this release reads {versions}"
            if not isinstance(version, int):
                msg = "it contains no cudalens report: schema_version is missing"
            elif version > SCHEMA_VERSION:
                msg += "; a newer release of cudalens wrote it"
            raise ValueError(msg)
        try:
            return from_plain(cls, _with_current_keys(data))
        except (TypeError, AttributeError, KeyError) as error:
            msg = f"a value of it has another type than a report's: {error}"
            raise ValueError(msg) from None

    def to_text(self, *, width: int = 84, color: bool = False) -> str:
        """Render for a terminal of ``width`` columns, with ANSI colours on request.

        The answer comes first, the one action last.
        """
        return typing.cast(str, _renderer("text").render(self, width=width, color=color))

    def to_markdown(self) -> str:
        """Render as at most 40 lines of Markdown: for an issue, a colleague or an assistant.

        Error, facts, what was tried, versions, and the code with its marks and shapes.
        """
        return typing.cast(str, _renderer("markdown").render(self))

    def to_html(self) -> str:
        """Render as one self-contained HTML file."""
        return typing.cast(str, _renderer("html").render_page(self))

    def save(self, path: str | Path) -> Path:
        """Write the report to ``path``, in the form of its suffix.

        A page or text: .html .json .md .txt; a figure: .png .svg .pdf.

        Raises:
            ValueError: the suffix is none of these.
        """
        target = Path(path)
        suffix = target.suffix.lower()
        writers = {
            ".html": self.to_html,
            ".json": self.to_json,
            ".md": self.to_markdown,
            ".txt": self.to_text,
        }
        if suffix in _FIGURES:
            self.figure().savefig(target)
            return target
        try:
            text = writers[suffix]()
        except KeyError:
            suffixes = ", ".join((*writers, *_FIGURES[:-1])) + f" or {_FIGURES[-1]}"
            msg = f"cannot save a report as {target.name!r}: use the suffix {suffixes}"
            raise ValueError(msg) from None
        target.write_text(text, encoding="utf-8")
        return target

    def figure(self) -> Any:
        """Return a :class:`matplotlib.figure.Figure` of the values and of the autograd graph."""
        return _renderer("plot").figure(self)

    def widget(self) -> Any:
        """Return the interactive view, an ipywidgets widget."""
        return _renderer("widget").build(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": self.to_text(), "text/html": _renderer("html").render_fragment(self)}

    def __repr__(self) -> str:
        return f"<cudalens Report {self.kind}: {self.headline}>"


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """Result of one process of several that ran under the check."""

    rank: int | None = None
    """Its rank, ``None`` where it had none."""
    process: int | None = None
    """Its place among the processes that were started together."""
    outcome: str = ""
    """Its end, where it made no report."""
    batch: str = ""
    """The batch, row and dataset item that its bad value came from."""
    page: str | None = None
    """The file with its report, in the same folder."""
    report: Report | None = None
    """Its report."""

    @property
    def name(self) -> str:
        """Name: the rank, else the place among the processes started."""
        return f"process {self.process or 0}" if self.rank is None else f"rank {self.rank}"


def _with_current_keys(data: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON form of a report of any version with the keys of the current one."""
    current = {**data, "schema_version": SCHEMA_VERSION}
    if data.get("schema_version") != SCHEMA_VERSION:
        # Up to version 3 `headline` was in the schema's names.
        current["headline_schema"] = data.get("headline", "")
        current["headline"] = data.get("headline_own") or data.get("headline", "")
    if ranks := data.get("ranks"):
        current["ranks"] = [
            {**item, "report": _with_current_keys(item["report"])} if item.get("report") else item
            for item in ranks
        ]
    return current


def _renderer(name: str) -> Any:
    # By name: this package is below the renderers and must not depend on them.
    with same_random_state():
        return importlib.import_module(f"cudalens.render.{name}")


# --- JSON: dataclasses to plain dictionaries and back ---------------------------------------------


# The JSON form names these fields with words that Python or its readers reserve.
_JSON_NAMES: dict[type, dict[str, str]] = {GraphEdge: {"src": "from", "dst": "to"}}

OPTIONAL: dict[type, str] = {
    Offender: "inputs",
    Offenders: "planes",
    GraphNode: "value",
    AutogradNeighbourhood: "module_names",
    Report: "ranks",
}
"""Fields that the JSON form omits where they are empty."""

_T = TypeVar("_T")


def to_plain(value: Any) -> Any:
    """Return dataclasses as dictionaries, tuples as lists, and non-finite floats as texts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = _JSON_NAMES.get(type(value), {})
        return {
            names.get(item.name, item.name): to_plain(getattr(value, item.name))
            for item in dataclasses.fields(value)
            if item.name != OPTIONAL.get(type(value)) or getattr(value, item.name) not in (None, ())
        }
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): to_plain(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def from_plain(cls: type[_T], data: dict[str, Any]) -> _T:
    """Build ``cls`` from the result of :func:`to_plain`; unknown keys are ignored.

    Raises:
        TypeError: a value is not of its field's type, on which the views rely.
    """
    hints = get_type_hints(cls)
    names = _JSON_NAMES.get(cls, {})
    # A missing key leaves the default: an earlier release has fewer fields.
    values = {}
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        key = names.get(item.name, item.name)
        if key in data and item.init:
            try:
                values[item.name] = _read(hints[item.name], data[key])
            except TypeError as error:
                raise TypeError(f"{key}: {error}") from None
    return cls(**values)


def _read(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    origin = get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        candidates = [arg for arg in get_args(hint) if arg is not type(None)]
        return _read(candidates[0], value) if len(candidates) == 1 else _plain(candidates, value)
    if origin is tuple:
        args = get_args(hint)
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{value!r:.40} is no list")
        is_list = args[-1] is Ellipsis
        kinds = itertools.repeat(args[0]) if is_list else args
        return tuple(_read(kind, item) for kind, item in zip(kinds, value, strict=not is_list))
    if origin is Mapping:
        return {name: _frozen(item) for name, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_plain(typing.cast("type[Any]", hint), value)
    return _plain([hint], value)


_NOT_FINITE = ("inf", "-inf", "nan")
_PLAIN: dict[Any, tuple[type, ...]] = {str: (str,), int: (int,), float: (int, float), bool: (bool,)}


def _plain(hints: Sequence[Any], value: Any) -> Any:
    """Return a text, a number or a ``Literal`` if it has one of these types.

    Raises:
        TypeError: it has none of them.
    """
    for hint in hints:
        if get_origin(hint) is Literal:
            is_one = isinstance(value, (str, int)) and value in get_args(hint)
        else:
            is_one = isinstance(value, _PLAIN[hint])
            # In Python, True and False are integers too.
            is_one = is_one and (hint is bool or not isinstance(value, bool))
            is_one = is_one or (hint is float and value in _NOT_FINITE)
        if is_one:
            return value
    raise TypeError(f"{value!r:.40} is no value of it")


def _frozen(value: Any) -> Any:
    """Return a value of ``Observation.facts`` with lists as tuples, which JSON does not have."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
