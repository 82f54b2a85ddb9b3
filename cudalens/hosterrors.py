"""Put torch's own exceptions into words: kind, headline, argument at fault.  Pure, no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cudalens.facts import Certainty, Kind
from cudalens.model import ErrorFacts, Evidence


@dataclass(frozen=True, kw_only=True)
class HostVerdict:
    """What is concluded from an exception that was raised on the host."""

    kind: Kind
    headline: str
    explanation: str
    certainty: Certainty = "proven"
    argument: str | None = None


_AUTOGRAD = re.compile(
    r"modified by an inplace operation"
    r"|backward through the graph a second time"
    r"|does not require grad and does not have a grad_fn"
    r"|grad can be implicitly created only for scalar outputs"
    r"|leaf Variable that requires grad"
    r"|returned an (invalid gradient|incorrect number of gradients)"
)
_CUDA = re.compile(r"^CUDA error|CUDA out of memory|CUBLAS_STATUS|CUDNN_STATUS|cuDNN error|NCCL")


def explain_host_error(evidence: Evidence, error: ErrorFacts) -> HostVerdict:
    """Say what an exception of torch's, or of a library on top of it, means."""
    headline = error.message.strip().split("\n", 1)[0] or error.type_name
    kind: Kind = "host_error"
    if _AUTOGRAD.search(error.message):
        kind = "autograd_error"
    elif _CUDA.search(error.message) or error.type_name in ("AcceleratorError", "OutOfMemoryError"):
        kind = "cuda_error"
    explanation = {
        "host_error": "The call was refused on the host before any kernel ran; CUDA is not involved.",
        "autograd_error": "Autograd refused the graph on the host; no kernel failed.",
        "cuda_error": "CUDA reported this error; it is not a device-side assert.",
    }[kind]
    return HostVerdict(kind=kind, headline=headline, explanation=explanation)
