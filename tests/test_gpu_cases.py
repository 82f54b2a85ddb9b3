"""The GPU suite's own logic, without a GPU: triggers, processes, comparison, the page it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from ctypes import byref, c_int
from dataclasses import replace
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

GPU = Path(__file__).parent / "gpu"
sys.path.insert(0, str(GPU))

import harmless  # noqa: E402
import report  # noqa: E402
import suite  # noqa: E402
from cases import CASES, NOT_TRIGGERED, Case, is_too_old, namespace  # noqa: E402
from faults import FAULTS, SOURCE, name_a_toolkit  # noqa: E402
from harmless import HARMLESS, run_harmless  # noqa: E402
from notebook_runs import run_notebook, told  # noqa: E402
from steps import TINY, run_step  # noqa: E402
from worker import RESULT, main, run_case  # noqa: E402

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


def test_on_equal_devices_the_verdicts_are_equal_in_every_field() -> None:
    """Nothing of how the worker came to the case is a difference, not even a line of its own."""

    def verdict(mode: str) -> dict[str, Any]:
        with simulate.start(announce=False) if mode == "guarded" else nullcontext():
            return main(mode, "multinomial_fast")["report"]  # type: ignore[no-any-return]

    seen, rehearsed = map(verdict, ("guarded", "rehearsed"))
    assert report.differences(seen, rehearsed) == []
    assert any(frame["file"].endswith("worker.py") for frame in seen["frames"])


def test_the_rehearsal_does_not_see_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be refused otherwise; the others do, and none is made synchronous from outside."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert suite.environment("rehearsed")["CUDA_VISIBLE_DEVICES"] == ""
    assert suite.environment("bare")["CUDA_VISIBLE_DEVICES"] == "0"
    assert all("CUDA_LAUNCH_BLOCKING" not in suite.environment(m) for m in ("bare", "rehearsed"))


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
    assert result["report"]["headline"].startswith("indices[1][1] = 3 is outside")


# --- comparison and pages -------------------------------------------------------------------------


def test_differences_are_listed_field_by_field() -> None:
    one = {"headline": "a", "bounds": {"min": 0, "max": 4}, "timing": {"diagnose_s": 1}}
    other = {"headline": "a", "bounds": {"min": 0, "max": 5}, "timing": {"diagnose_s": 2}}
    assert report.differences(one, dict(one)) == []
    assert report.differences(one, other) == ["bounds.max: 4 on the GPU, 5 rehearsed"]
    assert report.differences(None, None) == []
    assert report.differences(one, None) == ["one has no report"]
    lists = {"frames": [{"line": 1}]}, {"frames": [{"line": 1}, {"line": 2}]}
    assert len(report.differences(*lists)) == 1


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
        "guards": {"losses": ["0x1p+0"], "seconds": 0.103, "peak_bytes": 2**20},
        "full": {"losses": ["0x1p+1"], "seconds": 0.2, "peak_bytes": 2**20},
        "float16": {"losses": [], "seconds": 0.1, "peak_bytes": 0, "stopped": None},
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
    assert "nothing reported" in table["quiet"]
    assert "FALSE REPORT x is bad; guard g failed: E" in table["loud"]
    assert "not enough free memory" in table["absent"]
    assert "9 cells run" in table["quickstart"]
    assert "1 of 9 cells WRONG" in table["01_conv1d_classifier"]
    assert "REHEARSAL" in table["02_loss_functions"]
    assert "not installed: transformers" in table["03_layoutlmv3"]
    assert "driver 580.1" in text and "torch 9.9.9+cu130" in text


@pytest.mark.parametrize(("told", "is_another"), [(TAKE, False), ("x < y", True), (None, False)])
def test_a_report_that_foretold_another_text_is_noticed(told: str | None, is_another: bool) -> None:
    """What a guard says CUDA would print is held against what CUDA did print."""
    text = None if told is None else f"K.cu:9: kern: Assertion `{told}` failed."
    guarded = {**SEEN["guarded"]["take"], "report": {**FOUND, "device_text": text}}
    rows = report.rows({**SEEN, "guarded": {"take": guarded}}, "2.13.0")
    (row,) = [item for item in rows if item[0] == "take"]
    assert ("another text foretold" in row[2]) is is_another


def test_the_stored_page_is_written_by_the_suite_or_says_that_nothing_has_run() -> None:
    """Nobody edits it by hand."""
    stored = report.PAGE.read_text(encoding="utf-8")
    assert stored == report.page(None) or report.WRITTEN in stored


@pytest.mark.parametrize(("release", "is_older"), [("2.12.1+cu130", True), ("2.13.0", False)])
def test_an_assertion_that_a_release_has_not_is_not_missed(release: str, is_older: bool) -> None:
    """The row says since when the kernel asserts; at that release its absence is a miss."""
    case = next(item for item in CASES if item.record == "embedding_renorm")
    assert is_too_old(case, release) is is_older
    silent = {"error": None, "code": None, "stderr": ""}
    seen = {**SEEN, "bare": {case.record: silent}, "guarded": {}, "rehearsed": {}}
    (row,) = [item for item in report.rows(seen, release) if item[0] == case.record]
    assert ("from torch 2.13 on" in row[1]) is is_older


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


@pytest.mark.parametrize(("said", "unexpected"), [(TAKE, {}), ("something_new", {"take": 1})])
def test_a_text_that_the_inventory_does_not_have_is_noticed(
    said: str, unexpected: dict[str, int]
) -> None:
    """Another release may print another text: that is a finding of its own."""
    seen = {"bare": {"take": {"stderr": LINE.format(said)}}}
    assert set(report.unexpected(seen)) == set(unexpected)


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


def test_a_cell_that_is_not_harmless_is_told(
    sim: simulate.Simulation, monkeypatch: pytest.MonkeyPatch, deterministic: None
) -> None:
    code = "F.embedding(torch.tensor([3]).cuda(), torch.ones(3, 2).cuda())"
    bad = replace(REHEARSABLE[0], code=code)
    monkeypatch.setattr(harmless, "HARMLESS", (bad,))
    found = run_harmless(bad.name)
    assert found["error"].startswith("DeviceIndexError: indices[0] = 3 is outside")
    assert found["report"].startswith("indices[0] = 3 is outside")


# --- notebooks ------------------------------------------------------------------------------------


def cell(source: str, *outputs: dict[str, Any], tags: tuple[str, ...] = ()) -> dict[str, Any]:
    made = {"cell_type": "code", "source": source, "outputs": list(outputs), "execution_count": 1}
    return {**made, "id": source, "metadata": {"tags": list(tags)}}


ERROR = {"output_type": "error", "ename": "E", "evalue": "", "traceback": []}


def test_a_cell_that_fails_or_runs_against_its_tag_is_told() -> None:
    """Also in which notebook no GPU was used."""
    nbformat = pytest.importorskip("nbformat")
    said = {"output_type": "stream", "name": "stdout", "text": "Rehearsal device. No GPU here."}
    cells = [
        cell("good"),
        cell("fails", ERROR),
        cell("tagged", ERROR, tags=("raises-exception",)),
        cell("passes", tags=("raises-exception",)),
    ]
    found = told(nbformat.from_dict({"cells": cells}))
    assert found == {"cells": 4, "wrong": ["fails", "passes"], "rehearsed": False}
    assert told(nbformat.from_dict({"cells": [cell("x", said)]}))["rehearsed"]


def test_a_notebook_whose_packages_are_missing_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "rich, transformers" in run_notebook("03_layoutlmv3")["unavailable"]
    assert run_notebook("quickstart")["unavailable"].endswith("rich")


# --- steps and faults -----------------------------------------------------------------------------


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker asks of cuBLAS ends with the test."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def test_steps_are_bit_equal_on_the_rehearsal_device(
    sim: simulate.Simulation, deterministic: None
) -> None:
    found = {kind: run_step(kind, TINY) for kind in ("plain", "guards", "full")}
    assert found["plain"]["losses"] == found["guards"]["losses"] == found["full"]["losses"]
    assert len(set(found["plain"]["losses"])) == TINY.steps
    assert found["plain"]["peak_bytes"] > 0


def test_autocast_steps_run_and_stop_a_bad_label(
    sim: simulate.Simulation, deterministic: None
) -> None:
    """Under autocast the guard sees the labels as they are."""
    assert "4 is outside" in (run_step("bfloat16", TINY)["stopped"] or "")


@pytest.mark.parametrize("cell", [*FAULTS, *HARMLESS], ids=lambda cell: cell.name)
def test_the_code_of_a_cell_compiles(cell: Any) -> None:
    """What only a GPU can run is at least Python, and known to one name.

    A tensor is made before a kernel is loaded, which needs a context of the device.
    """
    compile(cell.code, "<cell>", "exec")
    assert [item.name for item in (*FAULTS, *HARMLESS)].count(cell.name) == 1
    before, found, _ = cell.code.partition("torch.cuda._compile_kernel")
    assert not found or 'device="cuda"' in before


@pytest.mark.parametrize("has_toolkit", [True, False])
def test_a_kernel_is_compiled_where_no_toolkit_is_installed(
    has_toolkit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch is told a folder then, and only then."""
    monkeypatch.setattr("shutil.which", lambda name: "/opt/bin/nvcc" if has_toolkit else None)
    monkeypatch.setattr("faults.Path.exists", lambda self: False)
    monkeypatch.setenv("CUDA_HOME", "")
    monkeypatch.delenv("CUDA_HOME")
    name_a_toolkit()
    assert ("CUDA_HOME" in os.environ) is not has_toolkit
    monkeypatch.setenv("CUDA_HOME", "/opt/mine")
    name_a_toolkit()
    assert os.environ["CUDA_HOME"] == "/opt/mine"


def test_the_machine_is_described_where_its_driver_does_not_answer(
    sim: simulate.Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was seen must not be lost for the number of a version."""

    def late(query: list[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(query, 20)

    monkeypatch.setattr(report.subprocess, "run", late)
    assert report.machine()["driver"] == "unknown"


def test_the_kernel_of_the_faults_compiles() -> None:
    """NVRTC takes the text and keeps the assertion in it, where torch finds NVRTC."""
    from torch.cuda import _utils

    try:
        failed = _utils._get_nvrtc_library().nvrtcVersion(byref(c_int()), byref(c_int()))
    except (AttributeError, OSError):  # a build for the CPU, or there is no such library
        failed = True
    if failed:  # an empty one in its place
        assert "assert(" in SOURCE
        return
    made = _utils._nvrtc_compile(SOURCE, "pick", "90")
    image = made[0] if isinstance(made, tuple) else made
    assert b"__assertfail" in image
