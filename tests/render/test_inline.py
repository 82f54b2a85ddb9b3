"""Looks at the elements themselves, for where style sheets are dropped."""

from __future__ import annotations

import re

import pytest

from cudalens.render.inline import SAFE_COLOURS, inlined


def styles(html: str) -> list[str]:
    """Return the style of each opening tag, empty where it has none."""
    tags = re.findall(r"<[a-z]+[^>]*>", inlined(html, "").partition("<link")[0])
    return [(re.findall(r'style="([^"]*)"', tag) or [""])[0] for tag in tags]


def test_an_element_has_the_look_of_its_name_and_of_each_class() -> None:
    assert styles('<td class="cl-long cl-other cl-scroll">') == [
        "text-align:left;font-size:14px;overflow-x:auto"
    ]
    assert styles('<p class="cl-other">') == styles("<p>") == [""]


def test_a_style_of_its_own_is_kept_once_and_goes_first() -> None:
    drawn = inlined('<td style="width:3px" class="cl-long" title="a">x</td>', "")
    style = 'style="width:3px;text-align:left;font-size:14px"'
    assert drawn.startswith(f'<td class="cl-long" title="a" {style}>x</td>')
    assert styles('<p style="width:3px">') == ["width:3px"]


@pytest.mark.parametrize(("card", "colour"), [("cl-card cl-is-bad", "bad"), ("cl-card", "warn")])
def test_only_the_card_of_an_error_is_red(card: str, colour: str) -> None:
    """A class of the same name further inside makes no card red."""
    other = {"bad": "warn", "warn": "bad"}[colour]
    html = f'<div class="{card}"><p class="cl-b"><p class="cl-hot"><i class="cl-is-bad">'
    drawn = " ".join(styles(html))
    for name in ("", "soft"):
        assert SAFE_COLOURS[f"{colour}{name}"] in drawn
        assert SAFE_COLOURS[f"{other}{name}"] not in drawn


def test_the_colour_of_the_theme_comes_after_one_that_every_page_shows() -> None:
    plain = SAFE_COLOURS["link"]
    assert styles("<a>") == [f"color:{plain};color:var(--cl-link,{plain})"]


def test_the_sheet_is_a_link_without_line_breaks() -> None:
    drawn = inlined(" <p>x</p>\n", 'a {color: "#123"}\nb {}\n')
    href = "data:text/css,a {color: %22%23123%22}b {}"
    assert drawn == f'<p>x</p><link rel="stylesheet" href="{href}">'
