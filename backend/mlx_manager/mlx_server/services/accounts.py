"""Usage and rate limits of each API key, and the queue for its concurrent requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from mlx_manager.mlx_server.config import AccessRules
from mlx_manager.mlx_server.core import GenerationRequest
from mlx_manager.mlx_server.errors import (
    AuthenticationFailed,
    Overloaded,
    PermissionDenied,
    RateLimited,
)
from mlx_manager.mlx_server.services.bucket import Bucket
from mlx_manager.mlx_server.services.keys import ApiKey, Keyring, read_keys

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Rate:
    """State of a limit: `limit` units a minute, `left` of them, full again in `reset` seconds."""

    unit: str
    limit: int
    left: int
    reset: float


class Account:
    """One key's use of the server. In asyncio only."""

    def __init__(self, key: ApiKey, clock: Clock = time.monotonic) -> None:
        self.key = key
        limits = key.limits
        self._buckets = {
            unit: Bucket(per_minute, clock)
            for unit, per_minute in (
                ("requests", limits.requests_per_minute),
                ("tokens", limits.tokens_per_minute),
            )
            if per_minute is not None
        }
        self._most_queued = limits.max_queued
        self._queued = 0
        most = limits.max_concurrent
        self._turns = None if most is None else asyncio.Semaphore(most)

    # -- rates ---------------------------------------------------------------------------------

    def count_request(self) -> None:
        """
        Raises:
            RateLimited: the key's requests or tokens of this minute are used up.
        """
        used_up = [(b.wait, unit) for unit, b in self._buckets.items() if b.left < 1]
        if used_up:
            wait, unit = max(used_up)
            raise RateLimited(
                f"Key {self.key.name!r} has used its {self._buckets[unit].per_minute:,} {unit} a "
                f"minute. Try again in {wait:.1f} s.",
                retry_after=max(1, math.ceil(wait)),
            )
        if "requests" in self._buckets:
            self._buckets["requests"].take(1)

    def rates(self) -> list[Rate]:
        return [
            Rate(unit, bucket.per_minute, bucket.left, bucket.reset)
            for unit, bucket in self._buckets.items()
        ]

    def priority(self, asked: int) -> int:
        """Return the priority of a request that asks for `asked`; lower is more urgent.

        0 is also the priority of requests that ask for none. A key that is not allowed 0 gets its
        most urgent permitted priority instead.
        """
        first = self.key.limits.priority
        return asked if asked != 0 or first is None else max(0, first)

    def check_priority(self, requests: Sequence[GenerationRequest]) -> None:
        """
        Raises:
            PermissionDenied: a request wants to go before those that the key may.
        """
        first = self.key.limits.priority
        asked = min(self.priority(request.priority) for request in requests)
        if first is not None and asked < first:
            raise PermissionDenied(
                f"`priority` {asked} is more urgent than key {self.key.name!r} may be: at least "
                f"{first}.",
                param="priority",
            )

    def salt(self, asked: str) -> str:
        """Return the salt of what is kept of a request's prompt, which asks for `asked`.

        No request of another key has the salt of a key with `own_prefixes`: names have no NUL, and
        what is asked for comes behind the first one.
        """
        owner = self.key.name if self.key.limits.own_prefixes else ""
        return f"{owner}\0{asked}" if owner or asked else ""

    def charge(self, tokens: int) -> None:
        """Count tokens that have been processed or drawn for the key."""
        if "tokens" in self._buckets:
            self._buckets["tokens"].take(tokens)

    # -- turns ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until fewer of the key's requests are under way than may be; first come first.

        Raises:
            Overloaded: too many wait already.
        """
        if self._turns is None:
            yield
            return
        if self._turns.locked() and self._queued >= self._most_queued:
            raise Overloaded(
                f"Key {self.key.name!r} has {self.key.limits.max_concurrent} requests under way "
                f"and {self._queued} waiting, which is all it may. Try again shortly."
            )
        self._queued += 1
        try:
            await self._turns.acquire()
        finally:
            self._queued -= 1
        try:
            yield
        finally:
            self._turns.release()


UNLIMITED = Account(ApiKey("", ""))
"""Account of calls without a key: no limits, and so no state."""


class Accounts:
    """Accounts of all keys, found by the secret that a caller presents."""

    def __init__(self, rules: AccessRules, clock: Clock = time.monotonic) -> None:
        """
        Raises:
            MLXManagerError: the keys can't be read.
        """
        self._rules = rules
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._keyring = Keyring(())
        self.know(read_keys(rules))

    def read(self) -> tuple[ApiKey, ...]:
        """Return the keys as they are written now; the known keys stay until `know`.

        Raises:
            MLXManagerError: they can't be read.
        """
        return read_keys(self._rules, some=False)

    def know(self, keys: tuple[ApiKey, ...]) -> None:
        """Admit these keys alone from now on. Unchanged keys keep their usage."""
        known = self._accounts
        self._accounts = {
            key.sha256: known[key.sha256]
            if key.sha256 in known and known[key.sha256].key == key
            else Account(key, self._clock)
            for key in keys
        }
        self._keyring = Keyring(keys)

    def find(self, secret: str | None) -> Account:
        """Return the account of who presents `secret`; UNLIMITED if no keys are asked for.

        Raises:
            AuthenticationFailed: there is no such key, or none was presented.
        """
        if not self._rules.need_key:
            return UNLIMITED
        if not secret:
            raise AuthenticationFailed(
                "An API key is needed: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
            )
        key = self._keyring.find(secret)
        if key is None:
            raise AuthenticationFailed("This API key is not known here.")
        return self._accounts[key.sha256]
