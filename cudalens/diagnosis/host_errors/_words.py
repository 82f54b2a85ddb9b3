"""The words of torch's messages: types as Python has them, operands by the user's names."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence

from cudalens.core.report import Evidence
from cudalens.core.report_types import TensorFact, format_shape
from cudalens.core.torch_functions import Trait, functions
from cudalens.diagnosis.user_code import api_function, call_node, called_name

Shape = tuple[int, ...]

MAX_HEADLINE = 100
"""Characters; what a headline has no room for stands in the explanation."""

STICKY = (
    "device-side assert triggered",  # not the advice that torch prints under every CUDA error
    "illegal memory access",
    "misaligned address",
    "operation not supported on global/shared address space",
    "launch failure",
    "launch timed out",
    "illegal instruction",
    "invalid program counter",
    "hardware stack error",
    "uncorrectable",
)
"""Words of CUDA's errors after which this process cannot use the device again."""
LIBRARY_STATUS = (
    r"CUBLAS_STATUS_(?P<blas>\w+)|CUDNN_STATUS_(?P<dnn>\w+)|cuDNN error: (?P<dnn2>\w+)"
    r"|CUSPARSE_STATUS_(?P<sparse>\w+)|CUSOLVER_STATUS_(?P<solver>\w+)|CUFFT_(?P<fft>\w+)"
)

INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "bool")
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "long": "int64",
    "long int": "int64",
    "int": "int32",
    "short": "int16",
    "char": "int8",
    "signed char": "int8",
    "byte": "uint8",
    "short unsigned int": "uint16",
    "unsigned int": "uint32",
    "unsigned char": "uint8",
    "complexfloat": "complex64",
    "complexdouble": "complex128",
    **{name: name for name in ("bfloat16", "bool", "uint16", "uint32", "uint64")},
}
_TENSOR_TYPE = re.compile(
    r"torch\.(?:(cuda|sparse|mps|xpu)\.)?(\w+)Tensor\b|\b(CPU|CUDA|MPS|XPU)([A-Z]\w+)Type\b"
)
"""torch writes a type as ``torch.cuda.FloatTensor``, the newer ones as ``CUDABFloat16Type``."""
_WORD = re.compile(
    r"(?:(?<=got: )|(?<=!= )|(?<=type \()|(?<=dtype )|(?<=dtype: ))"
    r"(?:long int|short int|short unsigned int|unsigned int|(?:un)?signed char|[a-z]\w*)"
    r"|\b(?:U?Int(?:16|32|64)?|Complex(?:Float|Double)|BFloat16|Double|Float|Half|Long|Short|Char)\b"
    r"|\b(?:Byte|Bool)\b"
)
_SIZE = re.compile(
    r"(\()?torch\.Size\(\[([\d, ]*)\]\)(?(1)\))"
    r"|(?:(?<=\bsize )|(?<=\bshape )|(?<=mask is )|(?<=should be ))\((\d+,(?: \d+,?)*)\)"
)
"""A shape as torch's Python code prints it; its C++ code writes ``[4, 5]``."""
_REST = re.compile(
    r" \((?:when|while) checking arguments? .*|, but (?:expected one of:|found invalid values:).*"
)
"""Text after a message of torch's: the C++ function, its overloads, all values."""
NO_GPU = (
    r"Torch not compiled with CUDA enabled|Found no NVIDIA driver on your system"
    r"|No CUDA GPUs are available|CUDA error: no CUDA-capable device is detected"
    r"|Attempting to deserialize object on a CUDA device"
    r"|Could not run '[\w:.]+' with arguments from the 'CUDA' backend"
    r"|Unexpected error from cudaGetDeviceCount\(\)(?:.*?(?P<reported>Error \d+: [^\n]+))?"
)
OLD_DRIVER = r"The NVIDIA driver on your system is too old|CUDA driver version is insufficient"


def is_without_gpu(message: str) -> bool:
    """Return whether a message is that of a process which no GPU can serve."""
    return re.search(f"{NO_GPU}|{OLD_DRIVER}", message) is not None


def is_library_status(message: str) -> bool:
    """Return whether a library of CUDA's, such as cuBLAS, reports that it failed."""
    return re.search(LIBRARY_STATUS, message) is not None


def is_sticky(message: str) -> bool:
    """Return whether a message is that of an error that ends the CUDA context of the process."""
    return any(text in message for text in STICKY)


def ints(text: str) -> Shape:
    """Read the numbers of a shape as it stands in a message: ``32, 1, 3`` or ``4x10``."""
    return tuple(int(item) for item in re.findall(r"-?\d+", text))


def dtype(text: str) -> str:
    """Return the dtype that torch's C++ code calls ``long int`` or ``torch.LongTensor``."""
    match = _TENSOR_TYPE.search(text)
    word = match[2] or match[4] if match else text.rpartition("::")[2]
    return _DTYPES.get(word.strip().lower(), text.strip().removeprefix("torch."))


def first_line(message: str) -> str:
    """Return the sentence of a message, with Python's words for types."""
    line, _, rest = message.strip().partition("\n")
    text = _REST.sub("", line)
    if text.endswith(":"):
        text = f"{text} {rest.strip().partition(chr(10))[0].strip()}"
    text = _TENSOR_TYPE.sub(
        lambda match: f"{dtype(match[0])} tensor on {match[1] or (match[3] or 'cpu').lower()}",
        text.rstrip(" .!"),
    )
    text = _SIZE.sub(lambda match: format_shape(ints(match[2] or match[3] or "")), text)
    if re.search(r"type|implemented for", text):
        text = _WORD.sub(lambda match: dtype(match[0]), text.replace("c10::", ""))
    return text


# --- the user's names ----------------------------------------------------------------------------

_OPERANDS = (("tensor a", "tensor b"), ("mat1", "mat2"), ("batch1", "batch2"), ("m1", "m2"))
"""Torch's names for the two operands of a call."""
_PRODUCTS = functions(Trait.FACTORS) | {"linear", "__rmatmul__"}


def _format_shape_of(fact: TensorFact) -> str:
    return format_shape(fact.shape)


_ATTRIBUTES: tuple[tuple[str, Callable[[TensorFact], str]], ...] = (
    (r"\bdevice\b", lambda fact: f"on {fact.device}"),
    (r"\bd?types?\b|implemented for", lambda fact: fact.dtype),
    (r"shape|size|dim|channel|element|\dD", _format_shape_of),
)
_PARAMETERS = frozenset(
    {"weight", "bias", "running_mean", "running_var", "in_proj_weight", "in_proj_bias", "params"}
    | {"out_proj_weight", "out_proj_bias"}
)
_MAX_OPERANDS = 3


def with_user_names(text: str, evidence: Evidence) -> str:
    """Put a message of torch's into the user's names: ``mat1`` is ``logits``.

    Where torch names no operand, those of the call follow with what the message speaks of.
    """
    if evidence.phase == "backward":
        return text
    if _OF_TYPES.search(text):
        return ": ".join(filter(None, (text, _odd_arguments(text, evidence))))
    facts = [item for item in evidence.tensors if item.argument]
    if "device" in text or " type (" in text:
        places: dict[str, dict[str, None]] = {}
        for fact in facts:
            if fact.shape or fact.device != "cpu":
                owner = _owner(evidence, fact)
                is_buffer = (evidence.module_type or "").endswith("Loss")
                name = f"the parameters of {owner}" if owner else user_name(evidence, fact)
                name = f"{owner}.{fact.argument}" if owner and is_buffer else name
                places.setdefault(fact.device, {})[name] = None
        if len(places) > 1:
            parts = sorted(places.items(), key=lambda item: (item[0] != "cpu", len(item[1])))
            return ", ".join(f"{_listed([*items])} on {device}" for device, items in parts)
    for pair in _OPERANDS:
        if all(re.search(rf"\b{word}\b", text) for word in pair):
            for word, fact in zip(pair, _in_order(text, facts, evidence), strict=False):
                text = re.sub(rf"\b{word}\b", user_name(evidence, fact).replace("\\", ""), text)
            if pair[0] not in text:
                return text
    for regex, attribute in _ATTRIBUTES:
        if facts and re.search(regex, text):
            own = [item for item in facts if item.expression]
            named = [item for item in own if re.search(rf"(?i)\b{item.argument}\b", text)]
            # A message that quotes one tensor's shape is about how it fits the other tensors.
            quoted = () if attribute is _format_shape_of else facts
            meant = named or [item for item in quoted if attribute(item) in text] or own
            meant = [item for item in meant if item.expression or _owner(evidence, item)]
            shown = dict.fromkeys(f"{user_name(evidence, i)} is {attribute(i)}" for i in meant)
            return ": ".join(filter(None, (text, ", ".join([*shown][:_MAX_OPERANDS]))))
    return _with_numbers(text, evidence)


_BROADCAST = re.compile(
    r"tensor a \((\d+)\) must match the size of tensor b \((\d+)\) at non-singleton dimension (\d+)"
)


def _in_order(text: str, facts: Sequence[TensorFact], evidence: Evidence) -> Sequence[TensorFact]:
    """Return the two operands in the order in which a message names them, none if it is not sure.

    ``tensor a`` and ``tensor b`` have the sizes that it says at its dimension of the result.
    """
    if api_function(evidence) in _PRODUCTS:
        return facts[:2]
    match = _BROADCAST.search(text)
    if match is None or len(facts) != 2:
        return ()
    *sizes, dim = map(int, match.groups())
    rank = max(len(item.shape) for item in facts)

    def size(fact: TensorFact) -> int | None:
        at = dim - (rank - len(fact.shape))
        return fact.shape[at] if 0 <= at < len(fact.shape) else None

    both = (facts, facts[::-1])
    return next((two for two in both if [size(item) for item in two] == sizes), ())


_OF_TYPES = re.compile(
    r"must be [\w .]+, not |unsupported operand|object (?:has no|is not)|^expected Tensor as elem"
)


def _with_numbers(text: str, evidence: Evidence) -> str:
    """Add the numbers of which a message says only the names: ``k``, ``num_heads``."""
    numbers = [
        f"{name} is {value}"
        for name, value in evidence.scalars
        if value.lstrip("-").isdecimal() and re.search(rf"(?<!')\b{name}\b", text)
    ]
    if not numbers:
        return text
    own = [item for item in evidence.tensors if item.argument and item.expression]
    shapes = (f"{item.expression} is {format_shape(item.shape)}" for item in own[:_MAX_OPERANDS])
    return f"{text}: {', '.join([*numbers, *shapes])}"


def _odd_arguments(text: str, evidence: Evidence) -> str:
    """Return what the arguments are whose types a message names."""
    odd = evidence.refused_arguments.odd_arguments
    named = [item for item in odd if re.search(rf"\b{item.type_name}\b", text)]
    if "object is not callable" in text:  # the size() of a tensor, asked of an array
        named = [item for item in odd if item.type_name not in ("int", "float")]
    return ", ".join(f"{item.name} is {item.words}" for item in named[:_MAX_OPERANDS])


def _listed(names: Sequence[str]) -> str:
    verb = "is" if len(names) == 1 and not names[0].startswith("the parameters ") else "are"
    return f"{' and '.join(filter(None, (', '.join(names[:-1]), names[-1])))} {verb}"


def _is_parameter(argument: str | None) -> bool:
    return (argument or "").partition("[")[0] in _PARAMETERS


def _owner(evidence: Evidence, fact: TensorFact) -> str | None:
    """Return the user's name for the layer whose parameter a tensor is."""
    if fact.expression or not _is_parameter(fact.argument) or not evidence.module_type:
        return None
    path, call = evidence.module_path, call_node(evidence)
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Call):
        return ast.unparse(call.func)  # a layer that the line makes: it has no path of its own
    name = dict(evidence.module_names).get(path, path) if path else called_name(evidence)
    return name or evidence.module_type


def user_name(evidence: Evidence, fact: TensorFact) -> str:
    """Return the user's expression for a tensor, ``net.head.weight`` for a parameter."""
    owner = _owner(evidence, fact)
    name = fact.argument or "a tensor"
    return fact.expression or (f"{owner}.{name}" if owner else name)


_NAMED = re.compile(
    r"argument '(?P<type>\w+)' (?:\(\w+ \d+\) )?(?:must be|failed)"
    r"|unexpected keyword argument '(?P<key>\w+)'"
    r"|argument(?: #\d+|:)? ['\"](?P<a>\w+)['\"]|^'(?P<b>\w+)' argument should|^(?P<c>input)\.size"
    r"|Expected (?:parameter )?(?P<sure>\w+)(?: argument)? \(Tensor of"
    r"|(?:tensor number|at entry) (?P<at>\d+)(?: in the list)?$"
    r"|^Expected (?P<hx>hidden)(?P<item>\[\d\])? size|^Expected (?P<mask>key_padded_mask)"
)


def argument_at_fault(evidence: Evidence, message: str) -> str | None:
    """Return the argument that torch names, or the input of a layer where it is given no other."""
    expressions = {item.argument: item.expression for item in evidence.tensors if item.argument}
    if (match := _NAMED.search(message.partition("\n")[0].rstrip("."))) is not None:
        texts = match.groupdict()
        name = texts["a"] or texts["b"] or texts["c"] or f"tensors[{texts['at']}]"
        name = f"hx{texts['item'] or ''}" if texts["hx"] else name
        sure = texts["sure"] or texts["type"] or texts["key"]
        sure = "key_padding_mask" if texts["mask"] else sure
        if sure or name in expressions or not expressions:
            return sure or name
    operands = [name for name in expressions if expressions[name] or not _is_parameter(name)]
    named = [name for name in operands if re.search(rf"\b{re.escape(name)}\b", message)]
    named = [name for name in named if name not in ("self", "input", "other")]
    if len(named) == 1:
        return named[0]
    if "device" in message:
        stray = [item.argument for item in evidence.tensors if item.argument and item.shape]
        stray = [name for name in stray if (fact := evidence.tensor(name)) and fact.device == "cpu"]
        return stray[0] if len(stray) == 1 and not _is_parameter(stray[0]) else None
    operands = [name for name in expressions if not _is_parameter(name)]
    is_layer = len(operands) < len(expressions) or evidence.module_type is not None
    return "input" if operands == ["input"] and is_layer else None


# --- what the evidence holds ---------------------------------------------------------------------


def named(evidence: Evidence, *arguments: str) -> TensorFact | None:
    """Return the first tensor that the call received under one of these names."""
    return next((fact for name in arguments if (fact := evidence.tensor(name)) is not None), None)


def expression_of(fact: TensorFact | None) -> str | None:
    """Return the user's expression for a tensor, in brackets where a method call needs them."""
    if fact is None or fact.expression is None:
        return None
    text = fact.expression
    return text if re.fullmatch(r"[\w.\[\]\"'()]+", text) else f"({text})"
