"""Client of a server over HTTP: its models, chat, and its administration."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from itertools import repeat
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from mlx_manager.completion_stream import Chunk, error_message, lines, read_line
from mlx_manager.mlx_server.address import is_loopback

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
LOAD_SECONDS = 3600.0
"""Timeout in seconds of requests that may load a model, which may download it first."""


class ServerUnreachable(Exception):
    """Failure to connect: no server answers at the URL."""


class ServerLost(ServerUnreachable):
    """Failure of a connection that was made: there was no answer, or not all of it."""


class ServerRefused(Exception):
    """Error that the server answered. `status` is HTTP's; 200 for an error inside a stream."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class ServerClient:
    """Client of the server at `url` (without `/v1`). To be closed after use.

    This machine's own servers are reached without the environment's proxy, which would look for
    them on the proxy's machine.

    Every method raises:
        ServerUnreachable: the connection can't be made, or breaks.
        ServerRefused: the answer is an error, or not what such a server answers.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS)
        elsewhere = not is_loopback(urlsplit(self.url).hostname or "")
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout, trust_env=elsewhere
        )

    def close(self) -> None:
        self._http.close()

    def models(self) -> list[dict[str, Any]]:
        """Return the models on offer, the default one first: `id`, and all else the server says."""
        path = "/v1/models"
        try:
            return [{**model, "id": str(model["id"])} for model in self.get(path, "data")["data"]]
        except (LookupError, TypeError):
            raise self._not_ours(path) from None

    def default_model(self) -> str:
        """Return the id of the first model on offer."""
        offered = self.models()
        if not offered:
            raise ServerRefused(HTTPStatus.NOT_FOUND, f"{self.url} offers no model.")
        return str(offered[0]["id"])

    def model(self, name: str) -> dict[str, Any]:
        """Return what the server says of one model, also by an alias."""
        return self.get(f"/v1/models/{quote(name, safe='/:')}", "id")

    def get(self, path: str, field: str) -> dict[str, Any]:
        """Return the object at `path`, which must have that `field`."""
        return self._ask("GET", path, field)

    def post(self, path: str, body: Mapping[str, Any], field: str) -> dict[str, Any]:
        """Post `body` and return the object answered, which must have that `field`."""
        return self._ask("POST", path, field, json=body, timeout=LOAD_SECONDS)

    def chat(self, body: Mapping[str, Any]) -> Generator[Chunk]:
        """Stream the answer to a chat completion request. Closing the generator cancels it."""
        wanted = {**body, "stream": True, "stream_options": {"include_usage": True}}
        path = "/v1/chat/completions"
        chunk, whole = None, False
        with (
            self._reaching(),
            self._http.stream("POST", path, json=wanted, timeout=LOAD_SECONDS) as response,
        ):
            if not response.is_success:
                response.read()
                raise refusal(response)
            pieces = zip(repeat(0.0), response.iter_bytes(), strict=False)
            for chunk in filter(None, (read_line(line) for _, line in lines(pieces))):
                if chunk.error:
                    raise ServerRefused(response.status_code, chunk.error)
                whole = whole or chunk.finish_reason is not None
                yield chunk
        if chunk is None:
            raise self._not_ours(path)
        if not whole:
            raise ServerLost(f"{self.url} ended the answer before it was whole")

    def states(self, interval: float) -> Generator[dict[str, Any]]:
        """Stream what the server is doing, every `interval` seconds, until the generator is
        closed."""
        path = "/v1/admin/events"
        asked: dict[str, Any] = {"params": {"interval": interval}, "timeout": LOAD_SECONDS}
        with self._reaching(), self._http.stream("GET", path, **asked) as response:
            if not response.is_success:
                response.read()
                raise refusal(response)
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

    def _ask(self, method: str, path: str, field: str, **options: Any) -> dict[str, Any]:
        with self._reaching():
            response = self._http.request(method, path, **options)
        if not response.is_success:
            raise refusal(response)
        try:
            found = response.json()
        except ValueError:
            raise self._not_ours(path) from None
        if type(found) is not dict or field not in found:
            raise self._not_ours(path)
        return found

    def _not_ours(self, path: str) -> ServerRefused:
        said = f"{self.url}{path} did not answer as a model server does. Is the address right?"
        return ServerRefused(HTTPStatus.OK, said)

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as error:
            raise ServerUnreachable(f"No server answers at {self.url}: {error}") from error
        except UnicodeEncodeError as error:
            said = "There are bytes in the request that are no UTF-8 text."
            raise ServerRefused(HTTPStatus.UNPROCESSABLE_ENTITY, said) from error
        except UnicodeError as error:
            # Of a proxy, say, that no resolver can be asked for.
            raise ServerUnreachable(f"No server answers at {self.url}: {error}") from error
        except httpx.TimeoutException as error:
            raise ServerLost(f"{self.url} did not answer in time") from error
        except httpx.RequestError as error:
            said = str(error) or type(error).__name__
            raise ServerLost(f"The connection to {self.url} broke: {said}") from error


def refusal(response: httpx.Response) -> ServerRefused:
    otherwise = f"{response.url} answered {response.status_code} {response.reason_phrase}"
    try:
        message = error_message(json.loads(response.content), otherwise)
    except ValueError:
        message = otherwise
    return ServerRefused(response.status_code, message)
