"""What differs between the releases of torch that the tests run on."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch

from cudalens.core.device_asserts import READ_RELEASE, assert_site, assert_table
from cudalens.simulate.activation import OLDEST

_PLACE = re.compile(r"^([\w.-]+):\d+")
_EARLIER = (
    (r"^Output (\d+) of Split is", r"Output \1 of SplitBackward0 is"),
    (
        r"^The differentiated Tensor at index \d+ appears",
        "One of the differentiated Tensors appears",
    ),
)
"""What messages of torch say, and what they said before 2.11."""
NO_PASSES = "compiled code is not guarded: this torch has no passes of a backend"
"""The line of a session below torch 2.8, where inductor has no place for the guards."""
_TARGET = re.compile(r"expected target dtype to be int64 or uint8, but got (\w+)")


def here(quoted: str) -> str:
    """Return an assertion's line, or its beginning, as it is quoted here: its line is known of one
    release.
    """
    is_read = torch.__version__.partition("+")[0] == READ_RELEASE
    return quoted if is_read else _PLACE.sub(r"\1", quoted)


@functools.cache
def printed_by(place: str) -> frozenset[str]:
    """Return what the installed torch prints for the assertions of a place, as ``Repeat.cu:20``.

    Args:
        place: in the release whose lines are known; the function may follow.
    """
    keys = (key for row in assert_table() for key in row.get("sites", ()))
    sites = [assert_site(key) for key in keys]
    found = (it for it in sites if f"{it.place}: {it.function}: ".startswith(f"{place}: "))
    return frozenset(item.text() for item in found)


def in_words_of_here(says: str) -> list[str]:
    """Return what a headline says, in the words of this torch; in pieces where it says more."""
    if release() < (2, 11):
        for newer, older in _EARLIER:
            says = re.sub(newer, older, says)
    if "target dtype" in _refused_target() or not _TARGET.match(says):
        return [says]
    return _TARGET.sub(r"expected scalar type int64 but found \1", says).split(": ")


@functools.cache
def _refused_target() -> str:
    with pytest.raises(RuntimeError) as caught:
        torch.nn.functional.nll_loss(torch.ones(1, 2), torch.ones(1))
    return str(caught.value)


def release() -> tuple[int, int]:
    """Return the installed release, as ``(2, 13)``."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def unexpected(lines: Iterable[str]) -> list[str]:
    """Return a session's lines without the one that every session has below torch 2.8."""
    return [line for line in lines if line != NO_PASSES or release() >= (2, 8)]


takes_modulo = pytest.mark.skipif(
    release() < (2, 10),
    reason="take_along_dim takes no index modulo the size before torch 2.10: nothing is silent",
)


needs_rehearsal = pytest.mark.skipif(
    release() < OLDEST, reason="torch has no rehearsal device before 2.8"
)
has_grouped_mm = pytest.mark.skipif(
    release() < (2, 8), reason="torch has no aten::_grouped_mm before 2.8"
)
guards_compiled_code = pytest.mark.skipif(
    release() < (2, 8),
    reason="before torch 2.8 inductor has no pass of a device's backend",
)


@contextmanager
def default_device(name: str) -> Iterator[None]:
    """Run a block in which tensors are made on another device."""
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)
        with suppress(AttributeError):  # torch 2.8 asks for the device of this ``None``
            del torch._GLOBAL_DEVICE_CONTEXT.device_context
