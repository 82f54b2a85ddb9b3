"""CUDA's own errors, from their text alone: what each is, what it is not, what to do next.

PyTorch prints the advice about device-side assertions under all of them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from cudalens.core.report import Evidence
from cudalens.diagnosis.host_errors._base import NO_ASSERT, Answer, cuda, groups, pattern, row
from cudalens.diagnosis.host_errors._words import LIBRARY_STATUS, NO_GPU, OLD_DRIVER

_WAITED = "The check waited after each op before this call, and none of them had failed."
_NCCL_ERROR = re.compile(r"Last error:\s*\n([^\n]+)")
"""NCCL's own error, in the errors that quote it."""
cuda_row = partial(row, kind="cuda_error")

cuda_row(
    "illegal_access",
    r"an illegal memory access was encountered|CUDA_ERROR_ILLEGAL_ADDRESS",
    "a kernel read or wrote memory that does not belong to it",
    "No check fired: a kernel without checks used a bad index, a wrong shape or freed memory. "
    "Custom kernels are the usual place. {is_lost}",
    certainty=None,
)
cuda_row(
    "misaligned_address",
    r"(?:CUDA error|\[CUDA\]): misaligned address|CUDA_ERROR_MISALIGNED_ADDRESS",
    "a kernel used a misaligned address",
    "Nor is it an index beyond the end: a kernel that loads several elements at once was given "
    "memory that starts between them. Custom kernels are the usual place. {is_lost}",
    certainty=None,
)
cuda_row(
    "no_kernel_image",
    r"no kernel image is available for execution on the device"
    r"|CUDA error: device kernel image is invalid"
    r"|(?:is|are) not compatible with the current PyTorch installation",
    "this build of PyTorch, or of an extension, has no code for this GPU",
    "Nothing is wrong with the values or shapes. Next step: compare torch.cuda.get_arch_list() "
    "with torch.cuda.get_device_capability(), and install a build for this GPU.",
)


@pattern(
    r"CUDA error: invalid device ordinal|Invalid device id|device=(?P<n>\d+), num_gpus=(?P<m>\d+)"
)
def invalid_device(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A GPU of this number does not exist."""
    written = re.search(r"cuda:(\d+)|\.cuda\((\d+)\)|set_device\((\d+)\)", evidence.call_text or "")
    number = next((item for item in written.groups() if item), None) if written else None
    which = f"cuda:{number}" if number else "the requested GPU"
    yield cuda(
        f"{which} does not exist for this process",
        "The context is intact. Devices are counted from 0 among those that CUDA_VISIBLE_DEVICES "
        "leaves visible. Next step: see how many torch.cuda.device_count() reports.",
        certainty="proven",
    )


cuda_row(
    "old_driver",
    OLD_DRIVER,
    "the NVIDIA driver is older than the CUDA version that PyTorch was built for",
    "Nothing is wrong with the code. Next step: update the driver, or install a PyTorch build for "
    "the CUDA version that it supports.",
)


_AT_THE_START = {
    "802": "see whether the service nvidia-fabricmanager runs, in the driver's own release: it has "
    "to where GPUs are joined by NVSwitch",
    "803": "restart the machine, so that the loaded driver and its libraries are of one release",
    "804": "update the driver, or leave the folder of the cuda-compat package out of "
    "LD_LIBRARY_PATH: its libcuda.so works with data center GPUs alone",
}
"""What to do about an error of the system with which CUDA refuses to count the GPUs."""


@pattern(NO_GPU)
def no_gpu(evidence: Evidence, match: re.Match[str]) -> Answer:
    """There is no GPU, or no build that can use one."""
    reason = match["reported"] or (
        "this build of PyTorch was made without CUDA"
        if "not compiled" in match[0]
        else "there is no GPU that this process can use"
    )
    number = re.match(r"Error (\d+)", reason)
    step = _AT_THE_START.get(number[1] if number else "")
    rehearse = "to try the {code} without a GPU, turn on the rehearsal with {rehearse} before it"
    advice = f"{step}. T{rehearse[1:]}" if step else rehearse
    verdict = cuda(
        f"CUDA is not available: {reason}",
        evidence.steps.fill(f"Nothing was launched. Next step: {advice}."),
        certainty="proven",
    )
    yield replace(verdict, context_usable=None)


@pattern(
    r"NCCL (?:error|Error|communicator)|ncclInternalError|ncclUnhandledCudaError|ProcessGroupNCCL"
)
def nccl(evidence: Evidence, match: re.Match[str]) -> Answer:
    """The library that talks between GPUs gave up."""
    quoted = _NCCL_ERROR.search(match.string)
    what = f": {quoted[1].strip()}" if quoted else ""
    yield cuda(
        f"NCCL, which carries tensors between GPUs, reported an error{what}",
        "Nor is it often the cause: another rank that failed or waits elsewhere shows here as an "
        "error or a timeout. Next step: look for the first rank that reported something else.",
        certainty="unknown",
    )


@pattern(LIBRARY_STATUS)
def library_status(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A library of CUDA's failed, which an earlier fault often causes."""
    status = match[0].removeprefix("cuDNN error: ")
    is_memory = "ALLOC_FAILED" in status or "NOT_INITIALIZED" in status
    if evidence.synchronization.waits:
        reason = _WAITED
        step = (
            "look at torch.cuda.memory_summary()" if is_memory else "look at the shapes and dtypes"
        )
    else:
        reason = (
            "Full memory is a common reason. An assert of an earlier op is another."
            if is_memory
            else "An assert or illegal access of an earlier op often shows here first."
        )
        step = f"{evidence.steps.check}, which waits for each op"
    yield cuda(
        f"a library of CUDA's failed with {status}",
        f"and the call on this line is not proven to be wrong. {reason} Next step: {step}.",
        certainty="unknown",
        text="The status itself is not a device-side assert,",
    )


cuda_row(
    "launch_failure",
    r"unspecified launch failure|CUDA error: launch failure|CUDA_ERROR_LAUNCH_FAILED"
    r"|illegal instruction was encountered|hardware stack error|invalid program counter"
    r"|uncorrectable (?:ECC|NVLink) error",
    "a kernel was ended by the hardware: {match}",
    "No check fired: invalid memory use in a custom kernel is the usual cause, a faulty GPU a rare "
    "one. {is_lost}",
    certainty=None,
)
cuda_row(
    "launch_timeout",
    r"the launch timed out and was terminated",
    "a kernel ran too long and was ended by the system",
    "A loop that does not end in a custom kernel is the usual cause, or a GPU that also drives a "
    "display. {is_lost}",
    certainty=None,
)


@pattern(r"CUDA error: too many resources requested for launch|invalid configuration argument")
def launch_refused(evidence: Evidence, match: re.Match[str]) -> Answer:
    """A kernel was launched with sizes that the device does not take."""
    beyond = "more blocks, threads or registers than the GPU has"
    what = beyond if "resources" in match[0] else "sizes that the GPU does not take"
    yield cuda(
        f"a kernel was launched with {what}",
        "The context is intact. Empty or very large tensors and custom kernels are the usual "
        "causes. Next step: look at the shapes on this line.",
    )


cuda_row(
    "forked",
    r"Cannot re-initialize CUDA in forked subprocess",
    "a forked worker process uses CUDA, which its parent had started",
    "A CUDA context does not survive a fork. Next step: let the dataset return CPU tensors and "
    "move the batch afterwards.",
)
cuda_row(
    "device_busy",
    r"CUDA-capable device(?:s are|\(s\) is/are) busy or unavailable",
    "CUDA could not start on the GPU: it is busy or unavailable",
    "Nothing of this process was launched. Next step: see in nvidia-smi whether another process "
    "has the GPU for itself (compute mode), or the GPU reports an error.",
)
cuda_row(
    "capture",
    r"CUDA error: operation (?:not permitted when stream is capturing|failed due to a previous "
    r"error during capture)",
    "a call is not allowed while a CUDA graph is captured",
    "During a capture no call may wait for the device, read a value on the CPU or allocate device "
    "memory past the graph's own. The capture has ended. Next step: move the call out of the "
    "torch.cuda.graph block.",
)
cuda_row(
    "fabric_manager",
    r"CUDA error: system not yet initialized",
    "CUDA could not start: the system of GPUs is not initialized",
    "Nothing of this process was launched, and nothing is wrong with the code. On machines whose "
    "GPUs are joined by NVSwitch the service nvidia-fabricmanager has to run. Next step: see "
    "whether it runs, in the driver's own release.",
)
cuda_row(
    "no_function",
    r"CUDA error: invalid device function",
    "the GPU was given a kernel that its program does not have",
    "Nothing is wrong with the values or shapes: PyTorch or an extension was built for other GPUs "
    "or for another CUDA. Next step: compare torch.cuda.get_arch_list() with "
    "torch.cuda.get_device_capability(), and build the extension anew.",
)
cuda_row(
    "ptx",
    r"CUDA error: a PTX JIT compilation failed"
    r"|CUDA error: the provided PTX was compiled with an unsupported toolchain",
    "the NVIDIA driver could not compile a kernel: {match}",
    "Nothing is wrong with the values or shapes: the driver is older than the CUDA version that "
    "PyTorch or an extension was built with, or the extension was built for another GPU. Next "
    "step: update the driver, or install a build for the CUDA version that it supports.",
)
cuda_row(
    "address_space",
    r"operation not supported on global/shared address space|CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "a kernel used an address of another kind of memory",
    "No check fired: a custom kernel is the usual place. {is_lost}",
    certainty=None,
)


@pattern(
    r"^(?:CUDA error|CUDA driver error|Triton Error \[CUDA\]): (?!out of memory)(?P<what>[^\n]+)"
)
def other_cuda_error(evidence: Evidence, match: re.Match[str]) -> Answer:
    """Another error of CUDA's."""
    rest = (
        _WAITED
        if evidence.synchronization.waits
        else "Calls run asynchronously, so an earlier op can be the cause. Next step: "
        f"{evidence.steps.check}, which waits for each op."
    )
    yield cuda(f"CUDA reported: {match['what']}", rest, certainty="unknown")


# --- memory that the device does not have --------------------------------------------------------

_SETTING = re.compile(r"PYTORCH_(?:CUDA_)?ALLOC_CONF")
_BEYOND = "more than 1EB"
_LARGEST_GPU = 2.0**50
"""Far more than any, for a message that does not tell the size of this one."""
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@pattern(
    r"Allocation was preemptively rejected because it would exceed per_process_memory_fraction "
    r"limit\. Requested size: (?P<asked>[\d.]+ \w+)?"
)
def memory_fraction(evidence: Evidence, match: re.Match[str]) -> Answer:
    """The limit that the process has set itself is reached, not that of the device."""
    requested = match["asked"]
    yield cuda(
        "the process has no room"
        + (f" for {requested}" if requested else "")
        + " below its own limit",
        "The context is intact. torch.cuda.set_per_process_memory_fraction or "
        "per_process_memory_fraction has set the limit. The GPU itself may have room. Next step: "
        "raise it.",
        certainty="proven",
    )


_OUT_OF_MEMORY = (
    r"CUDA out of memory\.(?: Tried to allocate (?P<asked>[\d.]+ \w+|more than 1EB)\.?)?"
    r"(?:.*?(?:has a total capacity of |GPU \d+; )(?P<total>[\d.]+ \w+))?"
    r"(?:.*?(?:of which |already allocated; )(?P<free>[\d.]+ \w+)(?: is)? free)?"
    r"(?:.*?Of the allocated memory (?P<used>[\d.]+ \w+) is allocated by PyTorch, (?:with "
    r"[\d.]+ \w+ allocated in private pools \(e\.g\., CUDA Graphs\), )?and "
    r"(?P<reserved>[\d.]+ \w+) is reserved by PyTorch but unallocated)?"
)
_OUT_OF_MEMORY_ASYNC = (
    r"Allocation on device \S* ?would exceed allowed memory\. \(out of memory\)"
    r"(?:\s*Currently allocated +: (?P<used2>[\d.]+ \w+))?"
    r"(?:\s*Requested +: (?P<asked2>[\d.]+ \w+))?"
    r"(?:\s*Device limit +: (?P<total2>[\d.]+ \w+))?"
    r"(?:\s*Free \(according to CUDA\): (?P<free2>[\d.]+ \w+))?"
)
"""The words of CUDA's own allocator, in place of PyTorch's."""


@pattern(f"{_OUT_OF_MEMORY}|{_OUT_OF_MEMORY_ASYNC}")
def out_of_memory(evidence: Evidence, match: re.Match[str]) -> Answer:
    """The device has no room for a tensor."""
    texts = groups(match)
    requested, free, total = (texts.get(name) for name in ("asked", "free", "total"))
    used, reserved = texts.get("used"), texts.get("reserved")
    headline = "the GPU has no room" + (f" for {requested}" if requested else "")
    if free and total:
        headline += f": {free} of {total} is free"
    unused = f", another {reserved} is reserved and unused" if reserved else ""
    held = "; ".join(evidence.memory_holders)
    fixes = _memory_fixes(_bytes(requested), _bytes(total), _bytes(reserved), match.string)
    parts = [
        f"PyTorch's tensors take {used}{unused}." if used else "",
        f"The largest tensors in your variables: {held}." if held else "",
        NO_ASSERT,
        "The context is intact.",
        f"Next step, the most effective first: {', '.join(fixes)}.",
    ]
    yield cuda(headline, " ".join(filter(None, parts)), certainty="proven", text="")


def _memory_fixes(
    requested: float | None, total: float | None, reserved: float | None, message: str
) -> list[str]:
    """Return what helps against full memory, in the order of its effect on these numbers."""
    fixes = [
        "make the batch smaller or the sequences shorter",
        "evaluate under torch.no_grad(), and keep loss.item() instead of loss",
        "del tensors that you no longer need (in a notebook, Out and _ keep results too)",
        "train in bfloat16 or with gradient checkpointing",
    ]
    if requested and requested > (total or _LARGEST_GPU):
        return ["look at the shape: this one tensor is larger than the whole GPU", *fixes[:2]]
    if requested and reserved and reserved >= requested:
        # There is room in sum, in pieces that are too small.
        # Releases call the variable by one of two names, and their message by the one they read.
        setting = _SETTING.search(message)
        name = setting[0] if setting else "PYTORCH_CUDA_ALLOC_CONF"
        return [f"set {name}=expandable_segments:True before the start", *fixes]
    return fixes


def _bytes(text: str | None) -> float | None:
    if text is None:
        return None
    number, _, unit = text.partition(" ")
    if text == _BEYOND:
        return float("inf")
    return float(number) * _UNITS[unit] if unit in _UNITS else None


cuda_row(
    "memory_refused",
    r"(?:CUDA error|CUDA driver error|\[CUDA\]): out of memory",
    "CUDA could not allocate memory for itself",
    "This is not PyTorch's allocator: a context, a library or pinned host memory "
    "usually needed some. Next step: see in nvidia-smi how much other processes use on this "
    "GPU.",
    certainty="likely",
)
