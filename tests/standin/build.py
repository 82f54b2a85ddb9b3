"""Builds the libraries that torch's CUDA build links to.

``runtime.c`` is the runtime library; cuBLAS, cuDNN, NCCL and the others are empty: each of their
functions returns a failing status.
"""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sysconfig
from collections import defaultdict
from pathlib import Path

NOT_SUPPORTED, NO_DEVICE = 801, 100
KERNEL_OF = b"_dispatch_get_computed_kernel_for_dispatch_key"
"""What gives Python the kernel of an op, from torch 2.9 on."""
KERNELS = "standin_kernels.so"
"""The module that gives it for older releases."""
HERE = Path(__file__).parent
GCC = ("gcc", "-O1", "-g", "-fPIC", "-shared")
UNVERSIONED = {
    "cu": "libcuda.so.1",
    "nccl": "libnccl.so.2",
    "pnccl": "libnccl.so.2",
    "cuFile": "libcufile.so.0",
    "cusparseLt": "libcusparseLt.so.0",
    "curand": "libcurand.so.10",
}
"""The libraries whose functions torch names without a version, by how these begin."""
VERSIONS = {"NVSHMEM": "libnvshmem_host.so.3"}
"""The libraries whose version is not their own name."""
NVIDIA = re.compile(r"lib(cu|nccl|nvrtc|nvshmem|nvJit)")
HAS_CONTEXT = """\
unsigned long standin_count(const char *what);
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    if (flags) *flags = 0;
    *is_active = standin_count("context");
    return device ? 101 : 0;
}"""
"""The one question to the driver library that has to be answered."""
TEXT = re.compile(r"Get\w*(String|Name|LastError)$")
WITHOUT_EFFECT = """
    cudaProfilerStart cudaProfilerStop cudaFuncSetAttribute cudaKernelSetAttributeForDevice
    cudaStreamDestroy cudaEventDestroy cudaGraphDestroy cudaGraphExecDestroy
    cudaLibraryUnload cudaStreamUpdateCaptureDependencies cudaGraphDebugDotPrint
    cudaUserObjectCreate cudaUserObjectRelease cudaGraphRetainUserObject
    cudaDeviceSetGraphMemAttribute cudaMemPoolSetAttribute cudaMemPoolTrimTo
"""
"""Functions of the runtime library that succeed and do nothing; what else is missing is refused."""


def cuda_of(torch: Path) -> int:
    """Return the major release of CUDA that torch's package was built with."""
    text = (torch / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b.*= '(\d+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{torch} is no CUDA build")
    return int(found[1])


def runtime(major: int) -> str:
    """Return the name of the runtime library of a major release of CUDA."""
    return f"libcudart.so.{major}"


def needed(torch: Path) -> dict[str, set[str]]:
    """Return the functions that torch's libraries take from each of NVIDIA's."""
    symbols: dict[str, set[str]] = defaultdict(set)
    defined, wanted = set[str](), set[str]()
    for library in sorted((torch / "lib").glob("*.so")):
        for soname in re.findall(r"NEEDED.*\[(.*)\]", _output("readelf", "-dW", library)):
            symbols[soname].update()
        for line in _output("nm", "-D", "--with-symbol-versions", library).splitlines():
            *_, kind, symbol = line.split()
            name, _, version = symbol.partition("@")
            if kind != "U":
                defined.add(name)
            elif version:
                symbols[VERSIONS.get(version, version)].add(name)
            else:
                wanted.add(name)
    for name in wanted - defined:
        fitting = [start for start in UNVERSIONED if name.startswith(start)]
        if fitting:
            symbols[UNVERSIONED[max(fitting, key=len)]].add(name)
    return {name: found for name, found in symbols.items() if NVIDIA.match(name)}


def build(torch: Path, headers: Path, out: Path) -> None:
    """Build every library that torch needs.

    Args:
        torch: the folder of torch's package.
        headers: what ``pip install --target`` made of CUDA's headers and runtime library.
        out: where the libraries go.
    """
    out.mkdir(parents=True, exist_ok=True)
    name = runtime(cuda_of(torch))
    libraries = build_stubs(torch, out, but=name)
    (real,) = headers.rglob(name)
    (out / "error_texts.h").write_text(_error_texts(real), encoding="utf-8")
    written = set(re.findall(r"\b(cuda\w+|__cuda\w+)\(", (HERE / "runtime.c").read_text("utf-8")))
    # The headers of CUDA 12 give some functions the names of their second form.
    written |= {f"{call}_v2" for call in written}
    lines = ["int standin_without_effect(const char *name, int answer);"]
    for call in sorted(libraries[name] - written):
        answer = 0 if call in WITHOUT_EFFECT.split() else NOT_SUPPORTED
        lines.append(f'int {call}(void) {{ return standin_without_effect("{call}", {answer}); }}')
    exported = "global: cu*; __cu*; standin_*; local: *;"
    sources = [HERE / "runtime.c", _write(out / "rest.c", lines)]
    flags = ["-Wall", "-Wextra", f"-I{out}", "-lpthread"]
    flags += [f"-I{folder}" for folder in headers.glob("nvidia/*/include")]
    _link(out, name, sources, f"{name} {{ {exported} }};", flags)
    if KERNEL_OF not in (torch / "lib" / "libtorch_python.so").read_bytes():
        _build_kernels(torch, out)


def _build_kernels(torch: Path, out: Path) -> None:
    """Build the module for Python that gives the kernel of an op, where torch does not."""
    folders = [torch / "include", torch / "include/torch/csrc/api/include"]
    command = ["g++", "-std=c++17", "-O0", "-fPIC", "-shared", "-fno-access-control", "-w"]
    command += [f"-I{folder}" for folder in (*folders, sysconfig.get_path("include"))]
    # Modules share their types with those of torch alone that name the same compiler's ABI.
    binding = (torch / "lib" / "libtorch_python.so").read_bytes()
    abi = re.search(rb"__pybind11_internals_v\d+_gcc_libstdcpp(_cxxabi\d+)__", binding)
    if abi is not None:
        command.append(f'-DPYBIND11_BUILD_ABI="{abi[1].decode()}"')
    command += [str(HERE / "kernels.cpp"), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    command += ["-ltorch_python", "-o", str(out / KERNELS)]
    subprocess.run(command, check=True)


def build_stubs(torch: Path, out: Path, *, but: str = "") -> dict[str, set[str]]:
    """Build an empty library for each that torch links to: it is imported then, and finds no GPU.

    Args:
        but: the one that is left out.

    Returns:
        what torch needs of each, as :func:`needed`.
    """
    libraries = needed(torch)
    for soname, names in libraries.items():
        if soname != but:
            _stub(out, soname, sorted(names))
    return libraries


def _stub(out: Path, soname: str, names: list[str]) -> None:
    lines = ['static const char text[] = "there is no GPU here: this is a stand-in";']
    for name in names:
        if name == "cuDevicePrimaryCtxGetState":
            lines.append(HAS_CONTEXT)
        elif TEXT.search(name):
            lines.append(f"const char *{name}(void) {{ return text; }}")
        else:
            status = NOT_SUPPORTED if soname == "libcuda.so.1" else 1
            status = NO_DEVICE if name == "cudaGetDeviceCount" else status
            lines.append(f"long {name}(void) {{ return {status}; }}")
    is_versioned = soname not in UNVERSIONED.values()
    version = next((key for key, value in VERSIONS.items() if value == soname), soname)
    script = f"{version} {{ global: *; }};" if is_versioned else None
    _link(out, soname, [_write(out / "stub.c", lines)], script, ["-w", "-fno-builtin"])


def _link(
    out: Path, soname: str, sources: list[Path], script: str | None, flags: list[str]
) -> None:
    command = [*GCC, f"-Wl,-soname,{soname}", *sources, *flags, "-o", out / soname]
    if script is not None:
        command.append(f"-Wl,--version-script={_write(out / 'versions.map', [script])}")
    subprocess.run(command, check=True)


def _error_texts(library: Path) -> str:
    """Ask NVIDIA's library for the names and texts of its errors; it needs no device for that."""
    real = ctypes.CDLL(str(library))
    real.cudaGetErrorName.restype = real.cudaGetErrorString.restype = ctypes.c_char_p
    rows = []
    for code in range(1200):
        name, text = (f(code).decode() for f in (real.cudaGetErrorName, real.cudaGetErrorString))
        if name != "unrecognized error code":
            rows.append(f"    {{{code}, {json.dumps(name)}, {json.dumps(text)}}},")
    head = "static const struct { int code; const char *name, *text; } error_texts[] = {"
    return "\n".join([head, *rows, "};", ""])


def _write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
