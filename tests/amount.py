"""How much the tests try, said by the environment variable CUDALENS_TESTS.

``quick``, the default, is what `make test` runs and ``thorough`` what CI runs; ``all``, which is
`make test-all`, takes torch's operator databases whole.  A test marked ``thorough`` or ``all`` runs
at its level and above.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Amount:
    """How many of each a run tries."""

    hostile_texts: int = 500
    """Texts that try to leave their place in a view: the first 69 each once, then pairs of them."""
    interrupts: int = 5000
    """Instants of a block at which an interrupt comes: here every call of ours in it."""
    cell_interrupts: int = 60
    """Instants of a cell at which an interrupt comes."""
    instant_step: int = 1
    """Of the instants that a handler's exception is tried at, every n-th is."""
    deferred_steps: int = 1000
    """Training steps in which no call of ours may wait for the device."""
    cell_step: int = 1
    """Of the stored cells with a mistake every n-th is answered."""
    extreme_step: int = 1
    """Of the extreme values of an index every n-th is tried, by op and kind of check."""
    op_step: int = 12
    """Of torch's operator database every n-th runs, and those that a guard looks at."""
    op_samples: int = 2
    """Samples of an op, for each dtype and direction, that are compared with the CPU's."""


AMOUNTS: Final = {
    "quick": Amount(
        hostile_texts=70,
        interrupts=20,
        cell_interrupts=10,
        instant_step=3,
        deferred_steps=50,
        cell_step=4,
        extreme_step=4,
    ),
    "thorough": Amount(),
    "all": Amount(op_step=1, op_samples=12),
}
LEVELS: Final = tuple(AMOUNTS)
LEVEL: Final = os.environ.get("CUDALENS_TESTS") or "quick"
if LEVEL not in AMOUNTS:
    raise ValueError(f"CUDALENS_TESTS is {LEVEL!r}; it is one of {', '.join(LEVELS)}")
AMOUNT: Final = AMOUNTS[LEVEL]


def is_left_out(markers: set[str]) -> bool:
    """Whether a test with these markers belongs to a level above this one."""
    return not markers.isdisjoint(LEVELS[LEVELS.index(LEVEL) + 1 :])
