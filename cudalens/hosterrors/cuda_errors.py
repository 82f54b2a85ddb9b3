"""CUDA's other errors, from their text alone: what each is, what it is not, what to do next.

PyTorch prints the advice about device-side assertions under all of them.
"""

from __future__ import annotations

import re
from dataclasses import replace

from cudalens.hosterrors._base import HostVerdict, cuda, family
from cudalens.model import Evidence

_DEAD = (
    "This process cannot use the GPU again: restart the kernel and run the cell under %%cudacheck, "
    "which names the op."
)
_NO_ASSERT = "It is no device-side assert; the advice about TORCH_USE_CUDA_DSA does not help."


@family(
    r"CUDA out of memory\.(?: Tried to allocate (?P<asked>[\d.]+ \w+)\.)?"
    r"(?:.*?has a total capacity of (?P<total>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free)?"
    r"(?:.*?Of the allocated memory (?P<used>[\d.]+ \w+) is allocated by PyTorch, and "
    r"(?P<reserved>[\d.]+ \w+) is reserved by PyTorch but unallocated)?"
)
def out_of_memory(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """The device has no room for a tensor."""
    asked, free, total = match["asked"], match["free"], match["total"]
    headline = "the GPU has no room" + (f" for {asked}" if asked else "")
    if free and total:
        headline += f": {free} of {total} is free"
    parts = []
    if match["used"]:
        parts.append(
            f"PyTorch's tensors take {match['used']}, another {match['reserved']} is reserved and "
            "unused."
        )
    parts.append(f"{_NO_ASSERT} The context is intact: free tensors and go on.")
    return cuda(
        headline, " ".join(parts), "proven", asked=asked, free=free, reserved=match["reserved"]
    )


@family(r"CUDA error: an illegal memory access was encountered|CUDA_ERROR_ILLEGAL_ADDRESS")
def illegal_access(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A kernel read or wrote memory that is not its own."""
    return cuda(
        "a kernel read or wrote memory that does not belong to it",
        "It is no assert: no check fired, so a kernel without checks used a bad index, a wrong "
        "shape "
        f"or freed memory; custom kernels are the usual place. {_DEAD}",
        "likely" if evidence.op.name else "unknown",
    )


@family(r"CUDA error: misaligned address|CUDA_ERROR_MISALIGNED_ADDRESS")
def misaligned_address(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A kernel used an address that is not a multiple of what it loads."""
    return cuda(
        "a kernel used a misaligned address",
        "It is no assert and no index beyond the end: a kernel that loads several elements at once "
        f"was given memory that starts between them; custom kernels are the usual place. {_DEAD}",
        "likely" if evidence.op.name else "unknown",
    )


@family(
    r"no kernel image is available for execution on the device"
    r"|CUDA error: device kernel image is invalid"
    r"|(?:is|are) not compatible with the current PyTorch installation"
)
def no_kernel_image(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """The installed build has no code for this GPU."""
    return cuda(
        "this build of PyTorch, or of an extension, holds no code for this GPU",
        "Nothing is wrong with the values or shapes. torch.cuda.get_arch_list() shows for which "
        "GPUs "
        "the build was made, torch.cuda.get_device_capability() what this one is.",
        "proven",
    )


@family(
    r"CUDA error: invalid device ordinal|Invalid device id|device=(?P<n>\d+), num_gpus=(?P<m>\d+)"
)
def invalid_device(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A GPU of this number does not exist."""
    written = re.search(r"cuda:(\d+)|\.cuda\((\d+)\)", evidence.call_text or "")
    number = next((item for item in written.groups() if item), None) if written else None
    which = f"cuda:{number}" if number else "the asked GPU"
    return cuda(
        f"{which} does not exist for this process",
        "Devices are counted from 0 among those that CUDA_VISIBLE_DEVICES leaves visible; "
        "torch.cuda.device_count() says how many. It is no assert, and the context is intact.",
        "proven",
        number=number,
    )


@family(
    r"Torch not compiled with CUDA enabled|Found no NVIDIA driver on your system"
    r"|No CUDA GPUs are available|CUDA error: no CUDA-capable device is detected"
    r"|Attempting to deserialize object on a CUDA device"
    r"|Could not run '[\w:.]+' with arguments from the 'CUDA' backend"
)
def no_gpu(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """There is no GPU, or no build that can use one."""
    reason = (
        "this build of PyTorch was made without CUDA"
        if "not compiled" in match[0]
        else "there is no GPU that this process can use"
    )
    found = cuda(
        f"CUDA was asked for, and {reason}",
        "Nothing was launched. To try the cell without a GPU, turn on the rehearsal with "
        "%cudacheck simulate or cudalens.simulate() before it.",
        "proven",
    )
    return replace(found, has_device=False)


@family(r"The NVIDIA driver on your system is too old|CUDA driver version is insufficient")
def old_driver(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """The driver is older than the CUDA version of the build."""
    return cuda(
        "the NVIDIA driver is older than the CUDA version that PyTorch was built for",
        "Nothing is wrong with the code. Until the driver is renewed, the rehearsal can be turned "
        "on "
        "with %cudacheck simulate or cudalens.simulate().",
        "proven",
    )


@family(
    r"NCCL (?:error|Error|communicator)|ncclInternalError|ncclUnhandledCudaError|ProcessGroupNCCL"
)
def nccl(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """The library that talks between GPUs gave up."""
    return cuda(
        "NCCL, which carries tensors between GPUs, reported an error",
        "It is seldom the cause: another rank that failed or waits elsewhere shows here as an "
        "error "
        "or a timeout. Look for the first rank that reported something else.",
        "unknown",
    )


@family(
    r"CUBLAS_STATUS_(?P<blas>\w+)|CUDNN_STATUS_(?P<dnn>\w+)|cuDNN error: (?P<dnn2>\w+)"
    r"|CUSPARSE_STATUS_(?P<sparse>\w+)|CUSOLVER_STATUS_(?P<solver>\w+)|CUFFT_(?P<fft>\w+)"
)
def library_status(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A library of CUDA's failed, which an earlier fault often causes."""
    status = match[0].removeprefix("cuDNN error: ")
    memory = "ALLOC_FAILED" in status or "NOT_INITIALIZED" in status
    reason = (
        "Full memory is a common reason; an assert of an earlier op is another."
        if memory
        else "An assert or illegal access of an earlier op often shows here first."
    )
    return cuda(
        f"a library of CUDA's failed with {status}",
        f"{reason} The call on this line is not proven to be wrong: run the cell under "
        "%%cudacheck, "
        "which waits for each op.",
        "unknown",
        status=status,
        is_memory=memory,
    )


@family(
    r"unspecified launch failure|CUDA error: launch failure|CUDA_ERROR_LAUNCH_FAILED"
    r"|illegal instruction was encountered|hardware stack error|invalid program counter"
    r"|uncorrectable (?:ECC|NVLink) error"
)
def launch_failure(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A kernel was ended by the hardware."""
    return cuda(
        f"a kernel was ended by the hardware: {match[0].removeprefix('CUDA error: ')}",
        "It is no assert: no check fired. Invalid memory use in a custom kernel is the usual "
        "cause, "
        f"a faulty GPU a rare one. {_DEAD}",
        "likely" if evidence.op.name else "unknown",
    )


@family(r"CUDA error: too many resources requested for launch|invalid configuration argument")
def launch_refused(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A kernel was launched with sizes that the device does not take."""
    return cuda(
        "a kernel was launched with more blocks, threads or registers than the GPU has",
        f"{_NO_ASSERT} Empty or very large tensors and custom kernels are the usual causes. The "
        "context is intact.",
        "likely",
    )


@family(r"Cannot re-initialize CUDA in forked subprocess")
def forked(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A worker process was forked from one that uses CUDA, and uses it too."""
    return cuda(
        "a forked worker process uses CUDA, which its parent had started",
        "A CUDA context does not survive a fork. Let the dataset return CPU tensors and move the "
        "batch afterwards.",
        "proven",
    )


@family(r"^CUDA error: (?P<what>[^\n]+)")
def other_cuda_error(evidence: Evidence, match: re.Match[str]) -> HostVerdict | None:
    """Another error of CUDA's."""
    if "device-side assert" in match["what"]:
        return None
    return cuda(
        f"CUDA reported: {match['what']}",
        f"{_NO_ASSERT} Calls run asynchronously, so an earlier op can be the cause.",
        "unknown",
    )
