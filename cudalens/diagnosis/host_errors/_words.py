"""The words of torch's messages: shapes, dtypes and devices, and the tensors that they name."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cudalens.core.report import Evidence
from cudalens.core.report_types import TensorFact
from cudalens.diagnosis.user_code import api_function

Shape = tuple[int, ...]

MAX_HEADLINE = 100
"""Characters; what a headline has no room for stands in the explanation."""

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

INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "bool")
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
_TENSOR_TYPE = re.compile(
    r"torch\.(?:(cuda|sparse|mps|xpu)\.)?(\w+)Tensor|\b(CPU|CUDA|MPS|XPU)([A-Z]\w+)Type\b"
)
"""torch writes a type as ``torch.cuda.FloatTensor``, the newer ones as ``CUDABFloat16Type``."""


def is_sticky(message: str) -> bool:
    """Return whether a message is that of an error that ends the CUDA context of the process."""
    return any(text in message for text in STICKY)


def ints(text: str) -> Shape:
    """Read the numbers of a shape as it stands in a message: ``32, 1, 3`` or ``4x10``."""
    return tuple(int(item) for item in re.findall(r"-?\d+", text))


def format_shape(shape: Iterable[int]) -> str:
    """Write a shape as Python does."""
    return str(tuple(shape))


def dtype(text: str) -> str:
    """Return the dtype that torch's C++ code calls ``long int`` or ``torch.LongTensor``."""
    match = _TENSOR_TYPE.search(text)
    word = match[2] or match[4] if match else text.rpartition("::")[2]
    return _DTYPES.get(word.strip().lower(), text.strip().removeprefix("torch."))


def device_type(text: str) -> str | None:
    """Return the device type in a name such as ``torch.cuda.FloatTensor``."""
    match = _TENSOR_TYPE.search(text)
    return None if match is None else match[1] or (match[3] or "cpu").lower()


# --- what the evidence holds ---------------------------------------------------------------------


_LOOKUP = {"index": "input", "indices": "input"}
_PICK = {"indices": "index"}
_DIMS = {"dim": "dims"}
_PRODUCT = {"mat1": "self", "mat2": "other"}
_PARAMETERS = {
    "embedding": _LOOKUP,
    "embedding_bag": _LOOKUP,
    "linear": {"self": "input", "mat1": "input", "mat2": "weight"},
    "matmul": _PRODUCT,
    "__matmul__": _PRODUCT,
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce", "index_select"), _PICK),
    **dict.fromkeys(("index_add", "index_copy", "index_fill", "index_reduce"), _PICK),
    **dict.fromkeys(("take", "take_along_dim"), _PICK),
    **dict.fromkeys(("permute", "flip", "roll"), _DIMS),
}
"""What the op inside a function calls an argument, and what the function's own schema does."""


def argument_name(evidence: Evidence, argument: str) -> str:
    """Return the called function's name for an argument that torch calls by the inner op's name."""
    function = api_function(evidence)
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


def expression_of(fact: TensorFact | None) -> str | None:
    """Return the user's expression for a tensor, in brackets where a method call needs them."""
    if fact is None or fact.expression is None:
        return None
    text = fact.expression
    return text if re.fullmatch(r"[\w.\[\]\"'()]+", text) else f"({text})"


def in_headline(text: str, rest: str) -> str:
    """Return a headline that begins with the user's code, which is cut where it is too long."""
    room = MAX_HEADLINE - len(rest)
    return (text if len(text) <= room else f"{text[: room - 1].rstrip()}…") + rest


def its_shape(fact: TensorFact | None) -> str:
    """Return the end of a headline: the shape of a tensor, where it is known."""
    return f": its shape is {format_shape(fact.shape)}" if fact else ""


_OPERANDS = frozenset({None, "self", "other", "mat2", "tensor", "vec"})


def name_of(fact: TensorFact | None, otherwise: str) -> str:
    """Name a tensor: by the called function's name for it, an operand by the user's words."""
    if fact is None:
        return otherwise
    name = fact.expression if fact.argument in _OPERANDS else fact.argument
    return name or fact.argument or fact.expression or otherwise


def owner(evidence: Evidence) -> str:
    """Name the module at whose parameters the call met its input: ``Linear net.4``."""
    path = evidence.module_path
    if not path:
        return evidence.module_type or "the weight"
    return f"{evidence.module_type or 'module'} {dict(evidence.module_names).get(path, path)}"
