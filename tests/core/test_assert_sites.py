"""Assertions in the words of each release; and how they are read out of a wheel."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import MappingProxyType

import pytest

from cudalens.core import device_asserts
from cudalens.core.device_asserts import (
    KNOWN_RELEASE,
    as_printed_by,
    assert_site,
    assert_table,
    assert_text,
    fold,
)
from cudalens.diagnosis.assert_meanings import meaning_of
from cudalens.guards import GUARDS
from tests.wheel_asserts import DATA, KNOWN, Held, Site, differences, held, key_of, known_sites

BCE = "Loss.cu:89 input_val >= zero && input_val <= one"
LINE = "Loss.cu:89: operator(): Assertion `input_val >= zero && input_val <= one` failed."
MOVED = json.loads(DATA.read_text(encoding="utf-8"))
RECORDS = json.loads((KNOWN.parent / "device_asserts.json").read_text(encoding="utf-8"))
THREAD = LINE.replace("operator(): ", "operator(): block: [0,0,0], thread: [3,0,0] ")


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    sites: dict[str, object] = {}
    monkeypatch.setattr(device_asserts, "_moved", lambda: MappingProxyType({"9.1.0": sites}))
    yield sites


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.13.0+cu130"])
def test_the_release_that_is_quoted_prints_the_line_as_it_stands(version: str) -> None:
    assert as_printed_by(version, LINE) == LINE


@pytest.mark.parametrize("version", ["2.13.1", "9.9.0", "2.13.0a0+git123", "", None])
def test_a_release_that_was_not_read_gets_no_line_number(version: str | None) -> None:
    assert as_printed_by(version, LINE) == LINE.replace(":89:", ":")
    assert as_printed_by(version, THREAD) == THREAD.replace(":89:", ":")


ELSEWHERE = ("Losses.cuh:12", "check_kernel", "0 <= x && x <= 1")
PRINTED = "Losses.cuh:12: check_kernel: {}Assertion `0 <= x && x <= 1` failed."
NARROW = LINE.replace("input_val >= zero && ", "")
WORDLESS = "TensorCompare.cu:109: kernel: Assertion `lengths must match` failed."


@pytest.mark.parametrize(
    ("key", "site", "line", "expected"),
    [
        pytest.param(BCE.replace("89", "90"), ELSEWHERE, LINE, LINE, id="it did not move"),
        pytest.param(BCE, ELSEWHERE, LINE, PRINTED.format(""), id="it moved"),
        pytest.param(
            BCE, ELSEWHERE, THREAD, PRINTED.format("block: [0,0,0], thread: [3,0,0] "), id="thread"
        ),
        pytest.param(
            "TensorCompare.cu:109",
            ("TensorCompare.cu:120", "kernel", ""),
            WORDLESS,
            WORDLESS.replace("109", "120"),
            id="a kernel without words prints its caller's",
        ),
        pytest.param(BCE, ELSEWHERE, NARROW, NARROW, id="a macro's line has several"),
        pytest.param(BCE, None, LINE, None, id="it is not there"),
    ],
)
def test_an_assertion_is_quoted_from_its_place_in_the_release(
    moved: dict[str, object], key: str, site: object, line: str, expected: str | None
) -> None:
    moved[key] = site
    assert as_printed_by("9.1.0+cu999", line) == expected


def test_a_kernel_that_is_not_there_leaves_its_work_to_the_one_before(
    moved: dict[str, object],
) -> None:
    words = 'ind >= 0 && ind < self_dim_size && "vectorized scatter add kernel index out of bounds"'
    moved[f"IndexKernelUtils.cu:122 {words}"] = None
    line = f"IndexKernelUtils.cu:122: vectorized_scatter_add_kernel: Assertion `{words}` failed."
    printed = as_printed_by("9.1.0", line)
    assert printed.startswith("ScatterGatherKernel.cu:203: operator(): Assertion `idx_dim >= 0 && ")


def test_other_text_comes_back_as_it_is() -> None:
    assert as_printed_by("9.9.0", "my kernel: index 3 of 3") == "my kernel: index 3 of 3"


# --- the data ------------------------------------------------------------------------------------


def test_the_data_speaks_of_assertions_that_there_are() -> None:
    there = {key_of(site) for site in known_sites()}
    assert set(device_asserts._moved()) == set(MOVED)
    for release, sites in MOVED.items():
        assert re.fullmatch(r"\d+\.\d+\.\d+", release)
        assert set(sites) <= there, release


def quoted() -> list[str]:
    records = {name for guards in GUARDS.values() for guard in guards for name in guard.records}
    lines = [line for item in RECORDS if item["id"] in records for line in item["stderr_text"]]
    assert len(lines) > 50
    return lines


THERE = {(site.place, site.function, site.expression) for site in known_sites()}
WORDLESS = {site.place for site in known_sites() if not site.expression}


def test_what_is_quoted_is_what_the_kernels_of_the_known_release_hold() -> None:
    for line in quoted():
        found = re.fullmatch(r"(\S+): (.*?): block: .*? Assertion `(.*)` failed\.", line)
        assert found[1] in WORDLESS or found.groups() in THERE, line


def test_the_table_of_assertions_is_what_the_kernels_hold() -> None:
    """Word for word, each under a key of its own."""
    keys = [key for row in assert_table() for key in row.get("sites", {})]
    assert len(keys) == len(set(keys)) > 50
    for key in keys:
        site = assert_site(key)
        words = (site.place, site.function, site.expression)
        assert site.place in WORDLESS or words in THERE, key
        assert site.text() == assert_text(key)
        (printed,) = fold(site.text("block: [0,0,0], thread: [0,0,0] "))
        assert (printed.function, printed.expression) == (site.function, site.expression)
    with pytest.raises(KeyError):
        assert_site("no such assertion")


@pytest.mark.parametrize("release", sorted({KNOWN_RELEASE, *MOVED}))
def test_what_a_release_prints_is_understood(release: str) -> None:
    """The words of every release have a meaning, and the same argument is at fault."""
    for line in quoted():
        printed = as_printed_by(release, line)
        if printed is None:
            continue
        (before,), (after,) = fold(line), fold(printed)
        was, now = meaning_of(before), meaning_of(after)
        assert set(was.arguments) & set(now.arguments), printed


# --- reading a wheel -----------------------------------------------------------------------------

NLL = Site("Loss.cu", 179, "forward", "t >= 0")
TWICE = (Site("Loss.cu", 200, "reduce", "t < n"), Site("Loss.cu", 244, "reduce", "t < n"))


def test_what_is_alike_is_left_out() -> None:
    assert differences([NLL, *TWICE], [*TWICE, NLL]) == {}


def test_lines_that_moved_are_told_apart_by_their_order() -> None:
    moved = [Site("Loss.cu", 190, "reduce", "t < n"), Site("Loss.cu", 200, "reduce", "t < n")]
    assert differences([NLL, *TWICE], [NLL, *moved]) == {
        "Loss.cu:200 t < n": ["Loss.cu:190", "reduce", "t < n"],
        "Loss.cu:244 t < n": ["Loss.cu:200", "reduce", "t < n"],
    }


def test_other_words_in_the_same_function_are_the_same_assertion() -> None:
    there = Site("Loss.cu", 181, "forward", "t >= 0 && t < n")
    assert differences([NLL], [there]) == {
        "Loss.cu:179 t >= 0": ["Loss.cu:181", there.function, "t >= 0 && t < n"]
    }


def test_the_same_words_in_another_function_are_the_same_assertion() -> None:
    there = Site("Loss.cu", 179, "forward_kernel", "t >= 0")
    assert differences([NLL], [there]) == {
        "Loss.cu:179 t >= 0": ["Loss.cu:179", "forward_kernel", "t >= 0"]
    }


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_group_of_another_size_is_not_guessed_at(count: int) -> None:
    there = [Site("Loss.cu", 300 + number, "reduce", "t < n") for number in range(count)]
    assert differences(TWICE, there) == {"Loss.cu:200 t < n": None, "Loss.cu:244 t < n": None}


def code(*lines: str) -> list[str]:
    return [
        f"        /*{16 * at:04x}*/                   {line} ;" for at, line in enumerate(lines)
    ]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["IMAD.MOV.U32 R8, RZ, RZ, 0x96"], Held(False, 0x96)),
        (["MOV R8, 0x96", "IMAD.MOV.U32 R9, RZ, RZ, 0x97"], Held(False, 0x96)),
        (["HFMA2.MMA R8, -RZ, RZ, 0, 8.94069671630859375e-06"], Held(False, 0x96)),
        (["UMOV UR4, 0x96", "IMAD.U32 R8, RZ, RZ, UR4"], Held(False, 0x96)),
        (["CS2R R8, SRZ"], Held(False, 0)),
        (["IMAD.MOV.U32 R8, RZ, RZ, RZ"], Held(False, 0)),
        (["MOV R8, c[0x4][0x40]"], Held(True, 0x40)),
        (["LDC.64 R8, c[0x4][0x128]"], Held(True, 0x128)),
        (["LDC.64 R7, c[0x4][0x128]"], Held(True, 0x12C)),
        (["MOV R2, 0x30", "LDC.64 R8, c[0x4][R2]"], Held(True, 0x30)),
        (["ULDC.64 UR4, c[0x4][0x128]", "IMAD.U32 R8, RZ, RZ, UR4"], Held(True, 0x128)),
        (["IADD3 R8, R2, R3, RZ"], None),
        (["IMAD R8, R2, 0x4, RZ"], None),
        (["LDG.E R8, desc[UR4][R2.64]"], None),
        (["MOV R9, 0x96"], None),
        ([], None),
    ],
)
def test_what_a_register_holds(lines: list[str], expected: Held | None) -> None:
    program = code(*lines, "CALL.ABS.NOINC R2")
    assert held(program, len(program) - 1, ("R", 8)) == expected
