"""What the values of a tensor look like: summaries, bad positions and where they lie.

Everything here reads the device and is called only after something went wrong, while the context
is alive.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cudalens.facts import (
    Histogram,
    Number,
    Offender,
    OffenderMap,
    Offenders,
    TensorSummary,
)

MAX_FIRST = 20
MAX_UNIQUE = 32
MAP_ROWS, MAP_COLUMNS = 32, 64
HISTOGRAM_BINS = 24
HOST_NUMEL = 1 << 20
"""Up to this many elements a tensor is copied to the host once and examined there."""
_SEARCH_NUMEL = 1 << 22
_HISTOGRAM_NUMEL = 1 << 24
_EXACT_SIGNIFICANT = 6


def number(value: float) -> Number:
    """Give a Python number that JSON can hold: NaN and infinities as text."""
    if isinstance(value, (bool, int)):
        return int(value)
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return float(f"{value:.7g}")


def find_offenders(tensor: Tensor, bad: Tensor) -> Offenders:
    """Count the bad elements of ``tensor`` and give the first ones in row-major order.

    Args:
        tensor: the tensor that the op was given, any shape.
        bad: bool[shape of tensor], true where the value breaks the bound.
    """
    if tensor.numel() <= HOST_NUMEL:
        tensor, bad = tensor.detach().cpu(), bad.cpu()
    count = int(bad.sum())
    first = tuple(
        Offender(position=position, value=number(tensor[position].item()))
        for position in _first_positions(bad, min(count, MAX_FIRST))
    )
    grid = _offender_map(tensor, bad) if tensor.dim() and not tensor.is_complex() else None
    return Offenders(count=count, total=tensor.numel(), first=first, map=grid)


def _first_positions(bad: Tensor, wanted: int) -> list[tuple[int, ...]]:
    # Chunk by chunk: nonzero() of a whole tensor takes eight bytes per bad element and dimension.
    if bad.dim() == 0:
        return [()] * wanted
    flat = bad.reshape(-1)
    found: list[int] = []
    for start in range(0, flat.numel(), _SEARCH_NUMEL):
        if len(found) >= wanted:
            break
        part = flat[start : start + _SEARCH_NUMEL].nonzero()[: wanted - len(found), 0]
        found.extend(start + item for item in part.tolist())
    return [unravel(index, tuple(bad.shape)) for index in found]


def unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Give the position of flat element ``index`` in a row-major tensor of ``shape``."""
    position = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        position.append(rest)
    return tuple(reversed(position))


def _offender_map(tensor: Tensor, bad: Tensor) -> OffenderMap:
    values = tensor.reshape(1, -1) if tensor.dim() == 1 else tensor.reshape(tensor.shape[0], -1)
    if values.dtype == torch.bool:
        values = values.to(torch.uint8)
    marks = bad.reshape(values.shape)
    rows, columns = min(values.shape[0], MAP_ROWS), min(values.shape[1], MAP_COLUMNS)
    counts: list[int] = []
    low: list[Number] = []
    high: list[Number] = []
    for value_row, mark_row in zip(
        values.tensor_split(rows), marks.tensor_split(rows), strict=True
    ):
        for cell, mark in zip(
            value_row.tensor_split(columns, dim=1),
            mark_row.tensor_split(columns, dim=1),
            strict=True,
        ):
            counts.append(int(mark.sum()))
            smallest, largest = torch.aminmax(cell)
            low.append(number(smallest.item()))
            high.append(number(largest.item()))
    return OffenderMap(
        rows=rows, columns=columns, bad=tuple(counts), low=tuple(low), high=tuple(high)
    )


def summarise(tensor: Tensor) -> TensorSummary:
    """Describe the values of a tensor: range, mean, NaN and infinity counts, histogram.

    Empty, complex, quantised and sparse tensors give an empty summary.
    """
    if tensor.layout != torch.strided or tensor.is_complex() or tensor.is_quantized:
        return TensorSummary()
    if tensor.numel() == 0:
        return TensorSummary()
    values = tensor.detach()
    if values.numel() <= HOST_NUMEL:
        values = values.cpu()
    if values.dtype == torch.bool:
        values = values.to(torch.uint8)
    return _summarise_float(values) if values.is_floating_point() else _summarise_int(values)


def _summarise_float(values: Tensor) -> TensorSummary:
    nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
    # Half precision overflows in sums, and fp8 has no arithmetic at all.
    wide = values if values.dtype in (torch.float32, torch.float64) else values.float()
    finite = wide[wide.isfinite()] if nan or inf else wide.reshape(-1)
    if finite.numel() == 0:
        return TensorSummary(nan=nan, inf=inf)
    smallest, largest = (item.item() for item in torch.aminmax(finite))
    return TensorSummary(
        min=number(smallest),
        max=number(largest),
        mean=number(finite.mean(dtype=_mean_dtype(finite)).item()),
        nan=nan,
        inf=inf,
        histogram=_histogram(finite, smallest, largest),
    )


def _mean_dtype(values: Tensor) -> torch.dtype:
    return values.dtype if values.device.type == "mps" else torch.float64


def _summarise_int(values: Tensor) -> TensorSummary:
    smallest, largest = (int(item.item()) for item in torch.aminmax(values))
    unique = None
    if values.numel() <= HOST_NUMEL:
        distinct = values.unique()
        unique = tuple(distinct.tolist()) if distinct.numel() <= MAX_UNIQUE else None
    return TensorSummary(
        min=smallest,
        max=largest,
        mean=number(values.mean(dtype=_mean_dtype(values.float()[:0])).item()),
        nan=0,
        inf=0,
        unique=unique,
        histogram=_histogram(values.reshape(-1), smallest, largest),
    )


def _histogram(values: Tensor, smallest: float, largest: float) -> Histogram:
    if values.numel() > _HISTOGRAM_NUMEL:
        return Histogram()
    bins = HISTOGRAM_BINS
    is_int = not values.is_floating_point()
    if is_int:
        # One bin a value while there are few, so that classes can be read off.
        bins = max(1, min(bins, int(largest) - int(smallest) + 1))
    span = float(largest) - float(smallest)
    if not math.isfinite(span):
        return Histogram()
    if span == 0 or bins == 1:
        return Histogram(
            edges=(float(smallest), float(largest)), counts=(int(values.numel()),)
        )
    counts = torch.histc(values.double(), bins=bins, min=float(smallest), max=float(largest))
    edges = tuple(
        float(f"{smallest + span * index / bins:.{_EXACT_SIGNIFICANT}g}")
        for index in range(bins + 1)
    )
    return Histogram(edges=edges, counts=tuple(int(item) for item in counts.tolist()))
