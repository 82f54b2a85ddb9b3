"""Shows a session's report in the running shell: the static report and the interactive row.

IPython is never imported here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudalens.core._python import same_random_state
from cudalens.source.files import running_shell

if TYPE_CHECKING:
    from cudalens.core.report import Report
    from cudalens.session.options import Options
    from cudalens.session.session import CheckSession

WIDGET_TYPE = "application/vnd.jupyter.widget-view+json"
_WIDGETS = 8


class Shown:
    """The report that was shown last."""

    report: Report | None = None


def new_session(options: Options) -> CheckSession:
    """Return a session with these options, which is not open yet."""
    from cudalens.session.session import CheckSession

    session = CheckSession(**options.for_session())
    session.show_early = partial(show_early, session)
    return session


def finish(shell: Any, session: CheckSession, options: Options, *, is_shown: bool = False) -> None:
    """Show the report of a closed session, if it has one, and bind it to the user's variable.

    ``is_shown`` is true if a check inside this one has shown the exception that ended both.
    """
    if options.report is not None:
        shell.user_ns[options.report] = session.report
    say_written(session.written)
    if session.report is None or session.is_reminder:
        return  # the exception's own note says what happened earlier
    if is_shown and Shown.report and Shown.report.explanation == session.report.explanation:
        return  # an outer check repeats it only with another explanation
    if session.swallowed and not session.swallowed.was_raised_while_handled:
        said = session.swallowed.sentence("cell").replace("this error", "an error", 1)
        print(f"cudalens: warning: {said}: {session.report.headline}", file=sys.stderr)
    if session.is_shown_early and getattr(shell, "kernel", None) is None:
        return  # a terminal cannot replace an output
    try:
        name = session.display_name if session.is_shown_early else None
        publish(shell, session.report, widgets=options.widgets, replaced=name)
    except Exception as error:
        # The cell's own exception is propagating: ours must not replace it.
        print(f"cudalens: the report could not be shown: {error!r}", file=sys.stderr)


def show_early(session: CheckSession) -> None:
    """Show the report of a lost device where the loss is found; :func:`finish` replaces it."""
    shell = running_shell()
    if shell is None or session.report is None:
        return
    named = {"display_id": session.display_name}
    bundle = dict(session.report._repr_mimebundle_())
    shell.display_pub.publish(data=bundle, metadata={}, transient=named)
    sys.stdout.flush()  # a kernel sends from another thread, and torch may abort next


def say_written(written: Iterable[Path]) -> None:
    """Print the paths of the written reports."""
    for path in written:
        print(f"cudalens: the report is in {path}")


def publish(shell: Any, report: Report, *, widgets: bool, replaced: str | None = None) -> None:
    """Show a report as text and HTML and, where widgets work, the interactive row below.

    The static report is a separate output: it needs no kernel, and its style sheet hides a row
    that has none.

    Args:
        replaced: the display id of an output to replace.
    """
    more: dict[str, Any] = {}
    if replaced:
        more = {"transient": {"display_id": replaced}, "update": True}
    shell.display_pub.publish(data=dict(report._repr_mimebundle_()), metadata={}, **more)
    Shown.report = report
    if widgets and _has_widgets(shell) and (view := _view(report)):
        # A front end without widgets shows the plain text, which is empty.
        shell.display_pub.publish(data={"text/plain": "", **view}, metadata={})


def action_line(report: Report | None) -> str:
    """Return the suggested action of a report, for the last line of a traceback."""
    if report is None:
        return ""
    from cudalens.render.screen import action_of  # loading the extension stays cheap

    action = action_of(report)
    return "" if action is None else action.line


def _view(report: Report) -> dict[str, Any]:
    try:
        with same_random_state():
            from cudalens.render.widget import live
        model = live(report).model_id
    except Exception as error:
        # The static report has all the facts: the row is a convenience.
        print(f"cudalens: no interactive row here: {error!r}", file=sys.stderr)
        return {}
    return {WIDGET_TYPE: {"version_major": 2, "version_minor": 0, "model_id": model}}


def _has_widgets(shell: Any) -> bool:
    wish = os.environ.get("CUDALENS_WIDGETS")
    return (
        getattr(shell, "kernel", None) is not None
        and wish != "0"
        and (wish == "1" or (_is_attended(shell) and _has_new_widgets()))
    )


def _has_new_widgets() -> bool:
    """Return whether ipywidgets has the release that the row was seen with; older ones may fail.

    Seen with an older one: JupyterLab 4 draws no widget, and an error instead of the whole bundle.
    """
    from importlib.metadata import version  # loading the extension stays cheap

    try:
        return int(version("ipywidgets").partition(".")[0]) >= _WIDGETS
    except (ImportError, ValueError):
        return False


def _is_attended(shell: Any) -> bool:
    """Return whether a user sits at the front end, which then allows requests for input.

    nbclient, and with it papermill, nbconvert and nbval, does not allow them.  No user would see a
    view there, whose state is in this kernel.
    """
    parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
    return bool((parent or {}).get("content", {}).get("allow_stdin", True))
