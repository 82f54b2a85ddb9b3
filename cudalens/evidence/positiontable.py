"""How many positions a model of transformers has, where an input is longer than its table.

BERT and its kin cut their table of positions to the length of the input: a longer input fails only
at the next sum, with two shapes that say nothing of a length.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from torch import Tensor

from cudalens.evidence.torch_errors import package_of
from cudalens.source.safe_eval import registered

_INPUTS = ("input_ids", "inputs_embeds", "input_embeds")


def table_of_positions(entries: Sequence[TracebackType]) -> tuple[tuple[str, str], ...]:
    """Give the rows of the table and the tokens of the input, when the input is the longer one.

    Only where the innermost frame is a module of transformers that took all its positions from its
    own table, from the first one on.
    """
    frame = entries[-1].tb_frame if entries else None
    if frame is None or package_of(frame) != "transformers":
        return ()
    names = frame.f_locals
    table = registered(names.get("self"), "_buffers").get("position_ids")
    positions = names.get("position_ids")
    given = next((name for name in _INPUTS if isinstance(names.get(name), Tensor)), None)
    if not isinstance(table, Tensor) or not isinstance(positions, Tensor) or given is None:
        return ()
    tokens: Tensor = names[given]
    if positions.shape != table.shape or positions.data_ptr() != table.data_ptr():
        return ()  # positions that the user gave, or some of the table's
    if table.ndim != 2 or tokens.ndim < 2 or tokens.shape[1] <= table.shape[1]:
        return ()
    return (
        ("positions.input", given),
        ("positions.rows", str(table.shape[1])),
        ("positions.tokens", str(tokens.shape[1])),
    )
