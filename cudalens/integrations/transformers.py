"""transformers: ``Trainer(..., callbacks=[CudaCheckCallback()])`` trains under the guards."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from cudalens.integrations.training import TrainingCheck


class CudaCheckCallback(TrainerCallback):  # type: ignore[misc]
    """Guards while a ``Trainer`` trains; a finding's report is beside the checkpoints.

    Args:
        deferred: use guards that never wait for the device; with ``False`` each checks at once.
    """

    def __init__(self, *, deferred: bool = True) -> None:
        self._check = TrainingCheck(deferred=deferred)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Turn the guards on."""
        place = (args.process_index, args.world_size)
        self._check.open(args.output_dir, lambda: (state.global_step, *place))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Turn the guards off."""
        self._check.close()

    def close(self) -> None:
        """Turn the guards off after an exception, for which a ``Trainer`` calls no callback."""
        self._check.close()
