"""Sentences of torch's own that no family puts into better words.

They are what torch checks before a call reaches an op: the kinds of the arguments, and the shapes
that a view of a tensor needs.  Each is written so that no other library says it.
"""

from __future__ import annotations

from cudalens.core.report import Evidence
from cudalens.diagnosis.host_errors._base import Answer, pattern

_SENTENCES = (
    r"\w+\(\) received an invalid combination of arguments - got \(",
    # torch 2.11 lets gather be called with a dimension's name, and then refuses it.
    r"\w+: You passed a dimname \(string\) to this op in place of a dimension index",
    # Python itself names what is missing in single quotes.
    r"\w+\(\) missing \d+ required positional arguments?: \"\w+\"",
    r"unsupported operand type\(s\) for [^:]+: (?:'Tensor' and '|'[\w.]+' and 'Tensor')",
    r"descriptor '\w+' for 'torch\._C\.",
    r"only integer tensors of a single element can be converted to an index",
    r"expected Tensor as element \d+ in argument \d+, but got ",
    r"torch\.\w+(?:\(\):)? (?:expected|expects|requires|attempted|only supports) ",
    r"torch\.take_along_dim\(\): (?:dtype of|input and) indices should ",
    r"TensorBase\.\w+\(\) takes (?:no|exactly one|exactly \d+) arguments? \(",
    r"new\(\): invalid data type '",
    r"Expected one of cpu, cuda, .* device type at start of device string: ",
    r"start \(-?\d+\) \+ length \(-?\d+\) exceeds dimension size \(\d+\)",
    r"start out of range \(expected to be in range of \[-?\d+, -?\d+\], but got -?\d+\)",
    r"narrow\(\)(?:: length must be non-negative| cannot be applied to a 0-dim tensor)",
    r"dim -?\d+ appears multiple times in the list of dims",
    r"Dimension specified as -?\d+ but tensor has no dimensions",
    r"movedim: (?:Invalid source or destination dims|repeated dim in `)",
    r"only integers, slices \(`:`\), ellipsis \(`\.\.\.`\), None and long or byte Variables ",
    r"invalid index of a 0-dim tensor\. Use `tensor\.item\(\)`",
    r"can't assign an? [\w.]+ to a torch\.[\w.]*Tensor",
    r"Tensor does not support deleting items",
    r"~ \(operator\.invert\) is only implemented on integer and Boolean-type tensors",
    r"both arguments to (?:linalg\.)?matmul need to be at least 1D, but they are \d+D and \d+D",
    r"outer: Expected 1-D argument (?:self|vec2), but got \d+-D",
    r"tensor\.(?:T|H|mT|mH) is only supported on matrices",
    r"chunk expects `chunks` to be greater than 0, got: ",
    r"number of sections must be larger than 0, got ",
    r"flatten\(\) has invalid args: start_dim cannot come after end_dim",
    r"repeats must have the same size as input along dim, but got repeats\.size\(0\) = ",
    r"diag\(\): Supports 1D or 2D tensors\. Got \d+D",
    r"quantile\(\) (?:q|input) ",
    r"cov\(\): (?:expected|fweights|aweights) ",
    r"can't retain_grad on Tensor that has requires_grad=False",
    r"size \{\[[\d, ]*\]\} is not expandable to size \{\[[\d, ]*\]\}",
)


@pattern("|".join(f"^(?:{item})" for item in _SENTENCES))
def words_of_torch(evidence: Evidence, match: object) -> Answer:
    """The message is torch's, and is repeated."""
    yield from ()
