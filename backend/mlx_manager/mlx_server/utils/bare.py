"""Errors that a library gives no class of their own."""

from __future__ import annotations

from contextlib import ContextDecorator


class BareErrors(ContextDecorator):
    """Context in which a bare `Exception` becomes a ValueError whose text begins with `says`.

    The library tokenizers raises bare ones, such as over a tokenizer.json of a newer release.
    """

    def __init__(self, says: str) -> None:
        self._says = says

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if kind is Exception:
            raise ValueError(f"{self._says}: {error}") from error
