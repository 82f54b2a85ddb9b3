"""A program under a check is as without it: what no dispatch mode allows, and what a function mode
would change.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

import cudalens
from cudalens import simulate
from cudalens.recorder import Recorder, _torch
from tests.releases import default_device, release


def subclass() -> object:
    class Own(torch.Tensor):
        pass

    return type(Own(torch.empty(2))).__name__


def traced_with_a_number() -> object:
    traced = torch.jit.trace(lambda x: x + x.sum() * 2.0, torch.ones(3))
    return traced(torch.ones(3)).tolist()


def profiled() -> object:
    with profile() as found:
        torch.ones(3).exp()
    return {item.key: item.count for item in found.key_averages() if item.key.startswith("aten")}


def eigenvalues() -> object:
    torch.manual_seed(0)
    made = torch.randn(8, 8)
    return torch.linalg.eigvalsh(made @ made.T).tolist()


def encoded() -> object:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    encoder, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 16)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad():
        return [encoder(x).tolist(), encoder(x, src_key_padding_mask=padding).tolist()]


def converted_by_swapping() -> object:
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.double()
        layer.load_state_dict(nn.Linear(2, 2).state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return str(layer(torch.ones(1, 2, dtype=torch.double)).dtype)


def test_tensors_are_swapped_after_a_question() -> None:
    """What was worked out of the calls refers to their tensors as well."""
    left, right = torch.ones(2), torch.zeros(2)
    with Recorder() as recorder:
        left + right
        assert recorder.history()
        torch.utils.swap_tensors(left, right)
    assert left.tolist() == [0.0, 0.0]


def on_a_default_device() -> object:
    with default_device("meta"):
        return str(torch.ones(2).device)


def jagged() -> object:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    return (nested * 2).to_padded_tensor(0.0).tolist()


def copied_by_dlpack() -> object:
    """Under a function mode torch forgets keyword arguments: the copy would share its memory."""
    if release() < (2, 9):
        pytest.skip("Tensor.__dlpack__ takes no copy before torch 2.9")
    x = torch.ones(2)
    copied = torch.from_dlpack(x.__dlpack__(copy=True))
    x += 1
    return copied.tolist()


def out_of_a_chain() -> object:
    made = torch.empty(2, 2)
    torch.chain_matmul(torch.ones(2, 3), torch.ones(3, 2), out=made)
    return made.tolist()


def ambiguous() -> object:
    try:
        return torch.empty(2, 2, 1, 2).dim_order(ambiguity_check=True)
    except RuntimeError as error:
        return str(error)


PROGRAMS: list[Callable[[], object]] = [
    subclass,
    traced_with_a_number,
    profiled,
    eigenvalues,
    encoded,
    converted_by_swapping,
    on_a_default_device,
    jagged,
    copied_by_dlpack,
    out_of_a_chain,
    ambiguous,
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("nan", [False, True])
def test_a_program_gives_what_it_gives_without(program: Callable[[], object], nan: bool) -> None:
    if nan and program is profiled:
        return  # the sums that look for NaN are ops, too
    plain = program()
    with cudalens.check(nan=nan) as session:
        assert program() == plain
        assert session.recorder.limits == []
    assert session.report is None


def test_torch_s_functions_are_its_own_again_afterwards() -> None:
    names = [
        (torch.autograd, "_engine_run_backward"),
        (torch.overrides, "has_torch_function"),
        (torch.utils, "swap_tensors"),
    ]
    before = [getattr(*name) for name in names]
    with Recorder():
        assert all(getattr(*name) is not old for name, old in zip(names, before, strict=True))
    assert [getattr(*name) for name in names] == before


class Duck:
    """No tensor, and yet torch's functions ask it first."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> str:
        return f"the duck's {func.__name__}"


def test_an_object_that_is_no_tensor_still_takes_over() -> None:
    @torch.overrides.wrap_torch_function(lambda item: (item,))
    def own(item: Any) -> Any:
        return item

    for program in (
        lambda: torch.sym_max(Duck(), 1),
        lambda: torch.sym_ite(Duck(), 1, 2),
        lambda: torch.sym_sum([Duck(), 1]),
        lambda: own(Duck()),
        lambda: own(5),
        lambda: own(nn.Parameter(torch.ones(1))).item(),
    ):
        plain = program()
        with cudalens.check():
            assert program() == plain


def test_a_name_imported_in_a_block_is_of_torchs_function() -> None:
    ask, names = torch.overrides.has_torch_function, dict[str, Any]()
    with cudalens.check():
        exec("from torch.overrides import has_torch_function", names)
        assert names["has_torch_function"]([torch.ones(1)]) is False
    assert names["has_torch_function"] is ask is torch.overrides.has_torch_function


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("nan", [False, True, "strict"])
@pytest.mark.parametrize("kind", ["function", "module"])
def test_a_traced_graph_is_the_same_in_a_check(
    nan: Any, kind: str, sim: simulate.Simulation, recwarn: pytest.WarningsRecorder
) -> None:
    """Its names, its lines, and nothing that the check computes."""
    rows = torch.tensor([1, 0], device="cuda")

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.log()[rows].relu() + 1

    def traced() -> str:
        what = Layer() if kind == "module" else Layer().forward
        graph = torch.jit.trace(what, torch.ones(2, device="cuda")).graph
        return re.sub(r"__torch__\S*", "", str(graph))

    plain = traced()
    recwarn.clear()
    with cudalens.check(nan=nan) as session:
        assert traced() == plain
        assert torch.ones(1).add(1) == 2
        assert session.recorder.recorded_ops > 0
    assert not [item for item in recwarn if "TracerWarning" in str(item.category)]


# --- when the device is waited for ----------------------------------------------------------------


class Queue:
    """The current stream: busy after work, idle after a wait."""

    def __init__(self) -> None:
        self.waits = 0
        self.is_busy = False

    def look(self, device: torch.device) -> None:
        self.waits += self.is_busy
        self.is_busy = False


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch, sim: simulate.Simulation) -> Queue:
    """Count the waits; each launch of the rehearsal device makes its stream busy."""
    queue, launch = Queue(), sim._runtime.state.launch

    def launched() -> None:
        queue.is_busy = True
        launch()

    monkeypatch.setattr(sim._runtime.state, "launch", launched)
    monkeypatch.setattr(_torch, "wait_if_busy", queue.look)
    return queue


@pytest.mark.parametrize(
    ("call", "waits"),
    [
        (lambda x: x + 1, 1),
        (lambda x: x.add_(1), 1),
        (lambda x: (x + 1).exp(), 2),
        (lambda x: x.view(-1)[1:].unsqueeze(0).expand(2, -1), 0),
        (lambda x: (x.size(), x.shape, x.is_contiguous(), x.detach()), 0),
    ],
)
def test_only_what_launches_something_is_waited_for(
    call: Callable[[Tensor], Any], waits: int, queue: Queue
) -> None:
    x = torch.ones(2, 2, device="cuda")
    with Recorder():
        queue.is_busy, queue.waits = False, 0
        call(x)
    assert queue.waits == waits


def test_without_waiting_nothing_is_waited_for(queue: Queue) -> None:
    x = torch.ones(2, 2, device="cuda", requires_grad=True)
    with Recorder(sync=False):
        (x * 2).sum().backward()
    assert queue.waits == 0


def test_in_backward_each_node_that_launches_is_waited_for(queue: Queue) -> None:
    x = torch.ones(2, 2, device="cuda", requires_grad=True)
    with Recorder():
        loss = x.exp().view(-1).sum()
        queue.is_busy, queue.waits = False, 0
        loss.backward()
    assert queue.waits >= 2
