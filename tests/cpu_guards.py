"""Guards that act on CPU tensors, for tests: what they find is kept, and stops the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from cudalens.core.call import OpCall
from cudalens.core.report_types import Violation
from cudalens.guards import full_name
from cudalens.guards.interceptor import Interceptor
from cudalens.guards.past_calls import PastCall
from tests.releases import printed_by, unexpected

_TESTS = str(Path(__file__).parent)


class Stopped(Exception):  # noqa: N818  not an error of torch or of ours
    """Raised in place of a call that a guard objects to."""


class Collector:
    """What the guards found, newest last."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Violation]] = []
        self.trouble: list[str] = []
        self.lets_pass = False
        self.past: PastCall | None = None
        """The call of the last finding, where it was over."""
        self.settle: Callable[[], BaseException | None] = lambda: None
        self.set_deferred: Callable[[bool], None] = lambda is_deferred: None

    def on_violation(self, call: OpCall, violation: Violation) -> BaseException:
        self.found.append((full_name(call.op), violation))
        self.past = None
        return Stopped(violation.headline)

    def on_past_violation(self, violation: Violation, past: PastCall) -> BaseException:
        name = f"{violation.op}.{violation.overload}".removesuffix(".default").removesuffix(".")
        self.found.append((name, violation))
        self.past = past
        return Stopped(violation.headline)

    def look(self, call: Callable[[], Any]) -> Violation | None:
        """Run a call; return what stopped it, ``None`` when nothing did."""
        self.found.clear()
        try:
            call()
            if (error := self.settle()) is not None:
                raise error
        except Stopped:
            return self.found[0][1]
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

    def __init__(
        self, collector: Collector, devices: frozenset[str], *, is_deferred: bool = False
    ) -> None:
        super().__init__(
            collector.on_violation,
            collector.trouble.append,
            devices=devices,
            on_past_violation=collector.on_past_violation,
            is_users=lambda file: file.startswith(_TESTS),
        )
        self.is_deferred = is_deferred
        self.collector = collector

    def _handle(self, *call: Any) -> BaseException | None:
        error = super()._handle(*call)
        return None if self.collector.lets_pass else error


@contextmanager
def guarded(*devices: str, is_deferred: bool = False) -> Iterator[Collector]:
    """Install every guard for these device types, else for the CPU.

    Args:
        is_deferred: look later; what is pending is looked at where :meth:`Collector.look` ends.
    """
    collector = Collector()
    installed = Observer(collector, frozenset(devices or {"cpu"}), is_deferred=is_deferred)
    collector.settle, collector.set_deferred = installed.settle, installed.set_deferred
    installed.install()
    try:
        yield collector
    finally:
        installed.uninstall()
    assert unexpected(collector.trouble) == [], collector.trouble


@contextmanager
def deterministic(*, warn_only: bool = False) -> Iterator[None]:
    """Set deterministic algorithms for a while."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def positions(violation: Violation) -> list[tuple[int, ...]]:
    """Return the positions of the offenders that are listed."""
    return [item.position for item in violation.offenders.first]


def assert_said(found: Violation | None, said: Mapping[str, Any] | None) -> None:
    """Assert what a finding says; with ``None``, that there is none.

    Args:
        said: fields by name, such as ``bounds.text``; besides, ``at``: the positions, ``line``: the
            place of the line of CUDA, as ``Repeat.cu:20``, ``prints`` and ``why``: words of that
            line and the explanation.
    """
    assert (found is None) == (said is None), found
    for name, wanted in (said or {}).items():
        assert found is not None
        if name == "at":
            assert positions(found) == wanted
        elif name == "line":
            assert found.device_text in printed_by(wanted)
        elif name in ("prints", "why"):
            assert wanted in str(found.device_text if name == "prints" else found.explanation)
        else:
            assert attrgetter(name)(found) == wanted, name


def said_id(said: object) -> str | None:
    """Return the id of what a finding is to say: its first field."""
    if isinstance(said, dict):
        return str(next(iter(said.values()), "found"))
    return "silent" if said is None else None


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in a tensor that is not contiguous."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else strided(tensor)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values with a gap behind each."""
    holder = tensor.new_zeros((*tensor.shape, 2))
    holder[..., 0] = tensor
    return holder[..., 0]


def bits(tensor: torch.Tensor | None) -> Any:
    """Return everything that tells one result from another."""
    if tensor is None:
        return None
    meta = (tensor.layout, tensor.dtype, tensor.device, tuple(tensor.shape), tensor.requires_grad)
    if tensor.layout != torch.strided:
        return (*meta, bits(tensor.detach().cpu().to_dense()))
    host = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    host = host.clone(memory_format=torch.contiguous_format)
    return (*meta, tensor.stride(), host.view(torch.uint8).numpy().tobytes())
