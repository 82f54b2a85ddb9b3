"""Training under checks: frameworks, optimizers, autocast, and how often the host waits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import cudalens
from tests import standin
from tests.integrations.test_callbacks import HOSTS, train_on_cuda
from tests.processes import ROOT

sys.path.insert(0, str(ROOT / "tests" / "gpu"))

from harmless import HARMLESS, run_harmless
from steps import TINY, run_step


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("bad", [2, 7])
def test_frameworks_find_the_bad_label(host: str, bad: int, tmp_path: Path) -> None:
    """The labels end at 2; the report lies beside the checkpoints."""
    done = train_on_cuda(tmp_path, host, bad=bad)
    assert done.stdout.endswith("LEFT False 0\n"), done.stdout + done.stderr
    assert ("= 7 is outside the 3 classes" in done.stdout) == (bad == 7)
    for path in tmp_path.rglob("cudalens-*.json"):
        assert json.loads(path.read_text("utf-8"))["context_usable"] is True
    assert bool(list(tmp_path.rglob("cudalens-*.json"))) == (bad == 7)


def test_checks_change_no_bit_and_need_no_memory() -> None:
    """Transformer layer, AdamW; beyond the check's own scalars the peak is the plain one."""
    run_step("plain", TINY)  # the caches are filled
    plain, guards, full = (run_step(kind, TINY) for kind in ("plain", "guards", "full"))
    assert plain["losses"] == guards["losses"] == full["losses"]
    assert guards["peak_bytes"] - plain["peak_bytes"] <= 64 * 1024


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_bad_label_is_stopped_under_autocast(dtype: str) -> None:
    found = run_step(dtype, TINY)
    assert found["losses"]
    assert "4 is outside" in found["stopped"]


NEEDS_A_KERNEL = {
    "sparse tensors",  # their values
    "more than 2^31 indices",  # minutes on the CPU
    "a function of torch.compile's",  # Triton's calls of the driver
}


@pytest.mark.parametrize("name", [c.name for c in HARMLESS if c.name not in NEEDS_A_KERNEL])
def test_a_cell_in_which_nothing_is_wrong(name: str) -> None:
    found = run_harmless(name)
    assert (found["error"], found["report"], found["troubles"]) == (None, None, [])


@pytest.mark.parametrize(
    ("options", "most"),
    [
        pytest.param({}, 35, id="full"),
        pytest.param({"sync": False}, 8, id="no sync"),
        pytest.param({"fast": True}, 8, id="fast"),
        pytest.param({"deferred": True}, 1, id="deferred"),
    ],
)
def test_the_host_waits_so_often_in_a_step(options: dict[str, bool], most: int) -> None:
    """Table, two linear layers, index, gather, labels, backward, SGD: 39 launches unchecked.

    Counted are waits with work in the queue; eight reads by the guards are among them.
    """
    torch.manual_seed(0)
    emb = torch.nn.Embedding(20, 8).cuda()
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 5))
    optimizer = torch.optim.SGD([*emb.parameters(), *net.cuda().parameters()], lr=0.1)
    ids = torch.randint(0, 20, (64,), device="cuda")
    labels = torch.randint(0, 5, (64,), device="cuda")
    rows = torch.randint(0, 64, (10,), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        out = net(emb(ids.random_(20)))
        picked = out[rows].sum() + out.gather(1, labels[:, None]).sum()
        (F.cross_entropy(out, labels) + 0 * picked).backward()
        optimizer.step()

    step()
    standin.lag()
    with cudalens.check(**options):
        step()
        with standin.counting() as seen:
            for _ in range(5):
                step()
    assert 5 <= seen.blocked <= 5 * most, seen
