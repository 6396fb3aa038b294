"""CUDA's runtime compiler, NVRTC, and the code that it made, kept on disk.

MLX compiles a custom kernel in every process that launches it, with MLX's headers: 1.4 to 3.4 s
for a kernel that takes 0.25 s without them. So kernels are compiled here, once a machine, and MLX
launches the code (`launch`).

Source: NVRTC's manual.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import time
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path

from mlx_manager.mlx_server.devices.cuda.compiler.fatbin import Fatbin
from mlx_manager.mlx_server.devices.cuda.compiler.packages import folders_of
from mlx_manager.mlx_server.devices.kept import Kept

log = logging.getLogger(__name__)

LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")
"""Names of the library that MLX's builds for CUDA are linked with."""
HEADERS = ("nvidia/cu13/include", "nvidia/cuda_runtime/include", "mlx/include/cccl")
"""Folders of CUDA's headers in installed packages."""
TOOLKIT = "/usr/local/cuda"

POINTER, INT = ctypes.c_void_p, ctypes.c_int
SIGNATURES = {
    "nvrtcCreateProgram": (POINTER, ctypes.c_char_p, ctypes.c_char_p, INT, POINTER, POINTER),
    "nvrtcCompileProgram": (POINTER, INT, POINTER),
    "nvrtcGetCUBINSize": (POINTER, POINTER),
    "nvrtcGetCUBIN": (POINTER, POINTER),
    "nvrtcGetProgramLogSize": (POINTER, POINTER),
    "nvrtcGetProgramLog": (POINTER, POINTER),
    "nvrtcDestroyProgram": (POINTER,),
    "nvrtcVersion": (POINTER, POINTER),
}


class NVRTC:
    """NVRTC, by its public functions.

    path: the library's file, or the name of a library that is loaded already. includes: folders of
    headers.

    Raises:
        OSError: there is no such library.
    """

    def __init__(self, path: str | Path, includes: tuple[Path, ...] = ()) -> None:
        library = ctypes.CDLL(str(path))
        self._functions = {name: library[name] for name in SIGNATURES}
        for name, kinds in SIGNATURES.items():
            self._functions[name].argtypes = kinds
            self._functions[name].restype = INT
        self._includes = includes

    @cached_property
    def version(self) -> str:
        major, minor = INT(), INT()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, text: str, architecture: str) -> bytes:
        """Return the machine code (cubin) of CUDA C++. architecture: such as "sm_90a".

        Raises:
            RuntimeError: the text does not compile; says why.
        """
        program = POINTER()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), None, 0, None, None)
        try:
            options = [
                f"--gpu-architecture={architecture}",
                "--device-as-default-execution-space",
                *(f"--include-path={folder}" for folder in self._includes),
            ]
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            if self._functions["nvrtcCompileProgram"](program, len(options), given):
                said = self._read(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
                raise RuntimeError(f"A kernel does not compile: {said.decode(errors='replace')}")
            return self._read(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, size_of: str, read: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(size_of, program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(read, program, content)
        return content.raw

    def _call(self, name: str, *arguments: object) -> None:
        result = self._functions[name](*arguments)
        if result:
            raise RuntimeError(f"{name} failed with error {result}.")


class CompiledCode:
    """Machine code on disk, by its text, compiler and architecture.

    kept: the files. fatbin: compresses code, if there is one.
    """

    def __init__(self, compiler: NVRTC, kept: Kept, fatbin: Fatbin | None = None) -> None:
        self._compiler = compiler
        self._kept = kept
        self._fatbin = fatbin

    def of(self, text: str, architecture: str) -> bytes:
        """Return the code of `text`, compiled unless it is on disk.

        Raises:
            RuntimeError: the text does not compile; says why.
        """
        kind = "cubin" if self._fatbin is None else "fatbin"
        parts = (kind, self._compiler.version, architecture, text)
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        code = self._kept.read(key)
        if code is None:
            begun = time.perf_counter()
            code = self._compiler.compile(text, architecture)
            if self._fatbin is not None:
                code = self._fatbin.compressed(code, architecture)
            log.debug("A kernel was compiled in %.0f ms", 1000 * (time.perf_counter() - begun))
            self._kept.write(key, code)
        return code


@cache
def nvrtc() -> NVRTC:
    """Return the compiler that MLX's build for CUDA is linked with.

    Raises:
        RuntimeError: there is none.
    """
    for name in LIBRARIES:
        with suppress(OSError):
            return NVRTC(name, include_folders())
    raise RuntimeError(f"None of {', '.join(LIBRARIES)} is installed.")


def include_folders() -> tuple[Path, ...]:
    """Return the folders of CUDA's headers: those of packages, then those of a toolkit."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    toolkits = [Path(home) / "include" for home in (*homes, TOOLKIT) if home]
    return (*folders_of(HEADERS), *(folder for folder in toolkits if folder.is_dir()))
