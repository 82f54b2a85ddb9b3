"""Guards for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cudalens.guards import _ranges, engine
from cudalens.guards.catalogue import sampling
from tests.cpu_guards import Collector, guarded


@pytest.fixture(scope="module")
def guards(request: pytest.FixtureRequest) -> Iterator[Collector]:
    """Every guard, acting on CPU tensors; a module with ``IS_DEFERRED`` has them look later."""
    with guarded(is_deferred=getattr(request.module, "IS_DEFERRED", False)) as collector:
        yield collector


@pytest.fixture
def nothing_is_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every tensor be reduced, as large ones are."""
    for module in (_ranges, engine, sampling):
        monkeypatch.setattr(module, "FEW", -1)
    for module in (_ranges, sampling):
        monkeypatch.setattr(module, "HANDFUL", -1)
