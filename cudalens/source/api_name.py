"""The public name of the function that was called to reach an op, from the stack.

A Python frame of torch has the function's name.  Where a line of the user or of a library called
C++ directly, the running expression names the function (``running_call``), if its value is known.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from cudalens.core.user_objects import is_module
from cudalens.source.files import is_torch_file, torch_path
from cudalens.source.running_call import RunningCall, class_name, is_tensor_method
from cudalens.source.stack import Place

# Folders of classes whose methods the user calls, and not the functions inside them.
_METHOD_HOMES = ("distributions/", "optim/")


def api_name(places: Sequence[Place], argument_names: Collection[str] = ()) -> str | None:
    """Return the name of the function that was called to reach the op, ``None`` if unproven.

    Args:
        places: the stack, outermost first, without frames of this package.
        argument_names: schema names of the op's arguments, as far as they are known.
    """
    # Skip `__torch_function__` frames: they only forward.
    places = [place for place in places if place.code.co_name != "__torch_function__"]
    of_torch = itertools.takewhile(lambda place: is_torch_file(place.filename), reversed(places))
    group = list(of_torch)[::-1]  # torch's innermost frames, outermost first
    # A Python function of torch, by its frame.  Functions of nn.functional call one another
    # (cross_entropy calls nll_loss): the innermost of them runs the op.
    named = [(place, torch_path(place.filename), place.code.co_name) for place in group]
    for _, path, name in reversed(named):
        if path == "nn/functional.py" and not name.startswith(("_", "<")):
            return f"torch.nn.functional.{name}"
    for place, path, name in named:
        if path == "_tensor.py" and is_tensor_method(name):
            return f"torch.Tensor.{name}"
        if path == "functional.py" and not name.startswith(("_", "<")):
            return f"torch.{name}"
        if path == "autograd/__init__.py" and name in {"backward", "grad"}:
            return f"torch.autograd.{name}"
        owner = place.variables.get("self")
        if path.startswith(_METHOD_HOMES) and not name.startswith(("_", "<", "wrapper")):
            kind = class_name(type(owner))
            if kind is not None:
                return f"{kind}.{name}"
    if not places:
        return None
    # A function in C++, which has no frame, by the syntax of the line that called it.
    read = RunningCall.at(places[-1]).api(argument_names)
    if read is None and group and is_module(owner := group[-1].variables.get("self")):
        return class_name(type(owner))
    return read
