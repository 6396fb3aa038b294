"""Additions of a product to the residual: at the end of a layer's attention, and of its MLP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.devices.cuda.matmul.factors import Link, RowNorm
from mlx_manager.mlx_server.devices.cuda.matmul.products import ProductKernels
from mlx_manager.mlx_server.devices.cuda.matmul.sums import SumKernels
from mlx_manager.mlx_server.execution.decoder.projections import (
    Normed,
    Projection,
    Sum,
    join_output,
    norm_of,
)

NormFor = Callable[[nn.RMSNorm], nn.RMSNorm]
"""Function that returns the norm to use in a layer's norm's place."""


@dataclass(frozen=True, slots=True)
class Addition(ABC):
    """Product and the way in which it is added to the residual. Methods take rows and the residual,
    (rows, width)."""

    product: Projection

    @abstractmethod
    def launches(
        self, residual: mx.array, x: mx.array, following: RowNorm | None
    ) -> tuple[list[mx.array], Sum]:
        """Return the intermediate launches and the sum, which is not among them.

        following: the next product's norm, if a part of it is to be done on the way.
        """

    @property
    def sees_rows(self) -> bool:
        """Return whether one block has whole rows, so that a norm of the rows costs no launch."""
        return False

    def link(self) -> Link | None:
        """Return the product as a part of a chain, or None if it cannot be one."""
        return None

    @property
    def width(self) -> int:
        outputs: int = self.product.weight.shape[-2]
        return outputs

    @property
    def token_numbers(self) -> int:
        """Count of the numbers that are made of a token on the way, without the sum."""
        return 0

    @property
    def unpacked(self) -> Self:
        return replace(self, product=self.product.unpacked)

    @property
    def unpacked_bytes(self) -> int:
        return self.product.unpacked_bytes


@dataclass(frozen=True, slots=True)
class ProductAddition(Addition):
    """Addition by the product itself."""

    def launches(
        self, residual: mx.array, x: mx.array, following: RowNorm | None
    ) -> tuple[list[mx.array], Sum]:
        return [], self.product.added_to(residual, x, following)

    def link(self) -> Link | None:
        return self.product.link()


@dataclass(frozen=True, slots=True)
class NormedAndAdded(Addition):
    """Addition behind a norm, which takes whole rows of the product.

    kernels: those that do the norm and the addition in one launch, if there are any. scale: (1,),
    the factor of the sum, if there is one.
    """

    norm: nn.RMSNorm
    kernels: SumKernels | None
    scale: mx.array | None

    def launches(
        self, residual: mx.array, x: mx.array, following: RowNorm | None
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


def addition_of(  # noqa: PLR0917
    layer: nn.Module,
    norm: nn.RMSNorm | None,
    few: ProductKernels | None,
    norm_for: NormFor,
    scale: mx.array | None = None,
    group: mx.distributed.Group | None = None,
) -> Addition:
    """Return the addition of the product with `layer`, through `norm` if there is one.

    The layer's weights become views, as in `join`. few: kernels that multiply few rows, if the
    device has any. scale: the factor of the sum, where there is a norm. group: as in `join_output`.
    """
    product = join_output(layer, few, group)
    if norm is None:
        return ProductAddition(product)
    serves = few is not None and few.sums.serves(norm.weight.size)
    return NormedAndAdded(product, norm_for(norm), few.sums if few and serves else None, scale)
