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
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from cudalens.session.options import Options, OptionsError, help_text, parse, take

if TYPE_CHECKING:
    from cudalens.core.report import Report

__all__ = ["main"]

USAGE = """cudalens [options] script.py [args...]
       cudalens [options] -m package.module [args...]
       cudalens demo                 the quickstart's failing cell, on a GPU or a rehearsal device
       cudalens guards [--json]      which ops are checked for what
       cudalens show report.json     print a saved report"""

FAILED, MISUSED, INTERRUPTED = 1, 2, 130
"""Exit codes, as Python itself gives them."""


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
        return _complain(str(error), MISUSED)


def _dispatch(words: list[str]) -> int:
    count = take(words, stop=["-m"])
    options = _options(words[:count])
    rest = words[count:]
    if options.help or not words:
        print(help_text(USAGE))
        return 0
    if not rest:
        msg = "nothing to run: name a script, or -m and a module"
        raise _UsageError(msg)
    command = _COMMANDS.get(rest[0])
    if command is not None and not count:
        return _run_command(command, rest[1:])
    if rest[0] == "-m":
        if len(rest) == 1:
            msg = "-m needs the name of a module"
            raise _UsageError(msg)
        return _run(options, lambda: _as_module(rest[1], rest[2:]))
    script = Path(rest[0])
    if not script.exists():
        msg = f"there is no script {rest[0]!r}"
        raise _UsageError(msg)
    return _run(options, lambda: _as_script(script, rest[1:]))


def _run_command(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run a sub-command whose reader may leave early, as `head` does."""
    try:
        status = command(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at its end: that has to go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return status


def _options(tokens: list[str]) -> Options:
    options = parse(tokens)
    if options.report is not None:
        msg = "-r binds a variable of a notebook; use --json FILE or --html FILE here"
        raise _UsageError(msg)
    return options


def _as_script(script: Path, arguments: list[str]) -> None:
    sys.argv = [str(script), *arguments]
    _import_from(script.resolve().parent)
    if script.is_dir() or zipfile.is_zipfile(script):
        runpy.run_path(str(script), run_name="__main__")
        return
    # As Python runs a script: `__file__` is absolute, and argv[0] is what was typed.  runpy makes
    # both the same.  The module has to be in its place for what pickles the script's classes.
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
    sys.argv = [name, *arguments]  # runpy puts the file's path in place of the name
    _import_from(Path.cwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _import_from(folder: Path) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = str(folder)


def _run(options: Options, program: Callable[[], None]) -> int:
    """Run the user's program checked; what it raised is shown as Python shows it."""
    try:
        from cudalens.session.session import CheckSession
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return _complain("cudalens needs torch, which is not installed here", FAILED)
    session = CheckSession(**options.for_session())
    status = 0
    try:
        with session:
            program()
    except SystemExit:
        _print_report(session.report)
        raise
    except BaseException as error:
        error.__traceback__ = _own_frames_off(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    _print_report(session.report)
    return status


def _own_frames_off(trace: TracebackType | None) -> TracebackType | None:
    """Cut the frames of this module and of runpy off the top of a traceback."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
        trace = trace.tb_next
    return trace


_OWN_FILES = frozenset({__file__, runpy.__file__, runpy.run_path.__code__.co_filename})


def _print_report(report: Report | None) -> None:
    if report is None:
        return
    try:
        text = _as_text(report, sys.stderr)
    except Exception as error:
        # The program's own failure has been shown: its exit status must not change for ours.
        text = f"cudalens: the report could not be shown: {error!r}"
    print(text, file=sys.stderr)


def _as_text(report: Report, stream: Any) -> str:
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    return report.to_text(width=width, color=stream.isatty())


def _complain(line: str, status: int) -> int:
    print(f"cudalens: {line}", file=sys.stderr)
    return status


def _demo(arguments: list[str]) -> int:
    _expect(arguments, "cudalens demo", 0)
    from cudalens.core.errors import SimulationError
    from cudalens.session import demo

    page = Path("demo") / "report.html"
    try:
        report = demo.run(page)
    except SimulationError as error:
        return _complain(str(error), FAILED)
    print(f"\n{_numbered(demo.CELL)}\n")
    print(_as_text(report, sys.stdout))
    print(f"\nThe same as a page: {page}")
    return 0


def _numbered(text: str) -> str:
    lines = enumerate(text.splitlines(), start=1)
    return "\n".join(f"  {number:>2}  {line}".rstrip() for number, line in lines)


def _guards(arguments: list[str]) -> int:
    if arguments not in ([], ["--json"]):
        msg = "cudalens guards takes --json or nothing"
        raise _UsageError(msg)
    from cudalens.guards import catalogue_rows

    rows = catalogue_rows()
    if arguments:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        _print_table(rows)
    return 0


_PIPED_WIDTH = 140
"""Columns of the catalogue where no terminal says how many it has."""


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False)
    if not console.is_terminal:
        console.width = max(console.width, _PIPED_WIDTH)
    table = Table(box=box.SIMPLE_HEAD, show_lines=True)
    table.add_column("op", overflow="fold", ratio=3, no_wrap=console.width >= _PIPED_WIDTH)
    table.add_column("what has to hold, and the kernel that asserts it", overflow="fold", ratio=4)
    table.add_column("cost", ratio=2)
    table.add_column("met", ratio=1)
    for row in rows:
        # The overloads of an op share its guard: .out, .Tensor and the like.
        names = dict.fromkeys(op.removeprefix("aten::").partition(".")[0] for op in row["op"])
        met = f"{row['frequency']}\n(warning)" if row["silent"] else row["frequency"]
        table.add_row("\n".join(names), f"{row['precondition']}\n{row['source']}", row["cost"], met)
    console.print(table)


def _show(arguments: list[str]) -> int:
    _expect(arguments, "cudalens show report.json", 1)
    from cudalens.core.report import Report

    try:
        data = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
        text = _as_text(Report.from_dict(data), sys.stdout)
    except Exception as error:  # a file may hold anything; what it does to a view is known late
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        return _complain(f"{arguments[0]} is not a report that can be shown: {reason}", FAILED)
    print(text)
    return 0


def _expect(arguments: list[str], form: str, count: int) -> None:
    if len(arguments) != count:
        msg = f"expected: {form}"
        raise _UsageError(msg)


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "demo": _demo,
    "guards": _guards,
    "show": _show,
}


if __name__ == "__main__":
    sys.exit(main())
