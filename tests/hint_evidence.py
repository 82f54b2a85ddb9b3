"""Evidence of one failure per cause, in the form that the collectors give it."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from cudalens.core._python import parse_expression
from cudalens.core.evidence_types import Binding, CallSyntax
from cudalens.core.graph_types import FIRST_BAD, FIRST_NAN, WRITES, ProvenanceStep
from cudalens.core.limits import Limits
from cudalens.core.report import Evidence, Report
from cudalens.core.report_types import (
    Bounds,
    Frame,
    Hint,
    LineRef,
    Observation,
    Offender,
    Offenders,
    OpName,
    SourceSpan,
    TensorFact,
    TensorSummary,
    Violation,
)
from cudalens.diagnosis.candidates import Trial, TrialResult
from cudalens.diagnosis.diagnose import diagnose
from cudalens.diagnosis.observations import observe
from tests.builders import fact, spelled

MAX_UNIQUE, MAX_FIRST = 32, 20
TRANSFORMERS = "/site-packages/transformers/models/bert/modeling_bert.py"


class Cause(NamedTuple):
    """Evidence of one cause, and what has to be said of it."""

    evidence: Evidence
    rule: str
    """The one rule that speaks: ``observations`` where none does."""
    fix: str | None = None
    says: tuple[str, ...] = ()
    """Parts of the text."""


def syntax_of(text: str) -> CallSyntax | None:
    """Return the syntax of a call that is alone on its line."""
    try:
        node = parse_expression(text).body
    except (SyntaxError, ValueError):
        return None
    segment = ast.get_source_segment(text, node) or text
    return CallSyntax(node=node, text=segment, is_written_so="\n" not in segment)


def check_cause(cause: Cause) -> None:
    """Only its rule speaks; the text has what was observed, the fix the user's own words."""
    hints = words_of(cause.evidence)
    assert [hint.rule for hint in hints] == [cause.rule]
    check_code(hints)
    assert [text for text in cause.says if text not in hints[0].text] == []
    assert hints[0].fix == cause.fix


def check_code(hints: Iterable[Hint]) -> None:
    """A fix is one line of Python."""
    for fix in filter(None, (hint.fix for hint in hints)):
        assert "\n" not in fix
        ast.parse(fix)


class Believing(Trial):
    """A trial in which every fix succeeds: rules are looked at here, not the trying."""

    def __call__(self, fix: str) -> TrialResult:
        return TrialResult(succeeds=True)


def hints_of(evidence: Evidence) -> tuple[Hint, ...]:
    """Return the hints that an evidence carries, each fix believed; no rule may raise on it."""
    report = diagnose(evidence, Believing())
    assert report.limits == evidence.limits, report.limits
    return report.hints


def words_of(evidence: Evidence) -> tuple[Hint, ...]:
    """Return the reading, else the observations as one hint of the rule ``observations``."""
    report = diagnose(evidence, Believing())
    assert report.limits == evidence.limits, report.limits
    return report.hints or (spoken(report),)


def spoken(report: Report) -> Hint:
    """Return the first hint of a report, else its observations as one."""
    text = "; ".join(item.text for item in report.observations)
    return report.hints[0] if report.hints else Hint(rule="observations", text=text)


def summary(values: Sequence[float]) -> TensorSummary:
    finite = [value for value in values if math.isfinite(value)]
    is_whole = all(isinstance(value, int) for value in values)
    distinct = tuple(sorted({int(value) for value in finite})) if is_whole else ()
    return TensorSummary(
        min=min(finite, default=None),
        max=max(finite, default=None),
        mean=sum(finite) / len(finite) if finite else None,
        nan=sum(math.isnan(value) for value in values),
        inf=sum(math.isinf(value) for value in values),
        unique=distinct if is_whole and len(distinct) <= MAX_UNIQUE else None,
    )


def tensor(
    argument: str | None,
    expression: str | None,
    values: Sequence[float],
    shape: tuple[int, ...] | None = None,
    dtype: str | None = None,
    **facts: Any,
) -> TensorFact:
    is_whole = all(isinstance(value, int) for value in values)
    return TensorFact(
        argument=argument,
        expression=spelled(expression),
        shape=(len(values),) if shape is None else shape,
        dtype=dtype or ("int64" if is_whole else "float32"),
        device="cuda:0",
        summary=summary(values),
        **facts,
    )


def finding(
    op: str,
    fact: TensorFact,
    values: Sequence[float],
    is_bad: Callable[[float], bool],
    bounds: Bounds,
    *,
    call: str | None = None,
    api: str | None = None,
    size: int | None = None,
    others: tuple[TensorFact, ...] = (),
    scalars: Mapping[str, str] | None = None,
    library: str | None = None,
    **evidence: Any,
) -> Evidence:
    """Return the evidence of a guard that stopped ``op`` because of ``fact``."""
    bad = [
        Offender(position=at, value=value if math.isfinite(value) else str(value))
        for at, value in zip(product(*map(range, fact.shape)), values, strict=True)
        if is_bad(value)
    ]
    assert bad, "the evidence shows no offender"
    marked = bounds.also_allowed
    good = [value for value in values if not is_bad(value) and value not in marked]
    ends = dict.fromkeys((min(good), max(good)) if good else ())
    rest = " … ".join(map(str, ends)) or None
    name, _, position = (fact.argument or "").partition("[")
    frames = [Frame(file="<cell 1>", line=1, function="<module>", is_user=True, cell=1)]
    frames += [Frame(file=library, line=9, function="forward")] if library else []
    frames += [Frame(file="/site-packages/torch/nn/functional.py", line=9, function="f")]
    return Evidence(
        violation=Violation(
            guard="a_guard",
            op=op,
            overload="default",
            argument=name,
            headline="",
            explanation="",
            offenders=Offenders(
                count=len(bad),
                total=len(values),
                first=tuple(bad[:MAX_FIRST]),
                others=rest,
                allowed=sum(value in marked for value in values),
            ),
            bounds=bounds,
            is_index=size is not None and op != "aten::masked_scatter",
            size=size,
            list_position=int(position[:-1]) if position else None,
        ),
        op=OpName(name=op, overload="default", api=api),
        call=syntax_of(call or ""),
        source=SourceSpan(cell=1, line=1, column=0, text=call),
        tensors=(fact, *others),
        scalars=tuple((scalars or {}).items()),
        frames=tuple(frames),
        **evidence,
    )


def out_of_range(
    op: str,
    argument: str,
    values: Sequence[int],
    size: int,
    *,
    expression: str | None = None,
    shape: tuple[int, ...] | None = None,
    dtype: str = "int64",
    low: int = 0,
    also: tuple[int, ...] = (),
    **rest: Any,
) -> Evidence:
    """Return the evidence of integers outside ``[low, size - 1]``."""
    return finding(
        op,
        tensor(argument, expression, values, shape, dtype),
        values,
        lambda value: not low <= value < size and value not in also,
        Bounds(min=low, max=size - 1, also_allowed=also, text=f"{low} … {size - 1}"),
        size=size,
        **rest,
    )


def labels(
    values: Sequence[int],
    classes: int,
    *,
    name: str | None = "y",
    shape: tuple[int, ...] | None = None,
    ignore: int = -100,
    others: tuple[TensorFact, ...] | None = None,
    **rest: Any,
) -> Evidence:
    is_2d = shape is not None and len(shape) == 3
    scores = fact("input", f"float32[1,{classes}]", "z")
    settings: dict[str, Any] = {
        "call": f"F.cross_entropy(z, {name})",
        "api": "torch.nn.functional.cross_entropy",
        "scalars": {"weight": "None", "reduction": "1", "ignore_index": str(ignore)},
    }
    return out_of_range(
        "aten::nll_loss2d_forward" if is_2d else "aten::nll_loss_forward",
        "target",
        values,
        classes,
        expression=name,
        shape=shape,
        also=(ignore,),
        others=(scores,) if others is None else others,
        **{**settings, **rest},
    )


def lookup(
    values: Sequence[int],
    rows: int,
    *,
    name: str | None = "ids",
    path: str | None = None,
    kind: str = "Embedding",
    padding: int = -1,
    **rest: Any,
) -> Evidence:
    rest = {
        "call": f"net({name})" if name else "net(x)",
        "api": "torch.nn.functional.embedding",
        "scalars": {"padding_idx": str(padding)},
        "module_path": path,
        "module_type": kind,
        **rest,
    }
    return out_of_range("aten::embedding", "indices", values, rows, expression=name, **rest)


def cast(values: Sequence[int], rows: int, before: TensorFact) -> Evidence:
    """Return the evidence of numbers that were cast to ids in the call of an embedding."""
    return lookup(values, rows, name="x.long()", call="emb(x.long())", others=(before,))


def one_hot(values: Sequence[int], call: str) -> Evidence:
    return out_of_range(
        "aten::scatter_",
        "index",
        values,
        4,
        shape=(len(values), 1),
        call=call,
        api="torch.nn.functional.one_hot",
        scalars={"dim": "-1", "value": "1"},
        others=(tensor(None, "y", values),),
    )


def bert(values: Sequence[int], rows: int, table: str, **rest: Any) -> Evidence:
    """Return the evidence of ids looked up inside a model of transformers."""
    settings: dict[str, Any] = {
        "path": f"embeddings.{table}",
        "library": TRANSFORMERS,
        "call": "model(input_ids=ids)",
    }
    return lookup(values, rows, **{**settings, **rest})


def gathered(
    values: Sequence[int],
    size: int,
    *,
    name: str | None = None,
    line: tuple[TensorFact, ...] = (),
    call: str,
    **rest: Any,
) -> Evidence:
    shape = rest.pop("shape", (len(values), 1))
    return out_of_range(
        "aten::gather",
        "index",
        values,
        size,
        expression=name,
        shape=shape,
        call=call,
        others=line,
        api="torch.Tensor.gather",
        scalars={"dim": "1"},
        **rest,
    )


def boxes(values: Sequence[int], table: str, corners: Sequence[int]) -> Evidence:
    """Return the evidence of one column of LayoutLM's boxes; ``corners`` are all coordinates."""
    return bert(
        values,
        1024,
        table,
        name=None,
        call="model(input_ids=ids, bbox=bbox)",
        others=(
            tensor(None, "ids", [5, 6], (1, 2)),
            tensor(None, "bbox", corners, (1, len(corners) // 4, 4)),
        ),
    )


def exchanged(most: int) -> Evidence:
    """Return the evidence of columns before rows; the columns go up to ``most``."""
    image = fact("self", "float32[4,8]", "img")
    return out_of_range(
        "aten::index",
        "indices[0]",
        [7, 3],
        4,
        low=-4,
        expression="xs",
        call="img[xs, ys]",
        others=(image, tensor("indices[1]", "ys", [1, most])),
    )


def numbers(
    op: str,
    argument: str,
    values: Sequence[float],
    *,
    name: str | None = "p",
    high: float | None = 1.0,
    dtype: str = "float32",
    shape: tuple[int, ...] | None = None,
    **rest: Any,
) -> Evidence:
    top = math.inf if high is None else high
    return finding(
        op,
        tensor(argument, name, [float(value) for value in values], shape, dtype),
        [float(value) for value in values],
        lambda value: not (0 <= value <= top) or math.isinf(value),
        Bounds(min=0.0, max=high, text="0 … 1"),
        **rest,
    )


def bce(values: Sequence[float], argument: str = "self", **rest: Any) -> Evidence:
    name = "p" if argument == "self" else "t"
    settings = {
        "call": "F.binary_cross_entropy(p, t)",
        "api": "torch.nn.functional.binary_cross_entropy",
        "name": name,
    }
    return numbers("aten::binary_cross_entropy", argument, values, **{**settings, **rest})


def drawn(values: Sequence[float], **rest: Any) -> Evidence:
    settings = {"call": "torch.multinomial(p, 1)", "api": "torch.multinomial", "high": None}
    return numbers("aten::multinomial", "self", values, **{**settings, **rest})


def empty_rows() -> Evidence:
    """Return the evidence of a multinomial with one row of zeros out of two."""
    values = [0.0, 1.0, 1.0, 1.0]
    return finding(
        "aten::multinomial",
        tensor("self", "p", values, (2, 2)),
        values,
        lambda value: value == 0,
        Bounds(min=0.0, text="rows with a sum above 0 and finite"),
        call="torch.multinomial(p, 1)",
        api="torch.multinomial",
    )


def step(
    op: str | None, text: str | None = "line", note: str | None = None, line: int = 4
) -> ProvenanceStep:
    source = None if text is None else LineRef(line=line, text=text, cell=1)
    return ProvenanceStep(op=op, source=source, note=note)


def behind(evidence: Evidence, *steps: ProvenanceStep | str) -> Evidence:
    """Return the evidence with older steps behind its own, the newest first."""
    older = (step(it) if isinstance(it, str) else it for it in steps)
    return replace(evidence, provenance=(*evidence.provenance, *older))


MASK = (2, 4, 4)
SOFTMAX = step("aten::_softmax", "p = z.softmax(-1)", FIRST_NAN)
WRITTEN = step("torch.Tensor.__setitem__", "y[rows] = -1", f"{WRITES} -1")
MASKED = step("aten::masked_fill.Scalar", "z = z.masked_fill(far, -inf)", line=3)
LINEAR = step("torch.nn.functional.linear", "p = f(x)", line=3)
EXP = step("torch.Tensor.exp", "p = z.exp()", FIRST_BAD, line=3)
DIVIDED = step("torch.Tensor.rdiv", "p = 1 / counts", FIRST_BAD, line=3)
ONE_TO_TEN = [at % 10 + 1 for at in range(30)]


def ctc(values: list[int], blank: str) -> Evidence:
    """Return the evidence of labels of ``ctc_loss`` with 5 classes."""
    return out_of_range(
        "aten::_ctc_loss", "targets", values, 5, expression="y", scalars={"blank": blank}
    )


def indexed(name: str) -> Evidence:
    """Return the evidence of five positions, of which the last is the number of places."""
    return out_of_range(
        "aten::index", "indices", [1, 2, 3, 4, 5], 5, expression=name, call=f"x[{name}]"
    )


# --- observations ---------------------------------------------------------------------------------


class Bound(Trial):
    """A trial that knows where names were bound, and layers."""

    def __init__(self, **bindings: Binding) -> None:
        self.bindings = bindings

    def binding(self, expression: str, *, of_shape: bool = False) -> Binding | None:
        return self.bindings.get(expression)

    def layer(self, path: str, shape: tuple[int, ...] | None = None) -> Binding | None:
        return self.bindings.get(path)


def observed(evidence: Evidence, kind: str, trial: Trial | None = None) -> list[str]:
    """Return the texts of one kind; no observer may fail."""
    return [item.text for item in observations(evidence, trial) if item.kind == kind]


def observations(evidence: Evidence, trial: Trial | None = None) -> tuple[Observation, ...]:
    limits = Limits()
    seen = observe(evidence, trial or Trial(), limits)
    assert limits.lines == []
    return seen


def made(value: str | None, line: int = 2, **more: Any) -> Binding:
    text = None if value is None else spelled(value)
    at = SourceSpan(cell=1, line=line, end_line=line, text=value)
    return Binding(at=at, value=text, **more)


def with_offenders(evidence: Evidence, **changes: Any) -> Evidence:
    """Return the evidence of a failure in line 9, with other facts of the bad values."""
    violation = evidence.violation
    assert violation is not None
    offenders = replace(violation.offenders, **changes)
    return replace(
        evidence,
        source=SourceSpan(cell=1, line=9),
        violation=replace(violation, offenders=offenders),
    )
