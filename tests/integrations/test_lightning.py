"""Lightning's callback: where its report goes, what it is named, when the guards go."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace as Bare
from typing import Any
from weakref import ref

import pytest

from cudalens.core.errors import DeviceIndexError
from cudalens.guards.process import PROCESS
from tests.integrations.bare_hosts import callback_of, look_up

pytestmark = pytest.mark.usefixtures("sim")
CudaCheckCallback = callback_of("lightning", "lightning.pytorch", "Callback")


class Trainer:
    """What the callback reads of a trainer."""

    def __init__(self, folder: Path, manager: Any = None) -> None:
        self.checkpoint_callback, self.default_root_dir = manager, folder / "root"
        self.global_step, self.global_rank, self.world_size = 0, 2, 4


@pytest.mark.parametrize(
    ("manager", "place"),
    [(None, "root"), (Bare(dirpath=None), "root"), (Bare(), "root"), (Bare(dirpath="own"), "own")],
    ids=["no manager", "not told where", "one without a folder", "told where"],
)
def test_the_report_lies_beside_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manager: Any, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer, callback = Trainer(tmp_path, manager), CudaCheckCallback(deferred=False)
    callback.setup(trainer, None, "fit")
    trainer.global_step = 7  # as it is at the finding, not at the start
    with pytest.raises(DeviceIndexError) as caught:
        look_up(3)
    callback.on_exception(trainer, None, caught.value)
    assert (tmp_path / place / "cudalens-step7-rank2.html").exists()
    assert not PROCESS.is_installed
    callback.teardown(trainer, None, "fit")


def test_guards_wait_for_the_end_unless_told_otherwise(tmp_path: Path) -> None:
    callback = CudaCheckCallback()
    trainer = Trainer(tmp_path)
    callback.setup(trainer, None, "fit")
    look_up(3)
    with pytest.raises(DeviceIndexError, match="contained 3"):
        callback.teardown(trainer, None, "fit")
    assert not PROCESS.is_installed


def test_an_exception_of_the_training_is_followed_by_no_other(tmp_path: Path) -> None:
    callback, trainer = CudaCheckCallback(), Trainer(tmp_path)
    callback.setup(trainer, None, "fit")
    look_up(3)
    callback.on_exception(trainer, None, ValueError("the user's own"))
    assert not PROCESS.is_installed


def test_a_trainer_is_not_kept_alive(tmp_path: Path) -> None:
    callback, trainer = CudaCheckCallback(), Trainer(tmp_path)
    callback.setup(trainer, None, "fit")
    alive = ref(trainer)
    del trainer
    gc.collect()
    assert alive() is None
    callback.teardown(None, None, "fit")
