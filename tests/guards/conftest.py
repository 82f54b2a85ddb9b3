"""Guards for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cpu_guards import Collector, guarded


@pytest.fixture
def guards() -> Iterator[Collector]:
    """Every guard, acting on CPU tensors."""
    with guarded() as collector:
        yield collector
