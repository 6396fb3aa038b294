"""Neighbouring messages of one role as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from mlx_manager.mlx_server.core import Message, Role
from mlx_manager.mlx_server.protocols.images import content_of


def merged(messages: Iterable[Message], roles: frozenset[Role]) -> Iterator[Message]:
    """`messages`, where those that follow each other in one of `roles` are one message."""
    for role, group in groupby(messages, key=lambda message: message.role):
        if role not in roles:
            yield from group
            continue
        said = list(group)
        yield _joined(said) if len(said) > 1 else said[0]


def _joined(messages: list[Message]) -> Message:
    return Message(
        messages[0].role,
        content_of(part for message in messages for part in message.parts),
        reasoning="\n".join(message.reasoning for message in messages if message.reasoning) or None,
        tool_calls=tuple(call for message in messages for call in message.tool_calls),
    )
