"""CUDA's other errors, from their real texts: what each is, what it is not, and one next step."""

from __future__ import annotations

import pytest
import torch

from cudalens import simulate
from cudalens.core.evidence_types import Synchronization
from cudalens.core.report import ErrorFacts, Evidence, Report
from cudalens.core.report_types import OpName
from cudalens.diagnosis.diagnose import diagnose
from cudalens.diagnosis.host_errors import is_sticky, table
from cudalens.evidence.memory import MAX_LISTED, format_bytes, is_full
from tests.hostcells import run_cell

DSA = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
SEARCH = (
    "\nSearch for `{}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html "
    "for more information."
)
OOM = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 14.75 GiB of "
    "which {free} is free. Process 2842 has 5.93 GiB memory in use. Of the allocated memory 5.56 "
    "GiB is allocated by PyTorch, and {reserved} is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation "
    "for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html"
    "#environment-variables)"
)
OLD_OOM = (
    "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.76 GiB total capacity; 9.54 GiB "
    "already allocated; 15.44 MiB free; 9.70 GiB reserved in total by PyTorch) If reserved memory "
    "is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
)
ASYNC_OOM = (
    "Allocation on device 0 would exceed allowed memory. (out of memory)\n"
    "Currently allocated     : 13.00 GiB\nRequested               : 2.00 GiB\n"
    "Device limit            : 14.75 GiB\nFree (according to CUDA): 1.00 GiB\n"
    "PyTorch limit (set by user-supplied memory fraction)\n                        : 14.75 GiB"
)

# Text as torch gives it, the family that knows it, whether the context is still usable.
TEXTS = {
    "out of memory": (
        OOM.format(asked="20.00 GiB", free="8.81 GiB", reserved="250.58 MiB"),
        "out_of_memory",
        True,
    ),
    "out of memory, older": (OLD_OOM, "out_of_memory", True),
    "illegal access": (
        "CUDA error: an illegal memory access was encountered"
        + SEARCH.format("cudaErrorIllegalAddress")
        + DSA,
        "illegal_access",
        False,
    ),
    "misaligned": (
        "CUDA error: misaligned address" + SEARCH.format("cudaErrorMisalignedAddress") + DSA,
        "misaligned_address",
        False,
    ),
    "no image": (
        "CUDA error: no kernel image is available for execution on the device" + DSA,
        "no_kernel_image",
        True,
    ),
    "wrong architecture": (
        "NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current "
        "PyTorch installation.",
        "no_kernel_image",
        True,
    ),
    "ordinal": (
        "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough "
        "GPUs?" + DSA,
        "invalid_device",
        True,
    ),
    "old driver": (
        "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
        "driver by downloading and installing a new version from the URL: "
        "http://www.nvidia.com/Download/index.aspx",
        "old_driver",
        True,
    ),
    "insufficient driver": (
        "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before "
        "calling NumCudaDevices() that might have already set an error? Error 35: CUDA driver "
        "version is insufficient for CUDA runtime version",
        "old_driver",
        True,
    ),
    "nccl": (
        "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2044, unhandled cuda "
        "error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclUnhandledCudaError:"
        " Call to CUDA function failed.\nLast error:\nCuda failure 710 'device-side assert "
        "triggered'",
        "nccl",
        False,
    ),
    "nccl timeout": (
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE"
        ") ran for 600000 milliseconds before timing out. ProcessGroupNCCL",
        "nccl",
        True,
    ),
    "cublas": (
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m,"
        " n, k, &alpha, a, lda, b, ldb, &beta, c, ldc)`",
        "library_status",
        True,
    ),
    "cublas memory": (
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "library_status",
        True,
    ),
    "cudnn": ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "library_status", True),
    "launch failure": (
        "CUDA error: unspecified launch failure" + SEARCH.format("cudaErrorLaunchFailure") + DSA,
        "launch_failure",
        False,
    ),
    "time-out": (
        "CUDA error: the launch timed out and was terminated"
        + SEARCH.format("cudaErrorLaunchTimeout")
        + DSA,
        "launch_timeout",
        False,
    ),
    "too many resources": (
        "CUDA error: too many resources requested for launch" + DSA,
        "launch_refused",
        True,
    ),
    "configuration": (
        "CUDA error: invalid configuration argument" + DSA,
        "launch_refused",
        True,
    ),
    "fork": (
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must"
        " use the 'spawn' start method",
        "forked",
        True,
    ),
    "other": ("CUDA error: operation not supported" + DSA, "other_cuda_error", True),
    "driver's": ("CUDA driver error: invalid argument", "other_cuda_error", True),
    "Triton's": ("Triton Error [CUDA]: invalid argument", "other_cuda_error", True),
    "illegal access in Triton": (
        "Triton Error [CUDA]: an illegal memory access was encountered",
        "illegal_access",
        False,
    ),
    "misaligned in Triton": (
        "Triton Error [CUDA]: misaligned address",
        "misaligned_address",
        False,
    ),
    "out of memory, CUDA's own": ("CUDA error: out of memory" + DSA, "memory_refused", True),
    "out of memory, the driver's": ("CUDA driver error: out of memory", "memory_refused", True),
    "initialization": ("CUDA error: initialization error" + DSA, "other_cuda_error", True),
    "nccl, short": (
        "NCCL error in: ProcessGroupNCCL.cpp:2044, unhandled cuda error, NCCL version 2.21.5",
        "nccl",
        True,
    ),
    "busy": (
        "CUDA error: all CUDA-capable devices are busy or unavailable" + DSA,
        "device_busy",
        True,
    ),
}
NO_GPU = {
    "no driver": "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU "
    "and installed a driver from http://www.nvidia.com/Download/index.aspx",
    "cpu build": "Torch not compiled with CUDA enabled",
    "none": "No CUDA GPUs are available",
}

HEADLINES = {
    "the GPU has no room for 20.00 GiB: 8.81 GiB of 14.75 GiB is free": ("out of memory",),
    "the GPU has no room for 20.00 MiB: 15.44 MiB of 10.76 GiB is free": ("out of memory, older",),
    "a kernel read or wrote memory that does not belong to it": (
        "illegal access",
        "illegal access in Triton",
    ),
    "a kernel used a misaligned address": ("misaligned", "misaligned in Triton"),
    "this build of PyTorch, or of an extension, holds no code for this GPU": (
        "no image",
        "wrong architecture",
    ),
    "the requested GPU does not exist for this process": ("ordinal",),
    "the NVIDIA driver is older than the CUDA version that PyTorch was built for": (
        "old driver",
        "insufficient driver",
    ),
    "CUDA reported a device-side assert, and no recorded op can be blamed for it": ("nccl",),
    "NCCL, which carries tensors between GPUs, reported an error": ("nccl timeout", "nccl, short"),
    "a library of CUDA's failed with CUBLAS_STATUS_EXECUTION_FAILED": ("cublas",),
    "a library of CUDA's failed with CUBLAS_STATUS_ALLOC_FAILED": ("cublas memory",),
    "a library of CUDA's failed with CUDNN_STATUS_EXECUTION_FAILED": ("cudnn",),
    "a kernel was ended by the hardware: unspecified launch failure": ("launch failure",),
    "a kernel ran too long and was ended by the system": ("time-out",),
    "a kernel was launched with more blocks, threads or registers than the GPU has": (
        "too many resources",
    ),
    "a kernel was launched with sizes that the GPU does not take": ("configuration",),
    "a forked worker process uses CUDA, which its parent had started": ("fork",),
    "CUDA reported: operation not supported": ("other",),
    "CUDA reported: invalid argument": ("driver's", "Triton's"),
    "CUDA could not get the memory that it asked for itself": (
        "out of memory, CUDA's own",
        "out of memory, the driver's",
    ),
    "CUDA reported: initialization error": ("initialization",),
    "CUDA could not start on the GPU: it is busy or unavailable": ("busy",),
    "CUDA was asked for, and there is no GPU that this process can use": ("no driver", "none"),
    "CUDA was asked for, and this build of PyTorch was made without CUDA": ("cpu build",),
}
"""Each headline, and the texts that it stands over."""


def report_of(message: str, **known: object) -> Report:
    """Diagnose an error from its text alone."""
    error = ErrorFacts(type_name="AcceleratorError", bases=("RuntimeError",), message=message)
    usable = not is_sticky(message)
    return diagnose(Evidence(error=error, context_usable=usable, **known))  # type: ignore[arg-type]


def family_of(message: str) -> str:
    """Return the first family that knows the text."""
    return next(item.name for item in table() if item.regex.search(message))


@pytest.mark.parametrize(("headline", "names"), HEADLINES.items())
def test_each_text_has_its_headline(headline: str, names: tuple[str, ...]) -> None:
    """By the text alone; where there is no device, nothing is said of its state."""
    for name in names:
        report = report_of(TEXTS[name][0] if name in TEXTS else NO_GPU[name])
        assert report.headline == headline
        assert name in TEXTS or report.context_usable is None
        assert report.certainty in ("proven", "likely", "unknown")


def test_each_text_is_under_one_headline() -> None:
    """None is left out, and none is there twice."""
    assert sorted(sum(HEADLINES.values(), ())) == sorted([*TEXTS, *NO_GPU])


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_a_text_is_told_from_the_others(name: str) -> None:
    """Kind, family, and whether the process can go on, from the text alone."""
    message, family, usable = TEXTS[name]
    assert family_of(message) == family
    report = report_of(message)
    assert report.context_usable is usable
    assert report.kind == "cuda_error" or "device-side assert triggered" in message


@pytest.mark.parametrize("name", sorted({**TEXTS, **NO_GPU}))
def test_each_says_what_it_is_not_and_one_next_step(name: str) -> None:
    """PyTorch's advice about assertions stands under all of them, and helps with none."""
    message = TEXTS[name][0] if name in TEXTS else NO_GPU[name]
    if "device-side assert triggered" in message:
        return  # the status of NCCL that quotes an assert is one
    report = report_of(message)
    assert "not a device-side assert" in report.explanation
    assert report.explanation.count("Next step") == 1
    assert "assert" not in report.headline
    restarts = "restart the kernel" in report.explanation
    assert restarts == (report.context_usable is False)


def test_an_assert_is_none_of_these() -> None:
    """Its text leads to the explanation of asserts, whatever error code came with it."""
    text = "CUDA error: device-side assert triggered" + SEARCH.format("cudaErrorAssert") + DSA
    report = report_of(text)
    assert (report.kind, report.context_usable) == ("device_assert", False)
    assert "not a device-side assert" not in report.explanation


@pytest.mark.parametrize("name", ["illegal access", "misaligned", "launch failure"])
@pytest.mark.parametrize(("op", "certainty"), [("mylib::gather", "likely"), (None, "unknown")])
def test_a_fault_is_as_certain_as_its_op(name: str, op: str | None, certainty: str) -> None:
    """Never proven: no value is known to be wrong."""
    assert report_of(TEXTS[name][0], op=OpName(name=op)).certainty == certainty


@pytest.mark.parametrize("name", ["illegal access", "cublas", "cublas memory", "other"])
def test_a_check_that_waited_is_not_recommended_again(name: str) -> None:
    """Without one it is the next step; within one another is, and no earlier op is blamed."""
    message = TEXTS[name][0]
    assert "under %%cudacheck" in report_of(message).explanation
    checked = report_of(message, synchronization=Synchronization(waits=True)).explanation
    assert "%%cudacheck" not in checked and "earlier op" not in checked
    assert checked.count("Next step") == 1


@pytest.mark.parametrize(("options", "waits"), [({}, True), ({"sync": False}, False)])
def test_a_checked_cell_knows_whether_it_waited(
    options: dict[str, bool], waits: bool, sim: simulate.Simulation
) -> None:
    """The recorder tells; with --no-sync an earlier op can still be the cause."""
    code = "import torch\nraise torch.AcceleratorError('CUDA error: unknown error')"
    report = run_cell(code, fast=False, **options).shown
    assert ("The check waited" in report.explanation) is waits


# --- out of memory --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "headline"),
    [
        (
            OOM.format(asked="2.00 GiB", free="512.00 MiB", reserved="800.00 MiB"),
            "the GPU has no room for 2.00 GiB: 512.00 MiB of 14.75 GiB is free",
        ),
        (OLD_OOM, "the GPU has no room for 20.00 MiB: 15.44 MiB of 10.76 GiB is free"),
        ("CUDA out of memory.", "the GPU has no room"),
        (
            "CUDA out of memory. Tried to allocate more than 1EB memory.",
            "the GPU has no room for more than 1EB",
        ),
        (ASYNC_OOM, "the GPU has no room for 2.00 GiB: 1.00 GiB of 14.75 GiB is free"),
        (
            "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
            "per_process_memory_fraction limit. Requested size: 2.00 GiB",
            "the process has no room for 2.00 GiB below its own limit",
        ),
    ],
)
def test_what_was_asked_for_and_what_is_free(message: str, headline: str) -> None:
    """The numbers of the message, of new and old releases, and none that it does not hold."""
    assert report_of(message).headline == headline


@pytest.mark.parametrize(
    ("asked", "reserved", "first"),
    [
        ("2.00 GiB", "1.99 GiB", "make the batch smaller"),
        ("2.00 GiB", "2.00 GiB", "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ("14.75 GiB", "1.00 MiB", "make the batch smaller"),
        ("14.76 GiB", "1.00 MiB", "look at the shape"),
    ],
)
def test_fixes_come_in_the_order_of_their_effect(asked: str, reserved: str, first: str) -> None:
    """Fragmentation is blamed from where the unused reserve is large enough, and the shape from
    where the tensor alone is larger than the GPU."""
    report = report_of(OOM.format(asked=asked, free="1.00 GiB", reserved=reserved))
    assert f"the most effective first: {first}" in report.explanation
    assert f"another {reserved} is reserved and unused" in report.explanation


def test_memory_of_cuda_graphs_does_not_hide_the_figures() -> None:
    """Private pools stand between the two figures in the message."""
    pools = "allocated by PyTorch, with 12.00 MiB allocated in private pools (e.g., CUDA Graphs), "
    message = OOM.format(asked="2.00 GiB", free="1.00 GiB", reserved="2.00 GiB")
    report = report_of(message.replace("allocated by PyTorch, ", pools))
    assert "PyTorch's tensors take 5.56 GiB, another 2.00 GiB is reserved" in report.explanation


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_setting_has_the_name_that_the_release_reads(name: str) -> None:
    """The message itself tells it."""
    message = OOM.format(asked="2.00 GiB", free="1.00 GiB", reserved="2.00 GiB")
    report = report_of(message.replace("PYTORCH_CUDA_ALLOC_CONF", name))
    assert f"first: set {name}=expandable_segments:True" in report.explanation


def test_more_than_any_gpu_has_is_a_matter_of_the_shape() -> None:
    """No batch of a smaller size would fit; 2 GiB of a GPU of unknown size might."""
    message = "CUDA out of memory. Tried to allocate {} memory."
    assert "first: look at the shape" in report_of(message.format("more than 1EB")).explanation
    assert "look at the shape" not in report_of(message.format("2.00 GiB.")).explanation


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (
            "CUDA error: too many resources requested for launch",
            "more blocks, threads or registers",
        ),
        ("CUDA error: invalid configuration argument", "sizes that the GPU does not take"),
    ],
)
def test_a_refused_launch_says_no_more_than_cuda(message: str, what: str) -> None:
    """An empty grid is an invalid configuration too, and not more than the GPU has."""
    assert report_of(message + DSA).headline.startswith(f"a kernel was launched with {what}")


def test_nccl_s_own_last_error_is_quoted() -> None:
    """What NCCL met itself stands in its text; where it quotes nothing, nothing is added."""
    said = "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error, NCCL version 2.27.5"
    known = (
        f"{said}\nncclUnhandledCudaError: Call failed.\nLast error:\nCuda failure 2 'out of memory'"
    )
    assert report_of(known).headline.endswith("reported an error: Cuda failure 2 'out of memory'")
    assert report_of(said).headline.endswith("reported an error")


@pytest.mark.parametrize(
    ("call", "which"), [("torch.cuda.set_device(7)", "cuda:7"), ("x.to(name)", "the requested GPU")]
)
def test_the_number_of_a_gpu_is_that_on_the_line(call: str, which: str) -> None:
    """Read off the call where it is written there."""
    report = report_of("CUDA error: invalid device ordinal" + DSA, call_text=call)
    assert report.headline == f"{which} does not exist for this process"


CELL = """
import torch
big = torch.zeros(256, 1024, device="cuda")
view = big[:2]
kept = [torch.zeros(64, 1024, device="cuda") for _ in range(2)]
small = torch.zeros(3, device="cuda")
on_cpu = torch.zeros(4096, 1024)
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(1, 64, device="cuda")).sum().backward()
optimizer.step()

def train(local):
    raise torch.OutOfMemoryError({message!r})

train(torch.zeros(512, 1024, device="cuda"))
"""


def test_the_largest_holders_are_named_from_metadata(sim: simulate.Simulation) -> None:
    """Variables by name with size, dtype and shape; views, host tensors and ties count once."""
    message = OOM.format(asked="2.00 GiB", free="512.00 MiB", reserved="800.00 MiB")
    report = run_cell(CELL.format(message=message), fast=True).shown
    assert report.kind == "cuda_error"
    assert report.source is not None and report.source.text.startswith("raise torch.OutOf")
    held = report.explanation.partition("The largest that your variables hold: ")[2]
    names = held.partition(".  ")[0].partition(". This is not")[0].split("; ")
    assert names == [
        "local: 2.00 MiB, float32 (512, 1024)",
        "big: 1.00 MiB, float32 (256, 1024)",
        "kept: 512.00 KiB in 2 items",
        "model: 32.50 KiB, parameters and gradients of Linear",
        "optimizer: 32.50 KiB, state of Adam",
    ]
    assert len(names) == MAX_LISTED


def test_a_cell_that_keeps_nothing_gets_no_list(sim: simulate.Simulation) -> None:
    """Nothing on the device, nothing listed."""
    report = run_cell("import torch\nraise torch.OutOfMemoryError('CUDA out of memory.')").shown
    assert "variables hold" not in report.explanation


@pytest.mark.parametrize(
    ("size", "text"),
    [(1023, "1023 B"), (1024, "1.00 KiB"), (2**31, "2.00 GiB"), (2**50, "1024.00 TiB")],
)
def test_sizes_are_spoken_as_torch_does(size: int, text: str) -> None:
    """Binary units with two decimals."""
    assert format_bytes(size) == text


def test_full_memory_has_two_names() -> None:
    """The allocator's and cuBLAS's."""
    assert is_full(OLD_OOM) and is_full(TEXTS["cublas memory"][0])
    assert not is_full(TEXTS["cublas"][0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the text is that of a build without a GPU")
@pytest.mark.parametrize("name", sorted(NO_GPU))
def test_without_a_gpu_the_rehearsal_is_the_next_step(name: str) -> None:
    """Nothing was launched; the simulated device is named."""
    report = report_of(NO_GPU[name])
    assert "Nothing was launched" in report.explanation
    assert "%cudacheck simulate" in report.explanation
