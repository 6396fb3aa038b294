"""The models that the owner's file places on other machines."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_manager.mlx_server.core import Kind, RowStatus
from mlx_manager.mlx_server.remotes.remote import Remote
from mlx_manager.mlx_server.remotes.upstream import Upstream, new_session

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a model on other machines, as its owner wrote it.

    urls: addresses that end in `/v1`. key_env: the variable with the key for them. model: the
    model's name there. kind: what it is for, where its servers don't tell. silence: the most
    seconds without a byte of an answer.
    """

    urls: tuple[str, ...]
    key_env: str | None
    model: str | None
    kind: Kind | None
    silence: float


class Remotes:
    """Models elsewhere, by their names here. Belongs to the event loop of its first use."""

    def __init__(self, places: Mapping[str, Placement]) -> None:
        self._places = dict(places)
        self._remotes: dict[str, Remote] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._watching = False

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def get(self, name: str) -> Remote | None:
        """Return a model; None if there is none of that name elsewhere."""
        if name not in self._places:
            return None
        if name not in self._remotes:
            self._remotes[name] = self._open(name, self._places[name])
        return self._remotes[name]

    def all(self) -> list[Remote]:
        return [remote for name in self._places if (remote := self.get(name)) is not None]

    def follow(self, places: Mapping[str, Placement]) -> None:
        """Use these places from now on. Requests under way go on where they are."""
        for name, place in self._places.items():
            if places.get(name) != place:
                self._remotes.pop(name, None)
                if (watch := self._watches.pop(name, None)) is not None:
                    watch.cancel()
        self._places = dict(places)
        if self._watching:
            self.watch()

    def watch(self) -> None:
        """Look at all servers again and again, until closed."""
        self._watching = True
        for remote in self.all():
            if remote.id not in self._watches:
                name = f"watch {remote.id}"
                self._watches[remote.id] = asyncio.create_task(remote.watch(), name=name)

    def rows(self) -> list[RowStatus]:
        """Return the rows of all models that have not ended."""
        return [row for remote in self._remotes.values() for row in remote.rows()]

    async def close(self) -> None:
        watches = [*self._watches.values()]
        self._watches.clear()
        for watch in watches:
            watch.cancel()
        for remote in self._remotes.values():
            remote.close()
        await asyncio.gather(*watches, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _shared(self) -> aiohttp.ClientSession:
        """Return the session of all servers."""
        if self._session is None:
            self._session = new_session()
        return self._session

    def _open(self, name: str, place: Placement) -> Remote:
        key, broken = None, ""
        if place.key_env is not None:
            key = os.environ.get(place.key_env)
            if not key:
                broken = f"the variable {place.key_env} (`key_env` in the models' file) is not set"
            elif not (key.isascii() and key.isprintable()):
                broken = f"{place.key_env} has a character that no key can have"
        if broken:
            log.error("%s can't be asked: %s", name, broken)
        servers = [Upstream(url, key, place.silence, self._shared) for url in place.urls]
        return Remote(name, servers, wanted=place.model, stated=place.kind, broken=broken)
