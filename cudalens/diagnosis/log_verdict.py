"""Conclude from the log of a crashed job: which op, what it means, how certain, which line.

A log holds no tensors: the bad value is not in it.  What finds the value is one command, which each
report ends with.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import Any

from cudalens.core.api_names import BACKWARD, api_names, api_names_of_all
from cudalens.core.report import ErrorFacts, Evidence, Report
from cudalens.core.report_types import Environment, Frame, Hint, OpName, Phase, SourceSpan
from cudalens.diagnosis.assert_meanings import Meaning, known_texts, meaning_of
from cudalens.diagnosis.assert_verdict import format_ops, joined
from cudalens.diagnosis.crash_log import CrashLog, Failure
from cudalens.diagnosis.diagnose import diagnose, is_device_assert
from cudalens.diagnosis.host_errors import is_known_message, is_sticky
from cudalens.diagnosis.user_code import list_of

__all__ = ["explain_log", "last_exception"]

_LATE = (
    "CUDA reports an assert late: the line shown is where the program met it, not necessarily the "
    "one that called the op."
)
_SAME_OP = "The traceback ends in this op, so that the line is likely the one."
_NO_LINE = "The log holds no line of your code for it."
_MIXED = "lines of several processes are mixed in the traceback: a frame may be another's"
_COMPILED = (
    "Code that torch.compile generated printed it, and its ops cannot be told apart there: under "
    "the check compiled functions run eagerly, and the op is named."
)
_NO_TEXT = (
    "CUDA prints which check failed on the standard error of the process, and this log does not "
    "hold that line: neither the op nor the value can be told from it."
)
_UNKNOWN = "No kernel of torch's is known to print it: look at extensions and kernels of your own."
_WAITED = (
    "NCCL's time-out tells that they waited, not for what: another rank had failed, hung or taken "
    "another way through the code. Look for the rank that is not among them, and for what it "
    "printed first."
)
_FOR_NCCL = "where a rank ends or hangs, the others show it as such an error"

_LIBRARY = re.compile(
    r"(?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python\d|[/\\]lib[/\\]\w+\.py$|^<"
    r"|[/\\]Python\d+[/\\]Lib[/\\]|[/\\]torch[/\\](?:nn|utils|_\w+|autograd|optim|distributed)[/\\]"
    r"|^/?(?:usr/|opt/\S+/)?(?:local/)?bin/"
)
"""Files of installed packages and of Python itself."""
_CALL = re.compile(r"([A-Za-z_]\w*)\s*\(")
_IN_BACKWARD = re.compile(r"_engine_run_backward|\.backward\(|run_backward")
_CONSEQUENCES = frozenset(
    {"ChildFailedError", "CalledProcessError", "ProcessRaisedException", "ProcessExitedException"}
    | {"KeyboardInterrupt", "SystemExit", "BrokenPipeError", "ConnectionResetError", "EOFError"}
    | {"RayTaskError"}
)
"""What launchers and other processes raise because one of them has ended."""
_OWN = ("DeviceAssertError", "DeviceIndexError", "DeviceValueError", "NonFiniteError")
"""The exceptions of a guard: the job ran under the check."""
_FOUND = (
    "A guard of cudalens stopped the job before the launch: this is the finding itself, and its "
    "report stands in the log."
)
_NCCL = re.compile(r"Watchdog caught collective|NCCL|DistBackendError|Socket Timeout|Broken pipe")


def explain_log(log: CrashLog) -> Report | None:
    """Return the report of what ended the job, ``None`` without a failure of CUDA's or torch's."""
    own = next((item for item in log.failures if item.type_name in _OWN), None)
    chosen = own or _cause(log)
    if chosen is None:
        return None
    evidence = _evidence(log, chosen)
    is_assert = bool(log.asserts) or _is_assert(chosen)
    if own is not None:
        report = _of_own(own, evidence)
    elif is_assert:
        report = _of_assert(log, chosen, evidence)
    elif _weight(chosen) == _WAITING:
        report = _of_waiting(log, chosen)
    else:
        report = diagnose(evidence)
    report = replace(
        report, source=evidence.source, frames=evidence.frames, environment=evidence.environment
    )
    if own is not None:
        return report
    if report.kind == "cuda_error" and report.certainty == "unknown" and _is_fault(chosen):
        late = " CUDA reports such an error late: the line shown is where it was met."
        report = replace(report, explanation=report.explanation + late * bool(report.source))
    limits = [*report.limits, *([_MIXED] if chosen.is_mixed else [])]
    hints = (*report.hints, _next_run(log, chosen))
    told = f"{report.explanation} {_who(log, chosen, is_assert=is_assert)}".strip()
    return replace(report, explanation=told, hints=hints, limits=tuple(limits))


def last_exception(log: CrashLog) -> str | None:
    """Return the last exception of a log in one line, with its place; ``None`` without one."""
    raised = [item for item in log.failures if item.type_name]
    if not raised:
        return None
    source = _source(raised[-1])
    first = raised[-1].message.split("\n", 1)[0]
    at = f" at {source.file}:{source.line}" if source is not None and source.file else ""
    return f"{raised[-1].type_name}{f': {first}' if first else ''}{at}"


# --- which failure is the cause -------------------------------------------------------------------

_ASSERT, _FAULT, _TORCH, _WAITING, _OTHER = range(5)


def _is_assert(failure: Failure) -> bool:
    return is_device_assert(ErrorFacts(type_name=failure.type_name, message=failure.message))


def _is_fault(failure: Failure) -> bool:
    text = failure.message
    return is_sticky(text) or "CUDA error" in text or "CUDA out of memory" in text


def _weight(failure: Failure) -> int:
    """Return how near a failure is to the cause, what CUDA itself says first."""
    if failure.type_name in _CONSEQUENCES:
        return _OTHER
    if _is_assert(failure):
        return _ASSERT
    if _NCCL.search(failure.message) and not is_sticky(failure.message):
        return _WAITING
    if _is_fault(failure) or re.search(r"CU(?:BLAS|DNN)_STATUS_|cuDNN error", failure.message):
        return _FAULT
    return _TORCH if is_known_message(failure.message) else _OTHER


def _cause(log: CrashLog) -> Failure | None:
    """Return the failure to explain: the first of CUDA's, else the last of torch's.

    One with a traceback goes before the same error without; a job may go on after an exception of
    the host's, never after one of CUDA's.
    """
    by_weight: dict[int, list[Failure]] = {}
    for item in log.failures:
        by_weight.setdefault(_weight(item), []).append(item)
    cuda = by_weight.get(_ASSERT, []) + by_weight.get(_FAULT, [])
    if log.asserts:
        # cuBLAS and others report an assert as an error of theirs.
        cuda = cuda or [Failure(message="CUDA error: device-side assert triggered")]
    if cuda:
        first = [item for item in cuda if _weight(item) == _weight(cuda[0])]
        return next((item for item in first if item.frames), first[0])
    host = by_weight.get(_TORCH, []) + [
        item for item in by_weight.get(_OTHER, ()) if item.type_name not in _CONSEQUENCES
    ]
    ended = max(host, key=lambda item: item.number, default=None)
    waiting = by_weight.get(_WAITING, [])
    if ended is not None and _weight(ended) == _TORCH:
        return ended
    return waiting[0] if waiting and ended is None else None


# --- what it means --------------------------------------------------------------------------------


def _evidence(log: CrashLog, failure: Failure) -> Evidence:
    frames = tuple(replace(item, is_user=_is_user(item)) for item in failure.frames)
    rank = next(iter(failure.ranks)) if len(failure.ranks) == 1 else None
    return Evidence(
        error=ErrorFacts(type_name=failure.type_name, message=failure.message),
        phase=_phase(failure),
        source=_source(failure),
        frames=frames,
        device_text="\n".join(item.text() for item in log.asserts) or None,
        environment=Environment(rank=rank),
        is_script=True,
    )


def _of_assert(log: CrashLog, failure: Failure, evidence: Evidence) -> Report:
    report = _read_assert(log, failure)
    if not _is_assert(failure):
        first = failure.message.split("\n", 1)[0]
        hidden = f"{failure.type_name} ({first}) is not the cause: it hides an assert."
        report = replace(report, explanation=f"{hidden} {report.explanation}")
    return replace(report, phase=evidence.phase, device_text=evidence.device_text)


def _asserted(headline: str, *parts: str, **known: Any) -> Report:
    text = " ".join(filter(None, parts))
    return Report(kind="device_assert", headline=headline, explanation=text, **known)


def _read_assert(log: CrashLog, failure: Failure) -> Report:
    late = _LATE if _source(failure) is not None else _NO_LINE
    if not log.asserts:
        headline = "a device-side assert ended the job; this log does not show which op asserted"
        return _asserted(headline, _NO_TEXT, _suspect(failure), late)
    line = log.asserts[0]
    meaning = meaning_of(line)
    more = f"The log holds {len(log.asserts)} different assertions, the first comes first."
    several = more if len(log.asserts) > 1 else ""
    if meaning is None:
        headline = f"CUDA asserted `{line.expression}`; this log does not show which op did"
        return _asserted(headline, _UNKNOWN, several, late)
    if meaning.is_compiled:
        headline = f"compiled code asserted on the device: {meaning.sentence}"
        return _asserted(headline, _COMPILED, several, late, certainty="likely")
    op = _op_of_traceback(meaning, failure)
    names = api_names(op)[:1] if op else ()
    argument = meaning.argument_of(op) if op else meaning.argument
    of = f"{argument}: " if argument else ""
    return _asserted(
        f"{joined(names or api_names_of_all(meaning.ops))} asserted on the device: "
        f"{of}{meaning.sentence}",
        f"CUDA printed `{line.expression}`, a check of {format_ops(meaning)}.",
        several,
        _SAME_OP if op else late,
        certainty="likely",
        op=OpName(name=op, api=names[0] if names else None),
        argument=argument,
    )


def _op_of_traceback(meaning: Meaning, failure: Failure) -> str | None:
    """Return the op that the traceback ends in, where it is one that prints the text.

    That is the function of torch that the user's line called, or the call on the innermost line.
    """
    called = _called(failure)
    return next((op for op in meaning.ops if _api_called(op, called)), None)


def _suspect(failure: Failure) -> str:
    """Name the function that the traceback ends in, where it is one whose kernels can assert."""
    called = _called(failure)
    for meaning in known_texts().values():
        for op in meaning.ops:
            if (name := _api_called(op, called)) is not None:
                return (
                    f"The traceback ends in {name}, whose kernels can assert; nothing in the log "
                    "proves that they did."
                )
    return ""


def _api_called(op: str, called: frozenset[str]) -> str | None:
    """Return the public function of an op that is among the names of called functions."""
    names = (name for name in api_names(op) if not name.startswith(BACKWARD))
    return next((name for name in names if name.rpartition(".")[2] in called), None)


def _called(failure: Failure) -> frozenset[str]:
    """Return the functions that a traceback ends in: those called by the user's line and below."""
    if failure.is_mixed or _phase(failure) == "backward":
        return frozenset()
    called: set[str] = set()
    for frame in reversed(failure.frames):
        called.update(_CALL.findall(frame.text))
        if _is_user(frame):
            break
        called.add(frame.function.rpartition(".")[2])
    return frozenset(called - {"add"})


def _of_own(failure: Failure, evidence: Evidence) -> Report:
    """Repeat the finding of a guard, which is the first failure of the job that counts."""
    is_nan = failure.type_name == "NonFiniteError"
    return Report(
        kind="nonfinite" if is_nan else "device_assert",
        certainty="proven",
        prevented=not is_nan,
        phase=evidence.phase,
        headline=failure.message.split("\n", 1)[0],
        explanation=_FOUND,
    )


def _of_waiting(log: CrashLog, failure: Failure) -> Report:
    ranks = frozenset().union(
        *(item.ranks for item in log.failures if _weight(item) == _WAITING), failure.ranks
    )
    who = f"ranks {_numbers(ranks)} waited" if len(ranks) > 1 else "a rank waited"
    is_time_out = "Watchdog caught" in failure.message
    what = f"{who} for another rank until NCCL's time-out" if is_time_out else "NCCL gave up"
    return Report(
        kind="cuda_error",
        headline=f"this log does not show what failed: {what}",
        explanation=_WAITED if is_time_out else f"This is no cause: {_FOR_NCCL}.",
    )


# --- place, ranks, what to do ---------------------------------------------------------------------


def _is_user(frame: Frame) -> bool:
    return frame.cell is not None or not _LIBRARY.search(frame.file)


def _source(failure: Failure) -> SourceSpan | None:
    """Return the deepest line of the user's."""
    found = next((item for item in reversed(failure.frames) if _is_user(item)), None)
    if found is None or not found.line:
        return None
    return SourceSpan(
        cell=found.cell,
        file=found.file if found.cell is None else None,
        line=found.line,
        text=found.text or None,
    )


def _phase(failure: Failure) -> Phase:
    texts = (f"{item.text} {item.function}" for item in failure.frames)
    return "backward" if any(_IN_BACKWARD.search(text) for text in texts) else "unknown"


def _numbers(ranks: frozenset[int]) -> str:
    if len(ranks) > 8:
        return list_of(ranks, 8)
    return " and ".join(list_of(ranks, 8).rsplit(", ", 1))


def _who(log: CrashLog, failure: Failure, *, is_assert: bool) -> str:
    """Say which ranks failed so, and what torchrun says of the first."""
    same = [
        item
        for item in log.failures
        if (_is_assert(item) if is_assert else _weight(item) == _weight(failure))
    ]
    ranks = frozenset[int]().union(*(item.ranks for item in same), failure.ranks)
    parts = []
    if len(ranks) > 1 and _weight(failure) != _WAITING:
        parts.append(f"Ranks {_numbers(ranks)} report it.")
    root = log.root_rank
    if root is not None and ranks and root not in ranks:
        parts.append(
            f"torchrun names rank {root} as the first to fail, and the log holds no such error of "
            "that rank."
        )
    return " ".join(parts)


def _next_run(log: CrashLog, failure: Failure) -> Hint:
    is_assert = bool(log.asserts) or _is_assert(failure)
    does = "finds the value before its launch" if is_assert else "names the op and its tensors"
    text = f"{_command(log, failure)} {does}"
    if any(item.cell is not None for item in failure.frames):
        text = "%load_ext cudalens in the first cell, and %%cudacheck over this one"
    return Hint(text=f"next time: {text}", rule="next_run")


def _command(log: CrashLog, failure: Failure) -> str:
    """Return the command that runs the same job checked."""
    words = _program(log.command) or _script(log, failure)
    ranks = len(log.ranks)
    if log.is_launched or (not log.starts_itself and (ranks > 1 or any(log.ranks))):
        # Ranks that printed nothing are not in the log.
        is_whole = ranks > 1 and max(log.ranks) == ranks - 1
        count = str(ranks) if is_whole else "N"
        return shlex.join(("torchrun", "--nproc-per-node", count, "-m", "cudalens", *words))
    return shlex.join(("python", "-m", "cudalens", *words))


def _program(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the script and its arguments, or ``-m`` and the module, of a command of Python's."""
    if not command or "python" not in command[0].replace("\\", "/").rpartition("/")[2]:
        return ()
    rest = list(command[1:])
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        rest.pop(0)
    return tuple(item for item in rest if not item.startswith("--local_rank"))


def _script(log: CrashLog, failure: Failure) -> tuple[str, ...]:
    others = (item for item in log.failures if item.type_name not in _CONSEQUENCES)
    for item in (failure, *others):
        for frame in item.frames:
            if frame.function == "<module>" and _is_user(frame):
                return (frame.file,)
    return ("SCRIPT",)
