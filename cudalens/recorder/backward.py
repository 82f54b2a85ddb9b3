"""A backward pass: the running autograd node, the node that failed, the node that made a NaN.

``Tensor.backward``, ``torch.autograd.backward`` and ``torch.autograd.grad`` all end in one
function, which is replaced while a recorder is open.  The sequence number of a node identifies its
forward call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch.autograd.function import FunctionCtx

from cudalens.core._python import raise_if_outside
from cudalens.core._torch import Unseen, current_node
from cudalens.core.call import ApiCall, NodeMark
from cudalens.core.evidence_types import SavedValues
from cudalens.recorder import _torch
from cudalens.recorder.nonfinite_passes import PassNotes, keep_condition
from cudalens.recorder.nonfinite_values import saved_values
from cudalens.recorder.sites import Site

_PASSING_ON = (
    *("AddBackward", "AliasBackward", "CatBackward", "CloneBackward", "NegBackward"),
    *("PermuteBackward", "ReshapeAliasBackward", "SelectBackward", "SliceBackward"),
    *("SplitBackward", "SqueezeBackward", "StackBackward", "SubBackward", "TBackward"),
    *("TransposeBackward", "UnbindBackward", "UnsafeViewBackward", "UnsqueezeBackward"),
    *("ViewBackward", "AccumulateGrad"),
    *("ClampBackward1", "IndexAddBackward", "MeanBackward", "ReluBackward", "SumBackward"),
)
"""Nodes that turn finite gradients into finite gradients."""

_UNMARKED = (
    *("TBackward", "TransposeBackward", "PermuteBackward", "SqueezeBackward", "UnsqueezeBackward"),
    *("AliasBackward", "AccumulateGrad"),
)
"""Nodes that need no mark, because they cannot fail on the device: they return a view of their
gradient, or accumulate it.  A mark on ``AccumulateGrad`` would cost as much as seven others.
"""


class _Kind(NamedTuple):
    """The hooks that a class of autograd nodes needs."""

    has_mark: bool
    has_look: bool
    """True if a watch checks its gradients."""
    is_where: bool = False


class _Kinds(dict[type[Any], _Kind]):
    """Cache from node class to the hooks that it needs."""

    def __missing__(self, node_class: type[Any]) -> _Kind:
        if issubclass(node_class, FunctionCtx):  # a class of the user's may have any name
            # Not cached: the table outlives the block, and would keep the user's class alive.
            return _Kind(has_mark=True, has_look=True)
        name = node_class.__name__
        has_mark, has_look = not name.startswith(_UNMARKED), not name.startswith(_PASSING_ON)
        kind = _Kind(has_mark, has_look, is_where=name.startswith("WhereBackward"))
        self[node_class] = kind
        return kind


_KINDS = _Kinds()


class BackwardPass:
    """One run of autograd's engine, observed by one recorder."""

    site: Site | None = None
    """The place that started it."""
    fault: NodeMark | None = None
    """The node that was running when the device failed."""
    finding: BaseException | None = None
    """The finding of a NaN or infinity, raised once the engine has returned."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self.notes = PassNotes()
        self._saved: dict[int, tuple[SavedValues, ...]] = {}
        """In anomaly mode: by thread, the saved tensors of the running node."""
        self._is_anomalous = torch.is_anomaly_enabled()
        self.marks: dict[int, Any] = {}
        """By thread, the running node.  Replaced when the next one starts: a node keeps alive what
        a checkpoint or a custom Function has saved."""

    def run_backward(self, run: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the engine with a hook before each node that marks it as running."""
        __tracebackhide__ = True
        recorder = self._recorder
        undo: list[Callable[[], object]] = []
        # On: the user called the engine's entry directly.  Off: a recorded API call led here, and
        # torch has popped the mode for it.
        is_inside = recorder.is_on()
        recorder.passes.append(self)
        try:
            try:
                self.site = recorder.sites.enter_backward(sys._getframe())
                with Unseen():
                    # The engine takes `retain_graph` as its third argument by position, behind the
                    # gradients.
                    self._register(outputs, args[1] if len(args) > 1 else True, undo)
            except Exception as trouble:
                recorder.internal_error("a backward pass was not noted", trouble)
            # A pass inside another one belongs to a checkpoint or a hook, and starts from no loss.
            if len(recorder.passes) == 1:
                self._watch("of_loss", _listed(outputs), self.site)
            if not is_inside:  # checkpoints, custom Functions and hooks call the API in backward
                recorder.install()
            try:
                result = run(outputs, *args, **kwargs)
                # Kernels of the last nodes may still run, and a fault of theirs belongs to this
                # pass.
                recorder.wait_for_all()
                if is_inside:
                    recorder.note_call(torch.autograd.backward, sys._getframe(1))
            except BaseException as error:
                # A local variable, because the recorder holds the call weakly.
                _held = self._failed(error, outputs if is_inside else None)
                raise
            finally:
                if not is_inside:
                    recorder.remove()
            self._watch("of_pass", self.notes, result, self.site)
            return result
        except BaseException:
            outputs, args, kwargs, result, run = None, (), {}, None, None  # type: ignore[assignment]
            raise
        finally:
            recorder.passes.remove(self)
            for step in undo:
                step()
            self.marks.clear()
            self.finding = None

    def _watch(self, look: str, *args: Any) -> None:
        """Show the watch the inputs or results of the pass; raise its finding."""
        __tracebackhide__ = True
        watch = getattr(self._recorder.watch, look, None)
        if watch is not None and self.finding is None:
            try:
                self.finding = watch(*args)
            except Exception as trouble:
                self._recorder.internal_error("a gradient was not looked at", trouble)
        if self.finding is not None:
            raise self.finding

    def _register(self, outputs: Any, is_kept: bool, undo: list[Callable[[], object]]) -> None:
        """Register a hook with each node of the graph that marks it before it runs.

        Args:
            is_kept: whether the graph may run again (``retain_graph``).
            undo: receives the functions that remove the hooks.
        """
        recorder = self._recorder
        watch, mark = getattr(recorder.watch, "of_node", None), self._mark
        if recorder.devices and recorder.is_synchronous:
            mark = self._wait_and_mark
        look = look_where = None
        if watch is not None:
            look, look_where = partial(self._look, watch), partial(self._look_at_where, watch)
        before_node, remove = _torch.before_nodes(mark)
        undo.append(remove)
        outputs = _listed(outputs)
        # An output may be a `GradientEdge`, which has a node and no `grad_fn`.
        nodes = [getattr(item, "grad_fn", None) or getattr(item, "node", None) for item in outputs]
        seen: set[Any] = set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            for following, _ in node.next_functions:
                nodes.append(following)
            kind = _KINDS[node.__class__]
            # The fast hooks cannot be removed, so a graph that is kept gets ordinary ones.
            if kind.has_mark and is_kept:
                undo.append(node.register_prehook(mark).remove)
            elif kind.has_mark:
                before_node(node)
            if look is not None and kind.has_look:
                undo.append(node.register_hook(look_where if kind.is_where else look).remove)

    def _mark(self, grads: Any) -> None:
        """Mark the node that is about to run on this thread."""
        node = self.marks[get_ident()] = current_node()
        if self._is_anomalous:
            with Unseen():
                self._saved[get_ident()] = saved_values(node)

    def _wait_and_mark(self, grads: Any) -> None:
        """Wait for the kernels of the previous node, then mark the next one.

        An exception here, on a thread of autograd's, can end the process.  So a fault is only
        recorded: torch raises it at its next call.
        """
        recorder = self._recorder
        # After a fault, each wait would raise it again, and the first node is the one at fault.
        if self.fault is None:
            try:
                recorder.wait_for_all()
            except Exception as error:
                raise_if_outside(error)
                self.fault = NodeMark.of(self.marks.get(get_ident()) or current_node())
                recorder.note_end(error, ApiCall(func=None, site=self.site, node=self.fault))
        self._mark(grads)

    def _look(self, watch: Callable[..., BaseException | None], made: Any, inputs: Any) -> None:
        """Show the watch the gradients that the running node has computed."""
        if self.finding is None:
            try:
                self.finding = watch(current_node(), made, inputs, self.notes)
            except Exception as trouble:
                self._recorder.internal_error("a gradient was not looked at", trouble)

    def _look_at_where(self, watch: Callable[..., BaseException | None], *args: Any) -> None:
        """Check the gradients of a ``where``, and keep its condition for the nodes that follow."""
        if self.finding is None:
            try:
                keep_condition(current_node(), self.notes)
            except Exception as trouble:
                self._recorder.internal_error("a condition was not kept", trouble)
        self._look(watch, *args)

    @property
    def running(self) -> NodeMark | None:
        """The node that raised: this thread's, or else the only one that runs."""
        if self.fault is not None:
            return self.fault
        nodes = list(self.marks.values())
        # A node for a GPU runs on a thread of autograd's, and its exception is raised on the thread
        # that called `backward`.
        mark = NodeMark.of(self.marks.get(get_ident()) or (nodes[0] if len(nodes) == 1 else None))
        saved = self._saved.get(get_ident(), ())
        return mark._replace(saved=saved) if mark is not None and saved else mark

    def _failed(self, error: BaseException, outputs: Any) -> ApiCall | None:
        """Record which node raised an exception; return its call, for the frame to keep alive.

        Args:
            outputs: the outputs of a call that no function mode saw.  ``None`` where one did: the
                mode gets the exception next.
        """
        call = None
        try:
            call = self._recorder.call_of(error)
            if call is None:
                func = None if outputs is None else torch.autograd.backward
                call = ApiCall(func=func, args=(outputs,), site=self.site, node=self.running)
                self._recorder.attach(call, sys._getframe(1))
            elif call.node is None:
                call.node = self.running
        except Exception as trouble:
            self._recorder.internal_error("the failing node was not noted", trouble)
        return call


def _listed(outputs: Any) -> Sequence[Any]:
    return outputs if isinstance(outputs, (list, tuple)) else (outputs,)
