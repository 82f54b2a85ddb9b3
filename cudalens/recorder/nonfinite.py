"""Watch for NaN and infinity: mark the result of each call that makes one, stop where one matters.

A result is judged by its sum: one reduction, one number for the host.  The values are read only if
the sum is not finite.  A call with non-finite values in its result and none in its inputs is a
*maker*.  Its result is marked, and the mark follows the values from call to call.  The program is
stopped at a *sink*: the loss, the gradient or the value of a parameter, a NaN that the host reads.
A value that ``where`` discards reaches no sink.

Marks hold weak references, so no tensor is kept alive.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core.torch_functions import Trait, functions
from cudalens.recorder._torch import physical
from cudalens.recorder.arguments import named_arguments
from cudalens.recorder.calls import FROM_PYTHON, Api, Write
from cudalens.recorder.nonfinite_inputs import at_fault
from cudalens.recorder.nonfinite_marks import (
    Arrival,
    Maker,
    MakerKind,
    NonFiniteTensor,
    NonFiniteTensors,
    Reports,
    Sink,
    Step,
)
from cudalens.recorder.nonfinite_passes import PassNotes, leaves_of
from cudalens.recorder.nonfinite_steps import StepWatch
from cudalens.recorder.nonfinite_values import (
    floats,
    is_discarded_at,
    is_finite,
    is_surely_finite,
    item_of_list,
    nonfinite,
    of_saved_nan,
    saved_nonfinite,
    suspects,
    violation_of_call,
    violation_of_gradient,
    violation_of_input,
    violation_of_node,
)
from cudalens.recorder.sites import RawSite
from cudalens.recorder.tensor_refs import NO_TENSORS, tensors_in

_MAX_MAKERS = 16
"""How many makers of one backward pass are kept."""
_RENEWING = functions(Trait.OVERWRITES) | functions(Trait.RENEWS)
"""In-place functions whose result does not depend on the old values."""
_READS = functions(Trait.READS)
_SHELL = "IPython/core/displayhook.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedCall:
    """A call with a non-finite result."""

    api: Api
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: Sequence[Tensor]
    """Its floating-point inputs that it has not overwritten."""
    lost: set[int]
    """The ``id`` of each tensor that it has written to."""
    results: Any
    step: Step


@dataclass(frozen=True, kw_only=True, slots=True)
class BadResult:
    """A non-finite result."""

    tensor: Tensor
    values: Tensor
    """Its values, as a plain tensor."""
    bad: Tensor
    """True where they are not finite."""
    has_nan: bool
    old: NonFiniteTensor | bool
    """Whether the values that it has overwritten were finite, or their mark."""


class NonFiniteWatch:
    """Judge each finished call; return the exception that it must raise.

    Args:
        reports: makes the reports.
        recorder: returns the recorder that calls it.
        is_strict: stop at the first maker, whether or not its values reach a sink.
    """

    def __init__(
        self, reports: Reports, recorder: Callable[[], Any], *, is_strict: bool = False
    ) -> None:
        self._reports = reports
        self._recorder = recorder
        self.is_strict = is_strict
        self._marks = NonFiniteTensors(recorder)
        self.marked = self._marks.bad
        """The non-finite tensors, by the ``id`` of their weak references."""
        self.steps = StepWatch(self._marks, reports)
        self._before: dict[int, NonFiniteTensor | bool] = {}
        """By ``id`` of the tensors that the running call writes to: whether they were finite, or
        their marks."""
        self.late: BaseException | None = None
        """A finding in the last value of a cell, to be raised when the cell ends."""

    # --- calls -----------------------------------------------------------------------------------

    def before(self, api: Api, args: tuple[Any, ...]) -> None:
        """Check the values that an in-place call is about to overwrite, unless they are known."""
        is_renewed = not api.is_in_place or api.is_view or api.stem in _RENEWING
        if is_renewed or self.steps.is_inside or not args:
            return
        self._before = {}
        # `torch._foreach_add_` and its like write to each tensor of a list.
        targets = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
        for item in targets:
            if isinstance(item, Tensor):
                is_known = self._marks.was_finite(item)
                mark = None if is_known else _torch.without_modes(self._marks.of, item)
                self._before[id(item)] = is_known if mark is None else mark

    def __call__(
        self,
        api: Api,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        result: Any,
        written: Sequence[Write],
    ) -> BaseException | None:
        """Judge one call: it has made its bad values, or passed them on."""
        # The common cases first, since every call pays for these checks.
        kind = result.__class__
        if not api.makes_values:
            if api.is_view:
                self._marks.mark_view(args, result)
            return None
        if kind is Tensor and not _torch.has_dispatch_modes() and is_surely_finite(result):
            self._marks.last = ref(result)
            if written or self.marked:
                self._marks.forget(result)
                if any(write.tensor() is result for write in written):
                    self._marks.keep_finite(result)
            return None
        self._marks.last = None
        if api.stem in _READS:
            return self.read(api, args, result)
        if kind in NO_TENSORS and not written:
            return None
        overwritten = [item for write in written if (item := write.tensor()) is not None]
        look = self._judge
        return _torch.without_modes(look, api, args, kwargs or {}, result, overwritten)  # type: ignore[no-any-return]

    def let_go(self) -> None:
        """Forget all tensors."""
        self._marks.let_go()
        self.steps.let_go()

    def _judge(
        self,
        api: Api,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        written: Sequence[Tensor],
    ) -> BaseException | None:
        before, self._before = self._before, {}
        # Running statistics are written besides a result.
        beside = written if result is None or api.has_statistics else ()
        results = floats((result, *beside))
        found = list(nonfinite(results))
        is_bad = {id(tensor) for tensor, _, _ in found}
        given = {id(item) for item in tensors_in([kwargs.get("out")])}
        lost = {id(item) for item in written} | given
        # A finite result clears the mark of an overwritten tensor, and is remembered as finite.
        for tensor in results:
            if id(tensor) not in is_bad:
                self._marks.forget(tensor)
                self._marks.last = ref(tensor)
                if id(tensor) in lost:
                    self._marks.keep_finite(tensor)
        if not found:
            return None
        call = JudgedCall(
            api=api,
            args=args,
            kwargs=kwargs,
            inputs=[item for item in floats((*args, *kwargs.values())) if id(item) not in lost],
            lost=lost,
            results=written if result is None else result,
            step=self._step(api),
        )
        for tensor, values, bad in found:
            # For an in-place call that keeps old values, these may be the bad ones.
            is_renewed = id(tensor) not in lost - given or api.stem in _RENEWING
            if api.stem == "copy_":
                # As ``p.copy_(p.detach())``: what it reads may have been bad before the call.
                sources = tensors_in((*args[1:], *kwargs.values()))
                is_renewed &= not any(_torch.shares_storage(item, tensor) for item in sources)
            old = True if is_renewed else before.get(id(tensor), False)
            has_nan = bool(values.isnan().any())
            one = BadResult(tensor=tensor, values=values, bad=bad, has_nan=has_nan, old=old)
            error = self._judge_result(call, one)
            if id(tensor) in lost:
                self._marks.mark_whole(tensor)
            if error is not None:
                return error
        return None

    def _judge_result(self, call: JudgedCall, result: BadResult) -> BaseException | None:
        """Judge one non-finite result: find its maker, or the input that it came from."""
        api, inputs, lost, step = call.api, call.inputs, call.lost, call.step
        tensor, has_nan, old = result.tensor, result.has_nan, result.old
        if any("torch/utils/data/" in name for name in _files()):
            # A loader makes a batch.  Bad values in the raw data are reported where the batch is
            # first read.  Values that the dataset computed are reported by their maker.
            known = filter(None, map(self._marks.of, inputs))
            if (made_here := next((m for m in known if m.maker.kind == "made"), None)) is not None:
                self._marks.pass_on(tensor, made_here, step, has_nan=has_nan)
                return None
            if not inputs or not all(map(is_finite, inputs)):
                return None
        given = (*call.args, *call.kwargs.values())
        numbers = [item for item in given if isinstance(item, float)]
        if api.stem in FROM_PYTHON or not all(map(math.isfinite, numbers)):
            # Intended, as in ``masked_fill(mask, -inf)``.  A NaN among the inputs is passed on.
            marks = [mark for item in inputs if (mark := self._marks.of(item)) is not None]
            nan_marks = [mark for mark in marks if mark.has_nan]
            if nan_marks:
                self._marks.pass_on(tensor, nan_marks[0], step, has_nan=has_nan)
            else:
                self._marks.mark(tensor, Maker("asked", step, has_nan), has_nan=has_nan)
            return None
        bad_inputs = self._bad_inputs(call)
        with_nan = [mark for mark in bad_inputs if mark.has_nan]
        # A NaN made from infinities is new. An infinity made from infinities is not.
        is_new = old is True and not (with_nan if has_nan else bad_inputs)
        if is_new:
            # The NaN began with an infinity that a call has made: blame its maker, not this call.
            made = [mark for mark in bad_inputs if mark.maker.kind == "made"]
            if made and not self.is_strict:
                source = at_fault(api, call.args, result.values, result.bad, made)
                self._marks.pass_on(tensor, source, step, has_nan=has_nan)
                return self._parameter(tensor, lost)
            arguments = named_arguments(api.func, call.args, call.kwargs)
            item = item_of_list(api, call.results, tensor)
            violation = violation_of_call(api, arguments, result.values, result.bad, lost, item)
            if self.is_strict:
                return self._reports.stop(arguments, violation)
            case = self._reports.note(arguments, violation)
            maker = Maker("made", step, has_nan, violation, case)
            self._marks.mark(tensor, maker, has_nan=has_nan)
            return self._parameter(tensor, lost)
        candidates = with_nan if has_nan and with_nan else bad_inputs
        if candidates:
            source = at_fault(api, call.args, result.values, result.bad, candidates)
            self._marks.pass_on(tensor, source, step, has_nan=has_nan)
        elif isinstance(old, NonFiniteTensor):
            self._marks.pass_on(tensor, old, step, has_nan=has_nan)
        elif self._marks.of(tensor) is None:
            # It was bad before, or was never checked: the origin is unknown.
            self._marks.mark(tensor, Maker("entered", step, has_nan), has_nan=has_nan)
        return self._parameter(tensor, lost)

    def _bad_inputs(self, call: JudgedCall) -> list[NonFiniteTensor]:
        """Return the marks of the non-finite inputs; mark those that have none yet."""
        marks = []
        for item in call.inputs:
            mark = self._marks.of(item)
            if mark is None or mark.is_of_view:
                values = physical(item)
                bad = ~torch.isfinite(values)
                if not bool(bad.any()):
                    continue
                has_nan = bool(values.isnan().any())
                if mark is not None:
                    mark.has_nan, mark.is_of_view = has_nan, False
                elif self.is_strict:
                    maker = Maker("entered", call.step, has_nan)
                    mark = NonFiniteTensor(ref(item), None, maker, has_nan)
                else:
                    mark = self._enter(call, item, values, bad, has_nan=has_nan)
            marks.append(mark)
        return marks

    def _enter(
        self, call: JudgedCall, tensor: Tensor, values: Tensor, bad: Tensor, *, has_nan: bool
    ) -> NonFiniteTensor:
        """Mark a tensor that was already non-finite when a call first read it."""
        maker = Maker("entered", call.step, has_nan)
        if has_nan:  # infinities from outside are usually masks
            arguments = named_arguments(call.api.func, call.args, call.kwargs)
            maker.violation = violation_of_input(call.api, arguments, tensor, values, bad)
            maker.case = self._reports.note(arguments, maker.violation)
        return self._marks.mark(tensor, maker, has_nan=has_nan)

    def _parameter(self, tensor: Tensor, lost: set[int]) -> BaseException | None:
        """Stop at a parameter that was written to outside an optimizer."""
        mark = self._marks.of(tensor)
        is_written = id(tensor) in lost and tensor.requires_grad and tensor.is_leaf
        if not is_written or mark is None or mark.maker.kind != "made":
            return None
        return self._arrived("parameter", mark, self._step(None), tensor)

    def _step(self, api: Api | None) -> Step:
        name, site = self._recorder().last_call()
        return Step(name if api is None else api.name, site)

    # --- sinks -----------------------------------------------------------------------------------

    def _arrived(
        self, sink: Sink, mark: NonFiniteTensor, step: Step, tensor: Tensor | None
    ) -> BaseException | None:
        return self._reports.arrived(Arrival.of(sink, mark, step, tensor))

    def read(
        self, api: Api, args: tuple[Any, ...], result: Any, site: RawSite = None
    ) -> BaseException | None:
        """Stop where the host reads a NaN that a call has made.

        Not at an infinity, which may be a mask.

        Args:
            site: the place of a call that is not recorded.
        """
        if self.is_strict or not self._marks:
            return None
        tensor = args[0] if args else None
        # A float that equals itself is no NaN.
        if not isinstance(tensor, Tensor) or (type(result) is float and result == result):  # noqa: PLR0124
            return None
        mark = _torch.without_modes(self._marks.of, tensor)
        if mark is None or mark.maker.kind != "made" or not mark.has_nan:
            return None
        if mark.is_of_view and not _torch.without_modes(_has_nan, tensor):
            return None
        # Whether IPython's display hook is running, which shows the last value of a cell.
        shown = any(name.endswith(_SHELL) for name in _files())
        step = self._step(api) if site is None else Step(api.name, site)
        error = self._arrived("result" if shown else "read", mark, step, tensor)
        if shown:  # IPython prints an exception of its display hook, and goes on
            self.late = self.late or error
            return None
        return error

    def of_guard(self, name: str, tensor: Tensor, site: RawSite) -> BaseException | None:
        """Return the exception for a NaN in the arguments of a guarded op, if its maker is known.

        Args:
            name: the guarded op.
        """
        mark = None if self.is_strict else self._marks.of(tensor)
        if mark is None or not mark.has_nan:
            return None
        if mark.maker.kind == "asked" or mark.maker.violation is None:
            return None
        return self._arrived("guard", mark, Step(name, site), tensor)

    def of_loss(self, outputs: Iterable[Any], site: RawSite) -> BaseException | None:
        """Stop where ``backward`` is called on non-finite values."""
        self.steps.reset()
        if self.is_strict:
            return None
        if not _torch.has_dispatch_modes():
            with _torch.Unseen():
                outputs = suspects(item for item in outputs if isinstance(item, Tensor))
        return _torch.without_modes(self._loss, list(outputs), site) if outputs else None

    def _loss(self, outputs: Sequence[Any], site: RawSite) -> BaseException | None:
        for tensor, values, _ in nonfinite(outputs):
            mark = self._marks.of(tensor)
            if self.steps.is_overscaled(tensor):
                continue  # the loss scale is too large: the scaler skips the step and lowers it
            if mark is None:
                has_nan = bool(values.isnan().any())
                mark = self._marks.mark(
                    tensor, Maker("entered", Step("", None), has_nan), has_nan=has_nan
                )
            return self._arrived("loss", mark, Step("torch.Tensor.backward", site), tensor)
        return None

    # --- backward --------------------------------------------------------------------------------

    def of_node(
        self, node: Any, made: Sequence[Any], grads: Sequence[Any], notes: PassNotes
    ) -> BaseException | None:
        """Judge the gradients that a backward node has computed."""
        if not _torch.has_dispatch_modes():
            with _torch.Unseen():
                if not suspects(made):
                    return None
        return _torch.without_modes(self._judge_node, node, made, grads, notes)  # type: ignore[no-any-return]

    def _judge_node(
        self, node: Any, made: Sequence[Any], grads: Sequence[Any], notes: PassNotes
    ) -> BaseException | None:
        inputs, number = floats(grads), node._sequence_nr()
        condition, taken_if = notes.conditions.get(number, (None, True))
        # If a bad gradient came in, this node is not the maker.
        if (given := next(nonfinite(inputs), None)) is not None:
            self._note_given(node, given, notes)
            return None
        for at, item in enumerate(made):
            for _, values, bad in nonfinite((item,) if item is not None else ()):
                if len(notes.makers) >= _MAX_MAKERS:
                    return None
                notes.nodes.add(number)
                violation = violation_of_node(node, values, bad, inputs)
                # NaN where `where` discards the result: 0 * inf. The report then says so.
                if condition is not None and len(inputs) == 1:
                    taken = condition if taken_if else ~condition
                    is_discarded = is_discarded_at(bad, physical(inputs[0]), physical(taken))
                    violation = replace(violation, is_discarded=is_discarded)
                arguments = {"gradient": inputs[0]} if inputs else {}
                if self.is_strict:
                    return self._reports.stop(arguments, violation, condition)
                has_nan = bool(values.isnan().any())
                saved = None
                if not violation.is_discarded:
                    saved = saved_nonfinite(node, violation.inputs)
                # Bad values from forward have a maker there, which is the better report.
                mark = None if saved is None else self._mark_in_forward(node)
                if mark is not None:
                    notes.makers.append((mark.maker, mark.way, leaves_of(node, at)))
                    continue
                kind: MakerKind = "made"
                if saved == "nan":
                    kind, violation = "entered", of_saved_nan(violation)
                case = self._reports.note(arguments, violation, condition)
                maker = Maker(kind, Step(violation.op, None), has_nan, violation, case)
                notes.makers.append((maker, (), leaves_of(node, at)))
        return None

    def _note_given(
        self, node: Any, given: tuple[Tensor, Tensor, Tensor], notes: PassNotes
    ) -> None:
        """Note a non-finite gradient that reached a node, if no node before has made one.

        Then a hook has made it, or it was passed to ``backward``.
        """
        if notes.makers or self.is_strict:
            return
        gradient, values, bad = given
        violation = violation_of_gradient(node, values, bad)
        case = self._reports.note({"gradient": gradient}, violation)
        has_nan = bool(values.isnan().any())
        maker = Maker("entered", Step(violation.op, None), has_nan, violation, case)
        for at in range(len(node.next_functions)):
            notes.makers.append((maker, (), leaves_of(node, at)))

    def _mark_in_forward(self, node: Any) -> NonFiniteTensor | None:
        """Return the mark behind the inputs and outputs of a node's forward call, if it is unique.

        Without NaN, only values that a call has made count: an intended infinity is a mask, and a
        NaN that the node makes of it is the node's own.
        """
        call = self._recorder().snapshot().forward_call(node._sequence_nr())
        tensors = () if call is None else (*call.inputs, *call.outputs)
        marks = [mark for item in tensors if (mark := self._marks.bad.get(id(item))) is not None]
        nan = [it for it in marks if it.has_nan]
        made = [it for it in marks if it.maker.kind == "made"]
        makers = {id(it.maker): it for it in nan or made}
        return next(iter(makers.values())) if len(makers) == 1 else None

    def of_pass(self, notes: PassNotes, result: Any, site: RawSite) -> BaseException | None:
        """Stop after a backward pass that has left non-finite gradients."""
        if self.is_strict or not notes.makers:
            return None
        return _torch.without_modes(self._judge_pass, notes, result, site)  # type: ignore[no-any-return]

    def _judge_pass(self, notes: PassNotes, result: Any, site: RawSite) -> BaseException | None:
        step = Step("torch.autograd.backward", site)
        for tensor, values, _ in nonfinite(tensors_in((result,))):  # of torch.autograd.grad
            has_nan = bool(values.isnan().any())
            maker, way, _ = notes.makers[0]
            self._marks.mark(tensor, maker, has_nan=has_nan, way=(*way, step))
        for maker, way, leaves in notes.makers:
            for leaf in leaves:
                parameter = leaf()
                grad = None if parameter is None else parameter.grad
                for own, values, _ in nonfinite(() if grad is None else (grad,)):
                    has_nan = bool(values.isnan().any())
                    mark = self._marks.mark(own, maker, has_nan=has_nan, way=(*way, step))
                    if not self.steps.leaves_to_scaler(mark):
                        is_alone = len(notes.nodes) < 2
                        arrival = Arrival.of("gradient", mark, step, parameter, is_alone=is_alone)
                        return self._reports.arrived(arrival)
        return None


def _has_nan(tensor: Tensor) -> bool:
    return any(bool(physical(item).isnan().any()) for item in floats((tensor,)))


def _files() -> Iterator[str]:
    # Skip this generator and the one in `any`.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_filename.replace("\\", "/")
        frame = frame.f_back
