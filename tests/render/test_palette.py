"""Contrast of every palette, measured from its numbers."""

from __future__ import annotations

import pytest

from cudalens.render.palette import (
    FRONT_END_CANVAS,
    GRAPHIC_PAIRS,
    LIGHT,
    PALETTES,
    TEXT_PAIRS,
    contrast,
)


def worst(name: str, pairs: tuple[tuple[str, str], ...]) -> float:
    """Return the lowest contrast of the pairs, the front ends' own backgrounds included."""
    palette = PALETTES[name]
    return min(
        contrast(palette[role], ground)
        for role, surface in pairs
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
    assert worst(name, TEXT_PAIRS) >= (7 if name.endswith("contrast") else 4.5)


@pytest.mark.parametrize("name", PALETTES)
def test_shapes_can_be_seen(name: str) -> None:
    """Bars, crosses and lines that carry meaning reach 3."""
    assert worst(name, GRAPHIC_PAIRS) >= 3


def test_every_palette_has_every_role() -> None:
    """No theme falls back to the colour of another."""
    assert {name: set(palette) for name, palette in PALETTES.items()} == {
        name: set(LIGHT) for name in PALETTES
    }
