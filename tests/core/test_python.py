"""Facts of CPython that the package relies on."""

from __future__ import annotations

import ast
import threading
import warnings
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from cudalens.core._python import live_instances, parse


class Sub(torch.Tensor):
    """A subclass of a user's."""


def test_the_living_instances_of_a_class_and_of_its_subclasses_are_found() -> None:
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(3))
    below = torch.ones(2).as_subclass(Sub)
    optimizer = torch.optim.Adam([parameter])
    found = {id(item) for item in live_instances(torch.Tensor)}
    assert {id(tensor), id(parameter), id(below)} <= found
    assert id(optimizer) not in found
    assert {id(item) for item in live_instances(Optimizer)} >= {id(optimizer)}
    number, count = id(optimizer), len(live_instances(Optimizer))
    del optimizer
    assert number not in {id(item) for item in live_instances(Optimizer)}
    assert len(live_instances(Optimizer)) == count - 1


def test_a_thread_that_builds_tuples_is_not_disturbed() -> None:
    """It resizes each tuple while it builds it, which CPython does for an unshared one alone."""
    errors, is_over = [], threading.Event()

    def build() -> None:
        try:
            while not is_over.is_set():
                tuple(number for number in range(400))
        except SystemError as error:
            errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        live_instances(Optimizer)
    is_over.set()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("action", ["always", "error"])
def test_a_warning_of_code_that_is_parsed_is_not_given_again(action: Any) -> None:
    """Python has warned where the code was compiled; the filters stay the user's."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter(action)
        before = list(warnings.filters)
        assert isinstance(parse(r'x = "\("').body[0], ast.Assign)
        with pytest.raises(SyntaxError):
            parse("x =")
        assert warnings.filters == before
        assert seen == []
