"""When a part of ours fails, the user's own error still arrives and nothing stays installed."""

from __future__ import annotations

import importlib
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from traceback import walk_stack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cudalens
from cudalens import DeviceIndexError, guards, simulate
from cudalens.core._python import Uninterrupted
from cudalens.core.limits import Limits
from cudalens.core.report import Report
from cudalens.guards.process import PROCESS
from tests.amount import AMOUNT
from tests.blocks import cuda
from tests.releases import takes_modulo
from tests.shells import BAD, Notebook

pytestmark = pytest.mark.no_cover  # each runs whole cells, which other tests trace
SENTENCE = "indices[1] = 7 is outside the 5 rows of weight"


class InjectedError(Exception):
    """What a broken part of ours raises."""


def raising(*args: Any, **kwargs: Any) -> Any:
    raise InjectedError("injected")


def exhausted(*args: Any, **kwargs: Any) -> Any:
    raise MemoryError("injected")


WAYS = (raising, exhausted)

WHOLE = {"report", "conclusion", "removal"}
"""Attempts at a whole report, and at the end of a block: what stays without them is below."""


def stages_of(block: Callable[[], Any]) -> list[str]:
    """Return the names of all attempts that a block makes, each once."""
    names: dict[str, None] = {}
    attempt = Limits.attempt

    def noted(self: Limits, what: str, *args: Any, **kwargs: Any) -> Any:
        names[what] = None
        return attempt(self, what, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Limits, "attempt", noted)
        block()
    return [name for name in names if name not in WHOLE]


@contextmanager
def failing(stage: str, way: Callable[..., Any]) -> Iterator[list[str]]:
    """Let every attempt of a name fail; give the lines that say so."""
    lines: list[str] = []
    attempt = Limits.attempt

    def fails(self: Limits, what: str, collect: Any, *args: Any, **kwargs: Any) -> Any:
        result = attempt(self, what, way if what == stage else collect, *args, **kwargs)
        lines.extend(line for line in self.lines if what == stage)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Limits, "attempt", fails)
        yield lines


@contextmanager
def broken(target: str, way: Callable[..., Any]) -> Iterator[None]:
    """Put ``way`` in the place of a function for the length of the block, which must reach it."""
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(f"cudalens.{module}")
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    reached = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        reached.append(name)
        return way(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, noted)
        yield
    assert reached, f"the block went without {target}"


def bad() -> Tensor:
    # Called as the schema calls them: what cannot be looked up has the schema's names, and is said
    # to be the op's argument.
    indices, weight = torch.tensor([1, 7], device="cuda"), torch.ones(5, 2, device="cuda")
    return F.embedding(indices, weight)


def good() -> None:
    rows = F.embedding(torch.tensor([1, 4], device="cuda"), torch.ones(5, 2, device="cuda"))
    assert rows.tolist() == [[1.0, 1.0]] * 2


def passed() -> None:
    """Run a good block, of which nothing is said."""
    with cudalens.check() as session:
        good()
    assert session.report is None


def stopped(**options: Any) -> cudalens.CheckSession:
    """Run a bad block, whose error says what is wrong, and return its session."""
    with pytest.raises(DeviceIndexError) as caught, cudalens.check(**options) as session:
        bad()
    text = str(caught.value).removeprefix("argument ")
    assert text.startswith("indices[1] = 7 is outside the 5 rows")
    assert session.report.headline_schema == SENTENCE
    assert caught.value.report is session.report
    return session


@pytest.fixture(autouse=True)
def all_is_well(sim: simulate.Simulation) -> Iterator[None]:
    """Assert that the next block finds everything again; ``conftest.py``, that nothing is left."""
    yield
    assert stopped().report.limits == ()
    good()


# --- from a finding to its report ----------------------------------------------------------------


def test_a_finding_survives_the_failure_of_each_part(sim: simulate.Simulation) -> None:
    """All parts on the way to its report are attempts, so that no list of them is needed."""
    stages = stages_of(stopped)
    assert {"frames", "tensors", "graph", "history", "diagnosis", "hints"} <= {*stages}
    for at, stage in enumerate(stages):
        with failing(stage, WAYS[at % 2]) as lines:
            session = stopped()
        assert (sim.is_poisoned, sim.pending) == (False, None), stage
        assert [item.value for item in session.report.offenders.first] == [7], stage
        assert any(line.startswith(f"{stage} unavailable: ") for line in lines), stage


def test_a_wait_that_fails_stops_no_good_block() -> None:
    for function in WAYS:
        with broken("recorder:Recorder.synchronize", function):
            passed()


AFTER_A_FINDING = {
    "refusal": ["guards.interceptor:is_refused"],
    "call": ["guards.interceptor:OpCall"],
    "telling": ["session.process:on_violation"],
    "fallback": ["evidence.finding:diagnose", "evidence.finding:bare_report_of_violation"],
    "report class": ["diagnosis.diagnose:Report"],
    "sentence": ["evidence.finding:format_message", "evidence.finding:format_sentence"],
    "exception": ["evidence.finding:DeviceIndexError"],
    "session": ["guards.process:Guarding.add_finding"],
    "complaint": ["session.process:on_violation", "guards.process:Guarding.internal_error"],
}
"""What runs between the moment in which a guard has found a value and the exception."""


@pytest.mark.parametrize("stage", AFTER_A_FINDING)
@pytest.mark.parametrize("opened", [cudalens.check, cudalens.guard], ids=["check", "guard"])
def test_whatever_fails_after_a_finding_the_op_is_not_launched(
    stage: str, opened: Callable[[], Any], sim: simulate.Simulation
) -> None:
    """An error with the value arrives; a good call passes all the same.

    What the device is like without guards is in ``test_session.py``.
    """
    targets = AFTER_A_FINDING[stage]
    for function in WAYS:
        with ExitStack() as stack:
            for target in targets:
                stack.enter_context(broken(target, function))
            with pytest.raises(DeviceIndexError) as caught, opened() as session:
                good()
                bad()
        assert str(caught.value).startswith("indices[1] = 7 is outside the 5 rows")
        assert (sim.is_poisoned, sim.pending) == (False, None)
        if session is not None:
            assert session.report.headline_schema == SENTENCE
            assert not session.swallowed
            assert caught.value.report is session.report


@takes_modulo
def test_a_silent_finding_that_cannot_be_reported_stops_nothing() -> None:
    """Nothing asserts there, so that the op runs; the report of another tells."""
    table = torch.zeros(3, device="cuda")
    with broken("session.process:on_violation", raising):
        with pytest.raises(DeviceIndexError), cudalens.check() as session:
            assert torch.take_along_dim(table, cuda(2), 0).tolist() == [0.0]
            torch.take_along_dim(table, cuda(3), 0)
            bad()
    assert any(line.startswith("report unavailable") for line in session.report.limits)


@takes_modulo
def test_a_silent_finding_is_raised_where_the_user_makes_warnings_errors() -> None:
    """``-W error``: the op that would have warned is stopped, as Python says."""
    with warnings.catch_warnings(action="error"), cudalens.guard():
        with pytest.raises(cudalens.SilentFindingWarning, match="is outside"):
            torch.take_along_dim(torch.zeros(3, device="cuda"), cuda(3), 0)


# --- from an exception to its report -------------------------------------------------------------


def test_an_exception_of_torchs_survives_the_failure_of_each_part() -> None:
    """It arrives as it is, with one note and a report."""
    seen: list[tuple[BaseException, str]] = []

    def fail() -> cudalens.CheckSession:
        with pytest.raises(RuntimeError) as caught, cudalens.check() as session:
            left, right = torch.ones(2, 3, device="cuda"), torch.ones(2, 3, device="cuda")
            try:
                left @ right
            except RuntimeError as error:
                seen.append((error, str(error)))
                raise
        assert caught.value is seen[-1][0]
        assert type(caught.value) is RuntimeError
        assert str(caught.value) == seen[-1][1]
        assert len(caught.value.__notes__) == 1
        return session

    stages = stages_of(fail)
    assert {"frames", "tensors", "graph", "history", "diagnosis", "hints"} <= {*stages}
    for at, stage in enumerate(stages):
        with failing(stage, WAYS[at % 2]) as lines:
            session = fail()
        assert isinstance(session.report, Report), stage
        assert any(line.startswith(f"{stage} unavailable: ") for line in lines), stage


def test_a_foreign_exception_survives_our_doubts() -> None:
    """When we cannot even tell whose it is, it passes without a report."""
    error = KeyError("mine")
    with broken("session.exit:is_torch_error", raising):
        with pytest.raises(KeyError) as caught, cudalens.check() as session:
            raise error
    assert caught.value is error
    assert session.report is None


# --- guards --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [*WAYS, lambda *values: object()])
def test_a_broken_guard_stops_no_good_call(
    way: Callable[..., Any], sim: simulate.Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = torch.ops.aten.embedding.default
    entries = [replace(entry, requires=way, check=way) for entry in guards.GUARDS[op]]
    monkeypatch.setitem(guards._table, op, tuple(entries))
    with pytest.raises(IndexError), cudalens.check() as session:
        good()
        torch.ones(3, device="cuda")[cuda(5)]
    assert any("embedding" in line and "failed" in line for line in session.report.limits)
    assert session.report.op.name == "aten::index"
    passed()
    assert not sim.is_poisoned


# --- opening and closing -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "recorder.stderr:DeviceText.__enter__",
        "recorder:Recorder.__enter__",
        "recorder.eager:EagerCompiler.__enter__",
        "evidence.lost_context:probe",
        "recorder:Recorder.__init__",
    ],
)
def test_a_part_that_cannot_be_opened_is_done_without(target: str) -> None:
    with broken(target, raising):
        passed()
        limits = stopped().report.limits
    assert any("InjectedError" in line for line in limits)


@pytest.mark.parametrize(
    ("nan", "fails", "is_told"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_search_for_nan_that_is_impossible_is_told_at_once(
    nan: bool, fails: bool, is_told: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with broken("recorder:Recorder.__enter__", raising) if fails else nullcontext():
        with cudalens.check(nan=nan):
            told = capfd.readouterr().err
    line = (
        "cudalens: NaN and infinity are not looked for:"
        " recorder unavailable: InjectedError: injected\n"
    )
    assert told == line * is_told


def test_a_search_for_nan_in_compiled_functions_is_refused_at_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with cudalens.check(nan=True, force_eager=False):
        told = capfd.readouterr().err
    assert told == "cudalens: NaN and infinity are not looked for: functions stay compiled\n"


def test_guards_that_cannot_be_installed_leave_nothing() -> None:
    with broken("guards.interceptor:Interceptor.install", raising):
        with pytest.raises(InjectedError), cudalens.check():
            pytest.fail("the block ran")


@pytest.mark.parametrize("target", ["recorder.stderr:DeviceText", "recorder:Recorder"])
@pytest.mark.parametrize("fails", [True, False], ids=["failing block", "good block"])
def test_a_part_that_fails_while_it_closes_hides_nothing(target: str, fails: bool) -> None:
    module, _, name = target.partition(":")
    close = getattr(importlib.import_module(f"cudalens.{module}"), name).__exit__

    def closing(self: Any, *args: Any) -> None:
        close(self, *args)
        raise InjectedError("injected")

    with broken(f"{target}.__exit__", closing):
        if fails:
            assert any("InjectedError" in line for line in stopped().report.limits)
        else:
            passed()


# --- views and files -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    ["render.html:render_page", "core.report:Report.to_json", "core.report:Report.to_html"],
)
def test_a_file_that_cannot_be_made_hides_nothing(target: str, tmp_path: Path) -> None:
    files = {"html": tmp_path / "r.html", "json": tmp_path / "r.json"}
    for function in WAYS:
        with broken(target, function):
            limits = stopped(**files).report.limits
        assert any("was not written" in line for line in limits)


VIEWS = ["text:render", "html:render_fragment", "widget:live"]


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_that_fails_in_a_notebook_hides_nothing(
    view: str, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDALENS_WIDGETS", "1")
    notebook.shell.kernel = object()  # a widget is for a shell with one
    for how, ways in (("%%cudacheck\n", WAYS), ("%cudacheck on", [raising])):
        magic = notebook.under(how)
        for function in ways:
            with broken(f"render.{view}", function):
                notebook.run(magic + BAD)
            assert isinstance(notebook.error, DeviceIndexError)
            assert str(notebook.error).startswith("ids[1] = 7 is outside the 5 rows of table")
    for cell in ("%cudacheck off", "answer = 6 * 7"):
        notebook.run(cell)
        assert notebook.error is None


# --- interrupts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [nullcontext, Uninterrupted])
def test_an_interrupt_inside_is_put_off_to_the_outermost_end(inner: Callable[[], Any]) -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt):
        with Uninterrupted():
            with inner():
                signal.raise_signal(signal.SIGINT)
            steps.append("whole")
        steps.append("never")
    assert steps == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


OURS = str(Path(cudalens.__file__).parent)


def state() -> dict[str, object]:
    """Return what a check may change of the process."""
    return {
        "guards": (PROCESS.is_installed, PROCESS.listeners),
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "functions": torch._C._is_torch_function_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "signal handler": signal.getsignal(signal.SIGINT),
        "module hooks": dict(nn.modules.module._global_forward_pre_hooks),
        "file descriptor 2": os.fstat(2).st_ino,
        "descriptors": len([*Path("/proc/self/fd").iterdir()]),
    }


def train() -> None:
    """Train one step in a checked block."""
    with cudalens.check():
        layer = nn.Linear(3, 2).cuda()
        F.cross_entropy(layer(torch.ones(2, 3, device="cuda")), cuda(0, 1)).backward()


def do_nothing() -> None:
    """Open a checked block and close it."""
    with cudalens.check():
        pass


def files_above(frame: Any) -> list[str]:
    return [item.f_code.co_filename for item, _ in walk_stack(frame)]


def interrupted_at(instant: int, run: Callable[[], None]) -> int:
    """Interrupt a run at one function call of ours; return how many were made before its end."""
    count = 0

    def watch(frame: Any, event: str, arg: object) -> None:
        nonlocal count
        code = frame.f_code
        # Python gives no way to protect the entry of an __exit__; the driver is not interrupted.
        is_open = code.co_name != "__exit__" and "/simulate/" not in code.co_filename
        if event == "call" and is_open and code.co_filename.startswith(OURS):
            count += 1
            # Cut in two, torch's no_grad leaves its mode, without us too.
            if count == instant and "grad_mode.py" not in "".join(files_above(frame)):
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.no_cover
@pytest.mark.usefixtures("no_callback_of_the_collector")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are listed on Linux")
@pytest.mark.parametrize("run", [do_nothing, train])
def test_an_interrupt_at_any_instant_of_a_block_arrives_and_leaves_nothing(
    run: Callable[[], None],
) -> None:
    run()  # the first one imports
    instants, before = range(1, interrupted_at(0, run) + 1), state()
    tried = min(AMOUNT.interrupts, len(instants))
    arrived = tried
    for instant in random.Random(20240613).sample(instants, tried):
        with suppress(KeyboardInterrupt):
            arrived -= interrupted_at(instant, run) > 0
        assert {name: now for name, now in state().items() if now != before[name]} == {}, instant
    assert arrived > 0.9 * tried
