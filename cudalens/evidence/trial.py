"""Try a fix at the API: call the failing function again, on copies.

A fix of a shape must also succeed with other sizes of the data.  A single call on copies is in
``attempt.py``, the choice of fixes in ``diagnosis/candidates.py``.
"""

from __future__ import annotations

import functools
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core._python import raise_if_outside
from cudalens.core.call import ApiCall, Call, OpCall
from cudalens.core.user_objects import is_module, is_tensor
from cudalens.diagnosis.candidates import TrialResult
from cudalens.diagnosis.user_code import Fix
from cudalens.evidence.attempt import (
    Attempt,
    CannotTryError,
    RefusedError,
    Resize,
    TooLargeError,
    is_torchs,
    tensors_in,
)
from cudalens.evidence.call_stack import tensors_and_modules
from cudalens.evidence.failing_call import (
    call_of,
    is_known,
    learn_from_error,
    running_api_call,
)
from cudalens.evidence.variables import RunningLine, Variables, line_of
from cudalens.source.safe_eval import instance_dict

MAX_SECONDS = 0.5
"""CPU time of this thread, so that a busy machine does not change which fix is shown."""


class ApiTrial(Variables):
    """Tries changes of the failing API call, on copies.

    Args:
        call: the call, with the operands of the user's line.
        line: that line.
        has_autograd: whether autograd may record the calls; inside a guard's kernel it may not.
    """

    is_possible = True
    """False under autocast, which does not apply to copies on the CPU."""

    def __init__(self, call: Call, line: RunningLine, *, has_autograd: bool) -> None:
        super().__init__(call, line)
        self._has_autograd = has_autograd
        self._deadline: float | None = None
        self._reasons: dict[int, str | None] = {}
        self._succeeded: ApiCall | None = None

    def __call__(self, fix: Fix | None) -> TrialResult:
        """Make the call with a fix, or unchanged without one.

        A changed option belongs to the function that takes it, which may be inside a module's call.
        """
        result = TrialResult()
        for api in (*self.call.enclosing, self.call.api):
            if api is None or not self.is_possible or not self._is_failing(api):
                continue
            if self._deadline is None or time.thread_time() > self._deadline:
                break
            result = self._run(api, fix)
            self._succeeded = api if result.succeeds else None
            is_tried = result.succeeds is not None
            if result.succeeds or (is_tried and (fix is None or fix.rearrange is None)):
                break
        return result

    def _is_failing(self, api: ApiCall) -> bool:
        """Return whether the unchanged call fails, too: else a success proves nothing."""
        if id(api) not in self._reasons:
            result = self._run(api, None)
            self._reasons[id(api)] = (result.error or "") if result.succeeds is False else None
            self._deadline = self._deadline or time.thread_time() + MAX_SECONDS
        return self._reasons[id(api)] is not None

    def _run(self, api: ApiCall, fix: Fix | None) -> TrialResult:
        if not is_known([*api.args, *api.kwargs.values()]) or not is_torchs(api.func):
            return TrialResult()
        with quiet_torch(has_autograd=self._has_autograd):
            # Meta kernels check less, so they only serve for tensors that are too large to copy.
            for on_meta in (False, True):
                attempt = self._attempt(on_meta=on_meta)
                try:
                    result = attempt.run(api, fix)
                except TooLargeError:
                    continue
                except (CannotTryError, MemoryError, RecursionError):
                    return TrialResult()
                except RefusedError:
                    return TrialResult(succeeds=False)
                except Exception as error:  # any error of torch's
                    raise_if_outside(error)
                    # Without numbers, which change with every shape.
                    reason = f"{type(error).__name__}: {re.sub(r'[0-9]+', '#', str(error))}"
                    return TrialResult(succeeds=False, error=reason)
                shape = tuple(result.shape) if is_tensor(result) else None
                return TrialResult(succeeds=True, shape=shape)
        return TrialResult()

    def _attempt(self, *, on_meta: bool, resize: Resize | None = None) -> Attempt:
        return Attempt(
            self.call.operands,
            self.evaluator,
            self.line.running.node,
            on_meta=on_meta,
            resize=resize,
        )

    # --- another batch ---------------------------------------------------------------------------

    def survives(self, fix: Fix, dims: int) -> bool:
        """Return whether a fix that succeeds also does so with other sizes of the data.

        True if the shapes depend on values, so that other sizes cannot be tried.

        Args:
            dims: how many dimensions may be the batch dimension.
        """
        api, start = self._succeeded, time.thread_time()
        if api is None:
            return False
        survives = self._survives(api, fix, dims)
        # The first meta call imports much of torch, so extend the deadline by its time.
        self._deadline = (self._deadline or start) + time.thread_time() - start
        return survives

    def _survives(self, api: ApiCall, fix: Fix, dims: int) -> bool:
        tensors = tensors_in([*api.args, *api.kwargs.values()])
        shapes = [tuple(item.shape) for item in tensors if item.ndim and self._is_data(item)]
        if not shapes or not self._is_possible(api, fix, Resize(0, -1, self._is_data)):
            return True
        batches = [shape[0] for shape in shapes if shape[0] > 1 and shapes[0][0] % shape[0] == 0]
        batch = min(batches, default=shapes[0][0])
        sizes = {(0, batch)}
        if "#D" in (self._reasons[id(api)] or "") and "unsqueeze(0)" in str(fix.changes):
            sizes = set()  # the function takes no such rank, so there is no batch
        if dims > 1:
            sizes |= {
                (1, item[1]) for item in shapes if len(item) > 2 and item[1] not in (1, batch)
            }
        # The batch of a written value is another dimension of the target.
        is_written = getattr(api.func, "__name__", "").strip("_") == "setitem"
        sizes = {(0, shapes[-1][0])} if is_written else sizes
        resizes = [Resize(*item, self._is_data, is_written) for item in sizes]
        return all(self._is_possible(api, fix, item) for item in resizes)

    def _is_possible(self, api: ApiCall, fix: Fix, resize: Resize) -> bool:
        with quiet_torch(has_autograd=self._has_autograd):
            try:
                self._attempt(on_meta=True, resize=resize).run(api, fix)
            except Exception as error:
                raise_if_outside(error)
                return False
        return True

    def _is_data(self, tensor: Tensor) -> bool:
        """Return whether a tensor is data: no parameter, no buffer, and no slice of one."""
        is_leaf = tensor.requires_grad and tensor.is_leaf
        return not is_leaf and tensor.untyped_storage().data_ptr() not in self._state

    @functools.cached_property
    def _state(self) -> frozenset[int]:
        """The storage addresses of all parameters and buffers of modules on the stack."""
        frames = [self.line.frame, *self.line.below]
        found = tensors_and_modules(frame.f_locals for frame in frames)
        objects: list[object] = []
        for module in [*(value for _, value in found), self.line.module]:
            if is_module(module):
                for part in module.modules():
                    objects += [*instance_dict(part).values(), *part.parameters(False)]
                    objects += part.buffers(False)
        return frozenset(
            item.untyped_storage().data_ptr()
            for item in objects
            if is_tensor(item) and _torch.is_plain(item)
        )


@contextmanager
def quiet_torch(*, has_autograd: bool) -> Iterator[None]:
    """Run torch without modes or warnings, and restore the random state."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        # Only the CPU's generator, because all copies are there.
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(_torch.no_dispatch_modes())
        if has_autograd:
            stack.enter_context(_torch.no_torch_function())
            stack.enter_context(torch.enable_grad())
        else:
            stack.enter_context(_torch.plain_torch())
        yield


def trial_of_error(
    error: BaseException, entries: Sequence[TracebackType], raised: ApiCall | None
) -> ApiTrial | None:
    """Return the trial for the call that raised, ``None`` if the user's line cannot be read.

    Args:
        raised: the call, if it was recorded.
    """
    line = line_of(entries)
    if line is None:
        return None
    learn_from_error(line, error)
    trial = ApiTrial(call_of(entries, line, raised), line, has_autograd=True)
    trial.is_possible = "autocast" not in str(error)
    return trial


def call_of_finding(frames: Sequence[FrameType], op: OpCall) -> tuple[Call, RunningLine] | None:
    """Return the call with the finding, and the user's line that makes it."""
    line = line_of(frames)
    return None if line is None else (call_of(frames, line, running_api_call(), op), line)
