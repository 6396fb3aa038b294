"""A loaded Linux library's imports: where it keeps the addresses of the functions it calls.

A shared library calls an imported function through a slot in its global offset table, which the
loader fills. Writing another address there redirects that library's calls and no one else's.
Sources: System V ABI (dynamic section, relocations), `dl_iterate_phdr(3)`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PT_DYNAMIC, PT_GNU_RELRO = 2, 0x6474E552
DT_NULL, DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_JMPREL = 0, 2, 5, 6, 7, 8, 23
PROT_READ, PROT_WRITE = 1, 2
SYMBOL_SIZE = 24
# GLOB_DAT and JUMP_SLOT, by the ABI of each processor.
FUNCTION_RELOCATIONS = {"x86_64": (6, 7), "aarch64": (1025, 1026)}


class _ProgramHeader(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
        ("vaddr", ctypes.c_uint64),
        ("paddr", ctypes.c_uint64),
        ("filesz", ctypes.c_uint64),
        ("memsz", ctypes.c_uint64),
        ("align", ctypes.c_uint64),
    )


class _PhdrInfo(ctypes.Structure):
    _fields_ = (
        ("addr", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("phdr", ctypes.POINTER(_ProgramHeader)),
        ("phnum", ctypes.c_uint16),
    )


_VISITOR = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(_PhdrInfo), ctypes.c_size_t, ctypes.c_void_p
)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a library keeps the address of the imported function `name`."""

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
    """The slots of the functions `names` in a library that this process has loaded.

    Empty where the library does not import them, or on another processor than x86-64 and aarch64.
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


def _loaded_segments(library: Path) -> tuple[int, list[_ProgramHeader]]:
    """The address that the library was loaded at, and its program headers."""
    loaded: list[tuple[Path, int, list[_ProgramHeader]]] = []

    def note(info: ctypes._Pointer[_PhdrInfo], size: int, data: object) -> int:
        entry = info.contents
        headers = [_ProgramHeader.from_buffer_copy(entry.phdr[i]) for i in range(entry.phnum)]
        loaded.append((Path(os.fsdecode(entry.name or b"")), entry.addr, headers))
        return 0

    ctypes.CDLL(None).dl_iterate_phdr(_VISITOR(note), None)
    for path, base, headers in loaded:
        if path.name == library.name and path.samefile(library):
            return base, headers
    raise FileNotFoundError(f"{library} is not loaded")


def _dynamic_section(base: int, segments: list[_ProgramHeader]) -> dict[int, int]:
    """Tag -> value. Some C libraries leave addresses relative to the base; here none is."""
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
    """(offset from the base, kind, symbol's name) of every relocation that names a symbol."""
    for tag, size in ((DT_JMPREL, DT_PLTRELSZ), (DT_RELA, DT_RELASZ)):
        if tag not in dynamic:
            continue
        table = ctypes.string_at(dynamic[tag], dynamic[size])
        for offset, info, _ in struct.iter_unpack("QQq", table):
            if symbol := info >> 32:
                entry = dynamic[DT_SYMTAB] + SYMBOL_SIZE * symbol
                name = ctypes.c_uint32.from_address(entry).value
                yield offset, info & 0xFFFFFFFF, ctypes.string_at(dynamic[DT_STRTAB] + name)
