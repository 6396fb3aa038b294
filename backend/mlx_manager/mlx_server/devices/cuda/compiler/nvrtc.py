"""NVRTC, CUDA's compiler, as MLX's CUDA build calls it for kernels of ours: answered sooner.

MLX compiles a custom kernel in every process that launches it, on the thread that steps, and nine
tenths of what it has compiled are headers, of its own and CUDA's, that ours don't use: 1.4 to 3.4 s
for what takes 0.25 s without them. It does not keep the code, as it does with its own kernels', and
others can bring it at a cost only: a precompiled kernel is hashed whole at every launch. So its
calls of NVRTC come here. What needs its headers gets them.

Of a kernel that it compiles itself MLX copies the text when a launch is put together, and hashes it
when it is queued: 5 us of a launch's 10, with 20 kB. So it is given a line that stands for most of
that (`abbreviated`), which becomes the text again here.

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
"""What MLX begins a custom kernel's text with."""

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
"""What the text of a kernel that MLX puts together rests on, of the same layout."""

MACHINE_CODE = b"--gpu-architecture=sm_"
"""How an option begins that asks for a GPU's own code, not for PTX."""

ALL_CORES = b"--split-compile=0"
"""The option to compile a module's kernels by as many threads as there are cores: of MLX's own a
module has 20 to 90, 41 s for a new machine's twelve, and 30 with it (NVRTC 13, 16 cores)."""
KNOWS_ALL_CORES = 13
"""The major release of NVRTC from which on it was seen to work."""

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
"""What is abbreviated, by the line that stands for it."""

_STANDING: list[Compiler] = []
"""Libraries call them, which keeps nothing alive."""


@dataclass(frozen=True, slots=True)
class Code:
    """What NVRTC makes of a kernel: its machine code (cubin), and what the code calls each of the
    names that were asked for."""

    cubin: bytes
    mangled: dict[bytes, bytes]

    def packed(self) -> bytes:
        """With a digest, as a file may be cut off, or spoiled."""
        names = {name.decode(): mangled.decode() for name, mangled in self.mangled.items()}
        content = json.dumps(names).encode() + b"\n" + self.cubin
        return hashlib.sha256(content).digest() + content

    @staticmethod
    def unpacked(packed: bytes) -> Code | None:
        """None: that is not what was packed."""
        digest, content = packed[:32], packed[32:]
        if hashlib.sha256(content).digest() != digest:
            return None
        names, _, cubin = content.partition(b"\n")
        mangled = {name.encode(): m.encode() for name, m in json.loads(names).items()}
        return Code(cubin, mangled)


class Shelf:
    """Code on disk, by what it was compiled from. folder: None where there is none."""

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
        """Whole or not at all: other processes read here."""
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
    """A custom kernel that MLX wants compiled.

    ours: another program, of the same kernel under our headers; 0 if NVRTC made none.
    code: what MLX is given; None where its own program is.
    """

    text: bytes
    ours: int
    names: list[bytes] = field(default_factory=list)
    code: Code | None = None


class Compiler:
    """Stands between a library and the NVRTC that it is linked with."""

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
        """The addresses that answer, by the function's name; as long as this lives."""
        addresses = {}
        for name, entry in self._entries.items():
            address = ctypes.cast(entry, POINTER).value
            assert address is not None
            addresses[name] = address
        return addresses

    @property
    def programs(self) -> int:
        """Custom kernels that are being compiled."""
        return len(self._programs)

    # --- What is asked. Pointers are ints; 0, or None, is NULL --------------------------------

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
        # These very bytes, which live as long as the program.
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

    # --- How it is answered -------------------------------------------------------------------

    def _call(self, name: str, *arguments: object) -> int:
        result: int = self._nvrtc[name](*arguments)
        return result

    def _code_for(self, handle: int) -> Code | None:
        """What is given for this program; None if NVRTC is to be asked."""
        program = self._programs.get(handle)
        return None if program is None else program.code

    def _compile_module(self, handle: int, count: int, options: int) -> int:
        """What MLX keeps by itself."""
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
        """Of a program that NVRTC has compiled."""
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
    """Have the calls that `library`, loaded if need be, makes of NVRTC come to a `Compiler` for
    the rest of the process. None: it makes none.

    Raises:
        OSError: it can't be loaded, or the kernel forbids to redirect its calls.
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
    """The same for MLX, once a process, before it computes. None: its build does not use NVRTC, or
    its calls can't be redirected."""
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
    """A line that stands for lines of a custom kernel's text, for as long as this process lives; or
    the lines themselves, where MLX's calls of NVRTC do not come here."""
    if not text or answer_mlx() is None:
        return text
    line = f'#include "mlx-manager/{hashlib.sha256(text.encode()).hexdigest()}"\n'
    _TEXTS[line.encode()] = text.encode()
    return line
