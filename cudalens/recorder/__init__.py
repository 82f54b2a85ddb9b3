"""The flight recorder: which op ran where, on what, and what became of its tensors.

While it is open it notes little and keeps no tensor alive; all questions are answered after a
failure, and only as far as the recorded facts prove the answer.
"""

from cudalens.recorder.failure import OpRecord
from cudalens.recorder.recorder import Recorder

__all__ = ["OpRecord", "Recorder"]
