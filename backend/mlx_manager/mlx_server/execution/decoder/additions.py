"""How a residual and what a product gives become a sum: at the end of a layer's attention, and of
its MLP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.devices.cuda.matmul import ProductKernels
from mlx_manager.mlx_server.devices.cuda.matmul.factors import Link, Norm
from mlx_manager.mlx_server.devices.cuda.matmul.sums import SumKernels
from mlx_manager.mlx_server.execution.decoder.projections import (
    Normed,
    Projection,
    Sum,
    join,
    norm_of,
)

NormFor = Callable[[nn.RMSNorm], nn.RMSNorm]
"""What stands for a layer's norm."""


@dataclass(frozen=True, slots=True)
class Addition(ABC):
    """A product, and how it is added. Its methods take rows, and their residual, (rows, width)."""

    product: Projection

    @abstractmethod
    def launches(
        self, residual: mx.array, x: mx.array, following: Norm | None
    ) -> tuple[list[mx.array], Sum]:
        """What it launches, but for the sum; and that. following: what the next product expects of
        it."""

    @property
    def sees_rows(self) -> bool:
        """Whether whole rows are in one place, where a norm of theirs costs no launch."""
        return False

    def link(self) -> Link | None:
        """The product as a part of a chain, if it may be one."""
        return None

    @property
    def width(self) -> int:
        outputs: int = self.product.weight.shape[-2]
        return outputs

    @property
    def token_numbers(self) -> int:
        """Numbers that are made of a token on the way, without the sum."""
        return 0

    @property
    def unpacked(self) -> Self:
        return replace(self, product=self.product.unpacked)

    @property
    def unpacked_bytes(self) -> int:
        return self.product.unpacked_bytes


@dataclass(frozen=True, slots=True)
class Added(Addition):
    """By the product itself, on its way."""

    def launches(
        self, residual: mx.array, x: mx.array, following: Norm | None
    ) -> tuple[list[mx.array], Sum]:
        return [], self.product.added_to(residual, x, following)

    def link(self) -> Link | None:
        return self.product.link()


@dataclass(frozen=True, slots=True)
class NormedAndAdded(Addition):
    """Behind a norm, which takes whole rows of the product. `kernels` do both, if anything does.
    scale: (1,), what the sum is multiplied by, if it is."""

    norm: nn.RMSNorm
    kernels: SumKernels | None
    scale: mx.array | None

    def launches(
        self, residual: mx.array, x: mx.array, following: Norm | None
    ) -> tuple[list[mx.array], Sum]:
        given = self.product.alone(x)
        if self.kernels is None:
            added = residual + self.norm(given)
            return [given], Sum.alone(added if self.scale is None else added * self.scale)
        rows, *ahead = self.kernels(residual, given, norm_of(self.norm), following, self.scale)
        return [given, *ahead], Sum(rows, Normed(ahead[0]) if ahead else rows)

    @property
    def sees_rows(self) -> bool:
        return self.kernels is not None

    @property
    def token_numbers(self) -> int:
        return self.width


def addition_of(
    layer: nn.Module,
    norm: nn.RMSNorm | None,
    few: ProductKernels | None,
    norm_for: NormFor,
    scale: mx.array | None = None,
) -> Addition:
    """Of a layer whose weights become views, as in `join`, and the norm behind it, if there is one.

    few: what multiplies few rows, if anything does. scale: of the sum, where there is a norm.
    """
    product = join([layer], few)
    if norm is None:
        return Added(product)
    serves = few is not None and few.sums.serves(norm.weight.size)
    return NormedAndAdded(product, norm_for(norm), few.sums if few and serves else None, scale)
