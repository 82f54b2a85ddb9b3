"""The first report of a process draws from nobody's random numbers."""

from __future__ import annotations

from tests.processes import python
from tests.releases import needs_rehearsal

PROGRAM = """
import random
import numpy
import torch
import torch.nn.functional as F
import cudalens

cudalens.simulate(announce=False)
ids, table = torch.tensor([7], device="cuda"), torch.ones(5, 2, device="cuda")
random.seed(1), numpy.random.seed(2), torch.manual_seed(3)


def states():
    name, keys, *rest = numpy.random.get_state()
    return {
        "random": random.getstate(),
        "numpy": (name, tuple(keys.tolist()), *rest),
        "torch": tuple(torch.get_rng_state().tolist()),
        "cuda": tuple(torch.cuda.get_rng_state().tolist()),
    }


def assert_same(stage):
    changed = [name for name, state in states().items() if state != before[name]]
    assert not changed, (stage, changed)


before = states()
try:
    with cudalens.check():
        F.embedding(ids, table)
except IndexError:
    pass
assert_same("check")
report = cudalens.last_report()
for form in (report.to_text, report.to_html, report._repr_mimebundle_, report.widget):
    form()
    assert_same(form.__name__)
random.random(), numpy.random.rand(), torch.rand(1), torch.rand(1, device="cuda")
assert {name for name, state in states().items() if state != before[name]} == set(before)
"""


@needs_rehearsal
def test_the_first_report_changes_no_random_state() -> None:
    """Of Python, numpy, torch and the device; the last line shows that each of them can change."""
    ran = python("-c", PROGRAM, fresh=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
