"""The public functions behind an op, as people write them: ``F.cross_entropy``, ``x[i]``."""

from __future__ import annotations

from collections.abc import Iterable

from cudalens.core.text_files import packaged

BACKWARD = "backward of "
"""Prefix for a function whose backward pass calls the op."""


def stem_of(name: str) -> str:
    """Return the last part of the name of an op or a function: ``add_`` for ``torch.Tensor.add_``.

    For ``aten::index.Tensor`` it is ``index``, for ``torch.Tensor.__setitem__`` it is ``setitem``.
    """
    _, is_op, of_op = name.rpartition("::")
    stem = of_op.partition(".")[0] if is_op else name.rpartition(".")[2]
    return stem.strip("_") if stem.startswith("__") else stem


def api_names(op: str) -> tuple[str, ...]:
    """Return the functions that call an op, best known first; empty for an unlisted op.

    Args:
        op: such as ``aten::index_put_``, with or without namespace and overload.
    """
    name = op.rpartition("::")[2].partition(".")[0].rstrip("_")
    return tuple(packaged("api_names.json").get(name, ()))


def api_names_of_all(ops: Iterable[str]) -> tuple[str, ...]:
    """Return the functions that call one of several ops, each once, best known first.

    Backward passes are named only where no function calls such an op itself.
    """
    each = [api_names(op) or (op.removeprefix("aten::"),) for op in ops]
    names = dict.fromkeys([names[0] for names in each] + [name for names in each for name in names])
    forward = tuple(name for name in names if not name.startswith(BACKWARD))
    return forward or tuple(names)
