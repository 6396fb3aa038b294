"""The embedded model behind the doors for scripts, one pool for all tests of a module."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
from here import Here

from mlx_manager.mlx_server.backends.text import TextBackend
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.main import open_pool
from mlx_manager.mlx_server.services.inference import (
    ModelPool,
    generate_chat_completion,
    generate_completion,
)

MODEL = "mlx-manager/demo"


class Demo:
    """Asks the embedded model."""

    def __init__(self, pool: ModelPool, here: Here) -> None:
        self.pool = pool
        self._here = here

    @property
    def backend(self) -> TextBackend:
        """The worker's own, once the model is loaded."""
        backend = self._here.models[MODEL].backend
        assert isinstance(backend, TextBackend)
        return backend

    async def chat(self, text: str | list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """The body of the answer to one message, or to several."""
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        body = await generate_chat_completion(MODEL, messages, pool=self.pool, **fields)
        assert isinstance(body, dict)
        return body

    async def choice(self, text: str | list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """The first choice of the answer."""
        return (await self.chat(text, **fields))["choices"][0]

    async def stream(self, text: str, **fields: Any) -> list[dict[str, Any]]:
        """The chunks of a streamed answer."""
        messages = [{"role": "user", "content": text}]
        chunks = await generate_chat_completion(
            MODEL, messages, pool=self.pool, stream=True, **fields
        )
        assert not isinstance(chunks, dict)
        return [chunk async for chunk in chunks]

    async def completion(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        body = await generate_completion(MODEL, prompt, pool=self.pool, **fields)
        assert isinstance(body, dict)
        return body


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def demo() -> AsyncIterator[Demo]:
    here = Here()
    async with open_pool(MLXServerSettings(), start=here) as pool:
        yield Demo(pool, here)
