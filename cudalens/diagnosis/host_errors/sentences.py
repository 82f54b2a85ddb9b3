"""Messages that only torch raises, and that are shown as they are.

Where neither a recorder nor the line tells whose an exception is, in a log or of a worker, they do.
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
    r"\w+\(\): argument '\w+' (?:\(position \d+\) )?(?:must be |failed to unpack the object )",
    r"[Yy]ou (?:have to|must) specify (?:either |exactly one of |at least )",
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
    # Shapes.
    r"The shape of the mask \[[\d, ]*\] at index \d+ does not match the shape of the indexed ",
    r"Expected size for first two dimensions of batch2 tensor to be: |size mismatch, got input \(",
    r"\w+ must be a \dD tensor|(?:vector and vector|1D tensors) expected, but got \dD|einsum\(\): ",
    r"inconsistent tensor size, expected tensor |too many indices for tensor of dimension \d",
    r"shape '\[[-\d, ]+\]' is invalid for input of size |view size is not compatible with input ",
    r"Sizes of tensors must match except in dimension |stack expects each tensor to be equal size",
    r"shape mismatch: value tensor of shape |index -?\d+ is out of bounds for dimension \d+ with ",
    r"Dimension out of range \(expected to be in range of |[\w():]* ?number of dimensions ",
    r"Expected \dD \(unbatched\) or |Calculated padded input size per channel: |Expected hidden",
    r"expected [\dD or]+ input \(got \dD input\)|Expected number of channels in input to be div",
    r"Expected key_padded_mask\.shape|The shape of the [23]D attn_mask is |Error\(s\) in loading ",
    r"(?:Using a t|T)arget size \(torch\.Size\(|Expected input batch_size |Expected target size \[",
    r"0D or 1D target tensor expected|only batches of spatial targets |input and target batch or ",
    r"size mismatch \(got input: |weight tensor should be defined either for all \d+ classes",
    # Dtypes.
    r"Input type \(|[\w ]+ (?:must|to) have (?:the )?same dtype, |\"\w+\" not implemented for '",
    r"expected (?:target dtype|scalar type) |Expected tensor for argument #|Found dtype \w+ but ",
    r"tensors used as indices must be |\w+\(\): [Ee]xpected dtype int|where expected condition to ",
    r"masked_\w+ only supports |masked_select: expected |one_hot is only applicable to ",
    r"Expected floating point type for target|\w+\(\):? ?(?:could not infer output|[Ii]nput) dty",
    r"torch\.nn\.functional\.\w+ and torch\.nn\.\w+ are unsafe to autocast|Index put requires ",
    r"[Oo]nly [Tt]ensors of floating point |\w+\(\): Expected self\.dtype to be equal to ",
    r"\w+\(\): self \(\w+\) and source \(\w+\) must have|(?:Subtraction|Negation), the `-` ",
    # Devices.
    r"Expected all tensors to be on the same device|indices should be either on [\w:]+ or on the ",
    r"expected self and mask to be on the same|Input and \w+ tensors are not at the same device",
    r"module must have its parameters and buffers on|[Cc]an't c(?:onvert [\w:]+ device|all numpy)",
    r"cannot pin '|Expected a '\w+' device type for generator |'lengths' argument should be a ",
    # Values that are no tensors.
    r"repeats can not be negative|expected sequence of length \d+ at dim |Could not infer dtype ",
    r"can't convert np\.ndarray of |expected np\.ndarray |new\(\): data must be a sequence",
    r"a Tensor with \d+ elements cannot be|only one element tensors can be|default_collate: ",
    r"each element in list of batch should be of equal size",
)


@pattern("|".join(f"^(?:{item})" for item in _SENTENCES))
def words_of_torch(evidence: Evidence, match: object) -> Answer:
    """Leave the message as it is."""
    yield from ()
