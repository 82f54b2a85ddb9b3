"""What all bad values of a finding have in common: a marker value, a mask, an origin.

Each is proven by reading every bad element.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType

import torch
from torch import Tensor

from cudalens.core.api_names import stem_of
from cudalens.core.evidence_types import BadSlice, Marks, NamedConstant
from cudalens.core.graph_types import FIRST_BAD, ProvenanceStep
from cudalens.core.report_types import Violation
from cudalens.core.tensor_values import number
from cudalens.core.torch_functions import Trait, stems
from cudalens.evidence.program import Program
from cudalens.source.files import is_user_file
from cudalens.source.safe_eval import instance_dict
from cudalens.source.stack import namespaces

_MAX_KINDS = 4
_BY_CHANCE = 0.01
_MAKERS = stems(Trait.NUMBERS) | stems(Trait.COMPARES) | stems(Trait.ROUNDS)
"""Functions that explain their integers: positions, truth values, rounded numbers."""
_SMALL = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def marks_of(
    violation: Violation,
    tensor: Tensor,
    bad: Tensor,
    *,
    others: Iterable[tuple[str, Tensor]],
    steps: Sequence[ProvenanceStep],
    frames: Sequence[FrameType],
) -> Marks:
    """Return what the bad values of a guard's finding have in common.

    Args:
        tensor: the tensor at fault.
        bad: bool[shape of the tensor], true at its bad elements.
        others: the other tensors on the user's line, by their expressions.
        steps: the provenance of the bad values, newest first.
        frames: the stack, outermost first.
    """
    values = tensor.detach()[bad]
    kinds = values.unique()[: _MAX_KINDS + 1].tolist() if values.numel() else []
    size = violation.size
    maker = next(filter(_makes_integers, steps), None)
    # A NaN is not equal to itself, and no integer.
    few = [int(it) for it in kinds if it == it and it == int(it)] if len(kinds) < 5 else []  # noqa: PLR0124
    return Marks(
        value=number(kinds[0]) if len(kinds) == 1 and values.numel() > 1 else None,
        constants=tuple(
            # One beyond the bound may equal any number of the program by chance.
            it
            for it in _constants(few, frames)
            if it.value != size or _stands_in(it.name, steps)
        ),
        zero_at=next((name for name, it in others if _is_zero_at(it, tensor, bad)), None),
        in_slice=slice_of(None, bad),
        is_size=size is not None and kinds == [size],
        copies=_copies(tensor),
        maker=maker,
    )


def _stands_in(name: str, steps: Iterable[ProvenanceStep]) -> bool:
    """Return whether a line that made the values contains a name."""
    texts = (it.source.text or "" for it in steps if it.source is not None)
    return any(re.search(rf"\b{name}\b", text) for text in texts)


def _makes_integers(step: ProvenanceStep) -> bool:
    stem = stem_of(step.op or "")
    # topk returns values and positions: positions start here, values come from its argument.
    return stem in _MAKERS or (stem == "topk" and (step.note or "").startswith(FIRST_BAD))


def _is_zero_at(other: Tensor, tensor: Tensor, bad: Tensor) -> bool:
    """Return whether a tensor is 0 or False at exactly the bad positions."""
    if other is tensor or other.shape != tensor.shape or other.device != tensor.device:
        return False
    return bool(((other.detach() == 0) == bad).all())


def slice_of(name: str | None, bad: Tensor) -> BadSlice | None:
    """Return the only index of one dimension that has all bad elements.

    ``None`` for a few elements, which may have it by chance.
    """
    count, found = int(bad.count_nonzero()), []
    for dim, size in enumerate(bad.shape if bad.dim() > 1 and count > 1 else ()):
        # So likely is it that all elements have one index there by chance.
        if size ** (1 - count) > _BY_CHANCE:
            continue
        at = bad.movedim(dim, 0).reshape(size, -1).any(1).nonzero().flatten().tolist()
        if len(at) == 1:
            found.append(BadSlice(name, dim, at[0], count, count * size == bad.numel()))
    return found[0] if len(found) == 1 else None


def nan_slice(tensor: Tensor, others: Iterable[tuple[str, Tensor]]) -> BadSlice | None:
    """Return the slice with all NaN of a tensor, else of another tensor on the line."""
    own = slice_of(None, tensor.detach().isnan())
    floats = ((name, it) for name, it in others if it is not tensor and it.is_floating_point())
    beside = (slice_of(name, it.detach().isnan()) for name, it in floats)
    found = own or next(filter(None, beside), None)
    return found and found._replace(is_nan=True)


def _copies(tensor: Tensor) -> int:
    """Return how often ``expand`` has repeated each element of a tensor."""
    if tensor.layout is not torch.strided:
        return 1
    repeated = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(length for length, step in repeated if step == 0 and length > 1)


def _constants(values: Sequence[int], frames: Sequence[FrameType]) -> Iterator[NamedConstant]:
    """Yield the program's named constants: capitalized variables of modules and classes."""
    scopes = [*namespaces(frames)]
    owners = (frame.f_locals.get("self") for frame in reversed(frames))
    kinds = {id(type(it)): type(it) for it in owners if it is not None}
    scopes += [instance_dict(kind) or dict(vars(kind)) for kind in kinds.values()]
    named: dict[str, int] = {}
    for scope in scopes:
        for name, value in list(scope.items()):
            if type(value) is int and value in values and name.isupper():
                named.setdefault(name, value)
    files = [it.f_code.co_filename for it in reversed(frames)]
    program = Program(file for file in files if is_user_file(file)) if named else None
    for name, value in named.items():
        assert program is not None
        spots = [it for it in program.values_of(None, name) if _literal(it.node) == value]
        line = program.line(spots[0]) if len(spots) == 1 else None
        yield NamedConstant(name=name, value=value, line=line)


def _literal(node: ast.AST) -> object:
    try:
        return ast.literal_eval(node) if isinstance(node, ast.expr) else None
    except ValueError:
        return None


def vanished(statement: ast.AST | None, dtype: str) -> tuple[str, ...]:
    """Return the numbers in a statement that vanish in a dtype: ``1e-8``, ``1 - 1e-6``."""
    kind = _SMALL.get(dtype.removeprefix("torch."))
    if kind is None or statement is None:
        return ()
    texts = []
    for it in ast.walk(statement):
        match it:
            case ast.Constant(float() as value) if value and _in(value, kind) == 0:
                texts.append(f"{ast.unparse(it)} is 0")
            case ast.BinOp(
                ast.Constant(int() | float() as left),
                ast.Add() | ast.Sub() as op,
                ast.Constant(int() | float() as right),
            ):
                exact = left + right if isinstance(op, ast.Add) else left - right
                if right and _in(exact, kind) == left != exact:
                    texts.append(f"{ast.unparse(it)} is {left:g}")
    return tuple(dict.fromkeys(texts))


def _in(value: float, kind: torch.dtype) -> float:
    """Return a number rounded to a dtype."""
    return float(torch.tensor(value, dtype=kind).item())
