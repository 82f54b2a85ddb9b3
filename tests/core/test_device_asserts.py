"""Assertion lines as CUDA prints them: read, folded, translated."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cudalens.core import device_asserts, text_files
from cudalens.core.device_asserts import (
    KNOWN_RELEASE,
    MAX_LINES,
    AssertLine,
    as_printed_by,
    assert_site,
    assert_table,
    assert_text,
    fold,
)
from cudalens.diagnosis import assert_meanings
from cudalens.diagnosis.assert_meanings import Meaning, folded, known_texts, meaning_of
from cudalens.guards import GUARDS
from tests.inventory import REACHABLE, RECORDS
from tests.wheel_asserts import DATA, Held, Site, differences, held, key_of, known_sites


def printed(record: dict[str, Any]) -> list[str]:
    lines = record["stderr_text"]
    return [line for line in (lines if isinstance(lines, list) else [lines]) if "`" in line]


def line(expression: str, function: str = "kernel", file: str = "File.cu") -> AssertLine:
    text = f"{file}:1: {function}: block: [0,0,0], thread: [0,0,0] Assertion `{expression}` failed."
    return fold(text)[0]


def test_equal_lines_are_counted_with_blocks_and_threads() -> None:
    """Block and thread are counted apart; the first line stays as printed."""
    text = "\n".join(
        f"a/b/K.cu:7: f: block: [{b},0,0], thread: [{t},0,0] Assertion `x < y` failed."
        for b in range(3)
        for t in range(4)
    )
    (found,) = fold(text)
    assert (found.file, found.line, found.function) == ("K.cu", 7, "f")
    assert (found.count, len(found.blocks), len(found.threads)) == (12, 3, 12)
    assert found.text() == text.split("\n", maxsplit=1)[0] + " (12 times, 3 blocks, 12 threads)"


@pytest.mark.parametrize("count", [MAX_LINES, MAX_LINES + 1])
def test_so_many_different_assertions_are_kept(count: int) -> None:
    """The first twenty, in the order of their appearance."""
    text = "\n".join(
        f"K.cu:{n}: f: block: [0,0,0], thread: [0,0,0] Assertion `x{n}` failed."
        for n in range(count)
    )
    found = fold(text)
    assert [item.line for item in found] == list(range(MAX_LINES))


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        # An older release: a C++ signature with colons between file and block.
        (
            "/pytorch/aten/src/THC/THCTensorIndex.cu:361: void indexSelectLargeIndex(TensorInfo<T, "
            "IndexType>, int) [with T = float, IndexType = unsigned int, int DstDim = 2]: block: "
            "[12,0,0], thread: [64,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
            "srcIndex < srcSelectDimSize",
        ),
        # Windows prints no function.
        (
            "C:/cb/pytorch_1/aten/src/ATen/native/cuda/Loss.cu:257: block: [0,0,0], thread: [3,0,0]"
            " Assertion `t >= 0 && t < n_classes` failed.",
            "t >= 0 && t < n_classes",
        ),
        (
            "C:\\actions-runner\\_work\\pytorch\\pytorch\\builder\\windows\\pytorch\\aten\\src\\ATen\\"
            "native\\cuda\\NLLLoss2d.cu:103: block: [0,0,0], thread: [384,0,0] Assertion "
            "`t >= 0 && t < n_classes` failed.",
            "t >= 0 && t < n_classes",
        ),
        # Another process of torchrun's has put its rank before it.
        (
            "[rank3]: ../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward_reduce_cuda_kernel"
            "_2d: block: [0,0,0], thread: [0,0,0] Assertion `t >= 0 && t < n_classes` failed.",
            "t >= 0 && t < n_classes",
        ),
        # Backquotes inside the message.
        (
            "TensorCompare.cu:109: _assert_async_cuda_kernel: block: [0,0,0], thread: [0,0,0] "
            "Assertion `probability tensor contains either `inf`, `nan` or element < 0` failed.",
            "probability tensor contains either `inf`, `nan` or element < 0",
        ),
        # Inductor's own file.
        (
            "/tmp/torchinductor_ada/x3/cx3.py:29: unknown: block: [1,0,0], thread: [31,0,0] "
            "Assertion `index out of bounds: 0 <= tmp4 < 10` failed.",
            "index out of bounds: 0 <= tmp4 < 10",
        ),
    ],
)
def test_lines_of_other_builds_are_read(text: str, expression: str) -> None:
    """Signatures, drives and quotes do not hide the assertion."""
    found = fold(f"before {text}\nafter")
    assert [item.expression for item in found] == [expression]
    assert found[0].first == text.removeprefix("[rank3]: ")
    assert not set(found[0].file) & set(":/\\")


@pytest.mark.parametrize("text", ["", "Assertion failed", "K.cu:1: f: Assertion `x` failed."])
def test_other_text_is_no_assertion(text: str) -> None:
    """A line without block and thread did not come from a kernel."""
    assert fold(text) == ()


# --- meanings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(REACHABLE))
def test_each_text_of_the_inventory_has_a_meaning(name: str) -> None:
    """Every op of the record is among the ops of each of its texts, with a known argument."""
    record = REACHABLE[name]
    ops = {item.partition(".")[0].rstrip("_") for item in record["ops"]}
    for text in printed(record):
        if name == "inductor_indirect":
            text = text.replace("<line>", "29").replace("<generated file>", "c.py")  # noqa: PLW2901
        lines = fold(text) or fold(text.replace(": <kernel>", ": kernel"))
        assert lines or text.startswith("stdout")
        for item in lines:
            meaning = meaning_of(item)
            assert meaning is not None, item.expression
            assert ops <= set(meaning.ops) or item.expression == "lengths must match"
            for op in ops & set(meaning.ops):
                assert meaning.argument_of(op) == meaning.argument_of(f"{op}_")


def test_every_argument_is_one_of_its_op_s_schema() -> None:
    """The table names ops and arguments that torch has."""
    missing = []
    for meaning in known_texts().values():
        for op, argument in meaning.arguments:
            namespace, _, name = op.partition("::")
            packet = getattr(getattr(torch.ops, namespace), name, None)
            packet = packet or getattr(getattr(torch.ops, namespace), f"{name}_", None)
            if packet is None:  # an op that this build or release has not
                assert namespace == "symm_mem" or "scaled_grouped" in name, op
                continue
            names = {
                item.name
                for overload in packet.overloads()
                for item in getattr(packet, overload)._schema.arguments
            }
            if argument not in names:
                missing.append(f"{op}: {argument}")
    assert missing == []


OLDER = {
    'index >= -sizes[i] && index < sizes[i] && "index out of bounds"': "aten::index",
    "indexValue >= 0 && indexValue < src.sizes[dim]": "aten::gather",
    "THCNumerics<T>::ge(val, zero)": "aten::multinomial",
    "*input >= 0. && *input <= 1.": "aten::binary_cross_entropy",
    "input[0] != 0": "aten::multinomial",
    "dstIndex < dstAddDimSize": "aten::index_add",
}


@pytest.mark.parametrize("expression", sorted(OLDER))
def test_texts_of_older_releases(expression: str) -> None:
    meaning = meaning_of(line(expression))
    assert meaning is not None and OLDER[expression] in meaning.ops


def test_a_shared_expression_is_told_apart_by_its_file() -> None:
    """``index >= 0`` means the op of its file, and nothing in another."""
    two = meaning_of(line("index >= 0", file="FractionalMaxPool2d.cu"))
    three = meaning_of(line("index >= 0", file="FractionalMaxPool3d.cu"))
    assert two is not None and two.ops == ("aten::fractional_max_pool2d_backward",)
    assert three is not None and three.ops == ("aten::fractional_max_pool3d_backward",)
    assert meaning_of(line("index >= 0", file="mine.cu")) is None


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("index out of bounds: 0 <= tmp4 < 10", "is outside 0 … 9"),
        ("index out of bounds: 0 <= tl.broadcast_to(tmp4, [XBLOCK]) < ks0", "outside 0 … ks0 - 1"),
    ],
)
def test_inductor_s_texts_carry_their_bound(expression: str, sentence: str) -> None:
    """The number in the text is the size; a symbol stays a symbol."""
    meaning = meaning_of(line(expression))
    assert meaning is not None and meaning.is_compiled and sentence in meaning.sentence
    assert (meaning.ops, meaning.argument) == ((), None)


def test_words_of_the_caller_are_repeated() -> None:
    """``torch._assert_async`` prints what the code gave it."""
    meaning = meaning_of(line("lengths must match", function="_assert_async_cuda_kernel"))
    assert meaning is not None and meaning.ops == ("aten::_assert_async",)
    assert "lengths must match" in meaning.sentence
    assert meaning_of(line("lengths must match")) is None


def test_the_argument_where_it_has_one_name() -> None:
    assert known_texts()[folded("t < n_classes")].argument == "target"
    assert known_texts()[folded("srcIndex < srcSelectDimSize")].argument is None


# --- texts met on hardware ------------------------------------------------------------------------

HARVEST = json.dumps(
    {
        "texts": [
            {
                "expression": 'new_idx < limit && "said"',
                "arguments": [["aten::take", "index"]],
                "sentence": "an index is bad",
            },
            {
                "expression": "new_idx < limit",
                "arguments": [["aten::put", "index"]],
                "sentence": "an index is bad",
            },
        ]
    }
)


def test_texts_of_one_kernel_are_joined() -> None:
    """Two ops that printed one expression are both its ops."""
    read = assert_meanings.read_harvest(json.loads(HARVEST))
    assert read == {
        "new_idx<limit": Meaning(
            arguments=(("aten::take", "index"), ("aten::put", "index")), sentence="an index is bad"
        )
    }


def test_harvested_texts_are_used_for_their_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fill gaps for the release that they were met on, whatever its build."""
    (tmp_path / "core" / "data").mkdir(parents=True)
    (tmp_path / "core" / "data" / "assert_texts_9.1.0.json").write_text(HARVEST, encoding="utf-8")
    monkeypatch.setattr(text_files.resources, "files", lambda package: tmp_path)
    assert_meanings.harvested.cache_clear()
    try:
        known = meaning_of(line("new_idx < limit"), "9.1.0+cu130")
        assert known is not None and known.argument == "index"
        assert meaning_of(line("new_idx < limit"), "9.2.0") is None
        built_in = meaning_of(line("t < n_classes"), "9.1.0")
        assert built_in is not None and built_in.argument == "target"
    finally:
        assert_meanings.harvested.cache_clear()


# --- the words of each release, and how they are read out of a wheel ------------------------------

BCE = "Loss.cu:89 input_val >= zero && input_val <= one"
LINE = "Loss.cu:89: operator(): Assertion `input_val >= zero && input_val <= one` failed."
MOVED = json.loads(DATA.read_text(encoding="utf-8"))
THREAD = LINE.replace("operator(): ", "operator(): block: [0,0,0], thread: [3,0,0] ")


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    sites: dict[str, object] = {}
    files = {"assert_sites.json": {"9.1.0": sites}, "asserts.json": assert_table()}
    monkeypatch.setattr(device_asserts, "packaged", files.__getitem__)
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
    assert set(text_files.packaged("assert_sites.json")) == set(MOVED)
    for release, sites in MOVED.items():
        assert re.fullmatch(r"\d+\.\d+\.\d+", release)
        assert set(sites) <= there, release


def quoted() -> list[str]:
    records = {name for guards in GUARDS.values() for guard in guards for name in guard.records}
    found = [record["stderr_text"] for name, record in RECORDS.items() if name in records]
    lines = [line for lines in found for line in lines]
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
