"""torch's own exceptions are put into words: one case per family, each with a silent neighbour."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from cudalens import simulate
from cudalens.core.reported import report_beside
from cudalens.diagnosis import host_errors
from cudalens.diagnosis.host_errors import advice
from tests.diagnosis.host_errors import test_cuda_errors
from tests.diagnosis.host_errors.test_cuda_errors import report_of
from tests.host_errors import CASES, SETUP, Case, check, family_of, ident
from tests.hostcells import run_cell

pytestmark = pytest.mark.usefixtures("sim")


@pytest.mark.parametrize("case", [case for case in CASES if case.fix is None], ids=ident)
def test_a_host_error_is_put_into_words(case: Case, sim: simulate.Simulation) -> None:
    check(case, sim)


def test_of_an_unknown_message_nothing_is_said_about_kernels() -> None:
    """``cholesky`` looks at its input on the device, and raises when the result has come back."""
    report = run_cell("import torch\ntorch.linalg.cholesky(-torch.eye(3, device='cuda'))").shown
    assert "positive-definite" in report.headline_schema
    assert report.explanation.startswith("An exception of the host: ")
    assert "before running anything" not in report.explanation
    assert "CPU" not in report.explanation
    known = run_cell("import torch\ntorch.ones(2, 3).cuda() @ torch.ones(2, 3).cuda()").shown
    assert "before running anything" in known.explanation


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("torch.linalg.cholesky(x)", "1 of 9 values of x is NaN"),
        ("torch.linalg.cholesky(-y)", None),
        # The message says what is wrong, and a NaN has no part in it.
        ("x @ x[:2]", None),
        ("x.sum().backward()", None),
    ],
)
def test_a_nan_is_a_fact_where_the_message_says_nothing_of_values(
    code: str, text: str | None
) -> None:
    """Factorizations and a library's comparisons fail of it, in words of their own."""
    made = "import torch\ny = torch.eye(3, device='cuda')\nx = y.clone()\nx[1, 1] = float('nan')\n"
    report = run_cell(made + code).shown
    said = [item.text for item in report.observations if item.kind == "values"]
    assert said == ([text] if text else [])
    assert text is None or text in report.to_text()


_PRODUCT = """import torch
rows = torch.tensor([[0, 2], [0, 1]], device={at!r})
left = torch.sparse_coo_tensor(rows, torch.ones(2, device={at!r}), (2, 2), check_invariants=False)
torch.sparse.mm(left, torch.ones(2, 3, device={at!r}))"""


def test_what_the_kernel_of_the_cpu_alone_checks_is_said_to_be_its_own() -> None:
    """On a GPU another kernel runs; on tensors of the CPU it is the one that always runs."""
    report = run_cell(_PRODUCT.format(at="cuda")).shown
    assert report.headline_schema.startswith("addmm: index out of row bound: 2 ")
    said = "Refused by the CPU's kernel, which replaces the GPU's "
    assert report.explanation.startswith(said)
    assert said in report.to_text(width=200)
    neighbour = run_cell(_PRODUCT.format(at="cpu")).shown
    assert neighbour.headline_schema == report.headline_schema
    assert "replaces the GPU" not in neighbour.explanation


def test_what_a_library_lacks_is_not_said_of_an_argument() -> None:
    """``torch.get_default_device`` of torch 2.8 raises this for a ``None`` of its own."""
    code = """
    import torch
    lstm, x = torch.nn.LSTM(4, 2).cuda(), torch.rand(3, 4, device="cuda")
    lstm._flat_weights = [None]
    lstm(x)
    """
    report = run_cell(code).shown
    assert report.headline_schema == "'NoneType' object has no attribute 'dtype'"
    assert (report.argument, report.hints) == (None, ())


def test_every_family_has_a_case() -> None:
    """A family that nothing exercises would not be noticed when torch changes its words."""
    known = {case.family for case in CASES} | {row[0] for row in test_cuda_errors.ROWS}
    known |= {family_of(row[0]) for row in TEXTS}
    # torch's own words have tests in test_torch_errors, gradients in test_values, heads of
    # transformers and numbers in place of a loss in cells.
    elsewhere = {"words_of_torch", "labels_of_head", "number_for_loss"}
    assert {item.name for item in host_errors.table()} - known == elsewhere


def test_the_exception_passes_unchanged() -> None:
    """Same object, same text; one note of one line and the report are added."""
    seen: list[BaseException] = []
    code = """
    import torch
    a = torch.ones(2, 3, device="cuda")
    try:
        a @ a
    except RuntimeError as error:
        seen.append(error)
        raise
    """
    outcome = run_cell(code, {"seen": seen})
    assert outcome.error is seen[0]
    said = str(outcome.error).removeprefix("mm: ")  # from torch 2.15 on
    assert said == "mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"
    assert outcome.error.__notes__ == [  # type: ignore[union-attr]
        "cudalens: a and a shapes cannot be multiplied (2x3 and 2x3) · at "
        f"In [{outcome.shown.source.cell}] line 4: a @ a"  # type: ignore[union-attr]
    ]
    assert report_beside(outcome.error) is not None  # type: ignore[union-attr]
    # Either a may be transposed.
    assert outcome.shown.hints == ()


@pytest.mark.parametrize("case", CASES[5:9], ids=ident)
def test_the_recorder_changes_no_verdict(case: Case) -> None:
    """With the flight recorder the names are still those of the called function, not the op's."""
    report = run_cell(f"{SETUP}{case.setup}\n{case.bad}", fast=False).shown
    assert case.says in report.headline
    assert (report.argument, report.expression) == (case.argument, case.expression)
    assert (report.op.api or "").startswith("torch.")


def test_the_tensors_of_a_product_are_listed() -> None:
    """Both operands with their names and shapes, and the two sizes that do not fit."""
    code = "logits = torch.randn(4, 3).cuda(); w = torch.randn(5, 3).cuda()\nlogits @ w"
    report = run_cell(SETUP + code).shown
    listed = [(item.argument, item.expression, item.shape) for item in report.tensors]
    assert listed == [("self", "logits", (4, 3)), ("other", "w", (5, 3))]
    assert report.op.api == "torch.Tensor.__matmul__"


def test_the_graph_of_an_autograd_error_is_drawn() -> None:
    """The tensor that backward was asked of leads to the nodes behind it."""
    code = "w = torch.ones(3).cuda().requires_grad_(); loss = w.exp()\nloss.backward()"
    report = run_cell(SETUP + code).shown
    assert "ExpBackward0" in [node.name for node in report.graph.nodes]


def test_an_inner_module_is_named() -> None:
    """The path of the module, the user's line in it, and no name that the line does not prove."""
    code = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(10, 2)
    def forward(self, x):
        x = self.conv(x).relu()
        return self.head(x.flatten(1))
net = Net().cuda()
net(torch.randn(2, 3, 8, 8, device="cuda"))
"""
    report = run_cell(SETUP + code).shown
    assert (report.module_path, report.op.api) == ("head", "torch.nn.functional.linear")
    assert report.source is not None and report.source.text == "return self.head(x.flatten(1))"
    assert report.headline == (
        "x.flatten(1) and net.head.weight shapes cannot be multiplied (2x288 and 10x2)"
    )


def test_a_worker_process_is_named() -> None:
    """An error that crossed from a loader's worker is explained like one of this process."""
    code = "next(iter(DataLoader([torch.ones(3), torch.ones(4)], batch_size=2, num_workers=1)))"
    report = run_cell(SETUP + code).shown
    assert report.headline_schema == (
        "stack expects each tensor to be equal size, but got [3] at entry 0 and [4] at entry 1"
    )
    assert report.explanation.startswith("Raised in DataLoader worker process 0.")


def test_the_users_line_in_a_worker_is_told() -> None:
    """The worker's traceback came along as text; the loader's own line says little."""
    code = """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, at):
        return torch.ones(3)[at + 3]
next(iter(DataLoader(Data(), num_workers=1, multiprocessing_context="fork")))
"""
    report = run_cell(SETUP + code).shown
    assert report.source is not None and report.source.text.startswith("next(iter(")
    assert re.match(
        r"Raised in DataLoader worker process 0, at In \[\d+\] line \d+: "
        r"return torch\.ones\(3\)\[at \+ 3\]\. ",
        report.explanation,
    )


def test_a_gradient_of_a_custom_function() -> None:
    """The function, the input and both shapes; torch itself sums what was only broadcast."""
    code = """
    import torch

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad * w, grad * x

    x = torch.ones(4, 3, device="cuda", requires_grad=True)
    w = torch.ones(4, 1, device="cuda", requires_grad=True)
    Scale.apply(x, w).sum().backward()
    """
    assert run_cell(code).error is None
    report = run_cell(
        code.replace("return grad * w, grad * x", "return grad * w, (grad * x)[0]")
    ).shown
    assert (report.kind, report.phase) == ("autograd_error", "backward")
    assert "gradient at index 1 - got [3] but expected shape compatible with [4, 1]" in (
        report.headline_schema
    )


# --- from texts alone ----------------------------------------------------------------------------


TEXTS = [
    # torch's sentence, with Python's words for types and without its C++ function.
    ("Found dtype Double but expected Float",
     "host_error", "Found dtype float64 but expected float32", None),
    ("Input type (CPUUInt16Type) and weight type (torch.cuda.FloatTensor) should be the same",
     "host_error", "Input type (uint16 tensor on cpu) and weight type (float32 tensor on cuda) "
     "should be the same", None),
    ("Input type (long int) and bias type (c10::Half) should be the same",
     "host_error", "Input type (int64) and bias type (float16) should be the same", None),
    ("expected m1 and m2 to have the same dtype, but got: long int != c10::BFloat16",
     "host_error", "expected m1 and m2 to have the same dtype, but got: int64 != bfloat16", None),
    ("Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, "
     "Int; but got torch.cuda.FloatTensor instead (while checking arguments for embedding)",
     "host_error", "Expected tensor for argument #1 'indices' to have one of the following scalar "
     "types: int64, int32; but got float32 tensor on cuda instead", "indices"),
    ("Expected all tensors to be on the same device, but got mat1 is on cpu, different from other "
     "tensors on cuda:0 (when checking argument in method wrapper_CUDA_addmm)",
     "host_error", "Expected all tensors to be on the same device, but got mat1 is on cpu, "
     "different from other tensors on cuda:0", None),
    ("gather() received an invalid combination of arguments - got (str), but expected one of:\n"
     " * (int dim, Tensor index)\n", "host_error",
     "gather() received an invalid combination of arguments - got (str)", None),
    ('Error(s) in loading state_dict for Linear:\n\tMissing key(s) in state_dict: "weight".',
     "host_error",
     'Error(s) in loading state_dict for Linear: Missing key(s) in state_dict: "weight"', None),
    ("\"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for 'Int'",
     "host_error",
     "\"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for 'int32'", None),
    ("expected scalar type Half but found Float",
     "host_error", "expected scalar type float16 but found float32", None),
    ("You have to specify either input_ids or inputs_embeds",
     "host_error", "You have to specify either input_ids or inputs_embeds", None),
    # Not a word of a type in other messages.
    ("Short of memory for a Long list", "host_error", "Short of memory for a Long list", None),
    ("Function ScaleBackward returned an incorrect number of gradients (expected 2, got 1)",
     "autograd_error",
     "Function ScaleBackward returned an incorrect number of gradients (expected 2, got 1)", None),
    ("Inference tensors cannot be saved for backward. To work around you can make a clone",
     "autograd_error",
     "Inference tensors cannot be saved for backward. To work around you can make a clone", None),
    ("Function 'SqrtBackward0' returned nan values in its 0th output.", "autograd_error",
     "Function 'SqrtBackward0' returned nan values in its 0th output", None, "steep_gradient"),
    ("Function 'LogSoftmaxBackward0' returned nan values in its 0th output.", "autograd_error",
     "Function 'LogSoftmaxBackward0' returned nan values in its 0th output", None),
    # A module of this name is no wrapper, and a size that fits is not the one at fault.
    ('Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "block.weight". '
     '\n\tUnexpected key(s) in state_dict: "module.weight". ', "host_error",
     'Error(s) in loading state_dict for Net: Missing key(s) in state_dict: "block.weight"', None),
    ("Given normalized_shape=[16, 32], expected input with shape [*, 16, 32], but got input of "
     "size[8, 10, 32]", "host_error", "Given normalized_shape=[16, 32], expected input with shape "
     "[*, 16, 32], but got input of size[8, 10, 32]", None),
    # What no family knows is said in torch's words, and no cause is invented.
    ("a message that nobody has seen\nmore of it", "host_error", "a message that nobody has seen",
     None),
]  # fmt: skip
"""Messages that only a GPU, another release of torch, or a state that is hard to reach gives."""


@pytest.mark.parametrize("row", TEXTS, ids=lambda row: row[0])
def test_texts_of_other_machines(row: tuple[str, str, str, str | None, *tuple[str, ...]]) -> None:
    """By the message alone; the hints are of the rules at the end of the row."""
    message, kind, headline, argument, *rules = row
    report = report_of(message)
    assert (report.kind, report.headline_schema, report.argument) == (kind, headline, argument)
    assert [hint.rule for hint in report.hints] == rules


def test_hints_that_fail_leave_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict comes first: what fails after it is one line of ``limits``."""
    message = (
        "Given groups=1, weight of size [8, 3, 3, 3], expected input[8, 5, 28, 28] to have "
        "3 channels, but got 5 channels instead"
    )
    whole = report_of(message)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(advice, "_size_of_layer", broken)
    report = report_of(message)
    assert (report.headline_schema, report.explanation) == (whole.headline, whole.explanation)
    assert (len(whole.hints), report.hints) == (1, ())
    assert report.limits == ("hints of in_channels failed: ZeroDivisionError: ",)


def test_an_internal_error_is_not_called_a_host_error() -> None:
    """A KeyError in torch's own Python code has no better name."""
    report = report_of("'node'", type_name="KeyError")
    assert (report.kind, report.certainty) == ("python_error", "unknown")


OF_FREED_GRAPHS = {"carried_state", "made_once", "backward_twice"}
"""Rules that test_freed_graph holds against recorded graphs."""


def rules_of_patterns() -> set[str]:
    """The rules of all hints that a pattern can give, from the source."""
    source = Path(host_errors.__path__[0])
    calls = (
        node
        for file in source.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "Hint"
    )
    given = (keyword.value for node in calls for keyword in node.keywords if keyword.arg == "rule")
    return {value.value for value in given if isinstance(value, ast.Constant)}


def test_every_rule_has_a_case() -> None:
    """No hint of a pattern without a message, or a cell, that gets it."""
    elsewhere = {"input_beyond_positions", "out_of_place", "size_images", *OF_FREED_GRAPHS}
    elsewhere |= {"detached_loss", "problem_type", "all_frozen"}
    told = {rule for row in TEXTS for rule in row[4:]} | {case.rule for case in CASES}
    assert rules_of_patterns() - elsewhere <= told


def test_the_order_of_the_patterns_is_written() -> None:
    """Of two that match a message the earlier is asked, whatever their files are called."""
    folder = Path(host_errors.__file__).parent
    assert sorted(host_errors._IN_ORDER) == sorted(it.stem for it in folder.glob("[!_]*.py"))
    assert host_errors._IN_ORDER[-1] == "sentences"  # it repeats what others explain
    message = "Expected hidden size (1, 2, 3), got [1, 3, 3]"
    both = [item.name for item in host_errors.table() if item.regex.search(message)]
    assert both == ["shape_of_state", "words_of_torch"]
