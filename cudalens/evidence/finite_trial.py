"""Try an edit that should keep values finite: forward and backward of a call or node, on copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cudalens.core._python import raise_if_outside
from cudalens.core.call import ApiCall, Call
from cudalens.core.torch_functions import Trait, functions
from cudalens.diagnosis.user_code import Fix
from cudalens.evidence.attempt import MAX_VALUES, is_torchs, tensors_in
from cudalens.evidence.failing_call import is_known
from cudalens.evidence.trial import MAX_SECONDS, ApiTrial, quiet_torch
from cudalens.evidence.variables import RunningLine
from cudalens.recorder._torch import autograd_of_copies, gradients, physical
from cudalens.recorder.nonfinite_values import floats


class RunningNode(NamedTuple):
    """A backward node that has made non-finite values."""

    node: Any
    gradient: Tensor
    condition: Tensor | None
    """The condition of the ``where`` that read the function's result."""


class FiniteTrial(ApiTrial):
    """Tries changes of a call with a non-finite result, on copies.

    Args:
        call: the call, with the operands of the user's line.
        line: that line.
        node: the backward node to try instead, if it made the values.
    """

    def __init__(self, call: Call, line: RunningLine, node: RunningNode | None = None) -> None:
        super().__init__(call, line, has_autograd=False)
        self._node_run = None if node is None else _NodeCopy(node)
        self._is_bad_again: bool | None = None
        self._ends: float | None = None
        self.is_bad_before = False
        """True if the inputs were non-finite already, so that no edit of the call helps."""

    def makes_finite(self, fix: Fix) -> bool:
        """Return whether values and gradients are finite with an edit, and are not without it."""
        self._ends = self._ends or time.thread_time() + MAX_SECONDS
        if self.is_bad_before or time.thread_time() > self._ends:
            return False
        if self._is_bad_again is None:
            self._is_bad_again = self._is_finite(None) is False
        return self._is_bad_again and self._is_finite(fix) is True

    def _is_finite(self, fix: Fix | None) -> bool | None:
        try:
            with _trying():
                if self._node_run is not None:
                    return self._node_run(fix)
                return self._of_call(self.call.api, fix)
        except Exception as error:  # it cannot be tried, for any reason
            raise_if_outside(error)
            return None

    def _of_call(self, api: ApiCall | None, fix: Fix | None) -> bool | None:
        if api is None or not is_known([*api.args, *api.kwargs.values()]):
            return None
        if not is_torchs(api.func):
            return None
        attempt = self._attempt(on_meta=False)
        result = attempt.run(api, fix)
        copies = [item for item in tensors_in(attempt.copied()) if item.requires_grad]
        return _are_finite(floats((result,)), copies)


@contextmanager
def _trying() -> Iterator[None]:
    with quiet_torch(has_autograd=True), autograd_of_copies():
        yield


def _are_finite(results: list[Tensor], inputs: list[Tensor], gradient: Any = None) -> bool:
    """Return whether results, and gradients of their sum, are finite."""
    if not results or not all(bool(torch.isfinite(item).all()) for item in results):
        return False
    outputs = [item for item in results if item.grad_fn is not None]
    if not outputs or not inputs:
        return True
    ones = [torch.ones_like(item) for item in outputs] if gradient is None else [gradient]
    made = gradients(outputs, ones, inputs)
    return all(item is None or bool(torch.isfinite(item).all()) for item in made)


# --- a node of a backward pass --------------------------------------------------------------------


def _same(value: Tensor) -> Tensor:
    return value


_INPUTS: Mapping[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "sqrt": ("result", torch.square),
    "rsqrt": ("result", lambda value: value.pow(-2)),
    "reciprocal": ("result", torch.reciprocal),
    "exp": ("result", torch.log),
    "div": ("other", _same),
    "pow": ("self", _same),
    **dict.fromkeys(functions(Trait.LOGARITHM) | functions(Trait.ARC), ("self", _same)),
    **dict.fromkeys(("log1p", "atanh", "acosh"), ("self", _same)),
}
"""By function: the saved tensor of its node, and how to compute the input from it."""


class _NodeCopy:
    """A function, rebuilt from the saved tensors of its node."""

    def __init__(self, running: RunningNode) -> None:
        self._running = running
        self._name = running.node.name().rpartition("::")[2].partition("Backward")[0].lower()

    def __call__(self, fix: Fix | None) -> bool | None:
        """Return whether result and gradient are finite, with an edit of the input."""
        saved, input_of = _INPUTS[self._name]
        given = input_of(self._copy(saved)).requires_grad_()
        edited = given if fix is None else self._edited(fix, given)
        result = self._function(edited)
        gradient = _copy(self._running.gradient).expand(result.shape)
        if fix is None:  # without an edit, only the gradient is known to be non-finite
            (made,) = gradients((result,), (gradient,), (given,))
            return made is not None and bool(torch.isfinite(made).all())
        return _are_finite([result], [given], gradient)

    def _edited(self, fix: Fix, given: Tensor) -> Tensor:
        template = fix.changes[0].template.replace("{x}", "x")
        condition = self._running.condition
        names: dict[str, Any] = {"torch": torch, "x": given, "__builtins__": {}}
        if condition is not None:
            names["condition"] = _copy(condition)
        edited: Tensor = eval(template, names)
        return edited

    def _function(self, value: Tensor) -> Tensor:
        if self._name == "div":
            above = self._copy("self") if self._saved("self") is not None else torch.ones(())
            return above / value
        if self._name == "pow":
            exponent = self._saved("exponent")
            return value ** (_copy(exponent) if isinstance(exponent, Tensor) else exponent)
        result: Tensor = getattr(torch, self._name)(value)
        return result

    def _saved(self, name: str) -> Any:
        return getattr(self._running.node, f"_saved_{name}", None)

    def _copy(self, name: str) -> Tensor:
        return _copy(self._saved(name))


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU."""
    if tensor.numel() > MAX_VALUES:
        raise MemoryError
    return physical(tensor.detach()).cpu().clone()
