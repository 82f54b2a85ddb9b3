"""The report as Markdown, for an issue or an assistant: at most 40 lines, not wrapped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from cudalens.core.report import Report
from cudalens.render import screen, words
from cudalens.render.code import Row
from cudalens.render.screen import Screen, Span
from cudalens.render.strip import Strip, strip
from cudalens.render.words import clip, one_line

MAX_LINES = 40
_MAX_TEXT = 600
_MAX_GRAPH = 12
_MAX_CALLERS = 3
_SPECIAL = re.compile(r"([\\`*<]|(?<=\])\()")


def render(report: Report) -> str:
    """Return the report as Markdown: error, code with marks and shapes, facts, what was tried."""
    report = words.with_module_names(report)
    return render_with(report, strip(report))


def render_with(report: Report, drawn: Strip | None) -> str:
    """Return the Markdown of a report whose strip exists already."""
    parts = screen.build(report, fold=100_000)
    head = list(_head(report, parts, drawn))
    code = list(_code(parts, _end(report)))
    # Only the code can be too long.
    room = MAX_LINES - len(head)
    if len(code) > room:
        code = [*code[: room - 2], "…", "```"]
    return "\n".join([*head, *code]) + "\n"


def _head(report: Report, parts: Screen, drawn: Strip | None) -> Iterator[str]:
    kind = report.exception.type if report.exception else words.KINDS[report.kind]
    certainty = {"likely": "Likely cause (not proven): "}.get(report.certainty, "")
    yield f"### {kind}: {certainty}{screen.plain(parts.headline).removeprefix('Likely: ')}"
    yield ""
    for fact in parts.facts:
        yield f"- {''.join(map(_span, fact))}"
    for item in report.observations:
        if item.sources and item.kind not in ("values", "earlier"):
            yield f"- {_words(item.text)}"
    # The headline already has cudalens' own exceptions and warnings.
    if report.exception and report.kind in ("host_error", "autograd_error", "cuda_error"):
        yield f"- PyTorch: {_quoted(report.exception.message)}"
    if report.replay.outcome == "raised":
        raised = _quoted(words.replay_line(report))
        yield f"- the CPU kernel with the same arguments raises {raised}"
    if report.device_text:
        verb = "would print" if report.prevented else "printed"
        yield f"- CUDA {verb} {_quoted(report.device_text.strip())}"
    if flow := _flow(drawn):
        yield f"- graph: {flow}"
    for name, type_, _ in parts.loose[: screen.SHOWN_TENSORS]:
        yield f"- with `{name}`: {type_}"
    for line in screen.callers(report)[-_MAX_CALLERS:]:
        yield f"- called from {_quoted(line)}"
    for rank in report.ranks:
        yield f"- {rank.name}: {_words(' · '.join(words.rank_facts(rank)))}"
    for note in parts.notes[:3]:
        yield f"- note: {_words(note)}"
    if (action := parts.action) is not None:
        place = f" {action.beside} {action.place}" if action.place else ""
        tried = {"try": "tried on copies: ", "hint": "hint: ", "next": "next: "}[action.label]
        code = f"{_quoted(action.code)}{place}. " if action.code else ""
        yield f"- {tried}{code}{_words(action.reason)}"
    yield f"- {_versions(report)}"
    yield ""


def _flow(drawn: Strip | None) -> str:
    """Return the flow of the data as one line, with the failing call in bold."""
    nodes = [node for node in drawn.nodes if node.lane == 1][-_MAX_GRAPH:] if drawn else []
    flow = ""
    for at, node in enumerate(nodes):
        text = " ".join(filter(None, (_words(node.title), _words(node.shape))))
        # The mark beside the code says that it fails.
        small = f" ({_words(node.small)})" if node.small not in ("", "fails here") else ""
        link = "" if not at else " → " if node.has_arrow else " … "
        flow += link + (f"**{text}{small}**" if node.is_bad else text)
    return flow


def _end(report: Report) -> str:
    """Return the comment for the failing line."""
    if report.kind == "silent":
        return "the result is wrong here"
    if report.kind == "nonfinite" and any(it.kind == "maker" for it in report.observations):
        return ""  # the marks have the maker and the sink
    is_backward = report.phase == "backward" and report.forward_source is not None
    return "its backward fails" if is_backward else "fails here"


def _code(parts: Screen, end: str) -> Iterator[str]:
    for block in parts.blocks:
        if block.title:
            yield f"{block.title}:"
        yield "```python"
        rows = [row for row in block.rows if not row.is_label]
        names, is_said = _names(block.rows), False
        if parts.tone == "likely":
            end = "likely here"
        for row in rows:
            if row.is_gap:
                yield "# …"
                continue
            is_end = bool(row.is_hot and end and not is_said)
            is_said = is_said or is_end
            said = [*([end] if is_end else []), *row.marks]
            said += names.get(id(row), ())
            note = f"  # <- {'; '.join(dict.fromkeys(said))}" if said else ""
            # Three backticks in the code would end the block.
            yield f"{row.text.replace('```', '` ` `')}{note}"
        yield "```"


def _names(rows: Iterable[Row]) -> dict[int, list[str]]:
    """Return the types under each code row."""
    found: dict[int, list[str]] = {}
    last = 0
    for row in rows:
        if row.is_label:
            found.setdefault(last, []).extend(f"{name}: {kind}" for name, kind, _ in row.names)
        else:
            last = id(row)
    return found


def _versions(report: Report) -> str:
    env = report.environment
    names = (("torch", env.torch), ("Python", env.python), ("cudalens", env.cudalens))
    facts = [f"{name} {one_line(value)}" for name, value in names if value]
    if env.simulated:
        facts.append("rehearsal device (no GPU)")
    elif env.device:
        facts.append(one_line(env.device))
    return ", ".join(facts)


def _span(span: Span) -> str:
    if span.look == "plain":
        return _words(span.text)
    return f"**{_quoted(span.text)}**" if span.look == "badcode" else _quoted(span.text)


def _words(text: str) -> str:
    """Escape the special characters of Markdown outside backticks."""
    parts = one_line(clip(text, _MAX_TEXT)).split("`")
    # With an odd number of backticks, one of them quotes nothing.
    if len(parts) % 2 == 0:
        return _SPECIAL.sub(r"\\\1", "`".join(parts))
    return "`".join(
        part if at % 2 else _SPECIAL.sub(r"\\\1", part) for at, part in enumerate(parts)
    )


def _quoted(text: str) -> str:
    """Return text as inline code, with as many backticks as needed."""
    text = one_line(clip(text, _MAX_TEXT)).strip()
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    # A backtick at an end would become part of the fence.
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}" if text else ""
