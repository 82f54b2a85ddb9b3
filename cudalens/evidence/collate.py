"""Write a ``collate_fn`` for samples that a loader could not join, and try it on them.

What is written is made of the samples' own structure and runs nothing of the user's.  Only samples
that this process holds can be looked at: those of a worker process are gone with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core._python import raise_if_outside

MAX_VALUES = 1 << 22

_MAX_FIELDS = 12
_PADDED = "torch.nn.utils.rnn.pad_sequence({items}, batch_first=True)"
_LISTED = "this collate_fn leaves tensors of different sizes a list"
_NUMBERS = (bool, int, float)
_BOX = 4
"""Numbers of a box."""


def collate_fn(frame: FrameType, below: Sequence[FrameType]) -> tuple[str, str] | None:
    """Return the text of a function that makes a batch, and what it does; ``None`` without one.

    Args:
        frame: the user's, in which the text is to be read.
        below: the frames that it called, down to where the samples could not be joined.
    """
    batch = next((item for item in below if item.f_code.co_name == "default_collate"), None)
    samples = None if batch is None else batch.f_locals.get("batch")
    is_named = frame.f_globals.get("torch") is torch and "torch" not in frame.f_code.co_varnames
    if type(samples) is not list or not is_named:
        return None
    made = _joined(samples)
    tensors = [item for item in _torch.pytree.tree_leaves(samples) if isinstance(item, Tensor)]
    if made is None or sum(item.numel() for item in tensors) > MAX_VALUES:
        return None
    text = f"lambda batch: {made}"
    try:
        with _torch.plain_torch(), _torch.no_dispatch_modes():
            copies = _torch.pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), samples)
            eval(text, {"torch": torch})(copies)
    except Exception as error:  # it is no way to join them then
        raise_if_outside(error)
        return None
    done = "this collate_fn pads the sequences" if "pad_sequence" in made else _LISTED
    return text, f"{done}, and joins the rest as before" if "(" in made else done


def _joined(samples: list[Any]) -> str | None:
    """Write how samples are joined, field by field."""
    first = samples[0]
    if any(type(item) is not type(first) for item in samples):
        return None
    is_dict = type(first) is dict
    if not is_dict and type(first) not in (tuple, list):
        return _field(samples, "") if isinstance(first, Tensor) else None
    keys = [item.keys() if is_dict else range(len(item)) for item in samples]
    if any(item != keys[0] for item in keys) or not 0 < len(first) <= _MAX_FIELDS:
        return None
    if not is_dict and _is_row(list(first)):
        return None
    texts = [_field([item[key] for item in samples], f"[{key!r}]") or "" for key in keys[0]]
    if not all(texts):
        return None
    if is_dict:
        entries = [f"{key!r}: {text}" for key, text in zip(first, texts, strict=True)]
        return "{" + ", ".join(entries) + "}"
    return f"({', '.join(texts)}{',' * (len(texts) == 1)})"


def _field(values: list[Any], key: str) -> str | None:
    """Write how one field of all samples is joined: stacked, padded, or left a list."""
    items = f"[item{key} for item in batch]" if key else "batch"
    first = values[0]
    if all(isinstance(item, Tensor) for item in values):
        if len({(item.device, item.dtype) for item in values}) > 1:
            return None
        shapes = {tuple(item.shape) for item in values}
        if len(shapes) == 1:
            return f"torch.stack({items})"
        if len({len(shape) for shape in shapes}) > 1:
            return None
        if len(first.shape) == 1:
            return _PADDED.format(items=items)
        if len(first.shape) == 2 and first.shape[1] != _BOX:
            return None  # steps of a sequence, which are padded, or objects of an image
        # Images of other channels are another kind of image.
        return None if len(first.shape) == 3 and len({s[0] for s in shapes}) > 1 else items
    if all(type(item) in _NUMBERS for item in values):
        return f"torch.tensor({items})"
    if type(first) is list and all(_is_row(item) for item in values):
        return _PADDED.format(items=f"[torch.tensor(item{key}) for item in batch]")
    return items if all(isinstance(item, str) for item in values) else None


def _is_row(value: object) -> bool:
    return type(value) is list and all(type(item) in _NUMBERS for item in value)
