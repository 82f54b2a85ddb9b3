"""Export of a report from its head: files, and the static report in place of the view."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ipywidgets
from markupsafe import escape

from cudalens.core.report import Report
from cudalens.render.lens.parts import button, line, markup, shared

_KEEP_TIP = "put the static report in the place of this view: it needs no kernel when reopened"
# Read only where the view is still there, which is where no output answers to its name any more.
_NOT_KEPT = "not kept: this page was loaded after the cell ran; run it again, or save the HTML"


def export_bar(
    report: Report, keep: Callable[[], None] | None
) -> tuple[ipywidgets.Box, ipywidgets.Box]:
    """Return the button beside the headline, and the row of choices that it opens."""
    status = markup("", "cl-status")

    def tell(text: str) -> None:
        status.value = f'<span role="status">{escape(text)}</span>'

    def save(suffix: str) -> None:
        try:
            tell(f"saved as {save_beside(report, suffix)}")
        except OSError as error:
            tell(f"not saved: {error}")

    def keep_static() -> None:
        if keep is not None:
            keep()
            tell(_NOT_KEPT)

    choices = [
        button(name, f"save the report as {name} in the notebook's folder", partial(save, end))
        for name, end in (("HTML", ".html"), ("JSON", ".json"), ("Text", ".txt"))
    ]
    if keep is not None:
        choices.append(button("Keep in notebook", _KEEP_TIP, keep_static))
    opened = line(*choices, status, name="cl-tools cl-choices")
    open_layout, hidden = opened.layout, shared(ipywidgets.Layout, display="none")
    opened.layout = hidden

    def toggle() -> None:
        opened.layout = open_layout if opened.layout is hidden else hidden

    opener = button("Export", "save this report, or keep it in the notebook", toggle)
    return line(opener, name="cl-tools cl-export"), opened


def save_beside(report: Report, suffix: str) -> Path:
    """Write the report into the working directory under a name that is still free."""
    paths = (Path(f"cudalens_report_{number}{suffix}") for number in itertools.count(1))
    return report.save(next(path for path in paths if not path.exists()))
