"""Guards of segments of different lengths, one behind the other in one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cudalens.core.device_asserts import assert_text
from cudalens.core.report_types import Bounds, Violation
from cudalens.core.tensor_values import find_offenders
from cudalens.guards._base import guard
from cudalens.guards._ranges import all_true, violation_at
from cudalens.guards.engine import INDEX_DTYPES, Condition, Need

_AT_LEAST_0 = Bounds(min=0, text="at least 0")
_SORTED = Bounds(min=0, text="no smaller than the offset before it")


@guard(
    "aten::repeat_interleave.Tensor",
    "aten::repeat_interleave.Tensor_out",
    records=("repeat_interleave_size", "repeat_interleave_negative"),
    covers_inner=True,
    waits=True,
)
def repeats_fill_output(repeats: Tensor, output_size: int | None) -> Need:
    """With an output_size, every repeat is at least 0 and their sum is output_size.

    Source:   Repeat.cu:20 and :33, torch 2.13.0; without an output_size the host checks
    Cost:     one reduction over the repeats, one copy of two numbers
    Passes:   aten.repeat_interleave.Tensor(tensor([2, 0, 1]), output_size=3)
    Violates: aten.repeat_interleave.Tensor(tensor([2, 0, 1]), output_size=4)
    """
    if output_size is None or output_size < 0 or repeats.numel() == 0:
        return None
    if repeats.dim() != 1 or repeats.dtype not in INDEX_DTYPES:
        return None
    return Condition(lambda: _bad_repeats(repeats, output_size))


def _bad_repeats(repeats: Tensor, output_size: int) -> Violation | None:
    # Equal to the sum of the magnitudes only if none is negative.
    total, magnitude = torch.stack((repeats, repeats.abs())).sum(-1).tolist()
    if total == magnitude == output_size:
        return None
    which = "size" if total != output_size else "negative"
    size_text = assert_text(f"repeat_interleave_{which}")
    if total != magnitude:
        return _negative(repeats, repeats < 0, "repeats", device_text=size_text)
    sums = repeats.sum()
    return Violation(
        argument="repeats",
        headline=f"{{argument}} sums to {total}, and output_size is {output_size}",
        explanation="The result has output_size elements, and the repeats must fill it exactly.",
        offenders=find_offenders(sums, torch.ones_like(sums, dtype=torch.bool)),
        bounds=Bounds(min=output_size, max=output_size, text=f"a sum of {output_size}"),
        is_index=False,
        device_text=size_text,
    )


@guard(
    "aten::segment_reduce",
    records=("segment_reduce_nd", "segment_reduce_1d_mean"),
    covers_inner=True,
    waits=True,
)
def segment_lengths_not_negative(
    data: Tensor,
    reduce: str,
    lengths: Tensor | None,
    offsets: Tensor | None,
    axis: int,
    unsafe: bool,
) -> Need:
    """No segment of data of several dimensions, or of a mean, has a length below 0.

    Source:   SegmentReduce.cu:146 and :78, torch 2.13.0; the host checks lengths unless unsafe
    Cost:     one reduction over the lengths or offsets, one copy of one number
    Passes:   aten.segment_reduce(zeros(3, 2), "sum", offsets=tensor([0, 2, 2, 3]))
    Violates: aten.segment_reduce(zeros(3, 2), "sum", offsets=tensor([0, 2, 1, 3]))
    """
    segments = _segments(data, lengths, offsets, axis, unsafe)
    if segments is None or (data.dim() == 1 and reduce != "mean"):
        return None
    key = "segment_reduce_nd" if data.dim() > 1 else "segment_reduce_1d_mean"
    return Condition(lambda: _asserted(segments, key))


def _asserted(segments: _Segments, key: str) -> Violation | None:
    lengths = segments.lengths()
    if lengths.numel() == 0 or int(lengths.amin()) >= 0:
        return None
    bad = segments.negative()
    return _negative(segments.values, bad, segments.name, device_text=assert_text(key))


@guard("aten::segment_reduce", is_silent=True, waits=True)
def segments_lie_in_data(
    data: Tensor,
    reduce: str,
    lengths: Tensor | None,
    offsets: Tensor | None,
    axis: int,
    unsafe: bool,
) -> Need:
    """Every segment that is not empty is in [0, size] of the reduced dimension.

    Source:   SegmentReduce.cu, torch 2.13.0: no assertion, and none on the CPU for sums too long
    Cost:     one reduction over the lengths or offsets, one copy of one number
    Passes:   aten.segment_reduce(zeros(3), "sum", offsets=tensor([0, 2, 3]))
    Violates: aten.segment_reduce(zeros(3), "sum", offsets=tensor([0, 2, 4]))
    """
    segments = _segments(data, lengths, offsets, axis, unsafe)
    if segments is None:
        return None
    asserts = data.dim() > 1 or reduce == "mean"  # segment_lengths_not_negative has said so
    return Condition(lambda: _unchecked(segments, data.size(axis), asserts=asserts))


@dataclass(frozen=True)
class _Segments:
    """Lengths, or offsets, of which there is one more than there are segments."""

    values: Tensor
    name: str

    def lengths(self) -> Tensor:
        return self.values if self.name == "lengths" else self.values.diff(dim=-1)

    def negative(self) -> Tensor:
        """Mark negative lengths, or the offsets that are smaller than the one before."""
        if self.name == "lengths":
            return self.values < 0
        bad = torch.zeros_like(self.values, dtype=torch.bool)
        bad[..., 1:] = self.lengths() < 0
        return bad

    def stay_inside(self, size: int) -> bool:
        """Return whether none is negative and none can leave the data, with one reduction."""
        values = self.values
        if self.name == "lengths":
            # A negative length counts as too long, so that the sum shows both.
            lengths = values.to(torch.int64)
            return all_true(lengths.masked_fill(lengths < 0, size + 1).sum(-1) <= size)
        steps = (values[..., :1], self.lengths(), size - values[..., -1:])
        return int(torch.cat(steps, -1).amin()) >= 0


def _segments(
    data: Tensor, lengths: Tensor | None, offsets: Tensor | None, axis: int, unsafe: bool
) -> _Segments | None:
    """Return the lengths or offsets of a call that torch takes and does not check on the host."""
    segments = offsets if lengths is None else lengths
    if segments is None or segments.numel() == 0 or segments.device != data.device:
        return None
    if lengths is not None and (offsets is not None or not unsafe):
        return None
    rank = segments.dim()
    fits = 0 < rank <= data.dim() and axis % data.dim() == rank - 1
    if not fits or segments.dtype not in INDEX_DTYPES:
        return None
    name = "offsets" if lengths is None else "lengths"
    return _Segments(segments, name) if segments.shape[:-1] == data.shape[: rank - 1] else None


def _unchecked(segments: _Segments, size: int, *, asserts: bool) -> Violation | None:
    """Check what no kernel does: negative lengths unless one asserts them, and the data's end."""
    if segments.stay_inside(size):
        return None
    values, name = segments.values, segments.name
    bad = segments.negative()
    if bool(bad.any()):
        return None if asserts else _negative(values, bad, name, device_text=None)
    ends = values.cumsum(-1)
    # Where one that has elements leaves the data.
    is_length = name == "lengths"
    bad = (ends > size) & (values > 0) if is_length else _span_ends_outside(values, size)
    if not bool(bad.any()):
        return None
    complaint = f"ends its segment at {int(ends[bad][0])}, which is" if is_length else "is"
    return violation_at(
        values,
        bad,
        f"{complaint} outside the {size} elements of {{related}}",
        argument=name,
        explanation="The kernel takes the segment from memory beyond the data.",
        bounds=Bounds(min=0, max=size, text=f"0 … {size}"),
        related="data",
        size=size,
        dim=values.dim() - 1,
        is_silent=True,
        is_replay_safe=False,
    )


def _span_ends_outside(offsets: Tensor, size: int) -> Tensor:
    """Mark the ends of spans behind the data, and the starts before it."""
    offsets = offsets.to(torch.int64)
    is_span = offsets.diff(dim=-1) > 0
    bad = torch.zeros_like(offsets, dtype=torch.bool)
    bad[..., 1:] |= is_span & (offsets[..., 1:] > size)
    bad[..., :-1] |= is_span & (offsets[..., :-1] < 0)
    return bad


def _negative(tensor: Tensor, bad: Tensor, name: str, *, device_text: str | None) -> Violation:
    is_offset = name == "offsets"
    return violation_at(
        tensor,
        bad,
        "is smaller than the offset before it" if is_offset else "is negative",
        argument=name,
        explanation="A segment, or a repeat, cannot have fewer than no elements.",
        bounds=_SORTED if is_offset else _AT_LEAST_0,
        is_index=False,
        device_text=device_text,
        is_silent=device_text is None,
        # The CPU kernels read and write out of bounds before they reach the negative one.
        is_replay_safe=False,
    )
