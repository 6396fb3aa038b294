"""Compression of machine code by NVIDIA's library for fat binaries.

MLX hashes the code of a kernel at every launch: 0.3 us a kB (H200). A compressed kernel has a
quarter of its bytes.

Source: nvFatbin's manual.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache

from mlx_manager.mlx_server.devices.cuda.compiler.packages import folders_of

LIBRARIES = ("libnvfatbin.so.13", "libnvfatbin.so.12")
FOLDERS = ("nvidia/cu13/lib", "nvidia/nvfatbin/lib")
OPTIONS = (b"-compress=true", b"-compress-mode=size")

POINTER, SIZE, TEXT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
SIGNATURES = {
    "nvFatbinCreate": (POINTER, POINTER, SIZE),
    "nvFatbinAddCubin": (POINTER, TEXT, SIZE, TEXT, TEXT),
    "nvFatbinSize": (POINTER, POINTER),
    "nvFatbinGet": (POINTER, POINTER),
    "nvFatbinDestroy": (POINTER,),
}


class Fatbin:
    """The library, by its public functions.

    path: its file, or its name.

    Raises:
        OSError: there is no such library.
    """

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self._functions = {name: library[name] for name in SIGNATURES}
        for name, kinds in SIGNATURES.items():
            self._functions[name].argtypes = kinds
            self._functions[name].restype = ctypes.c_int

    def compressed(self, cubin: bytes, architecture: str) -> bytes:
        """Return a fat binary with the code. architecture: the code's own, such as "sm_90a".

        Raises:
            RuntimeError: the library refuses the code.
        """
        handle, size = POINTER(), ctypes.c_size_t()
        options = (TEXT * len(OPTIONS))(*OPTIONS)
        self._call("nvFatbinCreate", ctypes.byref(handle), options, len(OPTIONS))
        try:
            number = architecture.removeprefix("sm_").encode()
            self._call("nvFatbinAddCubin", handle, cubin, len(cubin), number, b"kernel")
            self._call("nvFatbinSize", handle, ctypes.byref(size))
            content = ctypes.create_string_buffer(size.value)
            self._call("nvFatbinGet", handle, content)
            return content.raw
        finally:
            self._call("nvFatbinDestroy", ctypes.byref(handle))

    def _call(self, name: str, *arguments: object) -> None:
        result = self._functions[name](*arguments)
        if result:
            raise RuntimeError(f"{name} failed with error {result}.")


@cache
def fatbin() -> Fatbin | None:
    """Return the installed library; None if there is none."""
    paths = (str(folder / name) for folder in folders_of(FOLDERS) for name in LIBRARIES)
    for path in (*paths, *LIBRARIES):
        with suppress(OSError):
            return Fatbin(path)
    return None
