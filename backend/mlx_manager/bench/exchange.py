"""One request and its streamed answer, with the moments at which its pieces came."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from mlx_manager.bench.plan import Plan
from mlx_manager.completion_stream import Usage, error_message, lines, read_line
from mlx_manager.mlx_server.address import is_loopback

LONGEST_ERROR = 300


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one request. Moments are `time.perf_counter`'s. arrivals: of chunks with output.

    status 0: no answer came. usage None: the server sent none. error "" : it ended as it should.
    """

    status: int
    started: float
    ended: float
    arrivals: tuple[float, ...] = ()
    usage: Usage | None = None
    finish_reason: str | None = None
    error: str = ""

    @property
    def output_tokens(self) -> int:
        """Return the tokens that the server counted; one a chunk where it did not count."""
        return len(self.arrivals) if self.usage is None else self.usage.completion


def make_session(plan: Plan) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {plan.key}"} if plan.key else {}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=plan.timeout),
        headers=headers,
        read_bufsize=2**20,
        proxy=proxy_for(plan.url),
    )


def proxy_for(url: str) -> str | None:
    """Return the environment's proxy for `url`; None for this machine's own servers."""
    place = urlsplit(url)
    host = place.hostname or ""
    if is_loopback(host) or proxy_bypass(host):
        return None
    proxies = getproxies()
    found = proxies.get(place.scheme) or proxies.get("all")
    return f"http://{found}" if found and "://" not in found else found


async def exchange(session: aiohttp.ClientSession, plan: Plan, body: dict[str, Any]) -> Outcome:
    """Send one request and return its outcome.

    While pieces arrive only their times are noted. The pieces are parsed when all are there, so
    that the client is not what is measured.
    """
    pieces: list[tuple[float, bytes]] = []
    status = 0
    started = time.perf_counter()
    try:
        async with session.post(f"{plan.url}/v1/chat/completions", json=body) as response:
            status = response.status
            async for piece in response.content.iter_any():
                pieces.append((time.perf_counter(), piece))
    except TimeoutError:
        error = f"no end of the answer within {plan.timeout:g} s"
        return Outcome(status, started, time.perf_counter(), error=error)
    except (aiohttp.ClientError, OSError, UnicodeError) as failure:
        error = str(failure) or type(failure).__name__
        return Outcome(status, started, time.perf_counter(), error=error)
    ended = time.perf_counter()
    if status != 200:
        said = b"".join(piece for _, piece in pieces)
        return Outcome(status, started, ended, error=f"{status}: {refusal(said)}")
    return read(started, ended, pieces)


def read(started: float, ended: float, pieces: list[tuple[float, bytes]]) -> Outcome:
    arrivals: list[float] = []
    usage: Usage | None = None
    finish_reason: str | None = None
    error = ""
    for moment, line in lines(pieces):
        chunk = read_line(line)
        if chunk is None:
            continue
        if chunk.carries_output:
            arrivals.append(moment)
        usage = chunk.usage or usage
        finish_reason = chunk.finish_reason or finish_reason
        error = chunk.error or error
    if not error and finish_reason is None:
        error = "the stream ended without a finish_reason"
    return Outcome(
        200, started, ended, tuple(arrivals), usage, finish_reason, error[:LONGEST_ERROR]
    )


def refusal(content: bytes) -> str:
    text = content.decode(errors="replace")
    try:
        return error_message(json.loads(text), "it said")[:LONGEST_ERROR]
    except ValueError:
        return text[:LONGEST_ERROR]
