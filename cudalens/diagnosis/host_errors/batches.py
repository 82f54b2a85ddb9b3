"""Samples that no batch can be made of."""

from __future__ import annotations

import re

from cudalens.core.report import Evidence
from cudalens.diagnosis.host_errors._base import HostVerdict, family, host
from cudalens.diagnosis.host_errors._words import ints, said


@family(
    r"stack expects each tensor to be equal size, but got \[(?P<a>[\d, ]*)\] at entry (?P<i>\d+) "
    r"and "
    r"\[(?P<b>[\d, ]*)\] at entry (?P<j>\d+)"
)
def unequal_samples(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """Tensors of different shapes cannot be stacked, in a batch or elsewhere."""
    a, b = ints(match["a"]), ints(match["b"])
    in_loader = is_collating(evidence)
    one, other = (
        (f"sample {match['i']} of the batch", f"sample {match['j']}")
        if in_loader
        else (f"tensors[{match['i']}]", f"tensors[{match['j']}]")
    )
    return host(
        f"{one} has shape {said(a)}, {other} has {said(b)}: they cannot be stacked",
        "A batch is one tensor, so its samples must be of one shape."
        if in_loader
        else "stack makes one tensor of tensors of one shape.",
        "batch" if in_loader else f"tensors[{match['j']}]",
        in_loader=in_loader,
        shapes=(a, b),
    )


def is_collating(evidence: Evidence) -> bool:
    """Return whether a DataLoader was making a batch."""
    said_so = evidence.error is not None and "DataLoader worker" in evidence.error.message
    return said_so or any("collate" in item.file for item in evidence.frames)


@family(r"default_collate: batch must contain .*?; found <class '(?P<kind>[\w.]+)'>")
def uncollatable_sample(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A dataset returned something that no batch can be made of."""
    kind = match["kind"]
    return host(
        f"the dataset returned a sample with a value of type {kind}: no batch can be made of it",
        "A batch can be made of tensors, arrays, numbers, texts, and dicts and lists of them.",
        "batch",
        kind=kind,
    )


@family(r"each element in list of batch should be of equal size")
def unequal_lists(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """Samples that are lists differ in length."""
    return host(
        "the samples of the batch are lists of different lengths",
        "default_collate joins the first elements, the second ones, and so on.",
        "batch",
    )


@family(r"^'(?P<key>[^']*)'$", is_distinct=False)
def sample_key(evidence: Evidence, match: re.Match[str]) -> HostVerdict | None:
    """Samples that are dicts have different keys."""
    error = evidence.error
    if error is None or error.type_name != "KeyError" or not is_collating(evidence):
        return None
    return host(
        f"a sample of the batch has no key {match['key']!r}, which its first sample has",
        "default_collate joins the samples key by key.",
        "batch",
        key=match["key"],
    )


@family(
    r"Unable to create tensor, you should probably activate truncation and/or padding"
    r"|Unable to create tensor returning overflowing tokens"
)
def unequal_tokens(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A tokenizer cannot make one tensor of token lists of different lengths."""
    return host(
        "the texts have different numbers of tokens, and no padding makes them equal",
        "A tensor needs rows of one length.",
        "padding",
    )
