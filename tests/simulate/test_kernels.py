"""The rehearsal device among threads, tracers and guards."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cudalens import simulate
from cudalens.simulate.kernels import reach
from tests.probes import SeenFunctions
from tests.releases import default_device
from tests.simulate.device import CUDA, on_cuda

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("seeded")


def test_device_threads() -> None:
    layer = nn.Linear(4, 4).to(CUDA)

    def work(_: int) -> Tensor:
        x = torch.ones(2, 4, device="cuda", requires_grad=True)
        for _ in range(5):
            (grad,) = torch.autograd.grad(layer(x).square().sum(), x)
        return grad.cpu()

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(4)))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_device_is_invisible_to_function_modes() -> None:
    """Compiled code calls ops without asking a mode: what serves them asks none either."""

    def work(x: Tensor) -> Tensor:
        return x[torch.tensor([0], device=x.device)] + 1

    seen = []
    for x in (torch.ones(2), torch.ones(2, device="cuda")):
        traced = torch.jit.trace(work, (x,))
        with torch.device(x.device), SeenFunctions() as watch:
            work(x)
            traced(x)
        seen.append(watch.names)
    assert seen[0] == seen[1]


def test_device_as_default_device_trains() -> None:
    with default_device("cuda"):
        layer = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(layer.parameters())
        loss = F.cross_entropy(layer(torch.randn(4, 3)), torch.tensor([0, 1, 0, 1]))
        loss.backward()
        optimizer.step()
        assert loss.is_cuda
        assert layer.weight.is_cuda
    assert torch.ones(1).device.type == "cpu"


def test_device_inference_mode() -> None:
    layer = nn.Linear(3, 2).to(CUDA)
    with torch.inference_mode():
        y = layer(on_cuda(4, 3))
        y.add_(1)
        assert y.is_inference()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        (layer.weight.sum() * y).sum()
    with torch.no_grad():
        assert not layer(on_cuda(1, 3)).requires_grad


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_device_jit_trace_and_profiler() -> None:
    layer = nn.Linear(3, 2).to(CUDA)
    x = on_cuda(4, 3)
    traced = torch.jit.trace(layer, (x,))
    assert torch.equal(traced(x), layer(x))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x)
    assert "aten::addmm" in {event.key for event in profile.key_averages()}


# --- version counters of list ops ----------------------------------------------------------


def test_found_lists_raise_version_counters_in_place() -> None:
    x, other = on_cuda(3), on_cuda(3)
    before = [t._version for t in (x, other)]
    torch._foreach_add_([x, other], 1.0)
    assert [t._version for t in (x, other)] == [v + 1 for v in before]


@pytest.mark.parametrize("fused", [False, True])
def test_found_optimizer_step_before_backward_is_found(fused: bool) -> None:
    """A step between forward and backward changes what backward needs, and backward says so."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=not fused, fused=fused)
    model(on_cuda(1, 2)).sum().backward()
    stale = model(on_cuda(1, 2)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


@pytest.mark.parametrize(
    "write",
    [
        lambda x: torch.sin(x[:3], out=x[1:]),
        lambda x: x[1:].add_(x[:-1]),
        lambda x: torch.cat([x[:2], x[2:]], out=x),
        lambda x: torch._foreach_add_([x[1:]], [x[:-1]]),
    ],
)
def test_a_result_that_overlaps_what_is_read_is_refused_as_on_cuda(
    write: Callable[[Tensor], object],
) -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to"):
        write(x)
    assert torch.sin(x[:2], out=x[2:]).shape == (2,)
    x[:2].copy_(x[2:])
    assert torch.equal(x[:2], x[2:])


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_mask_as_an_index_waits_for_the_device_and_numbers_do_not(
    sim: simulate.Simulation, dtype: torch.dtype
) -> None:
    """CUDA asks a mask of either dtype for its nonzero(): their number is the result's size."""
    x, rows = on_cuda(3), torch.tensor([2, 0], device="cuda")
    mask = torch.ones(3, dtype=dtype, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    for given, index in ((x, mask), (x.view(1, 3), mask.view(1, 3))):
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            given[index]
    assert x[rows].shape == (2,)


# --- one launch -----------------------------------------------------------------------------------


def test_each_bad_argument_gives_way_to_a_harmless_one(sim: simulate.Simulation) -> None:
    starts, places = (torch.tensor(values, device="cuda") for values in ([0, 2, 1], [0, 5]))
    aten._validate_compressed_sparse_indices(True, starts, places, 2, 2, 2)
    assert "Assertion `cond && message` failed" in str(sim.pending)


def test_numbers_and_generators_are_those_of_the_device() -> None:
    x = torch.ones(2, device="cuda")
    assert aten.mul.Tensor(x, 2j).tolist() == [2j, 2j]
    assert aten.mul.Tensor(x.half(), 2.5).dtype == torch.float16
    assert x.bernoulli_(generator=torch.Generator("cuda")).is_cuda
    wanted = "Expected a 'cuda' device type for generator but found 'cpu'"
    with pytest.raises(RuntimeError, match=wanted):
        x.bernoulli_(generator=torch.Generator())


def test_an_op_of_a_library_without_a_kernel_of_the_cpu_is_not_rehearsed(
    sim: simulate.Simulation,
) -> None:
    with torch.library._scoped_library("tested_kernels", "DEF") as library:
        for name in ("bare", "refuses"):
            library.define(f"{name}(Tensor x) -> Tensor")

        def refuse(x: Tensor) -> Tensor:
            raise NotImplementedError("not for this dtype")

        library.impl("refuses", refuse, "CPU")
        x = torch.ones(2, device="cuda")
        with pytest.raises(simulate.NotRehearsedError, match="tested_kernels::bare, which has no"):
            torch.ops.tested_kernels.bare(x)
        with pytest.raises(NotImplementedError, match="not for this dtype"):
            torch.ops.tested_kernels.refuses(x)


@pytest.mark.parametrize(("named", "given"), [("cuda", "cpu"), ("cpu", "cpu"), ("meta", "meta")])
def test_a_kernel_of_the_cpu_is_given_its_own_device_for_the_gpu_alone(
    named: str, given: str
) -> None:
    seen: list[torch.device] = []
    with torch.library._scoped_library("tested_devices", "DEF") as library:
        library.define("put(Tensor x, Device to) -> Tensor")
        library.impl("put", lambda x, to: seen.append(to) or x.clone(), "CPU")
        assert torch.ops.tested_devices.put(on_cuda(2), torch.device(named)).is_cuda
    assert seen == [torch.device(given)]


def test_a_device_that_does_not_exist_is_refused_among_the_arguments() -> None:
    for index in (None, 0):
        assert torch.zeros(2, device=torch.device("cuda", index)).is_cuda
        assert torch.zeros_like(on_cuda(2), device=torch.device("cuda", index)).is_cuda
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros_like(on_cuda(2), device="cuda:1")
    assert not torch.zeros_like(on_cuda(2), device="cpu").is_cuda
    assert torch.zeros_like(torch.ones(2), device="cuda").is_cuda


@pytest.mark.parametrize(
    ("call", "is_cublas"),
    [(lambda x: x @ x, True), (lambda x: torch.addmm(x, x, x), True), (lambda x: x + x, False)],
)
def test_cublas_cannot_be_started_on_a_device_that_was_lost(
    call: Callable[[Tensor], object], is_cublas: bool, sim: simulate.Simulation
) -> None:
    """Also with a fault that nobody has met: it waits, and says a status of its own."""
    x = on_cuda(2, 2)
    sim.reset()
    sim.device_assert("aten::mine", "mine.cu:1: Assertion `x` failed.")
    if is_cublas:
        with pytest.raises(RuntimeError, match="CUBLAS_STATUS_NOT_INITIALIZED"):
            call(x)
    else:
        call(x)
    with pytest.raises(RuntimeError, match="device-side assert"):
        torch.cuda.synchronize()
    sim.reset()
    call(x)
    sim.device_assert("aten::mine", "mine.cu:1: Assertion `x` failed.")
    call(x)  # it has a handle by now
    sim.reset()


def test_a_number_of_the_host_takes_values_from_the_device() -> None:
    """Torch copies what is beside it: the copy waits, and the result is the host's."""
    number = torch.tensor(5.0, device="cuda")
    for write in (
        lambda x: x.index_put_((torch.tensor([0]),), number),
        lambda x: x.masked_fill_(torch.tensor([True, False]), number),
    ):
        host = torch.zeros(2)
        assert write(host) is host
        assert host.tolist() == [5.0, 0.0]
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
                write(host)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_parts_of_a_composite_op_meet_the_tensors_as_they_are() -> None:
    assert on_cuda(2).new_zeros(3).is_cuda
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        F.linear(on_cuda(2, 3), torch.ones(2, 3))


@pytest.mark.parametrize(
    ("call", "waits"),
    [
        (lambda x, n: x.repeat_interleave(n), True),
        (lambda x, n: x.repeat_interleave(n, output_size=3), False),
        (lambda x, n: x.masked_select(x > 0), True),
        (lambda x, n: x.sort(), False),
        (lambda x, n: torch.stack([x, x]), False),
    ],
)
def test_what_needs_values_for_the_size_of_its_result_waits(
    call: Callable[[Tensor, Tensor], object], waits: bool
) -> None:
    x, number = on_cuda(2), torch.tensor([1, 2], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        if waits:
            with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
                call(x, number)
        elif call is not None:
            call(x, number)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- results --------------------------------------------------------------------------------------


def test_an_op_with_several_results_that_are_given_fills_each() -> None:
    x = torch.tensor([[3.0, 1.0, 2.0]], device="cuda")
    for shape in ((0,), (1,), (5,)):
        values, indices = (
            torch.empty(shape, device="cuda"),
            torch.empty(shape, dtype=torch.long, device="cuda"),
        )
        with warnings.catch_warnings(action="ignore"):
            made = torch.max(x, 1, out=(values, indices))
        assert made[0] is values and made[1] is indices
        assert (values.tolist(), indices.tolist()) == ([3.0], [0])


@pytest.mark.parametrize(
    ("offset", "shape", "strides", "count"),
    [
        (1, (3,), (1,), 4),
        (1, (4,), (1,), 5),
        (0, (2, 2), (3, 1), 5),
        (0, (9, 0), (1, 1), 4),
        (0, (1,), (1,), 4),
    ],
)
def test_a_storage_grows_until_a_shape_fits_behind_an_offset(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...], count: int
) -> None:
    x = torch.zeros(4, device="cuda")[offset:]
    reach(x, shape, strides)
    assert x.untyped_storage().nbytes() == 4 * count


def test_a_kernel_that_returns_an_argument_gives_back_the_device_s() -> None:
    with torch.library._scoped_library("tested_choices", "DEF") as library:
        for name, kernel in (("last", lambda x, y: y), ("sum", lambda x, y: x + y)):
            library.define(f"{name}(Tensor x, Tensor y) -> Tensor")
            library.impl(name, kernel, "CPU")
        x, y = on_cuda(2), on_cuda(2)
        assert torch.ops.tested_choices.last(x, y) is y
        assert torch.ops.tested_choices.sum(x, y) not in {x, y}


def test_a_result_that_is_given_keeps_its_place_in_a_storage() -> None:
    whole = torch.zeros(6, device="cuda")
    part = whole[1:4]
    with warnings.catch_warnings(action="ignore"):
        torch.add(torch.ones(2, device="cuda"), 0, out=part)
    assert part.shape == (2,) and part.storage_offset() == 1
    torch.add(torch.ones(2, device="cuda"), 1, out=part)
    assert whole.tolist() == [0, 2, 2, 0, 0, 0]
    with warnings.catch_warnings(action="ignore"):
        torch.add(torch.ones(5, device="cuda"), 3, out=part)
    assert whole.tolist() == [0, 4, 4, 4, 4, 4]
    assert part.shape == (5,) and part.storage_offset() == 1
    with warnings.catch_warnings(action="ignore"):
        torch.add(torch.ones(2, 4, device="cuda"), 4, out=part)
    assert part.shape == (2, 4) and whole.untyped_storage().nbytes() == 36
    assert part.sum().item() == 40.0


def test_a_list_of_results_is_a_list_on_the_device() -> None:
    parts = torch._foreach_add([on_cuda(2), on_cuda(3)], 1.0)
    assert [part.shape for part in parts] == [(2,), (3,)] and all(part.is_cuda for part in parts)
    shapes = torch.ops.aten.split_with_sizes_copy(on_cuda(5), [2, 3])
    assert all(part.is_cuda for part in shapes)
    x = on_cuda(2)
    assert x.contiguous() is x and x.to("cuda") is x
