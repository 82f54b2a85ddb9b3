"""The module inside which a library made a call, and the user's line that led to it."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from cudalens.recorder.sites import RawSite, Site, entries_of
from cudalens.source.stack import StackEntry


class ModuleCall(NamedTuple):
    """A module that was running with no line of the user's below it; not to be kept."""

    module: nn.Module
    called: nn.Module
    """The outermost module that the user's line called: the same one, or one that holds it."""
    line: StackEntry
    """The user's deepest line."""
    holder: nn.Module | None
    """The module whose method that line is in."""


def module_call(site: RawSite) -> ModuleCall | None:
    """Give the module that made a recorded call, ``None`` where the user's own code made it."""
    if site is None or isinstance(site, tuple):
        return None
    lines = entries_of(site)
    chain = []
    outer: Site | None = site
    while outer is not None and (outer.code, outer.lasti) == (site.code, site.lasti):
        chain.append(_module_of(outer))
        outer = outer.outer
    module, called = chain[0], chain[-1]
    if module is None or called is None or not lines:
        return None
    return ModuleCall(module, called, lines[-1], None if outer is None else _module_of(outer))


def _module_of(site: Site) -> nn.Module | None:
    return None if site.module is None else site.module()
