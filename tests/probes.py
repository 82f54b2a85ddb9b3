"""Ways to look at a call from inside, as a guard, a recorder or its watch does."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cudalens.core._torch import same_tensor as same
from cudalens.source.files import CELLS
from cudalens.source.locate import CallSite, locate
from cudalens.source.stack import stack_of

_numbers = itertools.count(1)


class Untouchable:
    """Raises when anything of it is asked or called."""

    @property
    def __class__(self) -> Any:
        raise AssertionError("__class__ was asked")

    def __getattr__(self, name: str) -> object:
        raise AssertionError(name)

    __repr__ = __str__ = __eq__ = __hash__ = __len__ = __bool__ = __getattr__  # type: ignore[assignment]
    __getitem__ = __iter__ = __getattr__


class Watch:
    """A watch of a recorder's that notes what it is shown; what it is told to find is returned."""

    is_strict = False
    marked = False

    def __init__(self) -> None:
        self.seen: list[str] = []
        """Calls, reads and steps."""
        self.seen_backward: list[str] = []
        """Losses, the nodes that made gradients, and ends of passes."""
        self.finds: dict[str, BaseException] = {}
        self.fails: set[str] = set()
        self.on_show: dict[str, Callable[[], object]] = {}
        step = lambda name: lambda *args: self._shown(name, self.seen)
        self.steps = SimpleNamespace(before=step("step begins"), after=step("step ends"))

    def _shown(self, what: str, seen: list[str]) -> BaseException | None:
        seen.append(what)
        self.on_show.get(what, int)()
        if what in self.fails:
            raise KeyError(what)
        return self.finds.get(what)

    def __call__(self, api: Any, *call: Any) -> BaseException | None:
        return self._shown(api.stem, self.seen)

    def before(self, api: Any, args: Any) -> BaseException | None:
        return self._shown(f"before {api.stem}", self.seen)

    def read(self, api: Any, args: Any, result: Any, site: Any) -> BaseException | None:
        return self._shown(f"read {api.stem}", self.seen)

    def let_go(self) -> None:
        self._shown("let go", self.seen)

    def of_loss(self, outputs: Any, site: Any) -> BaseException | None:
        return self._shown(f"loss of {len(outputs)}", self.seen_backward)

    def of_node(self, node: Any, made: Any, inputs: Any, notes: Any) -> BaseException | None:
        return self._shown(node.name(), self.seen_backward)

    def of_pass(self, notes: Any, result: Any, site: Any) -> BaseException | None:
        return self._shown("pass", self.seen_backward)


class SeenOps(TorchDispatchMode):
    """A mode of the user's that notes the ops that it sees, and where their results are."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []
        self.devices: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ops.append(func)
        self.devices |= {str(t.device) for t in tree_leaves(result) if isinstance(t, Tensor)}
        return result


class SeenFunctions(TorchFunctionMode):
    """A mode of the user's that notes the functions of torch's that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Probe(TorchDispatchMode):
    """Locates every call of one op, as a recorder sees it."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = f"aten::{op}"
        self.sites: list[CallSite] = []

    @property
    def site(self) -> CallSite:
        """The site of the only call."""
        assert len(self.sites) == 1, [site.source for site in self.sites]
        return self.sites[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == self.op:
            frames = stack_of(sys._getframe())
            frames = frames[
                : next(i for i, f in enumerate(frames) if f.f_locals.get("self") is self)
            ]
            self.sites.append(locate(frames, _values(func, args), same))
        return func(*args, **(kwargs or {}))


def _values(func: Any, args: Any) -> Mapping[str, Tensor]:
    found = {}
    for argument, value in zip(func._schema.arguments, args, strict=False):
        items = value if isinstance(value, list | tuple) else [value]
        for position, item in enumerate(items):
            if isinstance(item, Tensor):
                key = f"{argument.name}[{position}]" if items is value else argument.name
                found[key] = item
    return found


def run_cell(text: str, names: dict[str, Any], number: int = 7) -> None:
    """Run text as the cell ``number`` of a notebook whose front end registers its cells."""
    with cell(text, number) as code:
        exec(code, names)


@contextmanager
def cell(text: str, number: int = 7) -> Iterator[Any]:
    """Compile text as a registered cell and forget it afterwards."""
    # Not a name of tests.hostcells too, whose cells may run while this one is registered.
    filename = f"<cell of a probe {next(_numbers)}>"
    CELLS.register(filename, number, text.splitlines())
    try:
        yield compile(text, filename, "exec")
    finally:
        CELLS.forget(filename)


def site_of(text: str, op: str, **names: Any) -> CallSite:
    """Run text as a cell and locate its only call of ``op``."""
    probe = Probe(op)
    with probe:
        run_cell(text, {"torch": torch, "F": torch.nn.functional, "nn": torch.nn, **names})
    return probe.site


def asked(text: str, ask: Callable[[list[FrameType]], Any], **names: Any) -> list[Any]:
    """Run text as a cell, and return what was asked of its frames in each call of ``here``."""
    answers: list[Any] = []

    def here(*args: object, **kwargs: object) -> None:
        answers.append(ask(cell_frames()))

    run_cell(text, {"torch": torch, "nn": torch.nn, "here": here, **names})
    return answers


def cell_frames() -> list[FrameType]:
    """Return the running frames of cells, outermost first."""
    return [item for item in stack_of(sys._getframe()) if item.f_code.co_filename[:5] == "<cell"]


def named(site: CallSite) -> dict[str, str]:
    """The user's expression for each argument that has one."""
    return {name.key: name.expression for name in site.names}
