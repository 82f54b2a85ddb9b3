"""Collects what is known of a failure from live objects: one collector a file, each fails alone."""
