"""First launch of a decode step on NVIDIA GPUs, from opening.cu: embeddings and rotations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_manager.mlx_server.devices.cuda.attention.decode import MOST_QUERIES
from mlx_manager.mlx_server.devices.cuda.compiler.device import DEVICE_SOURCE, device_for
from mlx_manager.mlx_server.devices.cuda.compiler.launch import CudaKernel, CudaSource
from mlx_manager.mlx_server.devices.cuda.matmul.factors import Packed, Weight, arrays_of
from mlx_manager.mlx_server.devices.kernel import (
    Kernel,
    KernelName,
    OptionalArgument,
    Size,
    Struct,
    Unsupported,
)

THREADS = 256

_SOURCE = Path(__file__).with_name("opening.cu")


@dataclass(frozen=True, slots=True)
class Turning:
    """Kind of rotation, without its frequencies.

    dims: elements of each head that are rotated. traditional: pairs are neighbours, else half of
    `dims` apart. amplitude: factor of the rotated elements.
    """

    dims: int
    traditional: bool
    amplitude: float


BuildOpening = Callable[[Weight, Sequence[Turning], float | None], "OpeningKernel | Unsupported"]


def build(
    embeddings: Weight, turnings: Sequence[Turning], scale: float | None
) -> OpeningKernel | Unsupported:
    """Return the kernel for `embeddings`, (vocabulary, width), on the default device.

    scale: factor of the embeddings, a number of their type; None for no factor.
    """
    device = device_for(embeddings.dtype)
    if isinstance(device, Unsupported):
        return device
    width = embeddings.shape[1]
    if width % 8:
        return Unsupported(f"embeddings of {width} elements, which is no multiple of 8")
    if isinstance(embeddings, Packed) and not is_served(embeddings):
        kind = f"{embeddings.mode}, {embeddings.bits} bits"
        return Unsupported(f"embeddings that are packed otherwise ({kind})")
    kernel, shifted = (
        CudaKernel(opening_source(embeddings, turnings, scale, shifted=shifted))
        for shifted in (False, True)
    )
    return OpeningKernel(kernel, embeddings, turnings, shifted)


def is_served(embeddings: Packed) -> bool:
    """Return whether the kernel supports the packing: whole integers in a word."""
    return embeddings.mode == "affine" and embeddings.bits in (2, 4, 8)


class OpeningKernel:
    """Embeddings, lengths and rotations of a step's newest tokens.

    Args:
        kernel, shifted: those from `opening_source`; `shifted` for steps with shifts.
        embeddings: (vocabulary, width).
        turnings: the kinds of rotation.

    Attributes:
        lengths: (MOST_QUERIES,) int32, tokens of each row including the newest; 0 for padding.
        rotations: for each kind the rotations that `PagedKernels.attend_fused` takes,
            (MOST_QUERIES, dims) float32. The first rows of both are the last step's, written in
            place.
    """

    def __init__(
        self,
        kernel: Kernel,
        embeddings: Weight,
        turnings: Sequence[Turning],
        shifted: Kernel,
    ) -> None:
        self._kernel = kernel
        self._shifted = shifted
        self._embeddings = embeddings
        self.lengths = mx.zeros((MOST_QUERIES,), mx.int32)
        self.rotations = [mx.zeros((MOST_QUERIES, turning.dims)) for turning in turnings]
        mx.eval(self.lengths, self.rotations)

    def open(
        self,
        tokens: mx.array,
        before: mx.array,
        frequencies: Sequence[mx.array],
        shifts: Sequence[mx.array] = (),
    ) -> tuple[mx.array, mx.array]:
        """Look up the embeddings of a step's newest tokens, and write `lengths` and `rotations`.

        Args:
            tokens: (rows,) uint32 of the vocabulary; `MOST_QUERIES` rows at most.
            before: (rows,) int32, tokens of each row before the newest; 0 for padding.
            frequencies: of each kind of rotation, (dims / 2,) float32 radians a position.
            shifts: one array, (rows,) int32, added to each row's place for the position by which it
                is rotated; empty where nothing is added.

        Returns:
            (rows, width) embeddings, and `before` for the next step. Launches that read `lengths`
            and `rotations` must depend on the embeddings.
        """
        rows = tokens.shape[0]
        if rows > MOST_QUERIES:
            raise ValueError(f"{rows} rows: the kernels take {MOST_QUERIES} at most")
        kernel = self._shifted if shifts else self._kernel
        hidden, following = kernel(
            inputs=[
                *(tokens, before, *shifts, *arrays_of(self._embeddings)),
                *(*frequencies, self.lengths, *self.rotations),
            ],
            grid=(rows * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(rows, self._embeddings.shape[1]), (rows,)],
            output_dtypes=[self._embeddings.dtype, mx.int32],
        )
        return hidden, following


def opening_source(
    embeddings: Weight,
    turnings: Sequence[Turning],
    scale: float | None = None,
    *,
    shifted: bool = False,
) -> CudaSource:
    """Return the kernel's source. shifted: it takes shifts of the rows' positions."""
    scaled, dtype = scale is not None, embeddings.dtype
    if isinstance(embeddings, Packed):
        parts: tuple[str, ...] = ("embeddings", "scales", "biases")
        kind = KernelName(
            "PackedEmbeddings", (scaled, dtype, embeddings.bits, embeddings.group_size)
        )
        width = Size("embeddings", 1, times=32 // embeddings.bits)
    else:
        parts, width = ("embeddings",), Size("embeddings", 1)
        kind = KernelName("Embeddings", (scaled, dtype))
    kinds = range(len(turnings))
    return CudaSource(
        name="paged_opening_shifted" if shifted else "paged_opening",
        files=(DEVICE_SOURCE, _SOURCE),
        function="open_step",
        constants=(shifted,),
        arguments=(
            *("tokens", "before", OptionalArgument("shifts"), Struct(kind, parts), width),
            *(1.0 if scale is None else float(scale), "hidden", "following", "lengths"),
            *(_turned(i, turning) for i, turning in enumerate(turnings)),
        ),
        inputs=(
            "tokens",
            "before",
            *(("shifts",) if shifted else ()),
            *parts,
            *(f"frequencies_{i}" for i in kinds),
            "lengths",
            *(f"rotation_{i}" for i in kinds),
        ),
        outputs=("hidden", "following"),
    )


def _turned(i: int, turning: Turning) -> Struct:
    kind = KernelName("Turned", (turning.dims, turning.traditional))
    return Struct(kind, (f"frequencies_{i}", f"rotation_{i}", turning.amplitude))
