"""The options of a check: one table for ``%cudacheck``, ``%%cudacheck`` and the command line.

Standard library only, so that loading the extension stays cheap.
"""

from __future__ import annotations

import argparse
import builtins
import keyword
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

USAGE = """%%cudacheck [options]           over a cell: run it checked
       %cudacheck [options] statement  run one statement checked
       %cudacheck on [options]         check every following cell, until %cudacheck off
       %cudacheck simulate             run CUDA code on the CPU, until %cudacheck simulate off
       %cudacheck explain              explain the exception that was just shown
       %cudacheck status | last        what is installed | the last report again"""

DESCRIPTION = """Find bad values before they crash a CUDA kernel.

The cell runs as it would without this line.  When something is wrong, one report says
which value, where, which bound it breaks and on which line of yours. CUDA stays usable."""

COMMANDS = ("on", "off", "status", "last", "explain", "simulate")
"""The words that ``%cudacheck`` takes in place of a statement."""
MODES: dict[str, dict[str, Any]] = {
    "on": {},
    "fast": {"fast": True},
    "nan": {"nan": True},
    "nan=strict": {"nan": "strict"},
    "deferred": {"deferred": True},
}
"""Options of a check by the word that ``CUDALENS`` in the environment and pytest take for them."""
_COMMAND = re.compile(
    rf"(?P<words>simulate +off|{'|'.join(COMMANDS)})"
    r"(?: +(?P<options>(?:--\w|-[rh]\b).*))?"
)
_TOKEN = re.compile(r"""(?:"[^"]*"|'[^']*'|\S)+""")
_QUOTED = re.compile(r""""([^"]*)"|'([^']*)'""")


class OptionsError(ValueError):
    """An unknown option, or a value that an option does not take; the text is one line."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a check; each field is named as the keyword of ``cudalens.check()``."""

    fast: bool = False
    deferred: bool = False
    nan: bool | Literal["strict"] = False
    html: str | None = None
    json: str | None = None
    widgets: bool = True
    report: str | None = None
    max_ops: int = 4096
    sync: bool = True
    force_eager: bool = True
    help: bool = False

    def for_session(self) -> dict[str, Any]:
        """Return the keyword arguments of ``CheckSession``; other fields are the front end's."""
        front_end = {"report", "help"}
        return {name: value for name, value in vars(self).items() if name not in front_end}


_DEFAULT = Options()


class OptionParser(argparse.ArgumentParser):
    """A parser that raises one-line errors, where argparse would print and exit."""

    def __init__(self, usage: str, description: str, table: Table) -> None:
        super().__init__(
            prog="cudacheck",
            # argparse formats the usage with `%`.
            usage=usage.replace("%", "%%"),
            description=description,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
                prog, max_help_position=26, width=96
            ),
            add_help=False,
            allow_abbrev=False,
        )
        for names, spec in table:
            self.add_argument(*names, **spec)

    def error(self, message: str) -> NoReturn:
        """Raise the error, with the option that was probably meant."""
        from difflib import get_close_matches  # loading the extension stays cheap

        names = [name for name in self._option_string_actions if name.startswith("--")]
        unknown = re.findall(r"(?<=\s)--[\w-]+", message) if "unrecognized" in message else []
        close = [name for word in unknown[:1] for name in get_close_matches(word, names, 1)]
        meant = f"; did you mean {close[0]}?" if close else ""
        if given := re.fullmatch(r"argument (--[\w-]+): ignored explicit argument (.*)", message):
            forms = [name for name in names if name.partition("=")[0] == given[1]]
            message = f"{given[1]} does not take {given[2]}"
            meant = f": write {' or '.join(forms)}" if len(forms) > 1 else ""
        msg = f"{message}{meant} (--help lists the options)"
        raise OptionsError(msg)


Table: TypeAlias = tuple[tuple[tuple[str, ...], dict[str, Any]], ...]
"""Arguments and options, as ``add_argument`` takes them."""


def option(*names: str, help: str, **spec: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return a table row: a switch unless it has a ``metavar``; with ``dest`` it switches off."""
    switch = {"action": "store_false" if "dest" in spec else "store_true"}
    return names, {**({} if "metavar" in spec else switch), **spec, "help": help}


FILES: Table = (
    option("--html", metavar="FILE", help="write the report to FILE as one HTML page"),
    option("--json", metavar="FILE", help="write the report to FILE as JSON"),
)
_HELP = option("-h", "--help", help="show this help")


@dataclass(frozen=True, kw_only=True)
class SubCommand:
    """A sub-command of the command line: its form, what it does in words, and what runs it."""

    form: str
    """Usage in the help: ``show FILE...``."""
    does: str
    run: Callable[[argparse.Namespace], int]
    more: str = ""
    """Text that its own help adds."""
    table: Table = ()

    def parser(self) -> OptionParser:
        """Return the parser of its arguments."""
        name, _, rest = self.form.partition(" ")
        options = " [options]" if any(names[0][0] == "-" for names, _ in self.table) else ""
        text = f"{self.does[0].upper()}{self.does[1:]}.\n\n{self.more}".strip()
        usage = f"cudalens {name}{options} {rest}".rstrip()
        return OptionParser(usage, text, (*self.table, _HELP))


def parse(tokens: Sequence[str], defaults: Options = _DEFAULT) -> Options:
    """Parse option tokens; they override ``defaults``.

    Raises:
        OptionsError: an option is unknown, or its value is missing or unfit.
    """
    parsed = _PARSER.parse_args(list(tokens), argparse.Namespace(**vars(defaults)))
    return Options(**vars(parsed))


def take(tokens: Sequence[str], *, stop: Sequence[str] = ()) -> int:
    """Count the leading tokens that are options or values of options.

    Args:
        stop: tokens that end the options although they begin with a dash.
    """
    count = 0
    while count < len(tokens):
        token = tokens[count]
        if token in stop or token == "--" or not token.startswith("-"):
            break
        count += 2 if token in _WITH_VALUE else 1
    return min(count, len(tokens))


def split_line(line: str, defaults: Options = _DEFAULT) -> tuple[Options, str]:
    """Split a magic's line into its options and the rest, which is kept as it was typed.

    Raises:
        OptionsError: as :func:`parse`.
    """
    matches = list(_TOKEN.finditer(line))
    count = take([match[0] for match in matches])
    tokens = [
        _QUOTED.sub(lambda quoted: quoted[1] or quoted[2] or "", m[0]) for m in matches[:count]
    ]
    options = parse(tokens, defaults)
    if count < len(matches) and matches[count][0] == "--":
        count += 1
    rest = line[matches[count].start() :] if count < len(matches) else ""
    return options, rest.rstrip()


def subcommand(rest: str) -> tuple[str, str] | None:
    """Read what follows the options of ``%cudacheck`` as a sub-command.

    ``None`` means that it is a statement to check: only the exact words are sub-commands, so
    ``last = 3`` is not one.

    Returns:
        the words, such as ``simulate off``, and the options behind, which count as those before do.
    """
    match = _COMMAND.fullmatch(rest.strip())
    if match is None:
        return None
    return " ".join(match["words"].split()), match["options"] or ""


def meant_command(rest: str, names: Container[str]) -> str | None:
    """Return the sub-command that a word is a misspelling of, ``None`` for a name in ``names``.

    Example:
        >>> meant_command("explian", {"x"}), meant_command("explian", {"explian"})
        ('explain', None)
    """
    word = rest.strip()
    if not word.isidentifier() or word in names or hasattr(builtins, word):
        return None
    from difflib import get_close_matches  # loading the extension stays cheap

    return next(iter(get_close_matches(word, COMMANDS, 1)), None)


def help_text(
    usage: str = USAGE, description: str = DESCRIPTION, *, without: Sequence[str] = ()
) -> str:
    """Return the help: the forms of the command, what it does, and one line for each option.

    Args:
        without: options to leave out.
    """
    table = tuple(row for row in _TABLE if not set(without) & set(row[0]))
    return OptionParser(usage, description, table).format_help()


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


_TABLE: Table = (
    option("--fast", help="guards only: no recorder, no synchronizing per op"),
    option("--deferred", help="guards only, and no call waits for the device"),
    option(
        "--nan", help="also stop where a NaN or Inf reaches the loss, a gradient or a parameter"
    ),
    option(
        "--nan=strict",
        dest="nan",
        action="store_const",
        const="strict",
        help="stop at the call that makes the first NaN or Inf, wherever it goes",
    ),
    *FILES,
    option("--no-widgets", dest="widgets", help="static output"),
    option("-r", "--report", metavar="NAME", type=_name, help="bind the report to a variable"),
    option(
        "--max-ops",
        metavar="N",
        type=_positive,
        default=Options.max_ops,
        help="how many ops the recorder keeps (default %(default)s)",
    ),
    option("--no-sync", dest="sync", help="do not synchronize after each op"),
    option("--no-force-eager", dest="force_eager", help="let compiled functions run compiled"),
    _HELP,
)


_PARSER = OptionParser(USAGE, DESCRIPTION, _TABLE)
_WITH_VALUE = frozenset(name for names, spec in _TABLE if "metavar" in spec for name in names)
