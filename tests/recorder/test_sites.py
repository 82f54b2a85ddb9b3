"""Places of calls: the user's line, the module and the phase around it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cudalens.recorder import backward
from cudalens.recorder.sites import (
    Site,
    SiteReader,
    SiteTracker,
    codes_of,
    entries_of,
    phase_of,
    shared_site,
)

CODE = sys._getframe().f_code


def one() -> None:
    """Have a code of its own."""


def two() -> None:
    """Have another."""


ONE, TWO = one.__code__, two.__code__
NET = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()))


def test_a_shared_place_keeps_the_line_that_led_there() -> None:
    outer = Site("forward", None)
    assert (outer.code, outer.lasti, outer.outer) == (None, 0, None)
    inner = Site("forward", (ONE, 4, outer))
    assert (inner.code, inner.lasti, inner.outer) == (ONE, 4, outer)
    below = Site("backward", inner)
    assert (below.code, below.lasti, below.outer) == (ONE, 4, inner)


@pytest.mark.parametrize(
    ("phase", "module", "brief"),
    [("optimizer", None, True), ("optimizer", NET, False), ("forward", None, False)],
)
def test_what_an_optimizer_reads_is_not_noted(phase: Any, module: Any, brief: bool) -> None:
    site = Site(phase, None, module)
    assert site.is_brief is brief
    assert (site.module and site.module()) is module


def nested() -> tuple[Site, Site]:
    outer = Site("forward", (ONE, 2, None), NET)
    return outer, Site("backward", (TWO, 6, outer), NET[0])


def test_shared_place_and_phase() -> None:
    outer, inner = nested()
    assert shared_site(None) is None
    assert shared_site((ONE, 0, outer)) is outer
    assert shared_site(inner) is inner
    assert [phase_of(it) for it in (None, (ONE, 0, None), outer, inner, (ONE, 0, inner))] == (
        ["forward", "forward", "forward", "backward", "backward"]
    )


def test_lines_that_led_to_a_place_are_outermost_first_and_once() -> None:
    _, inner = nested()
    found = [(it.code, it.lasti) for it in entries_of((CODE, 0, inner))]
    assert found == [(ONE, 2), (TWO, 6), (CODE, 0)]
    assert [(it.code, it.lasti) for it in entries_of(inner)] == [(ONE, 2), (TWO, 6)]
    assert len(entries_of((TWO, 6, inner))) == 2
    assert entries_of(None) == entries_of(Site("forward", None)) == []
    assert list(codes_of(inner)) == [TWO, ONE]
    assert list(codes_of(Site("backward", inner))) == [TWO, TWO, ONE]
    assert list(codes_of(None)) == []


def test_modules_are_named_below_the_outermost_one() -> None:
    reader = SiteReader()
    outer = Site("forward", (ONE, 2, None), NET)
    inner = Site("forward", outer, NET[1])
    leaf = Site("forward", (TWO, 2, inner), NET[1][0])  # type: ignore[index]
    assert reader.module((CODE, 0, leaf))[:2] == ("1.0", "ReLU")
    assert reader.module(leaf).root is NET
    assert reader.module(inner)[:2] == ("1", "Sequential")
    assert reader.module(outer) == reader.module(None) == (None, None, None)
    assert reader.module(nested()[1])[:2] == ("0", "Linear")
    strangers = nn.ReLU(), nn.ReLU()  # of no other
    stranger = Site("forward", inner, strangers[0])
    assert reader.module(stranger)[:2] == ("1", "Sequential")
    assert reader.module(Site("forward", stranger, strangers[1]))[:2] == ("1", "Sequential")


def test_a_module_that_is_gone_is_not_named() -> None:
    net = nn.Sequential(nn.ReLU())
    site = Site("forward", Site("forward", None, net), net[0])
    del net
    assert SiteReader().module(site) == (None, None, None)


def test_the_users_deepest_line() -> None:
    reader = SiteReader()
    line = reader.line((ONE, 0, Site("forward", (TWO, 0, None))))
    assert line is not None
    assert line.line == ONE.co_firstlineno
    assert reader.line(Site("forward", (TWO, 0, None))) != line
    written = TWO.replace(co_linetable=bytes([0b1_1101_111, 0]) * 9)  # no columns: by a compiler
    assert reader.line((written, 0, Site("forward", (ONE, 0, None)))) == line
    assert reader.line(None) is None


# --- while it runs -------------------------------------------------------------------------------


class Asking(nn.Module):
    """Returns the place of its own call, from a pre-hook of all modules and from inside."""

    def __init__(self, tracker: SiteTracker, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.tracker, self.inner = tracker, inner

    def forward(self, x: Any) -> Any:
        place = self.tracker.of(sys._getframe())
        return (place, *(self.inner(x) if self.inner is not None else ()))


def tracked(tracker: SiteTracker, run: Any) -> Any:
    handle = nn.modules.module.register_module_forward_pre_hook(tracker.enter_module)
    try:
        return run()
    finally:
        handle.remove()


def test_the_place_inside_modules() -> None:
    tracker = SiteTracker()
    net = Asking(tracker, Asking(tracker))
    outer, inner = tracked(tracker, lambda: net(1))
    forward = Asking.forward.__code__
    assert outer[0] is inner[0] is forward
    assert outer[2].module() is net
    assert inner[2].module() is net.inner
    assert (inner[2].code, inner[2].outer) == (forward, outer[2])
    assert (outer[2].code.co_name, outer[2].outer) == ("<lambda>", None)
    assert {outer[2].phase, inner[2].phase} == {"forward"}


@pytest.mark.parametrize("is_users", [True, False])
def test_a_module_that_runs_in_a_backward_pass_is_of_that(is_users: bool) -> None:
    """Also where no line of the user's is between the two."""
    tracker = SiteTracker()
    net = Asking(tracker)
    run = (lambda x: net(x)) if is_users else net

    def note() -> Site:
        return tracker.enter_backward(sys._getframe(1))

    source = "def run_backward(note, run):\n    return note(), run(1)"
    names: dict[str, Any] = {}
    exec(compile(source, backward.__file__, "exec"), names)
    site, (place,) = tracked(tracker, lambda: names["run_backward"](note, run))
    assert site.phase == "backward"
    assert site.code is not None
    assert (place[2].phase, place[2].outer) == ("backward", site)


def test_an_optimizers_step_is_its_own_phase() -> None:
    tracker = SiteTracker()
    p = nn.Parameter(torch.ones(1))
    seen: list[Any] = []
    inside: list[Any] = []

    class Step(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(tracker.of(sys._getframe()))
            inside.extend(tracked(tracker, lambda: Asking(tracker)(1)))
            return None if closure is None else closure()

    handle = register_optimizer_step_pre_hook(tracker.enter_step)
    try:
        Step([p], lr=0.1).step()
        Step([p], lr=0.1).step(lambda: seen.append(tracker.of(sys._getframe())))
    finally:
        handle.remove()
    plain, own, closure = (shared_site(it) for it in seen)
    assert plain is not None
    assert own is not None
    assert closure is not None
    assert (plain.phase, plain.is_brief, plain.closure) == ("optimizer", True, None)
    assert (own.phase, closure.phase) == ("optimizer", "forward")
    assert own.closure is closure
    assert {it[2].phase for it in inside} == {"forward"}


@pytest.mark.parametrize(
    ("args", "kwargs", "has_closure"),
    [((one,), {}, True), ((), {"closure": one}, True), ((), {}, False), ((None,), {}, False)],
)
def test_a_step_is_given_a_closure(args: Any, kwargs: Any, has_closure: bool) -> None:
    class Called(torch.optim.SGD):
        """Can be called itself, which makes it no closure."""

        def __call__(self) -> None:
            """Do nothing."""

    tracker = SiteTracker()
    optimizer = Called([nn.Parameter(torch.ones(1))], lr=0.1)
    tracker.enter_step(optimizer, (optimizer, *args), kwargs)
    (site,) = tracker._noted.values()
    assert (site.closure is not None) is has_closure


def test_without_a_line_of_the_users_there_is_no_place() -> None:
    assert SiteTracker().of(None) is None
