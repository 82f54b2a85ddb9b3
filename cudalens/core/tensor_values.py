"""Summaries of a tensor's values, and positions of the bad ones.

Everything here reads the device and is called only after something went wrong, while the context
is alive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from cudalens.core.report_types import (
    Histogram,
    Number,
    Offender,
    OffenderMap,
    Offenders,
    Plane,
    TensorSummary,
    unravel,
)

MAX_FIRST = 20
MAX_UNIQUE = 32
MAP_ROWS, MAP_COLUMNS = 32, 64
MAX_CELLS = 64
MAX_PLANES = 8
_PLANE_DIMS = 2
_PLANE_NUMEL = 1 << 22
_LEVELS = 9
HISTOGRAM_BINS = 24
HOST_NUMEL = 1 << 20
"""Up to this many elements a tensor is copied to the host once and examined there."""
_LISTED = 1 << 20
"""Up to this many bad elements, listing their positions is faster than counting in a grid."""
_WORD = 8
"""One-byte marks in a 64-bit integer."""
_COUNTED = 1 << 16
"""Up to this span, the distinct integers are found by counting instead of sorting."""
_HISTOGRAM_NUMEL = 1 << 24
_HOST_PIECE, _DEVICE_PIECE = 1 << 18, 1 << 24
"""Elements of a piece: one on the host stays in the cache, and a device has few pieces."""
_EXACT_SIGNIFICANT = 6
_WHOLE = 1e4


def number(value: float) -> Number:
    """Return a Python number that JSON can hold: NaN and infinities as text."""
    if isinstance(value, (bool, int)):
        return int(value)
    if not math.isfinite(value):
        return str(value)
    rounded = float(f"{value:.7g}")
    is_other = rounded.is_integer() and not float(value).is_integer() and abs(value) < _WHOLE
    return float(f"{value:.9g}") if is_other else rounded  # 1.00000012 is not 1


def short(value: object) -> str:
    """Return a number with four digits, or with nine where four would make it a whole number.

    ``0.0010000000000000009`` is ``0.001``, and 1.0000001 is not ``1``.
    """
    text = str(value)
    try:
        exact = float(text)
    except ValueError:  # a complex number
        return text
    is_whole = text.lstrip("-").isdigit()
    if len(text) <= 8 or is_whole or not math.isfinite(exact):
        return text
    rounded = f"{exact:.4g}"
    is_other = float(rounded).is_integer() and not exact.is_integer() and abs(exact) < 1e4
    return f"{exact:.9g}" if is_other else rounded


# --- bad positions -------------------------------------------------------------------------------


def outside(tensor: Tensor, low: float, high: float) -> Tensor:
    """Mark the elements outside ``[low, high]``; NaN is not marked.

    Returns:
        bool[shape of tensor]
    """
    bad = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    for piece, mark in zip(_pieces(tensor.reshape(-1)), _pieces(bad.view(-1)), strict=True):
        if piece.numel():
            # Most pieces hold nothing bad, and one reduction is faster than two comparisons.
            smallest, largest = torch.aminmax(piece)
            if not (low <= smallest and largest <= high):
                torch.lt(piece, low, out=mark)
                mark.logical_or_(piece > high)
    return bad


def find_offenders(tensor: Tensor, bad: Tensor, marked: Sequence[int] = ()) -> Offenders:
    """Count the bad elements of ``tensor`` and return the first ones in row-major order.

    Args:
        tensor: the tensor that the op received, any shape; for complex numbers their sizes.
        bad: bool[shape of tensor], true where the value breaks the bound.
        marked: good values with a meaning of their own, which ``others`` leaves out.
    """
    if tensor.numel() <= HOST_NUMEL:
        tensor, bad = tensor.detach().cpu(), bad.cpu()
    marks = bad.reshape(-1)
    count = int(marks.count_nonzero())
    listed = _listed(marks).cpu() if count <= _LISTED else None
    places = _first_places(marks) if listed is None else listed[:MAX_FIRST].tolist()
    positions = [unravel(place, tuple(bad.shape)) for place in places]
    first = tuple(
        Offender(position=position, value=number(tensor[position].item())) for position in positions
    )
    has_map = tensor.dim() and tensor.numel()
    grid = _offender_map(tensor, bad, listed) if has_map else None
    low, high = _ends(grid, first)
    good, allowed = ~bad, 0
    for value in marked:
        marks_here = good & (tensor == value)
        allowed += int(marks_here.count_nonzero())
        good &= ~marks_here
    least, most = _extremes_where(tensor, good)
    low_end, high_end = short(least), short(most)
    others = f"{low_end} … {high_end}" if least != most else low_end
    return Offenders(
        count=count,
        total=tensor.numel(),
        first=first,
        map=grid,
        min=low,
        max=high,
        others=None if least is None else others,
        allowed=allowed,
        planes=_planes(tensor, bad, marked) if has_map else (),
    )


def _planes(tensor: Tensor, bad: Tensor, marked: Sequence[int]) -> tuple[Plane, ...]:
    """Return the first planes with a bad value, as characters."""
    shape = tuple(size for size in tensor.shape if size > 1)
    if len(shape) < _PLANE_DIMS or shape[-1] * shape[-2] > _PLANE_NUMEL:
        return ()
    outer, size = shape[:-_PLANE_DIMS], (shape[-2], shape[-1])
    marks = bad.reshape(-1, *size)
    values = tensor.detach().reshape(-1, *size)
    places = marks.flatten(1).any(1).nonzero()[:MAX_PLANES, 0].tolist()
    return tuple(
        Plane(index=unravel(at, outer), size=size, rows=_cells(values[at], marks[at], marked))
        for at in places
    )


def _cells(values: Tensor, bad: Tensor, marked: Sequence[int]) -> tuple[str, ...]:
    """Return one plane as rows of characters, each for a rectangle of values."""
    numbers, bad = values.cpu().double(), bad.cpu()
    is_marked = torch.isin(numbers, torch.tensor([float(item) for item in marked]).double())
    good = ~bad & ~is_marked & numbers.isfinite()
    low, high = (float(item) for item in torch.aminmax(numbers[good])) if good.any() else (0, 0)
    # 1e-300: no division by 0 where all good values are equal.
    levels = torch.where(good, (numbers - low) / max(high - low, 1e-300) * _LEVELS, 0.0)
    sides = [math.ceil(size / MAX_CELLS) for size in values.shape]

    def summed(parts: Tensor) -> Any:
        spare = [-size % side for size, side in zip(values.shape, sides, strict=True)]
        whole = torch.nn.functional.pad(parts.double(), (0, spare[1], 0, spare[0]))
        cells = whole.unflatten(0, (-1, sides[0])).unflatten(2, (-1, sides[1]))
        return cells.sum((1, 3)).tolist()

    counts = (summed(torch.ones_like(numbers)), *map(summed, (bad, is_marked, good, levels)))
    return tuple("".join(map(_cell, *rows)) for rows in zip(*counts, strict=True))


def _cell(number: float, bad: float, marked: float, good: float, level: float) -> str:
    if bad:
        return "x" if bad == number else "/"
    return "-" if marked == number or not good else str(min(round(level / good), _LEVELS))


def _extremes_where(tensor: Tensor, mask: Tensor) -> tuple[Number, Number]:
    """Return the smallest and the largest element that a mask selects, without NaN."""
    ends: list[Any] = []
    for piece, marks in zip(_pieces(tensor.reshape(-1)), _pieces(mask.reshape(-1)), strict=True):
        values = piece[marks]
        if values.is_floating_point():
            values = values[~values.isnan()].double()
        if values.numel():
            wide = values if values.is_floating_point() else values.long()
            ends += [item.item() for item in torch.aminmax(wide)]
    return (number(min(ends)), number(max(ends))) if ends else (None, None)


def _ends(grid: OffenderMap | None, first: tuple[Offender, ...]) -> tuple[Number, Number]:
    """Return the smallest and the largest value of a tensor, by its grid or its one element."""
    alone: tuple[Any, ...] = tuple(item.value for item in first[:1])
    low, high = (alone, alone) if grid is None else (grid.low, grid.high)
    if not low:
        return None, None
    return ("nan", "nan") if "nan" in low else (min(low, key=float), max(high, key=float))


def _listed(marks: Tensor) -> Tensor:
    """Return the marked positions in order; eight marks at once are tested as one integer."""
    whole = marks.numel() // _WORD * _WORD
    # A view as integers needs contiguous marks that begin at a multiple of eight bytes.
    if marks.stride() != (1,) or marks.storage_offset() % _WORD or whole <= HOST_NUMEL:
        return marks.nonzero().squeeze(1)
    words = marks[:whole].view(torch.int64).nonzero()
    places = (words * _WORD + torch.arange(_WORD, device=marks.device)).reshape(-1)
    rest = marks[whole:].nonzero().squeeze(1) + whole
    return torch.cat((places[marks[places]], rest))


def _first_places(marks: Tensor) -> list[int]:
    # Piece by piece: nonzero() of a whole tensor takes eight bytes for each bad element.
    positions: list[int] = []
    start = 0
    for piece in _pieces(marks):
        if len(positions) >= MAX_FIRST:
            break
        here = piece.nonzero()[: MAX_FIRST - len(positions), 0]
        positions.extend(start + item for item in here.tolist())
        start += piece.numel()
    return positions


def _offender_map(tensor: Tensor, bad: Tensor, listed: Tensor | None) -> OffenderMap:
    """Count and bound the values in each cell of a coarse grid over rows and columns.

    Args:
        listed: the flat positions of the bad elements, when they are known.
    """
    values = _with_kernels(
        tensor.reshape(1, -1) if tensor.dim() == 1 else tensor.reshape(tensor.shape[0], -1)
    )
    rows, columns = (
        math.ceil(size / math.ceil(size / most))  # cells of equal size, so that a ramp is straight
        for size, most in zip(values.shape, (MAP_ROWS, MAP_COLUMNS), strict=True)
    )
    low, high = _grid(values, rows, columns, _bounds)
    if listed is None:
        marks = bad.reshape(values.shape)
        counts = _grid(marks, rows, columns, lambda block: block.sum((1, 3)))
    else:
        row = _part_of(listed // values.shape[1], values.shape[0], rows)
        column = _part_of(listed % values.shape[1], values.shape[1], columns)
        counts = torch.bincount(row * columns + column, minlength=rows * columns)
    return OffenderMap(
        rows=rows,
        columns=columns,
        bad=tuple(counts.reshape(-1).tolist()),
        low=tuple(map(number, low.reshape(-1).tolist())),
        high=tuple(map(number, high.reshape(-1).tolist())),
    )


def _grid(values: Tensor, rows: int, columns: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce a matrix to ``rows`` by ``columns`` cells, cut as ``tensor_split`` cuts."""
    bands = []
    for top, down, height in _cuts(values.shape[0], rows):
        band = values[top : top + down * height].unflatten(0, (down, height))
        cells = [
            reduce(band[:, :, left : left + across * width].unflatten(2, (across, width)))
            for left, across, width in _cuts(values.shape[1], columns)
        ]
        bands.append(torch.cat(cells, dim=-1))
    return torch.cat(bands, dim=-2)


def _bounds(block: Tensor) -> Tensor:
    if block.shape[:2] == (1, 1) and block.shape[3] > _HOST_PIECE:  # twice as fast one by one
        return torch.stack([torch.stack(torch.aminmax(cell)) for cell in block[0, 0]], -1)[:, None]
    # One dimension at a time, the longer first: several times as fast as both at once.
    longer = 3 if block.shape[3] >= block.shape[1] else 1
    low, high = torch.aminmax(block, dim=longer, keepdim=True)
    return torch.stack((low.amin((1, 3)), high.amax((1, 3))))


def _cuts(size: int, parts: int) -> Iterator[tuple[int, int, int]]:
    """Yield start, number and width of the longer parts, then of the shorter ones."""
    width, longer = divmod(size, parts)
    if longer:
        yield 0, longer, width + 1
    yield longer * (width + 1), parts - longer, width


def _part_of(index: Tensor, size: int, parts: int) -> Tensor:
    """Return the number of the part that contains each index."""
    width, longer = divmod(size, parts)
    edge = longer * (width + 1)
    return torch.where(index < edge, index // (width + 1), longer + (index - edge) // width)


# --- summaries -----------------------------------------------------------------------------------


def summarise(tensor: Tensor) -> TensorSummary:
    """Describe the values of a tensor: range, mean, NaN and infinity counts, histogram.

    Empty, complex, quantised, sparse and uint64 tensors have an empty summary.
    """
    is_dense = tensor.layout == torch.strided and not tensor.is_quantized
    is_other = tensor.is_complex() or tensor.dtype == torch.uint64
    if not is_dense or is_other or tensor.numel() == 0:
        return TensorSummary()
    values = tensor.detach()
    if values.numel() <= HOST_NUMEL:
        values = values.cpu()
    values = _with_kernels(values).reshape(-1)
    return _summarise_float(values) if values.is_floating_point() else _summarise_int(values)


def _with_kernels(values: Tensor) -> Tensor:
    """Return values in a dtype for which torch has reductions."""
    if values.dtype == torch.bool:
        return values.to(torch.uint8)
    return values.long() if values.dtype in (torch.uint16, torch.uint32) else values


def _pieces(values: Tensor) -> Sequence[Tensor]:
    pieces: Sequence[Tensor] = values.split(
        _HOST_PIECE if values.device.type == "cpu" else _DEVICE_PIECE
    )
    return pieces


def _summarise_float(values: Tensor) -> TensorSummary:
    # Half precision overflows in sums, and fp8 has no arithmetic at all.
    wide = values if values.dtype in (torch.float32, torch.float64) else values.float()
    nan = inf = 0
    smallest, largest = (item.item() for item in torch.aminmax(wide))
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        nan = sum(int(piece.isnan().count_nonzero()) for piece in _pieces(wide))
        inf = sum(int(piece.isinf().count_nonzero()) for piece in _pieces(wide))
        wide = wide[wide.isfinite()]
        if wide.numel() == 0:
            return TensorSummary(nan=nan, inf=inf)
        smallest, largest = (item.item() for item in torch.aminmax(wide))
    return TensorSummary(
        min=number(smallest),
        max=number(largest),
        mean=number(_mean(wide)),
        nan=nan,
        inf=inf,
        histogram=_histogram(wide, smallest, largest),
    )


def _summarise_int(values: Tensor) -> TensorSummary:
    smallest, largest = (int(item.item()) for item in torch.aminmax(values))
    # A sum of int64 is exact unless it overflows.
    is_exact = max(abs(smallest), abs(largest)) * values.numel() < 1 << 63
    unique = None
    if values.numel() <= HOST_NUMEL:
        if largest - smallest < _COUNTED:
            distinct = torch.bincount(values.long() - smallest).nonzero().squeeze(1) + smallest
        else:
            distinct = values.unique()
        unique = tuple(distinct.tolist()) if distinct.numel() <= MAX_UNIQUE else None
    return TensorSummary(
        min=smallest,
        max=largest,
        mean=number(int(values.sum()) / values.numel() if is_exact else _mean(values)),
        nan=0,
        inf=0,
        unique=unique,
        histogram=_histogram(values, smallest, largest),
    )


def _mean(values: Tensor) -> float:
    dtype = torch.float32 if values.device.type == "mps" else torch.float64  # MPS has no float64
    sums = [piece.sum(dtype=dtype) for piece in _pieces(values)]
    return float(torch.stack(sums).sum().item()) / values.numel()


def _histogram(values: Tensor, smallest: float, largest: float) -> Histogram:
    if values.numel() > _HISTOGRAM_NUMEL:
        return Histogram()
    bins = HISTOGRAM_BINS
    is_int = not values.is_floating_point()
    if is_int:
        # One bin per value while there are few, so that classes can be read off.
        bins = min(bins, int(largest) - int(smallest) + 1)
    span = float(largest) - float(smallest)
    if not math.isfinite(span):  # the difference of two float64 may overflow
        return Histogram()
    if span == 0:
        return Histogram(edges=(float(smallest), float(largest)), counts=(int(values.numel()),))
    if is_int and bins == span + 1:
        parts = [
            torch.bincount(piece.long() - int(smallest), minlength=bins)
            for piece in _pieces(values)
        ]
    else:
        parts = [_binned(piece, smallest, largest, bins) for piece in _pieces(values)]
    counts = torch.stack(parts).sum(0)
    edges = tuple(
        float(f"{smallest + span * index / bins:.{_EXACT_SIGNIFICANT}g}")
        for index in range(bins + 1)
    )
    return Histogram(edges=edges, counts=tuple(int(item) for item in counts.tolist()))


def _binned(piece: Tensor, smallest: float, largest: float, bins: int) -> Tensor:
    """Count the values in each of ``bins`` equal parts from the smallest to the largest."""
    low, high = float(smallest), float(largest)
    if piece.device.type == "cpu":
        return torch.histc(piece.double(), bins=bins, min=low, max=high)
    # A GPU's histc refuses floats under deterministic algorithms; counting whole numbers does not.
    index = ((piece.double() - low) * (bins / (high - low))).long().clamp_(0, bins - 1)
    return torch.bincount(index, minlength=bins)
