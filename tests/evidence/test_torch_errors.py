"""Which exceptions are torch's business, and which pass a checked block untouched."""

from __future__ import annotations

import ast
import types
from typing import Any

import pytest
import torch

from cudalens.diagnosis.host_errors import is_known_message
from cudalens.evidence import torch_errors
from cudalens.evidence.torch_errors import is_torch_error, visible_entries
from cudalens.source.running_call import ABSENT
from tests.hostcells import run_cell
from tests.probes import cell

pytestmark = pytest.mark.usefixtures("sim")
SETUP = """
import torch, json, functools, types, numpy as np
from torch import nn
from torch.utils.data import DataLoader, Dataset
x = torch.ones(2, 3, device="cuda")
t, two, number, count = torch.tensor(4), torch.tensor([1, 2]), 2.5, 0
def given(value): return value
class Words:
    def __getitem__(self, key): return {}[key]
    def gather(self, key): return {}[key]
    def abs(self): return {}
"""
ON_CPU = """
import functools, torch
from torch import nn
x, y = torch.ones(2, 3), torch.tensor([0, 1])
def given(value): return value
class Words:
    x = property(lambda self: x)
    def __getitem__(self, key): return x
"""

FOREIGN = [
    "raise ValueError('mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)')",
    "raise RuntimeError('CUDA is a fine thing')",
    "assert x.shape == (3, 2), 'shapes differ'",
    "assert (x == 0).all()",
    "{}['a']",
    "[1, 2][5]",
    "1 / 0",
    "int('a')",
    "open('/no/such/file')",
    "import no_such_module",
    "undefined_name",
    "x.no_such_attribute",
    "json.loads('{')",
    "np.ones(3).reshape(2, 2)",
    "np.ones(3).mean().reshape(2, 2)",
    "str(x.shape).index('nothing')",
    "(lambda a: a)()",
    "(lambda a: a)(x, x)",
    "x.shape[7]",
    "dict(a=x)['b']",
    "torch.no_such_function(x)",
    "nn.Linear(2, 2).no_such_layer",
    "torch.load('/no/such/file')",
    "raise KeyboardInterrupt if False else StopIteration",
    # A tensor is the key or the index; the container is not torch's.
    "{'a': 1}[t]",
    "{'a': 1}.pop(t)",
    "['a', 'b'][t]",
    "(1, 2)[t]",
    "'abc'[t]",
    "np.zeros(3)[t]",
    "np.zeros(3).take(t)",
    "Words()[t]",
    "Words().gather(t)",
    "given({})[t]",
    "given(Words()).abs()[t]",
    "-given(Words()).abs()",
    "t in 'abc'",
    "'a' + t",
    "[1] + t",
    "functools.partial({}.pop)(t)",
    "getattr({}, 'pop')(t)",
    "list(map({}.pop, [t]))",
    # A spelling that is wrong, on what is torch's.
    "given(t).no_such_attribute",
    "torch.ops.aten.no_such_op",
    # None, and methods, that no tensor gave.
    "types.SimpleNamespace(grad=None).grad.norm()",
    "'abc'.upper / 2",
    "types.SimpleNamespace(sum=None).sum / 2",
    "x.shape / 2",
    "'abc'.backward()",
    "(2.5).no_such_attribute",
    "nn.ModuleList().no_such_layer",
]
TORCHS = [
    "x @ x",
    "x.view(7)",
    "x + torch.ones(4, device='cuda')",
    "bool(x)",
    "float(x)",
    "if x > 0: pass",
    "x[0, 0, 0]",
    "torch.add(x, 'a')",
    "x.sum(dim=5)",
    "x += torch.ones(4, device='cuda')",
    "nn.Linear(4, 2).cuda()(x)",
    "nn.Linear(4, 2)(1)",
    "torch.ones(3, device='cuda:7')",
    "x.numpy()",
    "x.cpu() + x",
    "next(iter(DataLoader([None, None])))",
    "x.backward()",
    "x.float().t().view(7)",
    "nn.Linear(3, 2).cuda()(x).view(7)",
    "range(two)",
    "for i in range(two): pass",
    "hex(two)",
    "[1, 2][two]",
    "[0] * two",
    "given([1])[two]",
    "two in [x]",
    "two[t]",
    "t + {}",
    "nn.Linear(2, 2).get_parameter('bias.x')",
    "nn.Linear(2, 2).get_submodule('x')",
    "nn.Linear(2, 2).get_buffer('weight')",
    "x.grad.norm()",
    "0.1 * x.grad",
    "x.sum / 2",
    "2 / x.sum",
    "torch.norm(x.grad)",
    "nn.functional.softmax(nn.ReLU(), dim=0)",
    "number.backward()",
    "count.backward()",
]
HIDDEN = [
    "given(x).gather(1, y)",
    "nn.Linear(3, 3)(x).gather(1, y)",
    "Words().x.gather(1, y)",
    "Words()['x'].gather(1, y)",
    "given(x)[y, torch.tensor([0, 1, 1])]",
    "given(x).gather(1, y).sum()",
    "(given(x),)[0].gather(1, y)",
    "(q := given(x)).gather(1, y)",
    "(x if given(1) else None).gather(1, y)",
    "functools.partial(torch.gather, x, 1)(y)",
    "getattr(x, 'gather')(1, y)",
    "m = x.gather; m(1, y)",
    "list(map(torch.gather, [x], [1], [y]))",
    # Refused before an op begins.
    "given(x).narrow(0, 0, 9)",
    "given(x).chunk(0)",
    "given(x)[1.5]",
    "given(x).gather('a', y)",
    "given(x).gather(1)",
    "given(x)[0] = 'a'",
    "(q := x).chunk(0)",
    "(x if given(1) else x).chunk(0)",
    "functools.partial(torch.movedim, x)(0)",
    "getattr(x, 'type')('no such type')",
    "m = x.type; m('no such type')",
]


@pytest.mark.parametrize("line", FOREIGN)
def test_what_is_not_torchs_passes_untouched(line: str) -> None:
    outcome = run_cell(SETUP + line)
    assert outcome.error is not None
    assert outcome.report is None
    assert not {"__notes__", "__cudalens_report__"} & {*dir(outcome.error)}


@pytest.mark.parametrize(
    ("code", "line", "fast"),
    [
        *((SETUP, line, True) for line in TORCHS),
        # A result of the user's own functions cannot be read again: the op itself tells.
        *((ON_CPU, line, False) for line in HIDDEN),
    ],
)
def test_what_torch_raises_is_reported(code: str, line: str, fast: bool) -> None:
    report = run_cell(code + line, fast=fast).shown
    kinds = ("host_error", "autograd_error", "cuda_error") if fast else ("host_error",)
    assert report.kind in kinds
    assert report.source is not None and report.source.text == line


@pytest.mark.parametrize(
    ("line", "device", "fast", "is_seen"),
    [
        ("given(x).kthvalue(9)", "cpu", False, True),  # by the recorder
        ("given(x).gather(1, y)", "cpu", True, True),  # by a guard
        ("given(x).kthvalue(9)", "cuda", True, True),  # by a kernel of the simulation
        ("given(x).topk(9)", "cuda", True, True),  # by one that is registered for this op
        ("given(x).kthvalue(9)", "cpu", True, False),  # by nobody
        ("given({}).pop(9)", "cpu", False, False),
    ],
)
def test_an_op_that_raised_is_seen_in_the_dispatcher(
    line: str, device: str, fast: bool, is_seen: bool
) -> None:
    """Neither the line nor the message tells; without whoever saw the op nothing is certain."""
    moved = f"x, y = x.to('{device}'), y.to('{device}')\n"
    outcome = run_cell(ON_CPU + moved + line, fast=fast)
    assert outcome.error is not None
    assert not is_known_message(str(outcome.error))
    assert (outcome.report is not None) is is_seen


CUSTOM_OP = """
import torch
@torch.library.custom_op("origins::OP", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    BODY
op(torch.ones(2))
"""
DATASET = """
from torch.utils.data import DataLoader, Dataset
class Words(Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return {"a": 1}["b"]
next(iter(DataLoader(Words(), WORKERS)))
"""
AGAIN = "except RuntimeError as error: raise ValueError('wrong input') from error"
NOT_TORCHS = {
    "import cudalens; cudalens.check(max_ops=0)": "max_ops = 0",
    "import cudalens; cudalens.register_guard('x', None)": "namespace::op",
    # A statement of the user's in an op of their own, which runs below the recorder.
    CUSTOM_OP.replace("BODY", "raise ValueError('not with me')"): "not with me",
    # Called from torch's loader, in this process or in a worker.
    DATASET.replace("WORKERS", "num_workers=0"): "'b'",
    DATASET.replace("WORKERS", "num_workers=1, multiprocessing_context='fork'"): "'b'",
    f"{SETUP}try: x @ x\n{AGAIN}": "wrong input",
    "from cudalens.simulate.state import not_rehearsed\nraise not_rehearsed('x')": "rehears",
}


@pytest.mark.parametrize(("code", "said"), NOT_TORCHS.items(), ids=NOT_TORCHS.values())
@pytest.mark.parametrize("fast", [True, False])
def test_what_says_itself_what_is_wrong_gets_no_report(code: str, said: str, fast: bool) -> None:
    outcome = run_cell(code.replace("OP", f"own_{fast}"), fast=fast)
    assert said in str(outcome.error)
    assert outcome.report is None


@pytest.mark.parametrize(
    "line", ["functools.partial(x.view, 7)()", "getattr(x, 'view')(7)", "[x.view][0](7)"]
)
def test_a_call_that_no_name_tells_is_known_to_the_recorder(line: str) -> None:
    assert run_cell(f"{SETUP}{line}", fast=False).shown.op.name == "torch.Tensor.view"
    raising = f"def f():\n    raise KeyError(1)\nfunctools.partial(f)()\n{line}"
    assert run_cell(f"{SETUP}{raising}", fast=False).report is None


def test_an_op_of_torchs_in_an_op_of_the_users_own_is_torchs() -> None:
    code = CUSTOM_OP.replace("OP", "torchs").replace("BODY", "return x.kthvalue(9).values")
    report = run_cell(code, fast=False).shown
    assert report.source is not None and report.source.text.endswith("kthvalue(9).values")


@pytest.mark.parametrize(("line", "is_torchs"), [("[x][0].kthvalue(9)", True), ("{}[t]", False)])
def test_a_check_around_a_check_knows_what_the_inner_one_knew(line: str, is_torchs: bool) -> None:
    """The inner check takes its frames out of the traceback, and with them the evidence."""
    code = f"""
    import cudalens, torch
    x, t = torch.ones(2), torch.tensor(1)
    with cudalens.check():
        {line}
    """
    assert (run_cell(code, fast=False).report is not None) is is_torchs


@pytest.mark.parametrize(
    ("assigned", "what"),
    [("nn.Linear(2, 2)", "module"), ("nn.Parameter(torch.ones(2))", "parameters"), ("1", None)],
)
def test_a_module_that_is_not_initialised_refuses_its_parts(
    assigned: str, what: str | None
) -> None:
    """Only torch's own check is torch's: a number is taken, and a missing name is Python's."""
    code = f"""
    import torch
    from torch import nn
    class Net(nn.Module):
        def __init__(self):
            self.part = {assigned}
    Net().missing
    """
    outcome = run_cell(code)
    assert isinstance(outcome.error, AttributeError)
    if what is None:
        assert outcome.report is None
        return
    report, headline = outcome.shown, f"cannot assign {what} before Module.__init__() call"
    assert (report.kind, report.headline_schema) == ("host_error", headline)
    assert report.source is not None and report.source.text == f"self.part = {assigned}"


@pytest.mark.parametrize(
    ("text", "owner", "is_it"),
    [
        ("w.grad", ABSENT, True),  # of a comprehension that has ended
        ("w.sum", ABSENT, False),
        ("f().grad", ABSENT, False),
        ("w.grad", torch.ones(2), True),
        ("f().grad", torch.ones(2), True),
        ("w.sum", torch.ones(2), True),
        ("w.shape", torch.ones(2), False),
        ("w.grad", types.SimpleNamespace(grad=None), False),
        ("w", torch.ones(2), False),
    ],
)
def test_what_a_tensor_gave(text: str, owner: object, *, is_it: bool) -> None:
    call: Any = types.SimpleNamespace(value=lambda node: owner)
    node = ast.parse(text, mode="eval").body
    assert torch_errors._is_of_tensor(call, node) is is_it


SENTENCES = """
gather() received an invalid combination of arguments - got (str), but expected
gather() received an invalid combination of arguments
gather() missing 1 required positional arguments: "index"
gather() missing 1 required positional argument: 'index'
only integer tensors of a single element can be converted to an index
only integer scalar arrays can be converted to a scalar index
start (0) + length (9) exceeds dimension size (2).
start (0) + length (9) exceeds the file's size (2).
torch.hsplit requires a tensor with at least 1 dimension, but got 0!
array split requires a tensor with at least 1 dimension, but got 0!
number of sections must be larger than 0, got 0
number sections must be larger than 0.
""".strip().split("\n")
"""One of torch's, then its neighbour, and so on."""


@pytest.mark.parametrize(
    ("said", "nearly"), [*zip(SENTENCES[::2], SENTENCES[1::2], strict=True)], ids=SENTENCES[::2]
)
def test_a_sentence_of_torchs_is_told_from_its_neighbour(said: str, nearly: str) -> None:
    """Python, NumPy and others say much the same in other words."""
    assert is_known_message(said)
    assert not is_known_message(nearly)


def test_a_torch_error_raised_again_is_torchs() -> None:
    """``raise`` and ``raise error`` keep the traceback that leads to torch."""
    for again in ("raise", "raise error"):
        code = f"try:\n    x @ x\nexcept RuntimeError as error:\n    {again}"
        report = run_cell(SETUP + code).shown
        assert report.source is not None and report.source.text == "x @ x"


def test_a_simulated_kernel_stands_for_the_kernel() -> None:
    """Frames below the simulation are nobody's: no frame of the report lies in this package."""
    report = run_cell(SETUP + "nn.Linear(4, 2).cuda()(x)").shown
    assert report.frames
    assert not any(
        "cudalens/" in frame.file and "tests" not in frame.file for frame in report.frames
    )
    assert report.frames[-1].file.endswith("torch/nn/modules/linear.py")


def failing(names: list[str]) -> BaseException:
    """Raise below functions that are compiled as the given files, outermost first."""
    space: dict[str, object] = {"inner": lambda: 1 / 0}
    for name in reversed(names):
        module = types.ModuleType(name)
        exec(compile("def call():\n    inner()", name, "exec"), module.__dict__ | space, made := {})
        space = {"inner": made["call"]}
    try:
        space["inner"]()  # type: ignore[operator]
    except ZeroDivisionError as error:
        return error.with_traceback(error.__traceback__.tb_next)  # without the frame of this file
    raise AssertionError


@pytest.mark.parametrize(
    ("files", "seen"),
    [
        (["user", "lib"], ["user", "lib"]),
        (["own", "user", "lib"], ["user", "lib"]),
        (["user", "lib", "own", "torch"], ["user", "lib"]),
        (["user", "own", "torch", "user"], ["user", "torch", "user"]),
        (["user", "own", "torch", "user", "own", "lib"], ["user", "torch", "user"]),
        (["own", "lib", "own", "lib"], ["lib"]),
    ],
)
def test_the_traceback_ends_where_it_enters_this_package(
    files: list[str], seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the last of the user's frames all foreign ones are kept, then up to the first own."""
    monkeypatch.setattr(torch_errors, "is_own_file", lambda file: file == "own")
    monkeypatch.setattr(torch_errors, "is_user_file", lambda file: file == "user")
    # The function that divides by zero stands in this file, innermost.
    found = [item.tb_frame.f_code.co_filename for item in visible_entries(failing(files))]
    assert [name for name in found if name in {*files}] == seen


def test_of_our_own_frames_alone_none_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_errors, "is_own_file", lambda file: True)
    assert list(visible_entries(failing(["own"]))) == []


@pytest.mark.parametrize(
    ("names", "uses"),
    [
        ({"__name__": "torch.no_such"}, True), ({"__name__": "torchlike"}, False),
        ({"torch": torch}, True), ({"nn": torch.nn}, True), ({"F": torch.nn.functional}, True),
        ({"nn": ast}, False), ({"x": torch}, False),
    ],
)  # fmt: skip
def test_a_module_that_uses_torch(names: dict[str, object], uses: bool) -> None:
    frame: Any = types.SimpleNamespace(f_globals=names)
    assert torch_errors.uses_torch(frame) is uses


@pytest.mark.parametrize(
    ("call", "is_it"),
    [
        ("func(args)", True), ("cls.__torch_function__(func, types)", True),
        ("types(args)", False), ("cls.other(func)", False), ("args(func)", False),
    ],
)  # fmt: skip
def test_a_hook_that_runs_what_it_was_given(call: str, is_it: bool) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError

    owner = types.SimpleNamespace(__torch_function__=fails, other=fails)
    with cell(f"def hook(cls, func, types, args):\n    return {call}") as code:
        exec(code, space := {})
        with pytest.raises(ZeroDivisionError) as caught:
            space["hook"](owner, fails, fails, fails)
        assert torch_errors._hands_on(caught.tb.tb_next) is is_it


@pytest.mark.parametrize(
    ("text", "name", "frame", "caller", "is_it"),
    [
        ("'list' object has no attribute 'size'", "size", "torch", "lib", True),
        ("'list' object has no attribute 'size'", "size", "lib", "torch", False),
        ("no size", "size", "lib", "torch", True), ("no size", "size", "torch", "lib", False),
        ("no name", "name_of", "torch", "lib", True), ("no name", "name_of", "lib", "torch", False),
    ],
)  # fmt: skip
def test_an_attribute_that_torch_misses(
    text: str, name: str, frame: str, caller: str, is_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a list in place of a tensor, of what torch was given, and in torch's own ``raise``."""
    code = types.SimpleNamespace(co_filename="lib.py", co_name="f")
    frames: list[Any] = [
        types.SimpleNamespace(f_globals={"__name__": it}, f_code=code) for it in (frame, caller)
    ]
    entry: Any = types.SimpleNamespace(tb_frame=frames[0])
    monkeypatch.setattr(torch_errors, "is_user_file", lambda file: False)
    operation = types.SimpleNamespace(operation="RAISE_VARARGS")
    monkeypatch.setattr(torch_errors, "place_of", lambda entry: operation)
    error = AttributeError(text, name=name)
    assert torch_errors._is_torch_attribute(error, entry, frames[1]) is is_it


@pytest.mark.parametrize(("moved", "is_it"), [(None, False), (0, True), (2, False)])
def test_a_call_that_was_seen_to_raise_is_that_of_the_instruction(
    moved: int | None, is_it: bool
) -> None:
    with cell("def f(g):\n    g()") as code:
        exec(code, space := {})
        with pytest.raises(ZeroDivisionError) as caught:
            space["f"](lambda: 1 / 0)
        entry: Any = caught.tb.tb_next
        call: Any = None
        if moved is not None:
            call = types.SimpleNamespace(code=entry.tb_frame.f_code, lasti=entry.tb_lasti + moved)
        assert torch_errors._is_raised_below(caught.value, entry, call) is is_it


@pytest.mark.parametrize(
    ("files", "kept"),
    [
        ("user lib hook lib", 2), ("hook lib", 2), ("user hook lib user", 4),
        ("user hook lib hook lib", 1), ("user hook other lib", 4), ("user lib", 2),
    ],
)  # fmt: skip
def test_what_stands_above_the_hooks_of_the_user(
    files: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``other`` is a hook that does something else."""

    def entry(file: str) -> Any:
        name = "__torch_function__" if file in ("hook", "other") else "f"
        code = types.SimpleNamespace(co_name=name)
        return types.SimpleNamespace(file=file, tb_frame=types.SimpleNamespace(f_code=code))

    monkeypatch.setattr(torch_errors, "file_of", lambda it: it.file)
    monkeypatch.setattr(torch_errors, "is_user_file", lambda file: file != "lib")
    monkeypatch.setattr(torch_errors, "_hands_on", lambda it: it.file == "hook")
    entries = [entry(file) for file in files.split()]
    assert torch_errors._above_hook(entries) == entries[:kept]


def test_without_a_traceback_nothing_is_known() -> None:
    assert not is_torch_error(ValueError("x"))
