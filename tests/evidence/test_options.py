"""Which call declares an option with a default."""

from __future__ import annotations

import ast

import pytest

from cudalens.evidence.options import is_option


@pytest.mark.parametrize(
    ("call", "is_it"),
    [
        ("p.add_argument('--n-rows', type=int, default=5)", True),
        ("p.add_argument('-n', '--n-rows', default=5)", True),
        ("p.add_argument('--rows', dest='n_rows', default=5)", True),
        ("p.add_argument('--n-rows', dest='rows', default=5)", False),
        ("p.add_argument('--n-rows', default=6)", False),
        ("p.add_argument('--n-rows', default=n)", False),
        ("p.add_argument('--n-rows', type=int)", False),
        ("p.add_argument('--n-row', default=5)", False),
        ("p.declare('--n-rows', default=5)", False),
        ("n_rows", False),
    ],
)
def test_the_option_of_an_attribute(call: str, is_it: bool) -> None:
    assert is_option(ast.parse(call, mode="eval").body, "n_rows", 5) is is_it
