"""A report for notebooks that keeps its look without style sheets and scripts.

A notebook from elsewhere is untrusted.  JupyterLab then removes each ``<style>`` element but keeps
its text, and GitHub also removes style attributes.  So each element has an inline style, and the
style sheet, for themes and the row of drawers, is a link, which leaves no text behind.
"""

from __future__ import annotations

import re
from functools import partial
from urllib.parse import quote

_SOLID = {"bad": "#d9483f", "warn": "#b07a1c", "link": "#3b82d6", "line": "#8a929a"}
"""Colours that are visible on white and on dark pages: the theme is unknown."""
_SOFT = {
    "badsoft": "rgba(217, 72, 63, 0.14)",
    "warnsoft": "rgba(176, 122, 28, 0.14)",
    "linksoft": "rgba(59, 130, 214, 0.12)",
}
SAFE_COLOURS = {**_SOLID, **_SOFT}


def _themed(name: str, before: str, role: str) -> str:
    # A sanitizer keeps the first value. It drops the second, which follows the page's theme.
    plain = SAFE_COLOURS[role]
    return f"{name}:{before}{plain};{name}:{before}var(--cl-{role},{plain})"


_LOOKS = {
    "cl-card": _themed("border-left", "4px solid ", "bad") + ";padding:0 0 4px 12px",
    "cl-title": "font-size:16px;margin:6px 0 2px",
    "cl-long": "font-size:14px",
    "cl-b": _themed("color", "", "bad"),
    "cl-status": "font-size:13px",
    "cl-sub": "font-size:13px;margin:2px 0 6px",
    "cl-act": _themed("background-color", "", "linksoft") + ";padding:5px 8px;margin:0 0 6px",
    # Without the style sheet, long lines wrap.
    "cl-code": "font-family:monospace;font-size:12.5px;line-height:1.5;margin:0 0 4px",
    "cl-hot": _themed("background-color", "", "badsoft"),
    "cl-badlabel": _themed("color", "", "bad"),
    "cl-narrow": "display:none",
    "cl-fig": "margin:4px 0;font-size:12px",
    # Side by side, each with its caption.
    "cl-pic": "display:inline-block;margin-right:10px",
    "cl-scroll": "overflow-x:auto",
    "cl-table": "border-collapse:collapse;font-size:12.5px",
    "cl-text": "font-size:12px",
    "cl-share": "font-size:12px;white-space:pre-wrap",
    "summary": "cursor:pointer",
    # JupyterLab gives code a background on which red is hard to read in the dark theme.
    "code": "background-color:transparent",
    "a": _themed("color", "", "link"),
    "td": "text-align:left",
    "th": "text-align:left",
}
"""The inline style of each class, and of elements without one."""

_OPENING = re.compile(r'<([a-z]+[0-9]?)((?: [a-z-]+(?:="[^"]*")?)*)>')
_CLASSES = re.compile(r' class="([^"]*)"')
_STYLE = re.compile(r' style="([^"]*)"')


def inlined(html: str, sheet: str) -> str:
    """Return a drawn report with inline styles.

    Every attribute in it is quoted and escaped.  The sheet is linked, for pages that keep links.
    """
    # The outermost element says whether the report is red.
    is_red = "cl-is-bad" in html.partition(">")[0]
    looks = _LOOKS if is_red else {key: _warning(look) for key, look in _LOOKS.items()}
    html = _OPENING.sub(partial(_styled, looks=looks), html)
    data = quote(sheet.replace("\n", ""), safe=" !'()*+,-./:;=?@[]{|}~")
    return f'{html.strip()}<link rel="stylesheet" href="data:text/css,{data}">'


def _warning(look: str) -> str:
    return look.replace(_SOLID["bad"], _SOLID["warn"]).replace(_SOFT["badsoft"], _SOFT["warnsoft"])


def _styled(tag: re.Match[str], looks: dict[str, str]) -> str:
    name, attributes = tag.groups()
    classes = _CLASSES.search(attributes)
    keys = (name, *(classes[1].split() if classes else ()))
    own = ";".join(looks[key] for key in keys if key in looks)
    if not own:
        return tag[0]
    if given := _STYLE.search(attributes):
        attributes, own = attributes.replace(given[0], ""), f"{given[1]};{own}"
    return f'<{name}{attributes} style="{own}">'
