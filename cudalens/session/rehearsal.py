"""One call that gives code a CUDA device: the real one where there is one, else the simulation."""

from __future__ import annotations

from typing import Any


def ensure_cuda() -> Any:
    """Give ``torch.device("cuda")``, and say in one line which device stands behind it.

    Starts the simulated device where there is no GPU.

    Returns:
        the :class:`torch.device`.

    Raises:
        cudalens.simulate.SimulationError: there is no GPU and the simulation cannot start here.
    """
    import torch

    from cudalens import simulate

    if simulate.current() is not None:
        print(f"cuda: {simulate.DEVICE_NAME}, a rehearsal and not a GPU")
    elif torch.cuda.is_available():
        print(f"cuda: {torch.cuda.get_device_name()}")
    else:
        simulate.start()
    return torch.device("cuda")
