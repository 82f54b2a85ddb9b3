"""Foundation: the report and its pieces, exceptions, seams to torch and CPython."""
