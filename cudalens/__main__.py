"""The command line: run a script or module checked, and the sub-commands.

Parsing and exit codes only.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import runpy
import shutil
import sys
import zipfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from cudalens.core._python import linked
from cudalens.core.text_files import expanded, lines_of, why_unreadable, why_unwritable
from cudalens.core.version import __version__
from cudalens.session.options import (
    FILES,
    Options,
    OptionsError,
    SubCommand,
    help_text,
    option,
    parse,
    take,
)

if TYPE_CHECKING:
    from cudalens.core.report import Report
    from cudalens.integrations.torchrun import Rank
    from cudalens.session.session import CheckSession

__all__ = ["main"]

DESCRIPTION = """Find bad values before they crash a CUDA kernel.

The script runs as it would with python.  When something is wrong, the report says which value,
where, which bound it breaks and on which line of yours.  Options after the script name are passed
to the script."""

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
"""Exit codes, the same as Python's own."""


class _UsageError(ValueError):
    """The command line cannot be understood; the text is one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Raises:
        SystemExit: the script ended with it; it passes, so that the status is the script's own.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except (_UsageError, OptionsError) as error:
        rank = _rank()
        if rank is not None:
            error.__traceback__ = None
            rank.record(error)
        # One rank of each machine prints the line.
        return _complain(str(error), MISUSED) if rank is None or rank.local == 0 else MISUSED


def _dispatch(words: list[str]) -> int:
    count = take(words, stop=["-m"])
    if count > 1 and words[count - 1] in _COMMANDS:
        # --json takes a file before a script, but no value before the command guards.
        behind = words[count:]
        if not (behind and (behind[0] == "-m" or Path(behind[0]).exists())):
            count -= 1
    leading, rest = words[:count], words[count:]
    if "--version" in leading:
        return _say(f"cudalens {__version__}")
    if rest and rest[0] in _COMMANDS:
        return _run_command(rest[0], [*leading, *rest[1:]])
    options = parse(leading)
    if options.report is not None:
        msg = "-r binds a variable of a notebook; use --json FILE or --html FILE here"
        raise _UsageError(msg)
    if options.help or not words:
        return _say(_help())
    if not rest:
        msg = "nothing to run: name a script, or -m and a module"
        raise _UsageError(msg)
    if rest[0] == "-m":
        if len(rest) == 1:
            msg = "-m needs the name of a module"
            raise _UsageError(msg)
        return _run(options, lambda: _as_module(rest[1], rest[2:]))
    script = Path(rest[0])
    if not script.exists():
        raise _UsageError(_no_script(rest[0]))
    return _run(options, lambda: _as_script(script, rest[1:]))


def _no_script(word: str) -> str:
    """Return a message that there is no such script, with the names that are close to it."""
    may_be_command = Path(word).name == word and not Path(word).suffix
    scripts = [path.as_posix() for path in Path(word).parent.glob("*.py")]
    close = get_close_matches(word, [*(_COMMANDS if may_be_command else ()), *scripts])
    meant = f"; did you mean {' or '.join(close)}?" if close else ""
    if not may_be_command:
        return f"there is no script {word!r}{meant}"
    the = " The" if meant else "; the"
    return f"there is no script and no command {word!r}{meant}{the} commands are {_NAMES}"


def _run_command(name: str, arguments: list[str]) -> int:
    """Run a sub-command, or print its help."""
    parser = _COMMANDS[name].parser()
    if not {"-h", "--help"}.isdisjoint(arguments):
        return _say(parser.format_help().rstrip())
    try:
        args = parser.parse_intermixed_args(arguments)
        _require_writable(args)
    except OptionsError as error:
        raise _UsageError(str(error).replace("--help", f"cudalens {name} --help")) from None
    return _printed(partial(_COMMANDS[name].run, args))


def _say(text: str) -> int:
    return _printed(lambda: print(text) or 0)


def _printed(run: Callable[[], int]) -> int:
    """Run a function that prints, to a reader that may close the pipe early, as `head` does.

    Returns:
        the exit status.
    """
    try:
        status = run()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout again as it exits, which would fail on the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return status


def _as_script(script: Path, arguments: list[str]) -> None:
    sys.argv = [str(script), *arguments]
    _import_from(script.resolve().parent)
    if script.is_dir() or zipfile.is_zipfile(script):
        runpy.run_path(str(script), run_name="__main__")
        return
    # As Python runs a script: `__file__` is absolute, and argv[0] is as typed.  runpy makes both
    # the same.  The module must be in sys.modules, where pickle looks up the script's classes.
    path = str(script.absolute())
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None)
    own, sys.modules["__main__"] = sys.modules["__main__"], module
    try:
        exec(code, module.__dict__)
    finally:
        sys.modules["__main__"] = own


def _as_module(name: str, arguments: list[str]) -> None:
    sys.argv = [name, *arguments]  # runpy replaces the name by the file's path
    _import_from(Path.cwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _import_from(folder: Path) -> None:
    # Python has put a folder of its own choice first, unless it was started with `-P`.
    if not sys.flags.safe_path:
        sys.path[0] = str(folder)


def _run(options: Options, program: Callable[[], None]) -> int:
    """Run the user's program under the check, and show its exception as Python does."""
    try:
        from cudalens.integrations.torchrun import files_of_rank
        from cudalens.session.session import CheckSession
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return _complain("cudalens needs torch, which is not installed here", FAILED)
    options = files_of_rank(options)
    _require_writable(options)
    session = CheckSession(**options.for_session())
    if _rank() is None:
        session.show_early = partial(_print_report, session)
    try:
        with session:
            program()
    except SystemExit as error:
        _conclude(session, error)
        raise
    except BaseException as error:
        _show_exception(session, error)
        _conclude(session, error)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    _conclude(session, None)
    return 0


def _show_exception(session: CheckSession, error: BaseException) -> None:
    """Print the traceback, shortened where a report of the exception follows."""
    from cudalens.source.shown_frames import (
        is_reported,
        shown_frames,
        without_repeats,
        without_torch,
    )

    trace = linked(shown_frames(error.__traceback__))
    is_next = _rank() is None and not (session.is_shown_early or session.is_reminder)
    report = session.report if is_next else None
    if is_reported(error, report):
        trace = without_torch(trace)
    # Not by assignment, which a class of the user's may refuse.
    BaseException.with_traceback(error, trace)
    with without_repeats(error, report):
        sys.excepthook(type(error), error, trace)


def _conclude(session: CheckSession, error: BaseException | None) -> None:
    """Show the report; a rank of torchrun writes it for the other ranks, too."""
    rank = _rank()
    if session.is_shown_early:
        print("cudalens: the report is above", file=sys.stderr)
    elif rank is None:
        _print_report(session)
    else:
        rank.conclude(error, session.report, lambda: _print_report(session))


def _rank() -> Rank | None:
    if "RANK" not in os.environ:
        return None
    from cudalens.integrations.torchrun import Rank

    return Rank.of_environment()


def _require_writable(options: Options | Namespace) -> None:
    for form in ("html", "json"):
        name = getattr(options, form, None)
        if name is not None and (reason := why_unwritable(name)) is not None:
            msg = f"--{form} {name}: it cannot be written: {reason}"
            raise _UsageError(msg)


def _print_report(session: CheckSession) -> None:
    report = session.report
    if report is None:
        return
    try:
        text = _as_text(report, sys.stderr)
    except Exception as error:
        # The program's own failure has been shown: ours must not change its exit status.
        text = f"cudalens: the report could not be shown: {error!r}"
    print(text, file=sys.stderr)
    print(_about(report), end="", file=sys.stderr)
    for path in session.written:
        print(f"cudalens: the report is in {path}", file=sys.stderr)


def _about(report: Report) -> str:
    """Return a line that names the page on this error, empty when there is none."""
    from cudalens.render.words import page_link

    try:
        link = page_link(report)
    except Exception:  # the report itself has been shown
        return ""
    return f"cudalens: about this error: {link.address} ({link.offline})\n" if link else ""


def _as_text(report: Report, stream: Any) -> str:
    return report.to_text(width=_width(), color=_has_colour(stream))


def _width() -> int:
    return min(shutil.get_terminal_size((100, 24)).columns, 120)


def _has_colour(stream: Any) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")


def _complain(line: str, status: int) -> int:
    print(f"cudalens: {line}", file=sys.stderr)
    return status


# --- sub-commands ---------------------------------------------------------------------------------


def _demo(args: Namespace) -> int:
    from cudalens.core.errors import SimulationError
    from cudalens.session import demo

    page = Path("demo") / "report.html"
    try:
        report = demo.run(page)
    except SimulationError as error:
        return _complain(str(error), FAILED)
    lines = enumerate(demo.CELL.splitlines(), start=1)
    numbered = "\n".join(f"  {number:>2}  {line}".rstrip() for number, line in lines)
    print(f"\n{numbered}\n")
    print(_as_text(report, sys.stdout))
    print(f"\nThe same as a page: {page}")
    return 0


def _guards(args: Namespace) -> int:
    from cudalens.guards import catalogue_rows
    from cudalens.render.tables import guard_list, matching

    rows = matching(catalogue_rows(), args.words)
    if args.json_out:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    elif rows:
        print(guard_list(rows, width=_width(), color=_has_colour(sys.stdout)))
    if rows:
        return 0
    return _complain(f"no guard mentions {' '.join(args.words)!r}", FAILED)


def _show(args: Namespace) -> int:
    from cudalens.core.report import Report

    views: Views = []
    reports, status = [], 0
    for name in args.files:
        try:
            # utf-8-sig also reads a file that begins with a byte order mark.
            report = Report.from_dict(json.loads(Path(name).read_text(encoding="utf-8-sig")))
            views = _views(report, args) if len(args.files) == 1 else []
            reports.append((name, report, _as_text(report, sys.stdout)))
        except Exception as error:  # a file may hold anything, and a view may fail on it late
            is_page = Path(name).suffix.lower() in (".html", ".htm")
            why = "it is a page; show takes the .json" if is_page else why_unreadable(error)
            status = _complain(f"{name} is not a report that can be shown: {why}", FAILED)
    if len(args.files) == 1:
        for *_, text in reports:
            print(text)
            _write(views)
    elif reports:
        from cudalens.render.tables import report_list

        listed = ((name, report) for name, report, _ in reports)
        print(report_list(listed, width=_width(), color=_has_colour(sys.stdout)))
    return status


def _explain(args: Namespace) -> int:
    from cudalens.core.report_types import format_count
    from cudalens.logs.crash_log import read_log
    from cudalens.logs.log_verdict import explain_log, last_exception
    from cudalens.source.files import source_lines

    names = args.files or ["-"]
    if not args.files and sys.stdin.isatty():
        msg = "name a log, or hand it over: python train.py 2>&1 | cudalens explain"
        raise _UsageError(msg)
    try:
        log = read_log(chain.from_iterable(map(lines_of, names)))
    except OSError as error:
        return _complain(f"{error.filename} cannot be read: {error.strerror}", FAILED)
    report = explain_log(log, source_lines)
    if report is None:
        what = "standard input" if names == ["-"] else " and ".join(names)
        last = last_exception(log)
        other = f"; its last exception is {last}" if last else ""
        size = format_count(log.lines, "line")
        line = f"{what} ({size}) shows no failure of CUDA or torch{other}"
        return _complain(line, FAILED)
    print(_as_text(report, sys.stdout))
    _write(_views(report, args))
    return 0


Views: TypeAlias = list[tuple[Path, str]]
"""Files to write, and their texts."""


def _views(report: Report, args: Namespace) -> Views:
    """Return the files that were asked for, with their texts."""
    forms = ((args.html, report.to_html), (args.json, report.to_json))
    return [(expanded(name), text()) for name, text in forms if name is not None]


def _write(views: Views) -> None:
    for path, text in views:
        path.write_text(text, encoding="utf-8")
        print(f"cudalens: the report is in {path}", file=sys.stderr)


def _page(args: Namespace) -> int:
    from cudalens.core import error_pages

    try:
        text = error_pages.text(*filter(None, [args.name]))
    except KeyError:
        names = error_pages.names()
        word = args.name.casefold()
        close = [name for name in names if word in name] or get_close_matches(word, names, 1)
        meant = f"; did you mean {' or '.join(close)}?" if close else ""
        there = f"{' The' if meant else '; the'} pages are {', '.join(names)}"
        return _complain(f"there is no page {args.name!r}{meant}{there}", FAILED)
    if sys.stdout.isatty():
        from cudalens.render.tables import markdown

        text = markdown(text, width=_width(), color=_has_colour(sys.stdout))
    print(text)
    return 0


def _help_of(args: Namespace) -> int:
    if args.command is None:
        print(_help())
    elif args.command in _COMMANDS:
        print(_COMMANDS[args.command].parser().format_help(), end="")
    else:
        raise _UsageError(_no_script(args.command))
    return 0


_COMMANDS = {
    "demo": SubCommand(
        form="demo", does="one failing cell with its report, with or without a GPU", run=_demo
    ),
    "explain": SubCommand(
        form="explain LOG",
        does="explain the log of a crashed job (- for standard input)",
        run=_explain,
        more="Reads assertion lines, tracebacks and CUDA errors of all ranks, and says which op "
        "asserted,\nhow certain that is, on which line of yours, and which command finds the value "
        "next time.\nExit status 1: the log shows no failure of CUDA or torch.",
        table=(
            option("files", metavar="LOG", nargs="*", help="files (- or none: standard input)"),
            *FILES,
        ),
    ),
    "guards": SubCommand(
        form="guards [WORD]",
        does="which functions are checked, and for which values",
        run=_guards,
        more="Lists the guards that mention each WORD: cudalens guards embedding.",
        table=(
            option("words", metavar="WORD", nargs="*", help="of a function, op or rule"),
            option("--json", dest="json_out", action="store_true", help="print it as JSON"),
        ),
    ),
    "help": SubCommand(
        form="help [COMMAND]",
        does="this help, or that of a command",
        run=_help_of,
        table=(option("command", metavar="COMMAND", nargs="?", help="one of these"),),
    ),
    "page": SubCommand(
        form="page [NAME]",
        does="the page on an error, or which pages there are",
        run=_page,
        table=(option("name", metavar="NAME", nargs="?", help="of a page"),),
    ),
    "show": SubCommand(
        form="show FILE...",
        does="print a saved report, or list several",
        run=_show,
        table=(
            option("files", metavar="FILE", nargs="+", help="reports saved as JSON"),
            *FILES,
        ),
    ),
}


_NAMES = ", ".join(_COMMANDS)


def _help() -> str:
    forms = [
        ("cudalens [options] script.py [args...]", ""),
        ("cudalens [options] -m package.module [args...]", ""),
        *((f"cudalens {item.form}", item.does) for item in _COMMANDS.values()),
        ("cudalens --version", "the version of cudalens"),
    ]
    return help_text(
        "\n       ".join(f"{form:<28}{does}" if does else form for form, does in forms),
        DESCRIPTION,
        without=("--report", "--no-widgets"),
    )


if __name__ == "__main__":
    sys.exit(main())
