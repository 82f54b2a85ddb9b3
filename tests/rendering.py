"""What the tests of the views share: golden files, reading HTML, hostile reports."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from cudalens.core.report import Report
from tests.amount import AMOUNT

GOLDEN = Path(__file__).with_name("golden")
_BASE64 = re.compile(r"(?<=^data:image/svg\+xml;base64,)[A-Za-z0-9+/=]+$|\d+(?=px$)")
VOID = {"meta", "br", "hr", "img", "input", "link"}

# Fields whose words the model fixes: a foreign word there is no report.
_FIXED = {"kind", "certainty", "phase", "outcome", "role", "schema_version"}
_KEYS = {"id", "from", "to", "focus"}


def check_golden(name: str, text: str) -> None:
    """Compare with a golden file, or write it when CUDALENS_UPDATE_GOLDEN is set to 1."""
    path = GOLDEN / name
    if os.environ.get("CUDALENS_UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{name} differs from its golden file"


class Page(HTMLParser):
    """An HTML text as its elements with attributes, and as the text between them."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[tuple[str, ...], str]] = []
        self.strange: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"elements left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append((tuple(self.open), data))

    def handle_comment(self, data: str) -> None:
        self.strange.append(data)

    handle_pi = unknown_decl = handle_comment

    def text(self, *, without: tuple[str, ...] = ("style",)) -> str:
        return "".join(text for inside, text in self.texts if not set(without) & set(inside))

    def every(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of each element of that name."""
        return [attributes for name, attributes in self.elements if name == tag]

    def looks(self) -> set[tuple[str, ...]]:
        """Return each element with its attribute names, and the values that are never a user's."""
        shown = ("class", "style", "href", "src", "role", "fill", "stroke", "open")
        return {
            (
                tag,
                *(
                    f"{key}={_BASE64.sub('', value or '') if key in shown else ''}"
                    for key, value in sorted(attrs.items(), key=str)
                ),
            )
            for tag, attrs in self.elements
        }


def selectors(css: str) -> list[str]:
    """Return every selector of a style sheet, in at-rules too; parentheses are not nested."""
    preludes = [found.strip() for found in re.findall(r"([^{}]+)\{", css)]
    lists = [prelude for prelude in preludes if not prelude.startswith("@")]
    return [one for several in lists for one in re.split(r",(?![^()]*\))", several)]


# The elements that GitHub keeps in HTML of a user's, from its published allowlist.
_ALLOWED = """
h1 h2 h3 h4 h5 h6 br b i strong em a pre code img tt div ins del sup sub p ol ul table thead tbody
tfoot blockquote dl dt dd kbd q samp var hr ruby rt rp li tr td th s strike summary details caption
figure figcaption abbr bdo cite dfn mark small span time wbr
"""


def sanitised(html: str) -> Page:
    """Return what a strict front end shows: unknown elements are dropped, but not their text.

    Every attribute goes but the source and the words of an image.
    """
    kept = ""
    for token in re.findall(r"<[^>]*>|[^<]+", html):
        tag = re.match(r"</?(\w+)", token)
        if tag is None:
            kept += token
        elif tag[1] in _ALLOWED.split():
            attributes = re.findall(r' (?:src|alt)="[^"]*"', token) if tag[1] == "img" else []
            kept += tag[0] + "".join(attributes) + ">"
    return Page(kept)


def with_texts(report: Report, change: Callable[[str], str]) -> Report:
    """Return the report with every free text in it changed; ids stay told apart."""

    def walk(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {name: walk(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [walk(item, key) for item in value]
        if not isinstance(value, str) or key in _FIXED:
            return value
        return change(value) + value if key in _KEYS else change(value)

    return Report.from_dict(walk(report.to_dict(), ""))


_SEEDS = (
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    '" onfocus="alert(1)" autofocus="',
    "</style><style>*{display:none}</style>",
    "</svg><script>alert(1)</script>",
    "</title></text><a href='javascript:alert(1)'>x</a>",
    "</pre></code></details><h1>x</h1>",
    "<!--", "-->", "<![CDATA[", "]]>", "<?php", "<!DOCTYPE html>",
    "{{ 7*7 }}", "{% raw %}", "{# #}", "${7*7}", "%s%d%n", "{0}{x}",
    "&lt;b&gt;", "&#60;script&#62;", "&amp", "&", "<", ">", '"', "'", "`",
    "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x9b31m", "\x1b[2J\x1b[H", "\x00", "\x07\x08\x7f",
    "\r\noverwritten", "a\u2028b\u2029c", "\u202eesrever\u202c", "\u2066x\u2069", "\ufeff",
    "\u200b",    "\ud800", "\udfff\ud800", "\U000e0041", "\ue000", "\uffff",
    "[bold red]markup[/bold red]", "[/]", "[link=https://example.org]x[/link]", ":warning:",
    "日本語のテンソル", "e\u0301\u0301\u0301", "👩\u200d🔬", "\t\ttab", "  ", "x" * 5000, "\n" * 50,
    "javascript:alert(1)", "url(https://example.org/x)", "expression(alert(1))", "\\22 \\3c ",
    "../../etc/passwd", "C:\\temp\\x", "DROP TABLE x;--", "nan", "inf", "-1e999", "1" * 400,
)  # fmt: skip


def hostile_texts() -> Iterator[str]:
    """Yield different texts that try to leave the place they are put in, then pairs of them."""
    for at in range(AMOUNT.hostile_texts):
        one = _SEEDS[at % len(_SEEDS)]
        turn = at // len(_SEEDS)
        other = _SEEDS[(at * 7 + turn * 13) % len(_SEEDS)]
        yield one if turn == 0 else f"{other}{one}" if turn % 2 else f"{one}{turn}{other}"
