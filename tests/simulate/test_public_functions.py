"""Every public function of torch.cuda answers or refuses, and tensors of a stopped device do."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cudalens import simulate
from cudalens.core.errors import DeviceOffError
from tests.releases import needs_rehearsal
from tests.shells import run, shell_with_cudalens
from tests.simulate.device import CUDA, run_python

# The arguments of those that cannot be called without.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "CUDAPluggableAllocator": ("allocator.so", "alloc", "free"),
    "CudaError": (0,),
    "ExternalStream": (0,),
    "StreamContext": (None,),
    "caching_allocator_alloc": (512,),
    "caching_allocator_delete": (0,),
    "can_device_access_peer": (0, 0),
    "change_current_allocator": (None,),
    "check_error": (0,),
    "device": (0,),
    "device_of": (torch.empty(0),),
    "export_dot": ("graph.dot",),
    "export_graph_data": ("graph.pickle",),
    "get_stream_from_external": (0,),
    "make_graphed_callables": (torch.sin, ()),
    "manual_seed": (1,),
    "manual_seed_all": (1,),
    "set_device": (0,),
    "set_per_process_memory_fraction": (0.5,),
    "set_rng_state": (torch.Generator().get_state(),),
    "set_rng_state_all": ([torch.Generator().get_state()],),
    "set_stream": (None,),
    "set_sync_debug_mode": ("warn",),
    "stream": (None,),
    "use_mem_pool": (None,),
}
# These look for libraries or write files.
LEFT_OUT = {"_compile_kernel", "cudart"}
FUNCTIONS = [
    (owner, name)
    for owner in (torch.cuda, torch.cuda.memory)
    for name in dict.fromkeys(owner.__all__)
    if callable(getattr(owner, name, None)) and name not in LEFT_OUT
]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("owner", "name"), FUNCTIONS, ids=[f"{o.__name__}.{n}" for o, n in FUNCTIONS]
)
def test_public_functions_answer_or_refuse(
    owner: ModuleType, name: str, sim: simulate.Simulation
) -> None:
    """No raw error of a build without CUDA, for all of ``__all__``."""
    try:
        getattr(owner, name)(*ARGUMENTS.get(name, ()))
    except simulate.NotRehearsedError as error:
        assert "is not rehearsed: it needs" in str(error)
    torch.cuda.set_per_process_memory_fraction(1.0)


GREEN = vars(getattr(torch.cuda, "GreenContext", object))  # torch 2.8 has none


@pytest.mark.parametrize("name", [n for n, m in GREEN.items() if isinstance(m, staticmethod)])
def test_a_green_context_is_refused_where_it_is_made(name: str, sim: simulate.Simulation) -> None:
    """Its static methods would ask the driver; later releases have more of them."""
    with pytest.raises(simulate.NotRehearsedError, match="a green context is not rehearsed"):
        getattr(torch.cuda.GreenContext, name)()


BEHIND = torch.cuda.use_mem_pool.__wrapped__


def test_what_a_refused_function_wraps_stays_to_be_found(sim: simulate.Simulation) -> None:
    """torch 2.14's compiler, imported while the device runs, looks for it by name."""
    assert torch.cuda.use_mem_pool.__wrapped__ is BEHIND
    assert not hasattr(torch.cuda.CUDAGraph, "__wrapped__")


def test_what_they_answer(sim: simulate.Simulation) -> None:
    """The figures agree with each other, and a wrong argument is refused."""
    x = torch.ones(1024, device=CUDA)
    nested = torch.cuda.memory_stats_as_nested_dict()
    assert nested["allocated_bytes"]["all"]["current"] >= x.nbytes
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction(0.5)
    assert torch.cuda.get_per_process_memory_fraction() == 0.5
    torch.cuda.set_per_process_memory_fraction(1.0)
    with pytest.raises(ValueError, match="fraction"):
        torch.cuda.set_per_process_memory_fraction(2.0)
    assert torch.cuda.get_sync_debug_mode() == 0
    torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.can_device_access_peer(0, 0) is False
    with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
        torch.cuda.can_device_access_peer(0, 1)
    with pytest.raises(torch.cuda.CudaError, match="CUDA error 2"):
        torch.cuda.check_error(2)
    torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())


@pytest.mark.thorough
def test_compiled_functions_run_outside_a_checked_cell(sim: simulate.Simulation) -> None:
    """With the default backend, forward and backward, as op by op."""

    @torch.compile
    def loss(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x).sin().square().sum() + torch.ones(2, device=x.device).sum()

    layer, x = nn.Linear(3, 2).to(CUDA), torch.randn(4, 3, device=CUDA)
    compiled = loss(layer, x)
    compiled.backward()  # type: ignore[no-untyped-call]
    assert compiled.item() == (layer(x).sin().square().sum() + 2).item()
    assert layer.weight.grad is not None and layer.weight.grad.is_cuda
    torch._dynamo.reset()


# --- tensors of a device that is off -------------------------------------------------------------


USES: dict[str, Callable[[Tensor], object]] = {
    "view": lambda x: x[0],
    "cpu": lambda x: x.cpu(),
    "item": lambda x: x.sum().item(),
    "copied": lambda x: torch.zeros(3).copy_(x),
    "clone": lambda x: x.clone(),
    "backward": lambda x: (x * 1).sum().backward(),
    "embedding": lambda x: nn.functional.embedding(x.long(), torch.ones(3, 2)),
    "storage": lambda x: x.untyped_storage().resize_(64),
    "new storage": lambda x: x.untyped_storage().new(),
    "copied storage": lambda x: x.untyped_storage().clone(),
}


@pytest.mark.parametrize("name", USES)
def test_a_tensor_that_outlives_its_device_says_so(name: str) -> None:
    """One sentence with what to do; turned on again, it can be used again."""
    with simulate.start(announce=False):
        x = torch.ones(3, device=CUDA)
    off = r"(?s)^The rehearsal device is off, so that tensors on cuda.*cudalens\.simulate\(\)"
    with pytest.raises(DeviceOffError, match=off):
        USES[name](x)
    with simulate.start(announce=False):
        assert (x + 1).tolist() == [2.0, 2.0, 2.0]
        storage = x.untyped_storage()
        assert storage.resize_(64).nbytes() == 64 and storage.clone().nbytes() == 64
        assert vars(storage) == {}


@needs_rehearsal
@pytest.mark.parametrize("end", ["%cudacheck simulate off", "%unload_ext cudalens"])
def test_a_shell_says_so(end: str) -> None:
    """However the device was turned off; a checked cell shows the same error."""
    with shell_with_cudalens() as shell:
        run(shell, "%cudacheck simulate")
        assert run(shell, "import torch\nx = torch.ones(3, device='cuda')\nx + 1")[0] is None
        assert run(shell, end)[0] is None
        error, _ = run(shell, "x + 1")
        assert isinstance(error, DeviceOffError)
        run(shell, "%reload_ext cudalens")
        assert isinstance(run(shell, "%%cudacheck\nprint(x)")[0], DeviceOffError)
        assert run(shell, "torch.ones(3).add_(1)")[0] is None


@needs_rehearsal
def test_sparse_and_nested_tensors_say_so_too_and_the_cpu_is_as_it_was() -> None:
    """What never was on the device works, and cuda is gone."""
    done = run_python(
        """
        import torch
        from cudalens import simulate
        from cudalens.core.errors import DeviceOffError
        with simulate.start(announce=False):
            sparse = torch.eye(3).to_sparse().cuda()
            nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).cuda()
        assert not torch.cuda.is_available()
        for use in (lambda: sparse.to_dense(), lambda: repr(sparse), lambda: nested * 2):
            try:
                use()
            except DeviceOffError:
                print("off")
        print(torch.ones(2).untyped_storage().resize_(32).new().nbytes())
        x = torch.ones(3, requires_grad=True)
        (x.to_sparse().to_dense() * 2).sum().backward()
        print(x.grad.tolist(), torch.cuda.is_available())
        try:
            torch.ones(2, device="cuda")
        except DeviceOffError:
            print("off")
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["off", "off", "off", "0", "[2.0, 2.0, 2.0] False", "off"]
