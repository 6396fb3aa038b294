"""Store of responses and their inputs in SQLite, from which Responses API clients continue.

Each response is kept with its own input and the id of the previous one, so that a conversation
takes room once. Responses that nobody has used for long are removed; where there is no room, so
is the least recently used. Use of a response counts as use of all those before it. Each item of a
response, input or output, is found by its id as well, which counts as use of the response.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_manager.mlx_server.config import ResponseLimits
from mlx_manager.mlx_server.engine.stream import Steps, Work
from mlx_manager.mlx_server.errors import ResponseNotFound, StorageFailed
from mlx_manager.mlx_server.services.database import Database
from mlx_manager.mlx_server.services.kept_pictures import TABLES, KeptPictures
from mlx_manager.mlx_server.utils.clock import SteadyClock, ahead_of
from mlx_manager.mlx_server.utils.text import sized

log = logging.getLogger(__name__)

JsonItem = dict[str, Any]

TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, previous TEXT, used REAL NOT NULL, bytes INTEGER NOT NULL,
    response TEXT NOT NULL, input TEXT NOT NULL
)
"""
INDEX = "CREATE INDEX IF NOT EXISTS by_use ON responses (used, bytes)"
TOTAL = (
    "CREATE TABLE IF NOT EXISTS total (bytes INTEGER NOT NULL)",
    """
    INSERT INTO total SELECT COALESCE(SUM(bytes), 0) FROM responses
    WHERE NOT EXISTS (SELECT * FROM total)
    """,
    """
    CREATE TRIGGER IF NOT EXISTS more AFTER INSERT ON responses
    BEGIN UPDATE total SET bytes = bytes + NEW.bytes; END
    """,
    """
    CREATE TRIGGER IF NOT EXISTS less AFTER DELETE ON responses
    BEGIN UPDATE total SET bytes = bytes - OLD.bytes; END
    """,
)
"""Bytes of all responses, maintained by triggers in the file itself: a sum over many responses
takes a tenth of a second, and more than one server may write."""
ITEMS_OF = """
SELECT
    substr({row}.id, 1, length({row}.id) - length(json_extract({row}.response, '$.id')))
        || json_extract(each.value, '$.id'),
    {row}.id
FROM {rows} json_each({items}) AS each
WHERE CASE each.type WHEN 'object' THEN json_type(each.value, '$.id') END = 'text'
"""


def items_of(row: str, rows: str = "") -> str:
    """Return a query for the items of a row of `responses`: each item's key, and the row's id."""
    answered = ITEMS_OF.format(row=row, rows=rows, items=f"{row}.response, '$.output'")
    asked = ITEMS_OF.format(row=row, rows=rows, items=f"{row}.input")
    return f"{answered} UNION ALL {asked}"


# A response that SQLite can't parse, such as JSON with an Infinity, is kept without its items.
ITEMS = (
    """
    CREATE TABLE IF NOT EXISTS items (id TEXT PRIMARY KEY, response TEXT NOT NULL) WITHOUT ROWID
    """,
    "CREATE INDEX IF NOT EXISTS items_by_response ON items (response)",
    f"""
    WITH readable AS (
        SELECT * FROM responses WHERE json_valid(response) AND json_valid(input)
        AND NOT EXISTS (SELECT * FROM items)
    )
    INSERT OR IGNORE INTO items {items_of("kept", "readable AS kept,")}
    """,  # nosec B608  # constants
    f"""
    CREATE TRIGGER IF NOT EXISTS items_of_more AFTER INSERT ON responses
    WHEN json_valid(NEW.response) AND json_valid(NEW.input)
    BEGIN INSERT OR IGNORE INTO items {items_of("NEW")}; END
    """,
    """
    CREATE TRIGGER IF NOT EXISTS items_of_less AFTER DELETE ON responses
    BEGIN DELETE FROM items WHERE response = OLD.id; END
    """,
)
"""Index from items to their responses, maintained by triggers in the file itself: other servers,
older ones included, may write to it. An item that is sent again with its id still belongs to the
response where it was first."""
CHAIN = """
WITH RECURSIVE chain (id, previous, depth) AS (
    SELECT id, previous, 0 FROM responses WHERE id = ?
    UNION ALL
    SELECT r.id, r.previous, depth + 1 FROM responses r JOIN chain ON r.id = chain.previous
)
"""
OLDEST = """
DELETE FROM responses WHERE id = (SELECT id FROM responses ORDER BY used, rowid LIMIT 1)
"""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response as it was sent, with `input`, the items that were new in its request.

    Pictures stand in the items as `core.Image`s.
    """

    response: JsonItem
    input: list[JsonItem]

    @property
    def id(self) -> str:
        found: str = self.response["id"]
        return found

    @property
    def previous(self) -> str | None:
        found: str | None = self.response["previous_response_id"]
        return found


@dataclass(slots=True)
class LatestResponse:
    """Last response of a connection, which can continue from it though it is not stored.

    items: its conversation, as `ResponseStore.history` returns it.
    """

    id: str | None = None
    items: list[JsonItem] = field(default_factory=list)


def place(response_id: str, owner: str) -> str:
    """Return the key under which a response is kept.

    The key holds the owner: nobody finds another owner's response, whatever id they know.
    """
    return f"{owner}/{response_id}" if owner else response_id


class ResponseStore:
    """Store of responses. Methods run in asyncio, statements on threads, one at a time.

    `owner` is the name of the key that a response was requested with; other keys do not find it.

    All methods raise StorageFailed when the file can't be read or written any more.

    Raises:
        MLXManagerError: the file can't be opened, or is no database.
    """

    def __init__(self, limits: ResponseLimits, clock: Callable[[], float] | None = None) -> None:
        self._limits = limits
        self._database = Database(
            limits.path, "MLX_SERVER_RESPONSE_STORE", (TABLE, INDEX, *TOTAL, *ITEMS, *TABLES)
        )
        self._pictures = KeptPictures(self._database, limits.max_image_bytes)
        said = clock or SteadyClock()
        ahead = self._database.run(self._ahead, said())
        self._clock: Callable[[], float] = lambda: said() + ahead

    async def save(self, stored: StoredResponse, owner: str = "") -> None:
        """Store a response; where there is no room, remove others.

        Raises:
            StorageFailed: there is no room for the response, whatever is removed.
        """
        await self._database.call(self._save, stored, owner)

    async def find(self, response_id: str, owner: str = "") -> StoredResponse:
        """
        Raises:
            ResponseNotFound: it was never kept, or is gone.
        """
        await self._if_it_can_be(self._forget)
        return await self._database.call(self._find, response_id, owner)

    async def history(self, response_id: str, owner: str = "") -> list[JsonItem]:
        """Return the items of a conversation up to and with this response, in their order.

        Raises:
            ResponseNotFound: the response, or one that it continues, is not there.
        """
        await self._if_it_can_be(self._forget)
        items = await self._database.call(self._history, response_id, owner)
        await self._if_it_can_be(self._use, response_id, owner)
        return items

    async def items(self, ids: Sequence[str], owner: str = "") -> dict[str, JsonItem]:
        """Return the items with these ids that are there, as they were listed or streamed."""
        await self._if_it_can_be(self._forget)
        found = await self._database.call(self._items, ids, owner)
        await self._if_it_can_be(self._use_items, list(found), owner)
        return found

    async def delete(self, response_id: str, owner: str = "") -> None:
        """
        Raises:
            ResponseNotFound: it was never kept, or is gone.
        """
        await self._database.call(self._delete, response_id, owner)

    def close(self) -> None:
        self._database.close()

    def _ahead(self, now: float) -> float:
        newest = self._database.execute("SELECT MAX(used) FROM responses").fetchone()[0]
        return 0.0 if newest is None else ahead_of(now, newest, self._limits.max_age)

    async def _if_it_can_be(self, job: Callable[..., None], *args: object) -> None:
        """Run a job that writes beside a read. On a full disk only warn: the read still works."""
        try:
            await self._database.call(job, *args)
        except StorageFailed as error:
            log.warning("when responses were used is not kept: %s", error.message)

    def _save(self, stored: StoredResponse, owner: str) -> None:
        key = place(stored.id, owner)
        response, asked = json.dumps(stored.response), self._pictures.dump(key, stored.input)
        most = self._limits.max_bytes
        if len(response) + len(asked) > most:
            # Such a response would remove all others, and could not be kept either.
            raise StorageFailed(
                f"It has {sized(len(response) + len(asked))}; {sized(most)} are kept at most "
                "(MLX_SERVER_RESPONSE_STORE_MB)."
            )
        row = (
            key,
            None if stored.previous is None else place(stored.previous, owner),
            self._clock(),
            len(response) + len(asked),
            response,
            asked,
        )
        self._database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?)", row)
        self._forget()
        self._pictures.make_place()
        while self._database.number("SELECT bytes FROM total") > most:
            if not self._database.execute(OLDEST).rowcount:
                break

    def _find(self, response_id: str, owner: str) -> StoredResponse:
        query = "SELECT response, input FROM responses WHERE id = ?"
        key = place(response_id, owner)
        row = self._database.execute(query, (key,)).fetchone()
        if row is None:
            raise ResponseNotFound(f"There is no response {response_id!r} here.")
        return StoredResponse(json.loads(row[0]), self._pictures.load(key, row[1]))

    def _history(self, response_id: str, owner: str) -> list[JsonItem]:
        query = CHAIN + (
            "SELECT r.response, r.input, r.previous, r.id FROM chain JOIN responses r USING (id) "  # nosec B608  # a constant
            "ORDER BY depth DESC"
        )
        rows = self._database.execute(query, (place(response_id, owner),)).fetchall()
        if not rows or rows[0][2] is not None:
            raise ResponseNotFound(
                f"There is no response {response_id!r} here, or not all that it goes on from.",
                param="previous_response_id",
            )
        return [
            item
            for response, asked, _, key in rows
            for item in self._pictures.load(key, asked) + json.loads(response)["output"]
        ]

    def _items(self, ids: Sequence[str], owner: str) -> dict[str, JsonItem]:
        holders: dict[str, set[str]] = {}
        for item_id in ids:
            query = "SELECT response FROM items WHERE id = ?"
            for (holder,) in self._database.execute(query, (place(item_id, owner),)):
                holders.setdefault(holder, set()).add(item_id)
        found: dict[str, JsonItem] = {}
        for holder, wanted in holders.items():
            query = "SELECT response, input FROM responses WHERE id = ?"
            for response, asked in self._database.execute(query, (holder,)):
                items = self._pictures.load(holder, asked) + json.loads(response)["output"]
                found |= {item["id"]: item for item in items if item["id"] in wanted}
        return found

    def _use_items(self, ids: Sequence[str], owner: str) -> None:
        use = """
        UPDATE responses SET used = ? WHERE id = (SELECT response FROM items WHERE id = ?)
        """
        now = self._clock()
        self._database.execute_all(use, [(now, place(item_id, owner)) for item_id in ids])

    def _use(self, response_id: str, owner: str) -> None:
        use = CHAIN + "UPDATE responses SET used = ? WHERE id IN (SELECT id FROM chain)"  # nosec B608
        self._database.execute(use, (place(response_id, owner), self._clock()))

    def _delete(self, response_id: str, owner: str) -> None:
        kept = place(response_id, owner)
        done = self._database.execute("DELETE FROM responses WHERE id = ?", (kept,))
        if not done.rowcount:
            raise ResponseNotFound(f"There is no response {response_id!r} here.")

    def _forget(self) -> None:
        oldest = self._clock() - self._limits.max_age
        self._database.execute("DELETE FROM responses WHERE used < ?", (oldest,))


async def saving(work: Work, save: Callable[[], Awaitable[None]], steps: Steps) -> None:
    """Do `work`, and `save` once the reader of its steps has taken the last of them.

    The end of the answer is sent afterwards, so that a client that continues at once finds the
    response.
    """
    await work(steps)
    await save()
