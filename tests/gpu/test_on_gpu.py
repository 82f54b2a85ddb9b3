"""What real hardware did, case by case: judged after every case has run in its own process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import report
import torch
from cases import CASES, Case, is_too_old
from extras import EXTRAS, STICKY, Extra
from faults import FAULTS, Fault
from frameworks import FRAMEWORKS
from harmless import HARMLESS
from steps import IN_TURN, WAYS
from suite import MODES, Results

from cudalens.core.device_asserts import fold

pytestmark = pytest.mark.gpu
ASSERT_CODE = 710
LAST_LINES = 12
OF_A_CASE = ("bare", "guarded", "rehearsed")
"""What is asked of records, some of which need a newer GPU; all else is asked of every one."""


def of(results: Results, mode: str, name: str) -> dict[str, Any]:
    """Return what came of a case, or skip with the reason why it could not run here."""
    found = results[mode].get(name)
    if found is None and mode in OF_A_CASE:
        pytest.skip("not for a GPU of this generation")
    if found is None:
        pytest.fail(f"{mode} {name}: nothing of it was written", pytrace=False)
    if found.get("is_broken"):
        said = "".join(found.get("stderr", "").splitlines(keepends=True)[-LAST_LINES:])
        pytest.fail(f"{mode} {name}: {found['unavailable']}\n{said}", pytrace=False)
    if "unavailable" in found:
        pytest.skip(found["unavailable"])
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", MODES)
def test_some_cases_of_each_kind_ran(results: Results, mode: str) -> None:
    """Where none could, the tests of that kind are all skipped, which looks like success."""
    reasons = without_runs(results, mode)
    assert not reasons, f"no case ran: {', '.join(reasons)}"


def without_runs(results: Results, mode: str) -> list[str]:
    """Return why no case of a kind ran, an empty list where at least one did."""
    reasons = [found.get("unavailable", "") for found in results[mode].values()]
    return list(dict.fromkeys(reasons)) if all(reasons) else []


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.record)


@every_case
def test_it_asserts_without_guards(results: Results, case: Case) -> None:
    """CUDA prints an assertion, and torch's error says so by its text or its code."""
    found = of(results, "bare", case.record)
    release = (results.get("about") or {}).get("torch", torch.__version__)
    if found["error"] is None and is_too_old(case, release):
        pytest.skip(f"torch {release} reads beyond the end without an assertion")
    assert found["error"] is not None
    assert "device-side assert" in found["message"] or found["code"] == ASSERT_CODE
    assert fold(found["stderr"]), "CUDA printed no assertion"
    assert case.record not in report.unexpected(results)


@every_case
def test_it_is_prevented_with_guards(results: Results, case: Case) -> None:
    """The guard stops it before the launch, and the device computes on."""
    found = of(results, "guarded", case.record)
    assert found["report"] is not None
    assert found["report"]["prevented"] and found["report"]["context_usable"]
    assert found["report"]["certainty"] == "proven"
    assert found["alive"]
    assert found["report"]["limits"] == []
    assert "Assertion" not in found["stderr"]


@every_case
def test_the_verdict_is_the_rehearsal_s(results: Results, case: Case) -> None:
    """Field by field, what the rehearsal device leads to."""
    seen, rehearsed = of(results, "guarded", case.record), of(results, "rehearsed", case.record)
    assert report.differences(seen["report"], rehearsed["report"]) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_failure_that_no_guard_prevents(results: Results, fault: Fault) -> None:
    """Kind, op, line, and whether the process can go on."""
    result = of(results, "fault", fault.name)
    found = result["report"]
    assert found is not None, f"{result['error']}: {result['message']}"
    assert found["kind"] == fault.kind
    assert found["context_usable"] is (not fault.is_lost)
    printed = fold(result.get("stderr", ""))
    if fault.kind == "device_assert" and fault.is_lost:
        assert printed, "CUDA printed no assertion"
        assert printed[0].expression in (found["device_text"] or "")
    if fault.is_no_op:
        assert found["op"]["name"] is None
        assert found["certainty"] == "unknown"
    if fault.op is not None:
        assert found["op"]["name"] == fault.op
        assert found["source"] is not None
        assert found["source"]["text"].strip() in fault.code
        if fault.source is not None:
            assert fault.source in found["source"]["text"]
    if fault.argument_max is not None:
        name, value = fault.argument_max
        summaries = {item["argument"]: item["summary"] for item in found["tensors"]}
        assert summaries[name]["max"] == value


@pytest.mark.parametrize("name", [item.name for item in HARMLESS])
def test_a_cell_in_which_nothing_is_wrong(results: Results, name: str) -> None:
    """It runs through, nothing is reported, and no part of the check failed."""
    found = of(results, "harmless", name)
    assert (found["error"], found["report"], found["troubles"]) == (None, None, [])


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: extra.name)
def test_a_session_lives_on_after_an_assert(results: Results, extra: Extra) -> None:
    """Each cell raises what it should; the report has the line, and what CUDA printed."""
    seen = results["extra"].get(extra.name) or {}
    if extra.may_abort and seen.get("unavailable") == "ended with -6":
        pytest.skip("torch ended the process: docs/limits.md says so")
    judge(extra, of(results, "extra", extra.name))


def judge(extra: Extra, found: dict[str, Any]) -> None:
    """Compare what was seen of a session with what it should be."""
    assert tuple(cell["error"] for cell in found["cells"]) == extra.raises
    report = found["report"]
    assert report is not None
    assert (report["kind"], report["context_usable"]) == ("device_assert", False)
    assert report["op"]["name"] == extra.op
    assert report["source"] is not None and extra.source in report["source"]["text"]
    printed = fold(found["stderr"])
    assert printed, "CUDA printed no assertion"
    if extra.hears:
        assert printed[0].expression in (report["device_text"] or "")
    shown = [text for cell in found["cells"] for text in cell["shown"]]
    assert sum(text.startswith(("✗", "? Likely")) for text in shown) == 1
    again = [cell for cell in found["cells"] if cell["error"] == "AcceleratorError"][1:]
    assert all("the CUDA context was lost" in str(cell["notes"]) for cell in again)


def test_calls_after_an_assert_raise_as_the_rehearsal_s_do(results: Results) -> None:
    assert of(results, "extra", STICKY)["differ"] == {}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_trains_and_its_bad_label_is_stopped(results: Results, name: str) -> None:
    """Without a report where all labels are good; the device lives in either case."""
    found = of(results, "framework", name)
    assert found["good"][-2:] == found["bad"][-2:] == ["LEFT False 0", "ALIVE"]
    assert not any(line.startswith("RAISED") for line in found["good"])
    raised = [line for line in found["bad"] if line.startswith("RAISED")]
    assert len(raised) == 1 and "= 7 is outside the 3 classes" in raised[0]


@pytest.mark.parametrize("name", IN_TURN)
def test_steps_were_taken_in_turn(results: Results, name: str) -> None:
    """Each way has a time of its own."""
    medians = of(results, "step", name)["medians"]
    assert set(medians) == set(WAYS) and min(medians.values()) > 0


def test_a_word_behind_each_call_is_the_last_one_that_was_finished(results: Results) -> None:
    """It says so without a wait, and no later one is written."""
    answers = [item for one in results["breadcrumbs"] for item in one.values() if "said" in item]
    assert answers
    for found in answers:
        assert found["said"] == [found["finished"]] * 3
        assert found["statuses"] == [0]


@pytest.mark.parametrize("name", ["guards", "deferred", "fast", "no sync", "nan", "full"])
def test_checks_change_no_bit(results: Results, name: str) -> None:
    """Losses of a BERT-base-sized step are bit-equal under deterministic algorithms."""
    losses = of(results, "step", name)["losses"]
    assert all_finite(losses)
    assert losses == of(results, "step", "plain")["losses"]


def all_finite(losses: list[str]) -> bool:
    """Return whether there are losses and each is a number: two NaN are equal as texts."""
    return bool(losses) and all(math.isfinite(float.fromhex(item)) for item in losses)


def test_guards_need_no_device_memory(results: Results) -> None:
    """Beyond the check's own scalars the peak is that of the plain step."""
    plain, guards = (of(results, "step", name)["peak_bytes"] for name in ("plain", "guards"))
    assert guards - plain <= 64 * 1024


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_autocast(results: Results, name: str) -> None:
    """Under autocast a good step runs, and a bad label is stopped."""
    found = of(results, "step", name)
    assert all_finite(found["losses"])
    assert "4 is outside" in (found["stopped"] or "")
