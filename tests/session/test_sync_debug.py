"""``torch.cuda.set_sync_debug_mode``: the user's own waits are told of, ours are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from cudalens.core import _torch

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode")


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Errors on each wait; gives what tells the mode.  Torch's own where the build has CUDA."""
    if not hasattr(torch._C, "_cuda_set_sync_debug_mode"):
        modes = [2]  # where the build of torch has none
        own = {"get": lambda: modes[-1], "set": modes.append}
        for verb, function in own.items():
            monkeypatch.setattr(torch._C, f"_cuda_{verb}_sync_debug_mode", function, raising=False)
        yield lambda: modes[-1]
        return
    torch._C._cuda_set_sync_debug_mode(2)
    try:
        yield torch._C._cuda_get_sync_debug_mode
    finally:
        torch._C._cuda_set_sync_debug_mode(0)


def test_waiting_for_a_stream_is_no_news(mode: Callable[[], int]) -> None:
    """The recorder and the probe wait so; behind it the mode is the user's again."""
    seen: list[int] = []
    _torch.wait_for(Mock(synchronize=lambda: seen.append(mode())))
    assert seen == [0]
    assert mode() == 2


@pytest.mark.parametrize("block", [_torch.no_torch_function, _torch.plain_torch])
def test_values_may_be_read(block: Callable[[], Any], mode: Callable[[], int]) -> None:
    """Guards and reports read in these blocks, also inside one another."""
    with block():
        assert mode() == 0
        with block():
            assert mode() == 0
        assert mode() == 0
    assert mode() == 2


def test_the_mode_comes_back_after_an_error(mode: Callable[[], int]) -> None:
    with pytest.raises(ZeroDivisionError), _torch.no_torch_function():
        _ = 1 / 0
    assert mode() == 2


def test_without_the_mode_nothing_is_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual way costs no call into torch's settings."""
    monkeypatch.setattr(_torch, "_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_set_sync_debug_mode", None, raising=False)
    _torch.wait_for(Mock())
    with _torch.no_torch_function():
        assert not torch._C._is_torch_function_enabled()
