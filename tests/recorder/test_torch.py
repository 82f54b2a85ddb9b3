"""The recorder's seam to torch: modes on the stack, hooks, gradients, replaced functions."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode

from cudalens.recorder import _torch
from cudalens.recorder._torch import (
    RemovableMode,
    Replaced,
    WithoutOurs,
    WithoutTop,
    autograd_of_copies,
    gradients,
    physical,
    removable_modes,
    remove_hooks,
    remove_stance,
    wait_if_busy,
)


class Ours(RemovableMode):
    """Counts the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


class Theirs(TorchFunctionMode):
    """A mode of the user's."""

    seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_is_removed_wherever_it_is_and_the_others_keep_their_order() -> None:
    one, other, theirs = Ours(), Ours(), Theirs()
    one.install()
    with theirs:
        other.install()
        one.install()  # an interrupt may have left it there twice
        assert removable_modes() == [one, other, one]
        one.remove()
        assert not one.is_on()
        assert removable_modes() == [other]
        with WithoutTop() as top:
            assert top is other
        torch.ones(1)
        assert (one.seen, theirs.seen, other.seen) == (0, 1, 1)
        other.remove()
    other.remove()
    assert removable_modes() == []


def test_ours_on_top_are_off_in_a_block_and_those_below_another_stay() -> None:
    below, first, second, theirs = Ours(), Ours(), Ours(), Theirs()
    below.install()
    with theirs:
        first.install()
        second.install()
        with WithoutOurs():
            assert removable_modes() == [below]
        assert removable_modes() == [below, first, second]
        with WithoutTop() as top:
            assert top is second
            assert removable_modes() == [below, first]
        assert removable_modes() == [below, first, second]
        for mode in (first, second):
            mode.remove()
    below.remove()


def test_an_interrupt_where_ours_are_taken_off_puts_them_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = Ours(), Ours()
    first.install()
    second.install()
    pop = _torch._pop_torch_function_stack
    steps = iter([pop, Mock(side_effect=KeyboardInterrupt)])
    monkeypatch.setattr(_torch, "_pop_torch_function_stack", lambda: next(steps, pop)())
    with pytest.raises(KeyboardInterrupt), WithoutOurs():
        pass
    assert removable_modes() == [first, second]
    first.remove()
    second.remove()


def test_a_mode_that_has_its_turn_is_removed_behind_it() -> None:
    mode = Ours()
    mode.install()
    try:
        with WithoutTop():
            mode.remove_soon()
            assert sys.getprofile() is not None
        len([])  # a function that the thread calls next
        assert sys.getprofile() is None
        assert not mode.is_on()
    finally:
        sys.setprofile(None)
        mode.remove()


def test_where_the_user_profiles_nothing_is_put_in_his_place() -> None:
    mode, own = Ours(), lambda *_: None
    mode.install()
    sys.setprofile(own)
    try:
        mode.remove_soon()
        assert sys.getprofile() is own
    finally:
        sys.setprofile(None)
        mode.remove()


def test_keywords_that_a_function_of_torchs_forgets() -> None:
    seen: list[dict[str, Any]] = []

    def mode_of(func: Any) -> None:
        seen.append(_torch.forgotten_keywords(func, sys._getframe(0)))

    def forgets(x: Any, *, dim: int = 1, keep: bool = False) -> None:
        mode_of(forgets)

    def plain(x: Any) -> None:
        mode_of(plain)
        mode_of(forgets)

    forgets(1, dim=3)
    plain(1)
    assert seen == [{"dim": 3, "keep": False}, {}, {}]
    assert _torch.forgotten_keywords(torch.add, sys._getframe(0)) == {}


@pytest.mark.parametrize(
    ("register", "hooks"),
    [
        (
            nn.modules.module.register_module_forward_pre_hook,
            nn.modules.module._global_forward_pre_hooks,
        ),
        (optimizer.register_optimizer_step_pre_hook, optimizer._global_optimizer_pre_hooks),
        (optimizer.register_optimizer_step_post_hook, optimizer._global_optimizer_post_hooks),
    ],
)
def test_hooks_of_ours_go_and_the_others_stay(register: Any, hooks: dict[int, Any]) -> None:
    ours, theirs = lambda *_: None, lambda *_: None
    handles = [register(it) for it in (ours, theirs, ours)]
    try:
        remove_hooks(ours)
        assert [it for it in hooks.values() if it in (ours, theirs)] == [theirs]
        remove_hooks()
        assert theirs in hooks.values()
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize(
    ("initialized", "capturing", "is_done", "waits"),
    [(True, False, False, True), (True, False, True, False), (True, True, False, False),
     (False, False, False, False)],
)  # fmt: skip
def test_a_stream_is_waited_for_where_work_is_under_way(
    monkeypatch: pytest.MonkeyPatch, initialized: bool, capturing: bool, is_done: bool, waits: bool
) -> None:
    waited: list[Any] = []
    stream = SimpleNamespace(query=lambda: is_done)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(_torch, "wait_for", waited.append)
    wait_if_busy(torch.device("cuda"))
    assert waited == ([stream] if waits else [])


def test_another_device_is_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    module = SimpleNamespace(synchronize=lambda: waited.append("waited"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    wait_if_busy(torch.device("xpu"))
    assert waited == ["waited"]


def test_nodes_take_over_a_hook_until_it_is_removed_from_all() -> None:
    called: list[int] = []
    before_node, remove = _torch.before_nodes(lambda grads: called.append(1))
    x = torch.ones(2, requires_grad=True)
    for is_removed in (False, True):
        y = x.exp()
        before_node(y.grad_fn)
        if is_removed:
            remove()
        y.sum().backward()
        assert called == [1]


def test_values_behind_a_wrapped_tensor() -> None:
    x, seen = torch.ones(2, 3), []
    each = torch.func.vmap(lambda item: seen.append(physical(item)) or item)
    for wrapped in (each, torch.func.vmap(each)):
        wrapped(x)
        assert seen.pop().data_ptr() == x.data_ptr()
    assert physical(x) is x


def test_gradients_of_copies_are_recorded_also_where_autograd_is_off() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    unused = torch.ones(1, requires_grad=True)
    packed: list[Any] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda it: packed.append(it) or it, lambda it: it
    )
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), hooks:
        assert not (x * x).requires_grad
        with autograd_of_copies():
            y = x * x
            found, none = gradients([y], [torch.ones(1)], [x, unused])
    assert none is None
    assert found is not None
    assert found.tolist() == [4.0]
    assert packed == []
    assert x.grad is None


# --- functions that are replaced ------------------------------------------------------------------


class Owner:
    """Has functions to be replaced."""

    @staticmethod
    def said() -> str:
        return "theirs"


def replaced() -> Replaced:
    def make(before: Any) -> Any:
        def ours() -> str:
            return "ours, " + str(before.__func__())

        return staticmethod(ours)

    return Replaced({(Owner, "said"): make, (Owner, "nothing"): make})


def test_a_function_is_replaced_for_as_long_as_somebody_uses_it() -> None:
    before, functions, one, two = vars(Owner)["said"], replaced(), object(), object()
    functions.install(one)
    functions.install(two)
    assert Owner.said() == "ours, theirs"
    functions.remove(one)
    functions.remove(one)
    assert Owner.said() == "ours, theirs"
    functions.remove(two)
    assert vars(Owner)["said"] is before
    assert not hasattr(Owner, "nothing")
    functions.install(one)
    assert Owner.said() == "ours, theirs"
    functions.remove(one)


def test_what_another_thread_has_begun_to_use_meanwhile_is_replaced_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functions, put_back = replaced(), Replaced._put_back
    functions.install(None)

    def with_other(self: Replaced) -> None:
        self._users[1] = "another thread's"
        put_back(self)

    with monkeypatch.context() as patched:
        patched.setattr(Replaced, "_put_back", with_other)
        functions.remove(None)
    assert Owner.said() == "ours, theirs"
    functions._users.clear()
    functions.remove(None)
    assert Owner.said() == "theirs"


def test_what_somebody_else_has_put_in_its_place_stays() -> None:
    before, functions, one = vars(Owner)["said"], replaced(), object()
    functions.install(one)
    other = staticmethod(lambda: "another")
    Owner.said = other  # type: ignore[method-assign]
    try:
        functions.install(one)
        assert Owner.said() == "another"
        functions.remove(one)
        assert vars(Owner)["said"] is other
    finally:
        Owner.said = before  # type: ignore[method-assign]


def test_a_name_that_has_imported_ours_gets_the_original_back() -> None:
    home = ModuleType("home")
    home.said = before = lambda: "theirs"  # type: ignore[attr-defined]

    def make(func: Any) -> Any:
        def ours() -> str:
            return "ours"

        return ours

    functions, one = Replaced({(home, "said"): make}), object()
    functions.install(one)
    elsewhere = {"said": home.said, "again": home.said}
    assert elsewhere["said"]() == "ours"
    functions.remove(one)
    assert elsewhere["said"] is elsewhere["again"] is home.said is before


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_stance_of_ours_goes_and_another_stays(
    monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    left: list[Any] = []
    ours: Any = SimpleNamespace(
        stance=SimpleNamespace(name="force_eager"), prev=SimpleNamespace(name="default")
    )
    ours.__exit__ = lambda *args: left.append(args)
    another = SimpleNamespace(name="force_eager")  # the program's own, and the same in its words
    frames = SimpleNamespace(_stance=ours.stance if is_ours else another)
    monkeypatch.setattr(torch, "_dynamo", SimpleNamespace(eval_frame=frames), raising=False)
    remove_stance(ours)
    assert len(left) == is_ours
    assert ours.stance.name == "default"  # where the program returns to it
