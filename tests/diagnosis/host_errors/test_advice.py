"""Advice on sizes of layers, samples and positions: each with a neighbour that gets none."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import pytest

from cudalens.core.evidence_types import PositionTable, RefusedArguments
from cudalens.core.report import ErrorFacts, Evidence
from cudalens.core.report_types import Frame, OpName, TensorSummary, format_shape
from cudalens.diagnosis.host_errors import explain_host_error
from cudalens.diagnosis.host_errors._base import Verdict
from tests.builders import fact
from tests.hint_evidence import TRANSFORMERS, syntax_of

X = fact("input", "float32[2,3,8,8]", "x")
COLLATE = "/site-packages/torch/utils/data/_utils/collate.py"


def explained(message: str, *tensors: Any, kind: str = "RuntimeError", **facts: Any) -> Verdict:
    error = ErrorFacts(type_name=kind, message=message)
    verdict = explain_host_error(Evidence(error=error, tensors=tensors, **facts), error)
    assert verdict.troubles == ()
    return verdict


def hints(message: str, *tensors: Any, **facts: Any) -> list[tuple[str | None, str]]:
    return [(it.rule, it.text) for it in explained(message, *tensors, **facts).hints]


def called(api: str, code: str = "") -> dict[str, Any]:
    return {"op": OpName(api=api), "call": syntax_of(code)}


def inside(file: str) -> dict[str, Any]:
    files = ("train.py", file)
    return {"frames": tuple(Frame(file=it, line=9, function="f") for it in files)}


# --- layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            "Given groups=1, weight of size [8, 4, 3, 3], expected input[2, 3, 8, 8] to have 4 "
            "channels, but got 3 channels instead",
            "x has 3, and in_channels of the layer is 4",
        ),
        (
            "running_mean should contain 3 elements not 4",
            "x has 3, and num_features of the layer is 4",
        ),
        (
            "Given normalized_shape=[4], expected input with shape [*, 4], but got input of size"
            "[2, 3]",
            "x has 3, and normalized_shape of the layer is 4",
        ),
        (
            "input.size(-1) must be equal to input_size. Expected 4, got 3",
            "x has 3, and input_size of the layer is 4",
        ),
    ],
)
def test_a_layer_that_was_made_for_another_size(message: str, text: str) -> None:
    assert hints(message, X) == [("size_of_layer", text)]
    assert hints(message)[0][1] == text.replace("x has", "the input has")


def test_channels_in_another_place_are_no_other_size() -> None:
    message = "Given groups=1, weight of size [8, 4, 3, 3], expected input[2, 3, 8, {}] to have 4 "
    message += "channels, but got 3 channels instead"
    for size in (5, 14):
        assert len(hints(message.format(size), X)) == 1
    assert hints(message.format(4), X) == []


def test_a_product_is_of_a_layer_only_in_linear() -> None:
    message = "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"
    assert hints(message, X, **called("torch.nn.functional.linear")) == [
        ("size_of_layer", "x has 3, and in_features of the layer is 4")
    ]
    assert hints(message, X, **called("torch.matmul")) == []


def test_an_in_place_op_keeps_its_dtype() -> None:
    message = "result type Float can't be cast to the desired output type Long"
    ((rule, text),) = hints(message, **called("torch.Tensor.div_"))
    assert rule == "in_place_dtype"
    assert "make it float32 where it is made" in text
    assert hints(message, **called("torch.Tensor.div")) == []


# --- places and parts -----------------------------------------------------------------------------


def test_a_dimension_that_torch_counts_among_the_indexed_ones() -> None:
    message = "index 9 is out of bounds for dimension 1 with size 8"
    headline = "index 9 is out of bounds for a dimension of size 8"
    shifted = fact("self", "float32[3,5,8]", "x")
    assert explained(message, shifted).headline == headline
    assert explained(message, fact("self", "float32[3,8]", "x")).headline != headline
    assert explained(message).headline != headline


def test_a_part_that_is_given_a_value_of_another_shape() -> None:
    message = "The expanded size of the tensor (4) must match the existing size (3) at "
    message += "non-singleton dimension 0.  Target sizes: [4].  Tensor sizes: [3]"
    facts = {"op": OpName(api="torch.Tensor.__setitem__")}
    syntax = syntax_of("a")
    assert syntax is not None
    statement = replace(syntax, node=ast.parse("a[0] = b").body[0])
    verdict = explained(message, call=statement, **facts)
    assert verdict.headline == "a[0] has shape [4], b has shape [3]"
    assert verdict.argument == "values"
    whole = fact("values", "float32[1,3]", "b")
    assert explained(message, whole, call=statement, **facts).headline == (
        "a[0] has shape [4], b has shape [1, 3]"
    )
    assert explained(message, call=syntax_of("f(a)"), **facts).headline != verdict.headline
    sizes = "expand(torch.FloatTensor{[3, 1]}, size=[4]): the number of sizes provided (1) must be "
    verdict = explained(sizes + "greater or equal", call=statement, **facts)
    assert verdict.headline == "a[0] has shape [4], b has shape [3, 1]"


# --- positions ------------------------------------------------------------------------------------

TOO_LONG = "The size of tensor a (30) must match the size of tensor b (20) at non-singleton "
TOO_LONG += "dimension 1"


def test_a_sequence_that_is_longer_than_the_table_of_positions() -> None:
    def said(rows: int, tokens: int, **facts: Any) -> Verdict:
        table = PositionTable(input="input_ids", rows=rows, tokens=tokens)
        return explained(
            TOO_LONG, refused_arguments=RefusedArguments(position_table=table), **facts
        )

    verdict = said(20, 30, module_type="BertEmbeddings")
    assert verdict.headline == "input_ids has 30 tokens, BertEmbeddings has positions for 20"
    assert verdict.argument == "input_ids"
    assert [it.rule for it in verdict.hints] == ["input_beyond_positions"]
    assert "truncate to max_length=20" in verdict.hints[0].text
    assert said(20, 30).headline == "input_ids has 30 tokens, the model has positions for 20"
    assert said(21, 30).hints == ()
    assert said(20, 31).hints == ()


def test_a_slice_beyond_the_end_of_a_table() -> None:
    def said(code: str, *others: Any, shape: str = "1,20,4") -> list[str]:
        part = fact("other", f"float32[{shape}]", code)
        found = hints(TOO_LONG, part, *others)
        assert {rule for rule, _ in found} <= {"table_of_positions"}
        return [text for _, text in found]

    x = fact("self", "float32[2,30,4]", "x")
    table = fact(None, "float32[1,20,4]", "pos")
    (text,) = said("pos[:, :x.size(1)]", x)
    assert text.startswith("pos ends after 20 positions")
    assert text.endswith("make the table for at least 30, or cut the input to 20")
    assert len(said("pos[:, :x.shape[1]]", x)) == 1
    assert len(said("pos[:, :length]", table)) == 1
    assert len(said("pos[:x.size(1)]", x, shape="20,4")) == 1
    assert said("pos[x.size(1)]", x, shape="20,4") == []
    assert said("pos[:, :length]", x) == []
    assert said("pos[:, :x.size(0)]", x) == []
    assert said("pos[:, 1:x.size(1)]", x) == []
    assert said("pos", x) == []
    assert said("pos[:, :x.size(1)]", x, shape="1,21,4") == []


# --- labels of a head -----------------------------------------------------------------------------

LOGITS = fact("input", "float32[8,3]", None)
BATCH = "Expected input batch_size (8) to match target batch_size (24)"
SIZES = "Target size (torch.Size([8])) must be the same as input size (torch.Size([8, 3]))"


def head(message: str, labels: Any, takes: str, file: str = TRANSFORMERS) -> list[str]:
    refused = RefusedArguments(problem_type=f"{takes}_label_classification")
    found = hints(message, LOGITS, labels, refused_arguments=refused, **inside(file))
    assert {rule for rule, _ in found} <= {"problem_type"}
    return [text for _, text in found]


def test_class_numbers_for_a_head_of_several_labels() -> None:
    numbers = fact(None, "int64[8]", "y")
    (text,) = head(SIZES, numbers, "multi")
    assert text.startswith(
        "y has shape [8] and is int64. The model takes one float for each of its 3"
    )
    assert text.endswith('class numbers are "single_label_classification"')
    (text,) = head(SIZES, fact(None, "float32[8]", "y"), "multi")
    assert text.endswith(", as int64: y.long()")
    assert head(SIZES, numbers, "single") == []
    assert head(SIZES, fact(None, "int64[9]", "y"), "multi") == []
    assert head(SIZES, fact(None, "int64[8]", None), "multi") == []
    assert head(SIZES, numbers, "multi", file="/home/me/train.py") == []


def test_several_labels_a_row_for_a_head_of_one() -> None:
    codes = fact(None, "int64[8,3]", "y", summary=TensorSummary(min=0, max=1))
    (text,) = head(BATCH, codes, "single")
    assert text.startswith(
        "y has shape [8, 3] and is int64. The model takes one class number a row"
    )
    assert text.endswith('set it to "multi_label_classification" and pass y.float()')
    assert head(BATCH, codes, "multi") == []
    classes = fact(None, "int64[8,3]", "y", summary=TensorSummary(min=0, max=2))
    assert head(BATCH, classes, "single") == []
    floats = fact(None, "float32[8,3]", "y", summary=TensorSummary(min=0, max=1))
    assert head(BATCH, floats, "single") == []


# --- samples --------------------------------------------------------------------------------------

STACK = "stack expects each tensor to be equal size, but got [{}] at entry 0 and [{}] at entry 1"


@pytest.mark.parametrize(
    ("a", "b", "rule", "parts"),
    [
        ("3, 8, 8", "1, 8, 8", "size_images", ("images of 3 and of 1 channels", "convert('RGB')")),
        ("4, 8, 8", "3, 8, 8", "size_images", ("images of 4 and of 3 channels",)),
        ("3, 8, 8", "2, 8, 8", "pad_samples", ("3 and 2 rows",)),
        ("2, 8, 8", "3, 8, 8", "pad_samples", ("2 and 3 rows",)),
        ("3, 8, 8", "3, 9, 8", "size_images", ("different sizes", "a collate_fn leaves them in")),
        ("5", "7", "pad_samples", ("5 and 7 elements", ", in a collate_fn of the loader")),
        ("5, 4", "7, 4", "pad_samples", ("5 and 7 rows", "keep them in a list")),
        ("5, 4, 4", "7, 4, 4", "pad_samples", ("5 and 7 rows",)),
    ],
)
def test_samples_of_different_sizes_in_a_loader(
    a: str, b: str, rule: str, parts: tuple[str, ...]
) -> None:
    ((name, text),) = hints(STACK.format(a, b), **inside(COLLATE))
    assert name == rule
    assert all(part in text for part in parts)
    assert ("objects of images" in text) is (rule == "pad_samples" and "," in a)


def test_tensors_of_different_sizes_elsewhere() -> None:
    ((rule, text),) = hints(STACK.format("3, 8, 8", "1, 8, 8"))
    assert (rule, "torch.cat joins them" in text) == ("pad_samples", True)
    ((_, text),) = hints(STACK.format("5", "7"))
    assert "loader" not in text
    ((_, text),) = hints(STACK.format("3, 8, 8", "3, 9, 8"))
    assert "collate_fn" not in text


@pytest.mark.parametrize(
    ("shapes", "at", "text"),
    [
        (
            ("1,2,5", "1,2,4"),
            (5, 4, 1),
            "crop a to the size of b in dimension 2, or enlarge b",
        ),
        # Of two parts that differ in the joined dimension too, the last is no way.
        (
            ("1,2,4", "1,3,5"),
            (4, 5, 1),
            "crop b to the size of a in dimension 2, or enlarge a",
        ),
        (
            ("1,2,4", "1,3,5", "1,2,5"),
            (4, 5, 1),
            "crop the larger to the size of the smaller in dimension 2, or enlarge the smaller",
        ),
        # Of three sizes no two are the ones that are meant.
        (("1,2,4", "1,2,5", "1,2,6"), (4, 5, 1), None),
        (
            ("2,2,4", "1,2,3"),
            (2, 1, 1),
            "crop a to the size of b in dimensions 0 and 2, or enlarge b",
        ),
        (("1,2,4", "1,3,5", "1,2,6"), (4, 5, 1), None),
        (("2,2,4", "1,2,5"), (2, 1, 1), None),  # each is larger in one
    ],
)
def test_parts_of_different_sizes(
    shapes: tuple[str, ...], at: tuple[int, int, int], text: str | None
) -> None:
    parts = [
        fact(f"tensors[{number}]", f"float32[{shape}]", "abc"[number])
        for number, shape in enumerate(shapes)
    ]
    message = (
        f"Sizes of tensors must match except in dimension 1. Expected size {at[0]} but got size "
        f"{at[1]} for tensor number {at[2]} in the list."
    )
    told = hints(message, *parts)
    assert told == ([] if text is None else [("cat_sizes", text)])
    first = parts[0].shape, parts[at[2]].shape
    headline = "a is {} and b is {}: only dimension 1 may differ".format(*map(format_shape, first))
    assert explained(message, *parts).headline == headline


@pytest.mark.parametrize(
    ("smaller", "said"), [("low", "low"), ("F.interpolate(low, scale_factor=2)", "the other")]
)
def test_a_smaller_part_without_a_name_is_the_other(smaller: str, said: str) -> None:
    """An expression said twice hides the rest."""
    message = (
        "Sizes of tensors must match except in dimension 1. Expected size 5 but got size 4 for "
        "tensor number 1 in the list."
    )
    parts = [
        fact("tensors[0]", "float32[1,2,5]", "skip"),
        fact("tensors[1]", "float32[1,2,4]", smaller),
    ]
    text = f"crop skip to the size of {said} in dimension 2, or enlarge {said}"
    assert hints(message, *parts) == [("cat_sizes", text)]


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (
            ("2,5", "2,4"),
            "crop a to the size of b in dimension 1, enlarge b, or join along it",
        ),
        (("2,4", "2,5", "2,6"), "join them along dimension 1"),
        # Where two dimensions differ, no other one can be joined.
        (("2,5", "3,4"), "crop a to the size of b in dimension 1, or enlarge b"),
        (("2,5,7", "2,4,6"), "crop a to the size of b in dimensions 1 and 2, or enlarge b"),
    ],
)
def test_the_first_dimension_may_not_have_been_chosen(shapes: tuple[str, ...], text: str) -> None:
    parts = [
        fact(f"tensors[{number}]", f"float32[{shape}]", "abc"[number])
        for number, shape in enumerate(shapes)
    ]
    message = (
        "Sizes of tensors must match except in dimension 0. Expected size 4 but got size 5 for "
        "tensor number 1 in the list."
    )
    assert hints(message, *parts) == [("cat_sizes", text)]


@pytest.mark.parametrize(
    ("shapes", "joined", "is_said"),
    [
        (("5", "7"), 0, False),  # vstack makes rows of them
        (("5", "7"), 1, False),  # column_stack makes columns
        (("5,3", "7,3"), 2, False),  # dstack adds a dimension
        (("5,3", "7,3"), 1, True),
    ],
)
def test_parts_that_are_joined_with_more_dimensions(
    shapes: tuple[str, str], joined: int, is_said: bool
) -> None:
    parts = [fact(f"tensors[{at}]", f"float32[{it}]", "ab"[at]) for at, it in enumerate(shapes)]
    message = (
        f"Sizes of tensors must match except in dimension {joined}. Expected size 5 but got size 7 "
        "for tensor number 1 in the list."
    )
    assert ("may differ" in explained(message, *parts).headline) == is_said
    assert bool(hints(message, *parts)) == is_said


def test_samples_that_no_advice_is_known_for() -> None:
    assert hints(STACK.format("5", "5, 4"), **inside(COLLATE)) == []
    assert hints(STACK.format("3, 8, 8", "3, 8"), **inside(COLLATE)) == []
    assert hints(STACK.format("5, 4", "5, 3"), **inside(COLLATE)) == []


def test_a_sample_that_is_none_or_lacks_a_key() -> None:
    none = "object of type 'NoneType' has no len()"
    assert explained(none, **inside(COLLATE)).headline == "a sample of the batch is None"
    assert explained(none).headline != "a sample of the batch is None"
    key = "a sample of the batch has no key 'label', which its first sample has"
    assert explained("'label'", kind="KeyError", **inside(COLLATE)).headline == key
    worker = "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback\nKeyError: "
    assert explained(f"{worker}'label'", kind="KeyError").headline == key
    assert explained("'label'", kind="KeyError").headline != key
    assert explained("'label'", kind="ValueError", **inside(COLLATE)).headline != key
