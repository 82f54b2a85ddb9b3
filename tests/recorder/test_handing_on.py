"""What a block hands on: the calls that led to what lives, renumbered, and what may change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cudalens.recorder import Recorder, handing_on
from cudalens.recorder.earlier_calls import EarlierCalls


def handed(run: Callable[[], Any], before: EarlierCalls | None = None) -> tuple[EarlierCalls, Any]:
    """Return what a block hands on, and what it has left to live."""
    recorder = Recorder()
    if before is not None:
        recorder.follow(before)
    with recorder:
        kept = run()
    return recorder.handed_on(), kept


def stems(earlier: EarlierCalls) -> list[str]:
    return [call.api.stem for call in earlier.calls]


def test_only_what_led_to_living_tensors_is_kept() -> None:
    def cell() -> Tensor:
        torch.ones(3).sin()
        return torch.zeros(3).exp()

    earlier, kept = handed(cell)
    assert stems(earlier) == ["zeros", "exp"]
    # The last of four calls ends at 0.
    assert [call.seq for call in earlier.calls] == [-1, 0]
    assert kept is not None


def test_nothing_is_kept_of_what_is_gone() -> None:
    earlier, _ = handed(lambda: [torch.zeros(3).exp()].clear())
    assert (stems(earlier), earlier.versions, earlier.changes) == ([], [], {})


def test_what_a_kept_view_shows_is_kept_with_its_writes() -> None:
    def cell() -> Tensor:
        whole = torch.zeros(2, 3)
        whole.add_(1)
        return whole[0]

    earlier, _row = handed(cell)
    assert stems(earlier) == ["zeros", "add_", "__getitem__"]


def test_a_write_that_gives_nothing_back_is_kept() -> None:
    def cell() -> Tensor:
        x = torch.zeros(3)
        x[0] = 1
        return x

    earlier, _x = handed(cell)
    assert stems(earlier) == ["zeros", "__setitem__"]


def test_versions_are_those_at_the_end() -> None:
    def cell() -> list[Tensor]:
        x = torch.zeros(3)
        x.add_(1)
        return [x, x.exp()]

    earlier, (x, y) = handed(cell)
    found = {id(item.tensor()): item.version for item in earlier.versions}
    assert found == {id(x): 1, id(y): 0}
    assert all(item.whole is item.tensor for item in earlier.versions)


def test_a_tensor_of_inference_mode_may_change_unseen() -> None:
    def cell() -> Tensor:
        with torch.inference_mode():
            return torch.zeros(3)

    earlier, x = handed(cell)
    assert earlier.versions == []
    (change,) = earlier.changes.values()
    assert change.tensor() is x and (change.first, change.last) == (0, 0)


def test_memory_that_numpy_shows_may_change_unseen() -> None:
    def cell() -> Any:
        x, y = torch.zeros(3), torch.ones(3)
        return x, y, x.numpy()

    earlier, (x, y, _) = handed(cell)
    assert {id(item()) for item in earlier.shared.values()} == {id(x)}
    assert [change.tensor() is x for change in earlier.changes.values()] == [True]
    later, _ = handed(lambda: torch.ones(1), earlier)
    assert {id(item()) for item in later.shared.values()} == {id(x)}
    assert y is not None


def test_memory_of_tensors_that_are_gone_is_shared_with_nobody() -> None:
    earlier, _ = handed(lambda: [torch.zeros(3).numpy()].clear())
    assert earlier.shared == {}
    first, kept = handed(lambda: [x := torch.zeros(3), x.numpy()])
    assert len(first.shared) == 1
    kept.clear()
    later, _ = handed(lambda: torch.ones(1), first)
    assert later.shared == {}


def test_a_change_of_a_living_tensor_is_kept_that_no_call_made() -> None:
    x = torch.zeros(3)
    earlier, _ = handed(x.numpy)
    assert (stems(earlier), earlier.changes.keys()) == ([], {id(ref(x))})


def test_memory_of_a_device_is_shared_with_nobody() -> None:
    x = torch.zeros(3, device="meta")
    earlier, _y = handed(x.exp)
    assert earlier.shared == {}


def shared(earlier: EarlierCalls) -> set[int]:
    return {id(item()) for item in earlier.shared.values()}


@pytest.mark.parametrize("is_part", [False, True])
def test_a_tensor_that_no_known_call_has_made_may_be_shared(is_part: bool) -> None:
    x = torch.zeros(3)
    given = x[1:] if is_part else x
    earlier, (y, z) = handed(lambda: (given.exp(), torch.zeros(2)[1:]))
    assert shared(earlier) == {id(given)}
    assert earlier.changes.keys() == {id(ref(given)), id(ref(x))}
    assert y is not None and z is not None


@pytest.mark.parametrize(
    ("run", "is_shared"),
    [
        (lambda x: torch.as_tensor(numpy.zeros(3)), True),
        (lambda x: torch.zeros(3), False),
        (lambda x: torch.asarray(x), True),
        (lambda x: torch.asarray(x.to("meta")), False),
    ],
)
def test_what_a_call_shows_the_memory_of_others_in_is_shared(run: Any, is_shared: bool) -> None:
    earlier, x = handed(lambda: run(torch.zeros(3)))
    assert shared(earlier) == ({id(x)} if is_shared else set())


@pytest.mark.parametrize("is_given", [False, True])
def test_a_part_that_numpy_was_given_is_memory_of_its_whole(is_given: bool) -> None:
    def cell() -> Tensor:
        x = torch.zeros(4)
        x[:2].numpy() if is_given else x[:2].exp()
        return x

    earlier, x = handed(cell)
    assert shared(earlier) == ({id(x)} if is_given else set())


@pytest.mark.parametrize("is_edited", [False, True])
def test_what_a_file_had_made_that_was_edited_meanwhile_is_hidden(
    tmp_path: Path, is_edited: bool
) -> None:
    file, names = tmp_path / "data.py", {"torch": torch}
    file.write_text(source := "def run():\n    return torch.zeros(3)\n")
    exec(compile(source, str(file), "exec"), names)
    first, x = handed(names["run"])  # type: ignore[arg-type]
    later, _ = handed(lambda: is_edited and file.write_text("# other lines\n"), first)
    assert later.changes.keys() == ({id(ref(x))} if is_edited else set())


def test_the_batches_of_a_block_are_those_of_tensors_that_live() -> None:
    def cell() -> Tensor:
        torch.zeros(1)
        ((kept, _), _) = DataLoader(TensorDataset(torch.zeros(4), torch.ones(4)), 2)
        torch.zeros(1)
        return kept

    earlier, kept = handed(cell)
    (batch,) = earlier.batches
    assert any(item() is kept for item in batch.tensors)
    assert earlier.calls[-1].seq <= batch.seq < 0
    assert id(kept) in {id(item.tensor()) for item in earlier.versions}


def test_where_calls_left_the_ring_that_shared_memory_all_may_be_shared() -> None:
    def cell(mid: Callable[[Tensor], Any]) -> Any:
        with Recorder(max_ops=2) as recorder:
            x = torch.zeros(3)
            mid(x)
            x = torch.ones(3)
            y = x.exp()
        return recorder.handed_on(), (x, y)

    earlier, (x, y) = cell(lambda x: x.numpy())
    assert {id(item()) for item in earlier.shared.values()} == {id(x), id(y)}
    earlier, _both = cell(lambda x: x.sin())
    assert earlier.shared == {}


def test_what_an_optimizer_did_is_a_change_and_no_call() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def cell() -> Tensor:
        weight.grad = torch.ones(2)
        optimizer.step()
        return weight.detach()

    earlier, _row = handed(cell)
    assert not [name for name in stems(earlier) if name.startswith(("add", "_foreach"))]
    assert id(ref(weight)) in earlier.changes


@pytest.mark.parametrize("is_kept", [False, True])
def test_statistics_that_a_layer_wrote_to_are_a_change_unless_its_result_lives(
    is_kept: bool,
) -> None:
    mean, var = torch.zeros(2), torch.ones(2)

    def cell() -> Any:
        x = torch.ones(3, 2)
        made = nn.functional.batch_norm(x, mean, var, training=True)
        return (mean + 0, made) if is_kept else mean + 0

    earlier, _kept = handed(cell)
    assert ("batch_norm" in stems(earlier)) is is_kept
    assert id(ref(var)) in earlier.changes


def test_what_was_written_to_the_whole_is_kept_for_what_was_made_of_a_part() -> None:
    def cell() -> Tensor:
        whole = torch.zeros(4)
        part = whole[:2]
        whole.add_(1)
        return part.exp()

    earlier, _made = handed(cell)
    assert stems(earlier) == ["zeros", "__getitem__", "add_", "exp"]


def test_the_newest_calls_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing_on, "MAX_CALLS", 3)

    def cell(count: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            x = torch.zeros(3)
            for _ in range(count):
                x = x.exp()
            return x

        return run

    earlier, _x = handed(cell(2))
    assert stems(earlier) == ["zeros", "exp", "exp"]
    earlier, _x = handed(cell(3))
    assert stems(earlier) == ["exp", "exp", "exp"]


def test_blocks_are_numbered_through() -> None:
    first, x = handed(lambda: torch.zeros(3))
    second, y = handed(lambda: [x.exp(), torch.ones(1)][0], first)
    assert stems(second) == ["zeros", "exp"]
    assert [call.seq for call in second.calls] == [-2, -1]
    assert y is not None


def test_changes_of_what_is_gone_are_kept_as_long_as_a_call_needs_them() -> None:
    def cell() -> Any:
        x = torch.zeros(3)
        x.numpy()
        return x.exp()

    earlier, y = handed(cell)
    assert stems(earlier) == ["zeros", "exp"]
    assert earlier.shared == {}
    assert [it.tensor() for it in earlier.changes.values()] == [None]
    later, z = handed(lambda: y.exp(), earlier)
    assert stems(later) == ["zeros", "exp", "exp"]
    assert z is not None


def test_the_files_of_the_calls_are_noted() -> None:
    earlier, _x = handed(lambda: torch.zeros(3))
    assert __file__ in earlier.files and earlier.files[__file__] is not None
