"""Writing SVG, and the colours of every picture and page by role.

Every text and attribute is escaped where it is put down.  Text roles reach a contrast of 4.5 : 1 on
every surface that they are put on, graphic roles 3 : 1, the high-contrast palettes 7 : 1 for text.
"""

from __future__ import annotations

from markupsafe import Markup, escape

from cudalens.render.words import one_line

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
    "oksoft": ("#e8faf0", "#0f2419", "#ffffff", "#000000"),
    "link": ("#1a56c4", "#79c0ff", "#0031a8", "#a5d5ff"),
    "linksoft": ("#eef6ff", "#11223d", "#ffffff", "#000000"),
    "bar": ("#5b85d6", "#5580a8", "#1f4fa8", "#8fb8ff"),
}
PALETTES = {
    name: {role: colours[at] for role, colours in _COLOURS.items()}
    for at, name in enumerate(_NAMES)
}
LIGHT, DARK = PALETTES["light"], PALETTES["dark"]

_NARROW, _USUAL, _WIDE = 0.38, 0.62, 0.95
LEAST_SCALE = 0.82
"""The smallest words have 11 pixels, and 9 at least when a picture is shrunk."""
SANS = "system-ui, -apple-system, 'Segoe UI', sans-serif"


def coordinate(value: float) -> str:
    """Return a coordinate with one decimal at most."""
    text = f"{value:.1f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def element(tag: str, *children: str, **attributes: str | float | None) -> Markup:
    """Write one element; underscores in attribute names stand for hyphens.

    A child or an attribute that is no :class:`markupsafe.Markup` is taken for text and escaped;
    attributes that are ``None`` are left out.
    """
    written = ""
    for name, value in attributes.items():
        if value is not None:
            text = coordinate(value) if isinstance(value, (int, float)) else one_line(value)
            written += f' {name.rstrip("_").replace("_", "-")}="{escape(text)}"'
    inner = (child if isinstance(child, Markup) else escape(one_line(child)) for child in children)
    return Markup(f"<{tag}{written}>{''.join(inner)}</{tag}>")


def paint(*, fill: str = "none", stroke: str | None = None) -> dict[str, str]:
    """Return the attributes of a look: colours by role, for pages with and without a style sheet.

    The attribute holds the light colour; the class lets a style sheet put the theme's instead.
    """
    looks = {"fill": LIGHT.get(fill, fill)} | ({"stroke": LIGHT[stroke]} if stroke else {})
    classes = [f"cl-f-{fill}"] if fill in LIGHT else []
    classes += [f"cl-s-{stroke}"] if stroke else []
    return looks | ({"class_": " ".join(classes)} if classes else {})


def words_at(
    x: float, y: float, text: str, *, tone: str = "text", size: float = 12, **more: str
) -> Markup:
    """Write ``text`` at a point."""
    return element("text", text, x=x, y=y, font_size=size, **paint(fill=tone), **more)


def text_width(text: str, size: float) -> float:
    """Return about how wide ``text`` is drawn; system fonts differ by a tenth."""
    widths = {**dict.fromkeys("ijlft.,:[]() ", _NARROW), **dict.fromkeys("mwMW", _WIDE)}
    return size * sum(widths.get(char, _USUAL) for char in text)


def picture(width: float, height: float, title: str, *children: Markup) -> Markup:
    """Write a whole picture with its name for screen readers, on its own ground.

    A picture that would be shrunk until its words cannot be read scrolls instead.
    """
    ground = element("rect", width=width, height=height, **paint(fill="canvas"))
    return element(
        "svg",
        element("title", title),
        ground,
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {coordinate(width)} {coordinate(height)}",
        width=width,
        height=height,
        font_family=SANS,
        role="img",
        aria_label=title,
        style=f"min-width:{coordinate(round(width * LEAST_SCALE))}px",
    )
