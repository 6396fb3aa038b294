"""Interception of MLX's calls of NVRTC, CUDA's compiler, to compile our kernels faster.

MLX compiles a custom kernel in every process that launches it, on the thread that steps. Nine
tenths of the source are headers, of MLX and CUDA, that our kernels don't use: 1.4 to 3.4 s for a
kernel that takes 0.25 s without them. MLX keeps the code of its own kernels on disk, but not that
of custom ones, and a precompiled kernel is hashed whole at every launch. So MLX's calls of NVRTC
come here, where kernels are compiled without the headers and kept on disk. A kernel that does not
compile without MLX's headers is compiled with them.

MLX also copies the text of a custom kernel when a launch is created, and hashes it when the launch
is queued: 5 us of a launch's 10, with 20 kB. So MLX is given one line that stands for most of the
text (`abbreviated`); it is replaced by the text here.

Source: mlx/backend/cuda/jit_module.cpp, custom_kernel.cpp; NVRTC's manual.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path

from mlx_manager.mlx_server.devices.cpu.blas import file_of_package
from mlx_manager.mlx_server.devices.cpu.elf import imported_slots
from mlx_manager.mlx_server.devices.cuda.graphs import cache_folder

log = logging.getLogger(__name__)

MLX_HEADERS = b"""
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

"""
"""Beginning of the text that MLX generates for a custom kernel."""

OUR_HEADERS = b"""
#include "mlx/backend/cuda/device/config.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
namespace cooperative_groups {}
namespace mlx::core::cu {
template <typename T>
struct Dimensions {
  T sizes[MAX_NDIM];
  __device__ const T& operator[](int i) const { return sizes[i]; }
};
using Shape = Dimensions<int32_t>;
using Strides = Dimensions<int64_t>;
}  // namespace mlx::core::cu
"""
"""Replacement of `MLX_HEADERS`: the declarations that MLX's generated text needs, with the same
layout as in MLX."""

MACHINE_CODE = b"--gpu-architecture=sm_"
"""Beginning of the option that asks for a GPU's machine code instead of PTX."""

ALL_CORES = b"--split-compile=0"
"""Option to compile a module's kernels with as many threads as there are cores. MLX's own modules
have 20 to 90 kernels; the twelve modules of a new machine take 41 s, and 30 s with this option
(NVRTC 13, 16 cores)."""
KNOWS_ALL_CORES = 13
"""First major release of NVRTC for which `ALL_CORES` was seen to work."""

POINTER, INT = ctypes.c_void_p, ctypes.c_int
SIGNATURES = {
    "nvrtcCreateProgram": (POINTER, POINTER, POINTER, INT, POINTER, POINTER),
    "nvrtcAddNameExpression": (POINTER, POINTER),
    "nvrtcCompileProgram": (POINTER, INT, POINTER),
    "nvrtcGetLoweredName": (POINTER, POINTER, POINTER),
    "nvrtcGetCUBINSize": (POINTER, POINTER),
    "nvrtcGetCUBIN": (POINTER, POINTER),
    "nvrtcDestroyProgram": (POINTER,),
    "nvrtcVersion": (POINTER, POINTER),
}
ANSWERED = tuple(name for name in SIGNATURES if name != "nvrtcVersion")
SUCCESS, NO_SUCH_NAME = 0, 10

_ABBREVIATED = re.compile(rb'#include "mlx-manager/[0-9a-f]{64}"\n')
_TEXTS: dict[bytes, bytes] = {}
"""Abbreviated texts, by the line that stands for each."""

_STANDING: list[Compiler] = []
"""Compilers in use, kept alive here: calls from a C library hold no reference to them."""


@dataclass(frozen=True, slots=True)
class Code:
    """Compiled kernel: its machine code (cubin), and the mangled form of each requested name."""

    cubin: bytes
    mangled: dict[bytes, bytes]

    def packed(self) -> bytes:
        """Return the code as bytes with a digest, since a file may be cut off or corrupted."""
        names = {name.decode(): mangled.decode() for name, mangled in self.mangled.items()}
        content = json.dumps(names).encode() + b"\n" + self.cubin
        return hashlib.sha256(content).digest() + content

    @staticmethod
    def unpacked(packed: bytes) -> Code | None:
        """Return the code in `packed`; None if the digest does not match."""
        digest, content = packed[:32], packed[32:]
        if hashlib.sha256(content).digest() != digest:
            return None
        names, _, cubin = content.partition(b"\n")
        mangled = {name.encode(): m.encode() for name, m in json.loads(names).items()}
        return Code(cubin, mangled)


class Shelf:
    """Compiled code on disk, by a hash of its source and options.

    folder: folder of the files; None to keep nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, key: str) -> Code | None:
        if self._folder is None:
            return None
        try:
            return Code.unpacked((self._folder / key).read_bytes())
        except OSError:
            return None

    def put(self, key: str, code: Code | None) -> None:
        """Write the code atomically, since other processes read the same folder."""
        if self._folder is None or code is None:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._folder, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(code.packed())
                Path(name).replace(self._folder / key)
            except OSError:
                with suppress(OSError):
                    Path(name).unlink()
                raise
        except OSError as error:
            log.debug("Compiled kernels are not kept: %s", error)


@dataclass(slots=True)
class Program:
    """Custom kernel that MLX wants compiled.

    text: source with MLX's headers. ours: handle of a second program, with the same kernel under
    our headers; 0 if NVRTC made none. names: names that MLX asks for. code: code that MLX is given;
    None if MLX is given the result of its own program.
    """

    text: bytes
    ours: int
    names: list[bytes] = field(default_factory=list)
    code: Code | None = None


class Compiler:
    """Intermediary between a library and the NVRTC that the library is linked with."""

    def __init__(self, library: ctypes.CDLL, shelf: Shelf) -> None:
        self._nvrtc = {name: library[name] for name in SIGNATURES}
        for name, kinds in SIGNATURES.items():
            self._nvrtc[name].argtypes = kinds
            self._nvrtc[name].restype = INT
        self._shelf = shelf
        self._programs: dict[int, Program] = {}
        answers: dict[str, Callable[..., int]] = {
            "nvrtcCreateProgram": self._create,
            "nvrtcAddNameExpression": self._add_name,
            "nvrtcCompileProgram": self._compile,
            "nvrtcGetLoweredName": self._mangled,
            "nvrtcGetCUBINSize": self._size,
            "nvrtcGetCUBIN": self._cubin,
            "nvrtcDestroyProgram": self._destroy,
        }
        self._entries = {
            name: ctypes.CFUNCTYPE(INT, *SIGNATURES[name])(answer)
            for name, answer in answers.items()
        }

    @property
    def entries(self) -> dict[str, int]:
        """Addresses of the replacement functions, by name; valid while this compiler lives."""
        addresses = {}
        for name, entry in self._entries.items():
            address = ctypes.cast(entry, POINTER).value
            assert address is not None
            addresses[name] = address
        return addresses

    @property
    def programs(self) -> int:
        """Number of custom kernels that are being compiled."""
        return len(self._programs)

    # --- Replacement functions. Pointers are ints; 0, or None, is NULL ------------------------

    def _create(self, out: int, text: int, *named_and_headers: int) -> int:
        content = _ABBREVIATED.sub(lambda line: _TEXTS[line[0]], ctypes.string_at(text))
        result = self._call("nvrtcCreateProgram", out, content, *named_and_headers)
        if result == SUCCESS and content.startswith(MLX_HEADERS):
            ours = POINTER()
            lean = OUR_HEADERS + content.removeprefix(MLX_HEADERS)
            self._call("nvrtcCreateProgram", ctypes.byref(ours), lean, *named_and_headers)
            self._programs[_pointer_at(out).value or 0] = Program(content, ours.value or 0)
        return result

    def _add_name(self, handle: int, name: int) -> int:
        if program := self._programs.get(handle):
            program.names.append(ctypes.string_at(name))
        return self._call("nvrtcAddNameExpression", handle, name)

    def _compile(self, handle: int, count: int, options: int) -> int:
        program = self._programs.get(handle)
        wanted = [
            ctypes.string_at(_pointer_at(options, place).value or 0) for place in range(count)
        ]
        if program is None or not any(option.startswith(MACHINE_CODE) for option in wanted):
            return self._compile_module(handle, count, options)
        key = self._key(program, wanted)
        program.code = self._shelf.get(key)
        if program.code is None:
            program.code = self._ours(program, count, options)
            result = SUCCESS
            if program.code is None:
                result = self._call("nvrtcCompileProgram", handle, count, options)
            if result != SUCCESS:
                return result
            self._shelf.put(key, program.code or self._code(handle, program.names))
        return SUCCESS

    def _mangled(self, handle: int, name: int, out: int) -> int:
        code = self._code_for(handle)
        if code is None:
            return self._call("nvrtcGetLoweredName", handle, name, out)
        mangled = code.mangled.get(ctypes.string_at(name))
        if mangled is None:
            return NO_SUCH_NAME
        # The pointer is to these very bytes, which live as long as the program.
        _pointer_at(out).value = ctypes.cast(ctypes.c_char_p(mangled), POINTER).value
        return SUCCESS

    def _size(self, handle: int, out: int) -> int:
        code = self._code_for(handle)
        if code is None:
            return self._call("nvrtcGetCUBINSize", handle, out)
        ctypes.c_size_t.from_address(out).value = len(code.cubin)
        return SUCCESS

    def _cubin(self, handle: int, out: int) -> int:
        code = self._code_for(handle)
        if code is None:
            return self._call("nvrtcGetCUBIN", handle, out)
        ctypes.memmove(out, code.cubin, len(code.cubin))
        return SUCCESS

    def _destroy(self, handle_at: int) -> int:
        program = self._programs.pop(_pointer_at(handle_at).value or 0, None)
        if program is not None and program.ours:
            self._call("nvrtcDestroyProgram", ctypes.byref(POINTER(program.ours)))
        return self._call("nvrtcDestroyProgram", handle_at)

    # --- Implementation -----------------------------------------------------------------------

    def _call(self, name: str, *arguments: object) -> int:
        result: int = self._nvrtc[name](*arguments)
        return result

    def _code_for(self, handle: int) -> Code | None:
        """Return the code that MLX is given for this program; None if NVRTC is to be asked."""
        program = self._programs.get(handle)
        return None if program is None else program.code

    def _compile_module(self, handle: int, count: int, options: int) -> int:
        """Compile a program that is not one of our kernels, with all cores if NVRTC can."""
        if self._release[0] < KNOWS_ALL_CORES:
            return self._call("nvrtcCompileProgram", handle, count, options)
        given = [_pointer_at(options, place).value for place in range(count)]
        text = ctypes.create_string_buffer(ALL_CORES)
        more = (POINTER * (count + 1))(*given, ctypes.addressof(text))
        return self._call("nvrtcCompileProgram", handle, count + 1, more)

    @cached_property
    def _release(self) -> tuple[int, int]:
        major, minor = INT(), INT()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def _key(self, program: Program, options: list[bytes]) -> str:
        major, minor = self._release
        release = f"{version('mlx')} {major}.{minor}".encode()
        parts = [release, OUR_HEADERS, program.text, *program.names, b"", *options]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def _ours(self, program: Program, count: int, options: int) -> Code | None:
        begin = time.perf_counter()
        handle = program.ours
        if not handle or any(
            self._call("nvrtcAddNameExpression", handle, name) for name in program.names
        ):
            return None
        if self._call("nvrtcCompileProgram", handle, count, options):
            log.debug("A kernel needs MLX's headers: %s", b", ".join(program.names).decode())
            return None
        code = self._code(handle, program.names)
        took = 1000 * (time.perf_counter() - begin)
        log.debug("Compiled %s in %.0f ms", b", ".join(program.names).decode(), took)
        return code

    def _code(self, handle: int, names: list[bytes]) -> Code | None:
        """Return the code of a program that NVRTC has compiled; None if NVRTC fails."""
        size = ctypes.c_size_t()
        if self._call("nvrtcGetCUBINSize", handle, ctypes.byref(size)):
            return None
        cubin = ctypes.create_string_buffer(size.value)
        if self._call("nvrtcGetCUBIN", handle, cubin):
            return None
        mangled = {}
        for name in names:
            text = POINTER()
            if self._call("nvrtcGetLoweredName", handle, name, ctypes.byref(text)) or not text:
                return None
            mangled[name] = ctypes.string_at(text.value or 0)
        return Code(cubin.raw, mangled)


def _pointer_at(address: int, place: int = 0) -> ctypes.c_void_p:
    return POINTER.from_address(address + place * ctypes.sizeof(POINTER))


def answer(library: Path, shelf: Shelf) -> Compiler | None:
    """Redirect the calls of NVRTC by `library` to a `Compiler`, for the rest of the process.

    The library is loaded if need be. Returns None if it does not call NVRTC.

    Raises:
        OSError: the library can't be loaded, or the operating system forbids the redirection.
    """
    loaded = ctypes.CDLL(str(library))
    slots = imported_slots(library, ANSWERED)
    if {slot.name for slot in slots} != set(ANSWERED):
        return None
    compiler = Compiler(loaded, shelf)
    _STANDING.append(compiler)
    entries = compiler.entries
    for slot in slots:
        slot.point_to(entries[slot.name])
    return compiler


@cache
def answer_mlx() -> Compiler | None:
    """Redirect MLX's calls of NVRTC, once a process, before MLX computes; see `answer`.

    Returns None if MLX's build does not use NVRTC, or if its calls can't be redirected.
    """
    library = file_of_package("mlx", "lib/libmlx.so") if sys.platform == "linux" else None
    if library is None:
        return None
    try:
        folder = cache_folder() / "custom"
    except RuntimeError as error:
        log.debug("Compiled kernels are not kept: %s", error)
        folder = None
    try:
        return answer(library, Shelf(folder))
    except OSError as error:
        log.info("MLX compiles every kernel itself, in every process: %s", error)
        return None


def abbreviated(text: str) -> str:
    """Return a line that stands for `text` in a custom kernel's source, in this process.

    The line is `text` itself if MLX's calls of NVRTC are not redirected.
    """
    if not text or answer_mlx() is None:
        return text
    line = f'#include "mlx-manager/{hashlib.sha256(text.encode()).hexdigest()}"\n'
    _TEXTS[line.encode()] = text.encode()
    return line
