"""Named observations that the cause rules read: who the model and the tokenizer are, and the like.

Each is read from live objects without running code of the user's.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

from torch import Tensor

from cudalens.core.report_types import Environment
from cudalens.core.version import __version__
from cudalens.evidence.torch_errors import package_of
from cudalens.guards.process import PROCESS
from cudalens.source.files import is_user_file
from cudalens.source.locate import CallSite
from cudalens.source.safe_eval import instance_dict, registered

Fact = tuple[str, str]
_TEMPERATURES = ("temperature", "temp", "tau")


def observe(
    entries: Sequence[FrameType | TracebackType], site: CallSite
) -> tuple[Fact, ...]:
    """Return the observations around a call as (name, value) pairs, each name once."""
    facts = {f"library.{item.key}": item.name for item in reversed(site.library_names)}
    facts.update(_tokenizer(entries))
    facts.update(_model(entries))
    facts.update(_temperatures(entries))
    facts.update(_first_nan())
    return tuple(facts.items())


def _first_nan() -> tuple[Fact, ...]:
    """Say whether each result is looked at for NaN, and how the first one came."""
    watch = getattr(getattr(PROCESS.listener, "recorder", None), "watch", None)
    return () if watch is None else tuple(watch.facts)


def _model(entries: Sequence[FrameType | TracebackType]) -> Iterator[Fact]:
    """Name the innermost running model of transformers; a class of the user's by its base."""
    library = sys.modules.get("transformers.modeling_utils")
    base = getattr(library, "PreTrainedModel", None)
    for frame in map(_frame_of, reversed(entries)) if isinstance(base, type) else ():
        kinds = type(frame.f_locals.get("self")).__mro__
        if base in kinds:
            named = (item for item in kinds if str(item.__module__).startswith("transformers."))
            yield "transformers.model", next(named).__name__
            return


def _temperatures(entries: Sequence[FrameType | TracebackType]) -> Iterator[Fact]:
    """Return the numbers called a temperature that the user's deepest running function speaks
    of.
    """
    own = (frame for frame in map(_frame_of, reversed(entries)) if _is_users(frame))
    frame = next(own, None)
    if frame is None:
        return
    owner = instance_dict(frame.f_locals.get("self"))
    for name in _TEMPERATURES:
        if name not in (*frame.f_code.co_names, *frame.f_code.co_varnames):
            continue
        spoken = {name: frame.f_locals.get(name, frame.f_globals.get(name))}
        spoken[f"self.{name}"] = owner.get(name)
        for expression, value in spoken.items():
            if type(value) in (int, float):
                yield f"variable.{expression}", repr(value)


def _frame_of(entry: FrameType | TracebackType) -> FrameType:
    return entry.tb_frame if isinstance(entry, TracebackType) else entry


def _is_users(frame: FrameType) -> bool:
    return is_user_file(frame.f_code.co_filename)


def _tokenizer(entries: Sequence[FrameType | TracebackType]) -> Iterator[Fact]:
    """Describe the one tokenizer of transformers that the user's running code mentions."""
    if "transformers" not in sys.modules:
        return
    base = sys.modules["transformers"].PreTrainedTokenizerBase
    found: dict[int, Any] = {
        id(value): value for value in _mentioned(entries) if issubclass(type(value), base)
    }
    if len(found) == 1:
        tokenizer = next(iter(found.values()))
        yield "tokenizer.length", str(len(tokenizer))
        if tokenizer.pad_token_id is not None:
            yield "tokenizer.pad_token_id", str(tokenizer.pad_token_id)


def _mentioned(entries: Sequence[FrameType | TracebackType]) -> Iterator[object]:
    for frame in filter(_is_users, map(_frame_of, entries)):
        variables = frame.f_locals
        for name in (*frame.f_code.co_names, *frame.f_code.co_varnames):
            if name in variables:
                yield variables[name]
            elif name in frame.f_globals:
                yield frame.f_globals[name]


# --- how many positions a model of transformers has, where an inp ---------------------------------


_INPUTS = ("input_ids", "inputs_embeds", "input_embeds")


def table_of_positions(entries: Sequence[TracebackType]) -> tuple[tuple[str, str], ...]:
    """Return the rows of the table and the tokens of the input, when the input is the longer one.

    Only where the innermost frame is a module of transformers that took all its positions from its
    own table, from the first one on.
    """
    frame = entries[-1].tb_frame if entries else None
    if frame is None or package_of(frame) != "transformers":
        return ()
    names = frame.f_locals
    table = registered(names.get("self"), "_buffers").get("position_ids")
    positions = names.get("position_ids")
    given = next((name for name in _INPUTS if isinstance(names.get(name), Tensor)), None)
    if not isinstance(table, Tensor) or not isinstance(positions, Tensor) or given is None:
        return ()
    tokens: Tensor = names[given]
    if positions.shape != table.shape or positions.data_ptr() != table.data_ptr():
        return ()  # positions that the user gave, or some of the table's
    if table.ndim != 2 or tokens.ndim < 2 or tokens.shape[1] <= table.shape[1]:
        return ()
    return (
        ("positions.input", given),
        ("positions.rows", str(table.shape[1])),
        ("positions.tokens", str(tokens.shape[1])),
    )


# --- say where a failure happened: versions, device, rank.  nothi ---------------------------------


def is_simulated() -> bool:
    """Return whether the simulated CUDA device is active."""
    package = sys.modules.get("cudalens.simulate")
    return package is not None and package.current() is not None


def rehearsed_fault() -> object | None:
    """Return what ended the context of the simulated device, ``None`` while it lives or is off."""
    package = sys.modules.get("cudalens.simulate")
    running = package.current() if package is not None else None
    return None if running is None else running.fault


def describe() -> Environment:
    """Describe this process; asks the driver only for what host memory already holds."""
    import torch

    return Environment(
        cudalens=__version__,
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        device=_device_name(),
        simulated=is_simulated(),
        rank=_rank(),
    )


def _device_name() -> str | None:
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    try:
        return str(torch.cuda.get_device_name())
    except RuntimeError:  # a lost context cannot tell its name
        return None


def _rank() -> int | None:
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else None
