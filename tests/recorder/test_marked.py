"""A tensor on the way back: which of its elements are followed, and where writes put theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy
import pytest
import torch
from torch import Tensor

from cudalens.recorder import Recorder, marked, provenance
from cudalens.recorder.history import Snapshot
from cudalens.recorder.marked import Marked, parts_of, places_shown, places_written

X = torch.tensor([[0, 12, 2], [13, 4, 12]])


def recorded(run: Callable[[], Any]) -> tuple[Snapshot, Any]:
    with Recorder() as recorder:
        made = run()
        return recorder.snapshot(), made


def bad(*places: int) -> tuple[Tensor, Tensor]:
    return torch.tensor(places, dtype=torch.int64), torch.full((len(places),), 12)


def test_the_first_bad_elements_are_listed_where_none_is() -> None:
    item = Marked(ref(X), (), None, None, bad(1, 5))
    found = item.relisted((2, 3))
    assert (found.positions, found.origins) == ([(0, 1), (1, 2)], ((), ()))
    assert found.values is not None
    assert found.values.tolist() == [12, 12]
    assert found.relisted((2, 3)) is found
    for other in (item._replace(bad=None), item._replace(bad=bad())):
        assert other.relisted((2, 3)) is other
    many = item._replace(bad=bad(*range(21))).relisted((30,))
    assert len(many.origins) == marked.MAX_LISTED == 20


def test_elements_are_found_again_by_their_values() -> None:
    item = Marked(ref(X), ((0,),), None, torch.tensor([12.0]))
    found = item.found_again()
    assert (found.positions, found.origins) == ([(0, 1), (1, 2)], ((), ()))
    assert found.values is not None
    assert found.values.tolist() == [12, 12]
    for other in (
        item._replace(values=None), item._replace(values=torch.tensor([99])),
        item._replace(tensor=ref(torch.zeros(1))), item._replace(tensor=ref(empty := X[:0])),
    ):  # fmt: skip
        assert other.found_again() is other
    assert empty.numel() == 0


def test_a_tensor_of_many_elements_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    item = Marked(ref(X), (), None, torch.tensor([12]))
    monkeypatch.setattr(marked, "MAX_SEARCHED", 6)
    assert item.found_again() is not item
    monkeypatch.setattr(marked, "MAX_SEARCHED", 5)
    assert item.found_again() is item


@pytest.mark.parametrize("join", [torch.stack, torch.cat])
def test_the_parts_that_elements_came_from(join: Any) -> None:
    one, other = torch.tensor([1, 12]), torch.tensor([13, 4])
    snapshot, made = recorded(lambda: join([one, other]))
    places = [(0, 1), (1, 0)] if join is torch.stack else [(1,), (2,)]
    values, call = torch.tensor([12, 13]), snapshot.calls[-1]
    item = Marked(ref(made), ((7,), (8,)), places, values, state="bad")
    found = parts_of(call, item, snapshot, None if join is torch.cat else 0)
    assert [(it.tensor(), it.origins, it.positions) for it in found] == [
        (one, ((7,),), [(1,)]),
        (other, ((8,),), [(0,)]),
    ]
    assert [it.values.tolist() for it in found if it.values is not None] == [[12], [13]]
    assert {it.state for it in found} == {"bad"}
    assert parts_of(call, item._replace(positions=None), snapshot, None) == []
    assert parts_of(call, item._replace(tensor=ref(torch.zeros(1))), snapshot, None) == []
    assert [it.values for it in parts_of(call, item._replace(values=None), snapshot, 0)] == (
        [None, None]
    )


def test_parts_of_another_type_have_other_values() -> None:
    parts = [torch.tensor([1, 12]), torch.tensor([13.0, 4.0])]
    snapshot, made = recorded(lambda: torch.cat(parts))
    item = Marked(ref(made), ((), ()), [(1,), (2,)], torch.tensor([12.0, 13.0]))
    found = parts_of(snapshot.calls[-1], item, snapshot, None)
    assert [it.values is None for it in found] == [True, False]


def test_of_parts_one_of_which_nobody_knows_none_is_told() -> None:
    snapshot, made = recorded(lambda: torch.cat([torch.from_numpy(numpy.ones(1)), X[0] * 1.0]))
    item = Marked(ref(made), ((),), [(1,)], None)
    assert parts_of(snapshot.calls[-1], item, snapshot, None) == []


def written(run: Callable[[Tensor], Any], look: Any = places_written, **more: Any) -> Any:
    """Return what is known of the write that a function makes to a tensor of 2 x 3."""
    x = torch.zeros(2, 3, dtype=more.pop("dtype", torch.int64))
    snapshot, _kept = recorded(lambda: run(x))
    item = Marked(ref(x), (), None, None, bad(1))._replace(**more)
    writes = snapshot.writes_to(ref(x))
    call = writes[-1][0]
    found = look(call, item, snapshot)
    return None if found is None else found.tolist()


ROW = torch.tensor([7, 8, 9])
PLACES = torch.tensor([0, 2])


def put(key: Any, value: Any = 12) -> Callable[[Tensor], Any]:
    return lambda x: x.__setitem__(key, value)


def put_in_view(x: Tensor) -> Tensor:
    view = x[:, 1:]
    view[0] = 12
    return view


def put_in_its_parts(x: Tensor) -> Tensor:
    view = x[0].real
    view[0] = 12
    return view


def put_by_a_mask_that_goes(x: Tensor) -> None:
    x[x == 0] = 12


@pytest.mark.parametrize(
    ("run", "wanted"),
    [
        (put(1), [-1, -1, -1, 0, 0, 0]), (put((0, 2)), [-1, -1, 0, -1, -1, -1]),
        (put(1, ROW), [-1, -1, -1, 0, 1, 2]),
        (put((slice(None), PLACES)), [0, -1, 0, 0, -1, 0]), (put(..., 12), [0] * 6),
        (put_in_view, [-1, 0, 0, -1, -1, -1]), (put_by_a_mask_that_goes, None),
        (lambda x: x.fill_(12), None),
        (lambda x: x.__setitem__(0, x[1]), None),
    ],
)  # fmt: skip
def test_the_places_that_a_write_with_a_key_wrote(run: Any, wanted: Any) -> None:
    assert written(run) == wanted
    assert written(run, bad=None) is None


@pytest.mark.parametrize(
    ("run", "wanted"), [(put_in_its_parts, None), (put_in_view, [-1, 0, 0, -1, -1, -1])]
)
def test_a_view_of_another_type_has_other_places(run: Any, wanted: Any) -> None:
    assert written(run, dtype=torch.complex64) == wanted


@pytest.mark.parametrize(("added", "wanted"), [(1, None), (0, [0, 0, -1, -1, -1, -1])])
def test_a_key_that_was_changed_since_tells_no_places(added: int, wanted: Any) -> None:
    def run(x: Tensor) -> Tensor:
        places = torch.tensor([0, 1])
        x[0, places] = 12
        return places.add_(added) if added else places

    assert written(run) == wanted


def test_where_a_view_lies_that_was_written_to() -> None:
    assert written(put_in_view, places_shown) == [False, True, True, False, True, True]
    assert written(put(1), places_shown) is None


def test_of_tensors_that_are_too_large_no_places_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marked, "MAX_PLACES", 1.25)
    assert written(put(1)) is None
    monkeypatch.setattr(marked, "MAX_PLACES", 1.5)  # four times as many may be written to
    assert written(put(1)) is not None


@pytest.mark.parametrize(
    ("operand", "note"),
    [
        (12, "it writes 12"), (ref(one := torch.tensor(12)), "it writes 12"), (ref(ROW), None),
        (ref(torch.zeros(1).sum()), None), (ref(alone := torch.tensor([12])), None),
    ],
)  # fmt: skip
def test_the_note_of_a_write_of_one_number(operand: Any, note: str | None) -> None:
    assert provenance._what_it_writes(operand) == note
    assert (one.dim(), alone.dim()) == (0, 1)
