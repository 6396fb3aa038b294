"""Pictures of a request's body: read for a model that sees, lines in their place for another."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from mlx_manager.mlx_server.api.http.paths import routed
from mlx_manager.mlx_server.api.state import Server, caller_of, meant, server_of
from mlx_manager.mlx_server.config import ApiLimits
from mlx_manager.mlx_server.errors import ModelNotFound, RequestTooLarge
from mlx_manager.mlx_server.protocols.images import Place, places, put, replace_images, sources


async def settle(request: Request, body: object, limits: ApiLimits) -> None:
    """Have the pictures in the JSON of a body read, and put them there; or put lines there.

    Raises:
        InvalidRequest: one of them can't be read, or is not allowed; the error names its place.
        RequestTooLarge: there are more than allowed.
    """
    ollama = routed(request.scope).startswith("/api/")
    found = places(body, beside=ollama)
    if not found or not isinstance(body, dict):
        return
    server = server_of(request)
    if not await sees(server, body.get("model"), ollama=ollama):
        replace_images(found, limits.images_as_text)
        # Those that are left are refused by name where the body is translated.
        check_images(places(body, beside=ollama), limits)
        return
    check_images(found, limits)
    # Without keys, requests take turns.
    turns = caller_of(request) or request.state.request_id
    put(found, await server.images.read(sources(found), turns))


async def sees(server: Server, name: Any, *, ollama: bool = False) -> bool:
    """Return whether the model that a request names sees pictures.

    A model that is not there, which is an error later, sees none.
    """
    if not isinstance(name, str | None):
        return False
    try:
        return await server.pool.sees(meant(server, name, ollama=ollama))
    except ModelNotFound:
        return False


def check_images(found: list[Place], limits: ApiLimits, earlier: str = "") -> None:
    """Count the pictures of a request.

    earlier: the field that stands for those that were sent before.

    Raises:
        RequestTooLarge: there are more than allowed.
    """
    count = sum(place.count for place in found)
    if count > limits.max_images:
        field = found[0].path.partition("[")[0]
        fields = " and ".join(f"`{name}`" for name in (field, earlier) if name)
        raise RequestTooLarge(
            f"{fields} {'have' if earlier else 'has'} {count} images; this server accepts "
            f"{limits.max_images} (MLX_SERVER_MAX_IMAGES).",
            param=field,
        )
