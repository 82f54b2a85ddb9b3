"""CUDA's errors about memory that it does not have."""

from __future__ import annotations

import re

from cudalens.core.report import Evidence
from cudalens.diagnosis.host_errors._base import HostVerdict, cuda, family
from cudalens.diagnosis.host_errors._words import NO_ASSERT

_SETTING = re.compile(r"PYTORCH_(?:CUDA_)?ALLOC_CONF")
_BEYOND = "more than 1EB"
_LARGEST_GPU = 2.0**50
"""Far more than any, for a message that does not tell the size of this one."""
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@family(
    r"Allocation was preemptively rejected because it would exceed per_process_memory_fraction "
    r"limit\. Requested size: (?P<asked>[\d.]+ \w+)?"
)
def memory_fraction(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """The limit that the process has set itself is reached, not that of the device."""
    asked = match["asked"]
    return cuda(
        "the process has no room" + (f" for {asked}" if asked else "") + " below its own limit",
        f"{NO_ASSERT} The context is intact. torch.cuda.set_per_process_memory_fraction or "
        "per_process_memory_fraction has set the limit; the GPU itself may have room. Next step: "
        "raise it.",
        "proven",
        asked=asked,
    )


@family(
    r"CUDA out of memory\.(?: Tried to allocate (?P<asked>[\d.]+ \w+|more than 1EB)\.?)?"
    r"(?:.*?(?:has a total capacity of |GPU \d+; )(?P<total>[\d.]+ \w+))?"
    r"(?:.*?(?:of which |already allocated; )(?P<free>[\d.]+ \w+)(?: is)? free)?"
    r"(?:.*?Of the allocated memory (?P<used>[\d.]+ \w+) is allocated by PyTorch, (?:with "
    r"[\d.]+ \w+ allocated in private pools \(e\.g\., CUDA Graphs\), )?and "
    r"(?P<reserved>[\d.]+ \w+) is reserved by PyTorch but unallocated)?"
)
def out_of_memory(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """The device has no room for a tensor."""
    return _full(evidence, match.string, **match.groupdict())


@family(
    r"Allocation on device \S* ?would exceed allowed memory\. \(out of memory\)"
    r"(?:\s*Currently allocated +: (?P<used>[\d.]+ \w+))?(?:\s*Requested +: (?P<asked>[\d.]+ \w+))?"
    r"(?:\s*Device limit +: (?P<total>[\d.]+ \w+))?"
    r"(?:\s*Free \(according to CUDA\): (?P<free>[\d.]+ \w+))?"
)
def out_of_memory_async(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """The device has no room for a tensor, with CUDA's own allocator in place of PyTorch's."""
    return _full(evidence, match.string, reserved=None, **match.groupdict())


def _full(
    evidence: Evidence,
    message: str,
    *,
    asked: str | None,
    free: str | None,
    total: str | None,
    used: str | None,
    reserved: str | None,
) -> HostVerdict:
    headline = "the GPU has no room" + (f" for {asked}" if asked else "")
    if free and total:
        headline += f": {free} of {total} is free"
    held = evidence.memory_holders
    unused = f", another {reserved} is reserved and unused" if reserved else ""
    fixes = _memory_fixes(_bytes(asked), _bytes(total), _bytes(reserved), message)
    parts = [
        f"PyTorch's tensors take {used}{unused}." if used else "",
        f"The largest that your variables hold: {'; '.join(held)}." if held else "",
        NO_ASSERT,
        "The context is intact.",
        f"Next step, the most effective first: {', '.join(fixes)}.",
    ]
    return cuda(
        headline,
        " ".join(filter(None, parts)),
        "proven",
        asked=asked,
        free=free,
        reserved=reserved,
    )


def _memory_fixes(
    asked: float | None, total: float | None, reserved: float | None, message: str
) -> list[str]:
    """Return what helps against full memory, in the order of its effect on these numbers."""
    fixes = [
        "make the batch smaller or the sequences shorter",
        "evaluate under torch.no_grad(), and keep loss.item() instead of loss",
        "del what is no longer needed (in a notebook Out and _ hold results too)",
        "train in bfloat16 or with gradient checkpointing",
    ]
    if asked and asked > (total or _LARGEST_GPU):
        return ["look at the shape: this one tensor is larger than the whole GPU", *fixes[:2]]
    if asked and reserved and reserved >= asked:
        # There is room in sum, in pieces that are too small.
        # Releases call the variable by one of two names, and their message by the one they read.
        setting = _SETTING.search(message)
        name = setting[0] if setting else "PYTORCH_CUDA_ALLOC_CONF"
        return [f"set {name}=expandable_segments:True before the start", *fixes]
    return fixes


def _bytes(text: str | None) -> float | None:
    if text is None:
        return None
    number, _, unit = text.partition(" ")
    if text == _BEYOND:
        return float("inf")
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
