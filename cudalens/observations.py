"""Named observations that the cause rules read: what libraries call a tensor, who the tokenizer is.

Each is read from live objects without running code of the user's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

from cudalens import source

Fact = tuple[str, str]


def observe(
    entries: Sequence[FrameType | TracebackType], site: source.CallSite
) -> tuple[Fact, ...]:
    """Give the observations around a call as (name, value) pairs, each name once."""
    facts = {f"library.{item.key}": item.name for item in reversed(site.library_names)}
    facts.update(_tokenizer(entries))
    return tuple(facts.items())


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
    for entry in entries:
        frame = entry.tb_frame if isinstance(entry, TracebackType) else entry
        if not source.is_user_file(frame.f_code.co_filename):
            continue
        variables = frame.f_locals
        for name in (*frame.f_code.co_names, *frame.f_code.co_varnames):
            if name in variables:
                yield variables[name]
            elif name in frame.f_globals:
                yield frame.f_globals[name]
