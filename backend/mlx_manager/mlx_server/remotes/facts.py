"""Facts about a model elsewhere, as its server's list of models tells them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mlx_manager.mlx_server.core import Kind
from mlx_manager.mlx_server.errors import RemoteFailed
from mlx_manager.mlx_server.remotes.dialects import OURS, Dialect, dialect_of

MOST_NAMED = 10
KINDS = frozenset({"text", "embedding", "reranker"})


@dataclass(frozen=True, slots=True)
class Facts:
    """A model elsewhere. name: its id there. 0 and None mean that its server does not tell.

    input_modalities: "text", and "image" if it sees. thinks: whether its answers may begin with
    thinking.
    """

    name: str
    dialect: Dialect
    kind: Kind | None = None
    family: str = ""
    context_length: int = 0
    input_modalities: tuple[str, ...] | None = None
    thinks: bool | None = None


def facts_of(listed: object, own: str, wanted: str | None, place: str) -> Facts:
    """Return the facts of the model that is meant, from the body of `GET /v1/models`.

    own: the model's name here. wanted: the name that the owner wrote, which need not be listed: it
    may be an alias. Without one, the model of our own name is meant, or else the only model; at a
    server of this program's the default model, which is listed first.

    Raises:
        RemoteFailed: the body is no list of models, or it is not clear which is meant.
    """
    cards = _cards(listed, place)
    by_name = {str(card["id"]): card for card in cards}
    meant = by_name.get(wanted or own)
    if meant is not None:
        return _read(meant, str(meant["id"]))
    if cards and wanted is not None:
        dialect = dialect_of(cards[0])
        return Facts(wanted, dialect)
    if len(cards) == 1 or (cards and dialect_of(cards[0]) is OURS):
        return _read(cards[0], str(cards[0]["id"]))
    offered = ", ".join(list(by_name)[:MOST_NAMED]) or "none"
    raise RemoteFailed(
        f"{place} offers {len(cards)} models ({offered}), and which of them {own!r} is is not "
        "said: its owner writes `remote_model` in the models' file."
    )


def _cards(listed: object, place: str) -> Sequence[Mapping[str, Any]]:
    match listed:
        case {"data": list(cards)} if all(isinstance(c, dict) and "id" in c for c in cards):
            return cards
    raise RemoteFailed(f"{place} has no list of models at /models. Is the address right?")


def _read(card: Mapping[str, Any], name: str) -> Facts:
    kind, family, thinks = card.get("kind"), card.get("family"), card.get("supports_reasoning")
    architecture, meta = card.get("architecture"), card.get("meta")
    modalities = card.get("input_modalities")
    if modalities is None and isinstance(architecture, dict):
        modalities = architecture.get("input_modalities")
    lengths = (
        card.get("context_length"),
        card.get("max_model_len"),
        meta.get("n_ctx_train") if isinstance(meta, dict) else None,
    )
    return Facts(
        name,
        dialect_of(card),
        cast(Kind, kind) if isinstance(kind, str) and kind in KINDS else None,
        family if isinstance(family, str) else "",
        next((length for length in lengths if type(length) is int and length > 0), 0),
        tuple(map(str, modalities)) if isinstance(modalities, list) else None,
        thinks if isinstance(thinks, bool) else None,
    )
