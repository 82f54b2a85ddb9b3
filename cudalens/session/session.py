"""The checked block: what ``%%cudacheck`` and ``cudalens.check()`` do, wired together."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import InitVar, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

from cudalens.core import _python
from cudalens.core._python import Uninterrupted
from cudalens.core._torch import outlive_lost_device, restore_functorch
from cudalens.core.errors import DeviceAssertError, NonFiniteError, SilentFindingWarning
from cudalens.core.limits import Limits
from cudalens.core.report import Report
from cudalens.core.reported import replace_report, report_beside
from cudalens.core.text_files import expanded
from cudalens.diagnosis.diagnose import format_message, format_sentence
from cudalens.evidence import context, lost_context
from cudalens.guards.process import PROCESS, ReportedLines
from cudalens.session import process
from cudalens.session.exit import (
    attached,
    complete_message,
    explained,
    explained_early,
    has_become,
    is_retold,
    leads_to,
    note_finding,
    note_line,
    report_of_own,
    site_from_traceback,
    write_files,
)
from cudalens.session.findings import Findings, Outcome, SwallowedFinding
from cudalens.session.ranks import Ranks, combined, launcher_error
from cudalens.session.succession import SUCCESSION
from cudalens.source.shown_frames import hide_own_frames


@dataclass(kw_only=True, eq=False, repr=False)
class CheckSession:
    """One checked block of code: guards, recorder and synchronous CUDA while it is open.

    Args:
        fast: guards only; no recorder, no synchronization.
        deferred: guards only, which wait for the device at no call: see :func:`cudalens.settle`.
        nan: also stop where a NaN or an infinity reaches the loss, a gradient or a parameter, or a
            NaN the host, with the call that made it; ``"strict"`` stops at that call, wherever its
            values go.
        sync: synchronize after each op on an accelerator, so that a fault names its op.
        max_ops: how many of the last ops the recorder keeps.
        html, json: files to write the report to, when there is one.
        force_eager: run compiled functions eagerly inside the block; else they are guarded inside,
            and calls are neither recorded nor waited for.
        widgets: whether a front end may show the interactive view.
    """

    fast: bool = False
    deferred: bool = False
    nan: bool | Literal["strict"] = False
    sync: bool = True
    max_ops: int = 4096
    html: InitVar[str | Path | None] = None
    json: InitVar[str | Path | None] = None
    force_eager: bool = True
    widgets: bool = True

    def __post_init__(self, html: str | Path | None, json: str | Path | None) -> None:
        msg = f"max_ops = {self.max_ops!r}: the recorder keeps a whole number of ops, at least one"
        if not isinstance(self.max_ops, int):
            raise TypeError(msg)
        if self.max_ops < 1:
            raise ValueError(msg)
        if self.nan not in (False, True, "strict"):
            msg = f'nan={self.nan!r}: it is True, False or "strict"'
            raise ValueError(msg)
        self.fast = self.fast or self.deferred
        # Absolute now: the block may change the working directory.
        self._files = [name and expanded(name).absolute() for name in (html, json)]
        self._stack = ExitStack()
        self.reads_stderr = True
        """True if the assertions that CUDA prints are read off file descriptor 2."""
        self.show_early: Callable[[], None] | None = None
        """Called when the device is lost, to show the report before the block ends."""
        self.is_followed = False
        """True if no unchecked code that could write to a tensor runs before the next block."""
        self.display_name = os.urandom(16).hex()
        """The ``display_id`` of the report's output."""
        self.shown_error: BaseException | None = None
        """An exception that ended the code and that the shell has shown and swallowed."""
        self._begin()

    def _begin(self) -> None:
        """Reset the state, for a first or another block."""
        self._limits = Limits()
        self._findings = Findings()
        self.reported: ReportedLines = WeakKeyDictionary()
        """The lines with silent findings, which are reported once."""
        self.recorder: Any = None
        self.device_text: Any = None
        self.report: Report | None = None
        self.written: tuple[Path, ...] = ()
        """The files that the report was written to."""
        self.checked_ops = self.recorded_ops = 0
        """Number of guarded calls and of recorded ops, once closed."""
        self._checked_before = 0
        self.swallowed: SwallowedFinding | None = None
        """What became of the first finding, if it did not leave the block."""
        self._is_of_thread = False
        self._thread = threading.get_ident()
        self._was_shown = False
        self.is_shown_early = False
        """True if ``show_early`` was called."""
        self.is_reminder = False
        """True if the report is that of an earlier block, which ended the device's context."""
        self._was_lost = False
        self._is_lost = False
        """True if the loss of the device has been reported."""
        self._early: Report | None = None
        """The report of the loss."""
        self._refused: tuple[int, type, tuple[str, ...]] | None = None
        """The identity of the last exception of a guarded op, if there is no recorder."""
        self._early_error: ref[BaseException] | None = None
        """The exception that ``_early`` reports, if it takes a weak reference."""
        self._ranks: Ranks | None = None
        self._earlier = lost_context.end()

    @property
    def internal_errors(self) -> list[str]:
        """Failures of the check itself, one line each; a report has them as ``limits``."""
        return self._limits.lines

    @property
    def findings(self) -> tuple[Report, ...]:
        """The first findings of the block that were raised, whether or not they left it."""
        return self._findings.raised.first

    @property
    def warnings(self) -> tuple[Report, ...]:
        """The first silent findings of the block, one for each line."""
        return self._findings.silent.first

    # --- life ------------------------------------------------------------------------------------

    def open(self) -> CheckSession:
        """Install the check; if a part fails, remove what was installed."""
        self._begin()
        try:
            with Uninterrupted():
                self._install(self._stack)
        except BaseException:
            with Uninterrupted():
                self._stack.close()
            raise
        return self

    def _install(self, stack: ExitStack) -> None:
        stack.callback(PROCESS.listen(self))
        # A child process gets the options, but not the files: it would overwrite them.
        names = ("fast", "deferred", "nan", "sync", "max_ops", "force_eager")
        session = partial(CheckSession, **{name: getattr(self, name) for name in names})
        self._ranks = self._optional(stack, "ranks", partial(Ranks, session, self._limits))
        wants = {"is_deferred": self.deferred, "in_compiled": not self.force_eager}
        process.acquire(**wants)
        stack.callback(partial(PROCESS.release, **wants))
        self._checked_before = PROCESS.checked_ops
        if not self.fast or self.nan:  # the watch for NaN stands in the recorder
            self._enter_recording(stack)
        self._limits.attempt("earlier blocks", partial(SUCCESSION.begin, self.recorder))
        stack.callback(self._hand_on)
        # Wait here, too: a fault of an earlier launch must not be blamed on this block.
        probe = partial(lost_context.probe, wait=self.sync and not self.fast)
        self._was_lost = self._limits.attempt("device", probe) is not None

    def _hand_on(self) -> None:
        recorder = self.recorder if self.is_followed else None
        self._limits.attempt("earlier blocks", partial(SUCCESSION.end, recorder))

    def _enter_recording(self, stack: ExitStack) -> None:
        # Imported here: a block that only guards is opened without them.
        from cudalens.recorder import Recorder
        from cudalens.recorder.eager import EagerCompiler
        from cudalens.recorder.stderr import DeviceText

        if self.reads_stderr:
            self.device_text = self._optional(stack, "device text", DeviceText)
        if self.force_eager:  # without it, Dynamo would trace the recorder's mode and hooks
            self._optional(stack, "eager mode", EagerCompiler)
            watch, is_strict = None, self.nan == "strict"
            if self.nan:
                from cudalens.evidence.nonfinite import NonFiniteReports
                from cudalens.recorder.nonfinite import NonFiniteWatch

                # A function, because the recorder is made after its watch.
                reports, recorder = NonFiniteReports(), lambda: self.recorder
                watch = NonFiniteWatch(reports, recorder, is_strict=is_strict)
            make = partial(
                Recorder,
                max_ops=self.max_ops,
                sync=self.sync and not self.fast,
                watch=watch,
                is_fatal=lost_context.is_fatal,
                on_device_end=self._on_device_end,
            )
            self.recorder = self._optional(stack, "recorder", make)
        if self.nan and self.recorder is None:
            reason = self._limits.lines[-1] if self.force_eager else "functions stay compiled"
            print(f"cudalens: NaN and infinity are not looked for: {reason}", file=sys.stderr)

    def _optional(self, stack: ExitStack, what: str, make: Any) -> Any:
        # The cell runs without a part that fails to open, and the report says so.
        return self._limits.attempt(what, lambda: stack.enter_context(make()))

    def close(self, error: BaseException | None = None) -> BaseException | None:
        """Uninstall the check, and make the report if something is wrong.

        Args:
            error: the exception that left the block, if one did; it is never swallowed.

        Returns:
            A finding of deferred guards that is found only here.
        """
        late, started = None, time.perf_counter()
        try:
            shown_error, self.shown_error = self.shown_error, None
            error = shown_error if error is None else error
            if self.deferred or not self.force_eager:
                late = self._limits.attempt("pending checks", PROCESS.settle)
            if late is None and error is None:
                # A NaN in the cell's displayed value: IPython swallows exceptions there.
                late = getattr(getattr(self.recorder, "watch", None), "late", None)
            if late is not None and error is not None:
                late = process.in_place_of(error, late)
            error = late or error
            outcome = self._limits.attempt(
                "conclusion",
                partial(self._conclude, error, started),
                lambda: Outcome(finding=next(iter(self.findings), None)),
                kind=Outcome,
            )
        finally:
            # Once the guards are removed, their count is gone.
            self.checked_ops += max(0, PROCESS.checked_ops - self._checked_before)
            self.recorded_ops += self.recorder.recorded_ops if self.recorder is not None else 0
            self.remove()
            restore_functorch(error)
        self._report(outcome, error)
        return late

    def _report(self, outcome: Outcome, error: BaseException | None) -> None:
        """Store the report on the session, the process and the exception."""
        if error is not None:
            self._limits.attempt("traceback", partial(hide_own_frames, error))
            self._limits.attempt("variables", partial(_python.forget, error))
        if outcome.shown is not None:
            report = outcome.report(self._findings, self.internal_errors)
            self.written, failures = write_files(report, *self._files)
            if failures:
                report = replace(report, limits=(*report.limits, *failures))
            if error is not None and outcome.site is not None:
                complete_message(error, outcome.shown, report)
            self.report = PROCESS.last = report
            if not (self.is_reminder or report.ranks):  # the device of a child process is not ours
                self._limits.attempt("memory", partial(lost_context.remember, report))
            own_report = None if error is None else report_beside(error)
            if isinstance(error, (DeviceAssertError, NonFiniteError)):
                error.report = self.report
            elif error is not None and own_report is not None:
                replace_report(error, report)
        process.note_check(self.checked_ops, self.recorded_ops, self.report)

    def remove(self) -> None:
        """Uninstall the check without a report.  Does nothing if it is not installed."""
        for line in self.recorder.limits if self.recorder is not None else ():
            self.internal_error(line)
        with Uninterrupted():
            self._limits.attempt("removal", self._stack.close)
        self.recorder = None

    def __enter__(self) -> CheckSession:
        """Open the session."""
        return self.open()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close the session; the exception goes on.

        Raises:
            DeviceAssertError: a finding of deferred guards that is found only here.
        """
        try:
            late = self.close(error)
        finally:
            self.remove()  # an interrupt may have cut `close` short
        if late is not None:
            try:
                raise late
            finally:
                # Its traceback has this frame, so the variable would be part of a cycle.
                del late

    # --- listening -------------------------------------------------------------------------------

    def add_finding(self, report: Report) -> None:
        """Record a finding.  The guards call this from any thread."""
        if report.kind != "silent" and not self.findings:
            self._is_of_thread = threading.get_ident() != self._thread
        self._findings.add(report)

    def call_failed(self, error: BaseException, arguments: Any) -> None:
        """Report the loss of the device that a guarded call met, if there is no recorder."""
        if self.recorder is not None:
            return
        trace = error.__traceback__
        if trace is not None and trace.tb_next is None:  # by the op, not by code that it called
            self._refused = _identity(error)
        if not self._is_lost:
            limits = self._limits
            if limits.attempt("device", lambda: lost_context.is_fatal(error), bool):
                limits.attempt("early report", lambda: self._on_device_end(error, arguments))

    def internal_error(self, line: str) -> None:
        """Record a failure of the check itself, once."""
        self._limits.add(line)

    def note_shown(self, error: BaseException) -> None:
        """Record that the shell has shown an exception and does not pass it on."""
        first = next(iter(self.findings), None)
        if first is not None and getattr(error, "report", None) is first:
            self._was_shown = True

    # --- conclusion ------------------------------------------------------------------------------

    def _conclude(self, error: BaseException | None, started: float) -> Outcome:
        """Decide which report is shown: that of the exception, if it has one."""
        # What left the block: a finding of ours, or an exception that has replaced one.
        own = self._own(error)
        left = None if own is None else own.report
        if left is None and error is not None:
            left = next((it for it in self._findings.raised.kept if has_become(it, error)), None)
        # Otherwise the report of a child process, of the exception, or of the device's late error.
        other = None
        if left is None:
            other = self._of_ranks(error)
            has_ranks = self._ranks is not None and self._ranks.has_started
            # The exception of a launcher only says that one of its processes has failed.
            if other is None and not (has_ranks and launcher_error(error) is not None):
                other = self._explained(error, started)
            other = other or self._explained_late(self._late(error), started)
        finding = left if other is None else None
        if finding is None and other is None:
            finding = next(iter(self.findings), None)
        # A finding that did not leave the block was caught in it, which the report says.
        if finding is not None and not (own is not None or is_retold(finding, error)):
            is_first = finding is next(iter(self.findings), None)
            self.swallowed = SwallowedFinding(
                is_of_thread=self._is_of_thread and is_first,
                was_shown=self._was_shown and is_first,
                other=None if error is None else type(error).__name__,
                was_raised_while_handled=error is not None
                and leads_to(finding, error, "__context__"),
            )
        outcome = Outcome(
            finding=finding,
            error=other,
            silent=next(iter(self.warnings), None),
            earlier=self._earlier,
            swallowed=self.swallowed,
            site=None if own is None or left is None else site_from_traceback(own, left),
        )
        self.is_reminder = outcome.is_reminder
        if own is None and left is not None and error is not None:
            note_finding(error, left)
        return outcome

    def _of_ranks(self, error: BaseException | None) -> Report | None:
        """Combine the reports of the processes that the block started."""
        if self._ranks is None or report_beside(error) is not None:
            return None
        results = self._limits.attempt("ranks", self._ranks.results, tuple)
        report = self._limits.attempt("ranks", lambda: combined(results))
        if error is not None and report is not None and launcher_error(error) is not None:
            attached(error, report, note_line(report, self._limits))
        return report

    def _own(self, error: BaseException | None) -> DeviceAssertError | NonFiniteError | None:
        """Return the exception if it is a finding; make sure that the block has recorded it."""
        if not isinstance(error, (DeviceAssertError, NonFiniteError)):
            return None
        if error.report is None:
            error.report = report_of_own(error, self.findings)
        if error.report is not None and not self._findings.has(error.report):
            self.add_finding(error.report)  # recorded nowhere, or by a session inside this one
        return error

    def _explained(self, error: BaseException | None, started: float) -> Report | None:
        """Report an exception that is no finding."""
        if error is None:
            return None
        is_early = self._early_error is not None and self._early_error() is error
        early = self._early if is_early else None
        recorded = (self.recorder, self.device_text)
        return explained(
            error,
            *recorded,
            started,
            self._limits,
            was_lost=self._was_lost,
            early=early,
            is_refused=self._refused is not None and self._refused == _identity(error),
        )

    def _explained_late(self, error: BaseException | None, started: float) -> Report | None:
        """Report the device's error at the end of the block, which has no line of its own."""
        if error is not None and self._early is not None and self.recorder.fatal is None:
            return self._early  # it has the line that met the loss
        return self._explained(error, started)

    def _on_device_end(self, error: BaseException, *held: Any) -> None:
        """Report the loss of the device at once.

        While the exception unwinds the user's code, tensors are freed, and torch can end the
        process there.
        """
        # The memory of the rehearsal device is the host's, which can be freed.
        if context.rehearsed_fault() is None:
            outlive_lost_device(*held)
        if self._was_lost or self._is_lost or threading.get_ident() != self._thread:
            return  # on a thread of autograd's, the stack has no line of the user's
        self._is_lost = True
        report = explained_early(error, self.recorder, self.device_text, self._limits)
        self._early = report
        with suppress(TypeError):  # built-in exceptions take no weak reference
            self._early_error = ref(error)
        self.report = PROCESS.last = report
        self.written, _ = write_files(report, *self._files)  # the final report lists failures
        if self.show_early is not None:
            self.is_shown_early = True
            self.show_early()

    def _late(self, raised: BaseException | None) -> BaseException | None:
        """Wait for the device: a fault of this block must not be blamed on the next."""
        if not self.sync or self.recorder is None or (raised is not None and self._was_lost):
            return None
        if not isinstance(raised, Exception | None) and not self.recorder.is_over:
            return None  # do not make an interrupt wait; a lost device answers at once
        return self._limits.attempt("device", self._wait)

    def _wait(self) -> BaseException | None:
        """Return the device's error; raise other failures of the wait."""
        try:
            self.recorder.synchronize()
        except Exception as error:
            if not lost_context.is_of_device(error):
                raise
            return error
        return None


def _identity(error: BaseException) -> tuple[int, type, tuple[str, ...]]:
    """Return a key for an exception that does not keep it, nor its frames, alive."""
    # More than the `id`: Python reuses it for another exception.
    return id(error), type(error), tuple(item for item in error.args if type(item) is str)


# --- cudalens.check -------------------------------------------------------------------------------


class CheckedBlock(CheckSession):
    """A session without a display: silent findings become Python warnings."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close the session; the exception goes on."""
        try:
            is_followed = partial(SUCCESSION.is_followed, sys._getframe(1), error)
            self.is_followed = self._limits.attempt("earlier blocks", is_followed, bool)
        finally:  # also if an interrupt comes in the lines above
            super().__exit__(kind, error, traceback)
        report = self.report
        if error is None and report is not None and report.kind == "silent":
            text = Limits().attempt(
                "message", partial(format_message, report), partial(format_sentence, report)
            )
            warnings.warn(text, SilentFindingWarning, stacklevel=2)


def check(
    *,
    fast: bool = False,
    nan: bool | Literal["strict"] = False,
    deferred: bool = False,
    sync: bool = True,
    max_ops: int = 4096,
    html: str | Path | None = None,
    json: str | Path | None = None,
    force_eager: bool = True,
    widgets: bool = True,
    no_sync: bool = False,
    no_force_eager: bool = False,
    no_widgets: bool = False,
) -> CheckedBlock:
    """Check a block of code like ``%%cudacheck`` checks a cell; options are keyword arguments.

    Args:
        fast, nan, deferred, sync, max_ops, html, json, force_eager, widgets:
            as in :class:`CheckSession`.
        no_sync, no_force_eager, no_widgets: the same as in the options of the command line.

    Returns:
        a context manager; its ``report`` is the :class:`Report`, ``None`` if nothing is wrong.

    Example:
        >>> with cudalens.check() as check:
        ...     table = torch.zeros(3, 2, device="cuda")
        ...     rows = table[torch.tensor([0, 2], device="cuda")]
        >>> print(check.report)
        None
    """
    return CheckedBlock(
        fast=fast,
        nan=nan,
        deferred=deferred,
        sync=sync and not no_sync,
        max_ops=max_ops,
        html=html,
        json=json,
        force_eager=force_eager and not no_force_eager,
        widgets=widgets and not no_widgets,
    )
