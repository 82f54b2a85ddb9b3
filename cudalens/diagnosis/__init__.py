"""Evidence in, report out: pure functions of strings and numbers, no torch."""
