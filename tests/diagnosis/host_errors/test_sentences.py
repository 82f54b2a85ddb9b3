"""Messages that only torch raises, told from those of others by how they begin."""

from __future__ import annotations

import pytest

from cudalens.diagnosis import host_errors

MESSAGES = """\
add() received an invalid combination of arguments - got (Tensor, str), but expected
gather: You passed a dimname (string) to this op in place of a dimension index but it does not
add() missing 1 required positional arguments: "other"
add() missing 1 required positional argument: "other"
unsupported operand type(s) for +: 'Tensor' and 'str'
unsupported operand type(s) for +: 'NoneType' and 'Tensor'
descriptor 'add' for 'torch._C.TensorBase' objects doesn't apply to a 'int' object
only integer tensors of a single element can be converted to an index
expected Tensor as element 1 in argument 0, but got int
torch.cat(): expected a non-empty list of Tensors
torch.tensordot expects both dims lists to have the same length
torch.linspace(): requires a number of steps
torch.unique(): attempted to do something
torch.bucketize only supports two inputs
torch.take_along_dim(): dtype of indices should be Long but got Int
torch.take_along_dim(): input and indices should have the same number of dimensions
TensorBase.numpy() takes no arguments (1 given)
TensorBase.dim() takes exactly one argument (2 given)
TensorBase.dim() takes exactly 2 arguments (3 given)
new(): invalid data type 'str'
add(): argument 'other' (position 1) must be Tensor, not str
view(): argument 'size' failed to unpack the object at pos 2 with error "type must be tuple"
You have to specify either input_ids or inputs_embeds
You must specify exactly one of input_ids or inputs_embeds
You must specify at least one
you have to specify either of them
Expected one of cpu, cuda, ipu, xpu device type at start of device string: gpu
start (3) + length (9) exceeds dimension size (4).
start out of range (expected to be in range of [-4, 4], but got 9)
narrow(): length must be non-negative.
narrow() cannot be applied to a 0-dim tensor.
dim 1 appears multiple times in the list of dims
Dimension specified as -1 but tensor has no dimensions
movedim: Invalid source or destination dims: source
movedim: repeated dim in `source` ([0, 0])
only integers, slices (`:`), ellipsis (`...`), None and long or byte Variables are valid indices
invalid index of a 0-dim tensor. Use `tensor.item()` in Python
can't assign a str to a torch.FloatTensor
can't assign an int to a torch.cuda.HalfTensor
Tensor does not support deleting items
~ (operator.invert) is only implemented on integer and Boolean-type tensors
both arguments to matmul need to be at least 1D, but they are 0D and 2D
both arguments to linalg.matmul need to be at least 1D, but they are 0D and 2D
outer: Expected 1-D argument self, but got 2-D
outer: Expected 1-D argument vec2, but got 2-D
tensor.T is only supported on matrices
tensor.H is only supported on matrices (2-D tensors). Got 3-D tensor.
tensor.mT is only supported on matrices or batches of matrices. Got 1-D tensor.
tensor.mH is only supported on matrices or batches of matrices. Got 1-D tensor.
chunk expects `chunks` to be greater than 0, got: 0
number of sections must be larger than 0, got 0
flatten() has invalid args: start_dim cannot come after end_dim
repeats must have the same size as input along dim, but got repeats.size(0) = 2
diag(): Supports 1D or 2D tensors. Got 3D
quantile() q values must be in the range [0, 1]
quantile() input tensor must be non-empty
cov(): expected input to have two or fewer dimensions
cov(): fweights must be integral
cov(): aweights must be floating point
can't retain_grad on Tensor that has requires_grad=False
size {[2, 3]} is not expandable to size {[]}.
The shape of the mask [3] at index 0 does not match the shape of the indexed tensor [4]
Expected size for first two dimensions of batch2 tensor to be: [2, 3] but got: [2, 4].
size mismatch, got input (2), mat (2x3), vec (4)
batch1 must be a 3D tensor
vector and vector expected, but got 2D
1D tensors expected, but got 2D and 1D tensors
einsum(): the number of subscripts in the equation (2) does not match
inconsistent tensor size, expected tensor [3] and src [4] to have the same number of elements
too many indices for tensor of dimension 2
shape '[2, -1]' is invalid for input of size 3
view size is not compatible with input tensor's size and stride
Sizes of tensors must match except in dimension 0. Expected size 2 but got size 3
stack expects each tensor to be equal size, but got [2] at entry 0 and [3] at entry 1
shape mismatch: value tensor of shape [3] cannot be broadcast
index -9 is out of bounds for dimension 0 with size 4
Dimension out of range (expected to be in range of [-2, 1], but got 2)
number of dimensions in the tensor input does not match
permute(sparse_coo): number of dimensions in the tensor input does not match
Expected 3D (unbatched) or 4D (batched) input to conv2d, but got input of size: [2]
Calculated padded input size per channel: (2 x 2). Kernel size: (3 x 3).
Expected hidden[0] size (1, 2, 3), got [1, 3, 3]
expected 2D or 3D input (got 4D input)
expected 4D input (got 2D input)
Expected number of channels in input to be divisible by num_groups
Expected key_padded_mask.shape[0] to be 2
The shape of the 2D attn_mask is torch.Size([2, 2]), but should be (3, 3).
The shape of the 3D attn_mask is torch.Size([2, 2, 2]), but should be (3, 3, 3).
Error(s) in loading state_dict for Linear:
Using a target size (torch.Size([2])) that is different to the input size
Target size (torch.Size([2])) must be the same as input size (torch.Size([3]))
Expected input batch_size (4) to match target batch_size (5).
Expected target size [2, 3], got [2, 4]
0D or 1D target tensor expected, multi-target not supported
only batches of spatial targets supported (3D tensors) but got targets of dimension: 1
input and target batch or spatial sizes don't match
size mismatch (got input: [4], target: [5])
weight tensor should be defined either for all 3 classes or no classes
Input type (torch.FloatTensor) and weight type (torch.HalfTensor) should be the same
mat1 and mat2 must have the same dtype, but got Float and Half
expected m1 and m2 to have the same dtype, but got: float != double
self and src must have same dtype, but they differ
"nll_loss_forward" not implemented for 'Half'
expected target dtype to be Long
expected scalar type Long but found Float
Expected tensor for argument #1 'indices' to have one of the following scalar types
Found dtype Long but expected Float
tensors used as indices must be long, int, byte or bool tensors
gather(): Expected dtype int64 for index
scatter(): expected dtype int32/int64 for index
where expected condition to be a boolean tensor, but got a tensor with dtype Float
masked_fill_ only supports boolean masks, but got mask with dtype long int
masked_select: expected BoolTensor for mask
one_hot is only applicable to index tensor.
Expected floating point type for target with class probabilities, got Long
mean(): could not infer output dtype. Input dtype must be either a floating point
mean(): input dtype should be either floating point or complex dtypes.
std() input dtype must be floating
torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast
Index put requires the source and destination dtypes match
Only Tensors of floating point and complex dtype can require gradients
only tensors of floating point dtype can require it
index_add_(): Expected self.dtype to be equal to other.dtype
index_copy_(): self (Float) and source (Long) must have the same scalar type
Subtraction, the `-` operator, with a bool tensor is not supported
Negation, the `-` operator, on a bool tensor is not supported
Expected all tensors to be on the same device, but found at least two devices
indices should be either on cpu or on the same device as the indexed tensor
indices should be either on cuda:0 or on the same device as the indexed tensor
expected self and mask to be on the same device
Input and hidden tensors are not at the same device, found input tensor at cuda:0
module must have its parameters and buffers on device cuda:0
can't convert cuda:0 device type tensor to numpy
Can't call numpy() on Tensor that requires grad
cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned
Expected a 'cuda' device type for generator but found 'cpu'
'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor
repeats can not be negative
expected sequence of length 2 at dim 1 (got 3)
Could not infer dtype of dict
can't convert np.ndarray of type numpy.object_.
expected np.ndarray (got list)
new(): data must be a sequence (got dict)
a Tensor with 2 elements cannot be converted to Scalar
only one element tensors can be converted to Python scalars
default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists
""".splitlines()
"""One for each way in which torch puts it."""
OTHERS = """\
add() missing 1 required positional argument: 'other'
unsupported operand type(s) for +: 'int' and 'str'
descriptor 'add' for 'set' objects doesn't apply to a 'int' object
You must specify a path
can't assign a str to an int
index 9 is out of bounds for axis 0 with size 4
shape '(2, 3)' is invalid
""".splitlines()
"""Words of Python, NumPy and others that are much like them."""


def is_known(message: str) -> bool:
    (pattern,) = (item for item in host_errors.table() if item.name == "words_of_torch")
    return pattern.regex.search(message) is not None


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_torchs_is_known_by_its_beginning(message: str) -> None:
    assert is_known(message)
    assert not is_known(f"He said: {message}")


@pytest.mark.parametrize("message", OTHERS)
def test_words_of_others_are_not_torchs(message: str) -> None:
    assert not is_known(message)
