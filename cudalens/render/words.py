"""The words of a report, shared by every view: short phrases made from its facts alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from cudalens.core.report import (
    LineRef,
    Number,
    OpName,
    ProvenanceStep,
    Report,
    SourceSpan,
    TensorFact,
)
from cudalens.render.safe import one_line

Tone = Literal["ok", "bad", "warn", "plain"]

KINDS: dict[str, str] = {
    "device_assert": "device-side assert",
    "host_error": "error raised on the host",
    "autograd_error": "autograd error",
    "nonfinite": "non-finite values",
    "silent": "silently wrong result",
    "cuda_error": "CUDA error",
    "python_error": "error inside torch",
}

_SHORT_DTYPES = {
    "bfloat": "bf",
    "float": "f",
    "uint": "u",
    "int": "i",
    "complex": "c",
}

_API_PREFIXES = {"torch.nn.functional.": "F.", "torch.Tensor.": "Tensor.", "torch.nn.": "nn."}

REHEARSAL = "Rehearsal device. No GPU here."


class State(NamedTuple):
    """What is known of the CUDA context, and how it should strike the reader."""

    text: str
    tone: Tone


def tone(report: Report) -> Tone:
    """Return ``warn`` for a silent finding and ``bad`` for all else."""
    return "warn" if report.kind == "silent" else "bad"


def sign(report: Report) -> str:
    """Return the mark that opens a report."""
    return "⚠" if report.kind == "silent" else "✗"


def number(value: Number) -> str:
    """Return a number in short; NaN and the infinities read the same from a file as from memory."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    return one_line(str(value))


def finite(value: Number) -> float | None:
    """Return ``value`` as a float for drawing, ``None`` when it is missing or not finite."""
    try:
        drawn = float(value) if value is not None else math.nan
    except (ValueError, OverflowError):
        return None
    return drawn if math.isfinite(drawn) else None


def dtype(name: str) -> str:
    """Return the short form that torch's own traces use: ``float32`` is ``f32``."""
    plain = name.removeprefix("torch.")
    for long, short in _SHORT_DTYPES.items():
        if plain.startswith(long):
            return one_line(short + plain.removeprefix(long))
    return one_line(plain)


def shape(sizes: Sequence[int] | None) -> str:
    """Return a shape as ``[32, 10]``."""
    return "" if sizes is None else f"[{', '.join(str(size) for size in sizes)}]"


def tensor_type(fact: TensorFact) -> str:
    """Return dtype and shape together: ``f32[32, 10]``."""
    return dtype(fact.dtype) + shape(fact.shape)


def tensor_name(fact: TensorFact) -> str:
    """Return the user's expression for a tensor, else its schema name."""
    return one_line(fact.expression or fact.argument or "unnamed")


def is_at_fault(report: Report, fact: TensorFact) -> bool:
    """Return whether this tensor is the argument that the report accuses."""
    if report.argument is None or fact.argument is None:
        return False
    if fact.argument == report.argument:
        return True
    # One of a list, as ``indices[1]``: the user's expression says which, unless it stands twice.
    listed = [
        item.argument
        for item in report.tensors
        if report.expression is not None
        and item.expression == report.expression
        and (item.argument or "").startswith(f"{report.argument}[")
    ]
    return listed == [fact.argument]


def tensor_label(report: Report, fact: TensorFact, *, device: bool) -> str:
    """Return the label that hangs under an expression: ``i64[32] cuda:0, 3 bad``."""
    label = tensor_type(fact)
    if device and fact.device:
        label += f" {one_line(fact.device)}"
    if is_at_fault(report, fact) and report.offenders and report.offenders.count:
        label += f", {report.offenders.count} bad"
    return label


def devices_differ(report: Report) -> bool:
    """Return whether the tensors lie on more than one device."""
    return len({fact.device for fact in report.tensors if fact.device}) > 1


def place(where: SourceSpan | LineRef | None, *, file: bool = True) -> str:
    """Return ``In [7] line 12`` or ``train.py line 12``, as much of it as is known."""
    if where is None:
        return ""
    parts = []
    if where.cell is not None:
        parts.append(f"In [{where.cell}]")
    elif where.file and file:
        parts.append(one_line(where.file.replace("\\", "/").rsplit("/", 1)[-1]))
    if where.line is not None:
        parts.append(f"line {where.line}")
    return " ".join(parts)


def spot(ref: LineRef | None) -> str:
    """Return a line of a list: its place and its text."""
    if ref is None:
        return ""
    return " ".join(filter(None, (place(ref), one_line((ref.text or "").strip()))))


def short_api(api: str | None) -> str:
    """Return the name under which people know a function: ``F.cross_entropy``."""
    text = one_line(api or "")
    for long, short in _API_PREFIXES.items():
        if text.startswith(long):
            return short + text.removeprefix(long)
    return text


def op_name(op: OpName) -> str:
    """Return the schema name, with the overload where it is not the default."""
    if not op.name:
        return ""
    plain = op.overload in (None, "", "default")
    return one_line(op.name if plain else f"{op.name}.{op.overload}")


def op_path(op: OpName) -> str:
    """Return the way from the function that was called to the op that failed."""
    names = dict.fromkeys(filter(None, (short_api(op.api), op_name(op))))
    return " → ".join(names)


def bad_count(report: Report) -> str:
    """Return ``3 of 32 values are bad``, empty when there was nothing to count."""
    found = report.offenders
    if found is None or not found.count or found.total == 1:
        return ""
    verb = "is" if found.count == 1 else "are"
    return f"{found.count} of {found.total} values {verb} bad"


def certainty(report: Report) -> str:
    """Return the reservation that a finding carries, empty when it is proven."""
    return {"likely": "likely, not proven", "unknown": "cause not established"}.get(
        report.certainty, ""
    )


def bounds_text(report: Report) -> str:
    """Return the allowed values as text, empty when they are not known."""
    bounds = report.bounds
    if bounds is None:
        return ""
    if bounds.text:
        return one_line(bounds.text)
    low, high = bounds.min, bounds.max
    if low is None and high is None:
        allowed = []
    elif low is None or high is None:
        allowed = [f"at most {number(high)}" if low is None else f"at least {number(low)}"]
    else:
        allowed = [f"{number(low)} … {number(high)}"]
    return " or ".join([*allowed, *map(str, bounds.also_allowed)])


def context_state(report: Report) -> State | None:
    """Say whether CUDA lives, ``None`` when that was not established."""
    if report.context_usable is False:
        return State("CUDA is gone: restart the kernel", "bad")
    if report.context_usable is None:
        return State("nothing was launched", "plain") if report.prevented else None
    if report.kind == "silent":
        return State("no error will be raised", "warn")
    return State("CUDA is fine" + (": nothing was launched" if report.prevented else ""), "ok")


def cuda_line(report: Report) -> str:
    """Return the state of CUDA and what it printed, or would have printed, as one sentence or
    two.
    """
    state = context_state(report)
    said = state.text.removeprefix("CUDA ") if state else ""
    if not report.device_text:
        return said
    lead = "It would have stopped with: " if report.prevented else "It printed: "
    printed = lead + one_line(report.device_text.strip())
    return f"{said}. {printed}" if said else printed


def replay_line(report: Report) -> str:
    """Return what the CPU said to the same call, empty when nothing was tried or told."""
    replay = report.replay
    if replay.outcome == "raised":
        return one_line(": ".join(filter(None, (replay.exception, replay.message))))
    if replay.outcome == "returned":
        return "returned a result for the same arguments: no error on the CPU"
    return one_line(f"not replayed: {replay.reason}") if replay.reason else ""


def step(item: ProvenanceStep) -> str:
    """Return one step of the way of the bad values."""
    where = spot(item.source) or one_line(item.op or "")
    note = one_line(item.note or "")
    return f"{where} ({note})" if where and note else where or note


def way(report: Report) -> tuple[ProvenanceStep, ...]:
    """Return the way of the bad values with the steps of one line, one after the other, as one."""
    found: list[ProvenanceStep] = []
    for item in report.provenance:
        if found and item.source is not None and found[-1].source == item.source:
            last = found[-1]
            found[-1] = replace(last, note=last.note or item.note)
        else:
            found.append(item)
    return tuple(found)


def environment(report: Report) -> tuple[tuple[str, str], ...]:
    """Return what is known of the surroundings, by name."""
    env = report.environment
    known = (
        ("device", env.device),
        ("torch", env.torch),
        ("CUDA", env.cuda),
        ("Python", env.python),
        ("cudalens", env.cudalens),
        ("rank", None if env.rank is None else str(env.rank)),
    )
    return tuple((name, one_line(value)) for name, value in known if value)
