"""First launch of a decode step on NVIDIA GPUs, from opening.cu: embeddings and rotations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_manager.mlx_server.devices.cuda.attention.decode import MOST_QUERIES
from mlx_manager.mlx_server.devices.cuda.compiler.device import DEVICE_SOURCE, device_for
from mlx_manager.mlx_server.devices.cuda.compiler.launch import CudaKernel
from mlx_manager.mlx_server.devices.cuda.matmul.factors import Packed, Weight, arrays_of
from mlx_manager.mlx_server.devices.kernel import (
    Kernel,
    KernelSource,
    Unsupported,
    flag,
    real,
    source,
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
) -> KernelSource:
    """Return the kernel's source. shifted: it takes shifts of the rows' positions."""
    scaled = flag(scale is not None)
    if isinstance(embeddings, Packed):
        parts: tuple[str, ...] = ("embeddings", "scales", "biases")
        bits, group = embeddings.bits, embeddings.group_size
        width = f"embeddings_shape[1] * {32 // bits}"
        groups = f"(long)tokens[row] * (width / {group})"
        embed = (
            f"kernels::embed_packed<{bits}, {group}, {scaled}>(embeddings + (long)tokens[row] * "
            f"embeddings_shape[1], scales + {groups}, biases + {groups}, width, "
        )
    else:
        parts, width = ("embeddings",), "embeddings_shape[1]"
        embed = f"kernels::embed<{scaled}>(embeddings + (long)tokens[row] * width, width, "
    body = (
        f"const int row = blockIdx.x, width = {width};\n"
        f"{embed}{real(1.0 if scale is None else scale)}, hidden + (long)row * width);\n"
        "const int position = before[row];\n"
        "if (threadIdx.x == 0)\n"
        "const_cast<int*>(lengths)[row] = following[row] = position > 0 ? position + 1 : 0;\n"
    )
    turned = "position + shifts[row]" if shifted else "position"
    for i, turning in enumerate(turnings):
        body += (
            f"kernels::turn<{turning.dims}, {flag(turning.traditional)}>({turned}, "
            f"frequencies_{i}, {real(turning.amplitude)}, "
            f"const_cast<float*>(rotation_{i}) + (long)row * {turning.dims});\n"
        )
    kinds = range(len(turnings))
    return KernelSource(
        name="paged_opening_shifted" if shifted else "paged_opening",
        header=source(DEVICE_SOURCE, _SOURCE),
        body=body,
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
