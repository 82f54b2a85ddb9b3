"""CUDA's other errors, from their text alone: what each is, what it is not, what to do next.

PyTorch prints the advice about device-side assertions under all of them.
"""

from __future__ import annotations

import re
from dataclasses import replace

from cudalens.core.report import Evidence
from cudalens.diagnosis.host_errors._base import HostVerdict, cuda, family
from cudalens.diagnosis.host_errors._words import NO_ASSERT

_DEAD = "This process cannot use the GPU again. Next step: restart the kernel and run "
_UNDER_CHECK = "the cell under %%cudacheck, which waits after each op and names the one at fault."
_UNDER_SANITIZER = (
    "the code as a script under NVIDIA's compute-sanitizer, which names the kernel and the address."
)
_WAITED = "The check waited after each op before this call, and none of them had failed."


_NCCL_SAID = re.compile(r"Last error:\s*\n([^\n]+)")
"""What NCCL itself met, in the errors that quote it."""


def _has_waited(evidence: Evidence) -> bool:
    """Return whether the block was checked with a wait after each op."""
    return evidence.synchronization.waits is True


def _dead(evidence: Evidence) -> str:
    """Say that the context is gone, and what finds out more than is known by now."""
    return _DEAD + (_UNDER_SANITIZER if _has_waited(evidence) else _UNDER_CHECK)


@family(r"an illegal memory access was encountered|CUDA_ERROR_ILLEGAL_ADDRESS")
def illegal_access(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A kernel read or wrote memory that is not its own."""
    return cuda(
        "a kernel read or wrote memory that does not belong to it",
        f"{NO_ASSERT} No check fired: a kernel without checks used a bad index, a wrong shape or "
        f"freed memory; custom kernels are the usual place. {_dead(evidence)}",
        "likely" if evidence.op.name else "unknown",
    )


@family(r"(?:CUDA error|\[CUDA\]): misaligned address|CUDA_ERROR_MISALIGNED_ADDRESS")
def misaligned_address(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A kernel used an address that is not a multiple of what it loads."""
    return cuda(
        "a kernel used a misaligned address",
        f"{NO_ASSERT} Nor is it an index beyond the end: a kernel that loads several elements at "
        "once was given memory that starts between them; custom kernels are the usual place. "
        f"{_dead(evidence)}",
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
        f"{NO_ASSERT} Nothing is wrong with the values or shapes. Next step: compare "
        "torch.cuda.get_arch_list() with torch.cuda.get_device_capability(), and install a build "
        "for this GPU.",
        "proven",
    )


@family(
    r"CUDA error: invalid device ordinal|Invalid device id|device=(?P<n>\d+), num_gpus=(?P<m>\d+)"
)
def invalid_device(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A GPU of this number does not exist."""
    written = re.search(r"cuda:(\d+)|\.cuda\((\d+)\)|set_device\((\d+)\)", evidence.call_text or "")
    number = next((item for item in written.groups() if item), None) if written else None
    which = f"cuda:{number}" if number else "the asked GPU"
    return cuda(
        f"{which} does not exist for this process",
        f"{NO_ASSERT} The context is intact. Devices are counted from 0 among those that "
        "CUDA_VISIBLE_DEVICES leaves visible. Next step: ask torch.cuda.device_count() how many "
        "there are.",
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
        f"{NO_ASSERT} Nothing was launched. Next step: to try the cell without a GPU, turn on "
        "the rehearsal with %cudacheck simulate or cudalens.simulate() before it.",
        "proven",
    )
    return replace(found, has_device=False)


@family(r"The NVIDIA driver on your system is too old|CUDA driver version is insufficient")
def old_driver(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """The driver is older than the CUDA version of the build."""
    return cuda(
        "the NVIDIA driver is older than the CUDA version that PyTorch was built for",
        f"{NO_ASSERT} Nothing is wrong with the code. Next step: renew the driver, or install a "
        "PyTorch build for the CUDA version that it knows.",
        "proven",
    )


@family(
    r"NCCL (?:error|Error|communicator)|ncclInternalError|ncclUnhandledCudaError|ProcessGroupNCCL"
)
def nccl(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """The library that talks between GPUs gave up."""
    said = _NCCL_SAID.search(match.string)
    what = f": {said[1].strip()}" if said else ""
    return cuda(
        f"NCCL, which carries tensors between GPUs, reported an error{what}",
        f"{NO_ASSERT} Nor is it often the cause: another rank that failed or waits elsewhere "
        "shows here as an error or a timeout. Next step: look for the first rank that reported "
        "something else.",
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
    if _has_waited(evidence):
        reason = _WAITED
        step = "look at torch.cuda.memory_summary()" if memory else "look at the shapes and dtypes"
    else:
        reason = (
            "Full memory is a common reason; an assert of an earlier op is another."
            if memory
            else "An assert or illegal access of an earlier op often shows here first."
        )
        step = "run the cell under %%cudacheck, which waits for each op"
    return cuda(
        f"a library of CUDA's failed with {status}",
        f"The status itself is no device-side assert, and the call on this line is not proven to "
        f"be wrong. {reason} Next step: {step}.",
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
        f"{NO_ASSERT} No check fired: invalid memory use in a custom kernel is the usual cause, "
        f"a faulty GPU a rare one. {_dead(evidence)}",
        "likely" if evidence.op.name else "unknown",
    )


@family(r"the launch timed out and was terminated")
def launch_timeout(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A kernel ran longer than the system lets a kernel run."""
    return cuda(
        "a kernel ran too long and was ended by the system",
        f"{NO_ASSERT} A loop that does not end in a custom kernel is the usual cause, or a GPU "
        f"that also drives a display. {_dead(evidence)}",
        "likely" if evidence.op.name else "unknown",
    )


@family(r"CUDA error: too many resources requested for launch|invalid configuration argument")
def launch_refused(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A kernel was launched with sizes that the device does not take."""
    beyond = "more blocks, threads or registers than the GPU has"
    what = beyond if "resources" in match[0] else "sizes that the GPU does not take"
    return cuda(
        f"a kernel was launched with {what}",
        f"{NO_ASSERT} The context is intact. Empty or very large tensors and custom kernels are "
        "the usual causes. Next step: look at the shapes on this line.",
        "likely",
    )


@family(r"Cannot re-initialize CUDA in forked subprocess")
def forked(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """A worker process was forked from one that uses CUDA, and uses it too."""
    return cuda(
        "a forked worker process uses CUDA, which its parent had started",
        f"{NO_ASSERT} A CUDA context does not survive a fork. Next step: let the dataset return "
        "CPU tensors and move the batch afterwards.",
        "proven",
    )


@family(r"all CUDA-capable devices are busy or unavailable")
def device_busy(evidence: Evidence, match: re.Match[str]) -> HostVerdict:
    """No context can be made on the GPU."""
    return cuda(
        "CUDA could not start on the GPU: it is busy or unavailable",
        f"{NO_ASSERT} Nothing of this process was launched. Next step: see in nvidia-smi whether "
        "another process has the GPU for itself (compute mode), or the GPU reports an error.",
        "proven",
    )


@family(
    r"^(?:CUDA error|CUDA driver error|Triton Error \[CUDA\]): (?!out of memory)(?P<what>[^\n]+)"
)
def other_cuda_error(evidence: Evidence, match: re.Match[str]) -> HostVerdict | None:
    """Another error of CUDA's."""
    if "device-side assert" in match["what"]:
        return None
    rest = (
        f"{_WAITED} Next step: look at the arguments on this line."
        if _has_waited(evidence)
        else "Calls run asynchronously, so an earlier op can be the cause. Next step: run the cell "
        "under %%cudacheck, which waits for each op."
    )
    return cuda(f"CUDA reported: {match['what']}", f"{NO_ASSERT} {rest}", "unknown")
