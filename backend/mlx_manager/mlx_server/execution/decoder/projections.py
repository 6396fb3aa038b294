"""Products of hidden states with weights; projections of the same input are joined."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.activations import swiglu, swiglu_oai

from mlx_manager.mlx_server.devices.cpu.powers import gated_by, gelu_gated_by, pays
from mlx_manager.mlx_server.devices.cuda.matmul.factors import (
    Activation,
    Link,
    Packed,
    RowNorm,
    Scaled,
    Weight,
)
from mlx_manager.mlx_server.devices.cuda.matmul.products import ProductKernels
from mlx_manager.mlx_server.devices.gathered import Gathered, GatheredPacked
from mlx_manager.mlx_server.execution.spec.parts import DENSE, PACKED

MOST_PACKED = 8
"""Largest number of rows that are multiplied by packed weights where dense ones exist beside them.

Steps of an 8B with 1, 8 and 32 rows take 1.90, 2.77 and 5.09 ms by integers of 4 bits, and 4.04,
4.21 and 4.60 by bfloat16 (H200).
"""


@dataclass(frozen=True, slots=True)
class Normed:
    """Rows behind the norm of the next product, (rows, inputs)."""

    rows: mx.array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape


Ahead = mx.array | Scaled | Normed
"""Input of a product behind a norm: plain rows, `Scaled` rows whose maker has done the `expected`
part of the norm, or `Normed` rows."""


@dataclass(frozen=True, slots=True)
class Sum:
    """Sum, (rows, width), and the input that the next product takes of it."""

    rows: mx.array
    ahead: Ahead

    @staticmethod
    def alone(rows: mx.array) -> Sum:
        return Sum(rows, rows)


class FewOrMany(ABC):
    """Product that multiplies few rows by kernels of ours, where there are some (`few`), and many
    by MLX.

    The kernels of ours also do the norm, activation or addition around a product. `bias` is
    (outputs,).
    """

    __slots__ = ()

    few: ProductKernels | None
    bias: mx.array | None

    @property
    @abstractmethod
    def factor(self) -> Weight:
        """Weight as `few` takes it."""

    @property
    @abstractmethod
    def unpacked(self) -> Projection:
        """Copy with dense weights, by which MLX multiplies many rows faster; the product itself if
        it has none. Dense weights take `unpacked_bytes` while the products with them run."""

    @property
    def unpacked_bytes(self) -> int:
        return 0

    @abstractmethod
    def _product(self, x: mx.array) -> mx.array: ...

    @abstractmethod
    def _sum(self, residual: mx.array, x: mx.array) -> mx.array:
        """Return `residual` plus the product with `x`."""

    def alone(self, x: mx.array) -> mx.array:
        """Return the product with `x`."""
        if self.few is not None and x.shape[0] <= self.few.most_rows(self.factor):
            return self.few.multiply(x, self.factor, bias=self.bias)
        return self._product(x)

    def normed(self, x: Ahead, norm: nn.RMSNorm) -> mx.array:
        """Return the product with `norm(x)`."""
        if self.few is not None and x.shape[0] <= self.few.most_rows(self.factor):
            rows, left = _left_to_do(x, norm)
            return self.few.multiply(rows, self.factor, norm=left, bias=self.bias)
        return self._product(_normed(x, norm))

    def gated(self, x: Ahead, norm: nn.RMSNorm, activation: Activation) -> mx.array:
        """Return `activation` of gate and up, the halves of the product with `norm(x)`."""
        if self.few is None:
            return _gate(self._product(_normed(x, norm)), activation)
        if x.shape[0] > self.few.most_gated_rows(self.factor):
            return self.few.gate(self._product(_normed(x, norm)), activation)
        rows, left = _left_to_do(x, norm)
        return self.few.gated(rows, self.factor, norm=left, bias=self.bias, activation=activation)

    def by_groups(self, rows: int) -> bool:
        """Return whether `gated` multiplies so many rows by warpgroups."""
        return self.few is not None and self.few.gates_by_groups(self.factor, rows)

    def expected(self, norm: nn.RMSNorm) -> RowNorm | None:
        """Return `norm`, which is before this product, for the maker of few rows, who may do a part
        of it; None if the kernels are absent."""
        return None if self.few is None else norm_of(norm)

    def added_to(self, residual: mx.array, x: mx.array, following: RowNorm | None) -> Sum:
        """Return `residual` plus the product with `x`.

        following: the next product's norm, if a part of it is to be done on the way.
        """
        few, bias = self.few, self.bias
        if few is None or x.shape[0] > few.most_rows(self.factor):
            return Sum.alone(self._sum(residual, x))
        if following is None or not few.serves_ahead(self.factor):
            return Sum.alone(few.multiply(x, self.factor, bias=bias, residual=residual))
        return Sum(*few.multiply_ahead(x, self.factor, following, bias=bias, residual=residual))

    def link(
        self, norm: nn.RMSNorm | None = None, activation: Activation = Activation.SILU
    ) -> Link | None:
        """Return the product with `norm(x)`, or with `x`, as a part of a chain; None if it cannot
        be one.

        activation: that of gates and ups.
        """
        if self.few is None:
            return None
        return Link(self.factor, self.bias, None if norm is None else norm_of(norm), activation)


@dataclass(frozen=True, slots=True)
class Dense(FewOrMany):
    """Product with a dense weight, (outputs, inputs).

    `transposed` is a view of `weight`: making one at each product takes the host a microsecond.
    """

    weight: mx.array
    transposed: mx.array
    bias: mx.array | None
    few: ProductKernels | None

    @staticmethod
    def of(weight: mx.array, bias: mx.array | None, few: ProductKernels | None) -> Dense:
        """Return the product with `weight`.

        few: kernels that multiply few rows, if the device has any; kept if they serve `weight`.
        """
        return Dense(weight, weight.T, bias, _if_served(few, weight))

    @property
    def factor(self) -> mx.array:
        return self.weight

    @property
    def unpacked(self) -> Dense:
        return self

    def _product(self, x: mx.array) -> mx.array:
        if self.bias is None:
            return x @ self.transposed
        return mx.addmm(self.bias, x, self.transposed)

    def _sum(self, residual: mx.array, x: mx.array) -> mx.array:
        out = mx.addmm(residual, x, self.transposed)
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True, slots=True)
class Quantized(FewOrMany):
    """Product with a packed weight, as `mx.quantized_matmul` takes it."""

    packed: Packed
    bias: mx.array | None
    few: ProductKernels | None

    @staticmethod
    def of(packed: Packed, bias: mx.array | None, few: ProductKernels | None) -> Quantized:
        """Return the product with `packed`.

        few: kernels that multiply few rows, if the device has any; kept if they serve `packed`.
        """
        return Quantized(packed, bias, _if_served(few, packed))

    @property
    def weight(self) -> mx.array:
        return self.packed.words

    @property
    def factor(self) -> Packed:
        return self.packed

    @property
    def unpacked(self) -> Projection:
        if self.few is None:
            return self
        return Dense.of(self.packed.dense, self.bias, self.few)

    @property
    def unpacked_bytes(self) -> int:
        outputs, inputs = self.packed.shape
        return 0 if self.few is None else outputs * inputs * self.packed.dtype.size

    def _product(self, x: mx.array) -> mx.array:
        out = self.packed.times(x)
        return out if self.bias is None else out + self.bias

    def _sum(self, residual: mx.array, x: mx.array) -> mx.array:
        return residual + self._product(x)


@dataclass(frozen=True, slots=True)
class Twofold:
    """Product with a weight that is stored twice. Few rows are multiplied by the packed one, which
    is read faster, and more rows by the dense one. For the methods, see `FewOrMany`."""

    packed: Quantized
    dense: Dense

    @property
    def weight(self) -> mx.array:
        return self.dense.weight

    @property
    def unpacked(self) -> Projection:
        return self.dense

    @property
    def unpacked_bytes(self) -> int:
        return 0

    def alone(self, x: mx.array) -> mx.array:
        return self._for(x.shape[0]).alone(x)

    def normed(self, x: Ahead, norm: nn.RMSNorm) -> mx.array:
        return self._for(x.shape[0]).normed(x, norm)

    def gated(self, x: Ahead, norm: nn.RMSNorm, activation: Activation) -> mx.array:
        return self._for(x.shape[0]).gated(x, norm, activation)

    def by_groups(self, rows: int) -> bool:
        return self._for(rows).by_groups(rows)

    def expected(self, norm: nn.RMSNorm) -> RowNorm | None:
        return self.dense.expected(norm)

    def added_to(self, residual: mx.array, x: mx.array, following: RowNorm | None) -> Sum:
        return self._for(x.shape[0]).added_to(residual, x, following)

    def link(
        self, norm: nn.RMSNorm | None = None, activation: Activation = Activation.SILU
    ) -> Link | None:
        return self.packed.link(norm, activation)

    def _for(self, rows: int) -> FewOrMany:
        return self.packed if rows <= MOST_PACKED else self.dense


class OneProduct(ABC):
    """Product without kernels of ours: norm, activation and addition are operations of their own.
    For the methods, see `FewOrMany`."""

    __slots__ = ()

    @property
    def unpacked(self) -> Self:
        return self

    @property
    def unpacked_bytes(self) -> int:
        return 0

    def alone(self, x: mx.array) -> mx.array:
        return self._product(x)

    def normed(self, x: Ahead, norm: nn.RMSNorm) -> mx.array:
        return self._product(_normed(x, norm))

    def gated(self, x: Ahead, norm: nn.RMSNorm, activation: Activation) -> mx.array:
        return _gate(self._product(_normed(x, norm)), activation)

    def by_groups(self, rows: int) -> bool:
        return False

    def expected(self, norm: nn.RMSNorm) -> RowNorm | None:
        return None

    def added_to(self, residual: mx.array, x: mx.array, following: RowNorm | None) -> Sum:
        return Sum.alone(residual + self._product(x))

    def link(
        self, norm: nn.RMSNorm | None = None, activation: Activation = Activation.SILU
    ) -> Link | None:
        return None

    @abstractmethod
    def _product(self, x: mx.array) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class OfItsOwn(OneProduct):
    """Product with a layer whose weight is stored in a layout of its own, and which multiplies by
    itself."""

    layer: nn.Linear

    @property
    def weight(self) -> mx.array:
        weight: mx.array = self.layer.weight
        return weight

    @property
    def bias(self) -> mx.array | None:
        bias: mx.array | None = self.layer.get("bias")
        return bias

    def _product(self, x: mx.array) -> mx.array:
        out: mx.array = self.layer(x)
        return out


@dataclass(frozen=True, slots=True)
class Summed(OneProduct):
    """Sum over all ranks of products, each with a rank's share of the inputs.

    own: this rank's, without the bias, which is added once.
    """

    own: Projection
    bias: mx.array | None
    group: mx.distributed.Group

    @property
    def weight(self) -> mx.array:
        return self.own.weight

    @property
    def unpacked(self) -> Self:
        return replace(self, own=self.own.unpacked)

    @property
    def unpacked_bytes(self) -> int:
        return self.own.unpacked_bytes

    def added_to(self, residual: mx.array, x: mx.array, following: RowNorm | None) -> Sum:
        # Rank 0 adds the residual to its own product, where that costs no launch.
        first = self.group.rank() == 0
        own = self.own.added_to(residual, x, None).rows if first else self.own.alone(x)
        return Sum.alone(self._summed(own))

    def _product(self, x: mx.array) -> mx.array:
        return self._summed(self.own.alone(x))

    def _summed(self, own: mx.array) -> mx.array:
        out = mx.distributed.all_sum(own, group=self.group)
        return out if self.bias is None else out + self.bias


Head = Dense | Quantized | Twofold
Projection = Head | OfItsOwn | Summed


def _if_served(few: ProductKernels | None, weight: Weight) -> ProductKernels | None:
    return few if few is not None and few.serves(weight) else None


def norm_of(norm: nn.RMSNorm) -> RowNorm:
    """Return the norm as the kernels take it."""
    return RowNorm(norm.weight, norm.eps)


def _normed(x: Ahead, norm: nn.RMSNorm) -> mx.array:
    """Return `norm(x)`, or the rows of `x` if the norm has been applied already."""
    rows: mx.array = x.rows if isinstance(x, Normed) else norm(x)
    return rows


def _left_to_do(x: Ahead, norm: nn.RMSNorm) -> tuple[mx.array | Scaled, RowNorm | None]:
    """Return the rows that the kernels take of `x`, and the norm if it is left to the kernels."""
    return (x.rows, None) if isinstance(x, Normed) else (x, norm_of(norm))


def _gate(both: mx.array, activation: Activation) -> mx.array:
    gate, up = mx.split(both, 2, axis=-1)
    by_powers = pays(both, gate.size)
    gated: mx.array
    match activation:
        case Activation.SILU:
            gated = gated_by(gate, up) if by_powers else swiglu(gate, up)
        case Activation.GELU:
            gated = gelu_gated_by(gate, up) if by_powers else _geglu(gate, up)
        case Activation.CLAMPED_SILU:
            gated = swiglu_oai(gate, up)
    return gated


@partial(mx.compile, shapeless=True)
def _geglu(gate: mx.array, up: mx.array) -> mx.array:
    gated: mx.array = nn.gelu_approx(gate) * up
    return gated


def join_output(
    layer: nn.Module, few: ProductKernels | None, group: mx.distributed.Group | None
) -> Projection:
    """Return the product with a layer behind attention or an MLP.

    group: the ranks that have shares of its inputs, over which products are summed up; None for a
    whole layer.
    """
    if group is None:
        return join([layer], few)
    share = copy(layer)
    bias = share.pop("bias", None)
    return Summed(join([share], few), bias, group)


def join(linears: Sequence[nn.Module], few: ProductKernels | None, multiple: int = 1) -> Projection:
    """Return one product for several layers of the same input.

    The layers' weights become views of the joined ones, lazily: both exist until
    `LayerSpec.weights` are evaluated. The outputs are filled up by zeros to a multiple of
    `multiple`.
    """
    first = linears[0]
    joined = dict(first)
    lacking = -sum(linear.weight.shape[0] for linear in linears) % multiple
    if len(linears) > 1 or lacking:
        joined = {name: _below([linear[name] for linear in linears], lacking) for name in joined}
        starts = dict.fromkeys(joined, 0)
        for linear in linears:
            stops = {name: start + linear[name].shape[0] for name, start in starts.items()}
            linear.update({name: joined[name][starts[name] : stops[name]] for name in joined})
            starts = stops
    layer = copy(first)
    layer.update(joined)
    if isinstance(first, PACKED):
        return Quantized.of(packing_of(layer), layer.get("bias"), few)
    if type(first) not in DENSE:
        return OfItsOwn(layer)
    return _dense(layer, few)


def packing_of(layer: nn.Module) -> Packed:
    """Return the packed weight of a quantised layer, which may be one of experts."""
    return Packed(
        layer.weight,
        layer.scales,
        layer.get("biases"),
        layer.group_size,
        layer.bits,
        layer.mode,
    )


def table_of(embed: nn.Module) -> Weight | None:
    """Return the weight of the embeddings, or None if they are more than looked up."""
    if type(embed) is nn.QuantizedEmbedding:
        return packing_of(embed)
    return embed.weight if type(embed) is nn.Embedding else None


def _kept(layer: nn.Module) -> Packed:
    """Return the packed weight that a dense layer was made from and keeps."""
    arrays = (layer.packed, layer.packed_scales, layer.packed_biases)
    return Packed(*arrays, layer.group_size, layer.bits)


def head(layer: nn.Module, dtype: mx.Dtype, few: ProductKernels | None) -> Head | None:
    """Return the product with the vocabulary, or None if it is neither quantised nor a plain one of
    `dtype`.

    layer: the module that has the weight, perhaps the embedding.
    """
    if type(layer) in (*PACKED, GatheredPacked, nn.QuantizedEmbedding):
        return Quantized.of(packing_of(layer), layer.get("bias"), few)
    if type(layer) in (*DENSE, Gathered, nn.Embedding) and layer.weight.dtype == dtype:
        return _dense(layer, few)
    return None


def _dense(layer: nn.Linear | nn.Embedding, few: ProductKernels | None) -> Dense | Twofold:
    bias = layer.get("bias")
    dense = Dense.of(layer.weight, bias, few)
    if "packed" not in layer:
        return dense
    packed = Quantized.of(_kept(layer), bias, few)
    return dense if packed.few is None else Twofold(packed, dense)


def _below(parts: Sequence[mx.array], lacking: int) -> mx.array:
    """Return `parts` one below the other, and so many rows of zeros; column by column in memory if
    the first part is."""
    first = parts[0]
    if lacking:
        parts = [*parts, mx.zeros((lacking, *first.shape[1:]), first.dtype)]
    if first.dtype == mx.float32 and first.ndim == 2:
        rows, columns = np.array(first, copy=False).strides
        if rows < columns:
            return mx.concatenate([part.T for part in parts], axis=1).T
    return mx.concatenate(list(parts))
