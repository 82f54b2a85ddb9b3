"""Which of several non-finite inputs a bad value of the result came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cudalens.core.torch_functions import Trait, functions
from cudalens.recorder._torch import physical
from cudalens.recorder.calls import Api
from cudalens.recorder.nonfinite_marks import NonFiniteTensor

_FACTORS = functions(Trait.FACTORS)
_ROWS = 2


def at_fault(
    api: Api, args: Sequence[Any], values: Tensor, bad: Tensor, marks: Sequence[NonFiniteTensor]
) -> NonFiniteTensor:
    """Return the mark of the input that the first bad value came from.

    By position, where each element of the result reads one element, row or column of an input.
    Otherwise the first input whose values a call has made, before those that were asked for.
    """
    if len(marks) == 1:
        return marks[0]
    at = tuple(bad.nonzero()[0].tolist())
    for mark in marks:
        item = mark.tensor()
        part = None if item is None else _read_for(api, args, physical(item), at, values)
        if part is not None and not bool(torch.isfinite(part).all()):
            return mark
    return next((mark for mark in marks if mark.maker.kind == "made"), marks[0])


def _read_for(
    api: Api, args: Sequence[Any], item: Tensor, at: tuple[int, ...], result: Tensor
) -> Tensor | None:
    """Return the part of an input that one element of the result was computed from, if known."""
    try:
        if api.is_positional:
            return item.expand(result.shape)[at]
        if api.stem in _FACTORS and len(args) >= _ROWS:
            return _factor(item, at, is_first=item is args[0])
        if api.stem == "linear":
            row: Tensor = item[at[:-1] if item is args[0] else at[-1]]  # of weight and bias
            return row
        if api.stem in ("cat", "concat", "concatenate", "stack") and args:
            return _piece(args, item, at, is_stack=api.stem == "stack")
    except (RuntimeError, IndexError):  # broadcast shapes, or an option passed by keyword
        return None
    return None


def _factor(item: Tensor, at: tuple[int, ...], *, is_first: bool) -> Tensor:
    """Return the row of the first factor of a matrix product, or the column of the second."""
    if item.dim() < _ROWS:
        return item
    batch: tuple[Any, ...] = at[:-_ROWS][-(item.dim() - _ROWS) :] if item.dim() > _ROWS else ()
    return item[(*batch, at[-_ROWS])] if is_first else item[(*batch, slice(None), at[-1])]


def _piece(args: Sequence[Any], item: Tensor, at: tuple[int, ...], *, is_stack: bool) -> Tensor:
    """Return the element of one joined tensor, or a 0 if another one supplied it."""
    piece = item.new_zeros(())
    dim = args[1] if len(args) > 1 and isinstance(args[1], int) else 0
    dim = dim + len(at) if dim < 0 else dim
    start = 0
    for other in args[0]:
        size = 1 if is_stack else other.shape[dim]
        if start <= at[dim] < start + size and other is item:
            place: tuple[int, ...] = (*at[:dim], at[dim] - start, *at[dim + 1 :])
            place = place[:dim] + place[dim + 1 :] if is_stack else place
            piece = item[place]
        start += size
    return piece
