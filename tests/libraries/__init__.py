"""Right programs of the libraries that people train with, unchecked and checked: the same bits.

``make libraries`` installs the libraries into an environment of its own and runs them.
"""
