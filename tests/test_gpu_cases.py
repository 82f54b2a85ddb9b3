"""The GPU suite's own logic, without a GPU: triggers, processes, comparison, the page it writes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from cudalens import simulate
from cudalens.diagnosis import assert_meanings
from cudalens.guards import GUARDS, full_name
from cudalens.simulate.asserts import NOT_SIMULATED
from tests.cpu_guards import guarded
from tests.inventory import REACHABLE, UNGUARDABLE
from tests.processes import python
from tests.releases import has_grouped_mm, needs_rehearsal
from tests.sticky_calls import RAISING, SILENT

GPU = Path(__file__).parent / "gpu"
sys.path.insert(0, str(GPU))

import report  # noqa: E402
from cases import CASES, NOT_TRIGGERED, Case, namespace  # noqa: E402
from faults import FAULTS  # noqa: E402
from harmless import HARMLESS, run_harmless  # noqa: E402
from steps import AGAIN, MODES, STEPS, TINY, run_step  # noqa: E402
from worker import RESULT, run_case  # noqa: E402

RECORDS_OF = {
    name: {record for entry in entries for record in entry.records}
    for name, entries in ((full_name(op), entries) for op, entries in GUARDS.items())
}
ON_CPU = [case for case in CASES if case.reaches_guard_on_cpu]


def test_each_reachable_record_has_a_trigger_or_a_reason() -> None:
    triggered = [case.record for case in CASES]
    assert len(triggered) == len(set(triggered))
    assert not set(triggered) & set(NOT_TRIGGERED)
    assert {*triggered, *NOT_TRIGGERED} == set(REACHABLE)
    assert set(NOT_TRIGGERED) >= UNGUARDABLE


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(item, marks=[has_grouped_mm] * item.record.startswith("grouped_mm"))
        for item in ON_CPU
        if item.record in NOT_SIMULATED
    ],
    ids=lambda case: case.record,
)
def test_what_is_not_simulated_fires_the_guard_of_its_record_on_the_cpu(case: Case) -> None:
    """The first finding is that record's, and certain."""
    with guarded() as collector:
        violation = collector.look(lambda: exec(case.code, namespace()))
        op = collector.found[-1][0] if collector.found else ""
    assert violation is not None
    assert case.record in RECORDS_OF[op]
    assert not violation.is_silent


def test_what_the_cpu_cannot_show_has_a_guard_all_the_same() -> None:
    """Dense plus sparse: CUDA adds with ``index_add_``, the CPU with a loop of its own."""
    left = {case.record for case in CASES} - {case.record for case in ON_CPU}
    assert left == {"add_dense_sparse"} <= RECORDS_OF["aten::index_add_"]


SIMULATED = [case for case in CASES if case.record not in NOT_SIMULATED]


@pytest.mark.parametrize("case", SIMULATED, ids=lambda case: case.record)
def test_a_trigger_asserts_on_the_rehearsal_device(
    case: Case, sim: simulate.Simulation, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without guards it prints the record's text; its guard prevents it, and all is alive.

    It asserts where the kernel of an older torch reads beyond the table.
    """
    bare = run_case(case.record, guarded=False)
    printed = capfd.readouterr().err
    sim.reset()
    checked = run_case(case.record, guarded=True)
    assert (bare["error"], bare["code"]) == ("AcceleratorError", 710)
    assert report.unexpected({"bare": {case.record: {"stderr": printed}}}) == {}
    assert "Assertion" in printed
    assert checked["alive"]
    assert checked["report"]["prevented"] and checked["report"]["certainty"] == "proven"
    assert checked["report"]["source"]["text"]
    op, overload = checked["report"]["op"]["name"], checked["report"]["op"]["overload"]
    name = op if overload in (None, "", "default") else f"{op}.{overload}"
    assert case.record in RECORDS_OF[name]


@needs_rehearsal
def test_a_worker_is_a_process_of_its_own_and_needs_no_extras() -> None:
    """It prints one line of JSON; the suite's machine has no rich, to say nothing of notebooks."""
    code = (
        "import runpy, sys\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('rich', 'nbclient', 'nbformat', 'transformers'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Without())\n"
        "sys.argv = ['worker.py', 'rehearsed', 'index_get']\n"
        f"sys.path.insert(0, {str(GPU)!r})\n"
        f"runpy.run_path({str(GPU / 'worker.py')!r}, run_name='__main__')\n"
    )
    done = python("-c", code, CUDA_VISIBLE_DEVICES="")
    found = [item for item in done.stdout.splitlines() if item.startswith(RESULT)]
    assert len(found) == 1, done.stderr
    result = json.loads(found[0].removeprefix(RESULT))
    assert result["error"] == "DeviceIndexError" and result["alive"]
    assert result["report"]["headline"].startswith("index[1] = 3 is outside dimension 1")


# --- comparison and pages -------------------------------------------------------------------------


LINE = "K.cu:7: kern: block: [0,0,0], thread: [3,0,0] Assertion `{}` failed.\n"
TAKE = 'idx < numel && idx >= -numel && "cuda_take_put_kernel() index out of bounds"'
FOUND = {
    "kind": "device_assert",
    "prevented": True,
    "argument": "index",
    "headline": "index[1] = 6 is outside",
    "op": {"name": "aten::take", "overload": "", "api": None},
}
SEEN: dict[str, Any] = {
    "bare": {
        "take": {"error": "AcceleratorError", "code": 710, "stderr": LINE.format(TAKE) * 3},
        "put": {"error": None, "code": None, "stderr": ""},
    },
    "guarded": {
        "take": {"error": "DeviceIndexError", "alive": True, "report": FOUND, "stderr": ""},
        "put": {"error": None, "alive": False, "report": None, "stderr": ""},
    },
    "rehearsed": {
        "take": {"error": "DeviceIndexError", "alive": True, "report": {**FOUND, "argument": "x"}},
        "put": {"unavailable": "not tested with torch 9.9"},
    },
    "fault": {
        "out of memory": {"unavailable": "no | memory"},
        "broken": {"error": "OSError", "message": "no such folder", "report": None},
        "mine": {
            "error": "AcceleratorError",
            "report": {**FOUND, "certainty": "likely", "op": {"name": None}},
        },
    },
    "step": {
        "plain": {"losses": ["0x1p+0"], "seconds": 0.1, "peak_bytes": 2**20},
        "guards": {
            "losses": ["0x1p+0"],
            "seconds": 0.103,
            "least": 0.101,
            "peak_bytes": 2**20,
        },
        "plain again": {"losses": ["0x1p+0"], "seconds": 0.101, "peak_bytes": 2**20},
        "full": {"losses": ["0x1p+1"], "seconds": 0.2, "peak_bytes": 2**20},
        "float16": {"losses": [], "seconds": 0.1, "peak_bytes": 0, "stopped": None},
    },
    "extra": {
        "calls after an assert": {"calls": 45, "differ": {"empty_cache": "raises nothing"}},
        "pinned loop, checked": {"cells": [{}] * 5, "report": {"headline": "it | asserted"}},
        "pinned loop, fast": {"unavailable": "ended with -6", "is_broken": True},
        "replay of a graph": {"unavailable": "not begun: the time was up"},
    },
    "harmless": {
        "quiet": {"error": None, "report": None, "troubles": []},
        "loud": {"error": None, "report": "x is bad", "troubles": ["guard g failed: E"]},
        "absent": {"unavailable": "the GPU has not enough free memory"},
    },
    "notebook": {
        "quickstart": {"cells": 9, "wrong": [], "rehearsed": False},
        "01_conv1d_classifier": {"cells": 9, "wrong": ["x = y"], "rehearsed": False},
        "02_loss_functions": {"cells": 9, "wrong": [], "rehearsed": True},
        "03_layoutlmv3": {"unavailable": "not installed: transformers"},
    },
}
ABOUT = {
    "torch": "9.9.9+cu130",
    "cuda": "13.0",
    "driver": "580.1",
    "device": "NVIDIA X (compute capability 8.0)",
    "date": "2030-01-02",
}


@pytest.mark.parametrize(("line", "count"), [(1, 0), (2, 1)])
def test_who_runs_a_case_makes_no_difference(line: int, count: int) -> None:
    """The hour forks one process; a rehearsal is a process of its own."""

    def frames(*names: str, line: int = 1) -> dict[str, Any]:
        return {"frames": [{"function": name, "line": line} for name in names]}

    forked = frames("main", "phase", "run_case", "<module>")
    alone = frames("run_case", "<module>", line=line)
    assert len(report.differences(forked, alone)) == 2 * count


def test_the_page_says_what_was_seen_and_what_was_not() -> None:
    """Each record has its row; a miss, a dead context and a difference are plain to see."""
    text = report.page(SEEN, ABOUT)
    table = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines()}
    assert "AcceleratorError 710: `idx < numel" in table["take"]
    assert "DeviceIndexError, CUDA alive" in table["take"]
    assert "argument: 'index' on the GPU, 'x' rehearsed" in table["take"]
    assert "no error: no assertion printed" in table["put"]
    assert "MISSED, CUDA DEAD" in table["put"] and "not tested with torch 9.9" in table["put"]
    assert "not provoked: needs NVSHMEM" in table["nvshmem_splits"]
    assert {*(case.record for case in CASES), *NOT_TRIGGERED} <= set(table)
    assert "not run: no \\| memory" in table["out of memory"]
    assert "no op named" in table["mine"]
    assert "OSError: no such folder: no report" in table["broken"]
    assert "losses bit-equal, 1.03 times plain" in table["guards"]
    assert "losses DIFFER" in table["full"]
    assert "bad label: MISSED" in table["float16"]
    assert "other than in the table: empty_cache: raises nothing" in table["calls after an assert"]
    assert "5 cells run: it \\| asserted" in table["pinned loop, checked"]
    assert "not run: ended with -6" in table["pinned loop, fast"]
    assert "nothing reported" in table["quiet"]
    assert "FALSE REPORT x is bad; guard g failed: E" in table["loud"]
    assert "not enough free memory" in table["absent"]
    assert "9 cells run" in table["quickstart"]
    assert "1 of 9 cells WRONG" in table["01_conv1d_classifier"]
    assert "REHEARSAL" in table["02_loss_functions"]
    assert "not installed: transformers" in table["03_layoutlmv3"]
    assert "driver 580.1" in text and "torch 9.9.9+cu130" in text


def test_a_run_on_hardware_changes_one_column_and_leaves_the_others() -> None:
    """What the run did not ask stays ``not yet run``."""
    before, after = (
        [line.split(" | ") for line in text.splitlines() if line.count(" | ") == 3]
        for text in (report.page(None), report.page(SEEN, ABOUT))
    )
    after = after[: len(before)]  # tables of cases follow
    assert [(row[0], row[2:]) for row in after] == [(row[0], row[2:]) for row in before]
    seen = {row[0]: row[1] for row in after}
    assert seen["| guards stop the op before its launch, the device stays usable"] == (
        "1 of 2 records; not: put"
    )
    assert seen["| which torch calls raise after that, and their texts"] == (
        "44 of 45 raise as in the table"
    )
    loops = "| the report is shown and written before torch aborts on pinned memory"
    assert (
        seen[loops] == "1 of 2 sessions; not: pinned loop, fast"
    )  # one whose process ended counts
    assert seen["| time and overhead with a busy queue"] == (
        "a BERT-base step, each way in a process of its own, times plain: "
        "guards 1.03, plain again 1.01, full 2.00"
    )
    assert seen["| CUDA graphs capture their checks"] == "not yet run"
    assert "nothing in this project is verified" not in report.page(SEEN, ABOUT)


def test_the_stored_page_is_written_by_the_suite_or_says_that_nothing_has_run() -> None:
    """Nobody edits it by hand."""
    stored = report.PAGE.read_text(encoding="utf-8")
    assert stored == report.page(None) or report.WRITTEN in stored
    simulated = sum(case.record not in NOT_SIMULATED for case in CASES)
    assert f"{len(CASES)} of {len(CASES)} records" in report.NOT_YET
    assert f"{simulated} of {len(CASES)} records" in report.NOT_YET
    assert f"| {len(RAISING) + len(SILENT)} calls |" in report.NOT_YET


NOT_RUN = re.compile(
    r"(?:[Nn]othing|[Nn]ot|was|has)[^.|]* (?:run|measured) on a GPU|not yet on a GPU"
)
"""How a page says that what it tells of CUDA comes from no hardware."""
PAGES = {
    "README.md": 2,
    "CHANGELOG.md": 1,
    **{
        f"docs/{name}.md": 1
        for name in (
            "always_on",
            "compatibility",
            "limits",
            "programs",
            "pytest",
            "start",
            "training",
        )
    },
}
"""Pages that tell of real CUDA, and in how many places each says so."""


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_so_as_long_as_nothing_has_run_on_a_gpu(page: str) -> None:
    """And no longer: after a run on hardware each of these sentences is to be changed."""
    is_unseen = report.PAGE.read_text(encoding="utf-8") == report.NOT_YET
    said = NOT_RUN.findall((report.ROOT / page).read_text(encoding="utf-8"))
    assert len(said) == (PAGES[page] if is_unseen else 0), said


def test_the_page_about_many_gpus_says_that_it_never_ran_on_several() -> None:
    """One GPU changes nothing there."""
    text = (report.ROOT / "docs/many_gpus.md").read_text(encoding="utf-8")
    page = report.PAGE.read_text(encoding="utf-8")
    has_row = "NCCL, several GPUs | not yet run" in page
    has_row |= "NCCL and several GPUs not yet run" in page
    assert ("None of this has run on several GPUs or with NCCL" in text) is has_row


def test_texts_are_harvested_in_the_form_that_is_read(tmp_path: Path) -> None:
    report.write(SEEN, ABOUT, tmp_path)
    file = tmp_path / "cudalens" / "core" / "data" / "assert_texts_9.9.9.json"
    harvest = json.loads(file.read_text(encoding="utf-8"))
    (text,) = harvest["texts"]
    assert (text["record"], text["function"], text["line"]) == ("take", "kern", 7)
    assert text["arguments"] == [["aten::take", "index"]]
    read = assert_meanings.read_harvest(harvest)
    assert read[assert_meanings.folded(TAKE)].argument == "index"
    assert (tmp_path / "docs" / "verified.md").read_text(encoding="utf-8") == report.page(
        SEEN, ABOUT
    )


# --- cells in which nothing is wrong --------------------------------------------------------------

REHEARSABLE = [cell for cell in HARMLESS if cell.is_rehearsable]


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(item, id=item.name, marks=[pytest.mark.thorough] * ("compile" in item.code))
        for item in REHEARSABLE
    ],
)
def test_a_harmless_cell_is_one(cell: Any, sim: simulate.Simulation, deterministic: None) -> None:
    assert run_harmless(cell.name) == {"error": None, "report": None, "troubles": []}


# --- notebooks ------------------------------------------------------------------------------------


# --- steps and faults -----------------------------------------------------------------------------


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker asks of cuBLAS ends with the test."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def test_every_way_of_checking_is_measured() -> None:
    assert {"guards", "deferred", "full", "no sync", "fast", "nan"} <= set(STEPS)
    assert STEPS.index("plain") < STEPS.index("full") < STEPS.index(AGAIN)


def test_steps_are_bit_equal_on_the_rehearsal_device(
    sim: simulate.Simulation, deterministic: None
) -> None:
    found = {kind: run_step(kind, TINY) for kind in ("plain", "guards", "deferred", *MODES)}
    assert all(item["losses"] == found["plain"]["losses"] for item in found.values())
    assert len(set(found["plain"]["losses"])) == TINY.steps
    assert found["plain"]["peak_bytes"] > 0


@pytest.mark.parametrize("cell", [*FAULTS, *HARMLESS], ids=lambda cell: cell.name)
def test_the_code_of_a_cell_compiles(cell: Any) -> None:
    """What only a GPU can run is at least Python, and known to one name.

    A tensor is made before a kernel is loaded, which needs a context of the device.
    """
    compile(cell.code, "<cell>", "exec")
    assert [item.name for item in (*FAULTS, *HARMLESS)].count(cell.name) == 1
    before, found, _ = cell.code.partition("torch.cuda._compile_kernel")
    assert not found or 'device="cuda"' in before


# --- judged at home -------------------------------------------------------------------------------

GOOD_FAULT = {
    "error": "AcceleratorError", "message": "CUDA error", "code": 710, "stderr": LINE.format("a"),
    "report": {
        "kind": "device_assert", "context_usable": False, "certainty": "likely", "tensors": [],
        "op": {"name": "gpu_suite::pick"}, "device_text": LINE.format("a"),
        "source": {"text": "out = torch.ops.gpu_suite.pick(table, rows)"},
    },
}  # fmt: skip
NAN = [float("nan").hex()] * 4


def judged(tmp_path: Path, results: dict[str, Any], words: str) -> tuple[int, str]:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(results), encoding="utf-8")
    done = python(
        "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "tests/gpu",
        "-m", "gpu", "-k", words, CUDALENS_GPU_RESULTS=str(file), CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("key", "value", "status"),
    [
        ("kind", "device_assert", 0),
        ("context_usable", None, 1),
        pytest.param("device_text", "", 1, marks=pytest.mark.thorough),
        pytest.param("source", None, 1, marks=pytest.mark.thorough),
        ("source", {"text": "later = out + 1"}, 1),  # a line of the case, but another one
    ],
)
def test_results_of_another_machine_are_judged_without_a_device(
    tmp_path: Path, key: str, value: object, status: int
) -> None:
    """One that does not know whether the device lives, what was printed or where, does not pass."""
    fault = GOOD_FAULT | {"report": GOOD_FAULT["report"] | {key: value}}  # type: ignore[operator]
    results = {"fault": {"assert in a kernel of an extension": fault}}
    found, said = judged(tmp_path, results, "extension and not lines")
    assert (found, "skipped" in said) == (status, False), said


@pytest.mark.parametrize(
    "words",
    [
        "change_no_bit and full",
        pytest.param("test_autocast and not bfloat16", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize(("losses", "status"), [(["0x1p+0"], 0), (NAN, 1), ([], 1)])
def test_losses_that_are_no_numbers_are_not_equal(
    tmp_path: Path, losses: list[str], status: int, words: str
) -> None:
    step = {"losses": losses, "peak_bytes": 0, "stopped": "4 is outside"}
    runs = dict.fromkeys(("plain", "full", "float16"), step)
    found, said = judged(tmp_path, {"step": runs}, words)
    assert (found, "skipped" in said) == (status, False), said


@pytest.mark.parametrize(("reason", "status"), [("", 0), ("no rehearsal with torch 9.9", 1)])
def test_a_kind_of_which_no_case_ran_does_not_look_like_success(
    tmp_path: Path, reason: str, status: int
) -> None:
    """Each of its tests is skipped then."""
    one = {"unavailable": reason} if reason else {"error": None}
    rehearsed = {case.record: one for case in CASES}
    found, said = judged(tmp_path, {"rehearsed": rehearsed}, "some_cases and rehearsed")
    assert (found, reason in said) == (status, True), said
