"""The flight recorder: which API call ran where, on what, and what became of its tensors.

While it is open it notes little and keeps no tensor alive; all questions are answered after a
failure, and only as far as the recorded facts prove the answer.
"""

from cudalens.recorder import backward, mode, replaced
from cudalens.recorder.recorder import Recorder

PASSING_FILES = frozenset({mode.__file__, backward.__file__, replaced.__file__})
"""Files whose functions only hand a call on: what they called is the user's call."""

__all__ = ["PASSING_FILES", "Recorder"]
