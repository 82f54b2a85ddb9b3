"""The guards wait for torch's compiler, which takes seconds to be imported."""

from __future__ import annotations

from tests.processes import python
from tests.releases import guards_compiled_code

LATER = """
import sys
from cudalens.guards.compiled import CompiledGuards
before = list(sys.meta_path)
from types import SimpleNamespace
remove = CompiledGuards(SimpleNamespace(complain=print), frozenset({"cpu"})).install()
print("torch._dynamo" in sys.modules)
import torch._inductor.compile_fx
from torch._inductor.codegen.common import custom_backend_passes
print(custom_backend_passes["cpu"] is not None, sys.meta_path == before)
remove()
print(custom_backend_passes["cpu"], sys.meta_path == before)
"""


@guards_compiled_code
def test_the_compiler_is_not_loaded_for_the_guards() -> None:
    done = python("-c", LATER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True", "True", "None", "True"]
