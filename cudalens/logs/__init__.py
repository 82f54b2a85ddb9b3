"""Reads what a crashed job printed and concludes from it: there are no values, only text."""
