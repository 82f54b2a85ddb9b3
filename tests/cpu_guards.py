"""Guards that act on CPU tensors, for tests: what they find is kept, and stops the call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from cudalens.core.report_types import Violation
from cudalens.guards import full_name
from cudalens.guards import interceptor as dispatcher
from cudalens.guards._base import Check
from cudalens.guards.interceptor import GuardedCall, Interceptor

ASKED: Counter[str] = Counter()
"""How often each guard was asked about a call."""
FOUND: Counter[str] = Counter()
"""How often it found something."""


def counted(guard: str, check: Check) -> Check:
    """Return a check that counts how often it is asked, and how often it finds something."""

    def asked(*values: Any) -> Violation | None:
        found = check(*values)
        ASKED[guard] += 1
        FOUND[guard] += found is not None
        return found

    return asked


class Stopped(Exception):  # noqa: N818  not an error of torch or of ours
    """Raised in place of a call that a guard objects to."""


class Collector:
    """What the guards found, newest last."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Violation]] = []
        self.trouble: list[str] = []
        self.lets_pass = False

    def on_violation(self, call: GuardedCall, violation: Violation) -> BaseException:
        self.found.append((full_name(call.op), violation))
        return Stopped(violation.headline)

    def look(self, call: Callable[[], Any]) -> Violation | None:
        """Run a call; return what stopped it, ``None`` when nothing did."""
        self.found.clear()
        try:
            call()
        except Stopped:
            return self.found[-1][1]
        assert self.found == []
        return None

    def unguarded(self, call: Callable[[], Any]) -> BaseException | None:
        """Run a call without stopping it; return what torch itself raised."""
        self.found.clear()
        self.lets_pass = True
        try:
            call()
        except Exception as error:
            return error
        finally:
            self.lets_pass = False
        return None


class Observer(Interceptor):
    """Guards of which a test may note the findings without stopping the call."""

    def __init__(self, collector: Collector, devices: frozenset[str]) -> None:
        super().__init__(collector.on_violation, collector.trouble.append, devices=devices)
        self.collector = collector

    def _handle(self, *call: Any) -> BaseException | None:
        error = super()._handle(*call)
        return None if self.collector.lets_pass else error


@contextmanager
def guarded(*devices: str) -> Iterator[Collector]:
    """Install every guard for these device types, else for the CPU."""
    collector = Collector()
    installed = Observer(collector, frozenset(devices or {"cpu"}))
    plans = dispatcher._plans

    def counting(op: Any) -> Any:
        found = plans(op)
        return tuple(replace(item, check=counted(item.guard.name, item.check)) for item in found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "_plans", counting)
        installed.install()
    try:
        yield collector
    finally:
        installed.uninstall()
    assert collector.trouble == []


def positions(violation: Violation) -> list[tuple[int, ...]]:
    """Return the positions of the offenders that are listed."""
    return [item.position for item in violation.offenders.first]


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in a tensor that is not contiguous."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else strided(tensor)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with a gap behind each."""
    holder = tensor.new_zeros((*tensor.shape, 2))
    holder[..., 0] = tensor
    return holder[..., 0]
