"""Read the assertions out of the CUDA kernels of an installed torch, for a release to come.

``python -m tests.wheel_asserts SITE_PACKAGES`` unpacks the device images of ``libtorch_cuda.so``
below that folder, finds each call of the assertion handler in the disassembly, reads expression,
file, line and function out of its arguments, and stores what differs from torch 2.13.0 in
``cudalens/core/data/assert_sites.json``.  That release's own assertions are kept beside the tests.
Triton's wheel brings the disassembler; ``pip install pyelftools`` does the rest.  It takes some
minutes and no GPU.

An assertion of 2.13.0 is found again by file, function and expression; where that is no longer the
whole of it, by file and function, or by file and expression, if just one candidate is left.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudalens.core.device_asserts import KNOWN_RELEASE

ROOT = Path(__file__).parent.parent
DATA = ROOT / "cudalens" / "core" / "data" / "assert_sites.json"
KNOWN = ROOT / "tests" / "data" / f"assert_sites_{KNOWN_RELEASE}.json"
HANDLER = "__assertfail"
ARCHITECTURE = "sm_90"
# The handler's arguments, by the registers of the device ABI.
MESSAGE, FILE, LINE, FUNCTION = 4, 6, 8, 10
FURTHEST = 200
INSTRUCTION_BYTES = 16
CALL = 0x343  # the operation in the lowest twelve bits: a call of the address in a register
_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\d\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;")
_ADDRESS = re.compile(r"\s*/\*([0-9a-f]{4,})\*/")
_REGISTER = re.compile(r"(U?R)(\d+)")
_CONSTANT = re.compile(r"c\[0x4\]\[(?:(0x[0-9a-f]+)|(U?R\d+|U?RZ)(?:\+(0x[0-9a-f]+))?)\]")

Register = tuple[str, int]


@dataclass(frozen=True, order=True)
class Site:
    """An assertion as it is compiled in."""

    file: str
    line: int
    function: str
    expression: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


# --- disassembly ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What a register holds: a number, or the address at an offset of the constant bank."""

    is_address: bool
    value: int


def held(code: list[str], at: int, register: Register, depth: int = 0) -> Held | None:
    """Return what a register holds before a line, ``None`` where the code does not say."""
    if depth > 12:
        return None
    for index in range(at - 1, max(at - FURTHEST, -1), -1):
        match = _INSTRUCTION.search(code[index])
        if match is None:
            continue
        name, arguments = match[1], [item.strip() for item in match[2].split(",")]
        written = _REGISTER.match(arguments[0])
        if written is None or written[1] != register[0] or name.startswith(("ST", "CALL")):
            continue
        place = register[1] - int(written[2])
        if place == 0 or (place == 1 and name.startswith(("LDC.64", "ULDC.64", "LDCU.64"))):
            return _result(code, index, name, arguments[1:], 4 * place, depth)
    return None


def _result(
    code: list[str], at: int, name: str, sources: list[str], beyond: int, depth: int
) -> Held | None:
    base, last = name.split(".", maxsplit=1)[0], sources[-1].removesuffix(".reuse")
    if base in ("LDC", "ULDC", "LDCU"):
        return _loaded(code, at, ",".join(sources), beyond, depth)
    if base == "CS2R":
        return Held(False, 0)
    if base == "HFMA2":
        halves = [struct.pack("<e", float(item)) for item in reversed(sources[-2:])]
        return Held(False, int.from_bytes(b"".join(halves), "little"))
    if base not in ("MOV", "UMOV", "IMAD", "R2UR"):
        return None
    if base == "IMAD" and not all(item in ("RZ", "URZ") for item in sources[:2]):
        return None
    if (constant := _CONSTANT.match(last)) is not None and constant[1]:
        return Held(True, int(constant[1], 16))
    if last in ("RZ", "URZ"):
        return Held(False, 0)
    if re.match(r"-?0x", last):
        return Held(False, int(last, 16) & 0xFFFFFFFF)
    source = _REGISTER.match(last)
    return None if source is None else held(code, at, (source[1], int(source[2])), depth + 1)


def _loaded(code: list[str], at: int, text: str, beyond: int, depth: int) -> Held | None:
    match = _CONSTANT.search(text)
    if match is None:
        return None
    if match[1]:
        return Held(True, int(match[1], 16) + beyond)
    base = 0
    if (register := _REGISTER.match(match[2])) is not None:
        found = held(code, at, (register[1], int(register[2])), depth + 1)
        if found is None or found.is_address:
            return None
        base = found.value
    return Held(True, base + int(match[3] or "0", 16) + beyond)


class Image:
    """One device image: its calls, and the texts that its constant bank points to."""

    def __init__(self, path: Path) -> None:
        from elftools.elf.elffile import ELFFile
        from elftools.elf.relocation import RelocationSection

        self.path = path
        self.texts: dict[int, str] = {}
        self._windows: set[bytes] = set()
        with path.open("rb") as file:
            elf = ELFFile(file)
            symbols = elf.get_section_by_name(".symtab")
            if symbols is None or symbols.get_symbol_by_name(HANDLER) is None:
                return
            sections = list(elf.iter_sections())
            data = {
                number: section.data()
                for number, section in enumerate(sections)
                if section.name.startswith(".nv.global.init")
            }
            for section in sections:
                if section.name.startswith(".text."):
                    self._windows.update(windows(section.data()))
                if isinstance(section, RelocationSection) and "constant4" in section.name:
                    for item in section.iter_relocations():
                        symbol = symbols.get_symbol(item["r_info_sym"])
                        self.texts[item["r_offset"]] = _text(symbol, data)

    def text(self, value: Held | None) -> str | None:
        return self.texts.get(value.value) if value is not None and value.is_address else None

    def sites(self, disassembler: Path) -> Iterator[Site]:
        """Return the assertion of each call of the handler; raise where one cannot be read."""
        for code in self._disassembled(disassembler):
            at = len(code) - 1
            match = _INSTRUCTION.search(code[at])
            target = match and _REGISTER.search(match[2])
            callee = target and self.text(held(code, at, (target[1], int(target[2]))))
            if callee != HANDLER:
                continue
            message, file, function = (
                self.text(held(code, at, ("R", number))) for number in (MESSAGE, FILE, FUNCTION)
            )
            number = held(code, at, ("R", LINE))
            if file is None or function is None or number is None:
                raise ValueError(f"{self.path.name}: a call cannot be read: {code[-40:]}")
            # `torch._assert_async` prints what its caller passes: no text of the kernel's own.
            yield Site(Path(file).name, number.value, function, (message or "").strip())

    def _disassembled(self, disassembler: Path) -> Iterator[list[str]]:
        """Return the code before each call, which is the last line."""
        if not self._windows:
            return
        ordered = sorted(self._windows)
        raw = self.path.with_suffix(".raw")
        raw.write_bytes(b"".join(ordered))
        command = [disassembler, "--binary", ARCHITECTURE.replace("_", "").upper(), raw]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        lines = {
            int(match[1], 16): line
            for line in done.stdout.split("\n")
            if (match := _ADDRESS.match(line)) is not None
        }
        start = 0
        for window in ordered:
            end = start + len(window)
            yield [lines.get(at, "") for at in range(start, end, INSTRUCTION_BYTES)]
            start = end


def windows(code: bytes) -> Iterator[bytes]:
    for at in range(0, len(code) - INSTRUCTION_BYTES + 1, INSTRUCTION_BYTES):
        if int.from_bytes(code[at : at + 2], "little") & 0xFFF == CALL:
            end = at + INSTRUCTION_BYTES
            yield code[max(0, end - FURTHEST * INSTRUCTION_BYTES) : end]


def _text(symbol: Any, data: Mapping[int, bytes]) -> str:
    content = data.get(symbol["st_shndx"])
    if content is None:
        return str(symbol.name)
    start = symbol["st_value"]
    return content[start : content.index(b"\0", start)].decode("latin1")


def sites_of(packages: Path) -> list[Site]:
    tools = packages / "triton" / "backends" / "nvidia" / "bin"
    found: set[Site] = set()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [tools / "cuobjdump", "-xelf", ARCHITECTURE, packages / "torch/lib/libtorch_cuda.so"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        for path in sorted(Path(folder).iterdir()):
            found.update(Image(path).sites(tools / "nvdisasm"))
    return sorted(found)


# --- comparison ----------------------------------------------------------------------------------


def known_sites() -> list[Site]:
    """Return the assertions of torch 2.13.0, as they were read."""
    return [Site(*row) for row in json.loads(KNOWN.read_text(encoding="utf-8"))]


def differences(known: Iterable[Site], there: Iterable[Site]) -> dict[str, list[str] | None]:
    """Tell by place in 2.13.0 how each assertion reads in another release.

    What is alike is left out; an assertion that is not there is ``None``.
    """
    known, left = sorted(known), sorted(there)
    found: dict[Site, Site] = {}
    for likeness in (
        lambda site: (site.file, site.function, site.expression),
        lambda site: (site.file, site.function),
        lambda site: (site.file, site.expression),
    ):
        waiting = _grouped((site for site in known if site not in found), likeness)
        free = _grouped((site for site in left if site not in found.values()), likeness)
        for key, sites in waiting.items():
            # As many as before: the order of the lines tells which is which.
            if len(free.get(key, ())) == len(sites):
                found.update(zip(sites, free[key], strict=True))
    return {
        key_of(site): [other.place, other.function, other.expression] if other else None
        for site in known
        if (other := found.get(site)) != site
    }


def key_of(site: Site) -> str:
    """Return place and expression: a line of a macro is compiled into one for each dtype."""
    return f"{site.place} {site.expression}".rstrip()


def _grouped(
    sites: Iterable[Site], key: Callable[[Site], tuple[str, ...]]
) -> dict[tuple[str, ...], list[Site]]:
    groups: dict[tuple[str, ...], list[Site]] = {}
    for site in sites:
        groups.setdefault(key(site), []).append(site)
    return groups


def release_of(packages: Path) -> str:
    (found,) = importlib.metadata.distributions(name="torch", path=[str(packages)])
    return found.version.partition("+")[0]


def main(arguments: list[str]) -> None:
    packages = Path(arguments[0])
    release, sites = release_of(packages), sites_of(packages)
    if release == KNOWN_RELEASE:
        rows = [[site.file, site.line, site.function, site.expression] for site in sites]
        KNOWN.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        return
    stored = json.loads(DATA.read_text(encoding="utf-8")) if DATA.is_file() else {}
    stored[release] = differences(known_sites(), sites)
    DATA.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
