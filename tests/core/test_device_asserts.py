"""Assertion lines as CUDA prints them: read, folded, translated."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cudalens.core import device_asserts, text_files
from cudalens.core.device_asserts import (
    MAX_LINES,
    READ_RELEASE,
    AssertLine,
    AssertSite,
    assert_site,
    assert_table,
    assert_text,
    fold,
)
from cudalens.diagnosis import assert_meanings
from cudalens.diagnosis.assert_meanings import Meaning, folded, known_texts, meaning_of
from cudalens.guards import GUARDS
from tests.inventory import REACHABLE, RECORDS
from tests.processes import ROOT
from tests.releases import release


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


def test_an_assertion_that_was_printed_once_is_told_as_it_was() -> None:
    text = "K.cu:7: f: block: [0,0,0], thread: [0,0,0] Assertion `x` failed."
    assert [item.text() for item in fold(f"{text}\n")] == [text]
    assert [item.text() for item in fold([text, text])] == [f"{text} (2 times, 1 block, 1 thread)"]


@pytest.mark.parametrize(("extra", "words"), [(-1, "4 threads"), (0, "at least 5 threads")])
def test_so_many_threads_are_told_apart(
    extra: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_asserts, "MAX_THREADS", 5)
    for count in (5 + extra, 7 + 3 * extra):
        text = [
            f"K.cu:7: f: block: [{at},0,0], thread: [0,0,0] Assertion `x` failed."
            for at in range(count)
        ]
        assert fold(text)[0].text().endswith(f", {words})")


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
        # The rehearsal device does not know the line for every torch.
        (
            "Loss.cu: f: block: [0,0,0], thread: [0,0,0] Assertion `t >= 0` failed.",
            "t >= 0",
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
                assert namespace == "symm_mem" or "_grouped_mm" in name, op
                continue
            names = {
                item.name
                for overload in packet.overloads()
                for item in getattr(packet, overload)._schema.arguments
            }
            if argument not in names and (namespace != "symm_mem" or release() >= (2, 10)):
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


@pytest.mark.parametrize(
    ("expression", "op", "argument"),
    [
        ("t < n_classes", "torch.nn.functional.cross_entropy", "target"),
        ("t < n_classes", "torch.relu", None),
        ("srcIndex < srcSelectDimSize", "torch.nn.functional.embedding", "indices"),
        ("srcIndex < srcSelectDimSize", "torch.index_select", "index"),
        ("index >= -sizes[i] && index < sizes[i]", "torch.Tensor.__getitem__", "indices"),
        ("index >= -sizes[i] && index < sizes[i]", "torch.Tensor.__setitem__", "indices"),
        ("t < n_classes", None, None),
    ],
)
def test_the_argument_of_a_function_that_calls_the_op(
    expression: str, op: str | None, argument: str | None
) -> None:
    meaning = meaning_of(line(expression))
    assert meaning is not None and meaning.argument_of(op) == argument


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
    texts = json.loads(HARVEST)["texts"]
    read = assert_meanings.read_harvest({"texts": [*texts, texts[0]]})
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


# --- lines of the kernels -------------------------------------------------------------------------


SITES = {
    (f"{file}:{line}", function, expression)
    for file, line, function, expression in json.loads(
        (ROOT / "tests" / "data" / f"assert_sites_{READ_RELEASE}.json").read_text(encoding="utf-8")
    )
}
"""The assertions in the kernels of the wheel of that release, as they were disassembled."""
WORDLESS = {place for place, _, expression in SITES if not expression}
"""Kernels that print what their caller says."""


@pytest.mark.parametrize(
    ("version", "is_read"),
    [
        (READ_RELEASE, True),
        (f"{READ_RELEASE}+cu132", True),
        ("2.15.1", False),
        ("2.13.0+cpu", False),
        (f"{READ_RELEASE}a0+git123", False),
    ],
)
def test_the_line_is_that_of_the_release_that_was_read(
    version: str, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    site = AssertSite(place="Loss.cu:89", function="operator()", expression="0 <= x")
    number = ":89" if is_read else ""
    assert site.text() == f"Loss.cu{number}: operator(): Assertion `0 <= x` failed."


def quoted() -> list[str]:
    records = {name for guards in GUARDS.values() for guard in guards for name in guard.records}
    found = [record["stderr_text"] for name, record in RECORDS.items() if name in records]
    lines = [line for lines in found for line in lines]
    assert len(lines) > 50
    return lines


def test_what_is_quoted_is_what_the_kernels_print() -> None:
    for line in quoted():
        found = re.fullmatch(r"(\S+): (.*?): block: .*? Assertion `(.*)` failed\.", line)
        assert found[1] in WORDLESS or found.groups() in SITES, line


def test_the_table_of_assertions_is_what_the_kernels_print() -> None:
    """Word for word, each under a key of its own."""
    keys = [key for row in assert_table() for key in row.get("sites", {})]
    assert len(keys) == len(set(keys)) > 50
    for key in keys:
        site = assert_site(key)
        assert site.place in WORDLESS or (site.place, site.function, site.expression) in SITES, key
        assert site.text() == assert_text(key)
    with pytest.raises(KeyError):
        assert_site("no such assertion")


@pytest.mark.parametrize("line", quoted())
def test_what_is_quoted_has_a_meaning(line: str) -> None:
    (read,) = fold(line)
    assert meaning_of(read) is not None


INDEX = "ind >= 0 && ind < self_dim_size &&"


@pytest.mark.parametrize(
    ("expression", "argument"),
    [
        ("repeat >= 0", "repeats"),
        ("dstIndex < static_cast<IndexType>(dstAddDimSize)", "index"),
        (f'{INDEX} "vectorized scatter add kernel index out of bounds"', "index"),
        (f'{INDEX} "tma scatter add index out of bounds"', "index"),
    ],
)
def test_words_of_earlier_releases_have_a_meaning(expression: str, argument: str) -> None:
    known = meaning_of(line(expression))
    assert known is not None and known.argument == argument
