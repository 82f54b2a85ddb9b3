"""The colours of every page by role, for light and dark pages and for those with high contrast.

Text has a contrast of at least 4.5 : 1 on every surface that it is used on, graphics 3 : 1, and
text in the high-contrast palettes 7 : 1.
"""

from __future__ import annotations

_NAMES = ("light", "dark", "light_contrast", "dark_contrast")
_COLOURS = {
    "canvas": ("#ffffff", "#13171a", "#ffffff", "#000000"),
    "raised": ("#f6f8fa", "#1b2024", "#ffffff", "#000000"),
    "line": ("#d8dee4", "#2f363d", "#000000", "#ffffff"),
    "text": ("#1f2328", "#e6e8ea", "#000000", "#ffffff"),
    "muted": ("#57606a", "#9aa4ae", "#2b2b2b", "#dddddd"),
    "bad": ("#b3261e", "#ff7369", "#8f0000", "#ff9c94"),
    "badsoft": ("#fff0ef", "#2e1515", "#ffffff", "#000000"),
    "warn": ("#855200", "#f0b84a", "#5c3700", "#ffd479"),
    "warnsoft": ("#fff6e0", "#2b210d", "#ffffff", "#000000"),
    "ok": ("#0a6b3d", "#3fca7f", "#004d26", "#6ff0aa"),
    "link": ("#1a56c4", "#79c0ff", "#0031a8", "#a5d5ff"),
    "linksoft": ("#eef6ff", "#11223d", "#ffffff", "#000000"),
    "bar": ("#5b85d6", "#5580a8", "#1f4fa8", "#8fb8ff"),
}
PALETTES = {
    name: {role: colours[at] for role, colours in _COLOURS.items()}
    for at, name in enumerate(_NAMES)
}
LIGHT = PALETTES["light"]
