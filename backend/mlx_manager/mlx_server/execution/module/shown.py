"""Pictures in a module of mlx-lm's: rows in place of embeddings, levels, and rotations by axes.

Some modules ignore embeddings that they are given, so the part that embeds tokens is wrapped.
"""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx
from mlx import nn

from mlx_manager.mlx_server.devices.attention.kernel import Rotary
from mlx_manager.mlx_server.execution.forward import NotApplicable
from mlx_manager.mlx_server.execution.images import Insertion, MRope, VisionTraits
from mlx_manager.mlx_server.execution.module.hidden import body_of
from mlx_manager.mlx_server.execution.module.wrapped import wrapped
from mlx_manager.mlx_server.execution.spec.parts import NotFusable
from mlx_manager.mlx_server.execution.spec.rotation import Rotation, is_known, turned

EMBEDDINGS = ("embed_tokens", "tok_embeddings", "wte")


class Showing(Protocol):
    """Pass under way, as far as pictures go.

    insertion: rows of pictures, if there are any. angles: (tokens,) or (3, tokens), the positions
    by which tokens are rotated, if they are others than their places. chunk: whether the pass is
    one sequence's, (1, tokens), instead of (tokens, 1).
    """

    @property
    def insertion(self) -> Insertion | None: ...

    @property
    def angles(self) -> mx.array | None: ...

    @property
    def chunk(self) -> bool: ...


def show(model: nn.Module, vision: VisionTraits, showing: Showing) -> None:
    """Make the module show the pictures of each pass.

    Raises:
        NotApplicable: the module has no place for them.
    """
    body = body_of(model)
    name = None if body is None else next((n for n in EMBEDDINGS if n in body.children()), None)
    if body is None or name is None:
        raise NotApplicable("there is no part that embeds tokens")

    def embed(embed: Any, *args: Any, **kwargs: Any) -> mx.array:
        embeddings: mx.array = embed(*args, **kwargs)
        insertion = showing.insertion
        return embeddings if insertion is None else insertion.into(embeddings)

    body[name] = wrapped(body[name], embed)
    for number in range(vision.levels):
        _add_level(body, number, showing)
    if vision.mrope is not None:
        for _, module in model.named_modules():
            if "rope" in module.children():
                module.rope = _by_axes(module.rope, vision.mrope, showing)


def _add_level(body: nn.Module, number: int, showing: Showing) -> None:
    def run(layer: Any, *args: Any, **kwargs: Any) -> mx.array:
        hidden: mx.array = layer(*args, **kwargs)
        insertion = showing.insertion
        return hidden if insertion is None else insertion.added(number, hidden)

    body.layers[number] = wrapped(body.layers[number], run)


def _by_axes(rope: nn.Module, mrope: MRope, showing: Showing) -> nn.Module:
    """Return `rope`, which rotates by the pass's angles where there are some."""
    if not is_known(rope):
        raise NotApplicable("positions with several axes, in a rotation that is not known")
    dims, traditional = turned(rope)
    try:
        rotation = Rotation.of(rope, Rotary(dims, traditional, None), mrope)
    except NotFusable as reason:
        raise NotApplicable(str(reason)) from reason

    def turn(rotate: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        angles = showing.angles
        plain: mx.array
        if angles is None:
            plain = rotate(x, *args, **kwargs)
            return plain
        if angles.ndim == 1 and not showing.chunk:
            plain = rotate(x, offset=angles)
            return plain
        return rotation.turn(x, angles, chunk=showing.chunk)

    return wrapped(rope, turn)
