"""CUDA's errors about memory that it does not have."""

from __future__ import annotations

import re

from cudalens.hosterrors._base import HostVerdict, cuda, family
from cudalens.hosterrors._words import NO_ASSERT
from cudalens.model import Evidence

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@family(
    r"CUDA out of memory\.(?: Tried to allocate (?P<asked>[\d.]+ \w+)\.?)?"
    r"(?:.*?(?:has a total capacity of |GPU \d+; )(?P<total>[\d.]+ \w+))?"
    r"(?:.*?(?:of which |already allocated; )(?P<free>[\d.]+ \w+)(?: is)? free)?"
    r"(?:.*?Of the allocated memory (?P<used>[\d.]+ \w+) is allocated by PyTorch, and "
    r"(?P<reserved>[\d.]+ \w+) is reserved by PyTorch but unallocated)?"
)
def out_of_memory(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """The device has no room for a tensor."""
    asked, free, total = match["asked"], match["free"], match["total"]
    headline = "the GPU has no room" + (f" for {asked}" if asked else "")
    if free and total:
        headline += f": {free} of {total} is free"
    held = [text for name, text in evidence.facts if name.startswith("memory.")]
    parts = [
        f"PyTorch's tensors take {match['used']}, another {match['reserved']} is reserved and "
        "unused."
        if match["used"]
        else "",
        f"The largest that your variables hold: {'; '.join(held)}." if held else "",
        NO_ASSERT,
        "The context is intact.",
        "Next step, the most effective first: "
        + ", ".join(_memory_fixes(_bytes(asked), _bytes(total), _bytes(match["reserved"])))
        + ".",
    ]
    return cuda(
        headline,
        " ".join(filter(None, parts)),
        "proven",
        asked=asked,
        free=free,
        reserved=match["reserved"],
    )


def _memory_fixes(asked: float | None, total: float | None, reserved: float | None) -> list[str]:
    """Give what helps against full memory, in the order of its effect on these numbers."""
    fixes = [
        "make the batch smaller or the sequences shorter",
        "evaluate under torch.no_grad(), and keep loss.item() instead of loss",
        "del what is no longer needed (in a notebook Out and _ hold results too)",
        "train in bfloat16 or with gradient checkpointing",
    ]
    if asked and total and asked > total:
        return ["look at the shape: this one tensor is larger than the whole GPU", *fixes[:2]]
    if asked and reserved and reserved >= asked:
        # There is room in sum, in pieces that are too small.
        return ["set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the start", *fixes]
    return fixes


def _bytes(text: str | None) -> float | None:
    if text is None:
        return None
    number, _, unit = text.partition(" ")
    return float(number) * _UNITS[unit] if unit in _UNITS else None


@family(r"(?:CUDA error|CUDA driver error|\[CUDA\]): out of memory")
def memory_refused(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """CUDA itself had no memory to give, where PyTorch's allocator was not asked."""
    return cuda(
        "CUDA could not get the memory that it asked for itself",
        f"{NO_ASSERT} PyTorch's allocator says it in other words: here a context, a library or "
        "pinned host memory usually is what needed some. Next step: see in nvidia-smi what other "
        "processes hold on this GPU.",
        "likely",
    )
