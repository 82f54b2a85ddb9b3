"""After the context is gone: what host memory can still tell of the op that ended it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cudalens
from cudalens import simulate
from cudalens.guards.process import PROCESS
from tests.hostcells import Outcome, run_cell

pytestmark = pytest.mark.usefixtures("sim")

TEXT = (
    "rows.cu:12: lookup_kernel: block: [{block},0,0], thread: [{thread},0,0] "
    "Assertion `{said}` failed."
)
OWN = "row < table_rows"
OPS = "cudalens_postmortem"
SETUP = f"import torch\nops = torch.ops.{OPS}\n"


KERNELS: dict[str, Any] = {
    "lookup": lambda table, rows, scale=1.0: table[rows] * scale,
    "with_others": lambda tables, rows, more, **rest: tables[1][rows],
}


@pytest.fixture
def extension() -> Iterator[Any]:
    """A test extension without guards: ``lookup`` asserts on the device for a row too many."""
    library = torch.library.Library(OPS, "DEF")
    library.define("lookup(Tensor table, Tensor rows, float scale=1.0) -> Tensor")
    library.define(
        "with_others(Tensor[] tables, Tensor rows, Tensor?[] more, *, ScalarType dtype, "
        "float scale, str mode, int[] sizes, Device where) -> Tensor"
    )
    told = SimpleNamespace(text=TEXT.format(block=0, thread=1, said=OWN))

    def on_device(name: str, kernel: Any) -> Any:
        def run(table: Any, rows: Tensor, *more: Any, **options: Any) -> Tensor:
            with torch._C.DisableTorchFunction():
                last = (table[1] if isinstance(table, list) else table).shape[0] - 1
                host = [t.cpu() for t in table] if isinstance(table, list) else table.cpu()
                is_bad = int(rows.max()) > last
                result = kernel(host, rows.cpu().clamp(max=last), *more, **options).cuda()
                if is_bad:
                    simulate.current().device_assert(f"{OPS}::{name}", told.text)
                return result

        return run

    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "CPU")
        library.impl(name, on_device(name, kernel), "CUDA")
    yield told
    library._destroy()


def cell(code: str, **options: Any) -> Outcome:
    """Run a cell under the full check, and keep the rehearsal device's error out of the next."""
    return run_cell(SETUP + code, **{"fast": False, **options})


def note_of_the_next() -> str:
    """Return the first note on the error of a cell that uses the lost device."""
    return getattr(cell("torch.ones(3, device='cuda')").error, "__notes__", [""])[0]


LOOKUP = """\
weights = torch.arange(8.0, device="cuda").reshape(4, 2)
picked = torch.tensor([0, 9, 2], device="cuda")
out = ops.lookup(weights, picked)
later = out + 1
"""


def test_an_op_of_an_extension_is_named_with_its_arguments(extension: Any) -> None:
    outcome = cell(LOOKUP)
    report = outcome.shown
    assert isinstance(outcome.error, torch.AcceleratorError)
    assert (report.kind, report.certainty, report.prevented) == ("device_assert", "likely", False)
    assert (report.op.name, report.context_usable) == (f"{OPS}::lookup", False)
    assert report.source.text == "out = ops.lookup(weights, picked)"
    assert report.headline_schema == f"{OPS}::lookup asserted on the device: `{OWN}` failed"
    facts = {item.argument: item for item in report.tensors}
    assert (facts["rows"].expression, facts["table"].expression) == ("picked", "weights")
    assert (facts["rows"].shape, facts["table"].shape) == ((3,), (4, 2))
    assert (facts["rows"].summary.max, report.replay.outcome) == (None, "unavailable")
    assert report.device_text == TEXT.format(block=0, thread=1, said=OWN)
    assert "restart the kernel" in report.to_text().lower()
    assert report.limits == ()


def test_the_last_good_row_is_no_failure(extension: Any) -> None:
    outcome = cell(LOOKUP.replace("9", "3"))
    assert (outcome.error, outcome.report) == (None, None)


def test_a_text_that_is_known_is_translated(extension: Any) -> None:
    extension.text = TEXT.format(block=0, thread=0, said="srcIndex < srcSelectDimSize")
    report = cell(LOOKUP).shown
    assert report.certainty == "likely"
    assert "the check of nn.Embedding or torch.index_select" in report.explanation


ALIKE = """\
weights = torch.ones(4, 3, device="cuda")
picked = torch.tensor([0, 9], device="cuda")
ops.with_others([{first}, weights], picked, [], dtype=torch.half, scale=1.0, mode="", sizes=[],
    where=torch.device("cuda"))
"""


@pytest.mark.parametrize("first", ["torch.ones(4, 3).cuda()", "torch.ones(4, 2).cuda()"])
def test_of_two_arguments_alike_the_right_one_is_named(extension: Any, first: str) -> None:
    """The refused call is at hand: the tensor itself leads to its argument."""
    report = cell(ALIKE.format(first=first)).shown
    facts = {item.argument: item.expression for item in report.tensors}
    assert (facts["tables[0]"], facts["tables[1]"]) == (None, "weights")


# --- an error that does not leave the cell --------------------------------------------------------

HANDLED = {
    "swallowed": "except RuntimeError:\n    pass",
    "replaced by another": "finally:\n    torch.ones(3, device='cuda')",
    "put in the user's words": "except RuntimeError as e:\n    raise ValueError('mine') from e",
}


def handled(how: str) -> str:
    """Return a cell whose op raises, and that deals with it."""
    return LOOKUP.replace("out = ", "try:\n    out = ").replace("later = out + 1", HANDLED[how])


@pytest.mark.parametrize("how", sorted(HANDLED))
def test_the_op_is_named_though_its_error_stayed_inside(extension: Any, how: str) -> None:
    outcome = cell(handled(how))
    report = outcome.shown
    assert (report.op.name, report.certainty) == (f"{OPS}::lookup", "likely")
    assert report.source.text == "out = ops.lookup(weights, picked)"
    assert "did not leave the block" in report.explanation
    assert {item.argument: item.shape for item in report.tensors}["rows"] == (3,)
    assert isinstance(outcome.error, ValueError) is (how == "put in the user's words")
    assert f"a device-side assert in {OPS}::lookup at" in note_of_the_next()


@pytest.mark.parametrize("how", sorted(HANDLED))
def test_a_handled_call_at_the_bound_is_no_failure(extension: Any, how: str) -> None:
    assert cell(handled(how).replace("9", "3")).report is None


@pytest.mark.parametrize("row", [9, 3])
def test_an_interrupted_cell_tells_what_it_had_lost(extension: Any, row: int) -> None:
    """Nobody waits for the device then; what is known by now is told to this cell and the next."""
    code = handled("swallowed").replace("9", str(row)) + "raise KeyboardInterrupt\n"
    session = cudalens.check()
    with pytest.raises(KeyboardInterrupt), session:
        exec(SETUP + code, {})
    assert (session.report is not None) is (row == 9)
    assert session.report is None or session.report.op.name == f"{OPS}::lookup"


ASSERTED = """\
from cudalens import simulate
y, x = torch.ones(2, 3), torch.ones(3, device="cuda")
simulate.current().device_assert("mine", {!r})
"""
"""Launched past torch's ops, as Triton does."""


def asserted(said: str = OWN) -> str:
    return ASSERTED.format(TEXT.format(block=0, thread=0, said=said))


def test_a_session_inside_another_leaves_the_report_to_be_shown(extension: Any) -> None:
    """The outer block shows it; only a block that began after the loss points back."""
    with pytest.raises(RuntimeError), cudalens.check() as outer, cudalens.check():
        exec(SETUP + LOOKUP, {})
    assert outer.report is not None and not outer.is_reminder
    with pytest.raises(RuntimeError), cudalens.check() as later:
        torch.ones(3, device="cuda")
    assert later.is_reminder


@pytest.mark.parametrize("is_known", [True, False])
def test_a_place_that_only_reported_is_not_called_the_cause(extension: Any, is_known: bool) -> None:
    """The line of a later cell says so of a fault that was met, not found."""
    cell(LOOKUP + "out.sum().item()", sync=is_known)
    assert ("that was reported at In [" in note_of_the_next()) is not is_known


HOOK = """\
picked = torch.tensor([0, 9], device="cuda")
leaf = torch.ones(4, 2, device="cuda", requires_grad=True)

def hook(grad):
    return ops.lookup(grad, picked)

loss = (leaf * 2).sum()
leaf.register_hook(hook)
loss.backward()
"""


def test_a_hook_inside_backward(extension: Any) -> None:
    report = cell(HOOK).shown
    assert (report.op.name, report.phase) == (f"{OPS}::lookup", "backward")
    assert report.source.text == "return ops.lookup(grad, picked)"
    facts = {item.argument: item for item in report.tensors}
    assert (facts["rows"].shape, facts["table"].shape) == ((2,), (4, 2))
    assert report.certainty == "likely"


THREAD = """\
from concurrent.futures import ThreadPoolExecutor
weights = torch.arange(8.0, device="cuda").reshape(4, 2)
picked = torch.tensor([0, 9, 2], device="cuda")

def work():
    return ops.lookup(weights, picked).tolist()

with ThreadPoolExecutor(1) as pool:
    pool.submit(work).result()
"""

STATUS = 'raise RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasX()`")'
USED = "try:\n    x + 1\nexcept RuntimeError:\n    torch.ones(3, device='cuda')"
STREAM = "with torch.cuda.stream(torch.cuda.Stream()):\n    out ="
MADE = "out = ops.lookup(weights, picked)"
LOST: dict[str, tuple[str, dict[str, Any], dict[str, object], *tuple[str, ...]]] = {
    # With ``--no-sync`` the error comes from a later call: no proof, and no wrong op as fact.
    "not waited for": (LOOKUP + "later.sum().item()", {"sync": False},
        {"kind": "device_assert", "certainty": "unknown", "usable": False},
        "an earlier one can be at fault", "run the cell without --no-sync",
        f"Ops called before that are not torch's: {OPS}::lookup."),
    "on a side stream": (LOOKUP.replace("out =", STREAM).replace("later = out + 1\n", ""), {},
        {"op": f"{OPS}::lookup", "certainty": "likely", "line": MADE}),
    # No op of a thread is recorded: the line is where it surfaced, and no op is made up.
    "in a thread of the user's": (THREAD, {}, {"kind": "device_assert", "certainty": "unknown",
        "op": None, "usable": False, "line": "return ops.lookup(weights, picked).tolist()"},
        f"✗ CUDA asserted `{OWN}`", "another thread did"),
    # A later op is not blamed for what ran past the ops.
    "past the ops": (asserted() + USED, {}, {"op": None, "certainty": "unknown"},
        "launched past torch's ops"),
    # An exception of the host's stays what it is, and the lost context is told.
    "a host error on a dead device": (asserted() + "y @ y", {"fast": True},
        {"kind": "host_error", "usable": False}, "had also failed before"),
    # cuBLAS reports a status of its own after an assert: the device itself is asked.
    "a status that hides an assert": (asserted("srcIndex < srcSelectDimSize") + STATUS, {},
        {"kind": "device_assert", "usable": False}, "it hides an assert",
        "✗ nn.Embedding or torch.index_select asserted on"),
    "a status on a living device": (STATUS, {}, {"kind": "cuda_error", "usable": True}),
}  # fmt: skip


@pytest.mark.parametrize(("code", "options", "known", "said"),
                         [(*row[:3], row[3:]) for row in LOST.values()], ids=LOST)  # fmt: skip
def test_as_much_is_said_as_is_known(
    extension: Any, code: str, options: Any, known: dict[str, object], said: tuple[str, ...]
) -> None:
    """The op where it is proven; where it is not, what may be the cause."""
    report = cell(code, **options).shown
    line = report.source and report.source.text
    seen = {"kind": report.kind, "certainty": report.certainty, "usable": report.context_usable}
    seen |= {"op": report.op.name, "line": line}
    assert {key: seen[key] for key in known} == known
    told = f"✗ {report.headline_schema}\n{report.explanation}"
    assert [text for text in said if text not in told] == []


# --- the device is left alone ---------------------------------------------------------------------


@pytest.fixture
def launches(sim: simulate.Simulation, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return what grows when the rehearsal device is asked for work after its context is gone."""
    found: list[None] = []
    state = sim._runtime.state
    launch = state.launch

    def counted() -> None:
        found.extend([None] * state.is_poisoned)
        launch()

    monkeypatch.setattr(state, "launch", counted)
    return found


def test_no_tensor_is_read_once_the_context_is_gone(
    extension: Any, sim: simulate.Simulation, launches: list[None]
) -> None:
    report = cell(LOOKUP).shown
    assert sim.is_poisoned
    report.to_text(), report.to_html(), report.to_json(), report._repr_mimebundle_()
    assert cudalens.last_report() == report
    assert launches == []
    with pytest.raises(torch.AcceleratorError):
        torch.ones(1, device="cuda")
    assert len(launches) == 1


def test_a_read_is_seen(sim: simulate.Simulation, launches: list[None]) -> None:
    x = torch.ones(2, device="cuda")
    sim.device_assert("x", "text")
    for read in (torch.cuda.synchronize, x.cpu, x.sum, x.tolist, x.__repr__):
        with pytest.raises(torch.AcceleratorError):
            read()
    assert len(launches) == 4


# --- later cells ----------------------------------------------------------------------------------


def test_later_cells_point_back_in_one_line(extension: Any) -> None:
    first = cell(LOOKUP)
    second = cell("torch.ones(3, device='cuda')")
    notes = getattr(second.error, "__notes__", [])
    assert len(notes) == 1 and "\n" not in notes[0]
    assert notes[0].startswith(
        f"cudalens: the CUDA context was lost to a device-side assert in {OPS}::lookup at In ["
    )
    assert notes[0].endswith("out = ops.lookup(weights, picked): restart the kernel to use the GPU")
    assert second.report == first.report
    quiet = cell("torch.ones(3)")
    assert (quiet.error, quiet.report) == (None, None)


@pytest.mark.parametrize("how", ["reset", "stop"])
def test_a_rehearsal_device_can_live_again(
    extension: Any, how: str, sim: simulate.Simulation
) -> None:
    cell(LOOKUP)
    assert PROCESS.lost is not None
    if how == "reset":
        sim.reset()
    else:
        sim.stop()
        sim.reset()
        simulate.start(announce=False)
    again = cell(LOOKUP.replace("picked", "other")).shown
    if (running := simulate.current()) is not sim:
        running.stop()
    assert again.source is not None and again.source.text == "out = ops.lookup(weights, other)"


@pytest.mark.parametrize("fast", [False, True])
def test_an_assert_of_an_unchecked_cell_is_not_blamed_on_the_next(
    extension: Any, fast: bool
) -> None:
    space: dict[str, Any] = {}
    exec(SETUP + LOOKUP, space)
    report = cell("x = torch.ones(3, device='cuda') + 1", fast=fast).shown
    assert report.op.name is None
    assert (report.kind, report.context_usable) == ("device_assert", False)
    assert "before this cell" in report.headline_schema + report.explanation
    assert report.certainty != "proven"
