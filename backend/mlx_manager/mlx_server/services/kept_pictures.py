"""Pictures of stored responses: each is stored once, by its digest, however many responses have it.

They lie beside the texts in the store's database, with a size limit of their own. A picture goes
with the last response that has it; triggers in the file itself see to that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mlx_manager.mlx_server.core import Image
from mlx_manager.mlx_server.errors import StorageFailed
from mlx_manager.mlx_server.protocols.images import places_in
from mlx_manager.mlx_server.services.database import Database
from mlx_manager.mlx_server.utils.text import sized

JsonItem = dict[str, Any]
REFERENCE = "kept_image"
"""Field of the object that stands for a picture in an item's text: its digest."""

TABLES = (
    """
    CREATE TABLE IF NOT EXISTS images (
        digest TEXT PRIMARY KEY, bytes INTEGER NOT NULL, width INTEGER NOT NULL,
        height INTEGER NOT NULL, data BLOB NOT NULL
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS images_of (
        response TEXT NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (response, digest)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX IF NOT EXISTS images_by_digest ON images_of (digest)",
    """
    CREATE TRIGGER IF NOT EXISTS images_of_less AFTER DELETE ON responses
    BEGIN DELETE FROM images_of WHERE response = OLD.id; END
    """,
    """
    CREATE TRIGGER IF NOT EXISTS images_less AFTER DELETE ON images_of
    WHEN NOT EXISTS (SELECT * FROM images_of WHERE digest = OLD.digest)
    BEGIN DELETE FROM images WHERE digest = OLD.digest; END
    """,
)
OLDEST = """
DELETE FROM responses WHERE id = (
    SELECT responses.id FROM responses JOIN images_of ON images_of.response = responses.id
    ORDER BY responses.used, responses.rowid LIMIT 1
)
"""


class KeptPictures:
    """Pictures in the database of a store of responses. Its methods run within the store's jobs."""

    def __init__(self, database: Database, max_bytes: int) -> None:
        self._database = database
        self._most = max_bytes

    def dump(self, response: str, items: Sequence[JsonItem]) -> str:
        """Return items as JSON, in which a reference stands for each picture; store the pictures.

        response: key of the response that has the items.

        Raises:
            StorageFailed: there is no room for the pictures, whatever is removed.
        """
        found: dict[str, Image] = {}

        def reference(value: object) -> dict[str, str]:
            assert isinstance(value, Image), "all else is JSON"
            found[value.digest] = value
            return {REFERENCE: value.digest}

        text = json.dumps(items, default=reference)
        size = sum(len(image.data) for image in found.values())
        if size > self._most:
            raise StorageFailed(
                f"Its images have {sized(size)}; {sized(self._most)} are kept at most "
                "(MLX_SERVER_RESPONSE_STORE_IMAGES_MB)."
            )
        self._database.execute_all(
            "INSERT OR IGNORE INTO images VALUES (?, ?, ?, ?, ?)",
            (
                (image.digest, len(image.data), image.width, image.height, image.data)
                for image in found.values()
            ),
        )
        self._database.execute_all(
            "INSERT OR IGNORE INTO images_of VALUES (?, ?)",
            ((response, digest) for digest in found),
        )
        return text

    def make_place(self) -> None:
        """Remove the least recently used responses with pictures until these fit in their limit."""
        while self._database.number("SELECT COALESCE(SUM(bytes), 0) FROM images") > self._most:
            if not self._database.execute(OLDEST).rowcount:
                break

    def load(self, response: str, items: str) -> list[JsonItem]:
        """Return the items that were dumped, with their pictures."""
        found: list[JsonItem] = json.loads(items)
        wanted = [place for place in places_in(found, "input") if REFERENCE in _image(place.part)]
        if not wanted:
            return found
        query = (
            "SELECT digest, width, height, data FROM images JOIN images_of USING (digest) "
            "WHERE response = ?"
        )
        images = {
            digest: Image(data, digest, width, height, "input")
            for digest, width, height, data in self._database.execute(query, (response,))
        }
        for place in wanted:
            digest = _image(place.part)[REFERENCE]
            if digest in images:
                place.holder[place.key] = place.part | {"image_url": images[digest]}
        return found


def _image(part: JsonItem) -> JsonItem:
    match part:
        case {"image_url": dict(found)}:
            return found
    return {}
