"""Norm of a product's result and addition to a residual, on NVIDIA GPUs: see sum.cu."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_manager.mlx_server.devices.cuda.compiler.device import DEVICE_SOURCE
from mlx_manager.mlx_server.devices.cuda.compiler.launch import CudaKernels, CudaSource
from mlx_manager.mlx_server.devices.cuda.matmul.factors import RowNorm
from mlx_manager.mlx_server.devices.kernel import OptionalArgument, Size, Struct

# Elements of a piece, which a thread reads at once, and most pieces of a thread.
_PIECE = 8
_MOST_PIECES = 4
_MOST_WARPS = 16
_SOURCE = Path(__file__).with_name("sum.cu")
# Additional inputs for `Two`.
_OTHERS = ("other", "norm_of_first", "norm_of_other")


@dataclass(frozen=True, slots=True)
class SumForm:
    """Constants of one kernel.

    warps: warps of a block. pieces: most pieces of a thread. epsilon: epsilon of the norm.
    following: epsilon of the norm that follows, None for no norm. scaled: whether the sum is
    scaled. two: whether the input is `Two`.
    """

    warps: int
    pieces: int
    epsilon: float
    following: float | None
    scaled: bool = False
    two: bool = False

    @staticmethod
    def of(
        width: int,
        epsilon: float,
        following: float | None,
        *,
        scaled: bool = False,
        two: bool = False,
    ) -> SumForm:
        """Return the constants for rows of `width`, with as few pieces a thread as possible.

        More threads load a row faster.
        """
        pieces = -(-width // (_PIECE * 32 * _MOST_WARPS))
        warps = -(-width // (_PIECE * 32 * pieces))
        return SumForm(warps, pieces, epsilon, following, scaled, two)

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def shared_memory(self) -> int:
        return (4 if self.two else 2) * self.warps * 4


@dataclass(frozen=True, slots=True)
class Two:
    """Outputs of two parts of a layer for the same rows, each normed by itself, then added.

    first, other: (rows, width). norm_of_first, norm_of_other: (width,) weights of the two norms,
    whose epsilon is that of the norm after the addition.
    """

    first: mx.array
    other: mx.array
    norm_of_first: mx.array
    norm_of_other: mx.array

    @property
    def arrays(self) -> list[mx.array]:
        """Arrays in the order of the kernel's inputs."""
        return [self.first, self.other, self.norm_of_first, self.norm_of_other]


class SumKernels:
    """Kernels that add normed rows to a residual, (rows, width), for any number of rows."""

    def __init__(self, dtype: mx.Dtype) -> None:
        self._dtype = dtype
        self._kernel = CudaKernels(dtype)

    @staticmethod
    def serves(width: int) -> bool:
        return width % _PIECE == 0 and width <= _PIECE * 32 * _MOST_WARPS * _MOST_PIECES

    def __call__(
        self,
        residual: mx.array,
        x: mx.array | Two,
        norm: RowNorm,
        following: RowNorm | None,
        scale: mx.array | None = None,
    ) -> list[mx.array]:
        """Return `(residual + norm(x)) * scale` and, if `following` is given, that norm of it.

        scale: (1,); None for no scale.
        """
        rows, width = residual.shape
        epsilon = None if following is None else following.epsilon
        two = isinstance(x, Two)
        form = SumForm.of(width, norm.epsilon, epsilon, scaled=scale is not None, two=two)
        weights = [norm.weight] if following is None else [norm.weight, following.weight]
        count = len(weights)
        factors = [] if scale is None else [scale]
        return self._kernel(sum_source, form)(
            inputs=[residual, *(x.arrays if isinstance(x, Two) else [x]), *weights, *factors],
            grid=(rows * form.threads, 1, 1),
            threadgroup=(form.threads, 1, 1),
            output_shapes=[(rows, width)] * count,
            output_dtypes=[self._dtype] * count,
        )


def sum_source(dtype: mx.Dtype, form: SumForm) -> CudaSource:
    followed = form.following is not None
    others = _OTHERS if form.two else ()
    optional = {"following": followed, "times": form.scaled}
    return CudaSource(
        name="sum",
        files=(DEVICE_SOURCE, _SOURCE),
        bounds=(form.threads, 1),
        function="add_normed",
        constants=(dtype, form.warps, form.pieces, form.two, followed, form.scaled),
        arguments=(
            *(
                "residual",
                "x",
                Struct(None, others),
                "norm",
                OptionalArgument("following"),
                OptionalArgument("times"),
            ),
            *("out", OptionalArgument("ahead"), Size("x", 1), form.epsilon, form.following or 0.0),
        ),
        inputs=(
            *("residual", "x", *others, "norm"),
            *(name for name, there in optional.items() if there),
        ),
        outputs=("out", "ahead")[: 2 if followed else 1],
        shared_memory=form.shared_memory,
    )
