"""The failing call, read once: the API function, its arguments, and the user's operands.

A recorder knows the function and its arguments.  Without one, and for calls that torch's argument
parser rejects, they are read from the innermost frame that the reader understands.
"""

from __future__ import annotations

import ast
import inspect
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, MethodType, ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cudalens.core import _torch
from cudalens.core.call import THREAD, ApiCall, Call, OpCall, Operand
from cudalens.core.evidence_types import OddArgument, RefusedArguments
from cudalens.core.report_types import format_shape
from cudalens.core.torch_functions import Trait, functions
from cudalens.core.user_objects import is_tensor
from cudalens.evidence.call_stack import parameters_of
from cudalens.evidence.context import problem_type, table_of_positions
from cudalens.evidence.variables import RunningLine
from cudalens.recorder.arguments import named_arguments
from cudalens.recorder.earlier_values import caller_of
from cudalens.source.files import is_torch_file, torch_path
from cudalens.source.running_call import ABSENT, MODULE_CALLS, RunningCall, method_of
from cudalens.source.stack import place_of

LIBRARIES = ("torch.nn.modules.", "transformers.", "torchvision.")
"""Libraries whose modules a trial may copy and call."""
Entries = Sequence[FrameType | TracebackType]
_HOMES: dict[str, Any] = {
    "nn/functional.py": functional,
    "functional.py": torch,
    "nn/utils/rnn.py": torch.nn.utils.rnn,
    "_tensor.py": Tensor,
    "autograd/__init__.py": torch.autograd,
}
"""The public module of torch's Python functions, by source file."""
_NO_KERNEL = (
    functions(Trait.NEVER_COPIES | Trait.TENSOR)
    | functions(Trait.FACT, without=Trait.PROPERTY)
    | {"__getitem__"}
)
_PLAIN_PROPERTIES = functions(Trait.FACT | Trait.PROPERTY) | functions(Trait.WHOLE | Trait.PROPERTY)


def call_of(
    entries: Entries,
    line: RunningLine,
    api: ApiCall | None = None,
    op: OpCall | None = None,
) -> Call:
    """Return the call that failed.

    If the user's line calls a module of a library, that is part of it: a fix changes its arguments.

    Args:
        entries: the stack, outermost first.
        line: the user's running line on it.
        api: the call as recorded.
        op: the op that a guard checked.
    """
    read = api_call_of_stack(entries, line.call)
    api = read or api if api is None or api.func is None else api
    is_whole = api is not None and is_known([*api.args, *api.kwargs.values()])
    if not is_whole and op is not None and op.op is not None:
        api = ApiCall(func=op.op, args=op.args, kwargs=op.kwargs)
    _learn_from_api(line.call, api)
    operands = tuple(_operands(line.call))
    outer = (_of_module(line), None if read is api else read)
    enclosing = tuple(item for item in outer if item is not None)
    return Call(api=api, enclosing=enclosing, op=op, operands=operands)


# --- the function and its arguments ---------------------------------------------------------------


def running_api_call() -> ApiCall | None:
    """Return this thread's running API call, ``None`` without a recorder."""
    call = THREAD.running.call
    if call is None:
        return None
    func, args, kwargs, frame = call
    caller = caller_of(frame)
    code, lasti = (None, 0) if caller is None else (caller.f_code, caller.f_lasti)
    return ApiCall(func=func, args=args, kwargs=kwargs or {}, code=code, lasti=lasti)


def api_call_of_stack(entries: Entries, line: RunningCall | None = None) -> ApiCall | None:
    """Read the innermost call of torch from the frames, ``None`` if a part cannot be read.

    Args:
        line: the user's line.
    """
    places = [place_of(item) for item in entries]
    group = []
    for place in reversed(places):
        if not is_torch_file(place.filename):
            break
        group.append(place)
    for place in reversed(group):  # outermost first: the function that the user or a library called
        home = _HOMES.get(torch_path(place.filename) or "")
        api = place.frame and home and _of_function(place.frame, home)
        if api:
            return api
    if not places:
        return None
    is_made = bool(group) and group[-1].code.co_name == "__init__"
    at = len(places) - 1 - len(group) * is_made  # a layer that rejects its options
    is_line = line is not None and places[at].frame is line.place.frame
    call = line if is_line else RunningCall.at(places[at]) if at >= 0 else None
    api = None if call is None else _of_running(call)
    if group and (frame := group[0].frame) is not None and not arguments_of(api):
        api = _of_forward(frame) or api
    return api


def _of_module(line: RunningLine) -> ApiCall | None:
    """Return the user's call of a library's module, if all of its arguments are known."""
    module = line.module
    parts = () if module is None else module.modules()
    if module is None or not all(type(it).__module__.startswith(LIBRARIES) for it in parts):
        return None
    api = _of_running(line.call, module)
    return api if api is not None and is_known([*api.args, *api.kwargs.values()]) else None


def _of_function(frame: FrameType, home: Any) -> ApiCall | None:
    code = frame.f_code
    function = None if code.co_name.startswith("_") else getattr(home, code.co_name, None)
    if not callable(function) or code.co_flags & inspect.CO_VARKEYWORDS:
        return None
    arguments = parameters_of(frame)
    args: list[Any] = []
    if code.co_flags & inspect.CO_VARARGS:
        args += frame.f_locals.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount], ())
    elif home is Tensor:
        args.append(arguments.pop("self", None))
    return ApiCall(func=function, args=tuple(args), kwargs=arguments)


def _of_forward(frame: FrameType) -> ApiCall | None:
    """Read the forward of a torch module that has rejected its arguments in Python."""
    while frame.f_back is not None and frame.f_code.co_name not in ("forward", *MODULE_CALLS):
        frame = frame.f_back
    module = frame.f_locals.get("self")
    if frame.f_code.co_name != "forward" or not isinstance(module, nn.Module):
        return None
    arguments = parameters_of(frame)
    arguments.pop("self", None)
    return ApiCall(func=MethodType(type(module).forward, module), kwargs=arguments)


def _of_running(call: RunningCall, module: nn.Module | None = None) -> ApiCall | None:
    """Read the running expression of a frame: a call, an operator, a subscript.

    Args:
        module: the called object, if it is a module.
    """
    node, operands = call.node, call.operands
    function: Any = None
    keywords: dict[str, ast.expr] = {}
    unpacked: dict[str, Any] = {}
    if isinstance(node, ast.Call):
        if any(isinstance(item, ast.Starred) for item in node.args):
            return None
        for item in node.keywords:
            if item.arg is not None:
                keywords[item.arg] = item.value
            elif isinstance(value := call.value(item.value), Mapping):
                unpacked.update(value)
            else:
                return None
        operands = list(node.args)
        function = call.value(node.func) if module is None else module
        receiver = call.receiver
        # The module finds its functions by a `__getattr__`, which is not run. torch has the same.
        if receiver is not None and call.value(receiver) is sys.modules.get("torch._VF"):
            function = getattr(torch, node.func.attr, None)  # type: ignore[attr-defined]
        if receiver is not None and is_tensor(value_of(call, receiver)):
            function = getattr(Tensor, node.func.attr, None)  # type: ignore[attr-defined]
            operands.insert(0, receiver)
    elif isinstance(node, ast.BinOp | ast.AugAssign | ast.UnaryOp):
        prefix = "i" if isinstance(node, ast.AugAssign) else ""
        function = getattr(operator, f"__{prefix}{method_of(node.op)}__", None)
    elif isinstance(node, ast.Subscript):
        is_written = isinstance(node.ctx, ast.Store)
        function = operator.setitem if is_written else operator.getitem
        if is_written and not isinstance(call.statement, ast.Assign):
            return None
    if not callable(function):
        return None
    args = [value_of(call, item) for item in operands]
    kwargs = {name: value_of(call, item) for name, item in keywords.items()}
    return ApiCall(
        func=function,
        args=tuple(args),
        kwargs=kwargs | unpacked,
        code=call.place.code,
        lasti=call.place.lasti,
        nodes=tuple(operands),
        keywords=keywords,
    )


def is_known(value: object) -> bool:
    """Return whether a value, and all that a list or tuple contains, is known."""
    return all(map(is_known, value)) if isinstance(value, (list, tuple)) else value is not ABSENT


def value_of(call: RunningCall, node: ast.expr | None) -> Any:
    """Return the value of an expression, lists and tuples item by item, or ``ABSENT``."""
    if node is None:
        return None
    if (value := call.value(node)) is not ABSENT:
        return value
    if isinstance(node, ast.Tuple | ast.List):
        parts = [value_of(call, item) for item in node.elts]
        return tuple(parts) if isinstance(node, ast.Tuple) else parts
    if isinstance(node, ast.Slice):
        ends = [value_of(call, item) for item in (node.lower, node.upper, node.step)]
        return ABSENT if any(item is ABSENT for item in ends) else slice(*ends)
    if isinstance(node, ast.BinOp):
        numbers = [value_of(call, item) for item in (node.left, node.right)]
        function = getattr(operator, f"__{method_of(node.op)}__", None)
        # Not for 0, which may be a divisor.
        is_known = function and all(type(item) in (int, float) and item for item in numbers)
        return function(*numbers) if function and is_known else ABSENT
    if isinstance(node, ast.Attribute):
        owner = call.value(node.value)
        is_plain = node.attr in _PLAIN_PROPERTIES
        if isinstance(owner, Tensor) and node.attr == "grad" and _torch.is_plain(owner):
            return owner.grad if owner.is_leaf else None  # reading that of a non-leaf warns
        if isinstance(owner, Tensor) and (is_plain or callable(getattr(Tensor, node.attr, None))):
            return getattr(owner, node.attr)
    return _view_of(call, node)


def _view_of(call: RunningCall, node: ast.expr) -> Any:
    """Return a view or size that the line takes of a tensor, else ``ABSENT``: no kernel runs."""
    match node:
        case ast.Subscript(owner, index):
            name, arguments = "__getitem__", [index]
        case ast.Call(ast.Attribute(owner, name), arguments, []):
            pass
        case _:
            return ABSENT
    if name not in _NO_KERNEL and name != "cpu":
        return ABSENT
    tensor, args = value_of(call, owner), [value_of(call, item) for item in arguments]
    if name == "cpu":  # for a CPU tensor, the tensor itself
        is_itself = is_tensor(tensor) and not args and _torch.meta_of(tensor).device == "cpu"
        return tensor if is_itself else ABSENT
    leaves = [item for part in args for item in (part if isinstance(part, tuple) else (part,))]
    is_plain = all(isinstance(item, (int, slice, type(None), type(...))) for item in leaves)
    if not isinstance(tensor, Tensor) or not _torch.is_plain(tensor) or not is_plain:
        return ABSENT
    try:
        with _torch.plain_torch(), _torch.no_dispatch_modes():
            return getattr(tensor, name)(*args)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return ABSENT


# --- the arguments by name ------------------------------------------------------------------------


def arguments_of(api: ApiCall | None) -> dict[str, object]:
    """Return the known arguments, by the names in torch's documentation.

    Operators have ``self`` and ``other``, subscripts ``self`` and ``indices``.
    """
    if api is None or api.func is None:
        return {}
    name = getattr(api.func, "__name__", "")
    if name in ("getitem", "__getitem__", "setitem", "__setitem__") and len(api.args) > 1:
        owner, index, *value = api.args
        named: dict[str, object] = {"self": owner, "values": value[0] if value else None}
        if isinstance(index, tuple):
            named |= {f"indices[{at}]": item for at, item in enumerate(index)}
        else:
            named["indices"] = index
    elif getattr(operator, name, None) is api.func:
        named = dict(zip(("self", "other"), api.args, strict=False))
    else:
        named = named_arguments(api.func, api.args, api.kwargs)
        if getattr(Tensor, name, None) is api.func and "0" in named:
            named = {"self": named["0"]}
    return {
        key: item
        for key, item in named.items()
        if item is not None and item is not ABSENT and not key.isdigit()
    }


# --- arguments of the wrong kind or size ---------------------------------------------------------

_PLAIN = (Tensor, str, bytes, bool, complex, torch.dtype)
_METHODS = ("method", "builtin_function_or_method", "function")


def refused_arguments(
    entries: Sequence[TracebackType],
    arguments: Mapping[str, object],
    operands: Sequence[Operand] = (),
) -> RefusedArguments:
    """Return the facts about arguments apart from values: kinds, parameters, sizes.

    Args:
        arguments: the arguments of the function that raised, by parameter.
        operands: the operands of the user's line.
    """
    if not entries:
        return RefusedArguments()
    readable = [item for item in operands if item.value is not ABSENT]
    texts = {id(item.value): item.text for item in readable}
    values = {texts.get(id(value), name): value for name, value in arguments.items()}
    values |= {item.text: item.value for item in readable}
    for item in readable:
        if isinstance(item.node, ast.Constant):  # the line shows the value
            values.pop(item.text, None)
    return RefusedArguments(
        odd_arguments=tuple(
            _odd(text, value) for text, value in values.items() if not isinstance(value, _PLAIN)
        ),
        position_table=table_of_positions(entries),
        problem_type=problem_type(entries),
    )


def _odd(name: str, value: object) -> OddArgument:
    kind = type(value)
    is_builtin = kind.__module__ == "builtins"
    type_name = kind.__qualname__ if is_builtin else f"{kind.__module__}.{kind.__name__}"
    words = type_name if type_name.startswith(("numpy.", "torch.d")) else kind.__name__
    words = f"{'an' if words[0].lower() in 'aeiou' else 'a'} {words}"
    if value is None:
        words = "None"
    elif is_builtin and kind.__name__ in _METHODS:
        words = "a method that was not called"
    elif type_name == "numpy.ndarray":
        array: Any = value
        words += f" of {array.dtype} {format_shape(array.shape)}"
    elif isinstance(value, (list, tuple)):
        words += f" of {len(value)}"
    return OddArgument(name=name, type_name=type_name.rpartition(".")[2], words=words)


# --- the user's operands --------------------------------------------------------------------------


def _operands(call: RunningCall) -> Iterator[Operand]:
    """Return the operands of the user's call as the line spells them, each with its value."""
    for node in _nodes(call):
        value = value_of(call, node)
        yield Operand(text=text_of(node), node=node, value=value)
        parts = _spelled_items(node)
        items = value if isinstance(value, (list, tuple)) else ()
        for at, part in enumerate(parts):
            item = items[at] if len(items) == len(parts) else value_of(call, part)
            yield Operand(text=text_of(part), node=part, value=item)
    if isinstance(call.node, ast.Call):  # a layer may have been meant instead
        yield Operand(text=text_of(call.node), node=call.node, value=ABSENT)
    yield from _unpacked(call)


def _spelled_items(node: ast.expr) -> list[ast.expr]:
    """Return the items of a list or tuple display, none if it contains a starred item."""
    items = node.elts if isinstance(node, ast.List | ast.Tuple) else []
    return [] if any(isinstance(item, ast.Starred) for item in items) else items


def text_of(node: ast.expr) -> str:
    """Return the text with which a fix names an operand."""
    return ast.unparse(node).replace("'", '"')


def _nodes(call: RunningCall) -> Iterator[ast.expr]:
    node = call.node
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            yield node.func.value
        yield from (*node.args, *(item.value for item in node.keywords))
    elif isinstance(node, ast.Attribute):
        yield node.value
    elif isinstance(node, ast.BinOp | ast.AugAssign | ast.Subscript):
        for item in call.operands:
            is_several = isinstance(node, ast.Subscript) and item is node.slice
            yield from item.elts if is_several and isinstance(item, ast.Tuple) else [item]


def _unpacked(call: RunningCall) -> Iterator[Operand]:
    """Return the entries that ``**batch`` passes, by key."""
    for item in getattr(call.node, "keywords", ()):
        value = call.value(item.value) if item.arg is None else None
        if isinstance(value, Mapping):
            for key, entry in list(value.items())[:8]:
                if isinstance(key, str) and isinstance(entry, Tensor):
                    text = f'{ast.unparse(item.value)}["{key}"]'
                    node = ast.Subscript(item.value, ast.Constant(key), ast.Load())
                    node = ast.copy_location(node, item.value)
                    yield Operand(text=text, node=node, value=entry)


def _learn_from_api(call: RunningCall, api: ApiCall | None) -> None:
    """Learn operand values from an API call that the user's line made itself, matched by syntax."""
    place, node = call.place, call.node
    if api is None or api.code is not place.code or api.lasti != place.lasti:
        return
    if isinstance(node, ast.Call):
        nodes = list(node.args)
        receiver = call.receiver
        if any(isinstance(item, ast.Starred) for item in nodes):
            return
        if receiver is not None and len(api.args) == len(nodes) + 1:
            is_module = isinstance(call.value(receiver), ModuleType)
            nodes = nodes if is_module else [receiver, *nodes]
        api.keywords = {
            item.arg: item.value for item in node.keywords if item.arg and item.arg in api.kwargs
        }
    elif isinstance(node, ast.Subscript):
        nodes = call.operands
    else:
        nodes = _in_order(call, api)
    pairs = [(item, api.kwargs[key]) for key, item in api.keywords.items()]
    if len(nodes) == len(api.args):
        api.nodes = tuple(nodes)
        pairs += zip(nodes, api.args, strict=True)
    for item, value in pairs.copy():
        parts = _spelled_items(item)
        if isinstance(value, (list, tuple)) and len(parts) == len(value):
            pairs += zip(parts, value, strict=True)
    # Some torch functions wrap a single tensor in a tuple before the recorder sees it.
    call.learn([pair for pair in pairs if type(pair[1]) is not tuple or len(pair[1]) != 1])
    call.spelled |= {id(node) for node, _ in pairs}


def _in_order(call: RunningCall, api: ApiCall) -> list[ast.expr]:
    """Return the operands of an operator in argument order, empty if unknown.

    ``1 / x`` and ``2 * x`` call the reflected operator, whose first argument is the right operand.
    """
    nodes = call.operands
    name = getattr(api.func, "__name__", "")
    if len(nodes) != 2 or len(api.args) != 2 or not any(map(is_tensor, api.args)):
        return nodes
    # `__rshift__` is `>>` itself, not a reflected operator.
    if name.startswith("__r") and name != "__rshift__":
        return nodes[::-1]
    left, right = map(call.value, nodes)
    if is_tensor(api.args[1]) or is_tensor(left) or (right is not ABSENT and not is_tensor(right)):
        return nodes
    return [] if left is right is ABSENT else nodes[::-1]


def learn_from_error(line: RunningLine, error: BaseException) -> None:
    """Learn the object of an ``AttributeError`` from the exception: the variable may be gone."""
    node = line.running.node
    if isinstance(error, AttributeError) and isinstance(node, ast.Attribute):
        is_here = error.name == node.attr and not line.below
        line.call.learn([(node.value, error.obj)] * is_here)
