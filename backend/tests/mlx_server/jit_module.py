"""NVIDIA's compiler without a GPU: a library that calls it as MLX's does, and what MLX would ask."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx
import pytest
from linux import skip_without_linux

from mlx_manager.mlx_server.devices.cuda.compiler.nvrtc import MLX_HEADERS
from mlx_manager.mlx_server.devices.kernel import KernelSource

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[2] / ".venv-clients" / "nvrtc"
ROOM = 2**22
HOPPER = "sm_90a"
TYPES = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.uint8: "uint8_t",
}


@dataclass(frozen=True)
class Compiled:
    """What MLX would have got. failed: the number of its call, 0 if all went well."""

    failed: int
    said: str
    code: bytes


@cache
def _linked(compiler: str, libraries: Path, include: Path) -> bytes:
    """The library's file, of which each `Jit` has a copy to itself."""
    linked = [str(libraries / "libnvrtc.so.13"), f"-Wl,-rpath,{libraries}"]
    flags = ["-std=c++17", "-shared", "-fPIC", f"-I{include}"]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "libjit.so"
        command = [compiler, *flags, str(HERE / "jit_module.cpp"), "-o", str(path), *linked]
        subprocess.run(command, check=True)
        return path.read_bytes()


class Jit:
    """The library. Skips where NVRTC or g++ is missing."""

    def __init__(self, path: Path) -> None:
        skip_without_linux("NVIDIA's compiler")
        found = list(ENVIRONMENT.glob("lib/python*/site-packages/nvidia/cu13"))
        if not found:
            pytest.skip("NVRTC is not installed in .venv-clients; `make clients` installs it")
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("g++ is not installed: nothing can be linked with NVRTC")
        libraries, include = found[0] / "lib", found[0] / "include"
        path.write_bytes(_linked(compiler, libraries, include))
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._includes = [f"--include-path={include / 'cccl'}", f"--include-path={include}"]

    def compile(
        self, text: str, name: str, architecture: str = HOPPER, *, without_mlx: bool = False
    ) -> Compiled:
        """without_mlx: a text that includes MLX's headers fails."""
        options = [f"--gpu-architecture={architecture}", *self._includes]
        options += ["--define-macro=WITHOUT_MLX"] * without_mlx
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        said, code = ctypes.create_string_buffer(ROOM), ctypes.create_string_buffer(ROOM)
        size = ctypes.c_size_t()
        failed = self._library.compile(
            text.encode(),
            f"mlx::core::cu::{name}".encode(),
            len(options),
            given,
            ctypes.c_bool(architecture.startswith("sm_")),
            ctypes.c_size_t(ROOM),
            said,
            code,
            ctypes.byref(size),
        )
        return Compiled(failed, said.value.decode(), code.raw[: size.value])


def text_of(source: KernelSource, inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype]) -> str:
    """As MLX puts it together (mlx/backend/cuda/custom_kernel.cpp), as `custom_kernel_NAME`."""
    parameters = []
    for name, dtype in zip(source.inputs, inputs, strict=True):
        parameters.append(f"const {TYPES[dtype]}* {name}")
        for suffix, kind in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int")):
            if f"{name}_{suffix}" in source.body:
                parameters.append(f"const __grid_constant__ {kind} {name}_{suffix}")
    for name, dtype in zip(source.outputs, outputs, strict=True):
        parameters.append(f"{TYPES[dtype]}* {name}")
    joined = ",\n    ".join(parameters)
    return (
        f"{MLX_HEADERS.decode()}{source.header}"
        "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
        f"__global__ void custom_kernel_{source.name}(\n    {joined}) {{\n"
        f"{source.body}\n}}\n\n}} // namespace mlx::core::cu\n"
    )
