"""What the dispatcher serves while the device runs, and refuses when it is off."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cudalens import simulate
from cudalens.core.errors import DeviceOffError
from cudalens.simulate import dispatch
from cudalens.simulate.memory import METER
from tests.releases import needs_rehearsal

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors is in prototype",
    "ignore:Sparse",
)
VALUES = {
    "plain": lambda: torch.ones(2, 2, device="cuda"),
    "sparse": lambda: torch.eye(2, device="cuda").to_sparse(),
    "nested": lambda: torch.nested.as_nested_tensor([torch.ones(2, device="cuda")] * 2),
}
USES: list[tuple[str, Callable[[Any], object]]] = [
    ("plain", lambda x: x + 1),
    ("plain", lambda x: x.clone()),
    ("plain", lambda x: x.add_(1)),
    ("plain", lambda x: x[0]),
    ("plain", lambda x: torch.nn.functional.mish(x)),
    ("plain", lambda x: x.cpu()),
    ("plain", lambda x: x.untyped_storage().resize_(64)),
    ("plain", lambda x: x.untyped_storage().clone()),
    ("plain", lambda x: x.untyped_storage().new()),
    ("sparse", lambda x: x + x),
    ("sparse", lambda x: x.to_dense()),
    ("sparse", lambda x: x.coalesce()),
    ("sparse", lambda x: x.values()),
    ("nested", lambda x: x + x),
    ("nested", lambda x: x.clone()),
]


@pytest.fixture
def left() -> Iterator[dict[str, Any]]:
    """Return tensors of each layout that are left from a device which is off by now."""
    with simulate.start(announce=False):
        made = {name: make() for name, make in VALUES.items()}
    yield made
    made.clear()


@needs_rehearsal
@pytest.mark.parametrize(("kind", "use"), USES)
def test_what_is_left_of_a_device_can_be_used_only_while_it_runs(
    kind: str, use: Callable[[Any], object], left: dict[str, Any]
) -> None:
    with pytest.raises(DeviceOffError, match="rehearsal device is off"):
        use(left[kind])
    with simulate.start(announce=False):
        use(left[kind])


@needs_rehearsal
def test_no_storage_keeps_a_refusal_once_the_device_runs_again(left: dict[str, Any]) -> None:
    """Each storage that lives has one, the first and the last alike."""
    assert all("clone" in vars(storage) for storage in METER.storages())
    with simulate.start(announce=False):
        assert not any("clone" in vars(storage) for storage in METER.storages())


def test_a_kernel_of_the_users_own_stays_his() -> None:
    """Where a library has none for the device, that of the CPU computes."""
    with torch.library._scoped_library("tested_here", "DEF") as library:
        for name in ("with_one", "with_none"):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x: x + 1, "CPU")
        library.impl("with_one", lambda x: x + 10, "CUDA")
        with simulate.start(announce=False):
            x = torch.zeros(2, device="cuda")
            results = [torch.ops.tested_here.with_one(x), torch.ops.tested_here.with_none(x)]
            assert all(it.is_cuda for it in results)
            assert [it.tolist() for it in results] == [[10.0, 10.0], [1.0, 1.0]]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_users_kernel_of_an_op_of_torchs_serves_while_he_has_it(is_first: bool) -> None:
    """Whether it was there before the device or came while it ran."""

    def served() -> bool:
        return bool((torch.ops.aten.mish(torch.ones(2, device="cuda")) == 3).all())

    def register() -> None:
        library.impl("mish", lambda x: x * 3, "CUDA")

    with torch.library._scoped_library("aten", "IMPL") as library:
        if is_first:
            register()
        with simulate.start(announce=False):
            assert served() is is_first
            if not is_first:
                register()
            assert served()
        with simulate.start(announce=False):
            assert served()
    with simulate.start(announce=False):
        assert not served()


@pytest.mark.filterwarnings("error")
def test_only_what_torch_says_of_an_override_is_kept_from_the_user() -> None:
    with dispatch._overriding():
        warnings.warn("Warning only once for all operators, others may ...", stacklevel=1)
        with pytest.raises(UserWarning, match="another"):
            warnings.warn("another", stacklevel=1)


def test_memory_that_is_not_there_raises_as_on_cuda_with_one_error(
    sim: simulate.Simulation,
) -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**46, device="cuda")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (
            lambda there: torch.sparse_csr_tensor(
                torch.tensor([0, 1], **there), torch.tensor([0], **there), torch.ones(1, **there)
            ).sum(),
            r"aten::[\w.]+ on a SparseCsr tensor",
        ),
        (lambda there: torch.eye(2, **there).to_sparse_csr(), "a torch.sparse_csr tensor"),
        (
            lambda there: torch.quantize_per_tensor(torch.ones(2, **there), 0.1, 0, torch.qint8),
            "a torch.strided tensor of torch.qint8",
        ),
    ],
    ids=["csr", "to csr", "quantized"],
)
def test_layouts_that_are_not_rehearsed_are_refused_by_their_name(
    make: Callable[[dict[str, Any]], object], what: str, sim: simulate.Simulation
) -> None:
    with pytest.raises(simulate.NotRehearsedError, match=f"^{what}"):
        make({"device": "cuda"})
