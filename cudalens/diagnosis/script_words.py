"""What the texts say where no notebook is: a script is started again, and no magic is at hand."""

from __future__ import annotations

from dataclasses import replace

from cudalens.core.report import Report

__all__ = ["PHRASES", "for_script", "in_script_words"]

PHRASES = (
    ("%%cudacheck --nan stops", "python -m cudalens --nan, or cudalens.check(nan=True), stops"),
    ("restart the kernel and run the cell under %%cudacheck", "run the script with {command}"),
    ("run the cell under %%cudacheck", "run the script with {command}"),
    ("restart the kernel and run the code as a script under", "run the script under"),
    (
        "It happened before this cell ran. Next step: restart the kernel, run %cudacheck on, and "
        "run the cells again: the one at fault is then named.",
        "It happened before this block ran. Next step: run the whole script with {command}: the op "
        "at fault is then named.",
    ),
    ("restart the kernel, and run the cell with", "run the script again with"),
    ("with %cudacheck simulate or cudalens.simulate()", "with cudalens.simulate()"),
    ("Restart the kernel to use the GPU again", "Start the process again to use the GPU"),
    ("restart the kernel", "start the process again"),
    ("try the cell", "try the script"),
    ("run the cell", "run the script"),
    ("that the cell called", "that the block called"),
    ("before this cell", "before this block"),
)
"""Phrases of the texts for notebooks and what stands for each in a script, longer ones first."""
_COMMAND = "python -m cudalens"


def in_script_words(text: str) -> str:
    """Return a text with what only a notebook has put in terms of a script."""
    for phrase, other in PHRASES:
        text = text.replace(phrase, other.format(command=_COMMAND))
    return text


def for_script(report: Report) -> Report:
    """Return a report whose sentences and fixes can be followed in a script."""
    return replace(
        report,
        headline=in_script_words(report.headline),
        headline_own=in_script_words(report.headline_own),
        explanation=in_script_words(report.explanation),
        hints=tuple(
            replace(
                item, text=in_script_words(item.text), fix=item.fix and in_script_words(item.fix)
            )
            for item in report.hints
        ),
    )
