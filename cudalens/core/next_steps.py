"""Next steps in words: a notebook's cell is run again, a script is started again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NextSteps:
    """Phrases for sentences, which differ between a notebook and a script."""

    code: str
    """Name of what the user runs: ``cell``."""
    block: str
    """Name of what one check covers: ``cell``."""
    restart: str
    rerun: str
    """Run the same code in a process whose GPU can be used: ``restart the kernel and run …``."""
    rerun_as_script: str
    check: str
    """Run the code under the check: ``run the cell under %%cudacheck``."""
    check_anew: str
    check_all: str
    nan: str
    """The command that stops at the first NaN, with its verb."""
    rehearse: str
    """Command that turns on the rehearsal device."""

    def fill(self, text: str) -> str:
        """Return a text with its ``{restart}`` and the like replaced."""
        return text.format_map(vars(self))


NOTEBOOK = NextSteps(
    code="cell",
    block="cell",
    restart="restart the kernel",
    rerun="restart the kernel and run the cell",
    rerun_as_script="restart the kernel and run the code as a script",
    check="run the cell under %%cudacheck",
    check_anew="restart the kernel and run the cell under %%cudacheck",
    check_all="restart the kernel, run %load_ext cudalens and %cudacheck on, then all cells",
    nan="%%cudacheck --nan stops",
    rehearse="%cudacheck simulate or cudalens.simulate()",
)
SCRIPT = NextSteps(
    code="script",
    block="block",
    restart="start the process again",
    rerun="run the script again",
    rerun_as_script="run the script",
    check="run the script with python -m cudalens",
    check_anew="run the script with python -m cudalens",
    check_all="run the whole script with python -m cudalens",
    nan="python -m cudalens --nan, or cudalens.check(nan=True), stops",
    rehearse="cudalens.simulate()",
)
