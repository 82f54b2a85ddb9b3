"""CUDA's other errors, from their real texts: what each is, what it is not, and one next step."""

from __future__ import annotations

import pytest

from cudalens.core.evidence_types import Synchronization
from cudalens.core.report import ErrorFacts, Evidence, Report
from cudalens.core.report_types import OpName
from cudalens.diagnosis.diagnose import diagnose
from cudalens.diagnosis.host_errors import is_sticky, table
from cudalens.evidence.memory import is_full
from tests.hint_evidence import syntax_of
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


def raised(text: str, code: str = "") -> str:
    """Return an error of CUDA's with what PyTorch prints under it."""
    return f"CUDA error: {text}{SEARCH.format(code) if code else ''}{DSA}"


NCCL = "NCCL error in: ProcessGroupNCCL.cpp:2044, unhandled cuda error, NCCL version 2.21.5"
NCCL_ENDS = f"{NCCL}\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
ILLEGAL = raised("an illegal memory access was encountered", "cudaErrorIllegalAddress")
MISALIGNED = raised("misaligned address", "cudaErrorMisalignedAddress")
LAUNCH = raised("unspecified launch failure", "cudaErrorLaunchFailure")
CUBLAS = (
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, "
    "k, &alpha, a, lda, b, ldb, &beta, c, ldc)`"
)
CUBLAS_MEMORY = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
OTHER = raised("operation not supported")

# The family that knows it, whether the context is still usable (None without a device), how certain
# it is, the headline, and the texts, as torch gives them, that it stands over.
ROWS: list[tuple[str, bool | None, str, str, *tuple[str, ...]]] = [
    ("out_of_memory", True, "proven",
     "the GPU has no room for 20.00 GiB: 8.81 GiB of 14.75 GiB is free",
     OOM.format(asked="20.00 GiB", free="8.81 GiB", reserved="250.58 MiB")),
    ("out_of_memory", True, "proven",
     "the GPU has no room for 2.00 GiB: 512.00 MiB of 14.75 GiB is free",
     OOM.format(asked="2.00 GiB", free="512.00 MiB", reserved="800.00 MiB")),
    ("out_of_memory", True, "proven",
     "the GPU has no room for 20.00 MiB: 15.44 MiB of 10.76 GiB is free", OLD_OOM),
    ("out_of_memory", True, "proven",
     "the GPU has no room for 2.00 GiB: 1.00 GiB of 14.75 GiB is free", ASYNC_OOM),
    ("out_of_memory", True, "proven", "the GPU has no room", "CUDA out of memory."),
    ("out_of_memory", True, "proven", "the GPU has no room for more than 1EB",
     "CUDA out of memory. Tried to allocate more than 1EB memory."),
    ("memory_fraction", True, "proven", "the process has no room for 2.00 GiB below its own limit",
     "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
     "per_process_memory_fraction limit. Requested size: 2.00 GiB"),
    ("memory_fraction", True, "proven", "the process has no room below its own limit",
     "Allocation was preemptively rejected because it would exceed per_process_memory_fraction "
     "limit. Requested size: unknown"),
    ("illegal_access", False, "unknown", "a kernel read or wrote memory that does not belong to it",
     ILLEGAL, "Triton Error [CUDA]: an illegal memory access was encountered"),
    ("misaligned_address", False, "unknown", "a kernel used a misaligned address", MISALIGNED,
     "Triton Error [CUDA]: misaligned address"),
    ("no_kernel_image", True, "proven",
     "this build of PyTorch, or of an extension, has no code for this GPU",
     raised("no kernel image is available for execution on the device"),
     "NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current "
     "PyTorch installation."),
    ("invalid_device", True, "proven", "the requested GPU does not exist for this process",
     raised("invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?")),
    ("old_driver", True, "proven",
     "the NVIDIA driver is older than the CUDA version that PyTorch was built for",
     "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
     "driver by downloading and installing a new version from the URL: "
     "http://www.nvidia.com/Download/index.aspx",
     "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before "
     "calling NumCudaDevices() that might have already set an error? Error 35: CUDA driver version "
     "is insufficient for CUDA runtime version"),
    ("nccl", False, "unknown",
     "CUDA reported a device-side assert, and no recorded op can be blamed for it",
     f"{NCCL_ENDS}Cuda failure 710 'device-side assert triggered'"),
    ("nccl", True, "unknown",
     "NCCL, which carries tensors between GPUs, reported an error: Cuda failure 2 'out of memory'",
     f"{NCCL_ENDS}Cuda failure 2 'out of memory'"),
    ("nccl", True, "unknown", "NCCL, which carries tensors between GPUs, reported an error", NCCL,
     "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE"
     ") ran for 600000 milliseconds before timing out. ProcessGroupNCCL"),
    ("library_status", True, "unknown",
     "a library of CUDA's failed with CUBLAS_STATUS_EXECUTION_FAILED", CUBLAS),
    ("library_status", True, "unknown",
     "a library of CUDA's failed with CUBLAS_STATUS_ALLOC_FAILED", CUBLAS_MEMORY),
    ("library_status", True, "unknown",
     "a library of CUDA's failed with CUDNN_STATUS_EXECUTION_FAILED",
     "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ("launch_failure", False, "unknown",
     "a kernel was ended by the hardware: unspecified launch failure", LAUNCH),
    ("address_space", False, "unknown", "a kernel used an address of another kind of memory",
     raised("operation not supported on global/shared address space")),
    ("capture", True, "proven", "a call is not allowed while a CUDA graph is captured",
     raised("operation not permitted when stream is capturing"),
     raised("operation failed due to a previous error during capture")),
    ("fabric_manager", True, "proven",
     "CUDA could not start: the system of GPUs is not initialized",
     raised("system not yet initialized")),
    ("no_function", True, "proven",
     "the GPU was given a kernel that its program does not have",
     raised("invalid device function")),
    ("ptx", True, "proven",
     "the NVIDIA driver could not compile a kernel: a PTX JIT compilation failed",
     raised("a PTX JIT compilation failed")),
    ("launch_timeout", False, "unknown", "a kernel ran too long and was ended by the system",
     raised("the launch timed out and was terminated", "cudaErrorLaunchTimeout")),
    ("launch_refused", True, "likely",
     "a kernel was launched with more blocks, threads or registers than the GPU has",
     raised("too many resources requested for launch")),
    ("launch_refused", True, "likely",
     "a kernel was launched with sizes that the GPU does not take",
     raised("invalid configuration argument")),
    ("forked", True, "proven", "a forked worker process uses CUDA, which its parent had started",
     "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must"
     " use the 'spawn' start method"),
    ("other_cuda_error", True, "unknown", "CUDA reported: operation not supported", OTHER),
    ("other_cuda_error", True, "unknown", "CUDA reported: invalid argument",
     "CUDA driver error: invalid argument", "Triton Error [CUDA]: invalid argument"),
    ("other_cuda_error", True, "unknown", "CUDA reported: initialization error",
     raised("initialization error")),
    ("memory_refused", True, "likely", "CUDA could not allocate memory for itself",
     raised("out of memory"), "CUDA driver error: out of memory"),
    ("device_busy", True, "proven", "CUDA could not start on the GPU: it is busy or unavailable",
     raised("all CUDA-capable devices are busy or unavailable")),
    ("no_gpu", None, "proven", "CUDA is not available: there is no GPU that this process can use",
     "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and "
     "installed a driver from http://www.nvidia.com/Download/index.aspx",
     "No CUDA GPUs are available"),
    ("no_gpu", None, "proven",
     "CUDA is not available: this build of PyTorch was made without CUDA",
     "Torch not compiled with CUDA enabled"),
    ("no_gpu", None, "proven",
     "CUDA is not available: Error 804: forward compatibility was attempted on non supported HW",
     "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
     "NumCudaDevices() that might have already set an error? Error 804: forward compatibility was "
     "attempted on non supported HW"),
    ("no_gpu", None, "proven", "CUDA is not available: there is no GPU that this process can use",
     "Unexpected error from cudaGetDeviceCount()"),
]  # fmt: skip
TEXTS = [(*row[:4], text) for row in ROWS for text in row[4:]]


def report_of(message: str, type_name: str = "RuntimeError", **known: object) -> Report:
    """Diagnose an error from its text alone."""
    error = ErrorFacts(type_name=type_name, message=message)
    usable = not is_sticky(message)
    return diagnose(Evidence(error=error, context_usable=usable, **known))  # type: ignore[arg-type]


@pytest.mark.parametrize(("family", "usable", "certainty", "headline", "message"), TEXTS)
def test_a_text_is_told_from_the_others(
    family: str, usable: bool | None, certainty: str, headline: str, message: str
) -> None:
    """By the text alone; PyTorch's advice about assertions is under all, and helps with none."""
    assert next(item.name for item in table() if item.regex.search(message)) == family
    report = report_of(message)
    found = (report.context_usable, report.certainty, report.headline_schema)
    assert found == (usable, certainty, headline)
    if "device-side assert triggered" in message:
        return  # the status of NCCL that quotes an assert is one
    told = report.explanation
    assert report.kind == "cuda_error" and "assert" not in report.headline_schema
    assert "not a device-side assert" in told and told.count("Next step") == 1
    assert ("TORCH_USE_CUDA_DSA under it does not help" in told) is (DSA in message)
    assert ("restart the kernel" in told) is (usable is False)
    if family in {"memory_fraction", "out_of_memory", "invalid_device", "launch_refused"}:
        assert "The context is intact." in told
    assert told.find("not a device-side assert") < told.find("Next step")
    assert ("Nothing was launched. Next" in told) is (family == "no_gpu")
    assert ("%cudacheck simulate or cudalens.simulate()" in told) is (family == "no_gpu")


COUNTING = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
    "NumCudaDevices() that might have already set an error? Error {}"
)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        ("802: system not yet initialized", "whether the service nvidia-fabricmanager runs"),
        ("803: system has unsupported display driver / cuda driver combination", "restart the mac"),
        ("804: forward compatibility was attempted on non supported HW", "cuda-compat package"),
        ("999: unknown error", "Next step: to try the cell without a GPU"),
    ],
)
def test_a_system_that_is_not_ready_is_mended_before_it_is_rehearsed(
    number: str, words: str
) -> None:
    told = report_of(COUNTING.format(number)).explanation
    assert words in told
    assert told.endswith("turn on the rehearsal with %cudacheck simulate or cudalens.simulate() "
                         "before it.")  # fmt: skip


def test_an_assert_is_none_of_these() -> None:
    """Its text leads to the explanation of asserts, whatever error code came with it."""
    report = report_of(raised("device-side assert triggered", "cudaErrorAssert"))
    assert (report.kind, report.context_usable) == ("device_assert", False)
    assert "not a device-side assert" not in report.explanation


@pytest.mark.parametrize("message", [ILLEGAL, MISALIGNED, LAUNCH])
@pytest.mark.parametrize(("op", "certainty"), [("mylib::gather", "likely"), (None, "unknown")])
def test_a_fault_is_as_certain_as_its_op(message: str, op: str | None, certainty: str) -> None:
    """Never proven: no value is known to be wrong."""
    assert report_of(message, op=OpName(name=op)).certainty == certainty
    unwaited = Synchronization(is_op_unwaited=True)  # an op before it may have failed
    found = report_of(message, op=OpName(name=op), synchronization=unwaited)
    assert found.certainty == "unknown"


@pytest.mark.parametrize("message", [ILLEGAL, CUBLAS, CUBLAS_MEMORY, OTHER])
def test_a_check_that_waited_is_not_recommended_again(message: str) -> None:
    """Without one it is the next step; within one another is, and no earlier op is blamed."""
    for waits in (None, False):
        known = Synchronization(waits=waits)
        assert "under %%cudacheck" in report_of(message, synchronization=known).explanation
    checked = report_of(message, synchronization=Synchronization(waits=True)).explanation
    assert "%%cudacheck" not in checked and "earlier op" not in checked
    assert checked.count("Next step") == (message != OTHER)  # nothing is known of that one


@pytest.mark.parametrize(
    ("status", "is_memory"),
    [("ALLOC_FAILED", True), ("NOT_INITIALIZED", True), ("EXECUTION_FAILED", False)],
)
def test_a_library_without_memory(status: str, is_memory: bool) -> None:
    message = f"CUDA error: CUBLAS_STATUS_{status} when calling `f(handle)`"
    assert ("Full memory is a common" in report_of(message).explanation) is is_memory
    waited = report_of(message, synchronization=Synchronization(waits=True)).explanation
    step = "torch.cuda.memory_summary()" if is_memory else "the shapes and dtypes"
    assert waited.endswith(f"Next step: look at {step}.")


@pytest.mark.parametrize(("options", "waits"), [({}, True), ({"sync": False}, False)])
@pytest.mark.usefixtures("sim")
def test_a_checked_cell_knows_whether_it_waited(options: dict[str, bool], waits: bool) -> None:
    """The recorder tells; with --no-sync an earlier op can still be the cause."""
    code = "import torch\nraise torch.AcceleratorError('CUDA error: unknown error')"
    report = run_cell(code, fast=False, **options).shown
    assert ("The check waited" in report.explanation) is waits


# --- out of memory --------------------------------------------------------------------------------


def full(asked: str, reserved: str, was: str = "", now: str = "") -> str:
    """Return what PyTorch says of full memory, one piece of it replaced."""
    return OOM.format(asked=asked, free="1.00 GiB", reserved=reserved).replace(was, now)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        # Fragmentation is blamed from where the unused reserve is large enough, the shape from
        # where the tensor alone is larger than the GPU.
        (full("2.00 GiB", "1.99 GiB"), "another 1.99 GiB is reserved and unused"),
        (full("2.00 GiB", "1.99 GiB"), "the most effective first: make the batch smaller"),
        (full("2.00 GiB", "2.00 GiB"),
         "first: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        (full("14.75 GiB", "1.00 MiB"), "first: make the batch smaller"),
        (full("14.76 GiB", "1.00 MiB"), "first: look at the shape: this one tensor is larger than "
         "the whole GPU, make the batch smaller or the sequences shorter, evaluate under"),
        # No batch of a smaller size would fit; 2 GiB of a GPU of unknown size might.
        ("CUDA out of memory. Tried to allocate more than 1EB memory.", "first: look at the shape"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", "first: make the batch smaller"),
        # The message itself tells the name of the setting that the release reads.
        (full("2.00 GiB", "2.00 GiB", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
         "first: set PYTORCH_ALLOC_CONF=expandable_segments:True"),
        # Private pools stand between the two figures in the message.
        (full("2.00 GiB", "2.00 GiB", "allocated by PyTorch, ", "allocated by PyTorch, with 12.00 "
              "MiB allocated in private pools (e.g., CUDA Graphs), "),
         "PyTorch's tensors take 5.56 GiB, another 2.00 GiB is reserved"),
    ],
)  # fmt: skip
def test_fixes_come_in_the_order_of_their_effect(message: str, says: str) -> None:
    """By the figures of the message."""
    assert says in report_of(message).explanation


@pytest.mark.parametrize(
    ("call", "which"), [("torch.cuda.set_device(7)", "cuda:7"), ("x.to(name)", "the requested GPU")]
)
def test_the_number_of_a_gpu_is_that_on_the_line(call: str, which: str) -> None:
    """Read off the call where it is written there."""
    report = report_of("CUDA error: invalid device ordinal" + DSA, call=syntax_of(call))
    assert report.headline_schema == f"{which} does not exist for this process"


def test_full_memory_has_two_names() -> None:
    """The allocator's and cuBLAS's."""
    assert is_full(OLD_OOM) and is_full(CUBLAS_MEMORY)
    assert not is_full(CUBLAS)
