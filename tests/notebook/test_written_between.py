"""A value of an earlier checked cell that may have been written to since: no line is shown."""

from __future__ import annotations

from typing import Any

import pytest

from tests.notebook.test_earlier_cells import (
    CLONED,
    DATA,
    LABELS,
    LOSS,
    MADE,
    MADE_ON_HOST,
    MODEL,
    marks,
    report_of,
)
from tests.shells import Notebook

SHARED = """%%cudacheck
import numpy as np
labels = np.arange(32) % 10
y = torch.from_numpy(labels)
"""


def test_memory_that_numpy_shares_proves_nothing(notebook: Notebook) -> None:
    """The array was written to in the cell after."""
    change = "%%cudacheck\nlabels[4] = 10"
    loss = "%%cudacheck\nF.cross_entropy(torch.zeros(32, 10, device='cuda'), y.to('cuda'))"
    assert not any(
        "from_numpy" in line for line in marks(report_of(notebook, SHARED, change, loss))
    )


GIVEN = """import copy, ctypes
import numpy as np
from torch.utils.dlpack import to_dlpack
logits = torch.zeros(32, 10, device="cuda")
def through_an_address():
    ctypes.c_int64.from_address(y.data_ptr() + 24).value = 10
"""

UNSEEN_WRITES = (
    "y.untyped_storage()[24] = 10",
    "y.untyped_storage().copy_(torch.full((32,), 10).untyped_storage())",
    "y.untyped_storage().fill_(10)",
    "y.view(4, 8).untyped_storage()[24] = 10",
    "y.storage()[3] = 10",
    "y.storage().fill_(10)",
    "y.numpy()[3] = 10",
    "np.asarray(y)[3] = 10",
    "torch.from_dlpack(y)[3] = 10",
    "copy.copy(y)[3] = 10",
    "through_an_address()",
    "z = torch.empty(0, dtype=y.dtype).set_(y)\nz[3] = 10",
    "z = torch.from_dlpack(to_dlpack(y))\nz[3] = 10",
)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("write", UNSEEN_WRITES)
def test_memory_that_was_given_away_proves_nothing(notebook: Notebook, write: str) -> None:
    """No version tells of the write: in the cell that fails, in one before it, or in between."""
    notebook.run(GIVEN)
    good = "%%cudacheck\ny = torch.arange(32) % 10\n"
    same = marks(report_of(notebook, f"{good}{write}\n{CLONED.partition(chr(10))[2]}"))
    before = marks(report_of(notebook, f"{good}{write}", CLONED))
    between = marks(report_of(notebook, good, f"%%cudacheck\n{write}", CLONED))
    assert not [line for line in (*same, *before, *between) if "arange" in line]


def test_memory_that_was_given_away_later_changes_nothing(notebook: Notebook) -> None:
    """The copy was made before."""
    bad = LABELS + "target = y.to('cuda')\nprint(y.numpy().max(), y.untyped_storage().nbytes())"
    fail = "%%cudacheck\nF.cross_entropy(logits, target)"
    assert MADE_ON_HOST in marks(report_of(notebook, bad, fail))
    assert MADE_ON_HOST in marks(report_of(notebook, f"{bad}\n{fail.partition(chr(10))[2]}"))


def test_memory_that_a_call_shows_still_proves(notebook: Notebook) -> None:
    """What a call makes of a tensor has its versions: a write to it is not missed."""
    shows = "parts = y.detach(), y.view(4, 8), y[1:]\n"
    shows += "parameter = torch.nn.Parameter(y, requires_grad=False)\nparts[0] + parameter"
    fail = "%%cudacheck\nF.cross_entropy(logits, y.to('cuda'))"
    assert MADE_ON_HOST in marks(report_of(notebook, LABELS + shows, fail))
    assert MADE_ON_HOST in marks(
        report_of(notebook, f"{LABELS}{shows}\n{fail.partition(chr(10))[2]}")
    )


ALIAS = DATA + "alias = y.data\n"

CROWD = "\nfor _ in range(20):\n    h = torch.zeros(2) + 1\n"


@pytest.mark.parametrize(
    "cells",
    [
        ("alias = y.data", "%%cudacheck\nalias.fill_(10)"),
        ("part = y[2:]", "%%cudacheck\npart.data.fill_(10)\ndel part"),
        ("part = y[2:]", "%%cudacheck\narray = part.numpy()", "%%cudacheck\narray[:] = 10"),
        ("part = y.real", "%%cudacheck\npart.data.fill_(10)"),
        ("[part := y[2:]]", "%%cudacheck\npart.data.fill_(10)"),
        ("torch.sum(torch.full((2, 32), 5), 0, out=y)",),
    ],
)
def test_an_unchecked_view_ends_it(notebook: Notebook, cells: tuple[str, ...]) -> None:
    """The recorder does not know what it is a view of, when a checked cell writes through it."""
    assert MADE_ON_HOST in marks(report_of(notebook, LABELS, "y[2:]", "n = sizes['a']", CLONED))
    assert not any("arange" in line for line in marks(report_of(notebook, LABELS, *cells, CLONED)))


@pytest.mark.parametrize(
    "cells",
    [
        (LABELS + "array = y[1:].numpy()", "%%cudacheck\narray[:] = 10"),
        (
            LABELS.replace("check", "check --max-ops 8")
            + f"y = torch.from_numpy(labels){CROWD}good = torch.arange(32) % 10 + 1\ny.copy_(good)",
            "%%cudacheck\nlabels[:] = 10",
        ),
        (
            LABELS,
            "y = torch.from_numpy(labels)",
            "%%cudacheck\ny %= 10\ny += 1",
            "%%cudacheck\nlabels[:] = 10",
        ),
    ],
    ids=["view", "overrun", "before"],
)
def test_memory_that_others_have_proves_nothing(notebook: Notebook, cells: Any) -> None:
    """Through a view that is gone, by a call that has left the ring, and in unchecked code."""
    notebook.run("import numpy as np; labels = np.arange(32)")
    report = report_of(notebook, *cells, CLONED)
    assert not [line for line in marks(report) if "10 is made here" in line]


def test_a_write_to_an_alias_is_one_to_the_tensor(notebook: Notebook) -> None:
    """An alias by ``.data`` has a version of its own."""
    assert MADE in marks(report_of(notebook, ALIAS, MODEL, LOSS))
    write = f"%%cudacheck --max-ops 8\nalias.fill_(10){CROWD}"
    assert MADE not in marks(report_of(notebook, ALIAS, write, LOSS))
    notebook.run(ALIAS)
    notebook.names["alias"].fill_(10)
    assert MADE not in marks(report_of(notebook, LOSS))


THREAD = """%%cudacheck
import threading
thread = threading.Thread(target=y.fill_, args=(10,))
thread.start()
thread.join()
"""


def test_a_write_by_a_thread_in_a_checked_cell_ends_it(notebook: Notebook) -> None:
    """In a cell in between, and in the one that fails."""
    assert MADE_ON_HOST in marks(report_of(notebook, LABELS, CLONED))
    between = report_of(notebook, LABELS, THREAD, CLONED)
    same = report_of(notebook, LABELS, THREAD + CLONED.partition("\n")[2])
    assert MADE_ON_HOST not in (*marks(between), *marks(same))


def test_other_memory_ends_it(notebook: Notebook) -> None:
    """``y.data = other`` is no write, and no version tells of it."""
    other = "%%cudacheck\ny.data = torch.full((32,), 10)"
    assert MADE_ON_HOST not in marks(report_of(notebook, LABELS, other, CLONED))
    one = LABELS + other.partition("\n")[2] + "\n" + CLONED.partition("\n")[2]
    assert MADE_ON_HOST not in marks(report_of(notebook, one))
