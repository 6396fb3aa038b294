"""CUDA's driver, for what MLX does not offer of it."""

from __future__ import annotations

import ctypes

LIBRARY = "libcuda.so.1"


class Driver:
    """The functions of the CUDA driver API.

    Raises:
        OSError: there is none on this machine.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)

    def call(self, name: str, *arguments: object) -> None:
        """
        Raises:
            AttributeError: it is older than that function.
            RuntimeError: it refuses.
        """
        code = self._library[name](*arguments)
        if code:
            raise RuntimeError(f"CUDA's driver answers {code} to {name}")

    def attribute(self, number: int) -> int:
        """What the first GPU that this process gets to see has of a `CUdevice_attribute`.

        Raises:
            RuntimeError: there is no GPU.
        """
        self.call("cuInit", ctypes.c_uint(0))
        value = ctypes.c_int()
        self.call(
            "cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), ctypes.c_int(0)
        )
        return value.value
