"""Forty generated cells in one shell: every failure reported right, nothing left behind.

``make soak`` runs a thousand.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from benchmarks.soak import soak
from cudalens.evidence import finding

LIMIT_S = 600.0


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The shell's own history and display warn of nothing that matters here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="IPython")
        yield


@pytest.mark.no_cover
@pytest.mark.thorough
def test_forty_cells_leave_nothing_behind() -> None:
    result = soak(40, 7, LIMIT_S)
    assert result.problems == []
    assert result.cells == 40
    assert result.failing >= 10
    assert len(result.by_label) >= 5


@pytest.mark.no_cover
@pytest.mark.thorough
def test_the_soak_notices_a_wrong_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without a place, as when the stack cannot be read, are problems."""
    monkeypatch.setattr(finding, "calling_frames", lambda **options: [])
    assert any("place" in line or "line is" in line for line in soak(1, 7, LIMIT_S).problems)
