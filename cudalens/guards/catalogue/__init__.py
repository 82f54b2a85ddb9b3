"""The guards themselves, by the kind of op; every file of this folder is imported."""

import importlib
import pkgutil

from cudalens.guards import _base

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

CATALOGUE = tuple(_base._registered)
"""The guards of all files, in the order of the files' names."""
