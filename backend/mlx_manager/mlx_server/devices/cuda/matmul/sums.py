"""What products give, normed and added to a residual, on NVIDIA GPUs: see sum.cu."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_manager.mlx_server.devices.cuda.compiler.device import DEVICE_SOURCE, TYPES
from mlx_manager.mlx_server.devices.cuda.matmul.factors import Norm
from mlx_manager.mlx_server.devices.kernel import (
    CompiledForCuda,
    KernelSource,
    bounded,
    flag,
    real,
    source,
)

# Of a row: a piece is what a thread reads at once, and has at most so many of.
_PIECE = 8
_MOST_PIECES = 4
_MOST_WARPS = 16
_SOURCE = Path(__file__).with_name("sum.cu")
# Of `Two`, behind the first.
_OTHERS = ("other", "norm_of_first", "norm_of_other")


@dataclass(frozen=True, slots=True)
class SumForm:
    """Constants of one kernel: a block's warps and the pieces that each thread has at most; the
    norm's epsilon, and that of the norm that follows, None for none; whether the sum is scaled, and
    whether it is of `Two`."""

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
        """As few pieces a thread as there may be, since a row is there the sooner the more threads
        ask for it; and the warps that it takes then."""
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
    """What two things make of the same rows, added up, each behind a norm of its own. first, other:
    (rows, width). Of the norms the weights, (width,): their epsilon is that of the norm behind."""

    first: mx.array
    other: mx.array
    norm_of_first: mx.array
    norm_of_other: mx.array

    @property
    def arrays(self) -> list[mx.array]:
        """In the order of the kernel's inputs."""
        return [self.first, self.other, self.norm_of_first, self.norm_of_other]


class SumKernels:
    """`residual` plus normed rows, (rows, width), however many."""

    def __init__(self, dtype: mx.Dtype) -> None:
        self._dtype = dtype
        self._kernel = CompiledForCuda(dtype)

    @staticmethod
    def serves(width: int) -> bool:
        return width % _PIECE == 0 and width <= _PIECE * 32 * _MOST_WARPS * _MOST_PIECES

    def __call__(
        self,
        residual: mx.array,
        x: mx.array | Two,
        norm: Norm,
        following: Norm | None,
        scale: mx.array | None = None,
    ) -> list[mx.array]:
        """`residual + norm(x)`, times `scale`, (1,), if there is one, and `following` of that."""
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


def sum_source(dtype: mx.Dtype, form: SumForm) -> KernelSource:
    followed = form.following is not None
    flags = ", ".join(map(flag, (form.two, followed, form.scaled)))
    constants = f"{TYPES[dtype]}, {form.warps}, {form.pieces}, {flags}"
    others = _OTHERS if form.two else ()
    following, ahead = ("following", "ahead") if followed else ("nullptr", "nullptr")
    times = "times" if form.scaled else "nullptr"
    optional = {"following": followed, "times": form.scaled}
    epsilons = f"{real(form.epsilon)}, {real(form.following or 0.0)}"
    return KernelSource(
        name="sum",
        header=source(DEVICE_SOURCE, _SOURCE) + bounded(form.threads),
        body=(
            f"kernels::add_normed<{constants}>(residual, x, {{{', '.join(others)}}}, norm, "
            f"{following}, {times}, out, {ahead}, x_shape[1], {epsilons});"
        ),
        inputs=(
            *("residual", "x", *others, "norm"),
            *(name for name, there in optional.items() if there),
        ),
        outputs=("out", "ahead")[: 2 if followed else 1],
        shared_memory=form.shared_memory,
    )
