"""Evidence of one failure per cause, in the form that the collectors give it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from cudalens.core.evidence_types import CallContext
from cudalens.core.report import Evidence
from cudalens.core.report_types import (
    FIRST_BAD,
    Bounds,
    CodeLine,
    Frame,
    Hint,
    LineRef,
    Offender,
    Offenders,
    OpName,
    ProvenanceStep,
    SourceSpan,
    TensorFact,
    TensorSummary,
    Violation,
)
from cudalens.diagnosis.candidates import NoTrial, Outcome
from cudalens.diagnosis.diagnose import diagnose

MAX_UNIQUE, MAX_FIRST = 32, 20
TRANSFORMERS = "/site-packages/transformers/models/bert/modeling_bert.py"


class Believing(NoTrial):
    """A trial in which every fix succeeds: rules are looked at here, not the trying."""

    def __call__(self, fix: str) -> Outcome:
        return Outcome(succeeds=True)


def hints_of(evidence: Evidence) -> tuple[Hint, ...]:
    """Return the hints that an evidence carries, each fix believed; no rule may raise on it."""
    report = diagnose(evidence, Believing())
    assert report.limits == evidence.limits, report.limits
    return report.hints


def rules_of(evidence: Evidence) -> tuple[str, ...]:
    """Return the names of the rules that give a hint, in their order."""
    return tuple(hint.rule for hint in hints_of(evidence))


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
        expression=expression,
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
    context: tuple[str, ...] = (),
    is_silent: bool = False,
    **evidence: Any,
) -> Evidence:
    """Return the evidence of a guard that stopped ``op`` because of ``fact``."""
    bad = [
        Offender(position=at, value=value if math.isfinite(value) else str(value))
        for at, value in zip(product(*map(range, fact.shape)), values, strict=True)
        if is_bad(value)
    ]
    assert bad, "the evidence shows no offender"
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
            offenders=Offenders(count=len(bad), total=len(values), first=tuple(bad[:MAX_FIRST])),
            bounds=bounds,
            is_index=size is not None and op != "aten::masked_scatter",
            size=size,
            list_position=int(position[:-1]) if position else None,
            is_silent=is_silent,
        ),
        op=OpName(name=op, overload="default", api=api),
        call_text=call,
        source=SourceSpan(
            cell=1,
            line=1,
            column=0,
            text=call,
            context=tuple(CodeLine(line=at, text=text) for at, text in enumerate(context, 1)),
        ),
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
    scores = TensorFact(argument="input", expression="z", dtype="float32", shape=(1, classes))
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
    settings: dict[str, Any] = {
        "call": f"net({name})" if name else "net(x)",
        "api": "torch.nn.functional.embedding",
        "scalars": {"padding_idx": str(padding)},
        "module_path": path,
        "module_type": kind,
    }
    return out_of_range(
        "aten::embedding", "indices", values, rows, expression=name, **{**settings, **rest}
    )


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
        "libraries": ("transformers",),
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


def empty_rows(dtype: str = "float32") -> Evidence:
    """Return the evidence of a multinomial with one row of zeros out of two."""
    return finding(
        "aten::multinomial",
        TensorFact(
            argument="self",
            expression="p",
            shape=(2, 2),
            dtype=dtype,
            summary=TensorSummary(min=0.0, max=1.0, nan=0, inf=0),
        ),
        [0.0, 1.0, 1.0, 1.0],
        lambda value: value == 0,
        Bounds(min=0.0, text="rows with a sum above 0 and finite"),
        call="torch.multinomial(p, 1)",
        api="torch.multinomial",
    )


def step(op: str, text: str, note: str | None = None, line: int = 4) -> ProvenanceStep:
    return ProvenanceStep(op=op, source=LineRef(line=line, text=text, cell=1), note=note)


MASK = (2, 4, 4)
EDGES = tensor(None, "edge_index", [10, 57, 33, 41, 42, 57], (2, 3))
SOFTMAX = ProvenanceStep(
    op="aten::_softmax", source=LineRef(line=4, text="p = z.softmax(-1)", cell=1), note=FIRST_BAD
)
MASKED = step("aten::masked_fill.Scalar", "z = z.masked_fill(far, -inf)", line=3)
ONE_TO_TEN = [at % 10 + 1 for at in range(30)]
GARBAGE = 4607182418800017408

CAUSES: dict[str, Callable[[], Evidence]] = {
    "one_based_labels": lambda: labels(ONE_TO_TEN, 10),
    "other_numbers": lambda: labels([10, 20, 30, 10], 3),
    "label_equals_classes": lambda: labels([0, 3, 10, 7], 10),
    "label_beyond_classes": lambda: labels([0, 3, 13, 7], 10),
    "binary_labels_one_output": lambda: labels([0, 1, 1, 0], 1),
    "minus_one": lambda: labels([3, -1, 2, -1], 10),
    "signs": lambda: labels([1, -1, 1, -1, 1, 1, -1, -1], 2),
    "scale": lambda: labels([-2, 0, 2, 1, -1], 5),
    "one_outlier": lambda: labels([0, 1, 2, 6], 3),
    "padded_with_classes": lambda: labels([0, 1, 3, 3, 2, 0, 1, 3], 3, shape=(2, 1, 4)),
    "beyond_vocabulary": lambda: labels(
        [7, 3, 50],
        50,
        call="gpt(ids, labels=y)",
        library=TRANSFORMERS,
        module_type="GPT2LMHeadModel",
    ),
    "minus_100": lambda: labels([3, -100, 2, -100], 10, ignore=255),
    "void_255": lambda: labels([0, 3, 20, 255] * 8, 21, name="mask", shape=MASK),
    "mask_0_255": lambda: labels([0, 255] * 16, 2, name="mask", shape=MASK),
    "gray_mask": lambda: labels([0, 17, 90, 200] * 8, 3, name="mask", shape=MASK),
    "uint8_labels": lambda: labels([1, 2, 255], 10, dtype="uint8"),
    "uint8_arithmetic": lambda: labels(
        [0, 255, 3],
        10,
        name="(y - 1).long()",
        others=(tensor(None, "y", [1, 0, 4], dtype="uint8"),),
    ),
    "changed_labels": lambda: replace(
        labels([0, 255] * 16, 10),
        op=OpName(name="aten::nll_loss_backward", api="torch.Tensor.backward"),
        phase="backward",
    ),
    "one_hot": lambda: one_hot([0, 3, 5], "F.one_hot(y, num_classes=4)"),
    "one_hot_mark": lambda: one_hot([0, -1, 3], "F.one_hot(y, 4)"),
    "ignored_as_id": lambda: bert(
        [5, 6, -100, 5, -100, -100],
        100,
        "embed_tokens",
        path="model.decoder.embed_tokens",
        name="labels",
        shape=(2, 3),
        padding=1,
        call="model(input_ids=ids, decoder_input_ids=labels)",
    ),
    "minus_one_padding": lambda: bert([5, 6, -1, 5, -1, -1], 100, "embed_tokens", shape=(2, 3)),
    "added_tokens": lambda: bert([5, 100, 7, 8], 100, "word_embeddings", shape=(2, 2)),
    "other_vocabulary": lambda: bert([5, 4711, 7, 8], 100, "word_embeddings", shape=(2, 2)),
    "padding": lambda: bert(
        [5, 6, 7, 100, 100, 5, 6, 7, 8, 100], 100, "word_embeddings", shape=(2, 5)
    ),
    "table_too_small": lambda: lookup([0, 5, 12], 10, name="user", path="users"),
    "one_based_ids": lambda: lookup([1, 2, 3, 4, 5], 5, name="movie", path="movies"),
    "blank": lambda: out_of_range(
        "aten::_ctc_loss",
        "targets",
        [1, 2, 3, 4, 5],
        5,
        expression="y",
        call="F.ctc_loss(p, y, steps, lengths)",
        api="torch.nn.functional.ctc_loss",
        scalars={"blank": "0"},
    ),
    "positions": lambda: bert(
        [*range(20)], 16, "wpe", path="transformer.wpe", name=None, shape=(1, 20)
    ),
    "position_offset": lambda: bert(
        [*range(2, 34)], 32, "position_embeddings", name=None, shape=(1, 32), padding=1
    ),
    "generation": lambda: bert(
        [16, 16],
        16,
        "wpe",
        path="transformer.wpe",
        name=None,
        shape=(2, 1),
        call="gpt.generate(ids, max_new_tokens=30)",
        others=(tensor(None, "ids", [5, 6, 7, 8] * 2, (2, 4)),),
    ),
    "odd_positions": lambda: lookup(
        [3, 9, 40], 32, name="position_ids", path="positions", shape=(1, 3)
    ),
    "boxes_pixels": lambda: boxes(
        [50, 1500], "x_position_embeddings", [9, 9, 50, 50, 9, 9, 1500, 9]
    ),
    "boxes_negative": lambda: boxes(
        [9, -5], "x_position_embeddings", [9, 9, 50, 50, -5, 9, 50, 50]
    ),
    "boxes_inverted": lambda: boxes([40, -5], "w_position_embeddings", [9, 9, 49, 50, 9, 9, 4, 50]),
    "segments": lambda: bert(
        [0, 1, 2, 2],
        2,
        "token_type_embeddings",
        name="seg",
        shape=(1, 4),
        call="model(input_ids=ids, token_type_ids=seg)",
    ),
    "edges": lambda: out_of_range(
        "aten::index_select",
        "index",
        [10, 57, 33],
        5,
        call="x.index_select(0, edge_index[0])",
        others=(EDGES,),
    ),
    "actions": lambda: gathered(
        [0, 1, 2, 3, 4, 0],
        4,
        call="q(s).gather(1, actions.unsqueeze(1))",
        line=(tensor(None, "actions", [0, 1, 2, 3, 4, 0]),),
    ),
    "length": lambda: out_of_range(
        "aten::index",
        "indices[1]",
        [3, 7, 1],
        7,
        low=-7,
        expression="lengths",
        call="x[rows, lengths]",
    ),
    "other_order": lambda: out_of_range(
        "aten::index",
        "indices[0]",
        [7, 3],
        4,
        low=-4,
        expression="xs",
        call="img[xs, ys]",
        others=(
            TensorFact(argument="self", expression="img", shape=(4, 8), dtype="float32"),
            tensor("indices[1]", "ys", [1, 2]),
        ),
    ),
    "offsets": lambda: out_of_range(
        "aten::_embedding_bag", "offsets", [0, 5], 5, expression="at", call="bag(ids, at)"
    ),
    "gather_mark": lambda: gathered(
        [0, -100, 3], 5, name="y[:, None]", call="z.gather(1, y[:, None])"
    ),
    "flat": lambda: out_of_range(
        "aten::index",
        "indices[0]",
        [1, 12],
        12,
        low=-12,
        call="flat[rows * width + cols]",
        others=(
            TensorFact(argument="self", expression="flat", shape=(12,), dtype="float32"),
            tensor(None, "rows", [0, 2]),
            tensor(None, "cols", [1, 4]),
        ),
    ),
    "quantile": lambda: out_of_range(
        "aten::gather", "index", [5, 13], 10, api="torch.quantile", call="torch.quantile(x, q)"
    ),
    "garbage": lambda: lookup([5, GARBAGE, 7], 100, path="word_embeddings"),
    "nan_cast": lambda: cast([0, -(1 << 63)], 10, tensor(None, "x", [0.25, math.nan])),
    "float_ids": lambda: cast([0, -12], 10, tensor(None, "x", [0.25, -12.5])),
    "half_ids": lambda: cast([5, 50272], 50257, tensor(None, "x", [5.0, 50272.0], dtype="float16")),
    "shift_on_line": lambda: labels(
        [1, 5, 10], 10, name="y + 1", others=(tensor(None, "y", [0, 4, 9]),)
    ),
    "shift_before": lambda: labels(
        [1, 5, 10], 10, provenance=(step("aten::add.Tensor", "y = y + 1"),)
    ),
    "shift_below": lambda: labels(
        [-1, 3, 8], 10, provenance=(step("aten::sub.Tensor", "y = y - 1"),)
    ),
    "image_tokens": lambda: finding(
        "aten::masked_scatter",
        tensor("mask", "mask", [1, 1, 1, 1], dtype="bool"),
        [1, 1, 1, 1],
        lambda value: True,
        Bounds(min=0, max=2, text="at most 2 selected"),
        size=2,
        call="e.masked_scatter(mask, feats)",
        others=(tensor("source", "feats", [1.0, 2.0], (1, 2)),),
        libraries=("transformers",),
    ),
    "bce_logits": lambda: bce([-2.5, 0.5, 3.0]),
    "bce_rounding": lambda: bce([0.25, 1.0000001]),
    "bce_mask_255": lambda: bce([0.0, 255.0], "target"),
    "bce_labels": lambda: bce([-1.0, 1.0], "target"),
    "bce_nan": lambda: bce([0.5, math.nan]),
    "drawn_logits": lambda: drawn([-2.5, 0.5, 3.0]),
    "drawn_cold": lambda: drawn(
        [math.nan, 0.5],
        call="torch.multinomial(torch.softmax(z / temperature, -1), 1)",
        call_context=CallContext(temperatures=(("temperature", 0.0),)),
    ),
    "drawn_nan": lambda: drawn([math.nan, 0.5], provenance=(SOFTMAX, MASKED)),
    "drawn_inf": lambda: drawn([math.inf, 0.5], dtype="float16"),
    "drawn_nothing": lambda: replace(empty_rows(), provenance=(SOFTMAX, MASKED)),
}
"""Name of a cause to what builds its evidence."""
