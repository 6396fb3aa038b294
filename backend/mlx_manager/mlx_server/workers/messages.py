"""The messages between the server and a worker, which holds one model.

A question has a number, by which its answer, its news and its end are told from others'. Messages
are pickled: both ends are the same program, started by the same user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_manager.mlx_server.config import EngineLimits, PoolLimits
from mlx_manager.mlx_server.core import (
    Conversation,
    EmbeddingRequest,
    Event,
    GenerationRequest,
    Prompt,
    RerankRequest,
    RowStatus,
)
from mlx_manager.mlx_server.errors import MLXManagerError
from mlx_manager.mlx_server.models.catalog import ModelSource
from mlx_manager.mlx_server.models.settings import Recipe

# ---------------------------------------------------------------------------------------------
# To the worker
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A draft model. required: the model is not to be loaded without it."""

    source: ModelSource
    recipe: Recipe
    required: bool


@dataclass(frozen=True, slots=True)
class Prepare:
    """Read all of a model but its weights; the answer is the bytes that these take.

    memory: bytes that all models may take. draft: drafts for it. head: has the MTP head that the
    recipe names, if it names one.
    """

    source: ModelSource
    recipe: Recipe
    limits: PoolLimits
    engine: EngineLimits
    memory: int
    draft: DraftSource | None = None
    head: ModelSource | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Load the model that has been prepared last; the answer is its `ModelFacts`."""


@dataclass(frozen=True, slots=True)
class Generate:
    """Answer the request; its events come as `News`."""

    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Embed:
    """Make a vector of each input; the answer is `core.Encoded`, and `Begun` comes before it."""

    request: EmbeddingRequest


@dataclass(frozen=True, slots=True)
class Rank:
    """Score each document; as `Embed`."""

    request: RerankRequest


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Make tokens of a prompt; the answer is `core.Tokenized`.

    special: with the model's BOS. texts: also as texts.
    """

    prompt: Prompt
    special: bool = True
    texts: bool = False


@dataclass(frozen=True, slots=True)
class LeavesRoom:
    """Say whether an answer as long as is asked for, or half the context long, can follow."""

    request: GenerationRequest


@dataclass(frozen=True, slots=True)
class Detokenize:
    """Make the text of tokens, special ones included."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Render:
    """Make the text that the model gets to see of a conversation."""

    conversation: Conversation


@dataclass(frozen=True, slots=True)
class DropPrefixes:
    """Forget the prompts that are kept for reuse; the answer is the bytes given back."""


@dataclass(frozen=True, slots=True)
class Look:
    """Answer with `WorkerFigures`."""


Question = (
    Prepare
    | Load
    | Generate
    | Embed
    | Rank
    | Tokenize
    | LeavesRoom
    | Detokenize
    | Render
    | DropPrefixes
    | Look
)


@dataclass(frozen=True, slots=True)
class Ask:
    """A question; `key` is the name of the caller's API key, since keys take turns.

    Those to `Generate` come as lists, in which requests that share a prompt share it here, too.
    """

    number: int
    question: Question
    key: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this question's answer any more."""

    number: int


@dataclass(frozen=True, slots=True)
class Granted:
    """The answer to `Need`: so many more bytes may be used, or 0. beyond: as in `Beyond`."""

    nbytes: int
    beyond: int


@dataclass(frozen=True, slots=True)
class Beyond:
    """So many bytes could be had now on top of what is granted, if somebody needed them badly."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Give back up to `nbytes` of what is granted and not used; the answer is `GaveBack`.

    kept: also what is only kept for reuse.
    """

    nbytes: int
    kept: bool


# ---------------------------------------------------------------------------------------------
# From the worker
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The worker's first message. device: its name. limit: bytes that models may take by default,
    of the `memory` that the device has."""

    device: str
    memory: int
    limit: int


@dataclass(frozen=True, slots=True)
class Doing:
    """A load has begun to do this, in a person's words."""

    what: str


@dataclass(frozen=True, slots=True)
class Need:
    """More memory is needed; the answer is `Granted`. urgent: somebody waits for it."""

    nbytes: int
    urgent: bool


@dataclass(frozen=True, slots=True)
class GaveBack:
    """So many bytes fewer are used from now on than were granted."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class DeviceFull:
    """The device has turned out to have so many bytes less than was thought."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Using:
    """Bytes in use of what was granted, and how many of them are only kept for reuse."""

    nbytes: int
    kept: int


@dataclass(frozen=True, slots=True)
class Alive:
    """A sign of life while there is work. silence: seconds since a step was done."""

    silence: float


@dataclass(frozen=True, slots=True)
class Broken:
    """The last message of a worker that can't go on, with the reason in a person's words."""

    why: str


@dataclass(frozen=True, slots=True)
class Begun:
    """An encoder has begun with a question."""

    number: int


RowNews = tuple[int, int, str | list[Event]]
"""A question's number, the tokens drawn for it so far, and its events; a text is one `TextDelta`
without log-probabilities, as most are."""


@dataclass(frozen=True, slots=True)
class News:
    """Events of all rows that a step had any for."""

    rows: list[RowNews]


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to a question; that to `Generate` are its news."""

    number: int
    result: Any = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A question's answer is an error."""

    number: int
    error: MLXManagerError


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """A worker's figures. ledger, memory: bytes. engine: its statistics; None before the load.
    rows: those that have not ended."""

    ledger: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    engine: Mapping[str, Any] | None = None
    rows: Sequence[RowStatus] = ()
