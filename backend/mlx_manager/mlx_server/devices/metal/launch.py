"""Kernels of ours on Apple GPUs, compiled by MLX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx

from mlx_manager.mlx_server.devices.kernel import Kernel, KernelSource

TYPES: dict[Any, str] = {
    mx.bfloat16: "bfloat16_t",
    mx.float16: "float16_t",
    mx.float32: "float",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetalSource(KernelSource):
    """Declaration of a kernel in Metal.

    newest: type and length of another array that the threads of a block share; None for none.
    """

    newest: tuple[mx.Dtype, int] | None = None

    types: ClassVar[Mapping[Any, str]] = TYPES
    places: ClassVar[frozenset[str]] = frozenset(
        {
            "thread_position_in_grid",
            "threadgroup_position_in_grid",
            "threadgroup_position_in_grid.x",
            "threadgroups_per_grid",
            "thread_index_in_threadgroup",
            "simdgroup_index_in_threadgroup",
            "thread_index_in_simdgroup",
            "k_strides",
            "v_strides",
            "scratch",
            "newest",
        }
    )

    def size(self, of: str, axis: int) -> str:
        return f"{of}_shape[{axis}]"

    def _shared(self) -> str:
        text = ""
        if self.scratch is not None:
            kind = self._constant(self.scratch)
            text = f"threadgroup {kind} shared;\nthreadgroup {kind}* scratch = &shared;\n"
        if self.newest is not None:
            dtype, length = self.newest
            text += f"threadgroup {self.types[dtype]} newest[{length}];\n"
        return text


def compiled_for_metal(source: MetalSource, *, ensure_row_contiguous: bool = True) -> Kernel:
    kernel: Kernel = mx.fast.metal_kernel(  # type: ignore[assignment]
        name=source.unique_name,
        input_names=list(source.inputs),
        output_names=list(source.outputs),
        source=source.body,
        header=source.header,
        ensure_row_contiguous=ensure_row_contiguous,
    )
    return kernel
