"""What everything stands on: the report and its pieces, exceptions, seams to torch and CPython."""
