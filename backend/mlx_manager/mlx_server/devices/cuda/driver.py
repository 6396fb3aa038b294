"""CUDA driver API, for functions that MLX does not offer."""

from __future__ import annotations

import ctypes

LIBRARY = "libcuda.so.1"


class Driver:
    """Functions of the CUDA driver API.

    Raises:
        OSError: there is no CUDA driver on this machine.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)

    def call(self, name: str, *arguments: object) -> None:
        """Call the driver's function `name`.

        Raises:
            AttributeError: the driver is older than the function.
            RuntimeError: the driver returns an error.
        """
        code = self._library[name](*arguments)
        if code:
            raise RuntimeError(f"CUDA's driver answers {code} to {name}")

    def attribute(self, number: int) -> int:
        """Return an attribute of the first GPU visible to this process.

        number: value of the attribute in the enumeration `CUdevice_attribute`.

        Raises:
            RuntimeError: there is no GPU.
        """
        self.call("cuInit", ctypes.c_uint(0))
        value = ctypes.c_int()
        self.call(
            "cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), ctypes.c_int(0)
        )
        return value.value
