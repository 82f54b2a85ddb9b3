"""What earlier blocks know of living tensors, and what may have changed since."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from cudalens.recorder import Recorder
from cudalens.recorder.earlier_calls import (
    EarlierCalls,
    LastVersion,
    UnseenChange,
    files_of,
    hides_changes,
    note_change,
    shares_memory,
    state_of,
    version_or_none,
)


def calls_of(run: Any) -> Any:
    with Recorder() as recorder:
        kept = run()
        calls = recorder.snapshot().calls
    return calls, kept


def test_changes_of_a_tensor_are_one_from_the_first_to_the_last() -> None:
    changes: dict[int, UnseenChange] = {}
    x, y = ref(torch.zeros(1)), ref(keep := torch.zeros(1))
    for seq in (3, 1, 2, 5):
        note_change(changes, x, seq)
    note_change(changes, y, 4)
    assert changes == {id(x): (x, 1, 5), id(y): (y, 4, 4)}
    assert y() is keep


def test_what_was_written_between_blocks_is_noted_with_what_it_is_a_view_of() -> None:
    x, y, whole = torch.zeros(4), torch.zeros(1), torch.zeros(1)
    earlier = EarlierCalls()
    earlier.versions = [
        LastVersion(ref(x), ref(whole), 0), LastVersion(ref(y), ref(y), 0),
        LastVersion(ref(torch.zeros(1)), ref(y), 0),
    ]  # fmt: skip
    earlier.note_changes()
    assert earlier.changes == {}
    x.add_(1)
    earlier.note_changes()
    assert earlier.changes.keys() == {id(ref(x)), id(ref(whole))}
    assert {change[1:] for change in earlier.changes.values()} == {(0, 0)}


def test_an_edited_file_hides_what_its_calls_made(tmp_path: Path) -> None:
    file = tmp_path / "data.py"
    names: dict[str, Any] = {"torch": torch}
    source = "class Run(torch.nn.Module):\n    def forward(self):\n        return torch.zeros(3)\n"
    file.write_text(source)
    exec(compile(source, str(file), "exec"), names)
    calls, x = calls_of(lambda: names["Run"]()())
    others, y = calls_of(lambda: torch.zeros(3))
    assert files_of(calls) > {str(file)}
    earlier = EarlierCalls(calls=[*calls, *others], files={str(file): state_of(str(file))})
    earlier.note_changes()
    assert earlier.changes == {}
    file.write_text(source + "# longer\n")
    earlier.note_changes()
    assert earlier.changes == {id(ref(x)): (ref(x), 0, 0)}
    assert y is not None


def test_files_are_those_of_the_line_and_of_the_modules_around_it(tmp_path: Path) -> None:
    names: dict[str, Any] = {"torch": torch, "nn": nn}
    net = "class Net(nn.Module):\n    def forward(self, x):\n        return x.exp()\n"
    for name, source in (("net.py", net), ("run.py", "def run(net):\n    net(torch.ones(1))\n")):
        exec(compile(source, str(tmp_path / name), "exec"), names)
    calls, _ = calls_of(lambda: names["run"](names["Net"]()))
    found = {Path(name).name for name in files_of(calls)}
    assert {"net.py", "run.py"} <= found
    assert {Path(name).name for name in files_of(calls[:1])} >= {"run.py"}
    assert files_of([]) == set()


def test_state_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("12345")
    state = state_of(str(file))
    assert state is not None
    assert state == (5, file.stat().st_mtime_ns)
    assert state_of(str(tmp_path / "none.py")) is None
    assert state_of("<ipython-input-1>") is None
    assert state_of("null\0byte") is None


@pytest.mark.parametrize("hides", [True, False])
@pytest.mark.parametrize("writes", ["before", "in the ring", "nowhere"])
def test_changes_before_the_oldest_call_in_the_ring(hides: bool, writes: str) -> None:
    x, whole = torch.zeros(4), torch.zeros(1)
    earlier = EarlierCalls(versions=[LastVersion(ref(x), ref(whole), x._version)])
    earlier.changes[7] = UnseenChange(ref(x), 0, 0)
    if writes == "before":
        x.add_(1)

    def run() -> None:
        if writes == "in the ring":
            x[:2].add_(1)
            x.add_(1)
        torch.zeros(1)

    calls, _ = calls_of(run)
    ring = [call._replace(seq=call.seq + 9) for call in calls]
    changes = earlier.changes_before(ring, hides)
    assert changes.pop(7) == UnseenChange(ref(x), 0, 0)
    is_noted = hides or writes == "before"
    assert changes == ({id(ref(it)): (ref(it), 9, 9) for it in (x, whole)} if is_noted else {})
    assert earlier.changes.keys() == {7}


def test_a_dead_tensor_may_have_changed() -> None:
    earlier = EarlierCalls(versions=[LastVersion(gone := ref(torch.zeros(1)), gone, 0)])
    calls, _ = calls_of(lambda: torch.zeros(1))
    assert earlier.changes_before(calls, hides=False) == {id(gone): (gone, 0, 0)}


@pytest.mark.parametrize(
    ("stems", "hides", "shares"),
    [(["add", "data"], True, False), (["numpy"], True, True), (["add", "exp"], False, False),
     ([], False, False), (["from_numpy"], True, True)],
)  # fmt: skip
def test_what_lets_a_tensor_change_without_a_trace(
    stems: list[str], hides: bool, shares: bool
) -> None:
    assert (hides_changes(stems), shares_memory(stems)) == (hides, shares)


def test_version_of_a_tensor() -> None:
    x = torch.zeros(1)
    x.add_(1)
    assert version_or_none(x) == 1
    with torch.inference_mode():
        y: Tensor = torch.zeros(1)
    assert version_or_none(y) is None
