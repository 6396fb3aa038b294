"""Kinds of attention kernels: what builds them on the default device, and what they must pass."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import mlx.core as mx

from mlx_manager.mlx_server.devices.attention.check import (
    AttentionFeatures,
    check_chunks,
    check_coded,
    check_writer,
    self_check,
)
from mlx_manager.mlx_server.devices.attention.codes import group_of
from mlx_manager.mlx_server.devices.attention.kernel import (
    AttentionShape,
    CodedKernels,
    CodedShape,
    PagedKernels,
    Rotary,
)
from mlx_manager.mlx_server.devices.attention.splits import TILE
from mlx_manager.mlx_server.devices.attention.writer import PageWriter, Pools
from mlx_manager.mlx_server.devices.cuda.attention import decode as cuda
from mlx_manager.mlx_server.devices.cuda.attention.chunks import ChunkKernels, chunk_kernels
from mlx_manager.mlx_server.devices.cuda.compiler.device import device_for
from mlx_manager.mlx_server.devices.cuda.mla import latent
from mlx_manager.mlx_server.devices.cuda.mla.check import check_expansion, check_latent
from mlx_manager.mlx_server.devices.cuda.mla.expansion import Expansion
from mlx_manager.mlx_server.devices.cuda.mla.latent import LatentKernels, TurningKernels
from mlx_manager.mlx_server.devices.cuda.mla.shape import LatentShape
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.devices.kinds import DTYPES, Case, KernelKind, alone, checks
from mlx_manager.mlx_server.devices.metal import attention as metal

log = logging.getLogger(__name__)

PAGE_SIZE = 16
USUAL = AttentionShape(32, 8, 128, PAGE_SIZE, mx.bfloat16)
USUAL_LATENTS = LatentShape(
    q_heads=4,
    rank=512,
    dims=64,
    plain=128,
    queried=768,
    page_size=PAGE_SIZE,
    dtype=mx.bfloat16,
    values=128,
)
"""DeepSeek's sizes, with few heads: the reference takes a while."""
ROTATED = 16
"""The rotated elements of a head are a multiple of this."""
HEAD_DIMS = (64, 80, 96, 128, 256, 512)
"""Head sizes that every device's kernels serve."""
HEAD_SIZES = sorted({*HEAD_DIMS, 72, 112, 160, 192})
"""Head sizes of known models: what every device's kernels serve, and what some device's do, or only
its writer."""
# Most threads of a block on Apple GPUs.
MOST_THREADS = 1024


def build(shape: AttentionShape) -> PagedKernels | Unsupported:
    """Return the kernels for `shape` on the default device; their first use compiles them."""
    on_metal = mx.metal.is_available()
    served = metal.HEAD_DIMS if on_metal else HEAD_DIMS
    if shape.head_dim not in served:
        return Unsupported(f"head size {shape.head_dim}: the kernels serve {served}")
    if shape.page_size % TILE:
        return Unsupported(f"page size {shape.page_size} is no multiple of {TILE}")
    if mx.default_device().type != mx.gpu:
        return Unsupported("the default device is no GPU")
    return metal.build(shape) if on_metal else cuda.build(shape)


def build_coded(of: CodedShape) -> CodedKernels | Unsupported:
    """Return the kernels that attend over pages in 8 bits on the default device."""
    shape = of.attention
    if mx.default_device().type != mx.gpu:
        return Unsupported("the default device is no GPU")
    on_metal = mx.metal.is_available()
    served = metal.HEAD_DIMS if on_metal else HEAD_DIMS
    if shape.head_dim not in served or shape.page_size % TILE:
        return Unsupported(f"heads of {shape.head_dim} in pages of {shape.page_size}")
    return metal.build_coded(of) if on_metal else cuda.build_coded(of)


def build_writer(of: Pools) -> PageWriter | Unsupported:
    """Return the writer for pages that no attention kernel reads, on the default device."""
    if mx.default_device().type != mx.gpu:
        return Unsupported("the default device is no GPU")
    if mx.metal.is_available():
        return (
            metal.writer(of) if of.widest <= MOST_THREADS else Unsupported(f"heads of {of.widest}")
        )
    if of.key_dim % cuda.PIECE or of.value_dim % cuda.PIECE:
        return Unsupported(f"heads of {of.key_dim} and {of.value_dim} elements")
    device = device_for(of.dtype)
    return device if isinstance(device, Unsupported) else cuda.writer(of)


@dataclass(frozen=True, slots=True)
class Latents:
    """Shape of latent attention, with the kind of its rotation: see `Rotary`."""

    shape: LatentShape
    traditional: bool


def _build_expansion(of: Latents) -> list[Expansion] | Unsupported:
    kernels = build_chunks(of.shape.expanded)
    if isinstance(kernels, Unsupported):
        return kernels
    return [Expansion(of.shape, kernels, TurningKernels(of.shape, kernels.shape.head_dim))]


def _check_expansion(kernels: Expansion, of: Latents) -> str | None:
    # Two heads are enough: all heads do the same, and the reference is slow.
    return check_expansion(kernels.of_heads(2), traditional=of.traditional)


def _heads(size: int, dtype: mx.Dtype) -> AttentionShape:
    return AttentionShape(8, 2, size, PAGE_SIZE, dtype)


def _rotary(size: int) -> Rotary:
    return Rotary(size - size % ROTATED, traditional=False, epsilon=1e-6)


def _attention_cases() -> Iterator[Case[AttentionShape]]:
    for dtype, size in product(DTYPES, HEAD_SIZES):
        yield Case(size, dtype, _heads(size, dtype))


def _coded_cases() -> Iterator[Case[CodedShape]]:
    for case in _attention_cases():
        if group := group_of(case.of.head_dim):
            yield Case(case.head_size, case.dtype, CodedShape(case.of, group))


def _latent_cases() -> Iterator[Case[Latents]]:
    for dtype in DTYPES:
        of = replace(USUAL_LATENTS, dtype=dtype)
        yield Case(of.rank, dtype, Latents(of, traditional=False))


WRITER: KernelKind[Pools, PageWriter] = KernelKind(
    "page writer",
    alone(build_writer),
    lambda kernels, of: check_writer(kernels.write, of, PAGE_SIZE),
    lambda: (Case(case.head_size, case.dtype, case.of.pools) for case in _attention_cases()),
)
ATTENTION: KernelKind[AttentionShape, PagedKernels] = KernelKind(
    "attention",
    alone(build),
    lambda kernels, of: self_check(kernels, rotary=_rotary(of.head_dim)),
    _attention_cases,
)
FEATURED: KernelKind[AttentionShape, PagedKernels] = KernelKind(
    "attention with window, soft cap and sinks",
    alone(build),
    lambda kernels, _: self_check(kernels, AttentionFeatures(window=100, softcap=30.0, sinks=True)),
    _attention_cases,
)
CODED: KernelKind[CodedShape, CodedKernels] = KernelKind(
    "attention over 8 bits", alone(build_coded), check_coded, _coded_cases
)
# Two heads are enough: blocks of all heads do the same, and the reference is slow.
CHUNKS: KernelKind[AttentionShape, ChunkKernels] = KernelKind(
    "prompts",
    chunk_kernels,
    lambda kernels, _: check_chunks(kernels.of_heads(2)),
    lambda: (case for case in _attention_cases() if case.of.head_dim % ROTATED == 0),
)
LATENTS: KernelKind[Latents, LatentKernels] = KernelKind(
    "latent attention",
    alone(lambda of: latent.build(of.shape)),
    lambda kernels, of: check_latent(kernels, traditional=of.traditional),
    _latent_cases,
)
EXPANSION: KernelKind[Latents, Expansion] = KernelKind(
    "latent attention of prompts", _build_expansion, _check_expansion, _latent_cases
)


def build_chunks(shape: AttentionShape) -> ChunkKernels | Unsupported:
    """Return checked attention kernels for prompts' chunks on the default device.

    If they are `Unsupported`, MLX's own attention is used.
    """
    return CHUNKS.serving(shape, checks())


def checked_coded(of: CodedShape) -> CodedKernels | Unsupported:
    """Return checked attention over pages in 8 bits on the default device.

    If it is `Unsupported`, MLX's own operations attend over decoded pages.
    """
    return CODED.serving(of, checks())


def build_latents(shape: LatentShape, *, traditional: bool) -> LatentKernels | Unsupported:
    """Return checked kernels for attention to latent vectors on the default device.

    traditional: whether the pairs of a rotation are neighbours; see `Rotary`.
    """
    kernels = LATENTS.serving(Latents(shape, traditional), checks())
    if isinstance(kernels, Unsupported):
        return kernels
    match build_expansion(shape, traditional=traditional):
        case Unsupported(reason):
            log.info("prompts' latents are not expanded: %s", reason)
        case expansion:
            kernels.expansion = expansion
    return kernels


def build_expansion(shape: LatentShape, *, traditional: bool) -> Expansion | Unsupported:
    """Return the checked expansion of latent vectors for prompts; see `build_latents`."""
    return EXPANSION.serving(Latents(shape, traditional), checks())
