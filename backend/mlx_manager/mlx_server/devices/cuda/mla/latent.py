"""Multi-head latent attention over pages on NVIDIA GPUs, from latent.cu."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_manager.mlx_server.devices.attention.kernel import Lengths
from mlx_manager.mlx_server.devices.attention.splits import FIELDS, Splits, plan
from mlx_manager.mlx_server.devices.cuda.attention.chunk_plan import (
    FIELDS as CHUNK_FIELDS,
)
from mlx_manager.mlx_server.devices.cuda.attention.chunk_plan import (
    MOST_PARTS,
    Blocks,
    ChunkPlan,
    QueryRun,
    cut,
)
from mlx_manager.mlx_server.devices.cuda.attention.decode import HEADS_SOURCE, waves_for
from mlx_manager.mlx_server.devices.cuda.compiler.device import (
    DEVICE_SOURCE,
    RESERVED_PER_BLOCK,
    CudaDevice,
    device_for,
)
from mlx_manager.mlx_server.devices.cuda.compiler.launch import CudaKernel, CudaSource
from mlx_manager.mlx_server.devices.cuda.mla.expansion import Expansion
from mlx_manager.mlx_server.devices.cuda.mla.shape import LatentShape
from mlx_manager.mlx_server.devices.kernel import Kernel, KernelName, Size, Struct, Unsupported

THREADS = 256
MERGE_THREADS = 128

_WARPS = 8
ATTENTION = Path(__file__).parents[1] / "attention"
_SOURCES = (
    DEVICE_SOURCE,
    HEADS_SOURCE,
    ATTENTION / "attention.cu",
    ATTENTION / "chunk_rows.cu",
    Path(__file__).with_name("latent.cu"),
)

# Rows of a block and tokens of a tile, the best first: a tile is read once for all rows.
_SIZES = ((64, 32), (32, 32), (64, 16), (32, 16), (16, 16))
_STAGES = (3, 2)
# Most tiles of 16 rows for which registers leave room for two blocks.
_FEW_TILES = 2

# Estimates. A decode step's splits have at least 128 tokens, and 128 splits keep a GPU busy with
# one text. For a chunk, in tokens: time of a block to begin, time to store and merge parts, and
# fewest tokens of a part; see `cut`.
LEAST_TILES = 8
MOST_SPLITS = 128
START = 64
MERGE = 192
LEAST = 256


@dataclass(frozen=True, slots=True)
class LatentForm:
    """Sizes of a thread block.

    heads, queries: a block's rows are `queries` times `heads`. tokens: tokens of a tile. stages:
    tiles in shared memory. resident: blocks that run at a time on a multiprocessor.
    """

    heads: int
    queries: int
    tokens: int
    stages: int
    resident: int = 1

    @staticmethod
    def choose(shape: LatentShape, device: CudaDevice, *, chunks: bool) -> LatentForm | None:
        """Return the best form that there is room for; None if there is none.

        chunks: the form is for prompts' chunks, of which a block may have several queries.
        """
        for rows, tokens in _SIZES:
            heads = -(-shape.q_heads // -(-shape.q_heads // rows))
            queries = rows // heads if chunks else 1
            choices = [LatentForm(heads, queries, tokens, stages) for stages in _STAGES]
            fitting = [c.placed(shape, device) for c in choices if c.fits(shape, device)]
            if fitting:
                # Two blocks hide each other's barriers; failing that, more copies are under way.
                return max(fitting, key=lambda form: form.resident)
        return None

    def blocks(self, shape: LatentShape) -> int:
        """Return the number of blocks that share the heads of a query."""
        return -(-shape.q_heads // self.heads)

    @property
    def rows(self) -> int:
        return self.heads * self.queries

    def shared_memory(self, shape: LatentShape) -> int:
        stride = ((shape.rank + shape.dims) // 8 | 1) * 8
        vectors = (self.rows + self.stages * self.tokens) * stride
        weights = self.rows * (self.tokens + 8)
        sums = self.rows * (self._inner * self.tokens + 1)
        return (vectors + weights) * shape.dtype.size + sums * 4

    def fits(self, shape: LatentShape, device: CudaDevice) -> bool:
        return self.shared_memory(shape) <= device.block_memory

    def placed(self, shape: LatentShape, device: CudaDevice) -> LatentForm:
        """Return this form with `resident` set for `device`."""
        room = device.multiprocessor_memory // (self.shared_memory(shape) + RESERVED_PER_BLOCK)
        resident = 2 if room >= 2 and self._tiles <= _FEW_TILES else 1
        return LatentForm(self.heads, self.queries, self.tokens, self.stages, resident)

    @property
    def _tiles(self) -> int:
        return -(-self.rows // 16)

    @property
    def _inner(self) -> int:
        """Constant INNER of latent.cu."""
        shared = self._tiles % 2 == 0 or self.tokens % 32 == 0
        return _WARPS // 2 if shared else _WARPS


@dataclass(frozen=True, slots=True)
class Attending:
    """Constants of an attention kernel beside its shape and form."""

    scale: float
    traditional: bool


@dataclass(frozen=True, slots=True)
class Writing:
    """Constants of a kernel that writes latents, beside its shape."""

    traditional: bool
    epsilon: float
    normed: bool


def build(shape: LatentShape) -> LatentKernels | Unsupported:
    """Return the kernels for `shape` on the default device; their first use compiles them."""
    if shape.unsupported is not None:
        return Unsupported(shape.unsupported)
    device = device_for(shape.dtype)
    if isinstance(device, Unsupported):
        return device
    step, chunk = (LatentForm.choose(shape, device, chunks=chunks) for chunks in (False, True))
    if step is None or chunk is None:
        return Unsupported("the device has too little shared memory")
    return LatentKernels(shape, device, step, chunk)


class LatentKernels:
    """Launches of latent attention for one shape.

    Pools are (1, pages * page_size, rank) of latent vectors and (1, pages * page_size, dims) of
    rotated ones, slot = page * page_size + offset. They must be evaluated.

    Attributes:
        expansion: expansion of latent vectors for prompts, used where it is faster; None for never.
    """

    def __init__(
        self, shape: LatentShape, device: CudaDevice, step: LatentForm, chunk: LatentForm
    ) -> None:
        self.shape = shape
        self.expansion: Expansion | None = None
        self._device = device
        self._step, self._chunk = step, chunk
        self._no_norm = mx.zeros((1,), shape.dtype)
        # Blocks of cut chunks that have arrived; the kernel leaves every counter at 0.
        self._arrivals = mx.zeros((MOST_PARTS * chunk.blocks(shape),), mx.int32)
        mx.eval(self._no_norm, self._arrivals)
        self._steps: dict[Attending, Kernel] = {}
        self._chunks: dict[Attending, Kernel] = {}
        self._writes: dict[Writing, Kernel] = {}
        self._merge = CudaKernel(merge_source(shape, step))

    def plan(
        self, lengths: Lengths, *, window: None = None, table_rows: Lengths | None = None
    ) -> Splits:
        """Cut a step's work as `PagedKernels.plan` does; there are no windows."""
        at_once = self._device.multiprocessors * self._step.resident
        return plan(
            lengths,
            blocks_per_item=self._step.blocks(self.shape),
            blocks_wanted=at_once * waves_for(lengths, None),
            table_rows=table_rows,
            min_tiles=LEAST_TILES,
            max_splits=MOST_SPLITS,
        )

    def chunk_plan(self, runs: Iterable[QueryRun]) -> ChunkPlan:
        """Cut a step's work; once a step for all layers. There is at least one run."""
        form = self._chunk
        at_once = self._device.multiprocessors * form.resident
        blocks = Blocks(form.queries, form.tokens, form.blocks(self.shape), at_once)
        return cut(runs, blocks, start=START, merge=MERGE, least=LEAST)

    def write(  # noqa: PLR0917
        self,
        projected: mx.array,
        rotation: mx.array,
        norms: tuple[mx.array | None, mx.array],
        latents: mx.array,
        turned: mx.array,
        slots: mx.array,
        *,
        traditional: bool,
        epsilon: float,
    ) -> mx.array:
        """Norm the queries and write the latent and rotated vectors of any tokens, in one launch.

        This is all work between the first product and the products with its parts.

        Args:
            projected: (tokens, queried + rank + dims or more): queries, the latent vector before
                its norm, and the end of the key before its rotation.
            rotation: (tokens, dims) float32: the rotation of a vector whose pairs are all (1, 0).
            norms: weights of the queries' norm, (queried,), if there is one, and of the latent
                vectors', (rank,).
            latents, turned: the pools, written in place.
            slots: (tokens,) int32, all different; a negative slot is skipped.

        Returns:
            (tokens, queried), normalised queries. Launches that depend on them follow the write.

        Raises:
            ValueError: the rows of `projected` are too short, or not whole pieces of 16 bytes.
        """
        tokens, width = projected.shape
        of = self.shape
        if width % 8 or width < of.queried + of.rank + of.dims:
            raise ValueError(f"rows of {width} elements")
        queries_norm, latent_norm = norms
        key = Writing(traditional, epsilon, queries_norm is not None)
        if key not in self._writes:
            self._writes[key] = CudaKernel(write_source(of, key))
        first = self._no_norm if queries_norm is None else queries_norm
        (queries,) = self._writes[key](
            inputs=[projected, rotation, first, latent_norm, latents, turned, slots],
            grid=(tokens * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(tokens, of.queried)],
            output_dtypes=[of.dtype],
        )
        return queries

    def attend(  # noqa: PLR0917
        self,
        absorbed: mx.array,
        queries: mx.array,
        rotation: mx.array,
        latents: mx.array,
        turned: mx.array,
        table: mx.array,
        lengths: mx.array,
        *,
        scale: float,
        splits: Splits,
        traditional: bool,
    ) -> mx.array:
        """Attend a decode step's queries, each over its row of pages.

        Args:
            absorbed: (q_heads, rows, rank). They or `queries` depend on the result of `write`.
            queries: (rows, q_heads * (plain + dims)); the last dims of each head are rotated here.
            rotation: as `write` takes it, of `rows` at least.
            table: (rows, max_pages) int32.
            lengths: (rows or more,) int32, tokens visible including the query's own; length 0
                gives zeros.

        Returns:
            (q_heads, rows, rank).
        """
        form, key = self._step, Attending(scale, traditional)
        if key not in self._steps:
            self._steps[key] = CudaKernel(step_source(self.shape, form, key))
        figures = splits.work * form.blocks(self.shape) * form.heads if splits.divided else 1
        out, partial, sums = self._steps[key](
            inputs=[absorbed, queries, rotation, latents, turned, table, lengths, splits.items],
            **self._launch(form, splits.work, absorbed, figures),
        )
        if not splits.divided:
            return out
        (merged,) = self._merge(
            inputs=[out, partial, sums, splits.items],
            grid=(MERGE_THREADS, splits.work, 1),
            threadgroup=(MERGE_THREADS, 1, 1),
            output_shapes=[absorbed.shape],
            output_dtypes=[self.shape.dtype],
        )
        return merged

    def attend_chunks(  # noqa: PLR0917
        self,
        absorbed: mx.array,
        queries: mx.array,
        rotation: mx.array,
        latents: mx.array,
        turned: mx.array,
        table: mx.array,
        plan: ChunkPlan,
        *,
        scale: float,
        traditional: bool,
    ) -> mx.array:
        """Attend runs of consecutive queries, one run after another, as `attend` does.

        The tokens that each query sees follow from `plan`. The result is (q_heads, tokens, rank);
        queries that `plan` does not name have undefined results.

        absorbed: (q_heads, tokens, rank). queries: (tokens, q_heads * (plain + dims)).
        """
        form, key = self._chunk, Attending(scale, traditional)
        if key not in self._chunks:
            self._chunks[key] = CudaKernel(chunk_source(self.shape, form, key))
        figures = max(plan.parts * form.blocks(self.shape) * form.rows, 1)
        pages = [latents, turned, table, plan.items, self._arrivals]
        out, _, _ = self._chunks[key](
            inputs=[absorbed, queries, rotation, *pages],
            **self._launch(form, plan.work, absorbed, figures),
        )
        return out

    def _launch(
        self, form: LatentForm, work: int, absorbed: mx.array, figures: int
    ) -> dict[str, object]:
        """Return the launch parameters of attention, with room for `figures` partial results."""
        return {
            "grid": (form.blocks(self.shape) * THREADS, work, 1),
            "threadgroup": (THREADS, 1, 1),
            "output_shapes": [absorbed.shape, (figures * self.shape.rank,), (figures * 2,)],
            "output_dtypes": [self.shape.dtype, mx.float32, mx.float32],
        }


class TurningKernels:
    """Implementation of `TurnQueries` by launches, for one shape and any number of heads.

    width: elements of a head that the attention to heads takes.
    """

    def __init__(self, shape: LatentShape, width: int) -> None:
        self._shape, self._width = shape, width
        self._kernels: dict[bool, Kernel] = {}

    def __call__(self, queries: mx.array, rotation: mx.array, *, traditional: bool) -> mx.array:
        of, tokens = self._shape, queries.shape[0]
        q_heads = queries.shape[1] // (of.plain + of.dims)
        if traditional not in self._kernels:
            text = turn_source(of, self._width, traditional=traditional)
            self._kernels[traditional] = CudaKernel(text)
        empty = self._width - of.plain - of.dims
        pieces = tokens * q_heads * (of.plain // 8 + of.dims // 4 + empty // 8)
        (out,) = self._kernels[traditional](
            inputs=[queries, rotation],
            grid=(-(-pieces // THREADS) * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(tokens, q_heads, 1, self._width)],
            output_dtypes=[of.dtype],
        )
        return out


def step_source(shape: LatentShape, form: LatentForm, of: Attending) -> CudaSource:
    results = ("out", "partial", "figures", None)
    more = ("lengths", "items")
    return _attending("latent_step", "attend_step", FIELDS, shape, form, of, more, results)


def chunk_source(shape: LatentShape, form: LatentForm, of: Attending) -> CudaSource:
    results = ("out", "partial", "figures", "arrivals")
    more = ("items", "arrivals")
    return _attending(
        "latent_chunks", "attend_chunks", CHUNK_FIELDS, shape, form, of, more, results
    )


def _attending(  # noqa: PLR0917
    name: str,
    function: str,
    fields: int,
    shape: LatentShape,
    form: LatentForm,
    of: Attending,
    more: tuple[str, ...],
    results: tuple[str | None, ...],
) -> CudaSource:
    dtype = shape.dtype
    work = KernelName(
        "AttendLatent",
        (
            *(dtype, shape.rank, shape.dims, shape.plain, shape.q_heads, form.heads),
            *(form.queries, shape.page_size, form.tokens, form.stages, of.traditional),
        ),
    )
    queries, pages = ("absorbed", "queries", "rotation"), ("latents", "turned", "table")
    return CudaSource(
        name=name,
        files=_SOURCES,
        bounds=(THREADS, form.resident),
        function=function,
        constants=(work, fields),
        arguments=(
            Struct(KernelName("LatentQueries", (dtype,)), (*queries, Size("absorbed", 1))),
            Struct(KernelName("LatentPages", (dtype,)), (*pages, Size("table", 1))),
            *(each for each in more if each not in results),
            *(Struct(KernelName("ChunkResults", (dtype,)), results), of.scale),
        ),
        inputs=(*queries, *pages, *more),
        outputs=("out", "partial", "figures"),
        shared_memory=form.shared_memory(shape),
    )


def merge_source(shape: LatentShape, form: LatentForm) -> CudaSource:
    sizes = (shape.rank, shape.q_heads, form.heads, FIELDS)
    return CudaSource(
        name="latent_merge",
        files=_SOURCES,
        bounds=(THREADS, 1),
        within=KernelName("MergeLatent", (shape.dtype, *sizes)),
        function="run",
        arguments=("whole", "partial", "figures", "items", Size("whole", 1), "out"),
        inputs=("whole", "partial", "figures", "items"),
        outputs=("out",),
    )


def write_source(shape: LatentShape, of: Writing) -> CudaSource:
    constants = (shape.dtype, shape.queried, shape.rank, shape.dims, of.traditional, of.normed)
    norms, pages = ("queries_norm", "latent_norm"), ("latents", "turned")
    return CudaSource(
        name="latent_write",
        files=_SOURCES,
        bounds=(THREADS, 1),
        within=KernelName("WriteLatent", constants),
        function="run",
        arguments=(
            *("projected", Size("projected", 1), "rotation", *norms, of.epsilon),
            *("slots", *pages, "queries"),
        ),
        inputs=("projected", "rotation", *norms, *pages, "slots"),
        outputs=("queries",),
        shared_memory=_WARPS * 8,
    )


def turn_source(shape: LatentShape, width: int, *, traditional: bool) -> CudaSource:
    q_heads = Size("queries", 1, over=shape.plain + shape.dims)
    return CudaSource(
        name="latent_turn",
        files=_SOURCES,
        bounds=(THREADS, 1),
        within=KernelName(
            "TurnQueries", (shape.dtype, shape.plain, shape.dims, width, traditional)
        ),
        function="run",
        arguments=("queries", Size("queries", 0), q_heads, "rotation", "out"),
        inputs=("queries", "rotation"),
        outputs=("out",),
    )
