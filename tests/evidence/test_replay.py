"""The replay on the CPU: a second opinion that never harms the process it is asked in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cudalens.evidence import replay as module
from cudalens.evidence.replay import replay
from tests.processes import python
from tests.releases import needs_rehearsal

aten = torch.ops.aten
X = torch.ones(1)


@pytest.mark.parametrize(
    ("last", "told"),
    [(2, ("returned", None, None)), (3, ("raised", "IndexError", "index out of range in self"))],
)
def test_what_the_cpu_kernel_does_is_told(
    last: int, told: tuple[str, str | None, str | None]
) -> None:
    result = replay(aten.embedding.default, (torch.zeros(3, 2), torch.tensor([0, last])), {})
    assert (result.outcome, result.exception, result.message) == told


def test_arguments_are_copied_before_they_are_written_to() -> None:
    table = torch.zeros(3)
    aten.index_put_.default(table.clone(), [torch.tensor([1])], torch.ones(()))
    result = replay(aten.index_put_.default, (table, [torch.tensor([1])], torch.ones(())), {})
    assert result.outcome == "returned"
    assert table.tolist() == [0.0, 0.0, 0.0]


def test_the_random_stream_stays_where_it_was() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    replay(aten.multinomial.default, (torch.tensor([0.5, 0.5]), 1), {})
    assert torch.equal(torch.get_rng_state(), before)


def test_an_unsafe_kernel_is_not_run() -> None:
    """What writes out of bounds on this very input is refused, with the reason."""

    def never(*args: object) -> None:
        raise AssertionError(args)

    result = replay(never, (torch.zeros(3),), {}, is_safe=False)
    assert result.outcome == "unavailable"
    assert "out of bounds" in str(result.reason)


def test_too_much_to_copy_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    table, ids = torch.zeros(3, 2), torch.tensor([0])
    size = table.numel() * 4 + ids.numel() * 8
    monkeypatch.setattr(module, "MAX_BYTES", size)
    assert replay(aten.embedding.default, (table, ids), {}).outcome == "returned"
    monkeypatch.setattr(module, "MAX_BYTES", size - 1)
    refused = replay(aten.embedding.default, (table,), {"indices": ids})
    reason = "the arguments are too large to copy to the CPU"
    assert (refused.outcome, refused.reason) == ("unavailable", reason)


LOSS = """
x = torch.randn({}, device="cuda", requires_grad=True)
t = torch.zeros({}, dtype=torch.long, device="cuda")
loss = F.cross_entropy(x, t, reduction="none").sum()
t.data.fill_(1 << 20)
loss.backward()
"""
REPEATS = """
repeats = torch.tensor([40, -10], device="cuda")
torch.ops.aten.repeat_interleave.Tensor(repeats, output_size=30)
"""
TURNS = """
import torch, cudalens
import torch.nn.functional as F
cudalens.simulate(announce=False)
for turn in range(3):
    try:
        with cudalens.check():
            exec({!r})
    except cudalens.DeviceAssertError as error:
        print(error.report.replay.outcome, error.report.replay.reason)
torch.randn(100, 100).sum()
print("alive")
"""


@needs_rehearsal
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(LOSS.format("64, 5", "64"), marks=pytest.mark.thorough),
        pytest.param(LOSS.format("2, 5, 8, 8", "2, 8, 8"), marks=pytest.mark.thorough),
        REPEATS,
    ],
    ids=["nll_loss backward", "nll_loss2d backward", "repeat_interleave"],
)
def test_the_process_survives_what_the_cpu_kernel_would_corrupt(body: str) -> None:
    done = python("-c", TURNS.format(body))
    *told, last = done.stdout.splitlines()
    assert (done.returncode, last, len(told)) == (0, "alive", 3), done.stderr
    assert all(line.startswith("unavailable the CPU kernel does not check") for line in told)


def test_a_sparse_tensor_is_counted_by_what_it_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses ``nbytes`` of one."""
    row = torch.tensor([0])
    matrix = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2), (3,))
    size = row.nbytes + 2 * 8 + 2 * 4
    monkeypatch.setattr(module, "MAX_BYTES", size)
    assert replay(aten.index_select.default, (matrix, 0, row), {}).outcome == "returned"
    monkeypatch.setattr(module, "MAX_BYTES", size - 1)
    assert replay(aten.index_select.default, (matrix, 0, row), {}).outcome == "unavailable"


def test_an_op_without_a_kernel_of_the_cpu_says_nothing() -> None:
    def missing(*_: object) -> None:
        raise NotImplementedError("Could not run 'mine::op' with arguments from the 'CPU' backend")

    def refused(*_: object) -> None:
        raise NotImplementedError(" not for Half\nmore")

    result = replay(missing, (torch.ones(1),), {})
    assert (result.outcome, result.reason) == ("unavailable", "the op has no CPU kernel")
    result = replay(refused, (torch.ones(1),), {})
    told = result.outcome, result.exception, result.message
    assert told == ("raised", "NotImplementedError", "not for Half")


def test_a_copy_that_fails_is_no_answer_of_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(value: object) -> None:
        raise RuntimeError("CUDA error: it ended\nmore")

    monkeypatch.setattr(module, "_to_cpu", lost)
    result = replay(aten.relu.default, (torch.ones(1),), {})
    assert result.outcome == "unavailable"
    assert result.reason == "RuntimeError: CUDA error: it ended"


@pytest.mark.parametrize("copies", [True, False])
def test_what_came_from_outside_is_no_answer(copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise RuntimeError("stop")

    def is_raised(error: BaseException) -> None:
        raise error

    monkeypatch.setattr(module, "raise_if_outside", is_raised)
    if copies:
        monkeypatch.setattr(module, "_to_cpu", interrupt)
    with pytest.raises(RuntimeError, match="stop"):
        replay(interrupt, (torch.ones(1),), {})


def test_a_mode_of_the_users_does_not_see_the_replay() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, *_: Any) -> None:
            raise AssertionError(func)

    with Mode():
        assert replay(aten.relu.default, (X,), {}).outcome == "returned"


def test_the_op_is_given_the_host_and_no_generator() -> None:
    given: list[object] = []
    table, generator = torch.ones(2, requires_grad=True), torch.Generator()
    more = {"device": torch.device("cuda:1"), "generator": generator, "n": 3}
    result = replay(lambda *args, **kwargs: given.extend([*args, kwargs]), (table, [table]), more)
    assert result.outcome == "returned"
    assert result.reason == "the CPU kernel accepts these arguments"
    own, (listed,), options = given  # type: ignore[misc]
    assert options == {"device": torch.device("cpu"), "generator": None, "n": 3}
    for copy in (own, listed):
        assert copy is not table and not copy.requires_grad  # type: ignore[has-type]
