"""The words of torch's messages: shapes, dtypes and devices, and how they are said again."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from cudalens.core._python import parse_expression
from cudalens.core.report import Evidence
from cudalens.core.report_types import TensorFact

Shape = tuple[int, ...]

STICKY = (
    "device-side assert triggered",  # not the advice that torch prints under every CUDA error
    "illegal memory access",
    "misaligned address",
    "launch failure",
    "launch timed out",
    "illegal instruction",
    "invalid program counter",
    "hardware stack error",
    "uncorrectable",
)
"""Words of CUDA's errors after which this process cannot use the device again."""

NO_ASSERT = (
    "It is no device-side assert; the advice about TORCH_USE_CUDA_DSA, which PyTorch prints under "
    "every CUDA error, does not help."
)
"""What PyTorch prints under every CUDA error misleads under these."""

_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "long": "int64",
    "long int": "int64",
    "int": "int32",
    "short": "int16",
    "char": "int8",
    "signed char": "int8",
    "byte": "uint8",
    "unsigned char": "uint8",
    "bool": "bool",
    "complexfloat": "complex64",
    "complexdouble": "complex128",
}
_CASTS = {
    "float32": ".float()",
    "float64": ".double()",
    "float16": ".half()",
    "bfloat16": ".bfloat16()",
    "int64": ".long()",
    "int32": ".int()",
    "bool": ".bool()",
}
_TENSOR_TYPE = re.compile(
    r"torch\.(?:(cuda|sparse|mps|xpu)\.)?(\w+)Tensor|\b(CPU|CUDA|MPS|XPU)([A-Z]\w+)Type\b"
)
"""torch spells a type as ``torch.cuda.FloatTensor``, the newer ones as ``CUDABFloat16Type``."""


def is_sticky(message: str) -> bool:
    """Return whether a message is that of an error that ends the CUDA context of the process."""
    return any(text in message for text in STICKY)


def ints(text: str) -> Shape:
    """Read the numbers of a shape as it stands in a message: ``32, 1, 3`` or ``4x10``."""
    return tuple(int(item) for item in re.findall(r"-?\d+", text))


def said(shape: Iterable[int]) -> str:
    """Write a shape as Python does."""
    return str(tuple(shape))


def dtype(text: str) -> str:
    """Return the dtype that torch's C++ code calls ``long int``, ``Half`` or
    ``torch.LongTensor``.
    """
    match = _TENSOR_TYPE.search(text)
    word = match[2] or match[4] if match else text.rpartition("::")[2]
    return _DTYPES.get(word.strip().lower(), text.strip().removeprefix("torch."))


def device_type(text: str) -> str | None:
    """Return the device type in a name such as ``torch.cuda.FloatTensor``."""
    match = _TENSOR_TYPE.search(text)
    return None if match is None else match[1] or (match[3] or "cpu").lower()


def cast(name: str) -> str:
    """Write the method call that turns a tensor into a dtype."""
    return _CASTS.get(name, f".to(torch.{name})")


# --- what the evidence holds ---------------------------------------------------------------------


def called(evidence: Evidence) -> str:
    """Return the last part of the name of the called function: ``conv1d``, ``__matmul__``."""
    return (evidence.op.api or "").rpartition(".")[2]


_LOOKUP = {"index": "input", "indices": "input"}
_PICK = {"indices": "index"}
_PRODUCT = {"mat1": "self", "mat2": "other"}
_DIMS = {"dim": "dims"}
_PARAMETERS = {
    "embedding": _LOOKUP,
    "embedding_bag": _LOOKUP,
    "linear": {"self": "input", "mat1": "input", "mat2": "weight"},
    "matmul": _PRODUCT,
    "__matmul__": _PRODUCT,
    "gather": _PICK,
    "scatter": _PICK,
    "scatter_add": _PICK,
    "scatter_reduce": _PICK,
    "index_select": _PICK,
    "index_add": _PICK,
    "index_copy": _PICK,
    "index_fill": _PICK,
    "index_reduce": _PICK,
    "take": _PICK,
    "take_along_dim": _PICK,
    "permute": _DIMS,
    "flip": _DIMS,
    "roll": _DIMS,
}
"""What the op inside a function calls an argument, and what the function's own schema does."""


def spoken(evidence: Evidence, argument: str) -> str:
    """Return the called function's name for an argument that torch calls by the inner op's name."""
    function = called(evidence)
    names = _PARAMETERS.get(function) or _PARAMETERS.get(function.rstrip("_"), {})
    return names.get(argument, argument)


def named(evidence: Evidence, *arguments: str) -> TensorFact | None:
    """Return the first tensor that the call received under one of these names."""
    return next((fact for name in arguments if (fact := evidence.tensor(name)) is not None), None)


def of_shape(evidence: Evidence, shape: Iterable[int], *arguments: str) -> TensorFact | None:
    """Return the tensor of this shape: under one of these names, or the only one on the line."""
    wanted = tuple(shape)
    fact = named(evidence, *arguments)
    if fact is not None and fact.shape == wanted:
        return fact
    found = [item for item in evidence.tensors if item.shape == wanted]
    return found[0] if len(found) == 1 else None


def expression(fact: TensorFact | None) -> str | None:
    """Return the user's expression for a tensor, in brackets where a method call needs them."""
    if fact is None or fact.expression is None:
        return None
    text = fact.expression
    return text if re.fullmatch(r"[\w.\[\]\"'()]+", text) else f"({text})"


_OPERANDS = frozenset({None, "self", "other", "mat2", "tensor", "vec"})


def subject(fact: TensorFact | None, otherwise: str) -> str:
    """Name a tensor: by the called function's name for it, an operand by the user's words."""
    if fact is None:
        return otherwise
    name = fact.expression if fact.argument in _OPERANDS else fact.argument
    return name or fact.argument or fact.expression or otherwise


def owner(evidence: Evidence) -> str:
    """Name the module at whose parameters the call met its input."""
    if evidence.module_path:
        return f"module {evidence.module_path}"
    return evidence.module_type or "the weight"


# --- what the user's running call spells: the receiver of a metho ---------------------------------


_ATOMS = (ast.Name, ast.Attribute, ast.Subscript, ast.Call)


def receiver(evidence: Evidence) -> str | None:
    """Return the expression on which the line calls the method that raised: ``f(x)``, ``(a +
    b)``.
    """
    call = _direct_call(evidence)
    if call is None or not (evidence.op.api or "").startswith("torch.Tensor."):
        return None
    function = call.func
    if not isinstance(function, ast.Attribute):
        return None
    text = ast.unparse(function.value)
    return text if isinstance(function.value, _ATOMS) else f"({text})"


def list_items(evidence: Evidence) -> tuple[str, ...]:
    """Return the expressions of the list of tensors that the line passes first, if it spells it."""
    call = _direct_call(evidence)
    if call is None:
        return ()
    named = (item.value for item in call.keywords if item.arg == "tensors")
    node = next(named, call.args[0] if call.args else None)
    if not isinstance(node, ast.List | ast.Tuple):
        return ()
    if any(isinstance(item, ast.Starred) for item in node.elts):
        return ()
    return tuple(map(ast.unparse, node.elts))


def passed(evidence: Evidence, function: str, position: int, keyword: str) -> str | None:
    """Return the expression that the line passes to ``function``, which it calls by this name."""
    call = _call_of(evidence, function)
    if call is None or any(isinstance(item, ast.Starred) for item in call.args):
        return None
    named = (item.value for item in call.keywords if item.arg == keyword)
    node = next(named, call.args[position] if position < len(call.args) else None)
    return None if node is None else ast.unparse(node)


def _direct_call(evidence: Evidence) -> ast.Call | None:
    """Return the line's call when it is the one that raised, with nothing of Python below it."""
    if not evidence.frames or not evidence.frames[-1].is_user:
        return None
    return _call_of(evidence, called(evidence))


def _call_of(evidence: Evidence, wanted: str) -> ast.Call | None:
    if not evidence.call_text:
        return None
    try:
        call = parse_expression(f"({evidence.call_text}\n)").body
    except (SyntaxError, ValueError):
        return None
    if not isinstance(call, ast.Call):
        return None
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    return call if name == wanted else None
