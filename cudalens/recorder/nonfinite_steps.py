"""Steps of training under the watch: optimizers, whose parameters matter, and scalers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor

from cudalens.core import _torch
from cudalens.recorder.nonfinite_marks import (
    Arrival,
    Maker,
    NonFiniteTensor,
    NonFiniteTensors,
    Reports,
    Step,
    are_finite,
)
from cudalens.recorder.nonfinite_values import (
    nonfinite,
    violation_of_step,
    violation_of_stepped_gradient,
)
from cudalens.recorder.sites import RawSite
from cudalens.recorder.tensor_refs import Ref, tensors_in


class StepWatch:
    """Looks at parameters before and after each step, and leaves scaled gradients to the scaler.

    What an optimizer computes on the way to a step is its own: RAdam divides by 0 on purpose.
    """

    def __init__(self, marks: NonFiniteTensors, reports: Reports) -> None:
        self._marks, self._reports = marks, reports
        self._inside: dict[int, Ref] | None = None
        """While an optimizer changes its parameters: those that were finite before, with all that
        it keeps of them."""
        self._scalers: WeakKeyDictionary[Any, _Scaling] = WeakKeyDictionary()
        self._overscaled: list[Ref] = []
        """Losses that were finite before a scaler scaled them."""

    @property
    def is_inside(self) -> bool:
        """Return whether an optimizer is at work."""
        return self._inside is not None

    def reset(self) -> None:
        """End a step that an exception has left."""
        self._inside = None

    def let_go(self) -> None:
        """Forget all tensors."""
        self._inside = None if self._inside is None else {}
        self._overscaled = []

    def before(self, optimizer: Any, site: RawSite) -> BaseException | None:
        """Look at what an optimizer is about to change, unless it is known.

        The step of a gradient that is not finite is not made.
        """
        return _torch.without_modes(self._before, optimizer, site)  # type: ignore[no-any-return]

    def _before(self, optimizer: Any, site: RawSite) -> BaseException | None:
        has_marks, known = bool(self._marks), {}
        for parameter in _parameters(optimizer):
            grad = parameter.grad
            mark = self._marks.of(grad) if has_marks and grad is not None else None
            if mark is not None and not hasattr(optimizer, "found_inf"):
                step = Step(f"{_path_of(optimizer)}.step", site)
                return self._reports.arrived(Arrival.of("gradient", mark, step, parameter))
            if all(self._marks.was_finite(item) for _, item in _state_of(optimizer, parameter)):
                key = ref(parameter)
                known[id(key)] = key
        self._inside = known
        return None

    def after(self, optimizer: Any, site: RawSite) -> BaseException | None:
        """Stop after a step that has made a parameter which is not finite, or a moment of it."""
        known, self._inside = self._inside, None
        if known is None:
            return None
        return _torch.without_modes(self._after, optimizer, site, known)  # type: ignore[no-any-return]

    def _after(
        self, optimizer: Any, site: RawSite, known: Mapping[int, Ref]
    ) -> BaseException | None:
        for parameter in _parameters(optimizer):
            for name, item in _state_of(optimizer, parameter):
                found = None if are_finite((item,)) else next(nonfinite((item,)), None)
                if found is None:
                    self._marks.keep_finite(item)
                elif id(ref(parameter)) in known:  # else it was so before
                    _, values, bad = found
                    step = Step(f"{_path_of(optimizer)}.step", site)
                    has_nan = bool(values.isnan().any())
                    maker = Maker("made", step, has_nan)
                    given = next(nonfinite(tensors_in((parameter.grad,))), None)
                    if given is None:
                        maker.violation = violation_of_step(
                            optimizer, name, parameter, values, bad, step.name
                        )
                    else:  # a hook of the parameter's has made it so, or what nobody records
                        maker.kind, maker.has_nan = "entered", bool(given[1].isnan().any())
                        maker.violation = violation_of_stepped_gradient(step.name, *given)
                    mark = self._marks.mark(item, maker, has_nan=has_nan)
                    arguments = {"param": parameter, "grad": parameter.grad}
                    arrival = Arrival.of("parameter", mark, step, parameter, arguments=arguments)
                    return self._reports.arrived(arrival)
        return None

    # --- scalers ---------------------------------------------------------------------------------

    def scaled(self, scaler: Any, outputs: Any, scaled: Any) -> None:
        """Take note of a loss that a scaler has scaled: it looks after the gradients."""
        if not scaler.is_enabled():
            return
        self._scalers.setdefault(scaler, _Scaling()).is_at_work = True
        is_whole = not any(map(self._marks.of, tensors_in((outputs,))))
        self._overscaled = [ref(item) for item in tensors_in((scaled,))] if is_whole else []

    def updated(self, scaler: Any, site: RawSite, *, is_lower: bool) -> BaseException | None:
        """Take note of the end of a step; stop if no scale is small enough."""
        scaling = self._scalers.setdefault(scaler, _Scaling())
        scaling.is_at_work = False
        scaling.skipped = scaling.skipped + 1 if is_lower else 0
        if not scaling.skipped or scaler.get_scale() >= 1:
            return None
        text = f"{scaling.skipped} steps in a row were skipped, down to a scale of "
        text += f"{scaler.get_scale():.4g}"
        step = Step("torch.amp.GradScaler.update", site)
        return self._reports.arrived(Arrival.of("scaler", scaling.mark, step, text=text))

    def leaves_to_scaler(self, mark: NonFiniteTensor) -> bool:
        """Return whether a gradient is for a scaler, which skips its step if it is not finite."""
        at_work = [item for item in self._scalers.values() if item.is_at_work]
        for item in at_work:
            item.mark = mark
        return bool(at_work)

    def is_overscaled(self, tensor: Tensor) -> bool:
        """Return whether a loss was finite before a scaler scaled it."""
        return any(item() is tensor for item in self._overscaled)


@dataclass
class _Scaling:
    """One scaler of gradients."""

    is_at_work: bool = False
    """True between ``scale`` and ``update``."""
    mark: NonFiniteTensor | None = None
    """A gradient that was not finite."""
    skipped: int = 0
    """Number of the last steps that were skipped, without one between that was not."""


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, Tensor) and parameter.grad is not None:
                yield parameter


def _state_of(optimizer: Any, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter, and what an optimizer keeps of its size: a moment, a running mean."""
    yield "", parameter
    for name, item in optimizer.state.get(parameter, {}).items():
        if isinstance(item, Tensor) and item.shape == parameter.shape and type(name) is str:
            yield name, item


def _path_of(optimizer: Any) -> str:
    kind = type(optimizer)
    name = kind.__qualname__
    return f"torch.optim.{name}" if kind.__module__.startswith("torch.optim.") else name
