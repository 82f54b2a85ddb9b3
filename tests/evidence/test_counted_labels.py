"""A label beyond the classes of a confusion matrix, which torch speaks of as a wrong shape."""

from __future__ import annotations

import pytest

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
        ("n = 3\n" + MATRIX.replace("n * truth", "4 * truth"), 3, 2),  # another stride
    ],
)
def test_what_is_not_proven_keeps_the_words_of_torch(line: str, label: int, guess: int) -> None:
    found = cell(line, label, guess).shown
    assert found.offenders is None
    assert "is invalid for input of size" in found.headline


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
    assert found.headline_own == "truth[1] = -1 is below 0"
    assert (found.bounds.min, found.bounds.max, found.bounds.text) == (0, None, "at least 0")


def test_of_two_tensors_that_may_have_been_counted_none_is_named() -> None:
    found = cell("twin = truth.clone()\ntorch.bincount(twin, weights=truth)", -1).shown
    assert (found.offenders, found.limits) == (None, ())
    assert "non-negative" in found.headline
