"""One server elsewhere: its connection, its circuit breaker, and what it tells of its model.

Nothing is asked of any address but the one that the owner wrote: redirects are refused, and the
environment's proxies are not used.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Literal

from pydantic_core import from_json

from mlx_manager.mlx_server.core import HOPS, NOBODY, Caller, GenerationRequest
from mlx_manager.mlx_server.errors import MLXManagerError, RemoteFailed
from mlx_manager.mlx_server.remotes.breaker import Breaker
from mlx_manager.mlx_server.remotes.facts import Facts, facts_of
from mlx_manager.mlx_server.remotes.failures import (
    ELSEWHERE,
    SICK,
    TryElsewhere,
    refused,
    silent,
    unreachable,
)

if TYPE_CHECKING:
    import aiohttp

CONNECT_SECONDS = 5.0
LOOK_SECONDS = 10.0
"""Time limit of a look at a server's list of models."""
MOST_HOPS = 4
"""Most servers of this program's that pass a request on: more are a circle."""
NOT_FOUND = 404
Health = Literal["unknown", "up", "down"]


def new_session() -> aiohttp.ClientSession:
    """Return a session for the servers of all models, in the running event loop.

    A connection is used once: one that the server closes at the same moment would fail a request
    that is well. Cookies are not kept, and nothing is compressed, which would hold up tokens.
    """
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        headers={"user-agent": "mlx-manager", "accept-encoding": "identity"},
    )


class Upstream:
    """A server that answers for a model. Belongs to the event loop.

    url: the address below which OpenAI's routes are, such as `http://studio:8000/v1`. key: sent as
    a bearer token, if there is one. silence: the most seconds without a byte of an answer.
    session: returns the session of all servers, in the running event loop.

    Attributes:
        facts: what it tells of the model; None before it was reached.
        waiting: number of requests under way there, of this model's.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        silence: float,
        session: Callable[[], aiohttp.ClientSession],
    ) -> None:
        self.url = url
        self.facts: Facts | None = None
        self.waiting = 0
        self.breaker = Breaker()
        self._session = session
        self._silence = silence
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    @property
    def health(self) -> Health:
        if self.breaker.failures:
            return "down"
        return "unknown" if self.facts is None else "up"

    @property
    def root(self) -> str:
        """The address without `/v1`."""
        return self.url.removesuffix("/v1")

    @contextmanager
    def used(self) -> Iterator[None]:
        """Count a request for the length of the context, and note how it ends.

        Raises:
            TryElsewhere: as the context does.
        """
        trial = self.breaker.enter()
        self.waiting += 1
        try:
            yield
        except TryElsewhere as failure:
            if failure.sick:
                self.breaker.failed(failure.error.message)
            raise
        finally:
            self.waiting -= 1
            self.breaker.leave(trial)

    async def look(self, own: str, wanted: str | None) -> Facts:
        """Ask for the list of models, and return the facts of the one that is meant.

        Raises:
            TryElsewhere: the server can't be reached, or tells nothing of that model. The failure
                has been noted.
        """
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                listed = await self.ask("GET", "/models")
            self.facts = facts_of(listed, own, wanted, self.url)
        except TimeoutError:
            error = silent(self.url, LOOK_SECONDS).error
        except TryElsewhere as failure:
            error = failure.error
        except MLXManagerError as failure:
            error = failure
        else:
            self.breaker.succeeded()
            return self.facts
        self.breaker.failed(error.message)
        raise TryElsewhere(error, sick=False)

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        caller: Caller = NOBODY,
        root: bool = False,
    ) -> Any:
        """Return the JSON that a request is answered with.

        caller: the origin of the request. root: the path is not below `/v1`.

        Raises:
            TryElsewhere: another server may answer.
            MLXManagerError: the server's error, or it answers with something else than JSON.
        """
        async with self.answer(
            method, path, None if body is None else dumped(body), caller=caller, root=root
        ) as response:
            content = await response.read()
        try:
            return from_json(content)
        except ValueError:
            raise RemoteFailed(
                f"{self.url}{path} does not answer as a model server does."
            ) from None

    @asynccontextmanager
    async def answer(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        request: GenerationRequest | None = None,
        *,
        caller: Caller = NOBODY,
        root: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a response with status 200. Leaving the context early ends the request there.

        body: JSON. request: the request that is sent, by whose fields errors are told.

        Raises:
            TryElsewhere: another server may answer.
            MLXManagerError: the server's error.
        """
        import aiohttp

        limits = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=self._silence
        )
        try:
            async with self._session().request(
                method,
                (self.root if root else self.url) + path,
                data=body,
                headers=self._headers_of(caller if request is None else request.caller),
                allow_redirects=False,
                timeout=limits,
            ) as response:
                try:
                    if response.status != 200:
                        await self._refuse(response, request)
                    self.breaker.succeeded()
                    yield response
                finally:
                    # Without this an answer that is left early would be read to its end.
                    response.close()
        except aiohttp.ConnectionTimeoutError as error:
            raise unreachable(self.url, error) from None
        except TimeoutError as error:
            if isinstance(error, aiohttp.SocketTimeoutError):
                raise silent(self.url, self._silence) from None
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(self.url, error) from None

    def _headers_of(self, caller: Caller) -> dict[str, str]:
        """
        Raises:
            RemoteFailed: servers pass the request on in a circle.
        """
        if caller.hops >= MOST_HOPS:
            raise RemoteFailed(
                f"{self.url} is not asked: {caller.hops} servers have passed the request on to "
                "each other. Do their models' files point in a circle?"
            )
        headers = {**self._headers, HOPS: str(caller.hops + 1), "content-type": "application/json"}
        if caller.request_id:
            headers["x-request-id"] = caller.request_id
        return headers

    async def _refuse(
        self, response: aiohttp.ClientResponse, request: GenerationRequest | None
    ) -> None:
        """
        Raises:
            TryElsewhere: another server may answer.
            MLXManagerError: the server's error.
        """
        content = await response.read()
        error = refused(response.status, content, response.headers, self.url, request)
        if response.status not in SICK:
            self.breaker.succeeded()
        if response.status == NOT_FOUND:
            # It may have another model by now: the next request looks again.
            self.facts = None
        if response.status in ELSEWHERE:
            raise TryElsewhere(error, sick=response.status in SICK)
        raise error


def dumped(body: Mapping[str, Any]) -> bytes:
    """Return a body as JSON."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
