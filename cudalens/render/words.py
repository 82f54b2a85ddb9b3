"""The words of a report, shared by all views: short phrases made from its facts.

Users' texts are sanitized here, too: no control character reaches a terminal or a page.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple, TypeVar

from cudalens.core import error_pages
from cudalens.core.api_names import stem_of
from cudalens.core.graph_types import FIRST_BAD, FIRST_NAN
from cudalens.core.next_steps import NextSteps
from cudalens.core.report import (
    Bounds,
    GraphNode,
    HistoryEntry,
    LineRef,
    Number,
    Offender,
    OpName,
    ProvenanceStep,
    RankResult,
    Report,
    SourceSpan,
    TensorFact,
    format_count,
)
from cudalens.core.report_types import format_shape, ravel, unravel
from cudalens.core.torch_functions import Trait, stems

# Joiners have a meaning in emoji and in Indic and Persian scripts, and move no other text.
_KEPT = {"\u200c", "\u200d"}
MAX_LENGTH = 4000
"""No view draws more of one text; each clips far earlier, visibly."""
_SIGNS = {"\x7f": "\u2421"}
_BEGINNINGS = stems(Trait.FACTORY) | stems(Trait.FROM_PYTHON) | stems(Trait.FILLS)
_BEGINNINGS |= stems(Trait.RENEWS, without=Trait.VIEW)
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def _visible(char: str) -> str:
    if char in "\n\t" or char in _KEPT or unicodedata.category(char) not in _HIDDEN:
        return char
    # Unicode has pictures for the C0 control characters.
    return chr(0x2400 + ord(char)) if char < " " else _SIGNS.get(char, "\ufffd")


def visible(text: str) -> str:
    """Replace each control or format character by one visible sign, except line breaks and tabs.

    One sign for each character, so that source columns stay valid.
    """
    text = text[:MAX_LENGTH]
    if text.isprintable():
        return text
    return "".join(map(_visible, text))


def one_line(text: str) -> str:
    """Return ``text`` on one line: as :func:`visible`, with line breaks and tabs as spaces."""
    return visible(text).replace("\n", " ").replace("\t", " ")


def clip(text: str, limit: int) -> str:
    """Cut ``text`` to ``limit`` characters, with an ellipsis at the end if it was longer."""
    return text if len(text) <= limit else text[: max(limit - 1, 0)] + "…"


def elide(text: str, limit: int) -> str:
    """Cut ``text`` in its middle, because its start and end say most."""
    if len(text) <= limit:
        return text
    end = (limit - 1) // 2
    return f"{text[: limit - 1 - end]}…{text[-end:]}"


KINDS: dict[str, str] = {
    "device_assert": "device-side assert",
    "host_error": "error raised on the host",
    "autograd_error": "autograd error",
    "nonfinite": "non-finite values",
    "silent": "silently wrong result",
    "cuda_error": "CUDA error",
    "python_error": "error inside torch",
}

_SHORT_DTYPES = {"bfloat": "bf", "float": "f", "uint": "u", "int": "i", "complex": "c"}

_API_PREFIXES = {"torch.nn.functional.": "F.", "torch.Tensor.": "Tensor.", "torch.nn.": "nn."}

REHEARSAL = "Rehearsal device. No GPU here."


_Holder = TypeVar("_Holder", Report, GraphNode, HistoryEntry)


def with_module_names(report: Report) -> Report:
    """Return the report with the model's variable in its module paths, if proven."""
    names = dict(report.graph.module_names)
    if not names:
        return report

    def named(item: _Holder) -> _Holder:
        path = names.get(item.module_path or "")
        return item if path is None else replace(item, module_path=path)

    nodes = tuple(map(named, report.graph.nodes))
    graph = replace(report.graph, nodes=nodes, module_names=())
    history = tuple(map(named, report.history))
    return replace(named(report), graph=graph, history=history)


def module_types(report: Report) -> Mapping[str, str]:
    """Return the class of each module path in the history, if it is unique."""
    types: dict[str, set[str]] = {}
    for entry in report.history:
        if entry.module_path and entry.module_type:
            types.setdefault(one_line(entry.module_path), set()).add(entry.module_type)
    return {path: one_line(*kinds) for path, kinds in types.items() if len(kinds) == 1}


def format_number(value: Number) -> str:
    """Return a short form of a number; NaN and infinity may be strings, as in a file."""
    if value is None:
        return "–"
    if not isinstance(value, float):
        return one_line(str(value))
    text = f"{value:.6g}"
    # 1.0000001 is not 1. NaN and infinity are no integers.
    is_other = abs(value) < 1e4 and float(text).is_integer() and not value.is_integer()
    return f"{value:.9g}" if is_other else text


def finite(value: Number) -> float | None:
    """Return ``value`` as a float for drawing, ``None`` if it is missing or not finite."""
    try:
        drawn = float(value) if value is not None else math.nan
    except (ValueError, OverflowError):
        return None
    return drawn if math.isfinite(drawn) else None


def format_dtype(name: str) -> str:
    """Return the short form from torch's traces: ``f32`` for ``float32``."""
    return one_line(_shortened(name.removeprefix("torch."), _SHORT_DTYPES))


def _shortened(text: str, prefixes: Mapping[str, str]) -> str:
    """Return ``text`` with its first matching prefix replaced by the short form."""
    long = next(filter(text.startswith, prefixes), "")
    return prefixes.get(long, "") + text.removeprefix(long)


def format_tensor_type(fact: TensorFact) -> str:
    """Return dtype and shape: ``f32[32, 10]``."""
    return format_dtype(fact.dtype) + format_shape(fact.shape)


def tensor_name(fact: TensorFact) -> str:
    """Return the user's expression for a tensor, else its schema name."""
    return one_line(fact.expression or fact.argument or "unnamed")


def is_at_fault(report: Report, fact: TensorFact) -> bool:
    """Return whether this tensor is the argument at fault."""
    if report.argument is None:
        return False
    if fact.argument == report.argument:
        return True
    # An item of a list, as ``indices[1]``: the expression identifies it, unless it occurs twice.
    listed = [
        item.argument
        for item in report.tensors
        if report.expression is not None
        and item.expression == report.expression
        and (item.argument or "").startswith(f"{report.argument}[")
    ]
    return listed == [fact.argument]


def tensor_label(report: Report, fact: TensorFact) -> str:
    """Return the label of an expression: ``i64[32], 3 bad``, with the device if they differ."""
    label = format_tensor_type(fact)
    devices = {item.device for item in report.tensors if item.device and item.argument}
    if fact.device and len(devices) > 1:
        label += f" {one_line(fact.device)}"
    is_bad = is_at_fault(report, fact) or fact.bad_at is not None
    # If the sum of a row is bad, its elements are not.
    is_of_elements = report.offenders and report.offenders.total >= math.prod(fact.shape)
    if is_bad and report.offenders and report.offenders.count and is_of_elements:
        label += f", {report.offenders.count} bad"
    return label


def format_place(where: SourceSpan | LineRef | None) -> str:
    """Return ``In [7] line 12`` or ``train.py:12``, as far as known."""
    if where is None:
        return ""
    file = place_name(None, where.file) or None
    return LineRef(line=where.line, cell=where.cell, file=file).where


def format_line(ref: SourceSpan | LineRef | None) -> str:
    """Return a place and the text of its line."""
    if ref is None:
        return ""
    return " ".join(filter(None, (format_place(ref), one_line((ref.text or "").strip()))))


def format_api(api: str | None) -> str:
    """Return the usual name of a function: ``F.cross_entropy``."""
    return _shortened(one_line(api or ""), _API_PREFIXES)


def format_op(op: OpName) -> str:
    """Return the schema name, with the overload unless it is the default."""
    if not op.name:
        return ""
    plain = op.overload in (None, "", "default")
    return one_line(op.name if plain else f"{op.name}.{op.overload}")


def format_op_path(op: OpName) -> str:
    """Return the called function and the op that failed in it."""
    names = dict.fromkeys(filter(None, (format_api(op.api), format_api(format_op(op)))))
    return " → ".join(names)


def place_name(cell: int | None, file: str | None) -> str:
    """Return the name of a cell or a file: ``In [4]``, ``train.py``."""
    if cell is not None:
        return f"In [{cell}]"
    return one_line((file or "").replace("\\", "/").rsplit("/", 1)[-1])


def says_bounds(report: Report) -> bool:
    """Return whether the headline contains the allowed interval already."""
    bounds = report.bounds
    if bounds is None or bounds.min is None or bounds.max is None:
        return bounds is not None and bool(bounds.text) and str(bounds.text) in report.headline
    return f"{format_number(bounds.min)} … {format_number(bounds.max)}" in report.headline


def bad_count(report: Report) -> str:
    """Return ``3 of 32 values are bad``, empty if an observation has the count."""
    offenders = report.offenders
    if offenders is None or not offenders.count or offenders.total == 1:
        return ""
    if any(item.kind == "values" for item in report.observations):
        return ""
    verb = "is" if offenders.count == 1 else "are"
    others = f", all others {one_line(offenders.others)}" if offenders.others else ""
    return f"{offenders.count} of {offenders.total} values {verb} bad{others}"


def earlier_calls(report: Report) -> str:
    """Return ``41 earlier calls of this line: 0 … 9``, empty without earlier calls."""
    seen = report.seen_before
    if seen is None or seen.min is None or seen.max is None:
        return ""
    calls = format_count(seen.calls, "earlier call")
    return f"{calls} of this line: {format_number(seen.min)} … {format_number(seen.max)}"


def limits_of(bounds: Bounds | None) -> tuple[float | None, float | None]:
    """Return the smallest and the largest allowed value, ``None`` for a missing bound."""
    return (finite(bounds.min), finite(bounds.max)) if bounds else (None, None)


def certainty(report: Report) -> str:
    """Return the certainty of a finding in words, empty if it is proven."""
    return {"likely": "likely cause", "unknown": "cause not established"}.get(report.certainty, "")


def format_bounds(report: Report) -> str:
    """Return the allowed values as text, empty if unknown."""
    bounds = report.bounds
    if bounds is None:
        return ""
    if bounds.text:
        return one_line(bounds.text)
    ends = ("at least", bounds.min), ("at most", bounds.max)
    allowed = [f"{side} {format_number(end)}" for side, end in ends if end is not None]
    if len(allowed) == len(ends):
        allowed = [f"{format_number(bounds.min)} … {format_number(bounds.max)}"]
    return " or ".join([*allowed, *map(str, bounds.also_allowed)])


def bad_place(report: Report, item: Offender) -> str:
    """Return the position of a bad value in the user's tensor.

    ``F.cross_entropy`` passes targets ``[N, L]`` to its op as ``[N, 1, L]``.
    """
    typed = next((fact for fact in report.tensors if fact.bad_at is not None), None)
    passed = next((fact for fact in report.tensors if is_at_fault(report, fact)), None)
    if typed is None or passed is None or len(item.position) != len(passed.shape):
        return format_shape(item.position)
    return format_shape(unravel(ravel(item.position, passed.shape), typed.shape))


def replay_line(report: Report) -> str:
    """Return the CPU's message for the same call, empty if there is none."""
    replay = report.replay
    if replay.outcome == "raised":
        return one_line(": ".join(filter(None, (replay.exception, replay.message))))
    if replay.outcome == "returned":
        return "returned a result for the same arguments: no error on the CPU"
    return one_line(f"not replayed: {replay.reason}") if replay.reason else ""


def format_step(item: ProvenanceStep) -> str:
    """Return one provenance step in words."""
    where = format_line(item.source) or one_line(item.op or "")
    note = one_line(item.note or "")
    return f"{where} ({note})" if where and note else where or note


def way(report: Report) -> tuple[ProvenanceStep, ...]:
    """Return the provenance, with consecutive steps of one line merged.

    A step on the failing line is left out if there is nothing else to say about it.
    """
    here = None if report.source is None else report.source.ref
    steps: list[ProvenanceStep] = []
    for item in report.provenance:
        if steps and item.source is not None and steps[-1].source == item.source:
            last = steps[-1]
            steps[-1] = replace(last, note=last.note or item.note)
        else:
            steps.append(item)
    plain = (None, FIRST_BAD, FIRST_NAN)
    return tuple(item for item in steps if item.source != here or item.note not in plain)


def is_beginning(step: ProvenanceStep) -> bool:
    """Return whether a step starts with new values or memory, so that nothing passes through it."""
    op, stem = step.op or "", stem_of(step.op or "")
    is_like = stem.startswith("new_") or stem.endswith("_like")
    return is_like or stem in _BEGINNINGS or op.startswith("torch.nn.init.")


def ranks_line(report: Report) -> str:
    """Return the rank of the report: ``rank 1 of 4 (rank 3 failed too)``."""
    failures = [item for item in report.ranks if item.report is not None and not item.outcome]
    names = [item.name.split() for item in failures]
    if len({kind for kind, _ in names}) != 1:
        return ""
    facts = attrgetter("headline", "offenders", "provenance")
    own = [item for item in failures if facts(item.report) == facts(report)]
    if len(own) == 1 and len(failures) > 1:
        others = _listed([item for item in failures if item is not own[0]])
        return f"{own[0].name} of {len(report.ranks)} ({others} failed too)"
    return f"{_listed(failures)} of {len(report.ranks)}"


def _listed(items: list[RankResult]) -> str:
    kind = items[0].name.split()[0]
    numbers = sorted(int(item.name.split()[1]) for item in items)
    listed = " and ".join(filter(None, [", ".join(map(str, numbers[:-1])), str(numbers[-1])]))
    several = {"rank": "ranks", "process": "processes"}[kind]
    return f"{several if len(numbers) > 1 else kind} {listed}"


def rank_facts(item: RankResult) -> tuple[str, ...]:
    """Return the facts about one process, shortest first: batch, outcome, headline."""
    own = item.report.headline if item.report is not None and not item.outcome else ""
    return tuple(one_line(text) for text in (item.batch, item.outcome, own) if text)


def environment(report: Report) -> tuple[tuple[str, str], ...]:
    """Return the facts about the environment, by name."""
    env = report.environment
    facts = (
        ("device", env.device),
        ("torch", env.torch),
        ("CUDA", env.cuda),
        ("Python", env.python),
        ("cudalens", env.cudalens),
        ("rank", None if env.rank is None else str(env.rank)),
    )
    return tuple((name, one_line(value)) for name, value in facts if value)


class PageLink(NamedTuple):
    """The address of the page about an error."""

    address: str
    offline: str
    """The command that shows it offline."""


_ASSERT_PAGES = {
    "< n_classes": "n-classes",
    "srcSelectDimSize": "src-index-select-dim-size",
    "vectorized gather kernel": "vectorized-gather-kernel",
    "index out of bounds": "index-out-of-bounds",
    "input_val": "input-val-zero-one",
    "probability tensor contains": "probability-tensor-inf-nan",
}
_MESSAGE_PAGES = {
    "CUBLAS_STATUS_": "cublas-alloc-failed",
    "CUDNN_STATUS_": "cublas-alloc-failed",
    "modified by an inplace operation": "modified-by-an-inplace-operation",
    "backward through the graph a second time": "backward-a-second-time",
}
"""Messages of CUDA and PyTorch, and the page of ``docs/errors`` that explains them."""


def page_link(report: Report) -> PageLink | None:
    """Return the link to the page about this error, ``None`` if there is none."""
    message = report.exception.message if report.exception else ""
    pages = [page for text, page in _MESSAGE_PAGES.items() if text in message]
    if report.kind in ("device_assert", "cuda_error") and report.device_text:
        pages += [page for text, page in _ASSERT_PAGES.items() if text in report.device_text]
    if report.kind == "device_assert" and report.device_text:
        pages.append("device-side-assert-triggered")
    if not pages:
        return None
    return PageLink(error_pages.address(pages[0]), f"offline: {error_pages.offline(pages[0])}")


def step_after_loss(report: Report, steps: NextSteps) -> str:
    """Return what to do after a loss of the device with an unproven cause.

    A full check is advised only if none has run: a second one would find no more.
    """
    waits = report.synchronization
    if not waits.waits or waits.is_op_unwaited:
        return (
            f"{steps.check_all}: a full check names the op at fault if torch called it, and the "
            "value if a guard knows the op"
        )
    again = f"{steps.restart} to use the GPU again"
    name = report.op.name or ""
    is_own = "::" in name and not name.startswith("aten::")
    if report.kind != "device_assert" or report.certainty != "likely" or not is_own:
        return again
    return f"{again}. A guard of your own can name the value before {name} runs: see register_guard"
