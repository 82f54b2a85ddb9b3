"""Options: one table for the magics and the command line."""

from __future__ import annotations

import inspect

import pytest

from cudalens.session.options import (
    FILES,
    Options,
    OptionsError,
    SubCommand,
    Table,
    help_text,
    meant_command,
    option,
    parse,
    split_line,
    subcommand,
    take,
)
from cudalens.session.session import CheckSession


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", Options()),
        ("--fast", Options(fast=True)),
        ("--nan --no-sync", Options(nan=True, sync=False)),
        ("--html a.html --json=b.json", Options(html="a.html", json="b.json")),
        ("--html 'my page.html'", Options(html="my page.html")),
        ('--json="my data.json"', Options(json="my data.json")),
        ("--no-widgets", Options(widgets=False)),
        ("-r found", Options(report="found")),
        ("--report found", Options(report="found")),
        ("--max-ops 1", Options(max_ops=1)),
        ("--no-force-eager", Options(force_eager=False)),
        ("-h", Options(help=True)),
        ("--help", Options(help=True)),
        ("--nan=strict", Options(nan="strict")),
        ("--deferred", Options(deferred=True)),
        ("--max-ops=10", Options(max_ops=10)),
        ("--html a\\b.html", Options(html="a\\b.html")),
    ],
)
def test_each_option_sets_its_field(line: str, expected: Options) -> None:
    assert split_line(line) == (expected, "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--bogus", "unrecognized arguments: --bogus"),
        ("--fas", "unrecognized arguments: --fas; did you mean --fast?"),
        ("--fasst --nann", "unrecognized arguments: --fasst --nann; did you mean --fast?"),
        ("--max-opps=3", "unrecognized arguments: --max-opps=3; did you mean --max-ops?"),
        ("-x + y", "unrecognized arguments: -x"),
        ("--html", "argument --html: expected one argument"),
        ("--max-ops many", "argument --max-ops: invalid positive number value: 'many'"),
        ("-r 3d", "argument -r/--report: invalid variable name value: '3d'"),
        ("--fasst -x", "unrecognized arguments: --fasst -x; did you mean --fast?"),
        ("--fast=3", "--fast does not take '3'"),
        ("--nan=foo", "--nan does not take 'foo': write --nan or --nan=strict"),
        ("--max-ops --fasst", "argument --max-ops: expected one argument"),
        ("--max-ops 0", "argument --max-ops: invalid positive number value: '0'"),
        ("-r class", "argument -r/--report: invalid variable name value: 'class'"),
    ],
)
def test_a_wrong_option_is_told_with_what_was_probably_meant(line: str, said: str) -> None:
    with pytest.raises(OptionsError) as caught:
        split_line(line)
    assert str(caught.value) == f"{said} (--help lists the options)"


@pytest.mark.parametrize(
    "statement", ["f('a  b', \"c\")", "x - y", "text = '{x} $x'", "f(--x)", "x; y;", "g(r'a\\b')"]
)
@pytest.mark.parametrize("options", ["", "--fast ", "--html 'a b' ", "-- "])
def test_the_statement_is_kept_as_typed(options: str, statement: str) -> None:
    assert split_line(options + statement)[1] == statement


def test_two_dashes_end_the_options() -> None:
    """A statement may begin with a minus sign."""
    assert split_line("--fast -- -x") == (Options(fast=True), "-x")


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("on", ("on", "")),
        ("on --nan", ("on", "--nan")),
        ("on  -r found", ("on", "-r found")),
        ("off", ("off", "")),
        ("off --fast", ("off", "--fast")),
        ("last --no-widgets", ("last", "--no-widgets")),
        ("status -h", ("status", "-h")),
        ("simulate", ("simulate", "")),
        ("simulate off", ("simulate off", "")),
        ("simulate   off", ("simulate off", "")),
        ("simulate off --help", ("simulate off", "--help")),
        ("simulate --help", ("simulate", "--help")),
        ("last off", None),
        ("last -x", None),
        ("last -- x", None),
        ("on = 3", None),
        ("on - x", None),
        ("last + 1", None),
        ("offset", None),
        ("simulate(3)", None),
    ],
)
def test_only_exact_words_are_subcommands(rest: str, expected: tuple[str, str] | None) -> None:
    assert subcommand(rest) == expected


def test_options_behind_a_word_join_those_before_it() -> None:
    before = Options(fast=True, max_ops=7)
    both = Options(fast=True, widgets=False, max_ops=9)
    assert split_line("--no-widgets --max-ops 9", before) == (both, "")
    assert split_line("", before) == (before, "")


@pytest.mark.parametrize(
    ("tokens", "count"),
    [
        (["--fast", "train.py", "--lr", "1"], 1),
        (["--html", "out.html", "train.py"], 2),
        (["--html=out.html", "train.py"], 1),
        (["-m", "package"], 0),
        (["--json"], 1),
        (["--fast", "-m", "package", "--nan"], 1),
        (["--fast", "--", "--nan"], 1),
        (["-r", "found", "--fast", "x"], 3),
        ([], 0),
    ],
)
def test_options_end_where_the_script_begins(tokens: list[str], count: int) -> None:
    assert take(tokens, stop=["-m"]) == count


@pytest.mark.parametrize(
    ("rest", "command"),
    [(" explian ", "explain"), ("x.explain()", None), ("explain_", "explain"), ("xyzzy", None)],
)
def test_only_a_name_is_taken_for_a_misspelt_command(rest: str, command: str | None) -> None:
    assert meant_command(rest, {}) == command
    assert meant_command("explian", {"explian"}) is None
    assert meant_command("oct", {}) is None  # of Python's own


def test_later_options_take_the_place_of_earlier_ones() -> None:
    before = parse(["--nan=strict", "--html", "a.html"])
    assert parse(["--fast"], before) == Options(nan="strict", html="a.html", fast=True)
    assert parse(["--nan", "--html", "b.html"], before) == Options(nan=True, html="b.html")


def test_help_names_every_option() -> None:
    text = help_text()
    for word in ("--fast", "--nan", "--html", "--json", "--no-widgets", "--report", "--max-ops"):
        assert word in text
    for name in ("on", "off", "status", "last", "simulate", "explain"):
        assert name in text


def test_help_leaves_out_what_is_of_no_use_there() -> None:
    text = help_text("the usage 100 %", "the description", without=("--report", "--no-sync"))
    assert "usage: the usage 100 %" in text and "the description" in text
    for name in ("--report", "  -r", "--no-sync"):
        assert name in help_text() and name not in text
    assert "--no-force-eager" in text
    assert "(default 4096)" in text


WORDS = option("words", metavar="WORD", nargs="*", help="of a rule")


@pytest.mark.parametrize(
    ("form", "table", "usage"),
    [
        ("demo", (), "cudalens demo"),
        ("guards [WORD]", (WORDS,), "cudalens guards [WORD]"),
        ("show FILE...", FILES, "cudalens show [options] FILE..."),
        ("show FILE...", (WORDS, *FILES), "cudalens show [options] FILE..."),
    ],
)
def test_a_sub_command_says_how_it_is_called(form: str, table: Table, usage: str) -> None:
    command = SubCommand(form=form, does="what it does", run=lambda args: 0, table=table, more="!")
    lines = command.parser().format_help().splitlines()
    assert lines[0] == f"usage: {usage}"
    assert lines[2:5] == ["What it does.", "", "!"]
    assert any(line.split()[:2] == ["-h,", "--help"] for line in lines)


def test_an_option_without_a_value_is_a_switch() -> None:
    assert option("--on", help="h")[1] == {"action": "store_true", "help": "h"}
    off = {"action": "store_false", "dest": "sync", "help": "h"}
    assert option("--no-sync", dest="sync", help="h")[1] == off
    assert option("--to", metavar="FILE", help="h")[1] == {"metavar": "FILE", "help": "h"}


def test_the_session_gets_its_own_options_and_none_of_the_front_end() -> None:
    taken = inspect.signature(CheckSession).parameters
    assert Options().for_session() == {name: item.default for name, item in taken.items()}
