"""An exception of torch's that a check has seen is what it would be without, but for a note."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from typing import Any

import pytest
import torch

import cudalens
from cudalens.core.reported import attach, replace_report, report_beside
from tests.builders import make_report


def refuse() -> torch.Tensor:
    return torch.ones(3) + torch.ones(4)


def refuse_backward() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y += 1
    y.sum().backward()


def refuse_in_backward() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: grad @ torch.ones(7))
    y.sum().backward()


@pytest.mark.parametrize("run", [refuse, refuse_backward, refuse_in_backward])
def test_an_error_that_was_caught_has_nothing_of_ours(run: Any) -> None:
    with cudalens.check():
        try:
            run()
        except RuntimeError as error:
            kept: Any = error
            assert vars(error) == {}
            copied = pickle.loads(pickle.dumps(error))
    assert vars(kept) == {}
    assert (type(copied), copied.args) == (RuntimeError, kept.args)


def test_an_error_that_left_the_block_has_a_note_and_nothing_else() -> None:
    with pytest.raises(RuntimeError) as caught, cudalens.check() as session:
        refuse()
    error = caught.value
    assert [*vars(error)] == ["__notes__"]
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (type(other), other.args, vars(other)) == (RuntimeError, error.args, vars(error))
    assert report_beside(error) is session.report


def test_an_error_passes_to_another_process() -> None:
    context = multiprocessing.get_context("fork")
    with cudalens.check():
        messages: Any = context.SimpleQueue()
        process = context.Process(target=_put_error, args=(messages,))
        process.start()
        process.join(60)
        assert not messages.empty()
        assert isinstance(messages.get(), RuntimeError)


def _put_error(messages: Any) -> None:
    try:
        refuse()
    except RuntimeError as error:
        messages.put(error)


def test_a_report_belongs_to_one_exception() -> None:
    first, second, report = RuntimeError("a"), RuntimeError("a"), make_report()
    attach(first, report, "cudalens: the same words")
    second.add_note("cudalens: the same words")
    assert (report_beside(first), report_beside(second), report_beside(None)) == (
        report,
        None,
        None,
    )


def test_a_report_is_replaced_where_there_was_one() -> None:
    error, report, other = RuntimeError(), make_report(), make_report()
    error.add_note("a note of the user's")
    replace_report(error, other)
    assert report_beside(error) is None
    bystander = RuntimeError()
    for each in (error, bystander):
        attach(each, report, "cudalens: a note")
    replace_report(error, other)
    assert (report_beside(error), report_beside(bystander)) == (other, report)
    assert report_beside(error) is other


def test_reports_of_long_ago_are_forgotten() -> None:
    first, last = RuntimeError(), RuntimeError()
    attach(first, make_report(), "cudalens: the first")
    for number in range(100):
        attach(last, make_report(), f"cudalens: {number}")
    assert report_beside(first) is None
    assert report_beside(last) is not None


def test_an_exception_without_a_list_of_notes_is_left_alone() -> None:
    error: Any = RuntimeError()
    error.__notes__ = "a text"
    attach(error, make_report(), "cudalens: a note")
    assert (error.__notes__, report_beside(error)) == ("a text", None)
