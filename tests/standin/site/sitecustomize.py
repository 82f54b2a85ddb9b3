"""Gives each Python process that imports torch the stand-in: first its libraries, then values.

This folder is on ``PYTHONPATH`` where the CUDA lane runs, so that workers, kernels and children of
the tests get it too.
"""

import importlib.abc
import importlib.util
import os
import sys


class _AroundTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        from tests import standin

        standin.load_libraries()
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            if os.environ.get("CUDA_VISIBLE_DEVICES") != "":  # else there may be a rehearsal
                from tests.standin import values

                values.register()

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _AroundTorch())
