"""Lightning: ``Trainer(..., callbacks=[CudaCheckCallback()])`` runs under the guards."""

from __future__ import annotations

import weakref
from typing import Any

from lightning.pytorch import Callback

from cudalens.integrations.training import TrainingCheck


class CudaCheckCallback(Callback):  # type: ignore[misc]
    """Guards while a ``Trainer`` fits, tests or predicts; a report is beside the checkpoints.

    Args:
        deferred: use guards that never wait for the device; with ``False`` each checks at once.
    """

    def __init__(self, *, deferred: bool = True) -> None:
        self._check = TrainingCheck(deferred=deferred)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Turn the guards on."""
        manager = trainer.checkpoint_callback
        folder = getattr(manager, "dirpath", None) or trainer.default_root_dir

        trainer = weakref.proxy(trainer)  # the trainer refers to this callback
        names = ("global_step", "global_rank", "world_size")
        self._check.open(folder, lambda: tuple(getattr(trainer, name) for name in names))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Turn the guards off after an exception."""
        self._check.close(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Turn the guards off."""
        self._check.close()
