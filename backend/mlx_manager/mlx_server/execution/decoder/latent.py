"""Layer of latent attention, where a token keeps one latent vector for all heads.

DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model"
(2024), section 2.1, in the form that multiplies queries and results by each head's matrices of keys
and values, so that heads attend to latents as they are. Where a step has many queries for the
tokens that they see, its latents are expanded to keys and values instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import mlx.core as mx
from mlx import nn
from mlx_lm.models.mla import MultiLinear

from mlx_manager.mlx_server.devices.attention.kernel_set import KernelSet
from mlx_manager.mlx_server.devices.cuda.linear_attention.delta import Texts
from mlx_manager.mlx_server.devices.cuda.matmul.factors import Packed, Weight, arrays_of
from mlx_manager.mlx_server.devices.cuda.matmul.products import ProductKernels
from mlx_manager.mlx_server.devices.cuda.mla.expansion import Expanded
from mlx_manager.mlx_server.devices.cuda.mla.latent import LatentKernels
from mlx_manager.mlx_server.engine.kv.store import LayerShape, LayerStore
from mlx_manager.mlx_server.execution.alike import made_of
from mlx_manager.mlx_server.execution.attention.latent_chunks import Absorbed, meeting_of
from mlx_manager.mlx_server.execution.attention.paged import StepPlan
from mlx_manager.mlx_server.execution.decoder.layers import Block, LayerPart, Shared, Step
from mlx_manager.mlx_server.execution.decoder.mlps import flat
from mlx_manager.mlx_server.execution.decoder.projections import Projection, join, packing_of
from mlx_manager.mlx_server.execution.spec.layers import MLASpec


@dataclass(frozen=True, slots=True)
class ByHead:
    """One matrix for each head.

    weight: (heads * outputs, inputs), one matrix below the other. few: kernels that multiply few
    rows by the matrices, if there are any.
    """

    weight: Weight
    heads: int
    few: ProductKernels | None

    @staticmethod
    def of(layer: nn.Module, few: ProductKernels | None) -> ByHead:
        """Return the matrices of `layer`, a `MultiLinear` or a quantised one.

        few: kernels that multiply few rows, if the device has any; kept if they serve the layer's
        weight.
        """
        heads = layer.weight.shape[0]
        stored = layer.weight if isinstance(layer, MultiLinear) else packing_of(layer)
        weight = flat(stored)
        served = few is not None and few.heads.serves(weight, heads)
        return ByHead(weight, heads, few if served else None)

    def of_rows(self, x: mx.array) -> mx.array:
        """Return the product (heads, tokens, outputs) with rows `x`, (tokens, heads * n).

        The first numbers of each head are multiplied, as many as a matrix has inputs.
        """
        tokens = x.shape[0]
        if self.few is not None and tokens <= self.few.most_rows(self.weight):
            return self.few.heads.of_rows(x, self.weight, self.heads)
        by_head = x.reshape(tokens, self.heads, -1)[..., : self.weight.shape[1]]
        return self._product(by_head.swapaxes(0, 1))

    def to_rows(self, x: mx.array) -> mx.array:
        """Return the product (tokens, heads * outputs) with `x`, (heads, tokens, inputs)."""
        tokens = x.shape[1]
        if self.few is not None and tokens <= self.few.most_rows(self.weight):
            return self.few.heads.to_rows(x, self.weight)
        return self._product(x).swapaxes(0, 1).reshape(tokens, -1)

    @property
    def unpacked(self) -> ByHead:
        if not isinstance(self.weight, Packed):
            return self
        return replace(self, weight=self.weight.dense)

    @property
    def unpacked_bytes(self) -> int:
        if not isinstance(self.weight, Packed):
            return 0
        lines, inputs = self.weight.shape
        return lines * inputs * self.weight.dtype.size

    @property
    def matrices(self) -> mx.array:
        """Dense matrices, (heads, outputs, inputs)."""
        weight = self.weight.dense if isinstance(self.weight, Packed) else self.weight
        return weight.reshape(self.heads, -1, weight.shape[1])

    @property
    def outputs(self) -> int:
        """Number of outputs of one head's matrix."""
        return self.weight.shape[0] // self.heads

    def _product(self, x: mx.array) -> mx.array:
        """Return the product (heads, tokens, outputs) with `x`, (heads, tokens, inputs)."""
        parts = [part.reshape(self.heads, -1, part.shape[-1]) for part in arrays_of(self.weight)]
        weight = made_of(self.weight, parts)
        return weight.times(x) if isinstance(weight, Packed) else x @ weight.swapaxes(1, 2)


@dataclass(frozen=True, slots=True)
class LatentPart(LayerPart):
    """Part of a layer of latent attention.

    queries: the product that makes queries of the query latents; None if the layer has no query
    latents. norms: that of the query latents, or None, and that of the latents. absorb: the
    matrices that take queries to the latents' space. expand: the matrices that take results out of
    it.
    """

    block: Block
    queries: Projection | None
    norms: tuple[nn.RMSNorm | None, nn.RMSNorm]
    absorb: ByHead
    expand: ByHead
    traditional: bool
    kernels: LatentKernels
    scale: float

    @staticmethod
    def of(
        latents: MLASpec, block: Block, kernels: LatentKernels, few: ProductKernels | None
    ) -> LatentPart:
        """Return the part of the layer that `latents` describes.

        block: the same layer's products, joined. kernels: those for the layer's shape. few: kernels
        that multiply few rows, if the device has any.
        """
        return LatentPart(
            block=block,
            queries=None if latents.queries is None else join([latents.queries], few),
            norms=(latents.query_norm, latents.latent_norm),
            absorb=ByHead.of(latents.absorb, few),
            expand=ByHead.of(latents.expand, few),
            traditional=latents.rotary.traditional,
            kernels=kernels,
            scale=latents.scale,
        )

    @property
    def window(self) -> None:
        """None: all earlier tokens are seen."""

    @property
    def kind(self) -> tuple[Any, ...]:
        return (self.kernels.shape, self.scale, self.traditional)

    @property
    def _own_numbers(self) -> int:
        of = self.kernels.shape
        heads = of.plain + of.dims + 2 * of.rank + 2 * self.expand.outputs
        return of.queried + of.q_heads * heads

    @property
    def unpacked(self) -> Self:
        return replace(
            self,
            block=self.block.unpacked,
            queries=None if self.queries is None else self.queries.unpacked,
            absorb=self.absorb.unpacked,
            expand=self.expand.unpacked,
        )

    @property
    def unpacked_bytes(self) -> int:
        own = 0 if self.queries is None else self.queries.unpacked_bytes
        by_head = self.absorb.unpacked_bytes + self.expand.unpacked_bytes
        return self.block.unpacked_bytes + own + by_head

    def store(self, page_size: int, kernels: KernelSet) -> LayerStore:
        of = self.kernels.shape
        shape = LayerShape(1, of.rank, of.dims, of.dtype)
        return LayerStore(shape, page_size, kernels, latents=True)

    def attend(
        self,
        heads: mx.array,
        shared: Shared,
        rotation: int,
        pool: Sequence[mx.array],
        step: Step,
    ) -> mx.array:
        turns = shared.rotations[rotation]
        slots = shared.slots
        assert slots is not None
        latents, rotated = pool
        queries = self._written(heads, turns, (latents, rotated), slots)
        return self.expand.to_rows(
            self.kernels.attend(
                self.absorb.of_rows(queries),
                queries,
                turns,
                latents,
                rotated,
                step.table,
                shared.lengths,
                scale=self.scale,
                splits=step.splits[self.window],
                traditional=self.traditional,
            )
        )

    def _attend_ragged(
        self,
        heads: mx.array,
        rotation: mx.array,
        store: LayerStore,
        plan: StepPlan,
        texts: Texts | None,
    ) -> mx.array:
        pool = (store.keys, store.values)
        queries = self._written(heads, rotation, pool, plan.numbers.array)
        meeting = meeting_of(plan, self.kernels)
        parts, tokens = [], meeting.tokens
        if meeting.absorbed is not None:
            # The padding is included where no expanded spans come behind.
            own = slice(0, None if meeting.expanded is None else tokens)
            parts.append(self._absorbed(queries[own], rotation[own], pool, meeting.absorbed))
        if meeting.expanded is not None:
            store.read_after(queries)
            own = slice(tokens, None)
            parts.append(self._expanded(queries[own], rotation[own], store, meeting.expanded))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _absorbed(
        self, queries: mx.array, rotation: mx.array, pool: tuple[mx.array, mx.array], of: Absorbed
    ) -> mx.array:
        return self.expand.to_rows(
            self.kernels.attend_chunks(
                self.absorb.of_rows(queries),
                queries,
                rotation,
                *pool,
                of.table,
                of.plan,
                scale=self.scale,
                traditional=self.traditional,
            )
        )

    def _expanded(
        self, queries: mx.array, rotation: mx.array, store: LayerStore, of: Expanded
    ) -> mx.array:
        expansion = self.kernels.expansion
        assert expansion is not None
        return expansion.attend(
            queries,
            rotation,
            (store.keys, store.values),
            store.after_write(of.pages),
            (self.absorb.matrices, self.expand.matrices),
            of,
            scale=self.scale,
            traditional=self.traditional,
        )

    def _written(
        self, heads: mx.array, turns: mx.array, pool: tuple[mx.array, mx.array], slots: mx.array
    ) -> mx.array:
        """Write the tokens' own latents; return the queries, (tokens, heads * (plain + dims))."""
        own, latent = self.norms
        queries = self.kernels.write(
            heads,
            turns,
            (None if own is None else own.weight, latent.weight),
            *pool,
            slots,
            traditional=self.traditional,
            epsilon=latent.eps,
        )
        return queries if self.queries is None else self.queries.alone(queries)
