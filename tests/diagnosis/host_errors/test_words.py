"""The words of torch's messages: types, shapes, and the user's names for its operands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cudalens.core.evidence_types import OddArgument, RefusedArguments
from cudalens.core.report import Evidence
from cudalens.core.report_types import OpName
from cudalens.diagnosis.host_errors._words import (
    argument_at_fault,
    dtype,
    expression_of,
    first_line,
    ints,
    is_sticky,
    is_without_gpu,
    named,
    user_name,
    with_user_names,
)
from tests.builders import fact
from tests.hint_evidence import syntax_of


def on(device: str, argument: str | None, kind: str, expression: str | None = None) -> Any:
    return fact(argument, kind, expression, device=device)


def call(*tensors: Any, api: str | None = None, **facts: Any) -> Evidence:
    return Evidence(tensors=tensors, op=OpName(api=api), **facts)


# --- types and shapes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("long int", "int64"),
        ("torch.LongTensor", "int64"),
        ("torch.cuda.HalfTensor", "float16"),
        ("CUDABFloat16Type", "bfloat16"),
        ("c10::BFloat16", "bfloat16"),
        ("unsigned char", "uint8"),
        ("signed char", "int8"),
        ("ComplexFloat", "complex64"),
        ("torch.float32", "float32"),
        ("complex64", "complex64"),
    ],
)
def test_a_dtype_has_pythons_name(text: str, name: str) -> None:
    assert dtype(text) == name


def test_the_numbers_of_a_shape() -> None:
    assert ints("32, 1, -3") == (32, 1, -3)
    assert ints("4x10") == (4, 10)
    assert ints("") == ()


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("Size does not fit.\nMore of it", "Size does not fit"),
        ("They are:\n  these two \nand more", "They are: these two"),
        (
            "expected scalar type Long but found Float",
            "expected scalar type int64 but found float32",
        ),
        ("Long ago", "Long ago"),
        ("\n  below the first line\nMore", "below the first line"),
        ("It is bad!", "It is bad"),
        ("\"f\" not implemented for 'Half'", "\"f\" not implemented for 'float16'"),
        ("Input type (CUDABFloat16Type) differs", "Input type (bfloat16 tensor on cuda) differs"),
        (
            "Input type (torch.cuda.FloatTensor) differs",
            "Input type (float32 tensor on cuda) differs",
        ),
        ("Input type (CPUBFloat16Type) differs", "Input type (bfloat16 tensor on cpu) differs"),
        ("target of size (torch.Size([4, 5])) differs", "target of size [4, 5] differs"),
        ("target of size torch.Size([4]) differs", "target of size [4] differs"),
        ("input has shape (3, 4)", "input has shape [3, 4]"),
        ("it has (3, 4)", "it has (3, 4)"),
        ("one device (when checking argument for argument mat2 in m)", "one device"),
        ("takes ints, but expected one of:\n * (int a)", "takes ints"),
        ("no kernel of type c10::Half", "no kernel of type float16"),
    ],
)
def test_the_sentence_of_a_message(message: str, line: str) -> None:
    assert first_line(message) == line


def test_errors_that_end_the_process_or_have_no_gpu() -> None:
    assert is_sticky("CUDA error: an illegal memory access was encountered")
    assert not is_sticky("CUDA error: out of memory")
    assert not is_sticky("CUDA error: invalid argument\nCompile with TORCH_USE_CUDA_DSA")
    assert is_without_gpu("Torch not compiled with CUDA enabled")
    assert is_without_gpu("CUDA driver version is insufficient for CUDA runtime version")
    assert not is_without_gpu("CUDA error: out of memory")


# --- the user's names -----------------------------------------------------------------------------

WEIGHT = on("cuda:0", "weight", "float32[2,4]")
X = on("cuda:0", "input", "float32[3,5]", "x")


def test_a_parameter_is_named_by_its_layer() -> None:
    evidence = call(X, WEIGHT, module_type="Linear", module_path="head")
    assert user_name(evidence, X) == "x"
    assert user_name(evidence, WEIGHT) == "head.weight"
    of_a_variable = call(
        WEIGHT, module_type="Linear", module_path="0", module_names=(("0", "net[0]"),)
    )
    assert user_name(of_a_variable, WEIGHT) == "net[0].weight"
    without_path = call(WEIGHT, module_type="Linear", call=syntax_of("net(x)"))
    assert user_name(without_path, WEIGHT) == "net.weight"
    made_there = call(WEIGHT, module_type="Linear", call=syntax_of("nn.Linear(4, 2)(x)"))
    assert user_name(made_there, WEIGHT) == "nn.Linear(4, 2).weight"
    assert user_name(replace(made_there, module_path="0"), WEIGHT) == "nn.Linear(4, 2).weight"
    assert user_name(call(WEIGHT, module_type="Linear"), WEIGHT) == "Linear.weight"
    assert user_name(call(WEIGHT), WEIGHT) == "weight"
    assert user_name(call(X), on("cuda:0", None, "float32[1]")) == "a tensor"


def test_operands_of_a_product_in_torchs_order() -> None:
    tensors = (on("cuda:0", "self", "float32[2,3]", "a"), on("cuda:0", "mat2", "float32[4,5]", "b"))
    text = "mat1 and mat2 shapes cannot be multiplied ([2, 3] and [4, 5])"
    assert (
        with_user_names(text, call(*tensors, api="torch.matmul"))
        == "a and b shapes cannot be multiplied ([2, 3] and [4, 5])"
    )
    biased = call(*tensors, on("cuda:0", "bias", "float32[5]", "c"), api="torch.linear")
    assert with_user_names(text, biased).startswith("a and b shapes cannot")


def test_operands_of_a_broadcast_by_their_sizes() -> None:
    """torch may name them in the other order."""
    tensors = (
        on("cuda:0", "self", "float32[2,3]", "a"),
        on("cuda:0", "other", "float32[4]", "b"),
    )
    text = "The size of tensor a ({}) must match the size of tensor b ({}) at non-singleton "
    text += "dimension 1"
    evidence = call(*tensors, api="torch.add")
    assert with_user_names(text.format(3, 4), evidence) == (
        "The size of a (3) must match the size of b (4) at non-singleton dimension 1"
    )
    assert with_user_names(text.format(4, 3), evidence) == (
        "The size of b (4) must match the size of a (3) at non-singleton dimension 1"
    )
    third = on("cuda:0", "value", "float32[4]", "c")
    three = with_user_names(text.format(3, 4), call(*tensors, third, api="torch.addcmul"))
    assert three.startswith(text.format(3, 4))
    # The second operand is broadcast along dimension 0, which it does not have.
    first = text.replace("dimension 1", "dimension 0").format(2, 4)
    assert with_user_names(first, evidence).startswith(first)
    unknown = with_user_names(text.format(7, 4), evidence)
    assert unknown.startswith(text.format(7, 4))


def test_nothing_is_named_in_a_backward() -> None:
    text = "mat1 and mat2 shapes cannot be multiplied"
    tensors = (on("cuda:0", "self", "float32[2,3]", "a"), on("cuda:0", "mat2", "float32[4,5]", "b"))
    assert with_user_names(text, call(*tensors, api="torch.matmul", phase="backward")) == text


def test_tensors_on_two_devices_the_cpu_first() -> None:
    text = "Expected all tensors to be on the same device, but found at least two devices"
    x, y = on("cpu", "self", "float32[3]", "x"), on("cuda:0", "other", "float32[3]", "y")
    assert with_user_names(text, call(y, x)) == "x is on cpu, y is on cuda:0"
    types = "Input type (float32 tensor on cpu) and weight type (float32 tensor on cuda) differ"
    assert with_user_names(types, call(y, x)) == "x is on cpu, y is on cuda:0"
    z = on("cpu", "value", "float32[3]", "z")
    assert with_user_names(text, call(y, x, z)) == "x and z are on cpu, y is on cuda:0"
    number = on("cpu", "value", "float32[]", "n")
    assert with_user_names(text, call(y, x, number)) == "x is on cpu, y is on cuda:0"
    number = on("cuda:0", "value", "float32[]", "n")
    assert with_user_names(text, call(x, number)) == "x is on cpu, n is on cuda:0"
    layer = {"module_type": "Linear", "module_path": "head"}
    weight = on("cpu", "weight", "float32[2,3]")
    assert with_user_names(text, call(y, weight, **layer)) == (
        "the parameters of head are on cpu, y is on cuda:0"
    )
    own = on("cpu", "weight", "float32[2,3]", "w")
    assert with_user_names(text, call(y, own, **layer)) == "w is on cpu, y is on cuda:0"
    loss = {"module_type": "NLLLoss", "module_path": "loss"}
    assert with_user_names(text, call(y, weight, **loss)) == (
        "loss.weight is on cpu, y is on cuda:0"
    )


def test_what_a_message_speaks_of_follows_it() -> None:
    index = on("cuda:0", "index", "int32[3]", "i")
    both = call(X, index)
    assert with_user_names("bad dtype for index", both) == "bad dtype for index: i is int32"
    assert with_user_names("sizes do not fit", both) == ("sizes do not fit: x is [3, 5], i is [3]")
    assert with_user_names("expected float32 for a type", both) == (
        "expected float32 for a type: x is float32"
    )
    assert with_user_names("it failed", both) == "it failed"


def test_three_operands_at_most_are_shown() -> None:
    tensors = [on("cuda:0", f"t{at}", "float32[2]", f"v{at}") for at in range(4)]
    said = with_user_names("sizes do not fit", call(*tensors))
    assert said == "sizes do not fit: v0 is [2], v1 is [2], v2 is [2]"


def test_a_number_that_a_message_names() -> None:
    beside = on("cuda:0", None, "float32[7]", "z")  # another tensor of the line
    evidence = call(X, beside, scalars=(("k", "9"), ("sorted", "True"), ("n", "-2")))
    assert with_user_names("k is too large", evidence) == "k is too large: k is 9, x is [3, 5]"
    assert with_user_names("n is too small", evidence) == "n is too small: n is -2, x is [3, 5]"
    assert with_user_names("'k is quoted", evidence) == "'k is quoted"
    assert with_user_names("sorted is odd", evidence) == "sorted is odd"
    four = [on("cuda:0", f"t{at}", "float32[2]", f"v{at}") for at in range(4)]
    said = with_user_names("k is too large", call(*four, scalars=(("k", "9"),)))
    assert said == "k is too large: k is 9, v0 is [2], v1 is [2], v2 is [2]"


def test_arguments_of_a_refused_type() -> None:
    odd = (
        OddArgument(name="a", type_name="ndarray", words="a numpy.ndarray (3,)"),
        OddArgument(name="n", type_name="int", words="the int 3"),
    )
    evidence = call(X, refused_arguments=RefusedArguments(odd_arguments=odd))
    text = "argument 'input' must be Tensor, not ndarray"
    assert with_user_names(text, evidence) == f"{text}: a is a numpy.ndarray (3,)"
    text = "argument 'input' must be Tensor, not list"
    assert with_user_names(text, evidence) == text
    text = "'tuple' object is not callable"
    assert with_user_names(text, evidence) == f"{text}: a is a numpy.ndarray (3,)"


# --- the argument at fault ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "argument"),
    [
        ("embedding(): argument 'indices' must be Tensor, not list", "indices"),
        ("f(): argument 'indices' (position 2) must be Tensor, not int", "indices"),
        ("f() got an unexpected keyword argument 'axis'", "axis"),
        ("Expected parameter loc (Tensor of shape (2,)) of distribution Normal", "loc"),
        ("Sizes must match except in dimension 0 for tensor number 1 in the list.", "tensors[1]"),
        ("Expected hidden[0] size (1, 3, 4), got [2, 3, 4]", "hx[0]"),
        ("Expected hidden size (1, 3, 4), got [2, 3, 4]", "hx"),
        ("Expected key_padded_mask.shape[0] to be 2", "key_padding_mask"),
        ("something else", None),
    ],
)
def test_the_argument_that_torch_names(message: str, argument: str | None) -> None:
    assert argument_at_fault(call(), message) == argument


def test_an_argument_by_its_name_in_the_message() -> None:
    target = on("cuda:0", "target", "float32[3]", "y")
    both = call(X, target)
    assert argument_at_fault(both, "target has a bad size") == "target"
    assert argument_at_fault(both, "input has a bad size") is None
    two = call(on("cuda:0", "self", "float32[3]", "x"), on("cuda:0", "other", "float32[3]", "y"))
    assert argument_at_fault(two, "one or the other is bad") is None
    assert argument_at_fault(call(X, WEIGHT), "the weight is bad") == "input"
    weight = on("cuda:0", "weight", "float32[3]", "w")
    assert argument_at_fault(call(X, target, weight), "target or weight") is None


def test_the_one_tensor_on_another_device() -> None:
    gpu, cpu = on("cuda:0", "self", "float32[3]", "x"), on("cpu", "other", "float32[3]", "y")
    message = "tensors on different devices"
    assert argument_at_fault(call(gpu, cpu), message) == "other"
    number = on("cpu", "value", "float32[]", "n")
    assert argument_at_fault(call(gpu, cpu, number), message) == "other"
    also = on("cpu", "value", "float32[3]", "z")
    assert argument_at_fault(call(gpu, cpu, also), message) is None
    assert argument_at_fault(call(gpu, on("cpu", "weight", "float32[3]")), message) is None


def test_the_input_of_a_layer() -> None:
    assert argument_at_fault(call(X, WEIGHT), "sizes differ") == "input"
    assert argument_at_fault(call(X, module_type="Softmax"), "sizes differ") == "input"
    assert argument_at_fault(call(X), "sizes differ") is None


def test_the_first_tensor_of_a_name_and_its_code() -> None:
    evidence = call(X, WEIGHT)
    assert named(evidence, "self", "weight", "input") is WEIGHT
    assert named(evidence, "self") is None
    assert expression_of(None) is None
    assert expression_of(WEIGHT) is None
    assert expression_of(X) == "x"
    assert expression_of(on("cpu", "self", "float32[1]", "x[0].y")) == "x[0].y"
    assert expression_of(on("cpu", "self", "float32[1]", "x + 1")) == "(x + 1)"
