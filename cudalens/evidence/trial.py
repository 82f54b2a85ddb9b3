"""Try a fix on copies: the user's running call, changed as the fix says, is evaluated again.

Not here: how an expression is evaluated on copies (``copied_call.py``), and which fixes are tried
(``diagnosis/candidates.py``).
"""

from __future__ import annotations

import ast
import functools
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import CodeType, FrameType, TracebackType

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cudalens.core import _torch
from cudalens.core._python import parse, raise_if_outside
from cudalens.core.evidence_types import Binding
from cudalens.core.report_types import SourceSpan, TensorFact, Violation
from cudalens.core.tensor_values import summarise
from cudalens.diagnosis import candidates
from cudalens.diagnosis.candidates import Collate, Refusal, TrialResult
from cudalens.diagnosis.moves import Called
from cudalens.evidence.collate import collate_fn
from cudalens.evidence.copied_call import (
    CannotTryError,
    CopiedCall,
    RefusedError,
    TooLargeError,
    key_of,
    read,
)
from cudalens.evidence.tensors import bad_key, of_meta, scalars_of, tensors_of_output
from cudalens.recorder.tensor_refs import tensor_values
from cudalens.source.bindings import attribute_binding, binding_of
from cudalens.source.files import is_user_file
from cudalens.source.running_call import ABSENT, RunningCall
from cudalens.source.running_node import Running, running
from cudalens.source.safe_eval import (
    SafeEvaluator,
    evaluator_for,
    instance_dict,
    items_of,
    registered,
)
from cudalens.source.stack import frame_of, place_of

MAX_SECONDS = 0.5
"""Of this thread's own time: what runs beside it does not decide which fix is shown."""
_MAX_DEPTH = 12
_MAX_PARTS = 8
_STORES = ("_modules", "_parameters", "_buffers")


@dataclass(eq=False, kw_only=True)
class CopyTrial(candidates.Trial):
    """The running call of the user's line, ready to be run again with changes, on copies."""

    frame: FrameType
    """The user's, whose names the fixes use."""
    running: Running
    """What it is running."""
    known: Mapping[str, object]
    """Values of parts of it that are not to be computed again, by ``ast.dump``."""
    has_autograd: bool
    """Whether copies may require gradients."""
    below: Sequence[FrameType]
    """The frames that it called."""
    callers: Sequence[FrameType | TracebackType]
    """The user's entries of the stack that led to it, innermost first."""

    def __post_init__(self) -> None:
        self._evaluator: SafeEvaluator = evaluator_for(self.frame)
        self._node = self.running.node
        self._deadline: float | None = None
        self._refused: RefusedError | None = None
        self.refusals: list[Refusal] = []

    def __call__(self, fix: str) -> TrialResult:
        """Run the call as ``fix`` has it: in its place, or after an assignment."""
        if not self._is_failing or self._deadline is None or time.thread_time() > self._deadline:
            return TrialResult()
        try:
            body = parse(fix).body
        except SyntaxError:
            return TrialResult()
        outcome = self._run(body)
        error, self._refused = self._refused, None
        if error is not None and error.violation is not None:
            found = _refusal(fix, error, error.violation)
            self.refusals += [found] if found is not None else []
        return outcome

    @functools.cached_property
    def _is_failing(self) -> bool:
        """Whether the unchanged call fails here too: only then does a success say anything."""
        is_failing = self._node is not None and self._run([]).succeeds is False
        self._deadline = time.thread_time() + MAX_SECONDS
        return is_failing

    def _run(self, body: Sequence[ast.stmt]) -> TrialResult:
        self._refused = None
        with _quiet(has_autograd=self.has_autograd):
            for on_meta in (False, True):
                run = CopiedCall(self._evaluator, self.known, on_meta=on_meta)
                try:
                    result = run.statements(body, self._node)
                except TooLargeError:
                    continue
                except (CannotTryError, MemoryError, RecursionError):
                    return TrialResult()
                except RefusedError as error:
                    self._refused = error.with_traceback(None)
                    return TrialResult(succeeds=False)
                except Exception as error:  # whatever torch, or a guard, says of it
                    raise_if_outside(error)
                    return TrialResult(succeeds=False, error=_reason(error))
                shape = tuple(result.shape) if isinstance(result, Tensor) else None
                return TrialResult(succeeds=True, shape=shape)
        return TrialResult()

    @functools.cached_property
    def operands(self) -> tuple[TensorFact, ...]:  # type: ignore[override]
        """The tensors that the running call works on, each by its text in the call."""
        with _quiet(has_autograd=False):
            return tuple(self._tried())

    def _tried(self) -> Iterator[TensorFact]:
        run = CopiedCall(self._evaluator, self.known, on_meta=True)
        for node in (*_operands(self.running), *self._unpacked()):
            try:
                value = run.value(node)
            except Exception as error:  # it is no operand then
                raise_if_outside(error)
                continue
            if isinstance(value, Tensor):
                meta = replace(_torch.meta_of(value), device=str(run.device_of(value)))
                fact = of_meta(None, meta, ast.unparse(node).replace("'", '"'))
                span = (node.lineno, node.col_offset, node.end_col_offset or 0)
                yield replace(fact, span=span)

    def _unpacked(self) -> Iterator[ast.expr]:
        """Yield what ``**batch`` passes, each entry by its key."""
        for item in getattr(self._node, "keywords", ()):
            entries = [] if item.arg else items_of(read(self._evaluator, item.value), _MAX_PARTS)
            for key, value in entries:
                if isinstance(key, str) and isinstance(value, Tensor):
                    yield parse(f'{ast.unparse(item.value)}["{key}"]').body[0].value  # type: ignore[attr-defined]

    @functools.cached_property
    def others(self) -> tuple[tuple[str, str, tuple[str, ...]], ...]:  # type: ignore[override]
        """Arguments that are no tensors: the text, the kind, and the names of what is in them."""
        found = []
        call = self._node if isinstance(self._node, ast.Call) else None
        keywords = [item.value for item in call.keywords] if call is not None else []
        nodes = _operands(self.running) if call is None else (call, *call.args, *keywords)
        for node in nodes:
            kind, parts = self._kind_of(node)
            if kind is not None:
                found.append((ast.unparse(node), kind, parts))
        return tuple(found)

    def _kind_of(self, node: ast.expr) -> tuple[str | None, tuple[str, ...]]:
        value = self.known.get(key_of(node), ABSENT)
        value = read(self._evaluator, node) if value is ABSENT else value
        if isinstance(node, ast.List):
            is_plain = all(isinstance(item, ast.Constant) for item in node.elts)
            value = [item.value for item in node.elts] if is_plain else ABSENT  # type: ignore[attr-defined]
        called = read(self._evaluator, node.func) if isinstance(node, ast.Call) else None
        if isinstance(called, type) and issubclass(called, nn.Module):
            return "layer", ()
        if isinstance(value, nn.Module):
            return "module", self._tensor_names()
        if value is ABSENT and isinstance(node, ast.Attribute):
            owner = read(self._evaluator, node.value)
            is_method = callable(getattr(Tensor, node.attr, None))
            return ("method" if isinstance(owner, Tensor) and is_method else None), ()
        if results := tensors_of_output(value):
            return "output", tuple(results)
        if type(value) is dict:
            entries = items_of(value, _MAX_PARTS)
            keys = (key for key, item in entries if isinstance(item, Tensor))
            return "mapping", tuple(key for key in keys if isinstance(key, str))
        return _kind(value), ()

    def _tensor_names(self) -> tuple[str, ...]:
        """Name the tensors among the variables of the running code, those of a cell included."""
        names = self.frame.f_locals
        found = [key for key, item in list(names.items()) if isinstance(item, Tensor)]
        return tuple(key for key in found if not key.startswith("_"))[:_MAX_PARTS]

    def binding(self, expression: str) -> Binding | None:
        """Return where a name, or an attribute of a user's module, got its value.

        Of a tensor that was written to since, the binding does not tell what it holds.
        """
        node = parse(expression).body[0]
        target = node.value if isinstance(node, ast.Expr) else None
        value = ABSENT if target is None else read(self._evaluator, target)
        if isinstance(value, Tensor) and (value.is_inference() or value._version):
            return None
        if isinstance(target, ast.Name) and isinstance(value, Tensor | nn.Module):
            return binding_of(self.running, target.id) or self._passed_in(target.id, value)
        owner = read(self._evaluator, target.value) if isinstance(target, ast.Attribute) else None
        if not isinstance(owner, nn.Module) or not isinstance(target, ast.Attribute):
            return None
        made = next(d["__init__"] for k in type(owner).__mro__ if "__init__" in (d := vars(k)))
        code = getattr(made, "__code__", None)
        if not isinstance(code, CodeType) or not is_user_file(code.co_filename):
            return None
        stored = (instance_dict(owner), *(registered(owner, kind) for kind in _STORES))
        return (
            attribute_binding(code, target.attr) if any(target.attr in s for s in stored) else None
        )

    def _passed_in(self, name: str, value: object) -> Binding | None:
        """Return where a caller made an argument of the running function, by the same object."""
        code = self.frame.f_code
        is_cell = code.co_name == "<module>" or name not in code.co_varnames[: code.co_argcount]
        for entry in () if is_cell else self.callers:
            run = running(place_of(entry))
            evaluator = evaluator_for(frame_of(entry))
            nodes = getattr(run.node, "args", []), getattr(run.node, "keywords", [])
            given = (*nodes[0], *(item.value for item in nodes[1]))
            same = [item for item in given if read(evaluator, item) is value]
            if len(same) != 1 or not isinstance(same[0], ast.Name):
                return None
            found = binding_of(run, same[0].id)
            if found is not None:
                return replace(found, name=same[0].id, is_read_again=False, dropped=None)
        return None

    def layer(self, path: str) -> Binding | None:
        """Return what the user calls the module of a path, and where it was made.

        ``None`` unless the running code sees one module only with such a part.
        """
        found: dict[int, tuple[str, nn.Module, nn.Module]] = {}
        for variables in (self.frame.f_locals, self.frame.f_globals):
            for name, value in list(variables.items()):
                if isinstance(value, nn.Module) and not name.startswith("_"):
                    part = dict(_parts(value)).get(path)
                    if part is not None:
                        found.setdefault(id(value), (name, value, part))
        if len(found) != 1:
            return None
        root, model, part = next(iter(found.values()))
        names = [root]
        for key in path.split("."):
            names.append(names[-1] + (f"[{key}]" if key.isdecimal() else f".{key}"))
        made = self.binding(next(item for item in reversed(names) if not item.endswith("]")))
        weight = registered(part, "_parameters").get("weight")
        tied = [
            f"{root}.{at}"
            for at, item in _parts(model)
            if item is not part and registered(item, "_parameters").get("weight") is weight
        ]
        return replace(
            made or Binding(at=SourceSpan()),
            name=names[-1],
            tied=tied[0] if tied and weight is not None else None,
        )

    @functools.cached_property
    def unregistered(self) -> str | None:  # type: ignore[override]
        """The list of the running module that holds the called one without registering it."""
        module, owner = self._module, read(self._evaluator, ast.Name("self", ast.Load()))
        kept = instance_dict(owner).items() if isinstance(owner, nn.Module) else ()
        lists = (key for key, item in kept if type(item) is list and any(i is module for i in item))
        return next((f"self.{key}" for key in lists if module is not None), None)

    @functools.cached_property
    def called(self) -> Called:  # type: ignore[override]
        """What the moves ask of the called module."""
        module = self._module
        if module is None:
            return Called()
        tensors = (*module.parameters(), *module.buffers())
        devices = {str(item.device) for item in tensors}
        flags = [instance_dict(item).get("batch_first") for item in module.modules()]
        return Called(
            device=devices.pop() if len(devices) == 1 else None,
            is_model=not type(module).__module__.startswith("torch.nn.modules."),
            is_batch_second=False in flags and True not in flags,
        )

    @functools.cached_property
    def collate(self) -> Collate | None:  # type: ignore[override]
        """How the samples that a loader could not join make a batch."""
        made = collate_fn(self.frame, self.below)
        if made is None:
            return None
        over = self._node.iter if isinstance(self._node, ast.For) else self._node
        names = [item for item in ast.walk(over or ast.Pass()) if isinstance(item, ast.expr)]
        found = [item for item in names if isinstance(read(self._evaluator, item), DataLoader)]
        loader = ast.unparse(found[0]) if found else None
        return Collate(code=made[0], words=made[1], loader=loader)

    @property
    def _module(self) -> nn.Module | None:
        function = getattr(self._node, "func", None)
        value = None if function is None else self.known.get(key_of(function))
        value = read(self._evaluator, function) if function is not None and not value else value
        return value if isinstance(value, nn.Module) else None


def _refusal(fix: str, error: RefusedError, violation: Violation) -> Refusal | None:
    """Describe what a guard found in a changed call, ``None`` without a tensor at fault."""
    key = bad_key(violation)
    tensor = tensor_values(error.given or {}).get(key)
    if tensor is None or tensor.device.type == "meta":
        return None
    with _quiet(has_autograd=False):
        fact = replace(of_meta(key, _torch.meta_of(tensor)), summary=summarise(tensor))
    return Refusal(fix=fix, violation=violation, fact=fact, scalars=scalars_of(error.given or {}))


def _parts(module: nn.Module, path: str = "", depth: int = 0) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules below one with their paths, by the entries that modules store."""
    for key, item in registered(module, "_modules").items() if depth < _MAX_DEPTH else ():
        if isinstance(item, nn.Module):
            yield f"{path}{key}", item
            yield from _parts(item, f"{path}{key}.", depth + 1)


def _kind(value: object) -> str | None:
    """Return of what kind a value is that a tensor can be made of."""
    if type(value) in (list, tuple) and value:
        has_tensors = all(isinstance(item, Tensor) for item in value)  # type: ignore[attr-defined]
        if type(value) is tuple:
            return "tuple" if isinstance(value[0], Tensor) else None
        return "tensors" if has_tensors else "list"
    name = f"{type(value).__module__}.{type(value).__name__}"
    if name == "numpy.ndarray":
        return name
    is_bound = isinstance(getattr(value, "__self__", None), Tensor)
    return "method" if is_bound and callable(value) else None


def _operands(run: Running) -> Iterator[ast.expr]:
    node = run.node
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            yield node.func.value
        for item in (*node.args, *(keyword.value for keyword in node.keywords)):
            yield from item.elts if isinstance(item, ast.List | ast.Tuple) else (item,)
    elif isinstance(node, ast.BinOp | ast.AugAssign | ast.Subscript):
        yield from RunningCall(run.place, node).operands().values()


def _reason(error: Exception) -> str:
    """Return an error's words without its numbers, which every change of a shape changes."""
    return f"{type(error).__name__}: {re.sub(r'[0-9]+', '#', str(error))}"


@contextmanager
def _quiet(*, has_autograd: bool) -> Iterator[None]:
    """Run torch unseen: no modes, no warnings, no trace in the random state."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(_torch.no_dispatch_modes())
        if has_autograd:
            stack.enter_context(_torch.NoTorchFunction())
            stack.enter_context(torch.enable_grad())
        else:
            stack.enter_context(_torch.plain_torch())
        yield


# --- the running call -----------------------------------------------------------------------------


def trial_of(
    entries: Sequence[FrameType | TracebackType], *, has_autograd: bool
) -> CopyTrial | None:
    """Make the trial of the user's running call, ``None`` where it cannot be read.

    Args:
        entries: the stack, outermost first.
        has_autograd: whether gradients may be recorded, which the call of a guard may not.
    """
    frames = list(map(frame_of, entries))
    users = [at for at, item in enumerate(frames) if is_user_file(item.f_code.co_filename)]
    if not users:
        return None
    *outer, at = users
    run = running(place_of(entries[at]))
    if run.node is None:
        return None
    return CopyTrial(
        frame=frames[at],
        running=run,
        known=_passed(run.node, frames[at + 1 : at + 2]),
        has_autograd=has_autograd,
        below=frames[at + 1 :],
        callers=[entries[i] for i in reversed(outer)],
    )


def _passed(node: ast.AST, callee: Sequence[FrameType]) -> dict[str, object]:
    """Return what a running call passed, read from the frame that it called."""
    if not isinstance(node, ast.Call) or not callee:
        return {}
    code, variables = callee[0].f_code, callee[0].f_locals
    made: dict[str, object] = {}
    args: Sequence[object]
    if code.co_name in ("_wrapped_call_impl", "_call_impl"):
        args, kwargs = variables.get("args", ()), variables.get("kwargs", {})
        made = {key_of(node.func): variables.get("self", ABSENT)}
    else:
        names = code.co_varnames[: code.co_argcount]
        is_method = isinstance(node.func, ast.Attribute) and names[:1] == ("self",)
        args = [variables.get(name, ABSENT) for name in names[int(is_method) :]]
        kwargs = {name: variables[name] for name in code.co_varnames if name in variables}
    found = made | dict(zip(map(key_of, node.args), args, strict=False))
    found.update({key_of(k.value): kwargs[k.arg] for k in node.keywords if k.arg in kwargs})
    return {key: item for key, item in found.items() if item is not ABSENT}
