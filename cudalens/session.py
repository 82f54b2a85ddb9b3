"""The checked block: what ``%%cudacheck`` and ``cudalens.check()`` do, wired together here only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from cudalens import collect, fallback, lostcontext, process, snapshots, source
from cudalens.calling import hide_own_frames, locate, traceback_frames, trim
from cudalens.conclusion import explained, kept, listed, saved
from cudalens.diagnose import message
from cudalens.errors import DeviceAssertError, NonFiniteError
from cudalens.guarding import PROCESS
from cudalens.interrupts import Uninterrupted
from cudalens.model import Report

MAX_FINDINGS = 20
"""Findings of one block that are kept whole; further ones are only counted."""


class CheckSession:
    """One checked block of code: guards, recorder and synchronous CUDA while it is open.

    Args:
        fast: guards only; no recorder, no synchronisation.
        nan: also stop at the first op that makes a NaN or an infinity of finite inputs.
        sync: synchronise after each op on an accelerator, so that a fault names its op.
        max_ops: how many of the last ops the recorder keeps.
        html, json: files to write the report to, when there is one.
        force_eager: run compiled functions eagerly inside the block.
        widgets: whether a front end may show the interactive view.
    """

    def __init__(
        self,
        *,
        fast: bool = False,
        nan: bool = False,
        sync: bool = True,
        max_ops: int = 4096,
        html: str | Path | None = None,
        json: str | Path | None = None,
        force_eager: bool = True,
        widgets: bool = True,
    ) -> None:
        if max_ops < 1:
            msg = f"max_ops = {max_ops}: the recorder keeps at least one op"
            raise ValueError(msg)
        self.fast = fast
        self.nan = nan
        self.sync = sync
        self.max_ops = max_ops
        self.widgets = widgets
        self.force_eager = force_eager
        self._files = [Path(path) for path in (html, json) if path is not None]
        self._stack = ExitStack()
        self.troubles: list[str] = []
        """What failed in the check itself, one line each; a report has them as ``limits``."""
        self._count = 0
        self._first: Report | None = None
        self.recorder: Any = None
        self.device_text: Any = None
        self.findings: tuple[Report, ...] = ()
        self.warnings: tuple[Report, ...] = ()
        self.report: Report | None = None
        self.swallowed = False
        self.is_of_thread = False
        """Whether the first finding was made in another thread than the block's."""
        self._thread = 0
        self.is_reminder = False
        """Whether the report is that of an earlier block, which ended the device's context."""
        self._was_lost = False
        self.aftermath: str | None = None
        """The kind of the other exception that left the block after a swallowed finding."""

    # --- life ------------------------------------------------------------------------------------

    def open(self) -> CheckSession:
        """Install everything; what was installed is removed again when a part of it fails."""
        self.findings, self.warnings, self.report, self._count = (), (), None, 0
        self.is_reminder, self._thread = False, threading.get_ident()
        self.troubles.clear()
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
        process.acquire()
        stack.callback(PROCESS.release)
        if not self.fast or self.nan:  # the watch for NaN stands in the recorder
            self._enter_recording(stack)
        # Waiting, as after each op: what was launched before must not be blamed on this block.
        probe = partial(lostcontext.probe, wait=self.sync and not self.fast)
        self._was_lost = self._attempt("device", probe) is not None

    def _enter_recording(self, stack: ExitStack) -> None:
        from cudalens.devicetext import DeviceText
        from cudalens.eager import EagerCompiler
        from cudalens.nonfinite import NonFiniteWatch
        from cudalens.recorder import Recorder

        self.device_text = self._optional(stack, "device text", DeviceText)
        if self.force_eager:
            self._optional(stack, "eager mode", EagerCompiler)
        watch = NonFiniteWatch(collect.on_nonfinite) if self.nan else None
        make = partial(
            Recorder,
            max_ops=self.max_ops,
            sync=self.sync and not self.fast,
            watch=watch,
            # Naming modules takes a hook, and under any global hook compiled modules run eagerly.
            modules=self.force_eager,
        )
        self.recorder = self._optional(stack, "recorder", make)

    def _optional(self, stack: ExitStack, what: str, make: Any) -> Any:
        # A cell runs without what cannot be opened, and the report says so.
        return self._attempt(what, lambda: stack.enter_context(make()))

    def _attempt(self, what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as trouble:  # our failure must not hide the user's
            self.trouble(fallback.trouble_line(what, trouble))
            return None

    def close(self, error: BaseException | None = None) -> None:
        """Remove everything, and make the report when something is wrong.

        Args:
            error: the exception that left the block, if one did; it is never swallowed.
        """
        self.__exit__(None, error, None)

    def _close(self, error: BaseException | None) -> None:
        started = time.perf_counter()
        report = None
        try:
            report = self._conclude(error if error is not None else self._late(), started)
        except Exception as trouble:  # our failure must not hide the user's
            self.trouble(fallback.trouble_line("conclusion", trouble))
            report = self.findings[0] if self.findings else None
        finally:
            self._remove()
        if error is not None:
            self._attempt("traceback", partial(hide_own_frames, error))
            self._attempt("variables", partial(snapshots.forget, error))
        if report is not None:
            limits = tuple(dict.fromkeys((*report.limits, *self.troubles)))
            self._publish(saved(replace(report, limits=limits), self._files), error)

    def _remove(self) -> None:
        for line in self.recorder.limits if self.recorder is not None else ():
            self.trouble(line)
        with Uninterrupted():
            self._attempt("removal", self._stack.close)
        self.recorder = None

    def __enter__(self) -> CheckSession:
        """Open the session."""
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the session; the exception goes on."""
        try:
            self._close(error)
        finally:
            self._remove()  # once more: an interrupt may have come where it began

    # --- listening -------------------------------------------------------------------------------

    def found(self, report: Report) -> None:
        """Take note of a finding; called by the guards, from any thread."""
        if report.kind == "silent":
            self._warn(report)
            return
        self._count += 1
        if not self.findings:
            self.is_of_thread = threading.get_ident() != self._thread
        if len(self.findings) < MAX_FINDINGS:
            self.findings = (*self.findings, report)

    def _warn(self, report: Report) -> None:
        places = [(item.op, item.source, item.argument) for item in self.warnings]
        if (report.op, report.source, report.argument) not in places:
            self.warnings = (*self.warnings, report)[:MAX_FINDINGS]

    def trouble(self, line: str) -> None:
        """Take note of a failure of our own, once."""
        if line not in self.troubles and len(self.troubles) < MAX_FINDINGS:
            self.troubles.append(line)

    # --- conclusion ------------------------------------------------------------------------------

    def _conclude(self, error: BaseException | None, started: float) -> Report | None:
        own = error if isinstance(error, (DeviceAssertError, NonFiniteError)) else None
        if own is not None and own.report is not None:
            self._claim(own.report)
        report = self.findings[0] if self.findings else None
        self.swallowed = report is not None and (own is None or own.report is not report)
        self.aftermath = type(error).__name__ if self.swallowed and error is not None else None
        if report is not None and own is not None:
            report = self._completed(own, report)
        if report is None and error is not None:
            recorded = (self.recorder, self.device_text)
            report = explained(error, *recorded, started, was_lost=self._was_lost)
            self.is_reminder = report is not None and report is lostcontext.end()
        if report is None and self.warnings:
            report = self.warnings[0]
        return None if report is None else self._with_rest(report)

    def _claim(self, report: Report) -> None:
        """Take a finding that came to nobody, or to a session inside this one."""
        if all(item is not report for item in self.findings):
            self.found(report)

    def _publish(self, report: Report, error: BaseException | None) -> None:
        """Make this the report of the session, of the process and of the exception."""
        self.report = PROCESS.last = report
        if not self.is_reminder:
            self._attempt("memory", partial(lostcontext.remember, report))
        if self.swallowed or error is None:
            return
        if isinstance(error, (DeviceAssertError, NonFiniteError)):
            error.report = self.report
        elif hasattr(error, "__cudalens_report__"):
            error.__cudalens_report__ = self.report

    def _completed(self, error: DeviceAssertError | NonFiniteError, report: Report) -> Report:
        """Fill in, from the traceback, what could not be seen where the guard fired."""
        trim(error)
        if report.source is not None or error.report is not report:
            return report
        entries = list(traceback_frames(error.__traceback__))
        site = collect.Limits().attempt("source", lambda: locate(entries, {}), source.CallSite())
        report = replace(
            report,
            source=site.source,
            frames=site.frames or report.frames,
            op=replace(report.op, api=report.op.api or site.api),
        )
        error.args = (message(report), *error.args[1:])
        error.report = report
        return report

    def _with_rest(self, report: Report) -> Report:
        """Add what else happened in the block: how often, what else, and our own troubles."""
        said = [report.explanation] if report.explanation else []
        others = [item for item in self.findings if item is not self.findings[0]]
        if self.swallowed and self._count:
            times = "once" if self._count == 1 else f"{self._count} times"
            then = f", and {self.aftermath} was raised" if self.aftermath else ""
            said.append(f"{kept(self.is_of_thread)}{then}; a guard fired {times}.")
        if self._count > 1:
            said.append(f"{self._count - 1} more in this cell{listed(others)}")
        return replace(report, explanation=" ".join(said))

    def _late(self) -> BaseException | None:
        """Wait for the device: a fault of this block must not be blamed on the next."""
        if not self.sync or self.recorder is None:
            return None
        try:
            self.recorder.synchronize()
        except Exception as error:
            return error
        return None


def check(**options: Any) -> CheckSession:
    """Check a block of code as ``%%cudacheck`` checks a cell; options as keyword arguments.

    Args:
        options: those of :class:`CheckSession`; ``--no-sync`` is ``no_sync=True`` (``sync=False``).

    Returns:
        a context manager; its ``report`` is the :class:`Report`, ``None`` when nothing is wrong.
    """
    for name in [item for item in options if item.startswith("no_")]:
        options[name.removeprefix("no_")] = not options.pop(name)
    return CheckSession(**options)
