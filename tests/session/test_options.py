"""Options: one table for the magics and the command line."""

from __future__ import annotations

import inspect

import pytest

from cudalens.session.options import (
    Options,
    OptionsError,
    help_text,
    meant_command,
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
    ],
)
def test_each_option_sets_its_field(line: str, expected: Options) -> None:
    assert split_line(line) == (expected, "")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("--bogus", "--bogus"),
        ("--fas", "--fas; did you mean --fast? (--help lists the options)"),
        ("--fasst --nann", "--nann; did you mean --fast? (--help"),
        ("--max-opps=3", "--max-opps=3; did you mean --max-ops?"),
        ("--html", "--html"),
        ("--max-ops 0", "--max-ops"),
        ("--max-ops many", "--max-ops"),
        ("-r 3d", "--report"),
        ("-r class", "--report"),
        ("-x + y", "-x"),
        ("--nan=foo", "--nan does not take 'foo': write --nan or --nan=strict"),
    ],
)
def test_a_wrong_option_is_one_line(line: str, word: str) -> None:
    with pytest.raises(OptionsError) as caught:
        split_line(line)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


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


def test_help_names_every_option() -> None:
    text = help_text()
    for word in ("--fast", "--nan", "--html", "--json", "--no-widgets", "--report", "--max-ops"):
        assert word in text
    for name in ("on", "off", "status", "last", "simulate", "explain"):
        assert name in text


def test_the_session_gets_its_own_options_and_none_of_the_front_end() -> None:
    taken = inspect.signature(CheckSession).parameters
    assert Options().for_session() == {name: item.default for name, item in taken.items()}
