"""Imports of a loaded Linux library: the slots with the addresses of the functions it calls.

A shared library calls an imported function through a slot in its global offset table, which the
loader fills. Writing another address there redirects that library's calls and no one else's.
Sources: System V ABI (ELF header, dynamic section, relocations), `proc_pid_maps(5)`.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PT_LOAD, PT_DYNAMIC, PT_GNU_RELRO = 1, 2, 0x6474E552
DT_NULL, DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_JMPREL = 0, 2, 5, 6, 7, 8, 23
PROT_READ, PROT_WRITE = 1, 2
SYMBOL_SIZE = 24
# GLOB_DAT and JUMP_SLOT, by the ABI of each processor.
FUNCTION_RELOCATIONS = {"x86_64": (6, 7), "aarch64": (1025, 1026)}


@dataclass(frozen=True, slots=True)
class _Segment:
    """Program header. offset: position in the file; vaddr: offset from the load address."""

    type: int
    flags: int
    offset: int
    vaddr: int
    paddr: int
    filesz: int
    memsz: int
    align: int


@dataclass(frozen=True, slots=True)
class Slot:
    """Slot in which a library keeps the address of the imported function `name`."""

    name: str
    address: int
    read_only: bool

    def point_to(self, function: int) -> None:
        """Send the library's calls of `name` to the address `function`.

        Raises:
            OSError: the kernel forbids writing to the slot's page.
        """
        if self.read_only:
            self._protect(PROT_READ | PROT_WRITE)
        ctypes.c_uint64.from_address(self.address).value = function
        if self.read_only:
            self._protect(PROT_READ)

    def _protect(self, protection: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        page = ctypes.c_void_p(self.address & -mmap.PAGESIZE)
        if libc.mprotect(page, ctypes.c_size_t(mmap.PAGESIZE), protection):
            raise OSError(ctypes.get_errno(), f"mprotect refused the slot of {self.name}")


def imported_slots(library: Path, names: Iterable[str]) -> list[Slot]:
    """Return the slots of the functions `names` in a library that this process has loaded.

    The list is empty if the library does not import them, or if the processor is neither x86-64 nor
    aarch64.
    """
    kinds = FUNCTION_RELOCATIONS.get(platform.machine(), ())
    wanted = {name.encode() for name in names}
    base, segments = _loaded_segments(library)
    dynamic = _dynamic_section(base, segments)
    read_only = [
        range(base + s.vaddr, base + s.vaddr + s.memsz) for s in segments if s.type == PT_GNU_RELRO
    ]
    return [
        Slot(name.decode(), base + offset, any(base + offset in part for part in read_only))
        for offset, kind, name in _relocations(dynamic)
        if kind in kinds and name in wanted
    ]


def _loaded_segments(library: Path) -> tuple[int, list[_Segment]]:
    """Return the load address of the library, and its program headers.

    `dl_iterate_phdr` would give both, but can deadlock: it holds the loader's lock while it calls
    back into Python, which needs the GIL, and a thread that imports an extension holds the GIL
    while it waits for the loader's lock.
    """
    for start, offset, path in _code_in_memory():
        if path.name == library.name and path.exists() and path.samefile(library):
            segments = _segments(library)
            for s in segments:
                begin = s.offset & -mmap.PAGESIZE
                if s.type == PT_LOAD and begin <= offset < s.offset + s.filesz:
                    return start - (s.vaddr + offset - s.offset), segments
    raise FileNotFoundError(f"{library} is not loaded")


def _code_in_memory() -> Iterator[tuple[int, int, Path]]:
    """Yield (address, offset in the file, file) of each executable mapping of this process."""
    for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
        addresses, permissions, offset, _, _, *path = line.split(maxsplit=5)
        if path and "x" in permissions:
            yield int(addresses.partition("-")[0], 16), int(offset, 16), Path(path[0])


def _segments(library: Path) -> list[_Segment]:
    """Return the program headers of a 64-bit file."""
    content = library.open("rb")
    with content, mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ) as file:
        (table,) = struct.unpack_from("Q", file, 32)
        size, count = struct.unpack_from("HH", file, 54)
        places = range(table, table + size * count, size)
        return [_Segment(*struct.unpack_from("IIQQQQQQ", file, place)) for place in places]


def _dynamic_section(base: int, segments: list[_Segment]) -> dict[int, int]:
    """Return tag -> value, with absolute addresses; some C libraries leave them relative."""
    table = next(s for s in segments if s.type == PT_DYNAMIC)
    entries: dict[int, int] = {}
    for tag, value in struct.iter_unpack("qQ", ctypes.string_at(base + table.vaddr, table.memsz)):
        if tag == DT_NULL:
            break
        entries[tag] = value
    for tag in (DT_STRTAB, DT_SYMTAB, DT_RELA, DT_JMPREL):
        if tag in entries and entries[tag] < base:
            entries[tag] += base
    return entries


def _relocations(dynamic: dict[int, int]) -> Iterator[tuple[int, int, bytes]]:
    """Yield (offset from the base, kind, symbol) of every relocation that names a symbol."""
    for tag, size in ((DT_JMPREL, DT_PLTRELSZ), (DT_RELA, DT_RELASZ)):
        if tag not in dynamic:
            continue
        table = ctypes.string_at(dynamic[tag], dynamic[size])
        for offset, info, _ in struct.iter_unpack("QQq", table):
            if symbol := info >> 32:
                entry = dynamic[DT_SYMTAB] + SYMBOL_SIZE * symbol
                name = ctypes.c_uint32.from_address(entry).value
                yield offset, info & 0xFFFFFFFF, ctypes.string_at(dynamic[DT_STRTAB] + name)
