"""pytest: ``--cudacheck`` runs each test under the check, and so does the marker ``cudacheck``.

A test that passes a bad value to an op fails with the report attached, and CUDA stays usable for
the tests that follow.  If the context is lost all the same, a worker of pytest-xdist exits after
its report, so that a new one takes over.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest

from cudalens.session.options import MODES

if TYPE_CHECKING:
    from cudalens.core.report import Report

_HEADLINE = "cudalens_headline"
_REPORT: pytest.StashKey[Report] = pytest.StashKey()
_IS_LOST = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--cudacheck``."""
    parser.getgroup("cudalens").addoption(
        "--cudacheck",
        nargs="?",
        const="on",
        metavar="|".join(MODES),
        help="run each test under the check of cudalens: fast for the guards alone, nan to stop "
        "where a NaN reaches the loss, a gradient, a parameter or the host, deferred for guards "
        "that wait for the device at no call",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> None:
    """Make ``pytest --cudacheck tests`` run the tests there: a path is no value of the option."""
    for at, word in enumerate(args[:-1]):
        if word == "--cudacheck" and args[at + 1] not in MODES:
            args[at] = "--cudacheck=on"
    # Pytest has parsed the words already, and looks for conftest files below these paths.
    options = early_config.known_args_namespace
    options.file_or_dir = parser.parse_known_args(args).file_or_dir


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and reject an unknown mode."""
    mode = config.getoption("cudacheck")
    if mode is not None and mode not in MODES:
        msg = f"--cudacheck: invalid choice: {mode!r} (choose from {', '.join(MODES)})"
        raise pytest.UsageError(msg)
    config.addinivalue_line(
        "markers",
        "cudacheck(fast=False, nan=False, deferred=False): run the test under cudalens.check with "
        "these options, cudacheck(False) without it",
    )


def _options(item: pytest.Item) -> dict[str, Any] | None:
    """Return the options of a test's check, ``None`` for an unchecked test."""
    mode = item.config.getoption("cudacheck")
    marker = item.get_closest_marker("cudacheck")
    if marker is None:
        return None if mode is None else MODES[mode]
    return None if marker.args == (False,) else dict(marker.kwargs)


def _checked(item: pytest.Item, options: dict[str, Any] | None) -> Generator[None, Any, Any]:
    if options is None:
        return (yield)
    from cudalens.session.session import check

    session = check(**options)
    # capfd reads the file descriptor that the check would redirect through a process of its own.
    session.reads_stderr = {"capfd", "capfdbinary"}.isdisjoint(getattr(item, "fixturenames", ()))
    try:
        with session:
            return (yield)
    finally:
        if session.report is not None:
            item.stash[_REPORT] = session.report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run the fixtures under the guards."""
    return (yield from _checked(item, None if _options(item) is None else {"fast": True}))


pytest_runtest_teardown = pytest_runtest_setup


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run the test under the check."""
    return (yield from _checked(item, _options(item)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the text to a failure, and the finding to the JUnit file."""
    finding = item.stash.get(_REPORT, None)
    if finding is None:
        return (yield)
    del item.stash[_REPORT]  # the later phases of the test have findings of their own
    if finding.context_usable is False:
        item.config.stash[_IS_LOST] = True
    item.user_properties += [
        ("cudalens_kind", finding.kind),
        ("cudalens_op", finding.op.name),
        (_HEADLINE, finding.headline),
    ]
    from cudalens.source.shown_frames import without_repeats  # pytest loads this plugin unasked

    with (
        without_repeats(call.excinfo.value, finding) if call.excinfo is not None else nullcontext()
    ):
        report = yield
    if report.failed:
        report.sections.append(("cudalens", finding.to_text()))
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """End a worker of pytest-xdist whose context is lost; its controller starts another one."""
    done = yield  # by now the test's own reports have been sent
    # Only a worker of xdist has a `workerinput`.
    if hasattr(item.config, "workerinput") and item.config.stash.get(_IS_LOST, False):
        # xdist starts another worker only for one that crashes.
        os._exit(1)
    return done


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """List the findings of tests that passed, and say that a lost context makes others fail."""
    passed = [
        (report.nodeid, value)
        for outcome in ("passed", "skipped")
        for report in terminalreporter.getreports(outcome)
        for name, value in report.user_properties
        if name == _HEADLINE and report.when == "call"
    ]
    is_lost = config.stash.get(_IS_LOST, False)
    if passed or is_lost:
        terminalreporter.section("cudalens")
    if passed:
        terminalreporter.line(
            "Found in tests that did not fail by it: caught by a handler, or in a thread."
        )
    for nodeid, headline in passed:
        terminalreporter.line(f"  {nodeid}: {headline}")
    if is_lost:
        terminalreporter.line(
            "A test lost CUDA for this process: tests behind it that use the GPU fail for that "
            "reason alone. With pytest-xdist (-n 1) a new worker takes over."
        )
