"""Contrast of every palette, measured from its numbers."""

from __future__ import annotations

import pytest

from cudalens.render.colours import PALETTES

TEXT_ROLES = {
    "canvas": ("text", "muted", "bad", "warn", "ok", "link"),
    "raised": ("text", "muted", "bad", "warn", "link"),
    "badsoft": ("text", "muted", "bad"),
    "linksoft": ("text", "muted", "link"),
    "warnsoft": ("text", "muted", "warn"),
}
"""The text roles that are written on each surface."""

FRONT_END_CANVAS: dict[str, tuple[str, ...]] = {
    "light": ("#ffffff", "#f5f5f5", "#fdf6e3"),
    "dark": (
        *("#111111", "#1e1e1e", "#1f1f1f", "#272822", "#221a0f"),
        *("#000c18", "#002b36", "#002451", "#390000"),
    ),
}
"""The backgrounds of JupyterLab and of VS Code's own themes, in the place of ``canvas``."""

GRAPHIC_ROLES = {
    "canvas": ("bar", "bad", "warn", "muted"),
    "linksoft": ("bad", "warn"),
}
"""The roles that carry meaning without words on each surface."""


def luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb`` as WCAG 2 defines it, 0 to 1."""
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, 1 to 21."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def worst(name: str, roles: dict[str, tuple[str, ...]]) -> float:
    """Return the lowest contrast of the roles, the front ends' own backgrounds included."""
    palette = PALETTES[name]
    return min(
        contrast(palette[role], ground)
        for surface, written in roles.items()
        for role in written
        for ground in (
            palette[surface],
            *(FRONT_END_CANVAS.get(name, ()) if surface == "canvas" else ()),
        )
    )


def test_contrast_is_that_of_wcag() -> None:
    """Black on white is 21, a colour on itself 1, and the grey at the bound is known."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#123456", "#123456") == pytest.approx(1)
    assert contrast("#767676", "#ffffff") >= 4.5 > contrast("#777777", "#ffffff")


@pytest.mark.parametrize("name", PALETTES)
def test_text_can_be_read(name: str) -> None:
    """Text reaches 4.5 on every surface it is put on, 7 where high contrast is asked for."""
    assert worst(name, TEXT_ROLES) >= (7 if name.endswith("contrast") else 4.5)


@pytest.mark.parametrize("name", PALETTES)
def test_shapes_can_be_seen(name: str) -> None:
    assert worst(name, GRAPHIC_ROLES) >= 3
