"""Tracebacks without the frames of this package.

Our functions that run user code set ``__tracebackhide__``, which pytest and IPython honour.  A
traceback that leaves this package, or that a shell shows, goes through the filter here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import dropwhile, groupby
from pathlib import Path
from types import TracebackType

from cudalens.core._python import entries_from_traceback, is_own_note, linked, set_on
from cudalens.source.files import is_machinery, is_own_file, is_top, torch_path

_SENT = re.compile(
    r'^(?P<indent> *)File "(?P<file>[^"\n]+)", line \d+, in .*\n(?:(?P=indent)  .*\n)*',
    re.MULTILINE,
)
"""A frame of a traceback that another process has sent as text, with its lines of code."""
_CARETS = re.compile(r"^ *[\^~]+\n", re.MULTILINE)
_OWN_LINES = re.compile(
    r"^ *(?:cudalens: .*|  (?:op|where|from|CUDA|try|hint) {2,}.*)\n?", re.MULTILINE
)
_AROUND_FAILURE = re.compile(
    r"^(?:[=-]{20,}\n?|Failures:\n  <NO_OTHER_FAILURES>\n|  (?:time|host) +: .*\n)", re.MULTILINE
)
"""Lines of torchelastic around a failure, and on the machine, which is that of the notebook."""
_LAUNCHER = ("accelerate", "launchers.py")
_DISPATCH = ("_ops.py", "overrides.py")
"""Files of torch's wrappers that call an op or a function mode."""


def shown_frames(trace: TracebackType | None) -> list[TracebackType]:
    """Return the entries of a traceback, outermost first, without ours.

    Torch frames below a call that we made for ourselves, such as a stream query, are left out, too.
    So are the frames beside ours: torch's wrapper of an op that we redispatched or of our function
    mode, the shell's call of a magic that we ran, and the line with the magic itself where its
    statement follows.
    """
    shown: list[TracebackType] = []
    is_own_call = False
    for is_between, run in groupby(entries_from_traceback(trace), _is_between):
        entries = list(run)
        if is_own_call:  # we called these functions of torch, not the user
            entries = list(dropwhile(lambda entry: torch_path(file_of(entry)), entries))
        # A function of ours without the mark forwards no user call: it calls torch for itself.
        innermost = entries[-1].tb_frame.f_code if is_between else None
        is_own_call = (
            innermost is not None
            and is_own_file(innermost.co_filename)
            and "__tracebackhide__" not in innermost.co_varnames
        )
        if not entries:
            continue
        if not (is_between and any(is_own_file(file_of(entry)) for entry in entries)):
            outer = (item for item in reversed(shown) if not is_machinery(file_of(item)))
            call = next(outer, None)
            # The line with a magic, and then its statement: one of them is enough.
            if call is not None and _is_once_more(call, entries[0]):
                del shown[shown.index(call) :]
            shown += entries
    return shown


def shown(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without our frames, or unchanged if it has no others: we have failed."""
    return linked(shown_frames(trace)) or trace


def without_torch(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of torch and of its launcher, if others are left."""
    users = [entry for entry in entries_from_traceback(trace) if not _is_torch(file_of(entry))]
    return linked(users) or trace


def _is_torch(file: str) -> bool:
    return bool(torch_path(file)) or Path(file).parts[-2:] == _LAUNCHER


def is_reported(error: BaseException, report: object) -> bool:
    """Return whether a report is an exception's own, or a later one about the same bad values."""
    # Imported with the first report, as loading the extension has to be cheap.
    from cudalens.core.reported import report_beside

    reports = [getattr(error, "report", None), report_beside(error)]
    offenders = getattr(report, "offenders", None)
    return report is not None and any(
        item is report or (offenders is not None and getattr(item, "offenders", None) is offenders)
        for item in reports
    )


@contextmanager
def without_repeats(error: BaseException, report: object, action: str = "") -> Iterator[None]:
    """Shorten an exception and its causes for the block: the report beside it says the rest.

    One that the report is about keeps its first line, and loses our notes and torch's frames.  The
    caller cuts the traceback of ``error`` itself.

    Args:
        action: the suggested action, which becomes the last line of ``error``.
    """
    with ExitStack() as stack:
        _cut_repeats(error, report, action, stack)
        yield


def _cut_repeats(error: BaseException, report: object, action: str, stack: ExitStack) -> None:
    # A function of its own: in Python 3.13 a ``with`` does not cover the end of a loop in it.
    for item in with_causes(error, "__cause__", "__context__"):
        if not is_reported(item, report):
            continue
        args, notes = item.args, item.__dict__.get("__notes__")
        last = action if item is error else ""
        if getattr(item, "report", None) is not None and args:
            stack.callback(setattr, item, "args", args)
            lines = [str(args[0]).split("\n", 1)[0], *filter(None, [last])]
            item.args, last = ("\n".join(lines), *args[1:]), ""
        elif args and type(args[0]) is str and _SENT.search(args[0]):
            stack.callback(setattr, item, "args", args)
            item.args = (without_frames(args[0]), *args[1:])
        if item is not error:
            stack.callback(BaseException.with_traceback, item, item.__traceback__)
            BaseException.with_traceback(item, without_torch(item.__traceback__))
        if isinstance(notes, list):
            stack.callback(set_on, item, "__notes__", notes)
            others = [note for note in notes if not is_own_note(note)]
            set_on(item, "__notes__", others + [f"cudalens: {line}" for line in [last] if line])


def without_frames(text: str) -> str:
    """Return a launcher's text on a failed process without the frames of torch and of ours.

    Carets under the code, rules, and our own lines after the error's are removed, too: the report
    beside it contains them.
    """

    def kept(frame: re.Match[str]) -> str:
        file = frame["file"]
        return "" if _is_torch(file) or is_own_file(file) else _CARETS.sub("", frame[0])

    return _AROUND_FAILURE.sub("", _OWN_LINES.sub("", _SENT.sub(kept, text))).rstrip()


def hide_own_frames(error: BaseException) -> None:
    """Remove our frames from the tracebacks of an exception and of its causes."""
    for item in with_causes(error, "__cause__", "__context__"):
        # Not by assignment, which a class of the user's may refuse.
        BaseException.with_traceback(item, shown(item.__traceback__))


def with_causes(error: BaseException, *links: str) -> list[BaseException]:
    """Return an exception, those that ``links`` lead to, and the members of groups, each once."""
    todo, causes = [error], {}
    while todo:
        item = todo.pop()
        if id(item) in causes:
            continue
        causes[id(item)] = item
        parts = item.exceptions if isinstance(item, BaseExceptionGroup) else ()
        behind = (getattr(item, link) for link in links)
        todo += [part for part in (*behind, *parts) if part is not None]
    return list(causes.values())


def file_of(entry: TracebackType) -> str:
    """Return the file of a traceback entry."""
    return entry.tb_frame.f_code.co_filename


def _is_between(entry: TracebackType) -> bool:
    file = file_of(entry)
    return is_own_file(file) or is_machinery(file) or torch_path(file) in _DISPATCH


def _is_once_more(call: TracebackType, entry: TracebackType) -> bool:
    """Return whether ``entry`` is the line of ``call`` again, run by code of ours between them."""
    codes = [item.tb_frame.f_code for item in (call, entry)]
    is_line = all(is_top(code.co_name) for code in codes) and call.tb_lineno == entry.tb_lineno
    is_same = is_line and file_of(call) == file_of(entry)
    return is_same or (codes[0] is codes[1] and torch_path(file_of(entry)) != "")
