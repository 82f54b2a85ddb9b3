"""The options of a check: one table for ``%cudacheck``, ``%%cudacheck`` and the command line.

Standard library only, so that loading the extension stays cheap.
"""

from __future__ import annotations

import argparse
import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

__all__ = [
    "Command",
    "Options",
    "OptionsError",
    "help_text",
    "joined",
    "parse",
    "split_line",
    "subcommand",
    "take",
]

USAGE = """%%cudacheck [options]           over a cell: run it checked
       %cudacheck [options] statement  run one statement checked
       %cudacheck on [options]         check every following cell, until %cudacheck off
       %cudacheck simulate             rehearse on the CPU as if it were CUDA; simulate off
       %cudacheck explain              explain the exception that was just shown
       %cudacheck status | last        what is installed | the last report again"""

DESCRIPTION = """Find the bad value before the CUDA kernel asserts.

The cell runs as it would without this line.  When something is wrong, one report says
which value, where, which bound it breaks and on which line of yours; CUDA stays usable."""

_WORDS = frozenset({"on", "off", "status", "last", "simulate", "explain"})
_COMMAND = re.compile(
    r"(?P<word>\w+)(?: +(?P<argument>off))?(?: +(?P<options>(?:--\w|-[rh]\b).*))?"
)
_TOKEN = re.compile(r"""(?:"[^"]*"|'[^']*'|\S)+""")
_QUOTED = re.compile(r""""([^"]*)"|'([^']*)'""")


class OptionsError(ValueError):
    """An option that is not known, or a value that it does not take; the text is one line."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for, each field named as the keyword of ``cudalens.check()``."""

    fast: bool = False
    nan: bool = False
    html: str | None = None
    json: str | None = None
    widgets: bool = True
    report: str | None = None
    max_ops: int = 4096
    sync: bool = True
    force_eager: bool = True
    help: bool = False

    def for_session(self) -> dict[str, Any]:
        """Return the keyword arguments of ``CheckSession``; the other fields are the front
        end's.
        """
        front_end = {"report", "help"}
        return {name: value for name, value in vars(self).items() if name not in front_end}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        msg = f"{message} (--help lists the options)"
        raise OptionsError(msg)


def parse(tokens: Sequence[str]) -> Options:
    """Read option tokens.

    Raises:
        OptionsError: an option is unknown, or its value is missing or unfit.
    """
    parsed = _PARSER.parse_args(list(tokens))
    return Options(**vars(parsed))


def take(tokens: Sequence[str], *, stop: Sequence[str] = ()) -> int:
    """Count the leading tokens that are options or values of options.

    ``stop`` names tokens that end the options although they begin with a dash.
    """
    count = 0
    while count < len(tokens):
        token = tokens[count]
        if token in stop or token == "--" or not token.startswith("-"):
            break
        count += 2 if token in _WITH_VALUE else 1
    return min(count, len(tokens))


def split_line(line: str) -> tuple[Options, str]:
    """Split a magic's line into its options and the rest, which is kept as it was typed.

    Raises:
        OptionsError: as :func:`parse`.
    """
    found = list(_TOKEN.finditer(line))
    count = take([match.group() for match in found])
    options = parse([_unquote(match.group()) for match in found[:count]])
    if count < len(found) and found[count].group() == "--":
        count += 1
    rest = line[found[count].start() :] if count < len(found) else ""
    return options, rest.rstrip()


class Command(NamedTuple):
    """A sub-command of ``%cudacheck`` as it was typed."""

    word: str
    argument: str = ""
    """``off`` behind ``simulate``."""
    options: str = ""
    """The options behind it, which count as those before it do."""


def subcommand(rest: str) -> Command | None:
    """Read what follows the options of ``%cudacheck`` as a sub-command.

    ``None`` means that it is a statement to check: only the exact words are sub-commands, so
    ``last = 3`` is not one.
    """
    match = _COMMAND.fullmatch(rest.strip())
    if match is None or match["word"] not in _WORDS:
        return None
    if match["argument"] and match["word"] != "simulate":
        return None
    return Command(match["word"], match["argument"] or "", match["options"] or "")


def joined(options: Options, given: Options) -> Options:
    """Return ``options`` with what was set in ``given`` as well."""
    default = vars(Options())
    changed = {name: value for name, value in vars(given).items() if value != default[name]}
    return replace(options, **changed)


def help_text(usage: str = USAGE) -> str:
    """Return the help: the forms of the command, what it does, and one line for each option."""
    return _build_parser(usage).format_help()


def _unquote(token: str) -> str:
    return _QUOTED.sub(lambda match: match.group(1) or match.group(2) or "", token)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


_positive.__name__ = "positive number"  # argparse names the type in its message


def _name(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise ValueError
    return text


_name.__name__ = "variable name"


_TABLE: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (
        ("--fast",),
        {"action": "store_true", "help": "guards only: no recorder, no synchronising per op"},
    ),
    (
        ("--nan",),
        {"action": "store_true", "help": "also stop at the first result that is NaN or Inf"},
    ),
    (("--html",), {"metavar": "FILE", "help": "write the report to FILE as one HTML page"}),
    (("--json",), {"metavar": "FILE", "help": "write the report to FILE as JSON"}),
    (
        ("--no-widgets",),
        {"dest": "widgets", "action": "store_false", "help": "static output"},
    ),
    (
        ("-r", "--report"),
        {"metavar": "NAME", "type": _name, "help": "bind the report to a variable"},
    ),
    (
        ("--max-ops",),
        {
            "metavar": "N",
            "type": _positive,
            "default": Options.max_ops,
            "help": "how many ops the recorder keeps (default %(default)s)",
        },
    ),
    (
        ("--no-sync",),
        {"dest": "sync", "action": "store_false", "help": "do not synchronise after each op"},
    ),
    (
        ("--no-force-eager",),
        {
            "dest": "force_eager",
            "action": "store_false",
            "help": "let compiled functions run compiled",
        },
    ),
    (("-h", "--help"), {"action": "store_true", "help": "show this help"}),
)


def _build_parser(usage: str) -> _Parser:
    parser = _Parser(
        prog="cudacheck",
        usage=usage.replace("%", "%%"),
        description=DESCRIPTION,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=26, width=96
        ),
        add_help=False,
        allow_abbrev=False,
    )
    for names, spec in _TABLE:
        parser.add_argument(*names, **spec)
    return parser


_PARSER = _build_parser(USAGE)
_WITH_VALUE = frozenset(name for names, spec in _TABLE if "metavar" in spec for name in names)
