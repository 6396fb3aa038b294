"""Custom kernels of MLX: their source, and their creation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx

Kernel = Callable[..., list[mx.array]]


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Reason why no kernel serves a shape on this device."""

    reason: str


@dataclass(frozen=True, slots=True)
class KernelSource:
    """Source of a kernel, in parts.

    For CUDA only, shared_memory: bytes; bounds: threads of a block, and blocks that are to run at a
    time on a multiprocessor. With more than 256 threads each thread has fewer registers than the
    255 that the compiler assumes without bounds.
    """

    name: str
    header: str
    body: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shared_memory: int = 0
    bounds: tuple[int, int] | None = None

    @property
    def unique_name(self) -> str:
        """Name by which MLX keeps the compiled kernel.

        The name must change with the source, so it contains a hash of the source.
        """
        digest = hashlib.sha1(f"{self.header}\0{self.body}".encode(), usedforsecurity=False)
        return f"{self.name}_{digest.hexdigest()[:16]}"


@cache
def source(*paths: Path) -> str:
    """Return the text of source files, one after another, without comments and indentation.

    The text is kept short because MLX copies a Metal kernel's at every call. It ends with a
    newline, since more text is appended directly.
    """
    lines = (line.strip() for path in paths for line in path.read_text().splitlines())
    return "".join(f"{line}\n" for line in lines if line and not line.startswith("//"))


def flag(value: bool) -> str:
    return "true" if value else "false"


def real(value: float) -> str:
    """Return a float32 literal."""
    text = repr(float(value))
    return f"{text}f"


def compiled_for_metal(text: KernelSource, *, ensure_row_contiguous: bool = True) -> Kernel:
    kernel: Kernel = mx.fast.metal_kernel(  # type: ignore[assignment]
        name=text.unique_name,
        input_names=list(text.inputs),
        output_names=list(text.outputs),
        source=text.body,
        header=text.header,
        ensure_row_contiguous=ensure_row_contiguous,
    )
    return kernel
