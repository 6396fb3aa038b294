"""A server somewhere, over HTTP: its models, chat with it, and its administration."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from mlx_manager.completion_stream import Chunk, error_message, read_line

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
LOAD_SECONDS = 3600.0
"""Loading a model reads all its bytes, and may download them first."""


class ServerUnreachable(Exception):
    """Nobody answers there."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"No server answers at {url}: {reason}")
        self.url = url


class ServerRefused(Exception):
    """The server answered with an error. `status` is HTTP's; 200 for one inside a stream."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class ServerClient:
    """Talks to the server at `url` (without `/v1`). Close it after use.

    Every method raises:
        ServerUnreachable: the connection can't be made, or breaks.
        ServerRefused: the answer is an error.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout)

    def close(self) -> None:
        self._http.close()

    def models(self) -> list[dict[str, Any]]:
        """The models on offer, the default one first: `id`, and what else the server says."""
        return list(self.get("/v1/models")["data"])

    def get(self, path: str, **parameters: str | int) -> dict[str, Any]:
        return self._ask("GET", path, params=parameters)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._ask("POST", path, json=body, timeout=LOAD_SECONDS)

    def chat(self, body: Mapping[str, Any]) -> Generator[Chunk]:
        """Stream the answer to a chat completion request. Closing the generator cancels it."""
        wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with (
            self._reaching(),
            self._http.stream(
                "POST", "/v1/chat/completions", json=wanted, timeout=LOAD_SECONDS
            ) as response,
        ):
            if response.is_error:
                response.read()
                raise refusal(response)
            for line in response.iter_lines():
                chunk = read_line(line)
                if chunk is not None:
                    if chunk.error:
                        raise ServerRefused(response.status_code, chunk.error)
                    yield chunk

    def _ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        with self._reaching():
            response = self._http.request(method, path, **options)
        if response.is_error:
            raise refusal(response)
        try:
            return dict(response.json())
        except ValueError:
            raise ServerRefused(
                response.status_code, f"{self.url}{path} answered with something else than JSON."
            ) from None

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ServerUnreachable(self.url, str(error) or type(error).__name__) from error


def refusal(response: httpx.Response) -> ServerRefused:
    otherwise = f"{response.url} answered {response.status_code} {response.reason_phrase}"
    try:
        message = error_message(json.loads(response.content), otherwise)
    except ValueError:
        message = otherwise
    return ServerRefused(response.status_code, message)
