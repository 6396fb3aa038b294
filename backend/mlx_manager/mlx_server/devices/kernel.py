"""Custom kernels of MLX: their source, and their creation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

from mlx_manager.mlx_server.devices.cuda.compiler.nvrtc import abbreviated

C = TypeVar("C", bound=Hashable)
Kernel = Callable[..., list[mx.array]]


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Reason why no kernel serves a shape on this device."""

    reason: str


@dataclass(frozen=True, slots=True)
class KernelSource:
    """Source of a kernel, in the parts that MLX takes. `shared_memory`: bytes, for CUDA only."""

    name: str
    header: str
    body: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shared_memory: int = 0

    @property
    def unique_name(self) -> str:
        """Name by which MLX caches the compiled kernel, on disk, too.

        The name must change with the source, so it contains a hash of the source.
        """
        digest = hashlib.sha1(f"{self.header}\0{self.body}".encode(), usedforsecurity=False)
        return f"{self.name}_{digest.hexdigest()[:16]}"


@cache
def source(*paths: Path) -> str:
    """Return the text of source files, one after another, without comments and indentation.

    The text is kept short because MLX copies it at every call, where it can't be abbreviated. It
    ends with a newline, since MLX appends its own text directly.
    """
    lines = (line.strip() for path in paths for line in path.read_text().splitlines())
    return "".join(f"{line}\n" for line in lines if line and not line.startswith("//"))


def bounded(threads: int, blocks: int = 1) -> str:
    """Return the end of a header that compiles the kernel for blocks of `threads`.

    blocks: blocks that are to run at a time on a multiprocessor. With more than 256 threads each
    thread has fewer registers than the 255 that the compiler assumes. MLX declares the kernel
    itself, hence the macro.
    """
    bounds = f"launch_bounds({threads})" if blocks == 1 else f"launch_bounds({threads}, {blocks})"
    return (
        "#ifndef EMULATED\n#undef __global__\n"
        f"#define __global__ __attribute__((global)) __attribute__(({bounds}))\n"
        "#endif\n"
    )


def flag(value: bool) -> str:
    return "true" if value else "false"


def real(value: float) -> str:
    """Return a float32 literal."""
    text = repr(float(value))
    return f"{text}f"


def compiled_for_cuda(text: KernelSource, *, ensure_row_contiguous: bool = True) -> Kernel:
    short = replace(text, header=abbreviated(text.header))
    return _compiled(
        mx.fast.cuda_kernel,
        text.unique_name,
        short,
        ensure_row_contiguous,
        shared_memory=text.shared_memory,
    )


class CompiledForCuda:
    """Kernels for one type of numbers, each created on first use."""

    def __init__(self, dtype: mx.Dtype) -> None:
        self._dtype = dtype
        self._kernels: dict[tuple[object, Hashable], Kernel] = {}

    def __call__(self, text: Callable[[mx.Dtype, C], KernelSource], constants: C) -> Kernel:
        """Return the kernel. text: function that returns its source for a type and constants."""
        key = (text, constants)
        if key not in self._kernels:
            self._kernels[key] = compiled_for_cuda(text(self._dtype, constants))
        return self._kernels[key]


def compiled_for_metal(text: KernelSource, *, ensure_row_contiguous: bool = True) -> Kernel:
    return _compiled(mx.fast.metal_kernel, text.unique_name, text, ensure_row_contiguous)


def _compiled(
    make: Callable[..., object],
    name: str,
    text: KernelSource,
    ensure_row_contiguous: bool,
    **more: int,
) -> Kernel:
    kernel: Kernel = make(  # type: ignore[assignment]
        name=name,
        input_names=list(text.inputs),
        output_names=list(text.outputs),
        source=text.body,
        header=text.header,
        ensure_row_contiguous=ensure_row_contiguous,
        **more,
    )
    return kernel
