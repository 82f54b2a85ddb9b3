"""The random streams of the simulated device: CPU generators that answer to the name cuda."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# The dispatcher hands a generator over as its C++ object; this address tells whose it is.
_device_generators: set[int] = set()
_classes: dict[str, type[Any]] = {}


def device_generator_class() -> type[Any]:
    """Return the generator class that reports ``cuda`` as its device."""
    import torch

    if "device" not in _classes:

        class DeviceGenerator(torch._C.Generator):
            @property
            def device(self) -> torch.device:  # type: ignore[override]
                return torch.device("cuda", 0)

            def clone_state(self) -> DeviceGenerator:
                copy = new_device_generator()
                copy.set_state(self.get_state())
                return copy  # type: ignore[no-any-return]

            def __reduce__(self) -> Any:
                return _restore_generator, (self.get_state(),)

        _classes["device"] = DeviceGenerator
    return _classes["device"]


def _restore_generator(state: torch.Tensor) -> Any:
    generator = new_device_generator()
    generator.set_state(state)
    return generator


def new_device_generator() -> Any:
    """Return a new generator of the simulated device with the default seed."""
    generator = device_generator_class()("cpu")
    address = generator._cdata
    _device_generators.add(address)
    weakref.finalize(generator, _device_generators.discard, address).atexit = False
    return generator


def is_device_generator(generator: Any) -> bool:
    """Return whether this generator belongs to the simulated device."""
    return generator._cdata in _device_generators
