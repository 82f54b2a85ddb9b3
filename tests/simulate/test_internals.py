"""The seam to torch's C++: slots of a header, words of a storage, and torch's own kernels."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cudalens.simulate import _internals
from cudalens.simulate._internals import storage_deleter, swap_memory, virtual_slots

HEADER = """
class Guard { // virtual void commented() = 0;
  virtual ~Guard() = default;
  /* virtual void as_well(); */
  virtual Type first() const = 0;
  virtual const Stream& second(
      Device, int priority = 0) const { return ours(third()); }
  void plain();
  virtual void last() {}
};
"""


def test_slots_follow_the_order_of_a_header(tmp_path: Path) -> None:
    """A destructor has two."""
    header = tmp_path / "Guard.h"
    header.write_text(HEADER, encoding="utf-8")
    assert virtual_slots(header) == {"~Guard": 0, "first": 2, "second": 3, "last": 4}


@pytest.mark.usefixtures("sim")
def test_two_functions_answer_with_a_pair_of_words() -> None:
    one, zero = _internals._native_functions()
    kind = ctypes.CFUNCTYPE(ctypes.c_uint64)
    assert (kind(one)(), kind(zero)()) == (1, 0)
    assert [kind(made)() for made in _internals._native_functions.__wrapped__()] == [1, 0]
    slots = {"deviceCount": 3, "setDevice": 5, "other": 7}
    assert _internals._targets(slots, "deviceCount missing", "setDevice") == {3: one, 5: zero}
    assert _internals._native_functions() == (one, zero)


def test_a_system_that_keeps_memory_from_being_executed_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system = SimpleNamespace(mprotect=lambda address, size, protection: -1)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: system)
    with pytest.raises(OSError, match="this system lets no process make memory executable"):
        _internals._native_functions.__wrapped__()


def test_a_copied_table_of_functions_answers_in_the_slots_that_were_replaced() -> None:
    words = (ctypes.c_void_p * 6)(90, 91, 1, 2, 3, 4)
    obj = ctypes.c_void_p(ctypes.addressof(words) + 2 * _internals.WORD)
    _internals._replace_vtable(ctypes.addressof(obj), 4, {1: 20, 3: 40})
    table = (ctypes.c_void_p * 6).from_address((obj.value or 0) - 2 * _internals.WORD)
    assert [*table] == [90, 91, 1, 20, 3, 40]
    assert [*words] == [90, 91, 1, 2, 3, 4]


@pytest.mark.usefixtures("sim")
def test_torch_s_hooks_are_put_back_where_it_takes_another_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install = _internals.install_device.__wrapped__
    hooks = ctypes.c_void_p.from_address(_internals._hooks(_internals._CUDA_HOOKS))
    before = hooks.value
    try:
        install()
        assert hooks.value != before
        hooks.value = before
        monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("mps"))
        with pytest.raises(OSError, match="torch did not accept the rehearsal device"):
            install()
        assert hooks.value == before
    finally:
        hooks.value = before


@pytest.mark.usefixtures("sim")
def test_memory_goes_over_with_its_size_and_what_frees_it() -> None:
    one, two = torch.arange(3, dtype=torch.uint8), torch.arange(9, 14, dtype=torch.uint8)
    pinned = torch.zeros(5, dtype=torch.uint8, pin_memory=True)
    own = storage_deleter(one.untyped_storage())
    assert own == storage_deleter(two.untyped_storage()) != 0
    theirs = storage_deleter(pinned.untyped_storage())
    assert theirs not in (0, own)
    addresses = [item.untyped_storage().data_ptr() for item in (one, pinned)]
    for storage in (pinned.untyped_storage(), two.untyped_storage()):
        swap_memory(one.untyped_storage(), storage)
    assert (one.untyped_storage().tolist(), two.untyped_storage().tolist()) == (
        ([9, 10, 11, 12, 13], [0] * 5)
    )
    assert pinned.untyped_storage().tolist() == [0, 1, 2]
    assert [item.untyped_storage().data_ptr() for item in (pinned, two)] == addresses
    frees = [storage_deleter(item.untyped_storage()) for item in (one, two, pinned)]
    assert frees == [own, theirs, own]


def test_a_storage_without_memory_is_freed_by_nothing() -> None:
    assert storage_deleter(torch.UntypedStorage(0)) == 0


def test_the_words_of_a_storage_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    words = _internals._memory_words.__wrapped__
    assert words() == _internals._memory_words()
    empty = SimpleNamespace(
        _cdata=ctypes.addressof(memory := (ctypes.c_size_t * 10)(0, 3)),
        data_ptr=lambda: 3,
        nbytes=lambda: 4,
    )
    tensor = SimpleNamespace(untyped_storage=lambda: empty)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: tensor)
    with pytest.raises(NotImplementedError, match="resizing a cuda storage is not"):
        words()
    memory[5], memory[9] = 3, 4
    assert words() == 5


@pytest.mark.parametrize(
    ("registry", "names"),
    [
        (None, set()),
        (SimpleNamespace(_libs={("mm", "CUDA"): 1, ("mv", "XPU"): 2}), {"aten::mm"}),
        (SimpleNamespace(_aten_override_libs={("mm", "CUDA"): 1}, _libs={("mv", "CUDA"): 1}),
         {"aten::mm"}),
    ],
)  # fmt: skip
def test_the_kernels_that_torch_brings_in_python(
    registry: object, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_native", SimpleNamespace(registry=registry), raising=False)
    assert _internals.kernels_in_python() == names
