"""The callback of transformers: where its report goes, what it is named, when the guards go."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Bare
from typing import Any

import pytest

from cudalens.core.errors import DeviceIndexError
from cudalens.guards.process import PROCESS
from tests.integrations.bare_hosts import callback_of, look_up

pytestmark = pytest.mark.usefixtures("sim")
CudaCheckCallback = callback_of("transformers", "transformers", "TrainerCallback")


def arguments(folder: Path, ranks: int = 1) -> Any:
    return Bare(output_dir=folder / "out", process_index=1, world_size=ranks)


@pytest.mark.parametrize(("ranks", "name"), [(1, "step7"), (2, "step7-rank1")])
def test_the_report_lies_beside_the_checkpoints(tmp_path: Path, ranks: int, name: str) -> None:
    callback, state = CudaCheckCallback(deferred=False), Bare(global_step=0)
    callback.on_train_begin(arguments(tmp_path, ranks), state, None, model=None)
    state.global_step = 7  # as it is at the finding, not at the start
    with pytest.raises(DeviceIndexError):
        look_up(3)
    assert (tmp_path / "out" / f"cudalens-{name}.html").exists()
    callback.close()
    assert not PROCESS.is_installed


def test_guards_wait_for_the_end_unless_told_otherwise(tmp_path: Path) -> None:
    callback, state = CudaCheckCallback(), Bare(global_step=0)
    callback.on_train_begin(arguments(tmp_path), state, None)
    look_up(3)
    with pytest.raises(DeviceIndexError, match="contained 3"):
        callback.on_train_end(arguments(tmp_path), state, None)
    assert not PROCESS.is_installed
