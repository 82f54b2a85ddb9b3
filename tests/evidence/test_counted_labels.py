"""A label beyond the classes of a confusion matrix, which torch speaks of as a wrong shape."""

from __future__ import annotations

import ast

import pytest
import torch

from cudalens.core.call import Operand
from cudalens.evidence.counted_labels import _named
from tests.hostcells import Outcome, run_cell

LABELS = """\
import torch
n = 3
truth, pred = torch.tensor([0, {label}, 2]), torch.tensor([0, 1, {guess}])
"""
MATRIX = "torch.bincount(n * truth + pred, minlength=n * n).reshape(n, n)"


def cell(line: str, label: object, guess: object = 2) -> Outcome:
    return run_cell(LABELS.format(label=label, guess=guess) + line, fast=False)


@pytest.mark.parametrize("label", [3, 5, 255, -1])
@pytest.mark.parametrize(
    "line",
    [
        MATRIX,
        MATRIX.replace("reshape", "view"),
        "def count(a, b):\n    return " + MATRIX.replace("truth", "a").replace("pred", "b") + "\n"
        "count(truth, pred)",
        "torch.bincount((n * truth.long() + pred).flatten(), minlength=9).reshape(3, 3)",
    ],
)
def test_the_label_and_its_bound(line: str, label: int) -> None:
    found = cell(line, label).shown
    assert (found.kind, found.prevented) == ("host_error", False)
    assert found.offenders is not None
    (bad,) = found.offenders.first
    assert (bad.position, bad.value) == ((1,), label)
    assert (found.bounds.min, found.bounds.max) == (0, 2)
    name = "a" if line.startswith("def") else "truth"
    assert found.headline_own == f"{name}[1] = {label} is outside the 3 classes of the matrix"
    assert (found.argument, found.bounds.text) == ("target", "0 … 2")
    assert found.explanation.startswith(
        "bincount counts at 3 * label + prediction, one place for each pair."
    )


def test_the_last_class_is_counted() -> None:
    outcome = cell(MATRIX, 2)
    assert (outcome.error, outcome.report) == (None, None)


@pytest.mark.parametrize(
    ("line", "label", "guess"),
    [
        (MATRIX, 2, 5),  # the guess is not multiplied, and a pair of both does not tell
        ("truth = truth[truth < 5]\n" + MATRIX.replace("pred", "pred[1:]"), 255, 9),
        ("torch.ones(10, dtype=torch.int64).reshape(3, 3)", 3, 2),  # no counts
        ("torch.bincount(truth, minlength=9).reshape(3, 4)", 9, 2),  # no such matrix
        (MATRIX.replace("n, n)", "n, n + 1)"), 3, 2),
        ("torch.cat([n * truth + pred, torch.ones(8).long()]).reshape(n, n)", 3, 2),  # no counts
        ("n = 3\n" + MATRIX.replace("n * truth", "4 * truth"), 3, 2),  # another stride
    ],
)
def test_what_is_not_proven_keeps_the_words_of_torch(line: str, label: int, guess: int) -> None:
    found = cell(line, label, guess).shown
    assert found.offenders is None
    assert "is invalid for input of size" in found.headline


PAIRS = "import torch\nn = {n}\ntruth, pred = torch.tensor({truth}), torch.tensor({pred})\n"
NEGATIVE = "torch.bincount(n * truth + pred, minlength={places})"


@pytest.mark.parametrize(
    ("truth", "pred", "line", "said"),
    [
        ([0, -1, -2], [0, 1, 1], MATRIX, "truth[1] = -1"),  # the lower one leads
        ([0, 3, 5], [0, 1, 2], MATRIX, "truth[1] = 3"),  # so does the higher one
        ([0, -1, 2], [0, -1, 2], MATRIX, None),  # the guess may have made the place
        ([0, -1, 5], [0, 1, 2], MATRIX, None),  # 5 would be the next one
        ([-2, -1, 0], [5, 0, 0], MATRIX, None),  # guesses make up for the others
        ([-1, 5, 0], [3, 0, 0], MATRIX, None),
        ([[0, 5], [2, 1]], [[0, 1], [1, 1]],
         MATRIX.replace("n * truth + pred", "(n * truth + pred).flatten()"), "truth[0, 1] = 5"),
        ([[0, -1, 2]], [[0, 1, 2]], MATRIX, None),  # two dimensions are refused whatever they have
    ],
)  # fmt: skip
def test_which_labels_of_several_are_found(
    truth: object, pred: object, line: str, said: str | None
) -> None:
    found = run_cell(PAIRS.format(n=3, truth=truth, pred=pred) + line, fast=False).shown
    outside = said and f"{said} is outside the 3 classes of the matrix"
    assert (found.headline_own if found.offenders else None) == outside
    assert found.limits == ()


def test_a_label_of_few_bits_is_multiplied_as_a_long_one() -> None:
    made = PAIRS.format(n=3, truth="[0, 100, 2], dtype=torch.uint8", pred=[0, 1, 2])
    found = run_cell(made + MATRIX.replace("truth", "truth.long()"), fast=False).shown
    assert found.headline_own == "truth[1] = 100 is outside the 3 classes of the matrix"


@pytest.mark.parametrize(
    ("n", "places", "said"),
    [
        (2, 4, "truth[1] = -1 is outside the 2 classes of the matrix"),
        (2, 5, "(n * truth + pred)[1] = -2 is below 0"),  # no square
        (1, 1, "(n * truth + pred)[1] = -1 is below 0"),  # one class makes no matrix
    ],
)
def test_a_square_of_places_is_a_matrix(n: int, places: int, said: str) -> None:
    made = PAIRS.format(n=n, truth=[0, -1, 0], pred=[0, 0, 0])
    found = run_cell(made + NEGATIVE.format(places=places), fast=False).shown
    assert found.headline_own == said


def test_a_guess_beyond_the_classes_is_not_taken_for_the_label() -> None:
    """Both have a 3, and the count of that of the labels is the largest."""
    both = "import torch\nn = 3\ntruth, pred = torch.tensor([0, 3, 2]), torch.tensor([3, 1, 2])\n"
    found = run_cell(both + MATRIX, fast=False).shown
    assert found.headline_own == "truth[1] = 3 is outside the 3 classes of the matrix"


def test_numbers_beside_the_pair_are_no_labels() -> None:
    more = (
        "import torch\nn = 3\ntruth, pred = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2])\n"
        "other = torch.tensor([0, 3, 0])\n"
    )
    found = run_cell(more + MATRIX.replace("pred", "pred + n * other"), fast=False).shown
    assert found.offenders is None


def test_of_labels_that_are_left_out_nothing_is_said() -> None:
    """255 was taken out before the count, and 3 was not: the list of what is allowed is unknown."""
    line = "keep = truth != 255\n" + MATRIX.replace("truth", "truth[keep]").replace(
        "pred", "pred[keep]"
    )
    labels = (
        "import torch\nn = 3\ntruth, pred = torch.tensor([0, 255, 3]), torch.tensor([0, 1, 2])\n"
    )
    found = run_cell(labels + line, fast=False).shown
    assert found.offenders is None


def test_a_negative_number_to_count() -> None:
    found = cell("torch.bincount(truth)", -1).shown
    assert (found.headline_own, found.argument) == ("truth[1] = -1 is below 0", "target")
    assert found.explanation.startswith(
        "bincount makes one place for each number from 0 to the largest."
    )
    assert (found.bounds.min, found.bounds.max, found.bounds.text) == (0, None, "at least 0")


def test_of_two_tensors_that_may_have_been_counted_none_is_named() -> None:
    found = cell("twin = truth.clone()\ntorch.bincount(twin, weights=truth)", -1).shown
    assert (found.offenders, found.limits) == (None, ())
    assert "non-negative" in found.headline


@pytest.mark.parametrize(
    ("made", "weights", "said"),
    [
        ("less = truth - 1", "truth", "less[0] = -1"),
        ("x = pred + 0.0; less = x.long()", "x", "less[2] = -2"),
    ],
)
def test_of_the_tensors_on_the_line_the_counted_one_is_named(
    made: str, weights: str, said: str
) -> None:
    line = f"{made}\ntorch.bincount(less, weights={weights})"
    found = cell(line, 1, -2).shown
    assert found.headline_own == f"{said} is below 0"


def test_the_tensor_on_the_line_is_named_before_those_it_was_made_of() -> None:
    first, other = torch.ones(1), torch.ones(1)
    on_line = Operand(text="other", node=ast.Name("other"), value=other)
    assert _named([first, other], [on_line]) is other
    assert _named([first, other], []) is first


def test_another_refusal_of_negative_numbers_keeps_the_words_of_torch() -> None:
    found = cell("truth.expand(2)", -1).shown
    assert (found.offenders, "expanded size" in found.headline) == (None, True)
