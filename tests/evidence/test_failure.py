"""A failed call with what is around it: its tensors, its stack, and which values are bad."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cudalens.core.graph_types import FIRST_BAD, FIRST_NAN, ProvenanceStep
from cudalens.core.report import ErrorFacts
from cudalens.core.report_types import Bounds, Offender, Offenders, Violation
from cudalens.evidence.failure import (
    FailureContext,
    bad_places,
    current_recorder,
    error_facts,
    has_infinity,
)
from cudalens.recorder.provenance import Provenance
from cudalens.source.stack import StackEntry

VALUES = torch.tensor([0, 7, 3, -1, 9])


def failure(**facts: Any) -> FailureContext:
    return FailureContext(**{"entries": (), "started": 0.0, **facts})


def violation(count: int = 3, **facts: Any) -> Violation:
    """Return the finding of numbers outside 0 to 4, of which so many are."""
    found = Offenders(count=count, total=5, first=(Offender(position=(1,), value=7),))
    defaults: dict[str, Any] = {
        "headline": "",
        "argument": "index",
        "bounds": Bounds(min=0, max=4),
        "offenders": found,
    }
    return Violation(**{**defaults, **facts})


def test_an_exception_is_described_without_being_kept() -> None:
    class OwnError(ValueError):
        pass

    error = OwnError("its words")
    before = sys.getrefcount(error)
    facts = error_facts(error)
    assert (facts.type_name, facts.message) == ("OwnError", "its words")
    # The class itself and `object` are no bases.
    assert facts.bases == ("ValueError", "Exception", "BaseException")
    assert sys.getrefcount(error) == before


@pytest.mark.parametrize(("code", "kept"), [(710, 710), (0, 0), ("710", None), (None, None)])
def test_the_code_of_an_exception_is_a_number(code: object, kept: int | None) -> None:
    error = RuntimeError("m")
    error.error_code = code  # type: ignore[attr-defined]
    assert error_facts(error).error_code == kept
    assert error_facts(RuntimeError("m")).error_code is None


@pytest.mark.parametrize(
    ("values", "is_it"),
    [
        ([1.0, math.inf], True),
        ([1.0, -math.inf], False),
        ([1.0, math.nan], False),
        ([1.0, 3e38], False),
        ([], False),
    ],
)
def test_an_infinity_above_zero(values: list[float], is_it: bool) -> None:
    assert has_infinity(torch.tensor(values)) is is_it


def test_integers_have_no_infinity() -> None:
    assert has_infinity(torch.tensor([2**62])) is False


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        ({}, [False, True, False, True, True]),
        ({"count": 2}, None),  # the check is not of single elements
        ({"count": 4}, None),
        (
            {"count": 2, "bounds": Bounds(min=0, max=4, also_allowed=(9,))},
            [False, True, False, True, False],
        ),
        ({"count": 4, "bounds": Bounds(min=0, max=2)}, [False, True, True, True, True]),
        ({"count": 3, "bounds": Bounds(min=0, max=2)}, None),
        ({"count": 2, "bounds": Bounds(min=0, max=7)}, [False, False, False, True, True]),
        ({"count": 2, "bounds": Bounds(min=-1, max=4)}, [False, True, False, False, True]),
        ({"bounds": Bounds(max=4)}, None),
        ({"bounds": Bounds(min=0)}, None),
        ({"is_nonfinite": True}, None),
    ],
)
def test_elements_outside_the_bound(facts: dict[str, Any], wanted: list[bool] | None) -> None:
    found = bad_places(violation(**facts), VALUES)
    assert (found if found is None else found.tolist()) == wanted


def test_elements_of_a_tensor_class_of_the_users_are_not_looked_at() -> None:
    class Own(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *args: Any, **options: Any) -> Any:
            raise AssertionError

    assert bad_places(violation(), VALUES.as_subclass(Own)) is None


def test_the_tensor_at_fault_is_that_of_the_argument() -> None:
    index, other = torch.tensor([7]), torch.ones(2)
    arguments = {"input": other, "index": index, "dim": 0}
    assert failure(arguments=arguments).bad is None
    assert failure(arguments=arguments, violation=violation()).bad is index
    assert failure(arguments={"input": other}, violation=violation()).bad is None


def test_without_an_argument_the_first_tensor_with_an_infinity_is_at_fault() -> None:
    fine, one, two = torch.ones(2), torch.tensor([math.inf]), torch.tensor([math.inf, 1.0])
    nan = violation(argument=None, is_nonfinite=True)
    assert failure(arguments={"a": fine, "b": one, "c": two}, violation=nan).bad is one
    assert failure(arguments={"a": fine}, violation=nan).bad is None
    named = violation(argument="a", is_nonfinite=True)
    assert failure(arguments={"a": fine, "b": one}, violation=named).bad is fine


def test_only_tensors_are_values() -> None:
    tensor = torch.ones(1)
    given = failure(arguments={"input": tensor, "dim": 1, "items": [tensor]})
    assert given.values["input"] is tensor
    assert "dim" not in given.values
    assert all(isinstance(item, torch.Tensor) for item in given.values.values())


def test_the_message_of_no_exception_is_empty() -> None:
    assert failure().message == ""
    assert failure(error=ErrorFacts(type_name="E", message="words")).message == "words"


def test_the_stack_of_a_running_call_and_of_one_that_is_over() -> None:
    frame = sys._getframe()
    try:
        raise ValueError
    except ValueError as error:
        trace = error.__traceback__
    assert trace is not None
    line = StackEntry(frame.f_code, frame.f_lineno, frame.f_lasti)
    running = failure(entries=[frame, trace])
    assert (running.is_running, running.frames, running.trace) == (True, [frame, frame], [trace])
    over = failure(entries=[line])
    assert (over.is_running, over.frames, over.trace) == (False, [], [])
    assert not failure(entries=[frame, line]).is_running


def test_without_a_trial_no_line_is_read() -> None:
    assert failure().reader is None
    call = object()
    assert failure(trial=SimpleNamespace(line=SimpleNamespace(call=call))).reader is call


def test_parameters_are_named_from_the_stack() -> None:
    net = torch.nn.Linear(2, 1)
    names = failure(entries=[sys._getframe()]).names
    assert names[id(net.weight)] == "weight"


def test_without_a_recorder_a_forward_call_is_unknown() -> None:
    assert failure().forward_call(1) == (None, None, None)
    snapshot = SimpleNamespace(forward_call=lambda number: None)
    assert failure(recorder=SimpleNamespace(snapshot=lambda: snapshot)).forward_call(1) == (
        None,
        None,
        None,
    )


class Recording:
    """A recorder that knows one step, and notes what it was asked."""

    def __init__(self, note: str, *, is_open: bool = False) -> None:
        self.way = Provenance(steps=[ProvenanceStep(note=note)], is_open=is_open)
        self.asked: list[Any] = []

    def provenance(self, *asked: Any) -> Provenance:
        self.asked.append(asked)
        return self.way

    def beyond_ring(self, what: str) -> str:
        return f"{what} is not recorded"


def test_the_way_of_the_bad_values_is_asked_with_their_positions() -> None:
    recorder = Recording(FIRST_BAD)
    given = failure(arguments={"index": VALUES}, violation=violation(), recorder=recorder)
    assert [step.note for step in given.way.steps] == [FIRST_BAD]
    ((bad, _, positions, mask),) = recorder.asked
    assert bad is VALUES
    assert (positions, mask.tolist()) == ([(1,)], [False, True, False, True, True])
    assert given.limits.lines == []


def test_the_way_of_a_nan_says_where_the_nan_began() -> None:
    found = Offenders(count=1, total=1, first=(Offender(position=(0,), value="nan"),))
    bad = torch.tensor([math.nan])
    asked = violation(offenders=found, is_nonfinite=True)
    given = failure(arguments={"index": bad}, violation=asked, recorder=Recording(FIRST_BAD))
    assert [step.note for step in given.way.steps] == [FIRST_NAN]
    other = failure(arguments={"index": bad}, violation=asked, recorder=Recording("read"))
    assert [step.note for step in other.way.steps] == ["read"]


def test_a_way_that_leaves_the_ring_is_said() -> None:
    recorder = Recording(FIRST_BAD, is_open=True)
    given = failure(arguments={"index": VALUES}, violation=violation(), recorder=recorder)
    assert given.way.is_open
    (line,) = given.limits.lines
    assert "the op that made the bad values" in line


@pytest.mark.parametrize("missing", ["violation", "recorder", "arguments"])
def test_without_tensor_finding_or_recorder_there_is_no_way(missing: str) -> None:
    facts: dict[str, Any] = {
        "arguments": {"index": VALUES},
        "violation": violation(),
        "recorder": Recording(FIRST_BAD),
    }
    del facts[missing]
    assert failure(**facts).way.steps == Provenance().steps


def test_no_check_means_no_recorder() -> None:
    assert current_recorder() is None
