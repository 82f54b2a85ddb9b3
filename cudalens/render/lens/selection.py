"""What is chosen: one selection that every pane follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from cudalens.render.lens.keys import Keys

Follower: TypeAlias = Callable[[tuple[str, ...]], None]

RULE = (
    "%ROOT% tr:is(%SEL%)>td{background:var(--cl-linksoft)}"
    "%ROOT% tr:is(%SEL%)>td:first-child{box-shadow:inset 3px 0 var(--cl-link)}"
    "%ROOT% li:is(%SEL%){background:var(--cl-linksoft);box-shadow:-6px 0 var(--cl-linksoft)}"
    "%ROOT% .cl-row:is(%SEL%){box-shadow:inset 3px 0 var(--cl-link)}"
    "%ROOT% .cl-row :is(%SEL%){background:var(--cl-linksoft);outline:2px solid var(--cl-link);"
    "border-radius:2px}"
    "%ROOT% g:is(%SEL%)>:is(rect,polygon){stroke:var(--cl-link);stroke-width:3}"
)
"""How the chosen things look, wherever they are drawn; the browser module fills it in as well."""


class Selection:
    """The chosen keys of one lens, with those who follow it."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._followers: list[Follower] = []
        self.chosen: tuple[str, ...] = ()

    def follow(self, follower: Follower) -> None:
        """Call ``follower`` with the chosen keys whenever they change."""
        self._followers.append(follower)

    def choose(self, keys: Iterable[str]) -> None:
        """Choose these keys, those that the report has; none clears the selection."""
        chosen = self._keys.known(keys)
        if chosen == self.chosen:
            return
        self.chosen = chosen
        for follower in self._followers:
            follower(chosen)


def rule(root: str) -> str:
    """Return the rule for the lens of class ``root``; ``%SEL%`` stands for the chosen keys."""
    # As specific as the style sheet's own rules, and later than they are.
    return RULE.replace("%ROOT%", f".cudalens.cudalens.{root}")


def style(root: str, chosen: Iterable[str]) -> str:
    """Return the style element that marks the chosen things below the class ``root``."""
    selectors = ",".join(f'[data-k~="{key}"]' for key in chosen)
    marks = rule(root).replace("%SEL%", selectors) if selectors else ""
    return f'<style class="cl-marks">{marks}</style>'
