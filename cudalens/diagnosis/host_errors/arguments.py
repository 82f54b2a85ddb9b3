"""Arguments of the wrong kind: gradients that are not there, tensors as conditions, texts.

What an argument is, in place of a tensor, is put behind torch's words (``with_user_names``).
"""

from __future__ import annotations

import re

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint
from cudalens.diagnosis.host_errors._base import Answer, host, pattern, row
from cudalens.diagnosis.user_code import called_name


@pattern(
    r"^'NoneType' object has no attribute |^unsupported operand type\(s\) for .*'NoneType'",
    is_distinct=False,
)
def no_gradient(evidence: Evidence, match: re.Match[str]) -> Answer:
    """The gradient of a tensor is used where it has none."""
    if any(item.name.endswith(".grad") for item in evidence.refused_arguments.odd_arguments):
        yield Hint(
            rule="no_gradient",
            text="a leaf has a gradient after the backward of a loss that depends on it, until "
            "zero_grad() takes it away. The result of an op keeps none without retain_grad()",
        )


@pattern(r"^Boolean value of Tensor with (?:more than one|no) values? is ambiguous")
def ambiguous_truth(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A tensor is used as a condition, or a layer was made with tensors as its settings."""
    files = [item.file for item in evidence.frames if item.function == "__init__"]
    if any("torch/nn/" in file.replace("\\", "/") for file in files):
        yield host(
            f"{called_name(evidence) or 'a layer'} is made with a tensor as one of its settings",
            "A layer is made first, with its settings, and is called with tensors after that.",
        )
        return
    yield Hint(
        rule="truth_of_all",
        text="use .any() if one true element is enough, .all() if all must be true. & | ~ are and, "
        "or and not of each element",
    )


row(
    "texts_in_tensor",
    r"too many dimensions 'str'|new\(\): invalid data type 'str'",
    "data contains strings, and a tensor contains numbers",
    "Class names are numbered first, words are given ids by a tokenizer or a vocabulary.",
    "data",
)
