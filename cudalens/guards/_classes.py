"""The words that the guards of class targets share."""

from __future__ import annotations

PER_CLASS = "Each target picks one of the scores, one a class, and no class has this number."


def classes_of(number: int) -> str:
    """Give ``the 10 classes of {related}``, to stand behind "is outside"."""
    return f"the {number} {'class' if number == 1 else 'classes'} of {{related}}"
