"""Facts of single collectors on a failure: the optional parts of an ``Evidence``.

Each part is ``None``, or empty, where its collector did not run or found nothing.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cudalens.core.graph_types import ProvenanceStep
from cudalens.core.report_types import LineRef, Number, Offenders, SourceSpan


class SavedValues(NamedTuple):
    """Values that an autograd node has saved: the smallest, the largest, the nearest to 0."""

    name: str
    min: float
    max: float
    nearest: float
    has_nan: bool


@dataclass(frozen=True, kw_only=True)
class CallSyntax:
    """The user's running call: ``F.cross_entropy(z, y)``."""

    node: ast.AST
    """Its syntax; a whole assignment where the call is its target."""
    text: str
    """Its source on one line."""
    is_written_so: bool
    """True if the source contains exactly this text, so that the syntax's columns point into it."""


@dataclass(frozen=True, kw_only=True)
class FittingCall:
    """A call in the user's code that can launch the kernel of an assertion."""

    op: str
    api: str
    line: int
    text: str
    """Its source; the function alone where that is long."""
    code: str = "this cell"
    """The code in which no other call fits."""


@dataclass(frozen=True, kw_only=True)
class OwnerModule:
    """A module that contains an argument of the op as a parameter or buffer."""

    argument: str
    text: str
    """The user's name of the module: ``self.pos``."""
    kind: str
    """Its class: ``nn.Embedding``."""
    attribute: str
    """The parameter or buffer: ``weight``."""


@dataclass(frozen=True, kw_only=True)
class CallContext:
    """The variables around a call, read without running code of the user's."""

    library_names: tuple[tuple[str, str], ...] = ()
    """Arguments of the op, and the variables of a library's function that hold them."""
    model: str | None = None
    """The class of the innermost running model of transformers."""
    tokenizer_length: int | None = None
    pad_token_id: int | None = None

    def library_name(self, argument: str) -> str | None:
        """Return the variable of a library's function that holds an argument of the op."""
        return dict(self.library_names).get(argument)


@dataclass(frozen=True, kw_only=True)
class OddArgument:
    """An argument of a refused call that is no tensor and no number."""

    name: str
    """The user's expression for it, else the parameter's name."""
    type_name: str
    """Type as in torch's messages: ``numpy.ndarray``, ``NoneType``."""
    words: str
    """Description: ``a numpy.ndarray of float64 (2, 8)``."""


@dataclass(frozen=True, kw_only=True)
class PositionTable:
    """An input of a model of transformers that is longer than the model's table of positions."""

    input: str
    rows: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class RefusedArguments:
    """Facts about the arguments of a refused call, without their values."""

    odd_arguments: tuple[OddArgument, ...] = ()
    position_table: PositionTable | None = None
    problem_type: str | None = None
    """Kind of labels that the running model of transformers takes, by its config."""


@dataclass(frozen=True, kw_only=True)
class InPlaceChange:
    """The saved tensor that autograd found changed in place."""

    modified: ProvenanceStep | None = None
    """The last write to it."""
    savers: tuple[ProvenanceStep, ...] = ()
    """The ops, one of which saved it."""
    writes: tuple[ProvenanceStep, ...] = ()
    """All writes to it since it was saved, oldest first."""
    name: str | None = None
    """The user's name for it: ``D[2].weight``, ``h``."""
    is_parameter: bool = False
    module: str | None = None
    """The class of torch's module that wrote it because of ``inplace=True``."""
    is_shared: bool = False
    """True if a caller or the base of a view has the tensor too: a new tensor changes neither."""
    stale: tuple[LineRef, ...] = ()
    """Lines of the function that calls backward, oldest first, whose results come from the old
    values of the parameters.  Empty unless all such lines are known."""


@dataclass(frozen=True, kw_only=True)
class FreedGraph:
    """The part of the graph that an earlier backward has freed, and the tensor that leads into it.

    Or the part whose saved tensor was changed, by the line ``freed``.
    A line without cell and file is in the cell or file of the failing line.
    """

    node: str
    made: LineRef | None = None
    freed: LineRef | None = None
    read: LineRef | None = None
    """The line that, after the backward, read the result that ``holder`` had made before it."""
    holder: LineRef | None = None
    name: str | None = None
    """The variable that the line read."""
    detached: str | None = None
    """Code for the value of ``name`` without its graph: ``h.detach()``.

    ``None`` where another function, without that variable, calls backward.
    """
    has_stepped: bool = False
    is_made_again: bool = False


@dataclass(frozen=True, kw_only=True)
class GraphCut:
    """The recorded call that cut a tensor, or a number, off its graph."""

    op: str
    """Its name alone: ``detach``, ``argmax``; ``no_grad`` where it recorded no node, and ``no_grad
    block`` where ``line`` is that of a ``with`` statement around it."""
    line: LineRef
    others: tuple[LineRef, ...] = ()
    """Lines that did the same to other tensors of it, oldest first."""


@dataclass(frozen=True, kw_only=True)
class LostDimension:
    """A recorded ``squeeze`` that took the batch dimension away, as the batch had one sample."""

    line: LineRef
    before: tuple[int, ...]
    after: tuple[int, ...]
    earlier: tuple[tuple[int, ...], tuple[int, ...]]
    """Both shapes in an earlier call of the line."""


@dataclass(frozen=True, kw_only=True)
class Regrouped:
    """A recorded ``view`` or ``reshape`` that changed the number of rows."""

    line: LineRef
    before: tuple[int, ...]
    after: tuple[int, ...]


class EarlierShape(NamedTuple):
    """The one other shape that a tensor of the line had when its maker was called earlier."""

    name: str
    """The user's expression for the tensor."""
    shape: tuple[int, ...]
    earlier: tuple[int, ...]
    calls: int


@dataclass(frozen=True, kw_only=True)
class DeviceFault:
    """Failure of the device at the time of an exception."""

    hidden_error: str | None = None
    """The device's own error behind an exception that does not mention it."""
    is_assert: bool = False
    """True if the hidden error is a device-side assert."""
    was_before: bool = False
    """True if the context had ended before the block began."""
    was_handled_inside: bool = False
    """True if the op that ended the context had raised an earlier exception than this one."""


@dataclass(frozen=True, kw_only=True)
class Synchronization:
    """True if the check waited for the device, so that an error belongs to the op it met."""

    waits: bool | None = None
    """True if the check waited after each op; ``None`` where nothing was checked."""
    is_op_unwaited: bool = False
    """True if the failed op was not waited for, so that an earlier one may be at fault."""


@dataclass(frozen=True, kw_only=True)
class NanHolder:
    """The source of the NaN in the tensor at fault: a tensor that is older than the recording."""

    name: str
    """The user's name for it."""
    nan: Offenders
    is_read: bool = True
    """False for a parameter that holds NaN, where no recorded call is known to have read it."""
    written: tuple[LineRef, ...] = ()
    """The lines that wrote NaN to such a parameter, where they were recorded, newest first."""
    changed: LineRef | None = None
    """The last line that changed such a parameter, where no line is known to have written NaN."""


NanCause = Literal["masked row", "infinity"]
"""Why a softmax has made NaN: a row was -inf everywhere, or one contained inf."""


@dataclass(frozen=True, kw_only=True)
class Binding:
    """The statement that bound a name."""

    at: SourceSpan
    value: str | None = None
    """The expression that the name alone was bound to."""
    called: str | None = None
    """Function that the expression calls: ``torch.ones``."""
    keywords: tuple[str, ...] = ()
    name: str = ""
    """For a layer: the user's name for it."""
    tied: str | None = None
    """For a layer: another one that shares its weight."""
    beside: str | None = None
    """For a table: another layer of its size, as the output head of a language model is."""
    is_read_again: bool = False
    """True if other code, or another iteration of a loop, reads the name too."""
    dropped: tuple[str, SourceSpan] | None = None
    """A later statement that discards the result of a method of the name: ``x.to(device)``."""
    items: tuple[Binding, ...] = ()
    """For a container of layers: the maker of each, where the expression writes all of them out."""


@dataclass(frozen=True, kw_only=True)
class DatasetColumn:
    """The column of a dataset from which the bad values of a batch come."""

    name: str
    """The user's name of the dataset."""
    attribute: str = ""
    """The attribute that stores the column."""
    may_be_changed: bool = False
    """True if the dataset may return other values than the attribute stores."""
    count: int = 0
    """Number of values; 0 where only the classes are known."""
    low: int = 0
    high: int = 0
    kinds: int = 0
    """Number of distinct values."""
    distinct: tuple[int, ...] | None = None
    """The distinct values, where they are few."""
    bad_count: int = 0
    rows: tuple[int, ...] = ()
    """The first few rows with a bad value."""
    others: str | None = None
    """The good values, in short: ``0 … 6``."""
    classes: int | None = None
    """Number of classes that the dataset names."""

    @property
    def place(self) -> str:
        """The object with the values: ``ds``, ``ds.targets``, ``the dataset's targets``."""
        link = "'s " if self.name.startswith("the ") else "."
        return f"{self.name}{link}{self.attribute}" if self.attribute else self.name


@dataclass(frozen=True, kw_only=True)
class BoundOrigin:
    """The place where the number behind a bound was chosen, and the object that has it.

    For ``model = Recommender(100, 64)``, whose ``__init__`` makes ``nn.Embedding(items, 8)``, the
    line of ``model`` chose the number and that of ``nn.Embedding`` made the layer.
    """

    at: SourceSpan
    """The line that chose the number."""
    expression: str
    """The code there with the number, on one line: ``Recommender(100, 64)``, ``n = 4``."""
    holder: str | None = None
    """The user's name of the layer, the tensor or the number: ``model.items``."""
    made: LineRef | None = None
    """The line that made the holder, where that is another one than ``at``."""
    made_by: str | None = None
    """The code there: ``nn.Embedding(items, 8)``."""
    is_set: bool = True
    """False if ``at`` only made the holder, and the line that chose the number is unknown."""


@dataclass(frozen=True, kw_only=True)
class NamedConstant:
    """A number that the user's program names: ``IMAGE = -200``."""

    name: str
    value: int
    line: LineRef | None = None
    """The line that sets it, where one line does."""


class ShortInput(NamedTuple):
    """An item of a batch with too few steps for ``ctc_loss``."""

    item: int
    steps: int
    """Its input length."""
    labels: int
    repeats: int
    """Labels that equal the one before; a blank must separate them."""
    items: int
    """Number of such items ..."""
    total: int
    """... and of all."""


class AddedNumber(NamedTuple):
    """A number that a recorded sum added to the values at fault, and their range before it."""

    name: str
    """The user's name of the tensor that it was added to."""
    column: int | None
    """The column of all bad values, where each column got a number of its own."""
    number: int
    low: int
    high: int
    """The largest value before the sum, in the column."""
    fits: int
    """The largest that may have been there."""
    line: LineRef


class BadSlice(NamedTuple):
    """The one index along one dimension of a tensor at which all its bad values are."""

    name: str | None
    """The user's expression for the tensor, ``None`` for the one at fault."""
    dim: int
    at: int
    many: int
    is_full: bool
    """True if each value at that index is bad."""
    is_nan: bool = False
    """True if all NaN are there; other bad values may be elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Traits that all bad values of a finding share; each value was checked."""

    value: Number = None
    """The number that all bad values equal, ``None`` where they differ or there is only one."""
    constants: tuple[NamedConstant, ...] = ()
    """The program's names for bad values."""
    zero_at: str | None = None
    """The tensor on the line (a weight, a mask) that is 0 or False at the bad values alone."""
    in_slice: BadSlice | None = None
    """The slice with all bad values, or all NaN of another tensor of the line, if not by chance."""
    added: AddedNumber | None = None
    short_input: ShortInput | None = None
    """Of an infinite ``ctc_loss``, the first item that has more labels than steps for them."""
    is_size: bool = False
    """True if each bad value equals the size: one past the last index."""
    length: BoundOrigin | None = None
    """The place that chose the length which the last of the bad positions belongs to."""
    copies: int = 1
    """How often the op's tensor has each element of the user's, as after ``expand``."""
    maker: ProvenanceStep | None = None
    """The recorded call that made these integers: ``argmax``, a comparison, ``floor``."""
    vanished: tuple[str, ...] = ()
    """Numbers on the line that the dtype rounds: ``1e-8 is 0``, ``1.0 - 1e-6 is 1``."""
    aliases: tuple[str, ...] = ()
    """Keys of the loader's batch that share one tensor."""
    computed: tuple[LineRef, ...] = ()
    """Lines of Python that computed the values before the first recorded call, newest first."""
