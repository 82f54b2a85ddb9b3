"""Causes of ids beyond a lookup table: tokens, padding, another vocabulary."""

from __future__ import annotations

import ast
import re
from itertools import groupby

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint
from cudalens.diagnosis.hints._base import rule
from cudalens.diagnosis.hints._reading import Ids, ids_of, shifting_step
from cudalens.diagnosis.hints._roles import is_vocabulary
from cudalens.diagnosis.user_code import called_name, in_library, list_of, parsed, rewritten

_JUST_BEYOND = 64
"""Tokens are added by the handful; ids further out belong to another vocabulary."""
_IGNORED = -100
_LANGUAGE = 1000
_RESIZE = "model.resize_token_embeddings(len(tokenizer))"
_LABELS_KEY = re.compile(r"""\[["']labels["']\]$|\.labels$""")


@rule(priority=12)
def ignored_label_as_id(evidence: Evidence) -> Hint | None:
    """Labels with -100, the number that losses ignore, are looked up as token ids."""
    ids = ids_of(evidence, "token")
    if ids is None or not ids.only_bad(_IGNORED):
        return None
    place = f"{evidence.module_path or ''} {ids.fact.expression or ''}"
    what = "decoder ids" if "decoder" in place else "ids"
    return Hint(
        text=f"-100 is what losses ignore, and no id: these {what} were made of labels; put the "
        "padding id in its place",
        fix=_padded(evidence, ids, _IGNORED),
    )


@rule(priority=12)
def padding_of_minus_one(evidence: Evidence) -> Hint | None:
    """The sequences are padded with -1, which is no row of the table."""
    ids = ids_of(evidence, "token")
    if ids is None or not ids.only_bad(-1) or shifting_step(evidence):
        return None
    if _made_of_labels(evidence, ids):
        return Hint(
            text="the decoder ids are made of the labels, where -1 stays: -100 is what the loss "
            "ignores, and the model puts its padding id in the place of -100",
            fix=rewritten(evidence, ids.named, f"{{x}}.masked_fill({{x}} == -1, {_IGNORED})"),
        )
    return Hint(
        text="-1 is no row of a table: if it pads the sequences, use a padding id that has a row",
        fix=_padded(evidence, ids, -1),
    )


def _made_of_labels(evidence: Evidence, ids: Ids) -> bool:
    """Return whether a library's decoder shifted the user's ``labels=`` to get these ids."""
    name = ids.named.expression if ids.named is not None else None
    is_decoder = "decoder" in (evidence.module_path or "")
    if name is None or ids.fact.expression or not is_decoder:
        return False
    if not in_library(evidence, "transformers"):
        return False
    tree, given = parsed(evidence.call_text or ""), parsed(name)
    if not isinstance(tree, ast.Call) or given is None:
        return False
    names = {item.arg for item in tree.keywords if ast.dump(item.value) == ast.dump(given)}
    # A batch that is spread in the call names it by its key.
    return names == {"labels"} or (not names and bool(_LABELS_KEY.search(name)))


def _padded(evidence: Evidence, ids: Ids, mark: int) -> str:
    index = evidence.scalar("padding_idx") or "-1"
    is_row = index.isdecimal() and int(index) < ids.size
    pad = index if is_row else _padding_id(evidence)
    fix = rewritten(evidence, ids.named, f"{{x}}.masked_fill({{x}} == {mark}, {pad})")
    return fix or f"ids = ids.masked_fill(ids == {mark}, {pad})"


def _padding_id(evidence: Evidence) -> str:
    """Return the user's expression for the padding id, where the table has none."""
    name = (called_name(evidence) or "").removesuffix(".forward")
    is_decoder = "decoder" in (evidence.module_path or "")
    if is_decoder and name.isidentifier() and in_library(evidence, "transformers"):
        # A model that makes decoder ids of labels has to have one.
        return f"{name}.config.pad_token_id"
    return "tokenizer.pad_token_id" if is_vocabulary(evidence) else "pad_id"


def _tokens_beyond(evidence: Evidence) -> Ids | None:
    ids = ids_of(evidence, "token")
    return ids if ids is not None and ids.is_above else None


def _is_padding(evidence: Evidence, ids: Ids) -> bool:
    """Return whether the only bad id fills the ends of the rows, all on the same side."""
    if len(ids.bad) != 1:
        return False
    if evidence.call_context.pad_token_id == next(iter(ids.bad)):
        return True
    if not ids.all_listed or len(ids.fact.shape) != 2:
        return False
    length = ids.fact.shape[1]
    rows = [
        [item.position[1] for item in items]
        for _, items in groupby(ids.offenders, key=lambda item: item.position[0])
    ]
    right = all(row == list(range(length - len(row), length)) for row in rows)
    left = all(row == list(range(len(row))) for row in rows)
    # A single id at the end of each row may be an added end token as well.
    return (right or left) and max(len(row) for row in rows) > 1


@rule(priority=14)
def padding_beyond_table(evidence: Evidence) -> Hint | None:
    """The padding id has no row in the table."""
    ids = _tokens_beyond(evidence)
    if ids is None or not _is_padding(evidence, ids):
        return None
    pad = ids.high
    text = f"{pad} only fills the ends of the rows: a padding id for which the table with "
    text += f"{ids.size} rows has none"
    if not is_vocabulary(evidence):
        return Hint(text=text, fix=_table(evidence, f"{pad + 1}, dim, padding_idx={pad}"))
    if pad - ids.size < _JUST_BEYOND:
        return Hint(text=text, fix=_resized(evidence, ids))
    return Hint(text=text, fix="tokenizer.pad_token = tokenizer.eos_token")


@rule(priority=16)
def added_tokens(evidence: Evidence) -> Hint | None:
    """Tokens were added to the tokenizer, and the model's table was not made larger."""
    ids = _tokens_beyond(evidence)
    if ids is None or not is_vocabulary(evidence) or _is_padding(evidence, ids):
        return None
    if ids.high - ids.size >= _JUST_BEYOND:
        return None
    if ids.counts_from_one and not in_library(evidence, "transformers"):
        return None
    known = evidence.call_context.tokenizer_length
    length = f" (the tokenizer has {known})" if known else ""
    is_library = in_library(evidence, "transformers")
    why = "the table was not resized" if is_library else "the table was not made larger"
    return Hint(
        text=f"the bad ids ({list_of(ids.bad)}) lie just beyond the {ids.size} rows{length}: it "
        f"looks as if tokens were added and {why}",
        fix=_resized(evidence, ids),
    )


def _resized(evidence: Evidence, ids: Ids) -> str:
    if not in_library(evidence, "transformers"):
        # A tokenizer's vocab_size leaves added tokens out; its length does not.
        has_tokenizer = "transformers" in evidence.libraries
        rows = "len(tokenizer)" if has_tokenizer else ids.high + 1
        return _table(evidence, f"{rows}, dim")
    name = called_name(evidence)
    model = name.removesuffix(".generate").removesuffix(".forward") if name else "model"
    return _RESIZE.replace("model", model if ids.named else "model")


def _table(evidence: Evidence, settings: str) -> str:
    is_bag = (evidence.op.name or "").startswith("aten::_embedding_bag")
    return f"nn.{'EmbeddingBag' if is_bag else 'Embedding'}({settings})"


@rule(priority=18)
def other_vocabulary(evidence: Evidence) -> Hint | None:
    """The ids come from a tokenizer with a larger vocabulary than the model's."""
    ids = _tokens_beyond(evidence)
    if ids is None or not is_vocabulary(evidence) or _is_padding(evidence, ids):
        return None
    if ids.high - ids.size < _JUST_BEYOND:
        return None
    known = evidence.call_context.tokenizer_length
    length = f", the tokenizer has {known} entries" if known else ""
    return Hint(
        text=f"ids go up to {ids.high} in a table of {ids.size} rows{length}: they look like the "
        "ids of another tokenizer than the model's",
        fix=f"assert len(tokenizer) <= {ids.size}  # load both under the same name",
    )


@rule(priority=45)
def table_too_small(evidence: Evidence) -> Hint | None:
    """The table has fewer rows than the largest id needs."""
    ids = _tokens_beyond(evidence)
    if ids is None or is_vocabulary(evidence) or _is_padding(evidence, ids):
        return None
    is_padded = evidence.scalar("padding_idx") == "0"
    if ids.counts_from_one and not is_padded:
        return None
    may_start_at_one = ids.may_count_from_one and ids.low == 1 and not is_padded
    base = "; if the ids count from 1, take 1 away" if may_start_at_one else ""
    is_large = ids.size >= _LANGUAGE and ids.high - ids.size < _JUST_BEYOND
    added = f"; for tokens added to a tokenizer: {_RESIZE}" if is_large else ""
    return Hint(
        text=f"ids up to {ids.high} need {ids.high + 1} rows, the table has {ids.size}"
        f"{base}{added}",
        fix=_table(evidence, f"{ids.high + 1}, dim"),
    )
