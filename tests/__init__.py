"""The tests: one folder a package of cudalens, one file a module."""
