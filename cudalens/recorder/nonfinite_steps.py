"""Training steps under the NaN watch: optimizers and gradient scalers."""

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
    """Check parameters before and after each step; leave scaled gradients to the scaler.

    Intermediate results of an optimizer are not checked: RAdam divides by 0 on purpose.
    """

    def __init__(self, marks: NonFiniteTensors, reports: Reports) -> None:
        self._marks, self._reports = marks, reports
        self._inside: dict[int, Ref] | None = None
        """During a step: the parameters that were finite before it, together with their optimizer
        state."""
        self._scalers: WeakKeyDictionary[Any, _Scaling] = WeakKeyDictionary()
        self._overscaled: list[Ref] = []
        """Scaled losses that were finite before scaling."""

    @property
    def is_inside(self) -> bool:
        """Return whether an optimizer step is running."""
        return self._inside is not None

    def reset(self) -> None:
        """End a step that an exception has cut short."""
        self._inside = None

    def let_go(self) -> None:
        """Drop all references to tensors."""
        self._inside = None if self._inside is None else {}
        self._overscaled = []

    def before(self, optimizer: Any, site: RawSite) -> BaseException | None:
        """Check the parameters and state that a step is about to change, unless they are known.

        A non-finite gradient stops the program before the step.
        """
        return _torch.without_modes(self._before, optimizer, site)  # type: ignore[no-any-return]

    def _before(self, optimizer: Any, site: RawSite) -> BaseException | None:
        has_marks, known = bool(self._marks), {}
        for parameter in _parameters(optimizer):
            grad = parameter.grad
            mark = self._marks.of(grad) if has_marks and grad is not None else None
            # A scaler sets `found_inf` on a fused optimizer, which then skips the step itself.
            if mark is not None and not hasattr(optimizer, "found_inf"):
                step = Step(f"{_path_of(optimizer)}.step", site)
                return self._reports.arrived(Arrival.of("gradient", mark, step, parameter))
            if all(self._marks.was_finite(item) for _, item in _state_of(optimizer, parameter)):
                key = ref(parameter)
                known[id(key)] = key
        self._inside = known
        return None

    def after(self, optimizer: Any, site: RawSite) -> BaseException | None:
        """Stop after a step that has made a parameter, or its optimizer state, non-finite."""
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
                    else:  # a hook, or code that is not recorded, has changed the gradient
                        maker.kind, maker.has_nan = "entered", bool(given[1].isnan().any())
                        maker.violation = violation_of_stepped_gradient(step.name, *given)
                    mark = self._marks.mark(item, maker, has_nan=has_nan)
                    arguments = {"param": parameter, "grad": parameter.grad}
                    arrival = Arrival.of("parameter", mark, step, parameter, arguments=arguments)
                    return self._reports.arrived(arrival)
        return None

    # --- scalers ---------------------------------------------------------------------------------

    def scaled(self, scaler: Any, outputs: Any, scaled: Any) -> None:
        """Note a loss that a scaler has scaled: it handles non-finite gradients itself."""
        if not scaler.is_enabled():
            return
        self._scalers.setdefault(scaler, _Scaling()).is_at_work = True
        is_whole = not any(map(self._marks.of, tensors_in((outputs,))))
        self._overscaled = [ref(item) for item in tensors_in((scaled,))] if is_whole else []

    def updated(self, scaler: Any, site: RawSite, *, is_lower: bool) -> BaseException | None:
        """Count skipped steps; stop if even a loss scale below 1 is too large."""
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
        """Return whether a running scaler will skip the step of a non-finite gradient."""
        at_work = [item for item in self._scalers.values() if item.is_at_work]
        for item in at_work:
            item.mark = mark
        return bool(at_work)

    def is_overscaled(self, tensor: Tensor) -> bool:
        """Return whether a scaled loss was finite before scaling."""
        return any(item() is tensor for item in self._overscaled)


@dataclass
class _Scaling:
    """State of one gradient scaler."""

    is_at_work: bool = False
    """True between ``scale`` and ``update``."""
    mark: NonFiniteTensor | None = None
    """The mark of its last non-finite gradient."""
    skipped: int = 0
    """How many steps in a row it has skipped."""


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, Tensor) and parameter.grad is not None:
                yield parameter


def _state_of(optimizer: Any, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a parameter, and its optimizer state of the same shape, such as a moment."""
    yield "", parameter
    for name, item in optimizer.state.get(parameter, {}).items():
        if isinstance(item, Tensor) and item.shape == parameter.shape and type(name) is str:
            yield name, item


def _path_of(optimizer: Any) -> str:
    kind = type(optimizer)
    name = kind.__qualname__
    return f"torch.optim.{name}" if kind.__module__.startswith("torch.optim.") else name
