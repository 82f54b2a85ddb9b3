"""Values that guards have read in earlier calls of a line."""

from __future__ import annotations

import sys
from types import FrameType, SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from cudalens.recorder import mode
from cudalens.recorder.earlier_values import EarlierValues, caller_of
from cudalens.recorder.sites import Site

OUTER = sys._getframe()
CODE = OUTER.f_code


def frame(name: str, back: Any = None, at: int = 0) -> Any:
    code = SimpleNamespace(co_filename=name)
    return SimpleNamespace(f_code=code, f_back=back, f_lasti=at)


def test_calls_are_counted_with_their_extremes() -> None:
    seen, here = EarlierValues(), frame("cell")
    assert seen.find(here, None, "index") is None
    seen.note(here, None, [("index", 3, 5), ("other", 0, 100)], 1)
    seen.note(here, None, [("index", 4, 9)], 2)
    seen.note(here, None, [("index", -2, -1)], 3)
    seen.note(here, None, [("index", 4, 6)], 4)
    found = seen.find(here, None, "index")
    assert found == {"calls": 4, "min": -2, "max": 9, "modules": []}
    other = seen.find(here, None, "other")
    assert other == {"calls": 1, "min": 0, "max": 100, "modules": []}
    assert seen.find(here, None, "third") is None


def test_a_call_that_several_guards_have_read_is_one() -> None:
    seen, here = EarlierValues(), frame("cell")
    seen.note(here, None, [("index", 3, 5)], 1)
    seen.note(here, None, [("index", 2, 7)], 1)
    seen.note(here, None, [("index", 2, 7)], 2)
    assert seen.find(here, None, "index") == {"calls": 2, "min": 2, "max": 7, "modules": []}


def test_places_are_told_apart_by_code_instruction_and_line() -> None:
    seen, here = EarlierValues(), frame("cell")
    seen.note(here, (CODE, 4, None), [("index", 3, 5)], 1)
    assert seen.find(here, (CODE, 4, None), "index") is not None
    assert seen.find(here, (CODE, 6, None), "index") is None
    assert seen.find(frame("cell"), (CODE, 4, None), "index") is None
    here.f_lasti = 2
    assert seen.find(here, (CODE, 4, None), "index") is None
    assert seen.find(None, (CODE, 4, None), "index") is None


def of_module(module: nn.Module, site: Any = None, at: int = 0) -> Site:
    return Site("forward", (CODE, at, site), module)


@pytest.mark.parametrize("is_of_line", [True, False])
def test_modules_of_a_line_are_one_where_the_user_called_them(is_of_line: bool) -> None:
    """A library that calls many modules on one line of the user's tells nothing of one of them."""
    seen, nets, library = EarlierValues(), [nn.ReLU(), nn.ReLU()], frame("library")
    outer = None if is_of_line else of_module(nn.ReLU())
    sites = [of_module(net, outer) for net in nets]
    seen.note(library, sites[0], [("index", 3, 5)], 1)
    seen.note(library, sites[1], [("index", 1, 9)], 2)
    seen.note(library, sites[1], [("index", 1, 9)], 3)
    found = seen.find(library, sites[0], "index")
    assert found is not None
    if is_of_line:
        assert found == {"calls": 3, "min": 1, "max": 9, "modules": [(nets[1], 2, 1, 9)]}
    else:
        assert found == {"calls": 1, "min": 3, "max": 5, "modules": []}


def test_a_line_that_calls_the_op_itself_counts_all_modules() -> None:
    seen, nets = EarlierValues(), [nn.ReLU(), nn.ReLU()]
    outer = of_module(nn.ReLU())
    sites: list[Any] = [(CODE, 8, of_module(net, outer)) for net in nets]
    here = frame("cell")
    here.f_code = CODE
    for number, site in enumerate(sites):
        seen.note(here, site, [("index", number, number)], number)
    found = seen.find(here, sites[0], "index")
    assert found == {"calls": 2, "min": 0, "max": 1, "modules": [(nets[1], 1, 1, 1)]}


def test_no_module_is_kept_alive() -> None:
    seen, net = EarlierValues(), nn.ReLU()
    gone, here = ref(net), frame("library")
    seen.note(here, of_module(net), [("index", 1, 2)], 1)
    del net
    assert gone() is None
    found = seen.find(here, of_module(nn.ReLU()), "index")
    assert found is not None
    assert found["modules"] == [(None, 1, 1, 2)]


DETOUR = torch.overrides.__file__


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["cell"], 0),
        ([str(mode.__file__), "cell"], 1),
        ([str(mode.__file__), str(mode.__file__), "cell"], 2),
        ([DETOUR, "functional", "cell"], 2),
        ([str(mode.__file__), DETOUR, "functional", "cell"], 3),
        ([DETOUR], None),
        ([str(mode.__file__)], None),
        ([], None),
    ],
)
def test_frames_of_the_mode_are_passed(names: list[str], wanted: int | None) -> None:
    frames: list[FrameType] = []
    for name in reversed(names):
        frames.insert(0, frame(name, frames[0] if frames else None))
    found = caller_of(frames[0] if frames else None)
    assert found is (None if wanted is None else frames[wanted])


def test_what_is_noted_inside_the_mode_is_of_its_caller() -> None:
    seen, here = EarlierValues(), frame("cell")
    seen.note(frame(str(mode.__file__), here), None, [("index", 1, 2)], 1)
    assert seen.find(here, None, "index") is not None
