"""The colours of every picture and page, by role; contrast is a matter of arithmetic here.

Text roles reach 4.5 : 1 on every surface that they are put on, graphic roles 3 : 1, the
high-contrast palettes 7 : 1 for text.
"""

from __future__ import annotations

LIGHT: dict[str, str] = {
    "canvas": "#ffffff",
    "raised": "#f6f8fa",
    "line": "#d8dee4",
    "text": "#1f2328",
    "muted": "#57606a",
    "bad": "#b3261e",
    "badsoft": "#fff0ef",
    "warn": "#855200",
    "warnsoft": "#fff6e0",
    "ok": "#0a6b3d",
    "oksoft": "#e8faf0",
    "link": "#1a56c4",
    "linksoft": "#eef6ff",
    "bar": "#5b85d6",
}

DARK: dict[str, str] = {
    "canvas": "#13171a",
    "raised": "#1b2024",
    "line": "#2f363d",
    "text": "#e6e8ea",
    "muted": "#9aa4ae",
    "bad": "#ff7369",
    "badsoft": "#2e1515",
    "warn": "#f0b84a",
    "warnsoft": "#2b210d",
    "ok": "#3fca7f",
    "oksoft": "#0f2419",
    "link": "#79c0ff",
    "linksoft": "#11223d",
    "bar": "#5580a8",
}

LIGHT_CONTRAST: dict[str, str] = {
    "canvas": "#ffffff",
    "raised": "#ffffff",
    "line": "#000000",
    "text": "#000000",
    "muted": "#2b2b2b",
    "bad": "#8f0000",
    "badsoft": "#ffffff",
    "warn": "#5c3700",
    "warnsoft": "#ffffff",
    "ok": "#004d26",
    "oksoft": "#ffffff",
    "link": "#0031a8",
    "linksoft": "#ffffff",
    "bar": "#1f4fa8",
}

DARK_CONTRAST: dict[str, str] = {
    "canvas": "#000000",
    "raised": "#000000",
    "line": "#ffffff",
    "text": "#ffffff",
    "muted": "#dddddd",
    "bad": "#ff9c94",
    "badsoft": "#000000",
    "warn": "#ffd479",
    "warnsoft": "#000000",
    "ok": "#6ff0aa",
    "oksoft": "#000000",
    "link": "#a5d5ff",
    "linksoft": "#000000",
    "bar": "#8fb8ff",
}

PALETTES: dict[str, dict[str, str]] = {
    "light": LIGHT,
    "dark": DARK,
    "light_contrast": LIGHT_CONTRAST,
    "dark_contrast": DARK_CONTRAST,
}

TEXT_PAIRS: tuple[tuple[str, str], ...] = (
    ("text", "canvas"),
    ("text", "raised"),
    ("text", "badsoft"),
    ("text", "linksoft"),
    ("muted", "canvas"),
    ("muted", "raised"),
    ("muted", "badsoft"),
    ("muted", "linksoft"),
    ("bad", "canvas"),
    ("bad", "badsoft"),
    ("bad", "raised"),
    ("warn", "canvas"),
    ("warn", "warnsoft"),
    ("warn", "raised"),
    ("muted", "warnsoft"),
    ("text", "warnsoft"),
    ("ok", "canvas"),
    ("ok", "oksoft"),
    ("link", "canvas"),
    ("link", "linksoft"),
    ("link", "raised"),
)
"""Every text role with each surface that it is written on."""

FRONT_END_CANVAS: dict[str, tuple[str, ...]] = {
    "light": ("#ffffff", "#f5f5f5", "#fdf6e3"),
    "dark": (
        *("#111111", "#1e1e1e", "#1f1f1f", "#272822", "#221a0f"),
        *("#000c18", "#002b36", "#002451", "#390000"),
    ),
}
"""The backgrounds of JupyterLab and of VS Code's own themes, in the place of ``canvas``."""

GRAPHIC_PAIRS: tuple[tuple[str, str], ...] = (
    ("bar", "canvas"),
    ("bar", "oksoft"),
    ("bad", "canvas"),
    ("bad", "linksoft"),
    ("warn", "canvas"),
    ("warn", "linksoft"),
    ("muted", "canvas"),
)
"""Every role that carries meaning without words, with its surface."""


def luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb`` as WCAG 2 defines it, 0 to 1."""
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, 1 to 21."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
