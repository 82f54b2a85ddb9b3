"""What a block hands on: the calls that led to what lives, renumbered, and what may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

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


def test_a_tensor_that_no_known_call_has_made_may_be_shared() -> None:
    x = torch.zeros(3)
    earlier, y = handed(lambda: x.exp())
    assert {id(item()) for item in earlier.shared.values()} == {id(x)}
    assert y is not None


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
    later, z = handed(lambda: y.exp(), earlier)
    assert stems(later) == ["zeros", "exp", "exp"]
    assert z is not None


def test_the_files_of_the_calls_are_noted() -> None:
    earlier, _x = handed(lambda: torch.zeros(3))
    assert __file__ in earlier.files and earlier.files[__file__] is not None
