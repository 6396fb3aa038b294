"""Kernels of ours on NVIDIA GPUs: compiled by `nvrtc`, launched by MLX."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

import mlx.core as mx

from mlx_manager.mlx_server.devices.cuda.compiler.fatbin import fatbin
from mlx_manager.mlx_server.devices.cuda.compiler.nvrtc import CompiledCode, nvrtc
from mlx_manager.mlx_server.devices.cuda.graphs import architecture
from mlx_manager.mlx_server.devices.kept import Kept
from mlx_manager.mlx_server.devices.kernel import KernelSource

C = TypeVar("C", bound=Hashable)
Types = tuple[Sequence[mx.Dtype], Sequence[mx.Dtype]]
"""Types of a launch's inputs and outputs."""

C_TYPES: dict[Any, str] = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
    mx.uint8: "uint8_t",
    mx.int8: "int8_t",
}

PREAMBLE = """#include <cuda_bf16.h>
#include <cuda_fp16.h>
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
"""
"""Declarations before each kernel. NVRTC has no <cstdint>."""

_type_of = attrgetter("dtype")

OLDEST_WITH_OWN_CODE = 90
"""First architecture whose newest instructions are for that architecture alone: sm_90a."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaSource(KernelSource):
    """Declaration of a kernel in CUDA C++.

    shared_memory: bytes. bounds: threads of a block, and blocks that are to run at a time on a
    multiprocessor. With more than 256 threads each thread has fewer registers than the 255 that the
    compiler assumes without bounds.
    """

    shared_memory: int = 0
    bounds: tuple[int, int] | None = None

    types: ClassVar[Mapping[Any, str]] = C_TYPES
    places: ClassVar[frozenset[str]] = frozenset({"blockIdx.x", "threadIdx.x", "scratch"})

    def size(self, of: str, axis: int) -> str:
        return f"{of}_shape_{axis}"

    def _shared(self) -> str:
        if self.scratch is None:
            return ""
        return f"auto* scratch = kernels::shared_by_block<{self._constant(self.scratch)}>();\n"


class CudaKernel:
    """A kernel that is called as those of `mx.fast.cuda_kernel` are.

    Code is compiled for the types of a launch when they differ from those of the launch before.
    """

    def __init__(self, source: CudaSource, *, ensure_row_contiguous: bool = True) -> None:
        self._source = source
        self._contiguous = ensure_row_contiguous
        self._sizes = source.sizes
        self._types: list[mx.Dtype] = []
        self._name = ""
        self._code = b""

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        """Return the outputs, not evaluated. grid: threads in each direction.

        Raises:
            RuntimeError: the kernel does not compile for these types; says why.
        """
        types = [*map(_type_of, inputs), *output_dtypes]
        if types != self._types:
            name, text = text_of(self._source, (types[: len(inputs)], output_dtypes))
            self._code = compiled_code().of(text, target())
            self._name, self._types = name, types
        return mx.fast.precompiled_cuda_kernel(
            name=self._name,
            compiled_source=self._code,
            inputs=inputs,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            scalars=[inputs[place].shape[axis] for place, axis in self._sizes],
            grid=grid,
            threadgroup=threadgroup,
            shared_memory=self._source.shared_memory,
            ensure_row_contiguous=self._contiguous,
        )


class CudaKernels:
    """Kernels for one type of numbers, each made on first use."""

    def __init__(self, dtype: mx.Dtype) -> None:
        self._dtype = dtype
        self._kernels: dict[tuple[object, Hashable], CudaKernel] = {}

    def __call__(self, text: Callable[[mx.Dtype, C], CudaSource], constants: C) -> CudaKernel:
        """Return the kernel. text: function that returns its source for a type and constants."""
        key = (text, constants)
        if key not in self._kernels:
            self._kernels[key] = CudaKernel(text(self._dtype, constants))
        return self._kernels[key]


def text_of(source: CudaSource, types: Types) -> tuple[str, str]:
    """Return the name of the kernel for these types, and its text in CUDA C++.

    Parameters: pointers to the inputs, to the outputs, then the dimensions that are arguments.
    """
    inputs, outputs = types
    parameters = [
        *(f"const {C_TYPES[t]}* {n}" for n, t in zip(source.inputs, inputs, strict=True)),
        *(f"{C_TYPES[t]}* {n}" for n, t in zip(source.outputs, outputs, strict=True)),
        *(f"int {source.size(source.inputs[place], axis)}" for place, axis in source.sizes),
    ]
    bounds = "" if source.bounds is None else f"__launch_bounds__{source.bounds} "
    before = f'{PREAMBLE}{source.header}extern "C" __global__ void {bounds}'
    after = f"({', '.join(parameters)}) {{\n{source.body}\n}}\n"
    # MLX keeps a kernel by its name alone, so the name must change with the text.
    digest = hashlib.sha256(f"{before}{after}".encode()).hexdigest()
    name = f"{source.name}_{digest[:16]}"
    return name, f"{before}{name}{after}"


@cache
def compiled_code() -> CompiledCode:
    """Return the code that is kept in the user's cache.

    Raises:
        RuntimeError: there is no compiler.
    """
    return CompiledCode(nvrtc(), Kept.in_cache("kernels"), fatbin())


@cache
def target() -> str:
    """Return the architecture that code is compiled for: "sm_80", "sm_90a".

    Raises:
        OSError, RuntimeError: there is no NVIDIA GPU.
    """
    name = architecture()
    return f"{name}a" if int(name.removeprefix("sm_")) >= OLDEST_WITH_OWN_CODE else name
