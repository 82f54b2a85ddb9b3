"""The parts of an evidence, in the few words that they have of their own."""

from __future__ import annotations

import pytest

from cudalens.core.evidence_types import (
    BoundOrigin,
    CallContext,
    DatasetColumn,
    InPlaceChange,
    Marks,
    NanHolder,
    Synchronization,
)
from cudalens.core.report_types import Offenders, SourceSpan


@pytest.mark.parametrize(
    ("name", "attribute", "place"),
    [
        ("ds", "", "ds"),
        ("ds", "targets", "ds.targets"),
        ("the dataset", "targets", "the dataset's targets"),
        ("the dataset", "", "the dataset"),
        ("theirs", "targets", "theirs.targets"),
    ],
)
def test_the_place_of_a_column(name: str, attribute: str, place: str) -> None:
    assert DatasetColumn(name=name, attribute=attribute).place == place


def test_the_variable_of_a_library() -> None:
    context = CallContext(library_names=(("index", "position_ids"), ("self", "table")))
    assert context.library_name("self") == "table"
    assert context.library_name("other") is None
    assert CallContext().library_name("self") is None


def test_what_is_not_known_is_no_fact() -> None:
    assert (Marks().copies, Marks().value, Marks().is_size) == (1, None, False)
    assert (DatasetColumn(name="ds").count, DatasetColumn(name="ds").classes) == (0, None)
    assert not DatasetColumn(name="ds").may_be_changed
    assert NanHolder(name="x", nan=Offenders()).is_read
    assert BoundOrigin(at=SourceSpan(), expression="n = 4").is_set
    assert not InPlaceChange().is_parameter and not InPlaceChange().is_shared
    assert (Synchronization().waits, Synchronization().is_op_unwaited) == (None, False)
