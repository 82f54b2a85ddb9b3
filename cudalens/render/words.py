"""The words of a report, shared by every view: short phrases made from its facts alone.

What users wrote is made harmless here too: no text of theirs reaches a terminal or a page with
control characters in it.
"""

from __future__ import annotations

import math
import unicodedata
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

# Joiners carry meaning in emoji and in Indic and Persian writing, and move nothing else.
_KEPT = {"\u200c", "\u200d"}
MAX_LENGTH = 4000
"""No view draws more of one text; each cuts far earlier and says so."""
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def _visible(char: str) -> str:
    code = ord(char)
    if code < 0x20:  # the C0 block has its own pictures
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\ufffd"


def visible(text: str) -> str:
    """Replace each control or format character by one visible sign; line breaks and tabs stay.

    One sign stands for one character, so columns of the source still fit.
    """
    text = text[:MAX_LENGTH]
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char
        if char in "\n\t" or char in _KEPT or unicodedata.category(char) not in _HIDDEN
        else _visible(char)
        for char in text
    )


def one_line(text: str) -> str:
    """Return ``text`` on one line: as :func:`visible`, with line breaks and tabs as spaces."""
    return visible(text).replace("\n", " ").replace("\t", " ")


def clip(text: str, limit: int) -> str:
    """Cut ``text`` to ``limit`` characters, the last of them an ellipsis when something is lost."""
    return text if len(text) <= limit else text[: max(limit - 1, 0)] + "…"


def clip_left(text: str, limit: int) -> str:
    """Cut ``text`` at its front: the end of a path or a module name tells most."""
    return text if len(text) <= limit else "…" + text[-max(limit - 1, 1) :]


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


def format_number(value: Number) -> str:
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


def format_dtype(name: str) -> str:
    """Return the short form that torch's own traces use: ``float32`` is ``f32``."""
    plain = name.removeprefix("torch.")
    for long, short in _SHORT_DTYPES.items():
        if plain.startswith(long):
            return one_line(short + plain.removeprefix(long))
    return one_line(plain)


def format_shape(sizes: Sequence[int] | None) -> str:
    """Return a shape as ``[32, 10]``."""
    return "" if sizes is None else f"[{', '.join(str(size) for size in sizes)}]"


def format_tensor_type(fact: TensorFact) -> str:
    """Return dtype and shape together: ``f32[32, 10]``."""
    return format_dtype(fact.dtype) + format_shape(fact.shape)


def tensor_name(fact: TensorFact) -> str:
    """Return the user's expression for a tensor, else its schema name."""
    return one_line(fact.expression or fact.argument or "unnamed")


def format_argument(report: Report) -> str:
    """Return the argument at fault: the user's expression, then the schema's name."""
    name, own = one_line(report.argument or ""), one_line(report.expression or "")
    return f"{own} ({name})" if own and name and own != name else own or name


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
    label = format_tensor_type(fact)
    if device and fact.device:
        label += f" {one_line(fact.device)}"
    if is_at_fault(report, fact) and report.offenders and report.offenders.count:
        label += f", {report.offenders.count} bad"
    return label


def devices_differ(report: Report) -> bool:
    """Return whether the tensors lie on more than one device."""
    return len({fact.device for fact in report.tensors if fact.device}) > 1


def format_place(where: SourceSpan | LineRef | None, *, file: bool = True) -> str:
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


def format_line(ref: LineRef | None) -> str:
    """Return a line of a list: its place and its text."""
    if ref is None:
        return ""
    return " ".join(filter(None, (format_place(ref), one_line((ref.text or "").strip()))))


def format_api(api: str | None) -> str:
    """Return the name under which people know a function: ``F.cross_entropy``."""
    text = one_line(api or "")
    for long, short in _API_PREFIXES.items():
        if text.startswith(long):
            return short + text.removeprefix(long)
    return text


def format_op(op: OpName) -> str:
    """Return the schema name, with the overload where it is not the default."""
    if not op.name:
        return ""
    plain = op.overload in (None, "", "default")
    return one_line(op.name if plain else f"{op.name}.{op.overload}")


def format_op_path(op: OpName) -> str:
    """Return the way from the function that was called to the op that failed."""
    names = dict.fromkeys(filter(None, (format_api(op.api), format_op(op))))
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


def format_bounds(report: Report) -> str:
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
        allowed = [
            f"at most {format_number(high)}" if low is None else f"at least {format_number(low)}"
        ]
    else:
        allowed = [f"{format_number(low)} … {format_number(high)}"]
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


def format_step(item: ProvenanceStep) -> str:
    """Return one step of the way of the bad values."""
    where = format_line(item.source) or one_line(item.op or "")
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


_PAGES = "https://github.com/cudalens/cudalens/blob/main/docs/errors/"
_ASSERT_PAGES = (
    ("< n_classes", "n-classes"),
    ("srcSelectDimSize", "src-index-select-dim-size"),
    ("vectorized gather kernel", "vectorized-gather-kernel"),
    ("index out of bounds", "index-out-of-bounds"),
    ("input_val", "input-val-zero-one"),
    ("probability tensor contains", "probability-tensor-inf-nan"),
)
"""What an assert's text holds, with the page of ``docs/errors`` that explains it."""


def error_page(report: Report) -> str:
    """Return the address of the page on this error, empty when there is none."""
    if report.kind not in ("device_assert", "cuda_error") or not report.device_text:
        return ""
    printed = report.device_text
    found = (page for text, page in _ASSERT_PAGES if text in printed)
    general = "device-side-assert-triggered" if report.kind == "device_assert" else ""
    page = next(found, general)
    return f"{_PAGES}{page}.md" if page else ""
