"""What hidden states are multiplied with, projections of the same input joined."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.activations import swiglu

from mlx_manager.mlx_server.engine.kv.powers import gated_by, pays
from mlx_manager.mlx_server.engine.products import ProductKernels
from mlx_manager.mlx_server.engine.products.factors import Link, Norm, Scaled


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum, (rows, width), and what the product behind it takes of it."""

    rows: mx.array
    ahead: mx.array | Scaled

    @staticmethod
    def alone(rows: mx.array) -> Sum:
        return Sum(rows, rows)


@dataclass(frozen=True, slots=True)
class Dense:
    """`weight` is (outputs, inputs), `bias` (outputs,). `few` multiplies few rows, if it may.

    `transposed` is a view of `weight`: one that is made at each product is a microsecond of the
    host's.
    """

    weight: mx.array
    transposed: mx.array
    bias: mx.array | None
    few: ProductKernels | None

    @staticmethod
    def of(weight: mx.array, bias: mx.array | None, few: ProductKernels | None) -> Dense:
        """few: what multiplies few rows, if anything does, and if it serves `weight`."""
        served = few is not None and few.serves(weight)
        return Dense(weight, weight.T, bias, few if served else None)

    def normed(self, x: mx.array | Scaled, norm: nn.RMSNorm) -> mx.array:
        """The product with `norm(x)`. x: `Scaled` if its maker did what is `expected`."""
        if self.few is not None and x.shape[0] <= self.few.most_rows:
            return self.few.multiply(x, self.weight, norm=_norm(norm), bias=self.bias)
        return self._product(norm(x))

    def gated(self, x: mx.array | Scaled, norm: nn.RMSNorm) -> mx.array:
        """`silu(gate) * up`, the halves of the product with `norm(x)`, as in `normed`."""
        if self.few is None:
            return _gate(self._product(norm(x)))
        if x.shape[0] > self.few.most_gated_rows:
            return self.few.gate(self._product(norm(x)))
        return self.few.gated(x, self.weight, norm=_norm(norm), bias=self.bias)

    def by_groups(self, rows: int) -> bool:
        """Whether `gated` multiplies so many by warpgroups."""
        return self.few is not None and self.few.gates_by_groups(self.weight, rows)

    def expected(self, norm: nn.RMSNorm) -> Norm | None:
        """`norm`, before this product, as who makes its few rows may do a part of it."""
        return None if self.few is None else _norm(norm)

    def added_to(self, residual: mx.array, x: mx.array, following: Norm | None) -> Sum:
        """`residual` plus the product with `x`. following: what the next product expects of it."""
        few, bias = self.few, self.bias
        if few is None or x.shape[0] > few.most_rows:
            out = mx.addmm(residual, x, self.transposed)
            return Sum.alone(out if bias is None else out + bias)
        if following is None:
            return Sum.alone(few.multiply(x, self.weight, bias=bias, residual=residual))
        return Sum(*few.multiply_ahead(x, self.weight, following, bias=bias, residual=residual))

    def link(self, norm: nn.RMSNorm | None = None) -> Link | None:
        """The product with `norm(x)`, or with `x`, as a part of a chain, if it may be one."""
        if self.few is None:
            return None
        return Link(self.weight, self.bias, None if norm is None else _norm(norm))

    def _product(self, x: mx.array) -> mx.array:
        if self.bias is None:
            return x @ self.transposed
        return mx.addmm(self.bias, x, self.transposed)


class OneProduct(ABC):
    """What is made of nothing but its product. For the methods, see `Dense`."""

    __slots__ = ()

    def normed(self, x: mx.array | Scaled, norm: nn.RMSNorm) -> mx.array:
        return self._product(norm(x))

    def gated(self, x: mx.array | Scaled, norm: nn.RMSNorm) -> mx.array:
        return _gate(self._product(norm(x)))

    def by_groups(self, rows: int) -> bool:
        return False

    def expected(self, norm: nn.RMSNorm) -> Norm | None:
        return None

    def added_to(self, residual: mx.array, x: mx.array, following: Norm | None) -> Sum:
        return Sum.alone(residual + self._product(x))

    def link(self, norm: nn.RMSNorm | None = None) -> Link | None:
        return None

    @abstractmethod
    def _product(self, x: mx.array) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class Quantized(OneProduct):
    """As `mx.quantized_matmul` takes them; `bias` is (outputs,)."""

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    bias: mx.array | None
    group_size: int
    bits: int
    mode: str

    def _product(self, x: mx.array) -> mx.array:
        out = mx.quantized_matmul(
            x,
            self.weight,
            scales=self.scales,
            biases=self.biases,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True, slots=True)
class OfItsOwn(OneProduct):
    """A layer whose weight lies in memory in a way of its own, and which multiplies by itself."""

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


Projection = Dense | Quantized | OfItsOwn


def _norm(norm: nn.RMSNorm) -> Norm:
    return Norm(norm.weight, norm.eps)


def _gate(both: mx.array) -> mx.array:
    gate, up = mx.split(both, 2, axis=-1)
    if pays(both, gate.size):
        return gated_by(gate, up)
    gated: mx.array = swiglu(gate, up)
    return gated


def join(linears: Sequence[nn.Module], few: ProductKernels | None) -> Projection:
    """One product for several of the same input. Their weights become views of the joined ones,
    lazily: both are there until `Anatomy.weights` are evaluated."""
    first = linears[0]
    joined = dict(first)
    if len(linears) > 1:
        joined = {name: _below([linear[name] for linear in linears]) for name in joined}
        starts = dict.fromkeys(joined, 0)
        for linear in linears:
            stops = {name: start + linear[name].shape[0] for name, start in starts.items()}
            linear.update({name: joined[name][starts[name] : stops[name]] for name in joined})
            starts = stops
    if isinstance(first, nn.QuantizedLinear):
        return Quantized(
            joined["weight"],
            joined["scales"],
            joined.get("biases"),
            joined.get("bias"),
            first.group_size,
            first.bits,
            first.mode,
        )
    if type(first) is not nn.Linear:
        layer = copy(first)
        layer.update(joined)
        return OfItsOwn(layer)
    return Dense.of(joined["weight"], joined.get("bias"), few)


def _below(parts: Sequence[mx.array]) -> mx.array:
    """`parts`, one below the other; in memory by columns where the first of them is."""
    first = parts[0]
    if first.dtype == mx.float32 and first.ndim == 2:
        rows, columns = np.array(first, copy=False).strides
        if rows < columns:
            return mx.concatenate([part.T for part in parts], axis=1).T
    return mx.concatenate(list(parts))
