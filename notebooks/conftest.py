"""Count the cells under nbval as a front end does: a report names each by its number.

Otherwise all cells have the number 1, and two cells of one report look like one.
"""

from __future__ import annotations

from typing import Any

from nbval.kernel import RunningKernel


def execute_cell_input(self: Any, cell_input: str, allow_stdin: bool | None = None) -> str:
    """Send the code of a cell to the kernel, and return the id of the request."""
    request: str = self.kc.execute(
        cell_input, allow_stdin=allow_stdin, store_history=True, stop_on_error=False
    )
    return request


RunningKernel.execute_cell_input = execute_cell_input
