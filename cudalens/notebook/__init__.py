"""The IPython front end: magics, cells, display."""
