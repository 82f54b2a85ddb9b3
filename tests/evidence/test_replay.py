"""The replay on the CPU: a second opinion that never harms the process it is asked in."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from cudalens.evidence import replay as module
from cudalens.evidence.replay import replay

aten = torch.ops.aten


def test_an_error_of_the_cpu_kernel_is_told() -> None:
    """Type and first line of what the CPU says to the same arguments."""
    result = replay(aten.embedding.default, (torch.zeros(3, 2), torch.tensor([0, 3])), {})
    assert (result.outcome, result.exception) == ("raised", "IndexError")
    assert result.message == "index out of range in self"


def test_a_result_is_told_too() -> None:
    """At the bound the CPU kernel returns, and its result is dropped."""
    result = replay(aten.embedding.default, (torch.zeros(3, 2), torch.tensor([0, 2])), {})
    assert (result.outcome, result.exception, result.message) == ("returned", None, None)


def test_arguments_are_copied_before_they_are_written_to() -> None:
    """An in-place op runs on copies, lists of tensors included."""
    table = torch.zeros(3)
    aten.index_put_.default(table.clone(), [torch.tensor([1])], torch.ones(()))
    result = replay(aten.index_put_.default, (table, [torch.tensor([1])], torch.ones(())), {})
    assert result.outcome == "returned"
    assert table.tolist() == [0.0, 0.0, 0.0]


def test_the_random_stream_stays_where_it_was() -> None:
    """A random op is replayed without a draw from the user's stream."""
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
    assert result.reason is not None
    assert "out of bounds" in result.reason


def test_too_much_to_copy_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit the arguments are copied, one byte beyond they are not."""
    table, ids = torch.zeros(3, 2), torch.tensor([0])
    size = table.numel() * 4 + ids.numel() * 8
    monkeypatch.setattr(module, "MAX_BYTES", size)
    assert replay(aten.embedding.default, (table, ids), {}).outcome == "returned"
    monkeypatch.setattr(module, "MAX_BYTES", size - 1)
    refused = replay(aten.embedding.default, (table, ids), {})
    assert (refused.outcome, refused.reason) == (
        "unavailable",
        "the arguments are too large to copy to the CPU",
    )


UNSAFE = {
    "nll_loss backward": """
        x = torch.randn(64, 5, device="cuda", requires_grad=True)
        t = torch.zeros(64, dtype=torch.long, device="cuda")
        loss = F.nll_loss(x.log_softmax(1), t, reduction="none").sum()
        t.data.fill_(1 << 20)
        loss.backward()
    """,
    "nll_loss2d backward": """
        x = torch.randn(2, 5, 8, 8, device="cuda", requires_grad=True)
        t = torch.zeros(2, 8, 8, dtype=torch.long, device="cuda")
        loss = F.cross_entropy(x, t, reduction="none").sum()
        t.data.fill_(1 << 20)
        loss.backward()
    """,
    "repeat_interleave": """
        repeats = torch.tensor([40, -10], device="cuda")
        torch.ops.aten.repeat_interleave.Tensor(repeats, output_size=30)
    """,
}


@pytest.mark.parametrize("name", UNSAFE)
def test_the_process_survives_what_the_cpu_kernel_would_corrupt(name: str) -> None:
    """The finding is made, its replay refused, and the process ends in good order."""
    body = "".join(f"        {line.strip()}\n" for line in UNSAFE[name].strip().splitlines())
    code = (
        "import torch, cudalens\nimport torch.nn.functional as F\n"
        "cudalens.simulate(announce=False)\n"
        "for turn in range(3):\n"
        "    try:\n"
        "      with cudalens.check() as session:\n"
        f"{body}"
        "    except cudalens.DeviceAssertError as error:\n"
        "        print(error.report.replay.outcome, error.report.replay.reason)\n"
        "torch.randn(100, 100).sum()\n"
        "print('alive')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert lines[-1] == "alive"
    assert len(lines) == 4
    assert all(line.startswith("unavailable the CPU kernel does not check") for line in lines[:3])
