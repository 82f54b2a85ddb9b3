"""A report for notebooks: it keeps its look where style sheets, scripts and SVG are dropped.

A notebook from elsewhere is opened untrusted.  JupyterLab then removes every ``<style>`` and
``<svg>`` but leaves their text, and GitHub removes style attributes as well.  So each element says
its own look, pictures are images, and the style sheet, which adds themes and tabs, is a link that
leaves no text behind.
"""

from __future__ import annotations

import base64
import re
from functools import partial
from urllib.parse import quote

from cudalens.render.svg import DARK

_SOLID = {"bad": "#d9483f", "warn": "#b07a1c", "link": "#3b82d6", "line": "#8a929a"}
"""Colours that can be seen on a white page and on a dark one: nobody says which it is."""
_SOFT = {
    "badsoft": "rgba(217, 72, 63, 0.14)",
    "warnsoft": "rgba(176, 122, 28, 0.14)",
    "linksoft": "rgba(59, 130, 214, 0.12)",
}
SAFE_COLOURS = {**_SOLID, **_SOFT}


def _themed(name: str, before: str, role: str) -> str:
    # A sanitizer keeps the first and drops the second, which follows the theme of the style sheet.
    plain = SAFE_COLOURS[role]
    return f"{name}:{before}{plain};{name}:{before}var(--cl-{role},{plain})"


_BOX = "padding:10px 12px"
_LOOKS = {
    "cudalens": "font-size:14px;line-height:1.5;max-width:1400px",
    "cl-card": _themed("border", "1px solid ", "line") + ";border-radius:8px;overflow:hidden",
    "cl-head": _themed("border-left", "5px solid ", "bad") + f";{_BOX}",
    "cl-title": "font-size:18px;line-height:1.4",
    "cl-sign": _themed("color", "", "bad"),
    "cl-bad": _themed("color", "", "bad"),
    "cl-pill": "font-weight:600",
    "cl-try": _themed("background-color", "", "linksoft") + f";{_BOX}",
    "cl-pane": _BOX,
    "cl-heading": "margin:0 0 6px",
    # Long lines are wrapped where no style sheet folds them to the width of the pane.
    "cl-code": "font-family:monospace;font-size:12px;line-height:1.65;overflow-x:auto;"
    "white-space:pre-wrap;margin:0 0 12px",
    "cl-row": "display:block;padding-left:6ch;text-indent:-6ch",
    "cl-hot": _themed("background-color", "", "badsoft"),
    "cl-way": "list-style:none;padding:0;margin:0 0 10px",
    "cl-scroll": "overflow-x:auto",
    "cl-graph": "max-height:640px;overflow:auto",
    "cl-tab": _themed("border-top", "1px solid ", "line"),
    "cl-body": _BOX,
    "cl-table": "border-collapse:collapse;font-size:13px;margin:0 0 10px",
    "cl-hidden": "position:absolute;width:1px;height:1px;overflow:hidden",
    "code": "background:none",
    "summary": "cursor:pointer;padding:7px 12px",
    "td": "text-align:left",
    "th": "text-align:left",
}
"""The look of each class, and of elements that carry none."""

_WARNING = {
    key: look.replace(_SOLID["bad"], _SOLID["warn"]).replace(_SOFT["badsoft"], _SOFT["warnsoft"])
    for key, look in _LOOKS.items()
}
_OPENING = re.compile(r'<([a-z]+)((?: [a-z-]+(?:="[^"]*")?)*)>')
_CLASSES = re.compile(r' class="([^"]*)"')
_PICTURE = re.compile(r"<svg ([^>]*)>.*?</svg>", re.DOTALL)
_PAINTED = re.compile(r"cl-([fs])-(\w+)")


def inlined(html: str, sheet: str) -> str:
    """Return a drawn report with its looks at its elements and its pictures as images.

    Every attribute in it is quoted and escaped.  The sheet is linked, for where links are kept.
    """
    is_warning = "cl-is-warn" in html.partition(">")[0]
    html = _OPENING.sub(partial(_styled, looks=_WARNING if is_warning else _LOOKS), html)
    html = _PICTURE.sub(_image, html)
    data = quote(sheet.replace("\n", ""), safe=" !'()*+,-./:;=?@[]{|}~")
    return f'{html}<link rel="stylesheet" href="data:text/css,{data}">'


def _styled(tag: re.Match[str], looks: dict[str, str]) -> str:
    name, attributes = tag.groups()
    classes = _CLASSES.search(attributes)
    own = ";".join(
        looks[key] for key in (name, *(classes[1].split() if classes else ())) if key in looks
    )
    return f'<{name}{attributes} style="{own}">' if own else tag[0]


def _image(drawn: re.Match[str]) -> str:
    attributes = dict(re.findall(r'([\w-]+)="([^"]*)"', drawn[1]))
    looks = f"max-width:100%;height:auto;{attributes['style']}"
    picture = drawn[0].replace("<title>", f"<style>{_dark_rules(drawn[0])}</style><title>", 1)
    data = base64.b64encode(picture.encode()).decode()
    source = f'src="data:image/svg+xml;base64,{data}" alt="{attributes["aria-label"]}"'
    return f'<img {source} width="{attributes["width"]}" style="{looks}">'


def _dark_rules(picture: str) -> str:
    """Return rules for dark pages; the ground of a picture follows, so it can be read anyway."""
    kinds = {"f": "fill", "s": "stroke"}
    used = sorted(set(_PAINTED.findall(picture)))
    rules = "".join(f".cl-{kind}-{role}{{{kinds[kind]}:{DARK[role]}}}" for kind, role in used)
    return f"@media (prefers-color-scheme:dark){{{rules}}}"
