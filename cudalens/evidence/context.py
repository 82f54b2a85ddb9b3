"""The model and the tokenizer around a call, for the cause rules.

Read from live objects, without running code of the user's.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, distributed

from cudalens.core._python import package_of
from cudalens.core.evidence_types import CallContext, PositionTable
from cudalens.core.report_types import Environment
from cudalens.core.version import __version__
from cudalens.source.files import is_user_file
from cudalens.source.locate import CallSite
from cudalens.source.running_node import mentioned
from cudalens.source.safe_eval import instance_dict, registered

Frames = Sequence[FrameType]


def observe(frames: Frames, site: CallSite) -> CallContext:
    """Return the facts about the variables around a call."""
    tokenizer = _tokenizer(frames)
    return CallContext(
        library_names=site.library_names[::-1],
        model=_model(frames),
        # `len` counts added tokens, too, and `vocab_size` does not.
        tokenizer_length=None if tokenizer is None else len(tokenizer),
        pad_token_id=None if tokenizer is None else tokenizer.pad_token_id,
    )


def _model(frames: Frames) -> str | None:
    """Name the innermost running transformers model; a subclass of the user's by its base."""
    library = sys.modules.get("transformers.modeling_utils")
    base = getattr(library, "PreTrainedModel", None)
    for frame in reversed(frames) if isinstance(base, type) else ():
        kinds = type(frame.f_locals.get("self")).__mro__
        if base in kinds:
            named = (item for item in kinds if str(item.__module__).startswith("transformers."))
            return next(named).__name__
    return None


def _tokenizer(frames: Frames) -> Any:
    """Return the only transformers tokenizer that the user's running code mentions."""
    if "transformers" not in sys.modules:
        return None
    base = sys.modules["transformers"].PreTrainedTokenizerBase
    users = [it for it in frames if is_user_file(it.f_code.co_filename)]
    values = (value for frame in users for value in mentioned(frame).values())
    tokenizers: dict[int, Any] = {id(item): item for item in values if issubclass(type(item), base)}
    return next(iter(tokenizers.values())) if len(tokenizers) == 1 else None


# --- how many positions a model of transformers has -----------------------------------------------


_INPUTS = ("input_ids", "inputs_embeds", "input_embeds")


def table_of_positions(entries: Sequence[TracebackType]) -> PositionTable | None:
    """Return the number of positions in the table and of tokens in the input, if these are more.

    Only if the innermost frame is a transformers module that uses its own positions from 0 on.
    """
    frame = entries[-1].tb_frame if entries else None
    if frame is None or package_of(frame) != "transformers":
        return None
    names = frame.f_locals
    table = registered(names.get("self"), "_buffers").get("position_ids")
    positions = names.get("position_ids")
    input_name = next((name for name in _INPUTS if isinstance(names.get(name), Tensor)), None)
    if not isinstance(table, Tensor) or not isinstance(positions, Tensor) or input_name is None:
        return None
    tokens: Tensor = names[input_name]
    if positions.shape != table.shape or positions.data_ptr() != table.data_ptr():
        return None  # the user passed positions, or they start elsewhere
    if table.ndim != 2 or tokens.ndim < 2 or tokens.shape[1] <= table.shape[1]:
        return None
    return PositionTable(input=input_name, rows=int(table.shape[1]), tokens=int(tokens.shape[1]))


def problem_type(entries: Sequence[TracebackType]) -> str | None:
    """Return the ``problem_type`` in the config of the innermost running model."""
    for entry in reversed(entries):
        config = instance_dict(entry.tb_frame.f_locals.get("self")).get("config")
        value = instance_dict(config).get("problem_type")
        if isinstance(value, str):
            return value
    return None


# --- versions, device, rank -----------------------------------------------------------------------


def _simulation() -> Any:
    package = sys.modules.get("cudalens.simulate")
    return None if package is None else package.current()


def rehearsed_fault() -> object | None:
    """Return what ended the rehearsal device's context, ``None`` if it works or is off."""
    return getattr(_simulation(), "fault", None)


def describe() -> Environment:
    """Describe this process, without a driver call that could fail on a lost device."""
    return Environment(
        cudalens=__version__,
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        device=_device_name(),
        simulated=_simulation() is not None,
        rank=_rank(),
    )


def _device_name() -> str | None:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return None
    try:
        return str(torch.cuda.get_device_name())
    except RuntimeError:  # a lost context does not return its name
        return None


def _rank() -> int | None:
    rank = os.environ.get("RANK", "")
    if rank.isdigit():
        return int(rank)
    is_one_of_many = distributed.is_available() and distributed.is_initialized()
    return int(distributed.get_rank()) if is_one_of_many else None
