"""Conclude from the log of a job what ended it: which op, what it means, how certain, which line.

A log holds no tensors: the bad value is not in it, so each report ends with the command that finds
it.
"""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace

from cudalens.core._python import parse
from cudalens.core.api_names import BACKWARD, api_names, api_names_of_all
from cudalens.core.evidence_types import FittingCall
from cudalens.core.report import ErrorFacts, Evidence, Report
from cudalens.core.report_types import Environment, Frame, Hint, OpName, Phase, SourceSpan
from cudalens.diagnosis.assert_meanings import Meaning, known_texts, meaning_of
from cudalens.diagnosis.assert_verdict import headline_of, joined
from cudalens.diagnosis.diagnose import diagnose, is_device_assert
from cudalens.diagnosis.host_errors import is_known_message, is_sticky, is_without_gpu
from cudalens.diagnosis.user_code import list_of
from cudalens.logs.crash_log import CrashLog, Failure
from cudalens.logs.fitting_call import fitting_calls

__all__ = ["explain_log", "last_exception"]

_LATE = "CUDA reports an assert late, so the real cause may be an earlier line than the one shown."
_SAME_OP = "The traceback ends in this op, so its line is likely the one."
_NO_LINE = "The log contains no line of your code for it."
_GOES_ON = (
    "No error follows it: the process ended before it waited for the GPU, the job went on without "
    "this process, or the log is cut."
)
_HANDLED = "The log goes on after it: if the job handled it, something else ended the job."
_AFTER = 8
"""Lines behind an error that may still belong to the end of the job."""
_COMPILED = (
    "Code that torch.compile generated printed it, and does not say which op: under the check "
    "compiled functions run eagerly, and the op is named."
)
_NO_TEXT = (
    "CUDA prints which check failed on standard error, and this log does not contain that line: "
    "it shows neither the op nor the value."
)
_UNKNOWN = "No known torch kernel prints it: look at extensions and at your own kernels."
_WAITED = "Look for the rank that failed, hung or is missing here, and for what it printed first."
_FOUND = "A guard of cudalens stopped the job before the launch. Its report is in the log."

Read = Callable[[str], Sequence[str]]
_LIBRARY = re.compile(
    r"(?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python\d|[/\\]lib[/\\]\w+\.py$|^<"
    r"|[/\\]Python\d+[/\\]Lib[/\\]|[/\\]torch[/\\](?:nn|utils|_\w+|autograd|optim|distributed)[/\\]"
    r"|^/?(?:usr/|opt/\S+/)?(?:local/)?bin/|[/\\]cudalens[/\\](?:simulate|guards|recorder|session)[/\\]"
)
"""Files of installed packages, of Python itself, and of this package in a checkout."""
_CALL = re.compile(r"([A-Za-z_]\w*)\s*\(")
_IN_BACKWARD = re.compile(r"\.backward\(|run_backward")
_CONSEQUENCES = frozenset(
    {"ChildFailedError", "CalledProcessError", "ProcessRaisedException", "ProcessExitedException"}
    | {"KeyboardInterrupt", "SystemExit", "BrokenPipeError", "ConnectionResetError", "EOFError"}
    | {"RayTaskError"}
)
"""Exceptions of launchers and other processes because one of them has ended."""
_OWN = ("DeviceAssertError", "DeviceIndexError", "DeviceValueError", "NonFiniteError")
"""The exceptions of a guard: the job ran under the check."""
_NCCL = re.compile(r"Watchdog caught collective|NCCL|DistBackendError|Socket Timeout|Broken pipe")
_FAULT = re.compile(r"CUDA error|CUDA out of memory|CU(?:BLAS|DNN)_STATUS_|cuDNN error")


def explain_log(log: CrashLog, read: Read = lambda _: ()) -> Report | None:
    """Return the report of what ended the job, ``None`` where that was no failure of torch's.

    Args:
        log: the log.
        read: returns the lines of a file that a traceback names, none where it is not at hand.
    """
    chosen = _cause(log)
    if chosen is None:
        return None
    frames = tuple(replace(item, is_user=_is_user(item)) for item in chosen.frames)
    evidence = Evidence(
        error=ErrorFacts(type_name=chosen.type_name, message=chosen.message),
        phase=_phase(chosen),
        source=_source(chosen),
        frames=frames,
        device_text="\n".join(item.text() for item in log.asserts) or None,
        environment=Environment(rank=min(chosen.ranks) if len(chosen.ranks) == 1 else None),
        is_script=True,
    )
    if chosen.type_name in _OWN:
        is_nan = chosen.type_name == "NonFiniteError"
        return _report(
            evidence,
            chosen.message.split("\n", 1)[0],
            _FOUND,
            kind="nonfinite" if is_nan else "device_assert",
            certainty="proven",
            prevented=not is_nan,
        )
    if log.asserts or _is_assert(chosen):
        report = _of_assert(log, chosen, evidence, read)
    elif _is_waiting(chosen):
        report = _of_waiting(log, chosen, evidence)
    else:
        report = replace(diagnose(evidence), source=evidence.source, frames=frames)
        # An error without a traceback was printed by the job, which was still running then.
        behind = _AFTER if chosen.frames else chosen.message.count("\n")
        if not is_sticky(chosen.message) and log.last_text > chosen.number + behind:
            report = replace(report, limits=(*report.limits, _HANDLED))
    same = (item for item in log.failures if _is_assert(item) and _is_assert(chosen))
    ranks = chosen.ranks.union(*(item.ranks for item in same))
    if len(ranks) > 1 and not _is_waiting(chosen):
        explanation = f"{report.explanation} Ranks {_numbers(ranks)} report it."
        report = replace(report, explanation=explanation)
    hints = report.hints
    if not is_without_gpu(chosen.message):
        hints = (*hints, _next_run(log, chosen))
    return replace(report, environment=evidence.environment, hints=hints)


def last_exception(log: CrashLog) -> str | None:
    """Return the last exception of a log in one line, with its place; ``None`` without one."""
    raised = [item for item in log.failures if item.type_name]
    if not raised:
        return None
    last = max(raised, key=lambda item: item.number)
    source = _source(last)
    first = last.message.split("\n", 1)[0]
    at = f" at {source.file}:{source.line}" if source is not None and source.file else ""
    return f"{last.type_name}{f': {first}' if first else ''}{at}"


# --- what ended the job ---------------------------------------------------------------------------


def _is_assert(failure: Failure) -> bool:
    return is_device_assert(ErrorFacts(type_name=failure.type_name, message=failure.message))


def _is_waiting(failure: Failure) -> bool:
    return bool(_NCCL.search(failure.message)) and not is_sticky(failure.message)


def _cause(log: CrashLog) -> Failure | None:
    """Return the failure to explain; ``None`` where the job ended by something else.

    A program can handle any exception and go on, but not one that ends the CUDA context: the first
    of those counts, and else the last exception of the log.
    """
    failures = [item for item in log.failures if item.type_name not in _CONSEQUENCES]
    own = next((item for item in failures if item.type_name in _OWN), None)
    if own is not None:
        return own
    fatal = [item for item in failures if is_sticky(item.message)]
    if log.asserts and not fatal:  # cuBLAS and others report an assert as an error of theirs
        faults = (item for item in failures if _FAULT.search(item.message))
        fatal = [next(faults, Failure(message="CUDA error: device-side assert triggered"))]
    if fatal:
        alike = [item for item in fatal if _is_assert(item) == _is_assert(fatal[0])]
        return next((item for item in alike if item.frames), alike[0])
    waiting = [item for item in failures if _is_waiting(item)]
    others = [item for item in failures if item not in waiting]
    last = max(others, key=lambda item: item.number, default=None)
    if last is None:
        return waiting[0] if waiting else None
    is_torchs = _FAULT.search(last.message) or is_known_message(last.message)
    return last if is_torchs else None


# --- what it means --------------------------------------------------------------------------------


def _report(evidence: Evidence, headline: str, explanation: str, **fields: object) -> Report:
    return Report(
        headline=headline,
        explanation=explanation,
        phase=evidence.phase,
        source=evidence.source,
        frames=evidence.frames,
        device_text=evidence.device_text,
        environment=evidence.environment,
        **fields,  # type: ignore[arg-type]
    )


def _of_assert(log: CrashLog, failure: Failure, evidence: Evidence, read: Read) -> Report:
    late = _LATE if evidence.source is not None else _NO_LINE
    limits: tuple[str, ...] = ()
    if log.asserts and not log.failures and log.last_text > 0:
        late, limits = "", (_GOES_ON,)
    hidden = ""
    if not _is_assert(failure):  # cuBLAS and others report an assert as an error of theirs
        first = failure.message.split("\n", 1)[0]
        hidden = f"{failure.type_name} ({first}) is not the cause: it hides an assert."
    line = next(iter(log.asserts), None)
    meaning = meaning_of(line) if line is not None else None
    parts, fields = [hidden], {}
    called = _called(failure)
    if line is None:
        headline = "a device-side assert ended the job"
        headline += ", and this log does not show which op asserted"
        names = (_api_called(op, called) for item in known_texts().values() for op in item.ops)
        suspect = next(filter(None, names), None)
        maybe = f"The traceback ends in {suspect}, which can assert. This alone proves nothing."
        parts += [_NO_TEXT, maybe if suspect else "", late]
    elif meaning is None:
        headline = f"CUDA asserted `{line.expression}`, and this log does not show which op did"
        parts += [_UNKNOWN, late]
    elif meaning.is_compiled:
        headline = f"compiled code asserted on the device: {meaning.sentence}"
        parts += [_COMPILED, late]
    else:
        op = next((op for op in meaning.ops if _api_called(op, called)), None)
        call = None if op else _call_that_fits(failure, meaning, read)
        name = _name_on_line(op, failure) if op else joined(api_names_of_all(meaning.ops))
        argument = meaning.argument_of(op) if op else meaning.argument
        of = f"{argument}: " if argument else ""
        headline = f"{name} asserted on the device: {of}{meaning.sentence}"
        if call is not None:
            op, name, argument = call.op, call.api, meaning.argument_of(call.op)
            headline = headline_of(call, meaning)
        parts += [f"CUDA printed `{line.expression}`.", late if call or not op else _SAME_OP]
        fields = {"argument": argument, "op": OpName(name=op, api=name if op else None)}
    if len(log.asserts) > 1:
        parts.append(f"The first of {len(log.asserts)} different assertions in the log.")
    certainty = "likely" if meaning is not None else "unknown"
    text = " ".join(filter(None, parts))
    report = _report(evidence, headline, text, kind="device_assert", certainty=certainty, **fields)
    return replace(report, limits=(*report.limits, *limits))


def _of_waiting(log: CrashLog, failure: Failure, evidence: Evidence) -> Report:
    ranks = frozenset[int]().union(*(item.ranks for item in filter(_is_waiting, log.failures)))
    who = f"ranks {_numbers(ranks)} waited" if len(ranks) > 1 else "a rank waited"
    is_time_out = "Watchdog" in failure.message
    what = f"{who} for another rank until NCCL's time-out" if is_time_out else "NCCL gave up"
    headline = f"this log does not show what failed: {what}"
    return _report(evidence, headline, _WAITED, kind="cuda_error")


def _api_called(op: str, called: frozenset[str]) -> str | None:
    """Return the public function of an op that is among the names of called functions."""
    names = (name for name in api_names(op) if not name.startswith(BACKWARD))
    return next((name for name in names if name.rpartition(".")[2] in called), None)


def _name_on_line(op: str, failure: Failure) -> str:
    """Return the op's function that the user's line calls; if it calls a module, the usual one."""
    line = next((item.text for item in reversed(failure.frames) if _is_user(item)), "")
    return _api_called(op, frozenset(_CALL.findall(line))) or api_names(op)[0]


def _called(failure: Failure) -> frozenset[str]:
    """Return the functions that a traceback ends in: those called by the user's line and below."""
    called: set[str] = set()
    if _phase(failure) == "backward":
        return frozenset()
    for frame in reversed(failure.frames):
        called.update(_CALL.findall(frame.text))
        if _is_user(frame):
            break
        called.add(frame.function.rpartition(".")[2])
    # `add` may as well be the method of a set.
    return frozenset(called - {"add"})


def _call_that_fits(failure: Failure, meaning: Meaning, read: Read) -> FittingCall | None:
    """Return the one call of the user's code that can print an assertion.

    The code is that of the traceback's files; without one, the lines of the deepest cell that the
    log shows, or the deepest line.
    """
    frames = [item for item in failure.frames if _is_user(item) and item.text]
    files = dict.fromkeys(item.file for item in frames if item.file.endswith(".py"))
    trees = {name: tree for name in files if (tree := _tree_of(name, frames, read)) is not None}
    if not trees and frames:
        here = frames[-1].line
        lines = failure.cell_lines or {here: frames[-1].text}
        first = min(lines)
        text = "\n".join(lines.get(at, "") for at in range(first, max(lines) + 1))
        tree = ast.increment_lineno(_parsed(textwrap.dedent(text)), first - 1)
        # The failing line assigns to its target after what it waits for.
        body = [getattr(it, "value", it) or it if it.lineno == here else it for it in tree.body]
        trees = {"the lines shown" if len(lines) > 1 else "that line": ast.Module(body, [])}
    calls = [
        replace(call, code=re.split(r"[/\\]", name)[-1])
        for name, tree in trees.items()
        for call in fitting_calls(tree, meaning)
    ]
    return calls[0] if len(calls) == 1 else None


def _tree_of(name: str, frames: Sequence[Frame], read: Read) -> ast.Module | None:
    """Return the code of a file up to where it ended, ``None`` if the traceback's is another."""
    lines = read(name)
    last = len(lines)
    for frame in (item for item in frames if item.file == name):
        # The file may have changed since the job ran.
        if [item.strip() for item in lines[frame.line - 1 : frame.line]] != [frame.text]:
            return None
        last = frame.line if frame.function == "<module>" else last
    tree = _parsed("\n".join(lines))
    return ast.Module([item for item in tree.body if item.lineno <= last], [])


def _parsed(text: str) -> ast.Module:
    try:
        return parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


# --- place, ranks, what to do ---------------------------------------------------------------------


def _is_user(frame: Frame) -> bool:
    return frame.cell is not None or not _LIBRARY.search(frame.file)


def _source(failure: Failure) -> SourceSpan | None:
    """Return the deepest line of the user's."""
    frame = next((item for item in reversed(failure.frames) if _is_user(item)), None)
    if frame is None or not frame.line:
        return None
    file = frame.file if frame.cell is None else None
    return SourceSpan(cell=frame.cell, file=file, line=frame.line, text=frame.text or None)


def _phase(failure: Failure) -> Phase:
    texts = (f"{item.text} {item.function}" for item in failure.frames)
    return "backward" if any(_IN_BACKWARD.search(text) for text in texts) else "unknown"


def _numbers(ranks: frozenset[int]) -> str:
    shown = list_of(ranks, 8)
    return shown if len(ranks) > 8 else " and ".join(shown.rsplit(", ", 1))


def _next_run(log: CrashLog, failure: Failure) -> Hint:
    """Return the command that runs the same job checked."""
    if any(item.cell is not None for item in failure.frames):
        text = "%load_ext cudalens in the first cell, and %%cudacheck over this one"
        return Hint(text=f"next time: {text}", rule="next_run")
    others = (item for item in log.failures if item.type_name not in _CONSEQUENCES)
    frames = (frame for item in (failure, *others) for frame in item.frames)
    mains = (frame.file for frame in frames if frame.function == "<module>" and _is_user(frame))
    words = ["-m", "cudalens", next(mains, "SCRIPT")]
    command = ["torchrun", "--nproc-per-node", "N"] if log.is_launched else ["python"]
    is_assert = bool(log.asserts) or _is_assert(failure)
    does = "finds the value before its launch" if is_assert else "names the op and its tensors"
    return Hint(text=f"next time: {shlex.join([*command, *words])} {does}", rule="next_run")
