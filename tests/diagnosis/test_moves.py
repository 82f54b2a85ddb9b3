"""Changes of one argument that are tried: which are offered, and which never are."""

from __future__ import annotations

from typing import Any

import pytest

from cudalens.core.report import ErrorFacts, Evidence
from cudalens.core.report_types import OpName
from cudalens.diagnosis.moves import Called, moves, to_tensor_templates
from tests.builders import fact, spelled


def of(kind: str, name: str, device: str = "cpu", **more: Any) -> Any:
    return fact(None, kind, name, **{"device": device, **more})


def templates(
    api: str, *operands: Any, at: int = 0, called: Called | None = None, **evidence: Any
) -> list[str]:
    """Return the templates of one operand's moves, cheapest first."""
    given = Evidence(op=OpName(api=api), **evidence)
    found = moves(given, operands[at], operands, called or Called())
    return [item.template for item in sorted(found, key=lambda item: item.cost)]


X, Y = of("float32[2,3]", "x"), of("float32[2,3]", "y")
GPU = of("float32[2,3]", "g", "cuda:0")
IDS = of("int64[4]", "ids")


def test_a_tensor_moves_to_where_another_one_is() -> None:
    assert "{x}.to(g.device)" in templates("torch.add", X, GPU)
    assert "{x}.cpu()" in templates("torch.add", GPU, X)
    assert not [it for it in templates("torch.add", X, Y) if "device" in it or "cpu" in it]
    far = of("float32[2,3]", "f(g)", "cuda:0")
    assert '{x}.to("cuda:0")' in templates("torch.add", X, far)
    part = of("float32[2,3]", "batch.g", "cuda:0")
    assert '{x}.to("cuda:0")' in templates("torch.add", X, part)
    layer = Called(device="cuda:0")
    assert '{x}.to("cuda:0")' in templates("torch.nn.functional.linear", X, called=layer)


def test_what_is_written_to_stays() -> None:
    assert templates("torch.Tensor.add_", X, GPU) == []
    assert templates("torch.Tensor.__iadd__", X, GPU) == []
    assert templates("torch.Tensor.__setitem__", X, GPU) == []
    assert templates("torch.Tensor.add_", X, GPU, at=1) != []
    assert templates("torch.Tensor.__invert__", X, GPU) != []
    # A cast comes before it: ``x.float().requires_grad_()``.
    assert "{x}.float()" in templates("torch.Tensor.requires_grad_", IDS)


def test_numpy_takes_the_host_and_no_gradient() -> None:
    grad = of("float32[2]", "g", "cuda:0", requires_grad=True)
    assert templates("torch.Tensor.numpy", grad)[:2] == ["{x}.detach().cpu()", "{x}.cpu()"]
    assert "{x}.detach()" in templates("torch.Tensor.numpy", of("float32[2]", "h", requires_grad=1))


def test_lengths_that_are_counted_go_to_the_host() -> None:
    """Where they are packed they stay on the host, wherever the batch is."""
    pack, lengths = "torch.nn.utils.rnn.pack_padded_sequence", of("int64[2]", "n", "cuda:0")
    moved = ("{x}.cpu()", "{x}.to(g.device)", "{x}.to(x.device)")
    for api, size, batch, found in (
        (pack, lengths, GPU, ["{x}.cpu()"]),
        (pack, IDS, GPU, []),
        (pack, of("int32[2]", "n", "cuda:0"), GPU, []),
        ("torch.add", lengths, GPU, []),
    ):
        assert [it for it in templates(api, size, batch) if it in moved] == found


def casts(*operands: Any, api: str = "torch.f") -> list[str]:
    """Return the casts of the first operand, cheapest first."""
    kinds = ("{x}.float()", "{x}.double()", "{x}.long()", "{x}.bool()")
    return [item for item in templates(api, *operands) if item in kinds]


def test_casts_to_what_the_others_are_come_first() -> None:
    wide = of("float64[2,3]", "w")
    rest = ["{x}.long()", "{x}.bool()"]
    assert casts(X, wide) == ["{x}.double()", *rest]
    assert casts(wide, X) == ["{x}.float()", *rest]
    # Of scores and labels none may lose digits.
    loss = "torch.nn.functional.mse_loss"
    assert casts(X, wide, api=loss) == ["{x}.double()", *rest]
    assert casts(wide, X, api=loss) == [*rest, "{x}.float()"]


def test_casts_that_are_never_offered() -> None:
    classes = "torch.nn.functional.cross_entropy"
    scores = of("int64[4,3]", "z")
    assert not [it for it in templates(classes, scores, IDS) if it.endswith("()")]
    marks = of("int64[2,3]", "t")
    assert "{x}.float()" not in templates(classes, X, marks, at=1)
    assert "{x}.bool()" in templates("torch.Tensor.__getitem__", X, IDS, at=1)
    mask = of("bool[2]", "m")
    assert not [it for it in templates("torch.Tensor.__getitem__", X, mask, at=1) if "()" in it]
    message = "only bool and floating types of attn_mask are supported"
    error = ErrorFacts(type_name="RuntimeError", message=message)
    assert "{x}.bool()" not in templates("torch.f", X, IDS, at=1, error=error)


def test_an_attention_mask_of_numbers_becomes_flags_alone() -> None:
    api = "torch.nn.functional.scaled_dot_product_attention"
    casts = [it for it in templates(api, X, IDS, at=1) if it in ("{x}.bool()", "{x}.float()")]
    assert casts == ["{x}.bool()"]


@pytest.mark.parametrize(
    ("stride", "is_copied"), [((3, 1), False), ((1, 2), True), (None, False), ((6, 1), True)]
)
def test_what_is_not_contiguous_is_copied(stride: Any, is_copied: bool) -> None:
    turned = of("float32[2,3]", "x", stride=stride)
    assert ("{x}.contiguous()" in templates("torch.Tensor.view", turned)) is is_copied
    # How far apart the items of one are says nothing.
    row = of("float32[2,1,3]", "x", stride=stride and (stride[0], 7, stride[1]))
    assert ("{x}.contiguous()" in templates("torch.Tensor.view", row)) is is_copied


def cost(template: str, api: str, *operands: Any, at: int = 0) -> int:
    given = Evidence(op=OpName(api=api))
    found = moves(given, operands[at], operands, Called())
    return next(it.cost for it in found if it.template == template)


def test_what_is_seldom_meant_costs_more() -> None:
    ids = of("int64[4]", "ids", "cuda:0")
    get, table = "torch.Tensor.__getitem__", of("float32[4,3]", "x")
    assert cost("{x}.cpu()", get, table, ids, at=1) < cost("{x}.cpu()", "torch.add", X, GPU, at=1)
    # As many flags as rows are a mask; two numbers may be a list of two places.
    assert cost("{x}.bool()", get, table, IDS, at=1) == 1
    assert cost("{x}.bool()", get, X, of("int64[2]", "i"), at=1) == 2
    assert cost("{x}.bool()", get, table, of("int64[3]", "i"), at=1) == 2
    images, weight = of("float32[2,3,4]", "x"), of("float32[5,12]", "w")
    flat = [cost("{x}.flatten(1)", f"torch.{it}", images, weight) for it in ("f.linear", "matmul")]
    assert flat == [1, 2]
    # An exchange with the batch is meant less often than one behind it.
    orders = [cost(f"{{x}}.transpose({it})", "torch.f", images, Y) for it in ("1, 2", "0, 1")]
    assert orders == [2, 3]


def test_a_dimension_of_size_1_too_many() -> None:
    assert "{x}.squeeze(1)" in templates("torch.f", of("float32[4,1]", "x"), Y)
    assert "{x}.squeeze(0)" not in templates("torch.f", of("float32[1]", "x"), Y)
    # One sample of a batch would be read as a batch.
    image = of("float32[1,1,8,8]", "x")
    assert "{x}.squeeze(0)" not in templates("torch.nn.functional.conv2d", image)


def test_a_dimension_that_is_missing_lines_up() -> None:
    wide = of("float32[4,3]", "w")
    found = templates("torch.add", of("float32[4]", "x"), wide)
    assert ("{x}.unsqueeze(1)" in found, "{x}.unsqueeze(0)" in found) == (True, False)
    found = templates("torch.add", of("float32[3]", "x"), wide)
    assert ("{x}.unsqueeze(1)" in found, "{x}.unsqueeze(0)" in found) == (False, True)
    assert not [it for it in templates("torch.add", X, Y) if "unsqueeze" in it]


def test_flags_that_fit_in_two_places_are_not_lined_up() -> None:
    """Scores of as many queries as keys: both can be flagged."""
    square, wide = of("float32[4,4]", "s"), of("float32[4,5]", "s")
    flags = of("bool[4]", "m")
    added = {"{x}.unsqueeze(0)", "{x}.unsqueeze(1)"}
    assert not added & {*templates("torch.Tensor.masked_fill", square, flags, at=1)}
    assert added & {*templates("torch.Tensor.masked_fill", wide, flags, at=1)}
    assert added & {*templates("torch.add", square, of("float32[4]", "y"), at=1)}


def test_an_image_with_channels_lacks_its_batch() -> None:
    def added(kind: str, api: str = "torch.Tensor.permute") -> list[str]:
        found = templates(api, of(kind, "x"))
        return sorted(it for it in found if "unsqueeze" in it)

    assert added("float32[8,8,3]") == ["{x}.unsqueeze(0)"]
    assert added("float32[8,8,4]") == ["{x}.unsqueeze(0)"]
    every = ["{x}.unsqueeze(0)", "{x}.unsqueeze(1)", "{x}.unsqueeze(3)"]
    assert added("float32[8,8,2]") == every
    assert added("float32[8,8,3]", "torch.Tensor.expand") == every
    assert added("float32[8,8,3]", "torch.f") == []


def test_where_a_layer_takes_a_dimension_more() -> None:
    layer = Called(device="cpu")

    def added(kind: str, **more: Any) -> list[str]:
        api = "torch.nn.functional.conv2d"
        found = templates(api, of(kind, "x"), called=layer, **more)
        return sorted(it for it in found if "unsqueeze" in it or "None" in it)

    assert added("float32[3,8,8]") == ["{x}.unsqueeze(0)", "{x}.unsqueeze(1)"]
    assert added("float32[8,8]") == ["{x}.unsqueeze(0)", "{x}.unsqueeze(1)", "{x}[None, None]"]
    assert "{x}[None, None]" not in added("float32[8,8]", module_type="Linear")
    assert added("float32[1,3,8,8]") == []
    # A loss has no parameters to line up with.
    assert added("float32[8,8]", module_type="CrossEntropyLoss") == []


def test_channels_and_flags_of_keys_are_lined_up() -> None:
    image = of("float32[8,3,5,5]", "x")
    found = templates("torch.add", of("float32[3]", "mean"), image)
    assert "{x}[:, None, None]" in found
    assert "{x}[:, None, None]" not in templates("torch.add", of("float32[4]", "mean"), image)
    keys = of("bool[8,5]", "mask")
    assert "{x}[:, None, None]" in templates("torch.Tensor.masked_fill", image, keys, at=1)
    assert "{x}[:, None, None]" not in templates(
        "torch.Tensor.masked_fill", image, of("bool[8,4]", "mask"), at=1
    )


def test_a_loss_is_never_broadcast() -> None:
    mse = "torch.nn.functional.mse_loss"
    column = of("float32[4,1]", "p")
    assert "{x}.squeeze(1)" in templates(mse, column, of("float32[4]", "t"))
    assert not [it for it in templates(mse, column, of("float32[5]", "t")) if "squeeze" in it]


def test_labels_in_other_shapes() -> None:
    api = "torch.nn.functional.cross_entropy"
    scores = of("float32[6,3]", "z")
    assert "{x}.reshape(-1)" in templates(api, scores, of("int64[2,3]", "y"), at=1)
    assert "{x}.reshape(-1)" not in templates(api, scores, of("int64[2,2]", "y"), at=1)
    code = of("float32[6,3]", "y")
    assert "{x}.long().argmax(1)" in templates(api, scores, code, at=1)
    # Of several labels a row, this batch may have one in each: the search says it in words alone.
    assert "{x}.argmax(1)" in templates(api, scores, of("int64[6,3]", "y"), at=1)
    assert "{x}.argmax(1)" not in templates(api, scores, of("int64[6,2]", "y"), at=1)


def test_rows_as_the_scores_were_flattened() -> None:
    api = "torch.nn.functional.cross_entropy"
    before = of("float32[3,2,5]", "h")
    scores = of("float32[6,5]", "h.view(-1, 5)")
    labels = of("int64[2,3]", "y")
    found = templates(api, scores, labels, at=1, tensors=(before, labels))
    assert ("{x}.T.reshape(-1)" in found, "{x}.reshape(-1)" in found) == (False, False)


def test_other_orders_of_dimensions() -> None:
    cube = of("float32[2,3,4]", "x")
    assert "{x}.transpose(1, 2)" in templates("torch.f", cube, Y)
    assert "{x}.transpose(1, 2)" not in templates("torch.f", of("float32[2,3,3]", "x"), Y)
    # The batch of a linear layer stays where it is.
    assert "{x}.transpose(0, 1)" in templates("torch.f", cube, Y)
    assert "{x}.transpose(0, 1)" not in templates("torch.nn.functional.linear", cube, Y)
    assert "{x}.T" in templates("torch.matmul", of("float32[3,5]", "x"), of("float32[3,4]", "w"))
    assert "{x}.T" not in templates("torch.add", of("float32[3,5]", "x"), of("float32[3,4]", "w"))
    either = of("float32[3,5]", "x"), of("float32[4,3]", "w")
    assert "{x}.T" not in templates("torch.matmul", *either)


def test_an_order_that_may_mix_what_is_of_one_size_is_not_offered() -> None:
    """Steps and classes of a loss; the batch of a product of more than matrices."""

    def orders(kind: str, api: str) -> list[str]:
        found = templates(f"torch.{api}", of(kind, "x"), of("int64[4,7]", "y"))
        return [it for it in found if "transpose" in it]

    assert orders("float32[4,5,5]", "nn.functional.cross_entropy") == []
    assert "{x}.transpose(1, 2)" in orders("float32[4,5,7]", "nn.functional.cross_entropy")
    assert "{x}.transpose(0, 1)" in orders("float32[4,5,5]", "nn.functional.mse")
    every = orders("float32[2,3,4,5]", "matmul")
    assert sorted(every) == ["{x}.transpose(1, 2)", "{x}.transpose(2, 3)"]


def test_channels_last() -> None:
    image = of("float32[8,5,5,3]", "x")
    assert "{x}.permute(0, 3, 1, 2)" in templates("torch.nn.functional.conv2d", image)
    assert "{x}.permute(0, 3, 1, 2)" not in templates("torch.add", image, Y)
    volume = of("float32[8,5,5,5,3]", "x")
    assert "{x}.permute(0, 4, 1, 2, 3)" in templates("torch.nn.functional.conv3d", volume)


def test_of_a_model_and_of_what_is_indexed_no_shape_changes() -> None:
    cube = of("float32[2,1,4]", "x")
    assert "{x}.squeeze(1)" in templates("torch.f", cube)
    assert "{x}.squeeze(1)" not in templates("torch.f", cube, called=Called(is_model=True))
    assert "{x}.squeeze(1)" not in templates("torch.Tensor.__getitem__", cube, IDS)


@pytest.mark.parametrize(
    ("text", "kind", "device", "wanted"),
    [
        ("f", "method", None, ["{x}()"]),
        (
            "a",
            "numpy.ndarray",
            None,
            ["torch.from_numpy({x})", "torch.from_numpy({x}).float()"],
        ),
        ("a", "list", "cuda:0", ["torch.tensor({x})", 'torch.tensor({x}).to("cuda:0")']),
        ("a", "list", "cpu", ["torch.tensor({x})"]),
        ("p", "tuple", None, []),
    ],
)
def test_tensors_of_what_is_none(
    text: str, kind: str, device: str | None, wanted: list[str]
) -> None:
    made = to_tensor_templates(spelled(text) or "", kind, device)
    assert [template for template, _ in made] == wanted


@pytest.mark.parametrize(
    ("how", "is_shown"),
    [
        ("view(-1, 5)", True),
        ("reshape(-1, 5)", True),
        ("flatten(0, 1)", True),
        ("squeeze()", False),
    ],
)
def test_labels_are_flattened_as_the_line_flattens_the_scores(how: str, is_shown: bool) -> None:
    scores, labels = of("float32[6,5]", f"z.{how}"), of("int64[2,3]", "y")
    api = OpName(api="torch.nn.functional.cross_entropy")
    given = Evidence(op=api, tensors=(of("float32[2,3,5]", "z"), scores, labels))
    rules = {move.rule for move in moves(given, labels, (scores, labels), Called())}
    assert ("labels_not_flat" in rules, "labels_in_order" in rules) == (is_shown, not is_shown)
