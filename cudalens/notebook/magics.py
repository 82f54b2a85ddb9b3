"""The IPython front end: ``%cudacheck`` and ``%%cudacheck``.

It parses the line, and the shell runs the cell (``cells.py``).  Loading it does not import torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import needs_local_scope, no_var_expand

from cudalens.core.errors import SimulationError
from cudalens.notebook import statement
from cudalens.notebook.cells import MAGIC, CellWatch
from cudalens.notebook.display import finish, new_session, publish, say_written
from cudalens.notebook.printed_asserts import PrintedAsserts
from cudalens.session.options import (
    Options,
    OptionsError,
    help_text,
    meant_command,
    split_line,
    subcommand,
)

if TYPE_CHECKING:
    from cudalens.core.report import Report

HELP = help_text()
_ACTIVATION = "cudalens.simulate.activation"
"""Loaded once a rehearsal has been started."""
_MISPLACED = f"%{MAGIC}"
"""Below another line the shell reads ``%%cudacheck`` as a line magic of this name."""


def load(shell: Any) -> None:
    """Register the magics with a shell; does nothing twice."""
    if front_end_of(shell) is None:
        FrontEnd(shell).attach()


def unload(shell: Any) -> None:
    """Undo :func:`load` and everything that was turned on through the magics."""
    front_end = front_end_of(shell)
    if front_end is not None:
        front_end.detach()


def front_end_of(shell: Any) -> FrontEnd | None:
    """Return the front end whose magics a shell has, ``None`` while the extension is not loaded.

    The shell keeps it, so that both are freed together.
    """
    misplaced = shell.magics_manager.magics["line"].get(_MISPLACED)
    front_end: FrontEnd | None = None if misplaced is None else misplaced.__self__
    return front_end


class FrontEnd:
    """The magics of one shell, and what the user turned on with them."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self._watch = CellWatch(shell)
        self._printed = PrintedAsserts()
        self._simulation: Any = None
        """The simulation that ``%cudacheck simulate`` started, not an earlier one."""
        self._hidden: dict[str, Any] = {}
        """Magics of other extensions that ours replaced."""

    def attach(self) -> None:
        """Register magics, event callbacks and the input transformations."""
        magics = self.shell.magics_manager.magics
        self._hidden = {kind: magics[kind].get(MAGIC) for kind in ("line", "cell")}
        for kind in magics:
            magics[kind][MAGIC] = self.cudacheck
        magics["line"][_MISPLACED] = self._misplaced
        self._watch.attach()
        self._printed.attach()

    def detach(self) -> None:
        """Remove everything that was registered or turned on."""
        magics = self.shell.magics_manager.magics
        magics["line"].pop(_MISPLACED, None)
        self._watch.detach()
        self._printed.detach()
        for kind, previous in self._hidden.items():
            magics[kind].pop(MAGIC, None)
            if previous is not None:
                magics[kind][MAGIC] = previous
        if self._simulation is not None:
            self._simulation.stop()

    # The line may be code, in which the shell would replace `{x}` and `$x`.
    @no_var_expand  # type: ignore[untyped-decorator]
    @needs_local_scope  # type: ignore[untyped-decorator]
    def cudacheck(
        self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None
    ) -> Any:
        """Run the magic; IPython shows :data:`HELP` in place of this text."""
        __tracebackhide__ = True
        options, rest = _split(line)
        if options.help or (cell is None and not line.strip()):
            print(HELP)
            return None
        if cell is None:
            return self._line(options, rest, local_ns)
        if rest:
            msg = f"%%{MAGIC} takes options only, not {rest!r}: put the code below it"
            raise UsageError(msg)
        _require_torch()
        return self._watch.run(line, cell)

    # IPython shows the docstring for `%cudacheck?`.
    cudacheck.__doc__ = HELP

    @no_var_expand  # type: ignore[untyped-decorator]
    def _misplaced(self, line: str) -> None:
        msg = f"%%{MAGIC} must be the first line of the cell"
        raise UsageError(msg)

    def _line(self, options: Options, rest: str, local_ns: dict[str, Any] | None) -> Any:
        __tracebackhide__ = True
        if not rest:
            msg = f"nothing to check: give a statement, or put %%{MAGIC} over a cell"
            raise UsageError(msg)
        command = subcommand(rest)
        if command is not None:
            return self._command(*command, options)
        meant = meant_command(rest, {**self.shell.user_ns, **(local_ns or {})})
        if meant is not None:
            msg = f"there is no command and no variable {rest!r}; did you mean %{MAGIC} {meant}?"
            raise UsageError(msg)
        _require_torch()
        parts = statement.compiled(self.shell, rest)
        user_locals = self.shell.user_ns if local_ns is None else local_ns
        with self._reported(options):
            return statement.run(self.shell, parts, user_locals)

    def _command(self, words: str, behind: str, options: Options) -> None:
        options, rest = _split(behind, options)
        if rest:
            msg = f"%{MAGIC} {words} takes options only, not {rest!r}"
            raise UsageError(msg)
        if options.help:
            print(HELP)
            return
        getattr(self, f"_do_{words.replace(' ', '_')}")(options)

    @contextmanager
    def _reported(self, options: Options) -> Iterator[None]:
        """Run the block under a session, and show the session's report at its end."""
        session, is_shown = new_session(options), False
        before = self._watch.shown_by_time
        try:
            with session:
                yield
                # Before IPython 9.4 %time shows an exception itself, and does not raise it.
                shown = self._watch.shown_by_time
                if shown is not None and shown is not before:
                    session.shown_error, is_shown = shown, self._watch.note_explained(shown)
        except BaseException as error:
            is_shown = self._watch.note_explained(error)
            raise
        finally:
            finish(self.shell, session, options, is_shown=is_shown)

    def _do_on(self, options: Options) -> None:
        _require_torch()
        self._watch.always = options
        print("cudacheck is on: every following cell is checked")

    def _do_off(self, options: Options) -> None:
        self._watch.always = None
        print("cudacheck is off")

    def _do_status(self, options: Options) -> None:
        _require_torch()
        from cudalens.session.process import status

        is_on = self._watch.always is not None
        what = "checked" if is_on else "checked under %%cudacheck only; %cudacheck on: every cell"
        print(f"cells:        {what}")
        print(status())

    def _do_last(self, options: Options) -> None:
        import cudalens

        self._show_again(cudalens.last_report(), options, "no report yet")

    def _do_explain(self, options: Options) -> None:
        _require_torch()
        from cudalens.session.explain import explain

        # There the shell keeps the exception that it has shown last.
        error = getattr(sys, "last_value", None)
        report = explain(self.shell.user_ns, error, self._printed.text())
        missing = "nothing to explain: no exception of torch was shown"
        self._show_again(report, options, missing)

    def _show_again(self, report: Report | None, options: Options, missing: str) -> None:
        """Show, write and bind a report according to the options of a check."""
        if report is None:
            print(missing)
        else:
            from cudalens.session.exit import write_files

            written, failures = write_files(report, options.html, options.json)
            if failures:
                report = replace(report, limits=(*report.limits, *failures))
            publish(self.shell, report, widgets=options.widgets)
            say_written(written)
        if options.report is not None:
            self.shell.user_ns[options.report] = report

    def _do_simulate(self, options: Options) -> None:
        if not {"torch", _ACTIVATION} <= sys.modules.keys():
            # Importing torch takes seconds, without any other output.
            print("starting the rehearsal device ...", flush=True)
        _require_torch()
        from cudalens.session.process import start_simulation

        try:
            self._simulation = start_simulation() or self._simulation
        except SimulationError as error:
            raise UsageError(str(error)) from None

    def _do_simulate_off(self, options: Options) -> None:
        _require_torch()
        from cudalens.session.process import stop_simulation

        stop_simulation()


def _split(line: str, *defaults: Options) -> tuple[Options, str]:
    try:
        return split_line(line, *defaults)
    except OptionsError as error:
        raise UsageError(str(error)) from None


def _require_torch() -> None:
    try:
        importlib.import_module("torch")
    except ImportError as error:
        msg = f"cudalens needs torch, which cannot be imported here ({error})"
        raise UsageError(msg) from None
