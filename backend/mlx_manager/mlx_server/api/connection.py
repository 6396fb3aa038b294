"""The caller at the other end: what it sent, and whether it is still there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from itertools import chain, islice
from types import TracebackType
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from mlx_manager.mlx_server.api.errors import invalid
from mlx_manager.mlx_server.api.http.codings import decoded
from mlx_manager.mlx_server.api.http.paths import routed
from mlx_manager.mlx_server.api.pictures import settle
from mlx_manager.mlx_server.config import ApiLimits, EngineLimits
from mlx_manager.mlx_server.errors import (
    InvalidParameter,
    InvalidRequest,
    RequestNotReceived,
    RequestTooLarge,
)
from mlx_manager.mlx_server.schemas.surrogates import REPLACEMENT, halves
from mlx_manager.mlx_server.schemas.wire import (
    SYSTEMS,
    Wire,
    conversation,
    entries,
    parts,
    tools,
)

log = logging.getLogger(__name__)

LARGE = 64 * 2**10
"""Bytes of a body that is not parsed and validated in one go."""
AT_ONCE = 4096
"""Halves of characters that are replaced before others have their turn."""
MOST_NAMED = 20
LONGEST_NAME = 64
MOST_BRACKETS = 2**18
"""Lists and objects of a body that is parsed, and brackets in its texts, of which 5 MB of code have
as many. To parse ten million empty lists takes a gigabyte, and seconds in which nobody else is
served."""
MOST_ENTRIES = 16384
"""Entries of a list or an object: to validate more takes time in which nobody else is served."""
MOST_PIECES = 8192
"""Messages, content parts, calls and tools together. The dearest, tools of /v1/responses, take
0.2 s in which nobody else is served."""
MOST_TOKENS = 2**20
TOKENS = ("prompt", "tokens", "input")
"""Fields whose entries are token ids where the first one is a number."""
SLOWEST = 1024
"""Bytes a second that a client sends at least of a body, once its patience is over."""
MOST_WRONG = 1000
"""Values that are looked up to name some: those of a large object take seconds."""
FROM_A_PAGE = ("origin", "referer", "sec-fetch-site")
"""Headers of a browser's requests."""
Body = TypeVar("Body", bound=Wire)


def is_from_ollamas_example(request: Request) -> bool:
    """Return whether a request may be JSON that is not declared as such: Ollama's examples are
    curl's, which declares a form. A browser always says which page a request is from."""
    return routed(request.scope).startswith("/api/") and not any(
        name in request.headers for name in FROM_A_PAGE
    )


async def read(request: Request, kind: type[Body], limits: ApiLimits) -> Body:
    """The request's body, validated.

    JSON must be declared as such: a page in somebody's browser can post other types to this
    machine without asking.

    Raises:
        InvalidRequest: not declared as JSON, not JSON, or in a coding that nobody here reads.
        InvalidParameter: a value out of its range, or an unknown field when the owner is strict.
        RequestTooLarge: more than `limits.max_body` bytes, of which the rest is not read; or more
            pieces than may be.
        RequestNotReceived: nothing came for `limits.client_timeout` seconds, or too little.
    """
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared != "application/json" and not is_from_ollamas_example(request):
        raise InvalidRequest(
            f"Send the body with `Content-Type: application/json`, not {declared or 'without one'}."
        )
    coding = request.headers.get("content-encoding", "")
    sent = await _read_bytes(request, limits.max_body, limits.client_timeout)
    data = await decoded(bytes(sent), coding, limits.max_body)
    check_brackets(data)
    try:
        given = from_json(data)
    except ValueError:
        # A client that cuts a text may have cut a character in two.
        data = await _without_halves(data)
        given = _parsed(data)
    check_entries(given)
    param, messages = conversation(kind, given)
    check_pieces(param, messages, beside=chain(parts(given, SYSTEMS), tools(given)))
    await settle(request, given, limits)
    if len(data) > LARGE:
        await asyncio.sleep(0)
    try:
        body = kind.model_validate(given)
    except ValidationError:
        body = _validated(kind, data)
    if len(data) > LARGE:
        await asyncio.sleep(0)
    if limits.strict_fields and (unknown := body.unknown_fields()):
        raise InvalidParameter(f"Unknown fields: {_listed(unknown)}.", param=unknown[0])
    return body


def _parsed(data: bytes) -> Any:
    try:
        return from_json(data)
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None


async def _without_halves(data: bytes) -> bytes:
    """Return JSON with U+FFFD for each escaped half of a character that lacks the other."""
    pieces: list[bytes] = []
    done = 0
    for number, (start, end) in enumerate(halves(data), 1):
        pieces += data[done:start], REPLACEMENT
        done = end
        if number % AT_ONCE == 0:
            await asyncio.sleep(0)
    return b"".join((*pieces, data[done:]))


def _validated(kind: type[Body], data: bytes) -> Body:
    """Return the body, validated from its text.

    This is slower than validation of parsed JSON, and its errors speak of arrays instead of lists.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        if error.error_count() > MOST_WRONG:
            raise InvalidParameter(
                f"The body has {error.error_count()} wrong values, too many to name one."
            ) from None
        raise invalid(error.errors(include_url=False, include_context=True)) from None


def check_brackets(text: str | bytes) -> None:
    """Count the lists and objects of JSON before it is parsed.

    Raises:
        RequestTooLarge: there may be more than `MOST_BRACKETS`.
    """
    marks: Iterable[Any] = ("{", "[") if isinstance(text, str) else (b"{", b"[")
    count = sum(map(text.count, marks))
    if count > MOST_BRACKETS:
        raise RequestTooLarge(
            f"The body has {count} opening brackets; this server accepts {MOST_BRACKETS}."
        )


def check_entries(body: object) -> None:
    """Check the lengths of the lists and objects of a body, which is JSON.

    Raises:
        RequestTooLarge: one of them is too long.
    """
    for name, held in entries(body):
        are_tokens = name in TOKENS and isinstance(held, list) and isinstance(held[0], int)
        most = MOST_TOKENS if are_tokens else MOST_ENTRIES
        if len(held) > most:
            shown = _listed([name])
            raise RequestTooLarge(
                f"`{shown}` has {len(held)} entries; this server accepts {most}.", param=shown
            )


def check_pieces(
    param: str,
    messages: Sequence[object],
    *,
    beside: Iterable[object] = (),
    earlier: str = "",
) -> None:
    """Count the messages of a request, their content parts and calls, and what is `beside`.

    param: the field with the messages, which are JSON; "" if there is none. earlier: the field that
    stands for those of `messages` that were sent before.

    Raises:
        RequestTooLarge: there are more pieces than allowed.
    """
    fields = " and ".join(f"`{name}`" for name in (param, earlier) if name) or "The body"
    those = f"{fields} have" if earlier else f"{fields} has"
    every = chain(messages, beside, chain.from_iterable(map(parts, messages)))
    if sum(1 for _ in islice(every, MOST_PIECES + 1)) > MOST_PIECES:
        raise RequestTooLarge(
            f"{those} more than the {MOST_PIECES} messages, content parts, calls and tools that "
            "this server accepts.",
            param=param or None,
        )


def check_rows(asked: str, rows: int, param: str, limits: EngineLimits) -> None:
    """Check the number of answers that one request asks for.

    asked: beginning of the error's sentence: the fields that ask for them. param: the field to name
    in the error.

    Raises:
        InvalidRequest: there are more rows than an idle model could take in.
    """
    most = limits.max_rows + limits.max_waiting
    if rows > most:
        raise InvalidRequest(
            f"{asked} {rows} answers at once; this server takes at most {most} "
            "(MLX_SERVER_MAX_ROWS and MLX_SERVER_MAX_WAITING together).",
            param=param,
        )


async def _read_bytes(request: Request, limit: int, patience: float) -> bytearray:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    data = bytearray()
    clock = asyncio.get_running_loop().time
    begun = clock()
    try:
        async with aclosing(request.stream()) as chunks, asyncio.timeout(patience) as silence:
            async for chunk in chunks:
                data += chunk
                # A byte now and then is no progress.
                least = begun + patience + len(data) / SLOWEST
                silence.reschedule(min(clock() + patience, least))
                if len(data) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise RequestNotReceived(
            f"Nothing more of the body came for {patience:g} s, or less than {SLOWEST} bytes a "
            "second (MLX_SERVER_CLIENT_TIMEOUT_SECONDS)."
        ) from None
    return data


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"The body is larger than this server accepts ({limit / 2**20:g} MB; "
        "MLX_SERVER_MAX_BODY_MB)."
    )


def notes(body: Wire) -> dict[str, str]:
    """Return the response headers that name what has no effect, and log the same.

    `x-unknown-fields`: fields that nobody here knows. `x-ignored-tools`: tools that are offered,
    and that only a provider could run.
    """
    found = {
        "x-unknown-fields": ("fields that are unknown here", body.unknown_fields()),
        "x-ignored-tools": ("tools that nothing here runs", body.ignored_tools()),
    }
    headers: dict[str, str] = {}
    for header, (what, given) in found.items():
        if given:
            names = _listed(given)
            log.info("%s, without effect: %s", what, names)
            headers[header] = names
    return headers


def unheld_header(unheld: Iterable[str]) -> dict[str, str]:
    """Return the response header that names demands on the answer's form that aren't enforced."""
    names = list(dict.fromkeys(unheld))
    if not names:
        return {}
    return {"x-schema-not-enforced": _listed(names)}


def _listed(names: Sequence[str]) -> str:
    """Return a caller's names in ASCII with escapes, which is safe in a header and the log."""
    more = len(names) - MOST_NAMED
    shown = [ascii(name)[1:-1][:LONGEST_NAME] for name in names[:MOST_NAMED]]
    return ", ".join([*shown, f"and {more} more"] if more > 0 else shown)


class UntilHangup:
    """An async context whose body is cancelled as soon as the caller hangs up.

    Costs one task for the whole request and nothing a token. Enter it after the body has been
    read, and leave it before the response is complete: a server reports that, too, as a hang-up.

    Raises:
        ClientDisconnect: on leaving, if the caller hung up.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._hung_up = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.create_task(self._watch())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watcher.cancel()
        # It keeps this, and what has cancelled it, until it is looked for.
        del self._watcher
        if not self._hung_up:
            return
        ours = self._task.uncancel() == 0
        if ours and (kind is None or kind is asyncio.CancelledError):
            raise ClientDisconnect from None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._hung_up = True
        self._task.cancel()
