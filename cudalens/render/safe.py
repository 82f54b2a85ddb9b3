"""Text from outside made harmless to look at: no control codes, no bidirectional tricks."""

from __future__ import annotations

import unicodedata

# Joiners carry meaning in emoji and in Indic and Persian writing, and move nothing else.
_KEPT = {"\u200c", "\u200d"}
MAX_LENGTH = 4000
"""No view draws more of one text; each cuts far earlier and says so."""
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def _visible(char: str) -> str:
    code = ord(char)
    if code < 0x20:  # the C0 block has its own pictures
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\ufffd"


def visible(text: str) -> str:
    """Replace each control or format character by one visible sign; line breaks and tabs stay.

    One sign stands for one character, so columns of the source still fit.
    """
    text = text[:MAX_LENGTH]
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char
        if char in "\n\t" or char in _KEPT or unicodedata.category(char) not in _HIDDEN
        else _visible(char)
        for char in text
    )


def one_line(text: str) -> str:
    """Return ``text`` on one line: as :func:`visible`, with line breaks and tabs as spaces."""
    return visible(text).replace("\n", " ").replace("\t", " ")


def clip(text: str, limit: int) -> str:
    """Cut ``text`` to ``limit`` characters, the last of them an ellipsis when something is lost."""
    return text if len(text) <= limit else text[: max(limit - 1, 0)] + "…"


def clip_left(text: str, limit: int) -> str:
    """Cut ``text`` at its front: the end of a path or a module name tells most."""
    return text if len(text) <= limit else "…" + text[-max(limit - 1, 1) :]
